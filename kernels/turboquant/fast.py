"""TurboQuant compiled: the twin of `reference`, with its signatures and, for encoders, its bytes.

Levels are symmetric, so that with s = +-1 for each bit of a code

    two bits     c = A s1 + B s0                           A = (c3 + c2)/2     B = (c3 - c2)/2
    three bits   c = A2 s2 + A1 s1 + A0 s0 + P s2 s1 s0    s2 s1 s0 = the sign of b2 xor b1 xor b0

and a sum with signs is twice the sum where bits are set less the sum of all: see `lanes`. Encoders are in
`tiles`. Needs numba; compiled code is cached beside its module.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from warmkv.kernels.formats import F32
from warmkv.kernels.turboquant.lanes import LANES, score_bits, score_plain_bits, weigh_bits
from warmkv.kernels.turboquant.levels import levels
from warmkv.kernels.turboquant.packing import unpack
from warmkv.kernels.turboquant.planes import KeyPlanes, PlainKeyPlanes, Planes, ValuePlanes
from warmkv.kernels.turboquant.reference import (
    TINY,
    Estimator,
    check_query,
    check_rows,
    check_size,
    check_turned,
    check_weights,
    require_norms,
)
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.tiles import encode_rows, turn_rows

#: The eight signs of each byte.
_EIGHTS: F32 = unpack(np.arange(256, dtype=np.uint8)[:, None], 1).astype(np.float32) * 2 - 1
P = TypeVar("P", KeyPlanes, ValuePlanes, PlainKeyPlanes)


def encode_keys(rows: F32, rotation: Rotation, *, position: int = 0) -> KeyPlanes:
    """See `reference.encode_keys`."""
    return _encode(KeyPlanes, rows, rotation, "keys", position)


def encode_values(rows: F32, rotation: Rotation, *, position: int = 0) -> ValuePlanes:
    """See `reference.encode_values`."""
    return _encode(ValuePlanes, rows, rotation, "values", position)


def encode_plain_keys(rows: F32, rotation: Rotation, *, position: int = 0) -> PlainKeyPlanes:
    """See `reference.encode_plain_keys`."""
    return _encode(PlainKeyPlanes, rows, rotation, "keys", position)


def scores(
    q: F32, keys: KeyPlanes | PlainKeyPlanes, rotation: Rotation, *, scale: float = 1.0,
    estimator: Estimator = Estimator.UNBIASED,
) -> F32:  # fmt: skip
    """See `reference.scores`."""
    check_query(q, keys, rotation)
    plain = _plus(rotation.size)
    turned = _turn(q, rotation.polar, plain, rotation)
    out = np.empty((q.shape[0], len(keys)), np.float32)
    codes, apart = _flat(keys.codes)
    norms, norms_apart = _flat(keys.norms[:, None].view(np.uint16))
    upper = _upper(keys.size, keys.bits["codes"])
    if isinstance(keys, KeyPlanes):
        again = _turn(turned, rotation.jl, plain, rotation)
        kappa = np.float32(estimator.kappa(keys.size))
        pairs = np.stack([turned * (upper[1] - upper[0]), turned * (upper[1] + upper[0])], axis=-1)
        signs, signs_apart = _flat(keys.signs)
        rho, rho_apart = _flat(keys.residuals[:, None].view(np.uint16))
        score_bits(
            codes, apart, signs, signs_apart, norms, norms_apart, rho, rho_apart, _table(pairs.reshape(q.shape[0], -1)),
            _table(again * (2 * kappa)), np.float32(scale), out,
        )  # fmt: skip
        return out
    table = np.concatenate([turned * weight for weight in _plain_weights(upper)], axis=1)
    score_plain_bits(codes, apart, norms, norms_apart, _table(table), np.float32(scale), out)
    return out


def weigh(weights: F32, values: ValuePlanes) -> F32:
    """See `reference.weigh`."""
    check_weights(weights, values)
    codes, apart = _flat(values.codes)
    norms, norms_apart = _flat(values.norms[:, None].view(np.uint16))
    sums = np.zeros((weights.shape[0], 2 * values.size), np.float64)
    weigh_bits(_frozen(np.ascontiguousarray(weights)), codes, apart, norms, norms_apart, sums)
    upper = _upper(values.size, 2).astype(np.float64)
    pairs = sums.reshape(weights.shape[0], values.size, 2)
    total = pairs[..., 0] * ((upper[1] - upper[0]) / 2) + pairs[..., 1] * ((upper[1] + upper[0]) / 2)
    narrow: F32 = total.astype(np.float32)
    return narrow


def unrotate(rows: F32, rotation: Rotation) -> F32:
    """See `reference.unrotate`."""
    check_turned(rows, rotation)
    return _turn(rows, _plus(rotation.size), rotation.polar, rotation)


def reconstruct(planes: Planes, rotation: Rotation, *, gain: float) -> F32:
    """See `reference.reconstruct`, of planes (rows, ...) of one head: equal within rounding."""
    check_size(planes, rotation)
    planes.check(1, "planes of one head")
    count, size, bits = len(planes), planes.size, planes.bits["codes"]
    if bits == 2:
        unit = np.take(_fours(size), planes.codes, axis=0).reshape(count, size)
    else:
        unit = levels(size, bits).centroids[unpack(planes.codes, bits)]
    plain = _plus(size)
    if isinstance(planes, KeyPlanes):
        back = _turn(np.take(_EIGHTS, planes.signs, axis=0).reshape(count, size), plain, rotation.jl, rotation)
        back *= (planes.residuals.astype(np.float32) * np.float32(gain))[:, None]
        unit += back
    out = _turn(unit, plain, rotation.polar, rotation)
    out *= planes.norms.astype(np.float32)[:, None]
    return out


def _turn(rows: F32, before: F32, after: F32, rotation: Rotation) -> F32:
    out = np.empty(rows.shape, np.float32)
    turn_rows(_frozen(np.ascontiguousarray(rows)), before, after, rotation.mix, rotation.scale, out)
    return out


@lru_cache(maxsize=64)
def _upper(size: int, bits: int) -> F32:
    """The positive levels."""
    return levels(size, bits).centroids[1 << (bits - 1) :]


@lru_cache(maxsize=64)
def _fours(size: int) -> F32:
    """The four levels of each byte of two-bit codes."""
    return _frozen(levels(size, 2).centroids[unpack(np.arange(256, dtype=np.uint8)[:, None], 2)])


@lru_cache(maxsize=64)
def _plus(size: int) -> F32:
    return _frozen(np.ones(size, np.float32))


def _encode(kind: type[P], rows: F32, rotation: Rotation, what: str, position: int) -> P:
    check_rows(rows, rotation)
    count, heads, size = rows.shape
    planes, total = kind.empty(count, heads, size), count * heads
    table = levels(size, kind.bits["codes"])
    norms, rho = np.empty((count, heads), np.float32), np.empty((count, heads), np.float32)
    signs = planes.signs if isinstance(planes, KeyPlanes) else np.empty((count, heads, 0), np.uint8)
    encode_rows(
        _frozen(np.ascontiguousarray(rows).reshape(total, size)), rotation.polar, rotation.jl, rotation.mix, rotation.scale,
        table.bounds, table.centroids, planes.codes.reshape(total, planes.codes.shape[2]),
        signs.reshape(total, signs.shape[2]), norms.reshape(total), rho.reshape(total),
    )  # fmt: skip
    require_norms(norms, what, position)
    planes.norms[...] = np.where(norms < TINY, np.float32(0), norms)
    if isinstance(planes, KeyPlanes):
        planes.residuals[...] = rho
    return planes


def _table(entries: F32) -> tuple[F32, F32, int]:
    """Entries (queries, bits) flat with what has to be readable behind them, half of each query's sum, and
    the bytes of as many bits."""
    flat = np.concatenate([entries.ravel(), np.zeros(LANES, np.float32)])
    return flat, np.float32(0.5) * entries.sum(axis=1, dtype=np.float32), entries.shape[1] // 8


def _plain_weights(upper: F32) -> tuple[np.float32, ...]:
    """Twice A0, A1, A2 and P."""
    c4, c5, c6, c7 = upper.astype(np.float64)
    sums = (-c4 + c5 - c6 + c7, -c4 - c5 + c6 + c7, c4 + c5 + c6 + c7, c4 - c5 - c6 + c7)
    return tuple(np.float32(total / 2) for total in sums)


def _flat(rows: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """A flat read-only view of ``rows`` (count, width) and how many elements apart they begin. Copies
    only what does not lie in whole elements."""
    count, width = rows.shape
    item = rows.itemsize
    if count == 0:
        return _frozen(np.empty(0, rows.dtype)), width
    apart = rows.strides[0] if count > 1 else width * item
    if apart % item or apart < width * item or (width > 1 and rows.strides[1] != item) or not rows.flags.aligned:
        rows, apart = np.ascontiguousarray(rows), width * item
    return as_strided(rows, ((count - 1) * (apart // item) + width,), (item,), writeable=False), apart // item


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
