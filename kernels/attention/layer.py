"""Attention of all heads of a layer, on several threads where asked.

A KV head is computed on one thread and its importance is summed from zero, then added in head order:
so results are the same bits on any number of threads. A backend that takes several KV heads in one
call gets neighbouring ones, whose rows lie side by side in a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from warmkv.kernels import threads as pool
from warmkv.kernels.attention.reference import Attended, Blocks
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, total_rows

if TYPE_CHECKING:
    from warmkv.kernels.dispatch import AttendHeads, Kernels


def attend_heads(
    kernels: Kernels, q: F32, keys: Sequence[Blocks], values: Sequence[Blocks], *, scale: float, first: int = 0,
    upto: int | None = None, softcap: float = 0.0, sinks: F32 | None = None, importance: F32 | None = None, threads: int = 1,
) -> Attended:  # fmt: skip
    """Attend ``q`` (heads, key size) float32 over rows [first, upto) of every KV head: ``keys`` and
    ``values`` have the blocks of one KV head an entry, query heads read them in equal groups, in order.

    ``sinks`` (heads,) float32. ``importance`` (rows,) float32 gets the probabilities of all heads added,
    in place. Results are those of `Attend` for each group, whatever ``threads``. Raises KernelError;
    where it does, ``importance`` is as it was."""
    if q.ndim != 2:
        raise KernelError(f"queries have shape {q.shape}, expected (heads, size)")
    group = _group(q.shape[0], keys, values, sinks)
    if kernels.attend_heads is not None:
        return _in_parts(kernels.attend_heads, q, keys, values, group, importance, threads, scale, first, upto, softcap, sinks)

    def one(head: int, mass: F32 | None) -> Attended:
        mine = slice(head * group, (head + 1) * group)
        return kernels.attend(
            q[mine], keys[head], values[head], scale=scale, first=first, upto=upto, softcap=softcap,
            sinks=None if sinks is None else sinks[mine], importance=mass,
        )  # fmt: skip

    return _over_heads(one, keys, importance, threads, axis=0)


def attend_heads_chunk(
    kernels: Kernels, q: F32, keys: Sequence[Blocks], values: Sequence[Blocks], *, scale: float, start: int, window: int = 0,
    softcap: float = 0.0, sinks: F32 | None = None, importance: F32 | None = None, threads: int = 1,
) -> Attended:  # fmt: skip
    """Attend a chunk ``q`` (tokens, heads, key size) causally, the first token seeing rows up to and
    including ``start``; see `AttendChunk` and `attend_heads`. Returns (tokens, heads, ...) arrays."""
    if q.ndim != 3:
        raise KernelError(f"queries have shape {q.shape}, expected (tokens, heads, size)")
    group = _group(q.shape[1], keys, values, sinks)

    def one(head: int, mass: F32 | None) -> Attended:
        mine = slice(head * group, (head + 1) * group)
        return kernels.attend_chunk(
            np.ascontiguousarray(q[:, mine]), keys[head], values[head], scale=scale, start=start, window=window,
            softcap=softcap, sinks=None if sinks is None else sinks[mine], importance=mass,
        )  # fmt: skip

    return _over_heads(one, keys, importance, threads, axis=1)


def _group(heads: int, keys: Sequence[Blocks], values: Sequence[Blocks], sinks: F32 | None) -> int:
    """Query heads a KV head."""
    if not keys or len(keys) != len(values) or heads % len(keys):
        raise KernelError(f"{heads} query heads over {len(keys)} KV heads of keys and {len(values)} of values")
    if sinks is not None and sinks.shape != (heads,):
        raise KernelError(f"sink logits of shape {sinks.shape} for {heads} heads")
    return heads // len(keys)


def _in_parts(
    attend: AttendHeads, q: F32, keys: Sequence[Blocks], values: Sequence[Blocks], group: int, importance: F32 | None,
    threads: int, scale: float, first: int, upto: int | None, softcap: float, sinks: F32 | None,
) -> Attended:  # fmt: skip
    """As many calls of neighbouring KV heads as threads."""
    _observed(keys, importance)
    many = max(1, min(threads, len(keys)))
    bounds = [len(keys) * part // many for part in range(many + 1)]
    done: list[tuple[Attended, F32 | None] | None] = [None] * many

    def task(part: int) -> None:
        low, high = bounds[part], bounds[part + 1]
        mine = slice(low * group, high * group)
        done[part] = attend(
            q[mine], keys[low:high], values[low:high], scale=scale, first=first, upto=upto, softcap=softcap,
            sinks=None if sinks is None else sinks[mine], observe=importance is not None,
        )  # fmt: skip

    pool.run(task, many, threads)
    parts = [part for part in done if part is not None]
    for _, masses in parts:
        if importance is not None and masses is not None:
            seen = importance[first : first + masses.shape[1]]
            for mass in masses:
                seen += mass
    return side_by_side([part for part, _ in parts])


def _over_heads(
    one: Callable[[int, F32 | None], Attended], keys: Sequence[Blocks], importance: F32 | None, threads: int, *, axis: int
) -> Attended:
    """The answers of all KV heads side by side along ``axis``."""
    rows = _observed(keys, importance)
    masses = [None if importance is None else np.zeros(rows, np.float32) for _ in keys]
    done: list[Attended | None] = [None] * len(keys)

    def task(head: int) -> None:
        done[head] = one(head, masses[head])

    pool.run(task, len(keys), threads)
    for mass in masses:
        if importance is not None and mass is not None:
            importance[:rows] += mass
    return side_by_side([part for part in done if part is not None], axis)


def _observed(keys: Sequence[Blocks], importance: F32 | None) -> int:
    """Rows of every KV head; importance must have as many. Raises KernelError."""
    rows = total_rows(keys[0])
    if uneven := [total_rows(blocks) for blocks in keys if total_rows(blocks) != rows]:
        raise KernelError(f"KV heads of {rows} and of {uneven[0]} rows, expected as many of each")
    if importance is not None and (importance.dtype != np.float32 or importance.ndim != 1 or importance.size < rows):
        raise KernelError(f"importance is {importance.dtype} of {importance.shape}, expected float32 of {rows} rows or more")
    return rows


def side_by_side(parts: Sequence[Attended], axis: int = 0) -> Attended:
    """The answers of several groups of heads as one."""
    if len(parts) == 1:
        return parts[0]
    return Attended(*(np.concatenate([getattr(part, name) for part in parts], axis=axis) for name in ("out", "top", "total")))
