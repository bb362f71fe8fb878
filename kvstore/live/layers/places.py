"""Which positions stored rows stand for, counted apart from how many there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warmkv.kvstore.live.layers.base import check_count
from warmkv.kvstore.live.rows.encoded import Indices
from warmkv.kvstore.live.rows.planes import run_at_end
from warmkv.schema.errors import CannotRewind, RecordError


@dataclass(slots=True)
class Places:
    """``rows`` rows before the next token at ``position``. While they are ``gapless`` they stand for
    [``base``, ``position``); after an eviction from their midst only the newest ``solid`` are known to
    be consecutive and ``base`` says nothing. ``window``: rows a query sees, itself included; 0: all."""

    name: str
    window: int = 0
    rows: int = 0
    position: int = 0
    base: int = 0
    gapless: bool = True
    solid: int = 0

    def append(self, count: int) -> None:
        self.rows += count
        self.position += count
        self.solid += count

    def check_truncate(self, count: int) -> None:
        """As `LayerState.check_truncate`: what a shorter sequence would see must be stored."""
        check_count(self.name, count, self.position)
        back = self.position - count
        if count and self.window and self.base > max(0, back - self.window + 1):
            raise CannotRewind(
                f"{self.name}: {count} positions to forget; at position {back} a window of {self.window} starts before row "
                f"{self.base}, the oldest stored"
            )
        if count > self.solid:
            raise CannotRewind(
                f"{self.name}: {count} positions to forget, expected 0 to {self.solid}: before the newest {self.solid} rows "
                "some were given up"
            )

    def truncate(self, count: int) -> None:
        count = int(count)  # numpy's numbers are no part of a position
        self.rows -= count
        self.position -= count
        self.solid -= count

    def keep(self, kept: Indices) -> None:
        """Rows at ``kept``, ascending, were kept and the others given up."""
        self.solid = min(self.solid, run_at_end(kept, self.rows))
        self.rows = len(kept)
        self.gapless = self.solid == self.rows
        self.base = self.position - self.rows if self.gapless else 0

    def trimmed(self, slack: int, align: int, anchor: int | None) -> int:
        """Rows in front that no query sees any more, once more than two windows are stored: rows are kept
        from a multiple of ``align``, ``slack`` rows and the window before the next position, or before
        ``anchor`` where that comes first."""
        whole = all(isinstance(count, (int, np.integer)) for count in (slack, align, 0 if anchor is None else anchor))
        if not whole or slack < 0 or align < 1 or (anchor is not None and anchor < 0):
            raise RecordError(
                f"{self.name}: slack {slack!r}, align {align!r}, anchor {anchor!r}; expected whole numbers of at least 0, 1 and 0"
            )
        if not self.window or not self.gapless or self.rows <= 2 * self.window:
            return 0
        end = self.position if anchor is None else min(self.position, anchor)
        base = max(0, end - self.window - slack) // align * align
        return int(max(0, base - self.base))

    def trim(self, count: int) -> None:
        self.rows -= count
        self.base += count
        self.solid = self.rows

    def reset(self) -> None:
        self.rows = self.position = self.base = self.solid = 0
        self.gapless = True
