"""Attention over stored rows, written to be read beside the formulas.

For a query q of one of the heads that share a KV head, over the visible rows j in [first, upto):

    l_j = scale * <q, k_j>         with a soft cap c: l_j = c * tanh(l_j / c)
    s   = log(sum_j e^(l_j) + e^z) z: the head's learned sink, a column without a value
    p_j = e^(l_j - s)              out = sum_j p_j v_j

Rows come as blocks that follow one another, of whatever formats: each is scored where it lies, and
what they contribute is merged exactly. Sums run over rows in their order, in float32, one query head
after the other: a head's numbers do not depend on which others are asked for, nor on rows it does
not see.

**Source:** online softmax and its merge: Milakov and Gimelshein, arXiv 1805.02867; learned sinks:
gpt-oss model card, 2025; soft cap: Gemma 2, arXiv 2408.00118.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, Block, check_block, total_rows
from warmkv.kernels.quant.reference import decode
from warmkv.kernels.turboquant import block as turned
from warmkv.kernels.turboquant import reference as turbo

F64 = npt.NDArray[np.float64]
Blocks = Sequence[Block]


@dataclass(frozen=True, slots=True)
class Attended:
    """``out`` (heads, value size) float32, normalised; ``top`` (heads,) float32 the largest logit that
    was seen (-inf: nothing was), ``total`` (heads,) float32 the sum of e^(logit - top). Apart they
    keep what their logarithm would round away where logits are large."""

    out: F32
    top: F32
    total: F32

    @property
    def lse(self) -> F32:
        """(heads,) float32, the natural logarithm of each softmax denominator; -inf: nothing was seen."""
        with np.errstate(divide="ignore"):
            lse: F32 = np.where(self.total > 0, self.top + np.log(self.total), np.float32(-np.inf))
        return lse


@np.errstate(invalid="ignore", over="ignore")
def attend(
    q: F32, keys: Blocks, values: Blocks, *, scale: float, first: int = 0, upto: int | None = None, softcap: float = 0.0,
    sinks: F32 | None = None, importance: F32 | None = None,
) -> Attended:  # fmt: skip
    """Attend ``q`` (heads, key size) float32 over rows [first, upto) of the blocks; keys and values
    have as many rows in all, cut alike or not.

    ``sinks`` (heads,) float32 are learned logits. ``importance`` (rows,) float32 gets every visible
    row's probability of every head added, in place. Raises KernelError."""
    last = visible(q, keys, values, first, upto, sinks, importance)
    heads, size = q.shape[0], values[0].size if values else q.shape[1]
    out = np.zeros((heads, size), np.float32)
    tops, totals = np.full(heads, -np.inf, np.float32), np.zeros(heads, np.float32)
    if first >= last and sinks is None:
        return Attended(out, tops, totals)
    for head in range(heads):
        parts = [_scores(q[head], block.rows(low, high)) for block, low, high in seen(keys, first, last)]
        logits = np.concatenate([np.empty(0, np.float32), *parts]) * np.float32(scale)
        if softcap > 0:
            logits = np.float32(softcap) * np.tanh(logits / np.float32(softcap))
        sink = np.float32(-np.inf) if sinks is None else sinks[head]
        top = max(logits.max(initial=-np.inf), sink)
        weights = np.exp(logits - top)
        total = weights.sum(dtype=np.float64) + np.exp(np.float64(sink - top))
        weights = (weights / total).astype(np.float32)
        tops[head], totals[head] = top, total
        at = 0
        for block, low, high in seen(values, first, last):
            out[head] += _weigh(weights[at : at + high - low], block.rows(low, high))
            at += high - low
        if importance is not None:
            importance[first:last] += weights
    return Attended(out, tops, totals)


def attend_chunk(
    q: F32, keys: Blocks, values: Blocks, *, scale: float, start: int, window: int = 0, softcap: float = 0.0,
    sinks: F32 | None = None, importance: F32 | None = None,
) -> Attended:  # fmt: skip
    """Attend a chunk of queries (tokens, heads, key size) causally: the i-th sees rows up to and
    including ``start`` + i, of these the last ``window`` where that is not 0. The rows of the chunk
    are in the blocks already. Returns (tokens, heads, ...) arrays."""
    if q.ndim != 3 or not 0 <= start <= total_rows(keys) - q.shape[0]:
        raise KernelError(f"queries of shape {q.shape} from {start} on over {total_rows(keys)} rows")
    done = []
    for index in range(q.shape[0]):
        upto = start + index + 1
        first = max(0, upto - window) if window else 0
        seen_by = attend(
            q[index], keys, values, scale=scale, first=first, upto=upto, softcap=softcap, sinks=sinks, importance=importance
        )  # fmt: skip
        done.append(seen_by)
    if not done:
        none = np.zeros((0, q.shape[1]), np.float32)
        return Attended(np.zeros((0, q.shape[1], values[0].size if values else q.shape[2]), np.float32), none, none)
    return Attended(*(np.stack([getattr(item, name) for item in done]) for name in ("out", "top", "total")))


