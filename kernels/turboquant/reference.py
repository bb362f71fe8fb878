"""TurboQuant, written to be read beside the formulas.

A row k of a head has n = |k| and the unit row u = R k / n, whose coordinates are close to normal with
variance 1/d whatever k was. With c the levels of that density:

    keys        code_i = cell of u_i     r = u - c[code]     rho = |r|     sign_i = sign of (R' r)_i
                <q, k>  ~  n (sum_i c[code_i] (R q)_i + rho K sum_i sign_i (R' R q)_i)
    values      code_i = cell of u_i     sum_t p_t v_t  ~  R^-1 sum_t p_t n_t c[code_t]
    plain keys  three bits a code, no signs, K = 0

Rotations are linear: the query is rotated once, values are rotated back once, and stored rows are never
written out as numbers. What is left over has to be weighed by K, see `Estimator`. Norms are taken in
float32, channel after channel, and kept in float16.

**Source:** TurboQuant, Zandieh et al., arXiv 2504.19874; QJL, arXiv 2406.03482. Orthonormal rows
instead of normal ones of length sqrt(d) put sqrt(d) into K where the papers have d.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32
from warmkv.kernels.errors import KernelError
from warmkv.kernels.turboquant.levels import Levels, levels
from warmkv.kernels.turboquant.packing import pack, unpack
from warmkv.kernels.turboquant.planes import F16, KeyPlanes, NormRefused, PlainKeyPlanes, Planes, ValuePlanes
from warmkv.kernels.turboquant.rotation import Rotation

#: Rows shorter than this are stored as zeros, residuals shorter than this have no signs.
TINY = np.float32(1e-12)
#: Rows whose codes are unpacked at once.
_CHUNK = 256


class Estimator(Enum):
    """How much the signs of a residual count. Stored bytes do not depend on it.

    UNBIASED has no error on average. MINIMUM_MSE has the smallest one on average and pulls products
    with like rows towards zero. CERA_COMPAT is what the CERA runtime 0.5.0 computes: sqrt(d) times
    too small, hence biased nearly as much as codes without signs."""

    UNBIASED = "unbiased"
    MINIMUM_MSE = "minimum_mse"
    CERA_COMPAT = "cera_compat"

    def kappa(self, size: int) -> float:
        """K of scores."""
        if self is Estimator.CERA_COMPAT:
            return float(np.sqrt(np.pi / 2) / size)
        return self.gain(size)

    def gain(self, size: int) -> float:
        """K of reconstructed rows; the CERA runtime has another one there."""
        of_unit = {Estimator.UNBIASED: np.pi / 2, Estimator.MINIMUM_MSE: 2 / np.pi, Estimator.CERA_COMPAT: 1.0}
        return float(np.sqrt(of_unit[self] / size))


def encode_keys(rows: F32, rotation: Rotation, *, position: int = 0) -> KeyPlanes:
    """Store ``rows`` (n, heads, size) float32, the first of them at ``position``.

    Raises NormRefused for a row that is not finite or too long for float16, KernelError."""
    table = levels(rotation.size, 2)
    rotated, norms = _unit(rows, rotation, "keys", position)
    codes = table.codes(rotated)
    left = rotated - table.centroids[codes]
    rho = length(left)
    signed = (norms != 0) & (rho > TINY)
    divisor: F32 = np.where(signed, rho, np.float32(1))
    flat = rotation.forward_jl(left / divisor[..., None])
    bits = ((flat >= 0) & signed[..., None]).astype(np.uint8)
    codes[norms == 0] = 0
    rho[norms == 0] = 0
    return KeyPlanes(rotation.size, pack(codes, 2), _half(norms), pack(bits, 1), _half(rho))


def encode_values(rows: F32, rotation: Rotation, *, position: int = 0) -> ValuePlanes:
    """As `encode_keys`, for values."""
    codes, norms = _codes(rows, rotation, levels(rotation.size, 2), "values", position)
    return ValuePlanes(rotation.size, pack(codes, 2), norms)


def encode_plain_keys(rows: F32, rotation: Rotation, *, position: int = 0) -> PlainKeyPlanes:
    """As `encode_keys`, into format `tq3`."""
    codes, norms = _codes(rows, rotation, levels(rotation.size, 3), "keys", position)
    return PlainKeyPlanes(rotation.size, pack(codes, 3), norms)


def scores(
    q: F32, keys: KeyPlanes | PlainKeyPlanes, rotation: Rotation, *, scale: float = 1.0,
    estimator: Estimator = Estimator.UNBIASED,
) -> F32:  # fmt: skip
    """Estimates of scale * <q, k>, (queries, rows) float32, for queries ``q`` (queries, size) float32 and
    the keys of one head. Raises KernelError."""
    check_query(q, keys, rotation)
    turned = rotation.forward(q)
    again = rotation.forward_jl(turned)
    out = np.empty((q.shape[0], len(keys)), np.float32)
    table = levels(keys.size, keys.bits["codes"]).centroids
    kappa = np.float32(estimator.kappa(keys.size))
    for first in range(0, len(keys), _CHUNK):
        part = keys.rows(first, first + _CHUNK)
        values = table[unpack(part.codes, part.bits["codes"])]
        norms = part.norms.astype(np.float32) * np.float32(scale)
        for query in range(q.shape[0]):
            found: F32 = np.add.reduce(values * turned[query], axis=1, dtype=np.float32)
            if isinstance(part, KeyPlanes):
                flipped = np.where(unpack(part.signs, 1) == 1, again[query], -again[query])
                found = found + part.residuals.astype(np.float32) * kappa * np.add.reduce(flipped, axis=1, dtype=np.float32)
            out[query, first : first + len(part)] = norms * found
    return out


def weigh(weights: F32, values: ValuePlanes) -> F32:
    """sum_t weight_t v_t, (queries, size) float32, still rotated, for ``weights`` (queries, rows) float32
    and the values of one head. Sums of rows stored under equal rotations may be added before
    `unrotate` is called once. Raises KernelError."""
    check_weights(weights, values)
    table = levels(values.size, 2).centroids
    total = np.zeros((weights.shape[0], values.size), np.float64)
    for first in range(0, len(values), _CHUNK):
        part = values.rows(first, first + _CHUNK)
        rows = table[unpack(part.codes, 2)]
        scaled = weights[:, first : first + len(part)] * part.norms.astype(np.float32)
        for query in range(weights.shape[0]):
            total[query] += np.add.reduce(scaled[query, :, None] * rows, axis=0, dtype=np.float64)
    return total.astype(np.float32)


def reconstruct(
    planes: Planes, rotation: Rotation, *, estimator: Estimator = Estimator.MINIMUM_MSE, gain: float | None = None
) -> F32:
    """The rows (..., size) float32 that planes stand for, as a copy. ``estimator`` matters to keys with
    signs only; the default comes closest to what was stored. ``gain`` is used instead of the estimator's:
    with its kappa, products with these rows are its scores. Raises KernelError."""
    check_size(planes, rotation)
    planes.check(planes.norms.ndim, "planes")
    bits = planes.bits["codes"]
    unit = levels(planes.size, bits).centroids[unpack(planes.codes, bits)]
    if isinstance(planes, KeyPlanes):
        flat = unpack(planes.signs, 1).astype(np.float32) * np.float32(2) - np.float32(1)
        weight = np.float32(estimator.gain(planes.size) if gain is None else gain)
        unit = unit + (planes.residuals.astype(np.float32) * weight)[..., None] * rotation.inverse_jl(flat)
    return planes.norms.astype(np.float32)[..., None] * rotation.inverse(unit)


def unrotate(rows: F32, rotation: Rotation) -> F32:
    """``rows`` (queries, size) float32 of `weigh` as they were before rotation, as a copy. Raises KernelError."""
    check_turned(rows, rotation)
    return rotation.inverse(rows)


def check_turned(rows: F32, rotation: Rotation) -> None:
    """Raises KernelError unless sums may be rotated back."""
    if rows.ndim != 2 or rows.dtype != np.float32 or rows.shape[1] != rotation.size:
        raise KernelError(f"sums are {rows.dtype} of shape {rows.shape}, expected float32 (queries, {rotation.size})")


def check_query(q: F32, keys: Planes, rotation: Rotation) -> None:
    """Raises KernelError unless queries and the keys of one head fit together."""
    check_size(keys, rotation)
    keys.check(1, "keys of one head")
    if q.ndim != 2 or q.dtype != np.float32 or q.shape[1] != keys.size:
        raise KernelError(f"queries are {q.dtype} of shape {q.shape}, expected float32 (queries, {keys.size})")


def check_weights(weights: F32, values: ValuePlanes) -> None:
    """Raises KernelError unless there is a weight for every row of one head."""
    values.check(1, "values of one head")
    if weights.ndim != 2 or weights.dtype != np.float32 or weights.shape[1] != len(values):
        raise KernelError(f"weights are {weights.dtype} of shape {weights.shape}, expected float32 (queries, {len(values)})")


def check_rows(rows: F32, rotation: Rotation) -> None:
    """Raises KernelError unless rows of a layer may be encoded."""
    if rows.ndim != 3 or rows.dtype != np.float32 or rows.shape[2] != rotation.size:
        raise KernelError(f"rows are {rows.dtype} of shape {rows.shape}, expected float32 (n, heads, {rotation.size})")


def require_norms(norms: F32, what: str, position: int) -> None:
    """Raises NormRefused that names the first row of lengths (n, heads) float16 cannot hold."""
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(norms.astype(np.float16))
    if bad.any():
        row, head = (int(index) for index in np.argwhere(bad)[0])
        raise NormRefused(what, row, head, position + row, float(norms[row, head]))


def _codes(rows: F32, rotation: Rotation, table: Levels, what: str, position: int) -> tuple[npt.NDArray[np.uint8], F16]:
    rotated, norms = _unit(rows, rotation, what, position)
    codes = table.codes(rotated)
    codes[norms == 0] = 0
    return codes, _half(norms)


def _unit(rows: F32, rotation: Rotation, what: str, position: int) -> tuple[F32, F32]:
    """Rotated rows of length 1, and lengths, 0 for those too short to have a direction."""
    check_rows(rows, rotation)
    norms = length(rows)
    require_norms(norms, what, position)
    norms[norms < TINY] = 0
    inverse = np.where(norms == 0, np.float32(0), np.float32(1) / np.where(norms == 0, np.float32(1), norms))
    return rotation.forward(rows * inverse[..., None]), norms


def length(rows: F32) -> F32:
    """Euclidean length along the last axis, squares added one after the other."""
    with np.errstate(over="ignore", invalid="ignore"):
        length: F32 = np.sqrt(np.cumsum(rows * rows, axis=-1, dtype=np.float32)[..., -1])
    return length


def _half(norms: F32) -> F16:
    return norms.astype("<f2")


def check_size(planes: Planes, rotation: Rotation) -> None:
    """Raises KernelError unless planes may have been rotated so."""
    if planes.size != rotation.size:
        raise KernelError(f"planes of {planes.size} channels with a rotation of {rotation.size}")
