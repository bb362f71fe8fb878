"""Stored rows as numbers, some at a time: rows of another format are written anew without all of them in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from warmkv.kernels.attention.reference import seen
from warmkv.kernels.formats import F32, Block, total_rows
from warmkv.kernels.quant.packed import view
from warmkv.kernels.quant.reference import decode
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.bridge.specs import Side
from warmkv.kvstore.live.rows.written import rows_at_once
from warmkv.kvstore.restored import Rows

#: By head the blocks that follow one another.
Heads = list[list[Block]]


def heads_of(parts: Sequence[Rows], side: Side, field: F32 | None, turn: Turn | None) -> Heads:
    """Views over packed rows, one part after the other. Raises KernelError."""
    views = [view(part, side.format, side.heads, side.size, keys=side.keys, field=field, turn=turn) for part in parts]
    return [[blocks[head] for blocks in views] for head in range(side.heads)]


def decoded(heads: Heads, side: Side, first: int, last: int) -> F32:
    """Rows [first, last) as (n, heads, size) float32."""
    found: F32 = np.empty((last - first, side.heads, side.size), np.float32)
    for head, blocks in enumerate(heads):
        at = 0
        for block, low, high in seen(blocks, first, last):
            found[at : at + high - low, head] = decode(block.rows(low, high))
            at += high - low
    return found


def pieces(stored: Sequence[Heads], sides: Sequence[Side]) -> Iterator[list[F32]]:
    """All rows of each of ``stored``, which have as many, a few MiB at a time."""
    count, step = total_rows(stored[0][0]), min(rows_at_once(side.heads, side.size) for side in sides)
    for first in range(0, count, step):
        last = min(first + step, count)
        yield [decoded(heads, side, first, last) for heads, side in zip(stored, sides, strict=True)]
