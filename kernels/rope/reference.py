"""Rotary position embedding, written to be read beside the formulas.

    theta_i(p) = p * base^(-2i/r) / f_i                                         i = 0 .. r/2 - 1
    (a, b) -> (a cos theta - b sin theta, a sin theta + b cos theta)            for every pair of channels

over the first r channels of a head; the rest stay as they are. Rotations about one pair add up, so a
stored key moves from position p to p + delta by R(delta): no unrotated key is needed, and values have
no part in it. Angles are taken in float64 and their sines rounded once, for a float32 recurrence is off
by some 9e-8 radians a position. A model's attention scale (YaRN) is a factor of what was stored, so a
shift leaves it alone.

**Source:** Su et al., arXiv 2104.09864; frequency factors of Llama 3: Dubey et al., arXiv 2407.21783.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import F32

F64 = npt.NDArray[np.float64]
#: Rows turned at once: what is wide is not the whole plane.
_CHUNK = 1024


class Pairs(Enum):
    """Which channels turn together: (i, i + r/2), or (2i, 2i + 1)."""

    NEOX = "neox"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class Rope:
    """How a model rotates heads of ``size`` channels: everything that has to be equal for stored keys to
    fit. ``rotary`` channels turn (None: all). ``factors`` (rotary / 2) divide frequencies.
    ``attention_scale`` multiplies rows that are rotated for the first time."""

    size: int
    base: float
    pairs: Pairs
    rotary: int | None = None
    factors: tuple[float, ...] | None = None
    attention_scale: float = 1.0

    def __post_init__(self) -> None:
        # Equal ropes are told alike in a lineage, whatever kind of number a model's files had.
        object.__setattr__(self, "base", float(self.base))
        object.__setattr__(self, "attention_scale", float(self.attention_scale))
        if self.factors is not None:
            object.__setattr__(self, "factors", tuple(map(float, self.factors)))
        if self.size < 1 or self.turned % 2 or not 0 <= self.turned <= self.size:
            raise KernelError(f"{self.turned} rotary channels of {self.size}, expected an even number of them")
        if not (math.isfinite(self.base) and self.base > 0 and math.isfinite(self.attention_scale)):
            raise KernelError(f"base {self.base} with attention scale {self.attention_scale}")
        if self.factors is not None:
            if len(self.factors) != self.turned // 2:
                raise KernelError(f"{len(self.factors)} frequency factors for {self.turned // 2} pairs of channels")
            if not all(math.isfinite(factor) and factor > 0 for factor in self.factors):
                raise KernelError("frequency factors have to be finite and above 0")

    @property
    def turned(self) -> int:
        """r, the channels that turn."""
        return self.size if self.rotary is None else self.rotary

    def frequencies(self) -> F64:
        """(r/2,) radians a position."""
        exponents = -2.0 * np.arange(self.turned // 2) / max(1, self.turned)
        plain: F64 = np.float64(self.base) ** exponents
        return plain if self.factors is None else plain / np.array(self.factors, np.float64)

    def differs(self, other: Rope) -> str | None:
        """What keys rotated by one and by the other do not share; None: they may be mixed."""
        for name in ("size", "base", "pairs", "turned", "divisors", "attention_scale"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine} here, {theirs} there"
        return None

    @property
    def divisors(self) -> tuple[float, ...]:
        """The frequency factors, 1 where there are none."""
        return (1.0,) * (self.turned // 2) if self.factors is None else self.factors


def rotate(rows: F32, positions: npt.NDArray[np.integer[Any]], rope: Rope) -> F32:
    """``rows`` (n, ..., size) float32, not yet rotated, at ``positions`` (n,), as a copy: what a forward
    pass does. Raises KernelError."""
    if rows.dtype != np.float32:
        raise KernelError(f"rows are {rows.dtype}, expected float32")
    _check(rows, positions, rope)
    turned = _turn(rows, positions, rope)
    if rope.attention_scale != 1.0:
        turned *= np.float32(rope.attention_scale)
    return turned


def shift(keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope) -> npt.NDArray[Any]:
    """Stored ``keys`` (n, ..., size), float32 or float16, moved by ``delta`` positions: one number or one a
    row, negative ones move towards the beginning. A copy of the same dtype; halves are widened, turned
    in float32 and rounded to nearest even, which costs some 3e-4 (relative RMS) a shift.

    Raises NotFinite for a number that would overflow, KernelError for keys of another format."""
    deltas = deltas_of(keys, delta, rope)
    out = np.empty_like(keys)
    for first in range(0, len(keys), _CHUNK):
        part = keys[first : first + _CHUNK]
        with np.errstate(over="ignore", invalid="ignore"):
            out[first : first + len(part)] = _turn(part.astype(np.float32, copy=False), deltas[first : first + len(part)], rope)
        grown = ~np.isfinite(out[first : first + len(part)]).all(axis=-1) & np.isfinite(part).all(axis=-1)
        if grown.any():
            row = first + int(np.argwhere(grown)[0, 0])
            raise NotFinite(f"row {row} moved by {deltas[row]} is too large for {keys.dtype.name}", row)
    return out


def shift_in_place(keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope) -> None:
    """`shift` where the keys lie. Raises what it raises, and KernelError for keys that are read-only; nothing
    is turned then."""
    if not keys.flags.writeable:
        raise KernelError("keys that are read-only cannot be turned where they lie")
    keys[...] = shift(keys, delta, rope)


def deltas_of(
    keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope
) -> npt.NDArray[np.integer[Any]]:  # fmt: skip
    """How far each of the stored keys goes, once all fits. Raises KernelError."""
    if keys.dtype not in (np.dtype("<f4"), np.dtype("<f2")):
        raise KernelError(
            f"keys are {keys.dtype}: only float32 and float16 keys can be moved. A rotation does not commute with "
            f"quantisation: decode, shift and encode them anew, which loses precision, or compute the tokens again"
        )
    deltas = delta if isinstance(delta, np.ndarray) else np.full(keys.shape[:1], delta)
    _check(keys, deltas, rope)
    return deltas


def llama3_factors(base: float, size: int, *, factor: float, low: float, high: float, original: int) -> tuple[float, ...]:
    """The frequency factors (size / 2) that stretch a context of ``original`` tokens: short wavelengths stay,
    long ones are divided by ``factor``, between ``original / high`` and ``original / low`` they blend."""
    found = []
    for index in range(size // 2):
        wavelength = 2 * math.pi * base ** (2 * index / size)
        if wavelength < original / high:
            found.append(1.0)
        elif wavelength > original / low:
            found.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(found)


def _check(rows: npt.NDArray[Any], positions: npt.NDArray[Any], rope: Rope) -> None:
    if rows.ndim < 2 or rows.shape[-1] != rope.size:
        raise KernelError(f"rows have shape {rows.shape}, expected (n, ..., {rope.size})")
    if positions.shape != rows.shape[:1] or positions.dtype.kind not in "iu":
        raise KernelError(f"positions are {positions.dtype} of shape {positions.shape}, expected whole numbers, {rows.shape[:1]}")


def sines(positions: npt.NDArray[Any], rope: Rope) -> tuple[F32, F32]:
    """Cosines and sines (positions, rotary / 2) of the angles at ``positions`` (n,)."""
    angles = positions.astype(np.float64)[:, None] * rope.frequencies()
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _turn(rows: F32, positions: npt.NDArray[Any], rope: Rope) -> F32:
    half = rope.turned // 2
    lead = (len(rows), *[1] * (rows.ndim - 2), half)
    cos, sin = (part.reshape(lead) for part in sines(positions, rope))
    out = rows.copy()
    if rope.pairs is Pairs.NEOX:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = rows[..., first], rows[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out
