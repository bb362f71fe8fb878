"""Attention of a prefill chunk, tile by tile: two matrix products and an online softmax between them.

All query heads of a KV head are stacked, so a tile of rows is read (and decoded, whatever its format)
once for all of them. No matrix of chunk x rows is ever held: what is kept beside the outputs are one
tile of decoded rows and one of scores. Tiles are counted from the first row that any query sees, so
rows dropped in front of a window change no bit.

What a query does not see must not touch its result, and 0 x NaN is NaN: weights of unseen rows are
written, not computed, and values with NaN or infinity are added only to the queries that see them.

Rotated rows are turned back a tile at a time: what estimates a product is linear in the query, so that
products with these rows are the estimates.

**Source:** FlashAttention, arXiv 2205.14135, for the order of the loops; Milakov and Gimelshein, arXiv
1805.02867, for the softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention.reference import Attended, Blocks, seen, visible
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, Block, RowFormat, total_rows
from warmkv.kernels.quant.reference import decode

F64 = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
Decode = Callable[[Block], F32]
#: Rows of a tile, and stacked queries scored against it at a time: 1 MiB of scores, about an L2 cache.
TILE_ROWS, QUERY_ROWS = 512, 512


class Soften(Protocol):
    def __call__(self, scores: F32, low: Places, high: Places, top: F32, total: F64) -> F32:
        """One step of the online softmax over a tile, in place: ``scores`` (queries, columns) become
        e^(score - new top) in columns [low, high) of each query and 0 elsewhere; ``top`` and ``total``
        (queries,) are brought up to date. Returns e^(old top - new top)."""


def soften(scores: F32, low: Places, high: Places, top: F32, total: F64) -> F32:
    """`Soften` in numpy."""
    _hide(scores, low, high)
    highest = np.maximum(top, scores.max(axis=1, initial=-np.inf))
    anchor = np.where(np.isneginf(highest), np.float32(0), highest)
    faded: F32 = np.exp(top - anchor)
    np.subtract(scores, anchor[:, None], out=scores)
    np.exp(scores, out=scores)
    np.multiply(total, faded, out=total)
    np.add(total, scores.sum(axis=1), out=total)
    top[:] = highest
    return faded


@dataclass(slots=True)
class _Part:
    """Stacked queries [first, last) and the columns [left, right) of a tile that some of them see,
    of these [low, high) each on its own. ``whole``: all see all."""

    first: int
    last: int
    left: int
    right: int
    low: Places
    high: Places
    whole: bool


@dataclass(frozen=True, slots=True)
class _Sight:
    """Who sees what: query ``i`` of the stack stands at row ``start`` + i // ``heads``."""

    heads: int
    count: int
    start: int
    window: int

    def first(self) -> int:
        """The first row that any query sees."""
        return max(0, self.start + 1 - self.window) if self.window else 0

    def parts(self, begin: int, end: int) -> Iterator[_Part]:
        """The queries that see rows of [begin, end), a few at a time."""
        step = max(1, QUERY_ROWS // self.heads) * self.heads
        for first in range(0, self.count, step):
            last = min(first + step, self.count)
            high = self.start + np.arange(first, last) // self.heads + 1
            low = np.maximum(high - self.window, 0) if self.window else np.zeros_like(high)
            left, right = max(int(low[0]), begin), min(int(high[-1]), end)
            if left < right:
                whole = int(low[-1]) <= left and right <= int(high[0])
                yield _Part(first, last, left - begin, right - begin, low - left, high - left, whole)


def attend_chunk(
    q: F32, keys: Blocks, values: Blocks, *, scale: float, start: int, window: int = 0, softcap: float = 0.0,
    sinks: F32 | None = None, importance: F32 | None = None, soften: Soften = soften, decode: Decode = decode,
) -> Attended:  # fmt: skip
    """What `reference.attend_chunk` computes, within rounding. ``importance`` costs a second pass over
    the scores: probabilities are known when the last row was seen.

    **Threading:** without state; BLAS may use threads of its own. Raises KernelError."""
    if q.ndim != 3 or not 0 <= start <= total_rows(keys) - q.shape[0]:
        raise KernelError(f"queries of shape {q.shape} from {start} on over {total_rows(keys)} rows")
    count, heads, size = q.shape
    visible(q[0] if count else np.zeros((heads, size), q.dtype), keys, values, 0, start + count, sinks, importance)
    stack = np.multiply(q.reshape(count * heads, size), np.float32(scale))
    sight = _Sight(heads, count * heads, start, window)
    top, total = np.full(count * heads, -np.inf, np.float32), np.zeros(count * heads, np.float64)
    if sinks is not None:
        top[:] = np.tile(sinks, count)
        total[:] = ~np.isneginf(top)
    out = np.zeros((count * heads, values[0].size if values else size), np.float32)
    scores = _Scores(stack, keys, softcap, min(count * heads, max(QUERY_ROWS, heads)), decode)
    with np.errstate(invalid="ignore", over="ignore"):
        for begin, end in _tiles(sight.first(), start + count):
            k, v = scores.tile(begin, end), _rows(values, begin, end, decode)
            for part in sight.parts(begin, end):
                weights = scores.of(part, k)
                faded = soften(weights, part.low, part.high, top[part.first : part.last], total[part.first : part.last])
                mine = out[part.first : part.last]
                np.multiply(mine, faded[:, None], out=mine)
                _add_values(mine, weights, v[part.left : part.right], part)
        np.divide(out, total[:, None], out=out, casting="same_kind")
        if importance is not None:
            _observe(scores, sight, top, total, importance, soften)
    shape = (count, heads)
    return Attended(out.reshape(*shape, out.shape[1]), top.reshape(shape), total.astype(np.float32).reshape(shape))


class _Scores:
    """Logits of stacked, scaled queries, one tile after the other in the same memory."""

    def __init__(self, stack: F32, keys: Blocks, softcap: float, most: int, decode: Decode) -> None:
        """``most`` queries are scored at a time."""
        self._stack, self._keys, self._softcap, self._decode = stack, keys, np.float32(softcap), decode
        self._room = np.empty(most * TILE_ROWS, np.float32)

    def tile(self, begin: int, end: int) -> F32:
        return _rows(self._keys, begin, end, self._decode)

    def of(self, part: _Part, tile: F32) -> F32:
        """(queries, columns) of a part; valid until the next call."""
        shape = part.last - part.first, part.right - part.left
        scores = self._room[: shape[0] * shape[1]].reshape(shape)
        np.matmul(self._stack[part.first : part.last], tile[part.left : part.right].T, out=scores)
        if self._softcap > 0:
            np.divide(scores, self._softcap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, self._softcap, out=scores)
        return scores


def _tiles(first: int, last: int) -> Iterator[tuple[int, int]]:
    for begin in range(first, last, TILE_ROWS):
        yield begin, min(begin + TILE_ROWS, last)


def _rows(blocks: Blocks, begin: int, end: int, decode: Decode) -> F32:
    """Rows [begin, end) as float32: a view where they lie so in one block, else decoded together."""
    parts = [block.rows(low, high) for block, low, high in seen(blocks, begin, end)]
    if len(parts) == 1:
        only = parts[0]
        return only.codes.view(np.float32) if only.format is RowFormat.F32 else decode(only)
    return np.concatenate([decode(part) for part in parts])


def _hide(scores: F32, low: Places, high: Places) -> None:
    """-inf in every column outside [low, high) of its query."""
    columns = scores.shape[1]
    if (low <= 0).all() and (high >= columns).all():
        return
    at = np.arange(columns)
    np.copyto(scores, np.float32(-np.inf), where=(at < low[:, None]) | (at >= high[:, None]))


def _add_values(out: F32, weights: F32, values: F32, part: _Part) -> None:
    """Add weights @ values; rows that are not finite only to the queries that see them."""
    if not part.whole:
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            kept = values.copy()
            kept[bad] = 0
            out += weights @ kept
            for row in bad:
                sees = (part.low <= row) & (row < part.high)
                out[sees] += weights[sees, row, None] * values[row]
            return
    out += weights @ values


def _observe(scores: _Scores, sight: _Sight, top: F32, total: F64, importance: F32, soften: Soften) -> None:
    """Add the probability of every row that was seen, over all queries. Maxima are final, so the
    softmax's step gives each weight as it stands below its query's total."""
    share = (1 / total).astype(np.float32)
    sound = np.isfinite(share)
    for begin, end in _tiles(sight.first(), sight.start + sight.count // sight.heads):
        k = scores.tile(begin, end)
        for part in sight.parts(begin, end):
            columns = importance[begin + part.left : begin + part.right]
            weights, mine = scores.of(part, k), slice(part.first, part.last)
            soften(weights, part.low, part.high, top[mine].copy(), total[mine].copy())
            for row in np.flatnonzero(~sound[mine]):
                low, high = max(int(part.low[row]), 0), max(int(part.high[row]), 0)
                columns[low:high] += weights[row, low:high] * share[mine][row]
                weights[row] = 0
            columns += np.where(sound[mine], share[mine], np.float32(0)) @ weights
