"""Decode attention over any mix of formats, compiled: TurboQuant rows on either side, others as they are.

Scores of all rows, softmax, weighted sums: each block by the kernel of its format. Rotated rows are
never written out: the query is rotated once a block, and sums of values that were rotated alike are
turned back once. A head's numbers are the same bits in any group and whatever rows it does not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention import compiled as loops
from warmkv.kernels.attention.addresses import line
from warmkv.kernels.attention.reference import Attended, Blocks, seen
from warmkv.kernels.compiled.vectors import WIDTH
from warmkv.kernels.formats import F32, KEY_GROUP, Block
from warmkv.kernels.turboquant import fast
from warmkv.kernels.turboquant.block import keys_of, values_of
from warmkv.kernels.turboquant.rotation import Rotation

F64 = npt.NDArray[np.float64]


def rotated(planes: Sequence[Blocks]) -> bool:
    """Whether any row is: what the compiled loops alone cannot read."""
    return any(block.turn is not None for blocks in planes for block in blocks)


def attend(
    q: F32, keys: Blocks, values: Blocks, first: int, last: int, scale: float, softcap: float, sinks: F32 | None, mass: F32
) -> Attended:  # fmt: skip
    """`reference.attend` of one KV head and arguments that fit; ``mass`` (visible rows,) or empty."""
    heads, size = q.shape
    count = max(0, last - first)
    done = Attended(
        np.zeros((heads, values[0].size if values else size), np.float32), np.full(heads, -np.inf, np.float32),
        np.zeros(heads, np.float32),
    )  # fmt: skip
    if heads == 0 or (count == 0 and sinks is None):
        return done
    weights = np.empty((heads, -(-count // WIDTH) * WIDTH + WIDTH), np.float32)
    for block, at in _placed(keys, first, last):
        _score(q, block, scale, weights, at)
    extra = np.full(heads, -np.inf, np.float32) if sinks is None else np.array(sinks, np.float32)
    loops.soften_heads(weights, count, np.float32(softcap), extra, mass, done.top, done.total)
    _weigh(_placed(values, first, last), weights, done.out)
    return done


def _placed(blocks: Blocks, first: int, last: int) -> Iterator[tuple[Block, int]]:
    """The visible rows of each block, and how many come before them."""
    at = 0
    for block, low, high in seen(blocks, first, last):
        yield block.rows(low, high), at
        at += high - low


def _score(q: F32, block: Block, scale: float, logits: F32, at: int) -> None:
    """Scores of a block to ``logits`` (heads, ...) from column ``at`` on; up to three columns behind them are
    written over."""
    if block.turn is not None:
        found = fast.scores(q, keys_of(block), block.turn.rotation, scale=scale, estimator=block.turn.estimator)
        logits[:, at : at + len(block)] = found
        return
    size = q.shape[1]
    queries = np.zeros((len(q), -(-size // KEY_GROUP) * KEY_GROUP), np.float32)
    queries[:, :size] = q
    kept: list[npt.NDArray[np.generic]] = []
    loops.score_block(queries, size, np.array([line(block, 0, len(block), kept)], np.intp), np.float32(scale), logits, at)


def _weigh(placed: Iterator[tuple[Block, int]], weights: F32, out: F32) -> None:
    """Fill ``out`` (heads, size) with the weighted sum of all rows."""
    heads, size = out.shape
    plain = np.zeros((heads, -(-size // WIDTH) * WIDTH), np.float64)
    turned: dict[Rotation, F64] = {}
    for block, at in placed:
        if block.turn is None:
            kept: list[npt.NDArray[np.generic]] = []
            loops.weigh_block(np.array([line(block, 0, len(block), kept)], np.intp), size, weights, at, plain)
            continue
        part = fast.weigh(weights[:, at : at + len(block)], values_of(block))
        before = turned.get(block.turn.rotation)
        turned[block.turn.rotation] = part.astype(np.float64) if before is None else before + part
    total = plain[:, :size]
    for rotation, sums in turned.items():
        total += fast.unrotate(sums.astype(np.float32), rotation)
    out[:] = total
