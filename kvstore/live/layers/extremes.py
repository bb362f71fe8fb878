"""The largest numbers of stored keys and values, scanned only where rows are new."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warmkv.kernels.attention.reference import seen
from warmkv.kernels.formats import Block
from warmkv.kernels.quant.reference import decode
from warmkv.kvstore.live.rows.base import PlaneRows

#: Rows decoded at a time.
_STEP = 1024


class AbsMax:
    """max |x| of each plane over its first ``scanned`` rows; infinity once one was infinite or NaN.

    Rows given up in front may still be counted: the answer can be too large, never too small."""

    def __init__(self, planes: int) -> None:
        self._tops = [0.0] * planes
        self.scanned = 0

    def changed(self, first: int) -> None:
        """Rows from ``first`` on may be others than those scanned."""
        self.scanned = min(self.scanned, first)

    def dropped(self, rows: int) -> None:
        """So many rows are gone in front."""
        self.scanned = max(0, self.scanned - rows)

    def scan(self, planes: Sequence[PlaneRows]) -> tuple[float, ...]:
        rows = len(planes[0])
        first = min(self.scanned, rows)
        if first == 0:
            self._tops = [0.0] * len(planes)
        for index, plane in enumerate(planes):
            for head in range(plane.heads):
                for block, low, high in seen(plane.blocks(head), first, rows):
                    self._tops[index] = max(self._tops[index], abs_max(block.rows(low, high)))
        self.scanned = rows
        return tuple(self._tops)

    def after(self, planes: Sequence[PlaneRows], start: int, upto: int, tops: Sequence[float]) -> tuple[float, ...]:
        """`scan` for who knows the maxima ``tops`` of rows [start, upto): they are believed where these are
        just the rows not scanned yet."""
        if not (self.scanned == start <= upto == len(planes[0])):
            return self.scan(planes)
        before = [0.0] * len(planes) if start == 0 else self._tops
        self._tops = [max(old, _or_infinity(new)) for old, new in zip(before, tops, strict=True)]
        self.scanned = upto
        return tuple(self._tops)


def abs_max(block: Block) -> float:
    """The largest magnitude of what the rows stand for; infinity for NaN."""
    top = 0.0
    for at in range(0, len(block), _STEP):
        part = block.rows(at, min(at + _STEP, len(block)))
        top = max(top, _or_infinity(float(np.abs(decode(part)).max(initial=0))))
    return top


def _or_infinity(value: float) -> float:
    return float("inf") if np.isnan(value) else float(value)
