"""Planes of fixed capacity in a device's memory, as operations are told of them.

A plane is one run of bytes: token after token, of each token head after head, of each head a row as its
format stores it (`quant.packed`, `turboquant.block`). So blocks of 32 channels never straddle heads, rows of
a segment are a copy of bytes, and `TAIL_PAD` bytes behind the last row let kernels read whole words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.turboquant.turn import Turn

#: Bytes behind the last row of a plane.
TAIL_PAD = 8


@dataclass(frozen=True, slots=True)
class ResidentPlane:
    """``data`` is a device array (rows * row_bytes + TAIL_PAD,) uint8; ``field`` (heads, size) float32 on the
    device for q8_2f once frozen, else None; ``turn`` is what rotated rows are rotated by."""

    format: RowFormat
    heads: int
    size: int
    keys: bool
    rows: int
    data: Any
    field: Any | None = None
    turn: Turn | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.format.row_bytes(self.size, keys=self.keys)


@dataclass(frozen=True, slots=True)
class Counters:
    """Device mirrors of a layer's length and of the position its physical row 0 stands for: int32 (1,) each, at
    addresses that never change, so that captured launches read what is true when they run.

    The row of position p is physical row p - base."""

    length: Any
    base: Any
