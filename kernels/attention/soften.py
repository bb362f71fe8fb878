"""The online softmax of `chunk`, compiled: maximum, exponential and sum while a row of scores is near.

Measured beside `chunk.soften`, 512 queries over 4096 rows with four heads: 0.93 instead of 0.84 of what
the two matrix products take alone.

**Threading:** without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.compiled.exponential import LOOSE, exp_below
from warmkv.kernels.formats import F32

F64 = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
#: Numbers compared side by side when a maximum is looked for.
LANES = 16


@compiled(fastmath=LOOSE)
def _soften(scores: Any, low: Any, high: Any, top: Any, total: Any, faded: Any) -> None:
    columns = scores.shape[1]
    lanes = np.empty(LANES, np.float32)
    for index in range(scores.shape[0]):
        row = scores[index]
        begin, end = max(low[index], 0), min(high[index], columns)
        row[: min(begin, columns)] = 0
        row[max(end, 0) :] = 0
        highest = top[index]
        if begin < end:
            seen = row[begin:end]
            lanes[:] = highest
            whole = len(seen) // LANES * LANES
            for at in range(0, whole, LANES):
                some = seen[at : at + LANES]
                for lane in range(LANES):
                    lanes[lane] = some[lane] if some[lane] > lanes[lane] else lanes[lane]
            for lane in range(LANES):
                highest = max(highest, lanes[lane])
            for at in range(whole, len(seen)):
                highest = max(highest, seen[at])
        anchor = np.float32(0) if highest == -np.inf else highest
        mass = np.float32(0)
        if begin < end:
            seen = row[begin:end]
            for at in range(len(seen)):
                seen[at] = exp_below(seen[at] - anchor)
                mass += seen[at]
        faded[index] = exp_below(top[index] - anchor)
        total[index] = total[index] * np.float64(faded[index]) + np.float64(mass)
        top[index] = highest


def soften(scores: F32, low: Places, high: Places, top: F32, total: F64) -> F32:
    """`chunk.Soften`, compiled."""
    faded = np.empty(len(scores), np.float32)
    _soften(scores, low, high, top, total, faded)
    return faded
