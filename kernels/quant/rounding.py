"""How numbers become whole ones, and scales float16, wherever a format says so."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32
from warmkv.kernels.errors import TooLarge

_HALF = np.dtype("<f2")


def half_away(x: F32) -> F32:
    """To the nearest whole number, halves away from zero."""
    whole = np.trunc(x)
    return whole + np.where(np.abs(x - whole) >= np.float32(0.5), np.sign(x), np.float32(0)).astype(np.float32)


def to_half(scales: F32) -> npt.NDArray[np.float16]:
    """Scales (rows, ...) as little-endian float16, to the nearest, ties to even. Raises TooLarge that names the
    first row with one that float16 does not reach."""
    with np.errstate(over="ignore"):
        half = scales.astype(_HALF)
    bad = np.isinf(half).any(axis=tuple(range(1, half.ndim)))
    if bad.any():
        row = int(np.argmax(bad))
        raise TooLarge(f"row {row} has numbers whose scale is too large for float16", row)
    return half
