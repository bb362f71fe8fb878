"""Where the rows of a window lie in a buffer of fixed size, decided without touching a row.

A ring holds positions [base, base + rows) of a sequence: the row of position p is physical row p - base, so
what is read is always one run of rows. An append that would leave the buffer moves what is still needed to
row 0 (a `Rebase`), and what lay before it is gone. Rings are values: asking changes nothing, and what is to
be done comes back as a plan for whoever owns the memory.

**Source:** the sliding-window rings of the memra engine, whose numbers are kept: reads start at multiples
of 32 rows, and a ring has room for one prompt chunk beside its window and what a rejected draft takes back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index
from typing import TypeAlias

from warmkv.schema.errors import CannotRewind, CapacityExceeded, RecordError

#: Rows of the longest chunk of a prompt that is appended at once.
PRIME_ROWS = 4096
#: Rows kept before the window, so that tokens can be taken back after a rebase.
REWIND_SLACK_ROWS = 512
#: Reads start at multiples of so many rows.
ALIGN_ROWS = 32
#: Lengths and bases have int32 mirrors on the device.
MAX_LENGTH = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Rows are written from physical row ``write_row`` on; nothing moves."""

    write_row: int


@dataclass(frozen=True, slots=True)
class Rebase:
    """Physical rows [source_row, source_row + keep_rows) move to row 0, which then stands for position
    ``new_base``; rows are written from ``write_row`` on. Source and target may overlap."""

    source_row: int
    keep_rows: int
    new_base: int
    write_row: int


AppendPlan: TypeAlias = Contiguous | Rebase


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a fresh ring needs of another: its ``physical`` rows go to row 0, which stands for ``base``. The
    first ``padding`` of them are nobody's."""

    base: int
    physical: range
    padding: int = 0


def ring_rows(window: int, capacity: int) -> int:
    """Physical rows of a ring for sequences of up to ``capacity`` positions: the window, a whole chunk, the
    rows that can be taken back and an alignment's worth before the window, or just ``capacity``."""
    check_count("window", window, least=1)
    check_count("capacity", capacity, least=1)
    return min(capacity, window + PRIME_ROWS + REWIND_SLACK_ROWS + ALIGN_ROWS - 1)


def window_start(length: int, window: int) -> int:
    """The first position that counts for the newest row."""
    return max(0, length - (window - 1))


def view_start(length: int, window: int) -> int:
    """The first position a read of the newest row touches: that of the window, aligned down."""
    return align_down(window_start(length, window))


def retain_from(first_row: int, window: int, base: int) -> int:
    """The first position worth keeping when rows from ``first_row`` on are appended: the window's with the
    slack, aligned down, but never one that is gone. Slack is granted where it is there, not demanded."""
    check_count("first row", first_row)
    check_count("window", window, least=1)
    check_count("base", base)
    return max(align_down(window_start(first_row, window) - REWIND_SLACK_ROWS), base)


def retain_in_transaction(target: int, committed: int, window: int) -> int:
    """The first position that an append up to ``target`` must keep while ``committed`` rows can still be what
    is left of it: the window of what is staged, and that of the committed length."""
    check_count("target", target)
    check_count("committed length", committed)
    check_count("window", window, least=1)
    return min(align_down(target - window), view_start(committed, window))


