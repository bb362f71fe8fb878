"""The exponential of numbers that are not above 0, as softmax needs it, for compiled loops.

A polynomial of degree six after powers of two were taken out: within 2e-7 of the truth, and without a
call, so that loops over it become vector instructions. Below e^-87 it is 0, where the next numbers
would be denormal: no sum that contains its own maximum can tell.

**Source:** Cody and Waite's reduction with the coefficients of expf in the Cephes library.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LOWEST = np.float32(-87.0)
LOG2_E, LN2_HIGH, LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
P5, P4, P3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
P2, P1, P0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
HALF, ONE, ZERO = np.float32(0.5), np.float32(1), np.float32(0)
#: fastmath of our loops: sums may be reordered and fused, NaN and infinity keep their meaning.
LOOSE = {"reassoc", "contract", "nsz", "arcp"}


@njit(inline="always")
def exp_below(x: Any) -> Any:
    """e^x of a float32 that is not above 0; NaN stays NaN."""
    inside = LOWEST if x < LOWEST else x
    power = np.floor(inside * LOG2_E + HALF)
    rest = inside - power * LN2_HIGH - power * LN2_LOW
    series = ((((P5 * rest + P4) * rest + P3) * rest + P2) * rest + P1) * rest + P0
    value = series * rest * rest + rest + ONE
    value *= np.uint32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return ZERO if x < LOWEST else value
