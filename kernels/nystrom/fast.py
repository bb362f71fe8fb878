"""`reference`, compiled: a step head by head, a prompt's far part by matrix products.

States are those of the reference, and arrays of a `Far` are replaced, never written: whoever kept
them for a rollback has what was there. What the solver's large weights multiply is summed in float64.

**Threading:** without the interpreter lock, but one group is one thread's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from warmkv.kernels.compiled.caching import compiled
from warmkv.kernels.compiled.exponential import LOOSE, exp_below
from warmkv.kernels.formats import F32
from warmkv.kernels.nystrom import reference
from warmkv.kernels.nystrom.reference import MIN_DENOMINATOR, Far, Group, Rectifier

#: Rows of a prompt that are taken into the far part at a time.
TILE_ROWS = 512
_LEAST = float(MIN_DENOMINATOR)
_ROWS, _ROW = (types.Array(types.float32, n, "C", readonly=True) for n in (2, 1))
_ABSORB = types.void(
    _ROWS, _ROWS, _ROW, _ROW, _ROW, _ROW, types.float64, types.float32[:, ::1], types.float32[::1], types.float32[::1]
)
_READ = types.void(
    _ROW, types.float64, types.boolean, _ROWS, _ROWS, _ROWS, _ROWS, types.int64, _ROWS, _ROWS, _ROWS, _ROW, _ROW,
    types.boolean, types.float32[::1],
)  # fmt: skip


def prefill(
    q: F32, k: F32, v: F32, *, landmarks: int, window: int, sinks: int, rectifier: Rectifier = Rectifier.AGGREGATE,
    scale: float | None = None,
) -> Group:  # fmt: skip
    """See `reference.prefill`; nothing here is compiled. Raises KernelError."""
    group = reference.opening(q, k, v, landmarks=landmarks, window=window, sinks=sinks, rectifier=rectifier, scale=scale)
    if group.exact:
        return group
    last = len(k) - window
    for far in group.far:
        _absorb_all(far, k[sinks:last], v[sinks:last], group.scale)
    slots = np.arange(last - sinks, len(k) - sinks) % window
    group.keys[slots], group.values[slots] = k[last:], v[last:]
    group.filled, group.head = window, (len(k) - sinks) % window
    return group


def step(group: Group, q: F32, k: F32, v: F32) -> F32:
    """See `reference.step`. Raises KernelError, and then nothing was taken in."""
    reference.check_step(group, q, k, v)
    queries, k, v = _dense(q), _dense(k), _dense(v)
    if not group.exact and group.filled == group.window:
        oldest = group.head
        for far in group.far:
            _absorb_one(far, group.keys[oldest], group.values[oldest], group.scale)
        group.keys[oldest], group.values[oldest] = k, v
        group.head = (oldest + 1) % group.window
    else:
        reference.advance(group, k, v)
    out = np.empty((group.heads, group.values.shape[1]), np.float32)
    sink_keys, sink_values, landmarks = _dense(group.sink_keys), _dense(group.sink_values), _dense(group.landmarks)
    keys, values, clip = _dense(group.keys), _dense(group.values), group.rectifier is Rectifier.FM
    for head, far in enumerate(group.far):
        _read(
            queries[head], group.scale, clip, sink_keys, sink_values, keys, values, group.filled, landmarks, _dense(far.solve),
            _dense(far.values), _dense(far.mass), _dense(far.top), far.rows > 0, out[head],
        )  # fmt: skip
    return out


def _dense(array: F32) -> F32:
    return np.ascontiguousarray(array, np.float32)


def _absorb_one(far: Far, k: F32, v: F32, scale: float) -> None:
    values, mass, top = np.empty_like(far.values), np.empty_like(far.mass), np.empty_like(far.top)
    _absorb(_dense(far.landmarks), _dense(far.values), far.mass, far.top, k, v, scale, values, mass, top)
    far.values, far.mass, far.top = values, mass, top
    far.rows += 1


def _absorb_all(far: Far, k: F32, v: F32, scale: float) -> None:
    """Take in rows, all at once as far as memory matters."""
    top, mass, values = far.top, far.mass.astype(np.float64), far.values.astype(np.float64)
    for begin in range(0, len(k), TILE_ROWS):
        some = slice(begin, begin + TILE_ROWS)
        logits = (far.landmarks @ k[some].T) * np.float32(scale)
        highest = np.maximum(top, logits.max(axis=1))
        kept, weights = np.exp(top - highest), np.exp(logits - highest[:, None])
        mass = mass * kept + weights.sum(axis=1)
        values = values * kept[:, None] + weights @ v[some]
        top = highest
    far.top, far.mass, far.values = top, mass.astype(np.float32), values.astype(np.float32)
    far.rows += len(k)


@compiled(_ABSORB, fastmath=LOOSE)
def _absorb(
    landmarks: Any, values: Any, mass: Any, top: Any, k: Any, v: Any, scale: Any, new_values: Any, new_mass: Any, new_top: Any
) -> None:  # fmt: skip
    for mark in range(landmarks.shape[0]):
        row, total = landmarks[mark], np.float32(0)
        for at in range(k.size):
            total += row[at] * k[at]
        logit = total * np.float32(scale)
        highest = top[mark] if top[mark] > logit else logit
        kept, weight = exp_below(top[mark] - highest), exp_below(logit - highest)
        new_top[mark], new_mass[mark] = highest, mass[mark] * kept + weight
        before, after = values[mark], new_values[mark]
        for at in range(v.size):
            after[at] = before[at] * kept + weight * v[at]


@compiled(fastmath=LOOSE)
def _logits(q: Any, rows: Any, count: Any, scale: Any, out: Any) -> Any:
    """Fills ``out`` with scale x <q, row> and returns the largest."""
    highest = np.float32(-np.inf)
    for index in range(count):
        row, total = rows[index], np.float32(0)
        for at in range(q.size):
            total += q[at] * row[at]
        out[index] = total * np.float32(scale)
        highest = max(highest, out[index])
    return highest


@compiled(fastmath=LOOSE)
def _weigh(logits: Any, top: Any, rows: Any, above: Any) -> Any:
    """Adds e^(logit - top) x row to ``above`` and returns the sum of the weights."""
    below = 0.0
    for index in range(logits.size):
        weight, row = exp_below(logits[index] - top), rows[index]
        below += np.float64(weight)
        for at in range(above.size):
            above[at] += np.float64(weight * row[at])
    return below


@compiled(fastmath=LOOSE)
def _gains(q: Any, scale: Any, clip: Any, landmarks: Any, solve: Any, top: Any, gain: Any) -> Any:
    """The factors u of this query, clipped where asked for, and the exponents they stand beside:
    (highest landmark logit, the largest exponent of any)."""
    count = landmarks.shape[0]
    marks = np.empty(count, np.float32)
    highest = _logits(q, landmarks, count, scale, marks)
    gain[:] = 0
    for mark in range(count):
        factor, row = math.exp(np.float64(marks[mark]) - np.float64(highest)), solve[mark]
        for at in range(count):
            gain[at] += factor * np.float64(row[at])
    reach = np.float32(-np.inf)
    for at in range(count):
        if clip and gain[at] < 0:
            gain[at] = 0
        reach = max(reach, highest + top[at])
    return highest, reach


@compiled(_READ, fastmath=LOOSE)
def _read(
    q: Any, scale: Any, clip: Any, sink_keys: Any, sink_values: Any, keys: Any, values: Any, filled: Any, landmarks: Any,
    solve: Any, far_values: Any, mass: Any, far_top: Any, has_far: Any, out: Any,
) -> None:  # fmt: skip
    sinks, count, size = sink_keys.shape[0], landmarks.shape[0], out.size
    near = np.empty(sinks + filled, np.float32)
    top = max(_logits(q, sink_keys, sinks, scale, near[:sinks]), _logits(q, keys, filled, scale, near[sinks:]))
    gain, highest, below_far = np.empty(count, np.float64), np.float32(0), 0.0
    if has_far:
        highest, reach = _gains(q, scale, clip, landmarks, solve, far_top, gain)
        top = max(top, reach)
        for at in range(count):
            gain[at] *= math.exp(np.float64(highest + far_top[at]) - np.float64(top))
            below_far += gain[at] * np.float64(mass[at])
    above = np.zeros(size, np.float64)
    below = _weigh(near[:sinks], top, sink_values, above) + _weigh(near[sinks:], top, values, above)
    if has_far and below_far >= 0:
        below += below_far
        for mark in range(count):
            weight, row = gain[mark], far_values[mark]
            for at in range(size):
                above[at] += weight * np.float64(row[at])
    divisor = _LEAST if below < _LEAST else below
    for at in range(size):
        out[at] = above[at] / divisor