@dataclass(frozen=True, slots=True)
class Ring:
    """A buffer of ``rows`` rows for a window of ``window``, of which row 0 stands for position ``base``. The
    first ``padding`` rows are nobody's: whoever restored a ring had no rows before its window, and reads,
    which start aligned, mask what is there.

    Raises RecordError for sizes that are none, and for lengths or positions below 0 or beyond int32."""

    rows: int
    window: int
    base: int = 0
    padding: int = 0

    def __post_init__(self) -> None:
        check_count("rows", self.rows, least=1)
        check_count("window", self.window, least=1)
        check_count("base", self.base)
        check_count("padding", self.padding)
        check_count("first position", self.valid_from)

    @property
    def valid_from(self) -> int:
        """The first position whose row is one."""
        return self.base + self.padding

    def append_plan(self, length: int, retain: int, count: int) -> AppendPlan:
        """Where ``count`` rows go behind ``length``, if positions from ``retain`` on are kept. Nothing moves
        while they fit behind what is there. A full ring to which nothing is appended writes at row 0.

        Raises CannotRewind where ``length`` or ``retain`` is before what the ring holds, CapacityExceeded
        where what is kept and what is new do not fit, RecordError where ``retain`` is beyond ``length``."""
        check_count("length", length)
        check_count("retain", retain)
        check_count("count", count)
        if retain > length:
            raise RecordError(f"{self._where}: rows from {retain} on to be kept of a length of {length}")
        if retain < self.base:
            raise CannotRewind(f"{self._where}: rows from {retain} on to be kept, held are those from {self.base} on")
        used = length - self.base
        if used > self.rows:
            raise CapacityExceeded(f"{self._where}: a length of {length}, which is {used} rows")
        check_count("length after the append", length + count)
        if used + count <= self.rows:
            return Contiguous(used % self.rows)
        keep = length - retain
        if keep + count > self.rows:
            raise CapacityExceeded(
                f"{self._where}: {keep} rows to be kept and {count} new ones, expected at most {self.rows - keep}"
            )
        return Rebase(retain - self.base, keep, retain, keep)

    def rebased(self, new_base: int) -> Ring:
        """After a `Rebase`. Raises CannotRewind for a base before this one: those rows are gone."""
        check_count("base", new_base)
        if new_base < self.base:
            raise CannotRewind(f"{self._where}: a base of {new_base}")
        return replace(self, base=new_base, padding=max(0, self.valid_from - new_base))

    def physical(self, start: int, end: int) -> range:
        """The rows of positions [start, end). An empty range may lie anywhere. Raises CannotRewind before the
        base, CapacityExceeded behind the buffer, RecordError where ``end`` is before ``start``."""
        check_count("start", start)
        check_count("end", end)
        if end < start:
            raise RecordError(f"{self._where}: positions [{start}, {end})")
        if start < self.base:
            raise CannotRewind(f"{self._where}: positions [{start}, {end}), held are those from {self.base} on")
        if end - self.base > self.rows:
            raise CapacityExceeded(f"{self._where}: positions [{start}, {end})")
        first = (start - self.base) % self.rows
        return range(first, first + end - start)

    def can_rewind_to(self, length: int) -> bool:
        """Whether all that a read at ``length`` touches is still here, were that the length."""
        check_count("length", length)
        return view_start(length, self.window) >= self.base and window_start(length, self.window) >= self.valid_from

    def restore_plan(self, length: int) -> RestorePlan:
        """What a fresh ring needs to go on from ``length`` (absolute, however often this one was rebased):
        the aligned window. Raises CannotRewind where that is no longer here, CapacityExceeded where it
        never was."""
        check_count("length", length)
        start = view_start(length, self.window)
        if window_start(length, self.window) < self.valid_from:
            raise CannotRewind(f"{self._where}: a length of {length}")
        return RestorePlan(start, self.physical(start, length), max(0, self.valid_from - start))

    def hydrated(self, length: int, start: int) -> Ring:
        """A ring of these sizes that holds positions [start, length), whatever this one holds: at its rows
        `physical` (start, length). Where ``start`` is within the window's alignment there is padding before them.
        Raises CapacityExceeded where they are more than its rows, CannotRewind where the window at ``length``
        begins before ``start``, RecordError where ``start`` is beyond ``length``."""
        check_count("length", length)
        check_count("start", start)
        if start > length:
            raise RecordError(f"{self._where}: positions [{start}, {length})")
        base = min(start, view_start(length, self.window))
        if length - base > self.rows:
            raise CapacityExceeded(f"{self._where}: {length - base} rows of positions [{base}, {length})")
        ring = replace(self, base=base, padding=start - base)
        if not ring.can_rewind_to(length):
            first = window_start(length, self.window)
            raise CannotRewind(f"{self._where}: positions from {start} on, the window at {length} starts at {first}")
        return ring

    @property
    def _where(self) -> str:
        return f"ring of {self.rows} rows from {self.valid_from} on, window {self.window}"


def align_down(position: int) -> int:
    """The multiple of `ALIGN_ROWS` at or before it; 0 for negative ones."""
    return max(0, position) // ALIGN_ROWS * ALIGN_ROWS


def check_count(name: str, count: int, *, least: int = 0) -> None:
    """Raises RecordError for what is no whole number between ``least`` and what int32 mirrors hold."""
    try:
        fits = not isinstance(count, bool) and least <= index(count) <= MAX_LENGTH
    except TypeError:
        fits = False
    if not fits:
        raise RecordError(f"{name} is {count!r}, expected a whole number from {least} to {MAX_LENGTH}")
