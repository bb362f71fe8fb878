"""How a copy within one array is cut, so that no piece overlaps what it is copied to.

GPUs copy pieces in no order that is promised: a copy onto itself has to go piece by piece, each no longer
than the gap, or through memory of its own where the gap is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` elements from ``start`` to ``offset``, by way of scratch memory where ``aside``."""

    offset: int
    start: int
    count: int
    aside: bool


def moves(offset: int, start: int, count: int, room: int) -> Iterator[Move]:
    """Pieces, to be copied in this order, of a copy of ``count`` elements from ``start`` to ``offset`` of one
    array; scratch memory has ``room`` for so many, at least 1."""
    gap = abs(offset - start)
    if not gap or not count:
        return
    aside = gap < min(room, count)
    piece = min(count, room if aside else gap)
    pieces = range(0, count, piece)
    # What a piece is copied over has to be read by then: upwards from the end, downwards from the front.
    for at in pieces if offset < start else reversed(pieces):
        yield Move(offset + at, start + at, min(piece, count - at), aside)
