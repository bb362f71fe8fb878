"""What a coordinate of a randomly rotated unit vector is rounded to: the Lloyd-Max levels of its density.

    f_d(t) ~ (1 - t^2)^((d-3)/2) on [-1, 1]        level = E[t | cell]        bound = midpoint of two levels

Levels are symmetric and the middle bound is exactly 0. Those of the usual head sizes are shipped as
bits, since stored rows mean nothing without them; others are computed once. `lloyd_max` made the
shipped ones and is tested against them.

**Source:** Lloyd 1982, Max 1960; the density and its use: TurboQuant, arXiv 2504.19874. Iterations and
quadrature of two bits are those of the CERA runtime: 50 rounds, Simpson's rule on 1000 intervals a cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from warmkv.kernels.arrays import F32
from warmkv.kernels.errors import KernelError

F64 = npt.NDArray[np.float64]
#: The density is unbounded for 2 dimensions and flat for 3.
MIN_SIZE = 4
_INTERVALS = 1000
#: Where iterations begin, times sqrt(d): levels of a normal variable.
_START = {2: (0.4528, 1.5104), 3: (0.24509418, 0.75600528, 1.34390928, 2.15194570)}
_ROUNDS = {2: 50, 3: 400}

#: float32 bits by coordinate bits and size: positive levels from the least, then positive bounds.
SHIPPED: dict[tuple[int, int], tuple[int, ...]] = {
    (2, 16): (0x3DE660BD, 0x3EBC0280, 0x3E759AB0),
    (2, 32): (0x3DA36F32, 0x3E86D1CD, 0x3E2FAD9A),
    (2, 64): (0x3D677C23, 0x3E3FFF2D, 0x3DF9DE35),
    (2, 128): (0x3D23CE3A, 0x3E083C09, 0x3DB12F98),
    (2, 256): (0x3CE7BD7E, 0x3DC0FFBD, 0x3D7AEF1D),
    (3, 16): (0x3D757105, 0x3E3C1658, 0x3EA4BB6E, 0x3EFF96FD, 0x3DF9729A, 0x3E81634D, 0x3ED22936),
    (3, 32): (0x3D2F8512, 0x3E06EB12, 0x3E6E0A25, 0x3EBB8783, 0x3DB2CC56, 0x3E3A7A9B, 0x3E99464B),
    (3, 64): (0x3CF99A80, 0x3DC02B21, 0x3E2A27E8, 0x3E871FBA, 0x3D7E91C1, 0x3E051EBC, 0x3E5C33AE),
    (3, 128): (0x3CB0FB86, 0x3D885E09, 0x3DF1F343, 0x3E40EB31, 0x3D349CEB, 0x3DBD28A6, 0x3E1CF269),
    (3, 256): (0x3C7AA250, 0x3D4131E1, 0x3DAB8D39, 0x3E091119, 0x3CFFDA75, 0x3D861315, 0x3DDED7B6),
}


@dataclass(frozen=True, slots=True)
class Levels:
    """``centroids`` (2^bits,) and ``bounds`` (2^bits - 1,) float32, ascending and read-only. A coordinate
    equal to a bound goes up."""

    centroids: F32
    bounds: F32

    @property
    def bits(self) -> int:
        return len(self.centroids).bit_length() - 1

    def codes(self, rotated: F32) -> npt.NDArray[np.uint8]:
        """The code of every coordinate: how many bounds it reaches."""
        return np.searchsorted(self.bounds, rotated, side="right").astype(np.uint8)


@lru_cache(maxsize=64)
def levels(size: int, bits: int) -> Levels:
    """For rows of ``size`` channels at 2 or 3 bits. Raises KernelError."""
    shipped = SHIPPED.get((bits, size))
    if shipped is not None:
        positive = np.array(shipped, np.uint32).view(np.float32)
    else:
        centroids, bounds = lloyd_max(size, bits)
        half = len(centroids) // 2
        positive = np.concatenate([centroids[half:], bounds[half:]]).astype(np.float32)
    half = 1 << (bits - 1)
    upper, outer = positive[:half], positive[half:]
    whole = Levels(np.concatenate([-upper[::-1], upper]), np.concatenate([-outer[::-1], np.zeros(1, np.float32), outer]))
    whole.centroids.flags.writeable = whole.bounds.flags.writeable = False
    return whole


def lloyd_max(size: int, bits: int) -> tuple[F64, F64]:
    """Levels (2^bits,) and bounds (2^bits - 1,) in float64. Raises KernelError."""
    if size < MIN_SIZE or bits not in _START:
        raise KernelError(f"levels for {bits} bits of {size} channels: expected 2 or 3 bits and {MIN_SIZE} channels or more")
    upper = np.array(_START[bits]) / np.sqrt(size)
    centroids = np.concatenate([-upper[::-1], upper])
    simpson = np.ones(_INTERVALS + 1)
    simpson[1:-1:2], simpson[2:-1:2] = 4.0, 2.0
    for _ in range(_ROUNDS[bits]):
        bounds = (centroids[:-1] + centroids[1:]) / 2
        edges = np.concatenate([[-1.0], bounds, [1.0]])
        t = edges[:-1, None] + np.diff(edges)[:, None] * (np.arange(_INTERVALS + 1) / _INTERVALS)
        weights = simpson * np.where(np.abs(t) < 1, np.maximum(1 - t * t, 0.0) ** ((size - 3) / 2), 0.0)
        centroids = (weights * t).sum(axis=1) / weights.sum(axis=1)
    return centroids, (centroids[:-1] + centroids[1:]) / 2