def merge(parts: Sequence[Attended]) -> Attended:
    """What attending over the rows of all parts together gives. The order does not matter beyond
    rounding; a part that saw nothing changes nothing.

    Raises KernelError for no parts or parts of different shapes."""
    top, total, factors = shares(parts)
    out = sum(factor[..., None] * part.out for factor, part in zip(factors, parts, strict=True))
    return Attended(np.asarray(out, np.float32), top, total)


def shares(parts: Sequence[Attended]) -> tuple[F32, F32, list[F64]]:
    """``top`` and ``total`` of parts that are merged, and what each part's output counts, (heads,) float64.
    Raises KernelError for no parts or parts of different shapes."""
    if not parts or any(part.out.shape != parts[0].out.shape for part in parts):
        raise KernelError(f"parts of shapes {[part.out.shape for part in parts]} cannot be merged")
    top: F32 = np.maximum.reduce([part.top for part in parts])
    anything = np.where(np.isneginf(top), np.float32(0), top)
    weights = [np.exp(np.float64(part.top - anything)) * part.total for part in parts]
    total = np.sum(weights, axis=0)
    divisor = np.where(total == 0, 1.0, total)
    return top, total.astype(np.float32), [weight / divisor for weight in weights]


def seen(blocks: Blocks, first: int, last: int) -> list[tuple[Block, int, int]]:
    """The blocks that hold rows of [first, last), each with the range of its own rows that does."""
    found, at = [], 0
    for block in blocks:
        low, high = max(first - at, 0), min(last - at, len(block))
        if low < high:
            found.append((block, low, high))
        at += len(block)
    return found


def visible(
    q: F32, keys: Blocks, values: Blocks, first: int, upto: int | None, sinks: F32 | None, importance: F32 | None
) -> int:  # fmt: skip
    """The end of the visible rows, once everything fits. Raises KernelError."""
    if q.ndim != 2 or q.dtype != np.float32:
        raise KernelError(f"queries are {q.dtype} of shape {q.shape}, expected float32 (heads, size)")
    rows = total_rows(keys)
    if total_rows(values) != rows:
        raise KernelError(f"{rows} rows of keys, {total_rows(values)} of values")
    for index, block in enumerate(keys):
        check_block(block, q.shape[1], f"keys, block {index}")
    for index, block in enumerate(values):
        check_block(block, values[0].size, f"values, block {index}")
    last = rows if upto is None else min(upto, rows)
    if first < 0 or last < 0:
        raise KernelError(f"visible rows [{first}, {last})")
    if sinks is not None and sinks.shape != (q.shape[0],):
        raise KernelError(f"{sinks.shape} sink logits for {q.shape[0]} heads")
    if importance is not None and (importance.dtype != np.float32 or importance.shape[0] < last):
        raise KernelError(f"importance is {importance.dtype} of {importance.shape}, expected float32 of {last} rows or more")
    return last


def _scores(q: F32, block: Block) -> F32:
    """<q, k> of every row, before scaling: each row's sum on its own. Of rotated rows an estimate."""
    if block.turn is not None:
        estimated = turbo.scores(q[None], turned.keys_of(block), block.turn.rotation, estimator=block.turn.estimator)
        return estimated.reshape(len(block))
    if block.scales is None:
        plain: F32 = np.add.reduce(decode(block) * q, axis=1, dtype=np.float32)
        return plain
    weighted = q if block.field is None else q * block.field
    products = block.codes.astype(np.float32) * weighted
    total = np.zeros(len(block), np.float32)
    for index in range(block.scales.shape[1]):
        part = products[:, index * block.group : (index + 1) * block.group]
        total += part.sum(axis=1, dtype=np.float32) * block.scales[:, index]
    return total


def _weigh(weights: F32, block: Block) -> F32:
    """sum of weight x row, row after row."""
    if block.turn is not None:
        rotated = turbo.weigh(weights[None], turned.values_of(block))
        return turbo.unrotate(rotated, block.turn.rotation).reshape(block.size)
    if block.scales is None or block.scales.shape[1] != 1:
        return _sum_rows(weights, decode(block))
    total = _sum_rows(weights * block.scales[:, 0], block.codes.astype(np.float32))
    return total if block.field is None else total * block.field


def _sum_rows(weights: F32, rows: F32) -> F32:
    total: npt.NDArray[np.float64] = np.add.reduce(weights[:, None] * rows, axis=0, dtype=np.float64)
    return total.astype(np.float32)
