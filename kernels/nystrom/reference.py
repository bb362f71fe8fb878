"""Streaming Nyström attention, written to be read beside the formulas.

A prompt of T rows becomes m landmarks. With segment means K~ of all keys, shared by the query heads
of a KV head, and Q~ of each head's queries, the far part of softmax attention is estimated by

    F = e^(scale q K~')      A = e^(scale Q~ K~')      M = (A'A + lambda I)^-1 A'      u = F M
    Z_i = sum_far e^(scale <q~_i, k>)        T_i = sum_far e^(scale <q~_i, k>) v
    out = (sum_near e^(scale <q, k>) v + u T) / (sum_near e^(scale <q, k>) + u Z)

where near are the sink rows and the last w rows, and a row enters Z and T of every head when it leaves
the window. Everything exponential is kept relative to a running maximum. Weights of single rows may be
negative; `Rectifier` says what is done about it. Prompts too short for that stay exact for good.

**Source:** Xiong et al., "Nyströmformer", arXiv 2102.03902, and the streaming form of the CMF runtime.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32

F64 = npt.NDArray[np.float64]
#: Of the ridge, relative to the mean of the diagonal it is added to, and how often it is raised tenfold.
RIDGE, RIDGE_TRIES = 1e-6, 12
MIN_DENOMINATOR = np.float32(1e-30)
#: Rows a prompt needs beyond window and sinks before there is anything to estimate.
EXACT_SLACK = 8
MIN_LANDMARKS = 4


class Rectifier(Enum):
    """What is done where the estimate goes below zero: drop the far part of a row whose denominator
    is negative (AGGREGATE), or also clip each landmark's weight at zero (FM)."""

    AGGREGATE = 0
    FM = 1


@dataclass(slots=True)
class Far:
    """What one query head keeps of rows that left the window. ``values`` (m, value size), ``mass``
    (m,) and ``top`` (m,) float32: sums relative to e^top; ``rows`` counts them. ``landmarks`` (m, key
    size) are the head's mean queries, ``solve`` (m, m) its matrix M."""

    landmarks: F32
    solve: F32
    values: F32
    mass: F32
    top: F32
    rows: int = 0


@dataclass(slots=True)
class Group:
    """The state of one KV head and the query heads that share it.

    ``keys`` and ``values`` hold the window: in ring order with ``head`` the oldest, or with ``exact``
    all rows there are. ``landmarks`` (m, key size) are the mean keys."""

    window: int
    scale: float
    rectifier: Rectifier
    exact: bool
    keys: F32
    values: F32
    filled: int
    head: int
    sink_keys: F32
    sink_values: F32
    landmarks: F32
    far: list[Far] = field(default_factory=list)

    @property
    def heads(self) -> int:
        return len(self.far)


def deferred_boundary(window: int, sinks: int) -> int:
    """The shortest prompt that has anything to estimate."""
    return window + sinks + EXACT_SLACK + 1


def prefill(
    q: F32, k: F32, v: F32, *, landmarks: int, window: int, sinks: int, rectifier: Rectifier = Rectifier.AGGREGATE,
    scale: float | None = None,
) -> Group:  # fmt: skip
    """The state after a prompt: ``q`` (heads, T, key size), ``k`` (T, key size), ``v`` (T, value size)
    float32, rotated. Raises KernelError."""
    group = opening(q, k, v, landmarks=landmarks, window=window, sinks=sinks, rectifier=rectifier, scale=scale)
    if not group.exact:
        for row in range(sinks, len(k)):
            advance(group, k[row], v[row])
    return group


