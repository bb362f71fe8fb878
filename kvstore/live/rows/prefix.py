"""Rows that lie in somebody else's memory, and a tail of our own behind them.

A restored prefix is attended where it was mapped, so that many processes hold it once. Cutting it
from either end only narrows views. What would change its bytes or pick rows out of it - a gather, a
freeze of an open field - copies all rows into memory of our own first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warmkv.kernels.attention.reference import seen
from warmkv.kernels.formats import F32, Block, total_rows
from warmkv.kvstore.live.rows.encoded import Encoded, Indices
from warmkv.kvstore.live.rows.given import check_given, common_field
from warmkv.kvstore.live.rows.growing import GrowingRows, readonly
from warmkv.schema.errors import RecordError

Blocks = tuple[Block, ...]


class PrefixRows:
    """A plane of a mapped prefix and a growing ``tail``, which is empty when it is handed over.

    ``prefix`` holds per alive KV head the blocks in order, all of the tail's format and rotation and either all of one
    frozen field a head, which then becomes the tail's, or all of an open one. The arrays are borrowed and
    must not change while this is used; their owner stays alive through the views.
    Raises RecordError for blocks that do not fit, OutOfMemory for the tail's field.

    **Threading:** as `PlaneRows`."""

    def __init__(self, prefix: Sequence[Sequence[Block]], tail: GrowingRows) -> None:
        self.format, self.heads, self.size, self.keys, self.name = tail.format, tail.heads, tail.size, tail.keys, tail.name
        self.turn = tail.turn
        check_given(prefix, tail)
        if len(tail):
            raise RecordError(f"{tail.name}: a tail of {len(tail)} rows behind a prefix, expected an empty one")
        field = common_field(prefix, tail)
        self._prefix: list[Blocks] = [tuple(_borrowed(block) for block in blocks if len(block)) for blocks in prefix]
        self._rows = total_rows(self._prefix[0])
        self._tail = tail
        if field is not None:
            tail.seed_field(field)

    def __len__(self) -> int:
        return self._rows + len(self._tail)

    @property
    def prefix_rows(self) -> int:
        """Rows that are not in memory of our own."""
        return self._rows

    @property
    def frozen(self) -> bool:
        return self._tail.frozen

    @property
    def field(self) -> F32 | None:
        return self._tail.field

    @property
    def stored_bytes(self) -> int:
        return self.mapped_bytes + self._tail.stored_bytes

    @property
    def allocated_bytes(self) -> int:
        return self._tail.allocated_bytes

    @property
    def mapped_bytes(self) -> int:
        return self.heads * self._rows * self.format.row_bytes(self.size, keys=self.keys)

    def reserve(self, rows: int) -> None:
        self._tail.reserve(rows)

    def encode(self, rows: F32) -> Encoded:
        return self._tail.encode(rows)

    def write(self, encoded: Encoded) -> None:
        self._tail.write(encoded)

    def append(self, rows: F32) -> None:
        self.write(self.encode(rows))

    def refielded(self, room: int = 0) -> GrowingRows:
        return self._tail.collected(self._all(), None, room, refield=not self.frozen)

    def gathered(self, kept: Indices | None, room: int = 0) -> GrowingRows:
        return self._tail.collected(self._all(), kept, room)

    def take(self, other: GrowingRows) -> None:
        self._tail.take(other)
        self._drop_prefix()

    def freeze(self) -> None:
        if not self.frozen:
            self.take(self.refielded())

    def gather(self, kept: Indices) -> None:
        self.take(self.gathered(kept))

    def truncate(self, rows: int) -> None:
        self._tail.truncate(max(0, rows - self._rows))
        self._cut(0, max(0, rows))

    def drop_front(self, rows: int) -> None:
        self._tail.drop_front(max(0, rows - self._rows))
        self._cut(max(0, rows), self._rows)

    def clear(self) -> None:
        self._tail.clear()
        self._drop_prefix()

    def release(self) -> None:
        self._tail.release()
        self._drop_prefix()

    def blocks(self, head: int) -> Blocks:
        if self._rows and not len(self._tail):
            return self._prefix[head]
        return self._prefix[head] + self._tail.blocks(head)

    def _all(self) -> list[Blocks]:
        return [self.blocks(head) for head in range(self.heads)]

    def _cut(self, first: int, last: int) -> None:
        last = min(last, self._rows)
        if first <= 0 and last == self._rows:
            return
        self._prefix = [tuple(block.rows(low, high) for block, low, high in seen(blocks, first, last)) for blocks in self._prefix]
        self._rows = total_rows(self._prefix[0])

    def _drop_prefix(self) -> None:
        self._prefix, self._rows = [()] * self.heads, 0


def _borrowed(block: Block) -> Block:
    scales = None if block.scales is None else readonly(block.scales)
    field = None if block.field is None else readonly(block.field)
    return replace(block, codes=readonly(block.codes), scales=scales, field=field)
