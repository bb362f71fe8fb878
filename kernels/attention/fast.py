"""Attention over stored rows, compiled: the twin of `reference.attend`, whose docstring says what it does.

Rows are read where they lie, of any distance and alignment: compiled code gets their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention import compiled, composed
from warmkv.kernels.attention.addresses import table
from warmkv.kernels.attention.layer import side_by_side
from warmkv.kernels.attention.reference import Attended, Blocks, shares, visible
from warmkv.kernels.formats import F32, KEY_GROUP

_UNSEEN = np.empty((0, 0), np.float32)


def attend(
    q: F32, keys: Blocks, values: Blocks, *, scale: float, first: int = 0, upto: int | None = None, softcap: float = 0.0,
    sinks: F32 | None = None, importance: F32 | None = None,
) -> Attended:  # fmt: skip
    """See `reference.attend`: equal to it within rounding, and each head's numbers the same bits in
    any group and whatever rows it does not see. Raises KernelError."""
    last = visible(q, keys, values, first, upto, sinks, importance)
    if importance is None:
        return _attend(q, [keys], [values], scale, first, last, softcap, sinks, _UNSEEN)
    seen_rows = importance[first : max(first, last)]
    mass = np.require(seen_rows, requirements=["C", "A", "W"])
    done = _attend(q, [keys], [values], scale, first, last, softcap, sinks, mass.reshape(1, -1))
    if mass is not seen_rows:
        seen_rows[:] = mass
    return done


def attend_heads(
    q: F32, keys: Sequence[Blocks], values: Sequence[Blocks], *, scale: float, first: int = 0, upto: int | None = None,
    softcap: float = 0.0, sinks: F32 | None = None, observe: bool = False,
) -> tuple[Attended, F32 | None]:  # fmt: skip
    """`attend` of the KV heads of a layer in one call, the same bits: ``q`` (heads, key size) in equal
    groups. With ``observe`` also gives what importance gets, (KV heads, visible rows) float32."""
    group, last = len(q) // len(keys), 0
    for head in range(len(keys)):
        own = slice(head * group, (head + 1) * group)
        last = visible(q[own], keys[head], values[head], first, upto, None if sinks is None else sinks[own], None)
    masses = np.zeros((len(keys), max(0, last - first)), np.float32) if observe else _UNSEEN
    if _alike(keys) and _alike(values) and not composed.rotated(keys) and not composed.rotated(values):
        done = _attend(q, keys, values, scale, first, last, softcap, sinks, masses)
        return done, masses if observe else None
    parts = []
    for head in range(len(keys)):
        own = slice(head * group, (head + 1) * group)
        sink = None if sinks is None else sinks[own]
        mass = masses[head : head + 1]
        parts.append(_attend(q[own], [keys[head]], [values[head]], scale, first, last, softcap, sink, mass))
    return side_by_side(parts), masses if observe else None


def merge(parts: Sequence[Attended]) -> Attended:
    """See `reference.merge`: the same bits. Raises KernelError."""
    top, total, factors = shares(parts)
    shape = parts[0].out.shape
    sums = np.zeros((top.size, shape[-1]), np.float64)
    for part, factor in zip(parts, factors, strict=True):
        compiled.add_part(np.ascontiguousarray(part.out).reshape(sums.shape), np.ascontiguousarray(factor).reshape(-1), sums)
    return Attended(sums.astype(np.float32).reshape(shape), top, total)


def _alike(plane: Sequence[Blocks]) -> bool:
    """Whether the rows of all heads are cut into blocks at the same places, of the same size."""
    return all([(len(a), a.size) for a in blocks] == [(len(b), b.size) for b in plane[0]] for blocks in plane[1:])


def _attend(
    q: F32, keys: Sequence[Blocks], values: Sequence[Blocks], scale: float, first: int, last: int, softcap: float,
    sinks: F32 | None, masses: F32,
) -> Attended:  # fmt: skip
    """Of arguments that fit; the blocks of all KV heads are alike. Of rotated rows there is one KV head."""
    if composed.rotated(keys) or composed.rotated(values):
        return composed.attend(q, keys[0], values[0], first, last, scale, softcap, sinks, masses.reshape(-1))
    heads, size = q.shape
    count = max(0, last - first)
    out = np.zeros((heads, values[0][0].size if values[0] else size), np.float32)
    done = Attended(out, np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32))
    if heads == 0 or (count == 0 and sinks is None):
        return done
    queries = np.zeros((heads, -(-size // KEY_GROUP) * KEY_GROUP), np.float32)
    queries[:, :size] = q
    kept: list[npt.NDArray[np.generic]] = []  # what addresses point to, until the call is over
    k, v = (np.array([table(blocks, first, last, kept) for blocks in plane], np.intp) for plane in (keys, values))
    columns = compiled.COLUMNS
    compiled.attend(
        queries, size, k.reshape(len(keys), -1, columns), v.reshape(len(keys), -1, columns), count, np.float32(scale),
        np.float32(softcap), np.full(heads, -np.inf, np.float32) if sinks is None else np.array(sinks, np.float32), masses,
        out, done.top, done.total,
    )  # fmt: skip
    return done
