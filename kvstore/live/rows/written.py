"""Rows that are written in a plane's format when they are read: a part of record bytes that never is there as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, Union

import numpy as np

from warmkv.kernels.formats import F32, Block
from warmkv.kernels.quant.packed import Packed, pack, packed_dtype, packed_shape
from warmkv.kvstore.live.rows.encoded import Encoded
from warmkv.kvstore.live.rows.growing import GrowingRows

#: Bytes of float32 rows that are there at once.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """Rows [first, last) of what ``read`` gives, (n, heads, size) float32 of two of its rows, as the empty plane
    ``like`` stores them, its field included. Has shape, dtype and length of the packed array that it stands for."""

    like: GrowingRows
    read: Callable[[int, int], F32]
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def shape(self) -> tuple[int, ...]:
        plane = self.like
        return (len(self), *packed_shape(plane.format, plane.heads, plane.size, keys=plane.keys))

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return packed_dtype(self.like.format)

    def __getitem__(self, rows: slice) -> Written:
        """Some of its rows in a row."""
        low, high, _ = rows.indices(len(self))
        return replace(self, first=self.first + low, last=self.first + max(low, high))

    def pieces(self) -> Iterator[Packed]:
        """The record bytes of all rows, a few rows at a time. Raises RecordError for a row that the format cannot hold."""
        step = rows_at_once(self.like.heads, self.like.size)
        for low in range(self.first, self.last, step):
            high = min(low + step, self.last)
            yield packed_of(self.like.encode(self.read(low, high), first=low), self.like)


#: Record bytes of rows that follow one another.
Part: TypeAlias = Union[Packed, Written]


def rows_at_once(heads: int, size: int) -> int:
    """How many rows of so many channels are there as float32 at once."""
    return max(1, PIECE_BYTES // (4 * heads * size))


def pieces_of(part: Part) -> Iterator[Packed]:
    """A part as arrays: itself, or what is written just then."""
    if isinstance(part, Written):
        yield from part.pieces()
    else:
        yield part


def packed_of(encoded: Encoded, plane: GrowingRows) -> Packed:
    """The record bytes of rows that ``plane`` encoded, copied."""
    scales = (None,) * plane.heads if encoded.scales is None else encoded.scales
    heads = [[Block(plane.format, codes, mine, turn=plane.turn)] for codes, mine in zip(encoded.codes, scales, strict=True)]
    return pack(heads, plane.format, plane.size, keys=plane.keys)
