"""Rows that are never forgotten, beside buffers that do forget: what plans of rings are tried against.

Every row is a number of its own. What a buffer still has is found by looking for these numbers in it, never
by asking the ring that planned them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.live.rings import AppendPlan, Contiguous, Rebase

Numbers = npt.NDArray[np.int64]
NOTHING = -1


@dataclass
class Buffer:
    """Physical rows, and who writes them as planned. Rows are moved through a copy."""

    rows: int
    found: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self.found = np.full(self.rows, NOTHING, np.int64)

    def move(self, plan: AppendPlan) -> None:
        if isinstance(plan, Rebase):
            self.found[: plan.keep_rows] = self.found[plan.source_row : plan.source_row + plan.keep_rows].copy()

    def write(self, plan: AppendPlan, numbers: Numbers) -> None:
        assert isinstance(plan, Contiguous | Rebase)
        end = plan.write_row + len(numbers)
        assert end <= self.rows, "a plan that writes behind the buffer"
        self.found[plan.write_row : end] = numbers

    def held_from(self, history: Numbers, newest: int) -> int:
        """The first position from which on all of ``history`` lies here in one run that ends at physical row
        ``newest``; its length where not even that row is there, or none is claimed to be (below 0)."""
        if newest < 0 or not len(history):
            return len(history)
        reach = min(newest + 1, len(history))
        same = self.found[newest + 1 - reach : newest + 1] == history[len(history) - reach :]
        run = reach if same.all() else int(np.argmin(same[::-1]))
        return len(history) - run


class History:
    """The rows of a sequence as it stands, each with a number no other row of the walk has."""

    def __init__(self) -> None:
        self._rows = np.empty(1 << 10, np.int64)
        self._length = 0
        self._next = 0

    @property
    def rows(self) -> Numbers:
        return self._rows[: self._length]

    def new(self, count: int) -> Numbers:
        """Numbers for rows that may follow; nothing is appended."""
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int64)

    def append(self, numbers: Numbers) -> None:
        end = self._length + len(numbers)
        while end > len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
        self._rows[self._length : end] = numbers
        self._length = end

    def cut(self, length: int) -> None:
        assert length <= self._length
        self._length = length


def aligned_view(length: int, window: int) -> int:
    """The first position a read at ``length`` starts at, counted down one by one."""
    start = max(0, length - window + 1)
    while start % 32:
        start -= 1
    return start