def opening(
    q: F32, k: F32, v: F32, *, landmarks: int, window: int, sinks: int, rectifier: Rectifier, scale: float | None
) -> Group:  # fmt: skip
    """The state of `prefill` with landmarks and sinks, before any row entered its window; one that
    stays exact has all rows."""
    if q.ndim != 3 or k.shape != q.shape[1:] or v.ndim != 2 or v.shape[0] != len(k):
        raise KernelError(f"queries of {q.shape}, keys of {k.shape}, values of {v.shape}")
    heads, rows, size = q.shape
    if landmarks < MIN_LANDMARKS or window < 1 or heads < 1 or sinks < 0:
        raise KernelError(f"{landmarks} landmarks (at least {MIN_LANDMARKS}), window {window}, {sinks} sinks, {heads} heads")
    scale = size**-0.5 if scale is None else scale
    exact = rows <= window + sinks + EXACT_SLACK
    count = 0 if exact else int(np.clip(rows // 8, MIN_LANDMARKS, landmarks))
    group = Group(
        window=window, scale=scale, rectifier=rectifier, exact=exact,
        keys=k.copy() if exact else np.zeros((window, size), np.float32),
        values=v.copy() if exact else np.zeros((window, v.shape[1]), np.float32),
        filled=rows if exact else 0, head=0,
        sink_keys=k[: 0 if exact else sinks].copy(), sink_values=v[: 0 if exact else sinks].copy(),
        landmarks=segment_means(k, count),
    )  # fmt: skip
    for head in range(heads):
        means = segment_means(q[head], count)
        solve = solver(means, group.landmarks, scale) if count else np.zeros((0, 0), np.float32)
        nothing = np.zeros(count, np.float32)
        far = Far(means, solve, np.zeros((count, v.shape[1]), np.float32), nothing, np.full(count, -np.inf, np.float32))
        group.far.append(far)
    return group


def segment_means(x: F32, count: int) -> F32:
    """Means of ``count`` runs of rows as equal as they can be, taken in float64."""
    bounds = [len(x) * i // count for i in range(count + 1)] if count else [0]
    means = [x[low:high].mean(axis=0, dtype=np.float64) for low, high in zip(bounds, bounds[1:], strict=False)]
    return np.asarray(means, np.float32).reshape(count, x.shape[1])


def solver(queries: F32, keys: F32, scale: float) -> F32:
    """M = (A'A + lambda I)^-1 A' in float64, by Cholesky, with as little ridge as it takes."""
    a: F64 = np.exp(scale * (queries.astype(np.float64) @ keys.astype(np.float64).T))
    gram = a.T @ a
    mean = float(np.mean(np.diag(gram)))
    ridge = RIDGE * mean
    for _ in range(RIDGE_TRIES):
        try:
            low = np.linalg.cholesky(gram + ridge * np.eye(len(gram)))
        except np.linalg.LinAlgError:
            ridge *= 10
            continue
        return np.linalg.solve(low.T, np.linalg.solve(low, a.T)).astype(np.float32)
    return (np.eye(len(gram)) / mean).astype(np.float32)


def advance(group: Group, k: F32, v: F32) -> None:
    """Take in one row, ``k`` (key size,) and ``v`` (value size,): the oldest of a full window goes into
    the far part of every head. With ``exact`` the window grows."""
    if group.exact:
        group.keys, group.values = np.vstack([group.keys, k]), np.vstack([group.values, v])
        group.filled += 1
        return
    if group.filled < group.window:
        slot = group.filled
        group.filled += 1
    else:
        slot = group.head
        for far in group.far:
            _absorb(far, group.keys[slot], group.values[slot], group.scale)
        group.head = (group.head + 1) % group.window
    group.keys[slot], group.values[slot] = k, v


def _absorb(far: Far, k: F32, v: F32, scale: float) -> None:
    logits = (far.landmarks * k).sum(axis=1) * np.float32(scale)
    top = np.maximum(far.top, logits)
    kept, weight = np.exp(far.top - top), np.exp(logits - top)
    far.mass = far.mass * kept + weight
    far.values = far.values * kept[:, None] + weight[:, None] * v
    far.top = top
    far.rows += 1


@np.errstate(invalid="ignore", over="ignore")
def step(group: Group, q: F32, k: F32, v: F32) -> F32:
    """Take in one row, then attend ``q`` (heads, key size); outputs (heads, value size).

    Raises KernelError, and then nothing was taken in."""
    check_step(group, q, k, v)
    advance(group, k, v)
    return np.stack([_read(group, far, q[head]) for head, far in enumerate(group.far)])


def check_step(group: Group, q: F32, k: F32, v: F32) -> None:
    """Raises KernelError unless all fit the state."""
    if q.shape != (group.heads, group.keys.shape[1]) or k.shape != q.shape[1:] or v.shape != group.values.shape[1:]:
        raise KernelError(f"queries of {q.shape}, a key of {k.shape}, a value of {v.shape} for {group.heads} heads")


def _read(group: Group, far: Far, q: F32) -> F32:
    keys = np.concatenate([group.sink_keys, group.keys[: group.filled]])
    values = np.concatenate([group.sink_values, group.values[: group.filled]])
    near = (keys * q).sum(axis=1) * np.float32(group.scale)
    top, gain = near.max(), np.zeros(0, np.float32)
    if far.rows:
        marks = (group.landmarks * q).sum(axis=1) * np.float32(group.scale)
        highest = marks.max()
        weights = (np.exp(marks - highest)[:, None] * far.solve).sum(axis=0)
        if group.rectifier is Rectifier.FM:
            weights = np.maximum(weights, 0)
        reach = highest + far.top
        top = max(top, reach.max())
        gain = weights * np.exp(reach - top)
    exact = np.exp(near - top)
    above, below = (exact[:, None] * values).sum(axis=0, dtype=np.float64), exact.sum(dtype=np.float64)
    if far.rows and (mass := float((gain * far.mass).sum(dtype=np.float64))) >= 0:
        above, below = above + (gain[:, None] * far.values).sum(axis=0, dtype=np.float64), below + mass
    return np.asarray(above / max(below, MIN_DENOMINATOR), np.float32)


def memory_bytes(group: Group) -> int:
    """Bytes of all arrays of the state."""
    shared = [group.keys, group.values, group.sink_keys, group.sink_values, group.landmarks]
    own = [item for far in group.far for item in (far.landmarks, far.solve, far.values, far.mass, far.top)]
    return sum(item.nbytes for item in [*shared, *own])
