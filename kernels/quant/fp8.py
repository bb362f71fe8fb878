"""fp8 of the variant e4m3fn, a byte a channel and no scale: written to be read beside the formulas.

A byte is sign (1), exponent e (4) and mantissa m (3). It stands for

    (-1)^sign * (8 + m) * 2^(e - 10)        for e > 0
    (-1)^sign * m * 2^-9                    for e = 0, down to 2^-9 and zero
    NaN                                     for 0x7f and 0xff; there is no infinity

Numbers go to the nearest, ties to the even mantissa. Finite ones beyond 448, the largest there is, become
448: a cast that lets 465 become NaN would spread it over every answer. Zeros keep their sign.

The variants e4m3fnuz, e5m2 and e5m2fnuz give other meanings to the same bytes; they are other formats.

**Source:** Micikevicius et al., arXiv 2209.05433; the saturating conversion is that of CUDA's `__nv_fp8_e4m3`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32

U8 = npt.NDArray[np.uint8]
#: The largest number there is.
LARGEST = np.float32(448)
#: Exponent of the smallest numbers of full precision.
_LOWEST = -6


def _values() -> F32:
    bytes_ = np.arange(256)
    sign, e, m = np.where(bytes_ & 0x80, -1.0, 1.0), bytes_ >> 3 & 15, bytes_ & 7
    magnitude = np.where(e > 0, np.ldexp(8.0 + m, e - 10), np.ldexp(m, -9))
    values: F32 = (sign * np.where(bytes_ & 0x7F == 0x7F, np.nan, magnitude)).astype(np.float32)
    values.flags.writeable = False
    return values


#: (256,) float32: what each byte stands for.
VALUES = _values()


def encode(rows: F32) -> U8:
    """Finite float32 numbers of any shape as bytes of that shape."""
    magnitude = np.minimum(np.abs(rows), LARGEST)
    _, exponent = np.frexp(magnitude)  # magnitude = f * 2^exponent, 1/2 <= f < 1
    exponent = np.maximum(np.where(magnitude > 0, exponent - 1, _LOWEST), _LOWEST)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent))  # 8 to 16 of them, fewer below the smallest exponent
    code = (exponent - _LOWEST) * 8 + steps.astype(np.int32)  # 16 steps carry into the exponent
    return np.asarray(code | np.where(np.signbit(rows), 0x80, 0), np.uint8)


def decode(codes: npt.NDArray[np.generic]) -> F32:
    """What bytes stand for; NaN where they say so, which no encoder writes."""
    rows: F32 = VALUES[codes]
    return rows
