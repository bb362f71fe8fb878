"""`reference`, compiled: a query is turned, scored and forgotten, so nothing is held but its logits.

**Threading:** without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.compiled.exponential import LOOSE, exp_below
from warmkv.kernels.formats import F32
from warmkv.kernels.ring import reference
from warmkv.kernels.ring.reference import Rotation

_ROWS = types.Array(types.float32, 2, "C", readonly=True)
_ATTEND = types.void(
    _ROWS, _ROWS, _ROWS, types.int64, _ROWS, _ROWS, types.float64, _ROWS, _ROWS, types.float32[:, ::1]
)  # fmt: skip


def attend(
    q: F32, ring_keys: F32, ring_values: F32, seen: int, rotation: Rotation, *, scale: float,
    sink_keys: F32 | None = None, sink_values: F32 | None = None,
) -> F32:  # fmt: skip
    """See `reference.attend`. Raises KernelError."""
    reference.check(q, ring_keys, ring_values, seen, rotation, sink_keys, sink_values)
    out = np.zeros((q.shape[0], ring_values.shape[1]), np.float32)
    sink_keys = ring_keys[:0] if sink_keys is None else sink_keys
    sink_values = ring_values[:0] if sink_values is None else sink_values
    if seen or len(sink_keys):
        _attend(
            _dense(q), _dense(ring_keys), _dense(ring_values), seen, _dense(rotation.cos), _dense(rotation.sin), scale,
            _dense(sink_keys), _dense(sink_values), out,
        )  # fmt: skip
    return out


def _dense(array: F32) -> F32:
    return np.ascontiguousarray(array, np.float32)


@compiled(fastmath=LOOSE)
def _dot(one: Any, other: Any) -> Any:
    total = np.float32(0)
    for at in range(one.size):
        total += one[at] * other[at]
    return total


@compiled(fastmath=LOOSE)
def _turn(q: Any, cos: Any, sin: Any, turned: Any) -> None:
    """The first 2 x half channels of ``q``, rotated."""
    half = cos.size
    low, high = q[:half], q[half : 2 * half]
    new_low, new_high = turned[:half], turned[half : 2 * half]
    for at in range(half):
        new_low[at] = low[at] * cos[at] - high[at] * sin[at]
        new_high[at] = low[at] * sin[at] + high[at] * cos[at]


@compiled(fastmath=LOOSE)
def _add(weight: Any, row: Any, above: Any) -> None:
    for at in range(above.size):
        above[at] += np.float64(weight * row[at])


@compiled(_ATTEND, fastmath=LOOSE)
def _attend(
    q: Any, ring_keys: Any, ring_values: Any, seen: Any, cos: Any, sin: Any, scale: Any, sink_keys: Any, sink_values: Any,
    out: Any,
) -> None:  # fmt: skip
    window, sinks = ring_keys.shape[0], sink_keys.shape[0]
    count = min(seen, window)
    logits, turned = np.empty(sinks + count, np.float32), np.empty(q.shape[1], np.float32)
    above = np.empty(out.shape[1], np.float64)
    for head in range(q.shape[0]):
        turned[:] = q[head]
        top = np.float32(-np.inf)
        for index in range(sinks):
            logits[index] = _dot(turned, sink_keys[index]) * np.float32(scale)
            top = max(top, logits[index])
        for distance in range(count):
            _turn(q[head], cos[distance], sin[distance], turned)
            index = sinks + distance
            logits[index] = _dot(turned, ring_keys[(seen - 1 - distance) % window]) * np.float32(scale)
            top = max(top, logits[index])
        above[:] = 0
        below = 0.0
        for index in range(sinks + count):
            weight = exp_below(logits[index] - top)
            below += np.float64(weight)
            distance = index - sinks
            row = sink_values[index] if index < sinks else ring_values[(seen - 1 - distance) % window]
            _add(weight, row, above)
        for at in range(above.size):
            out[head, at] = above[at] / below
