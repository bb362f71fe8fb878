"""Rings as plans: the numbers of their source, and walks against rows that are never forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from flat_oracle import Buffer, History, aligned_view
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kvstore.live.rings import (
    ALIGN_ROWS,
    MAX_LENGTH,
    PRIME_ROWS,
    REWIND_SLACK_ROWS,
    Contiguous,
    Rebase,
    RestorePlan,
    Ring,
    retain_from,
    retain_in_transaction,
    ring_rows,
    view_start,
)
from warmkv.schema.errors import CannotRewind, CapacityExceeded, RecordError

WINDOW = 512
ROWS = ring_rows(WINDOW, 262_144)


@pytest.mark.parametrize(
    "window, capacity, rows",
    [
        (512, 262_144, 5151),
        (512, 4096, 4096),
        (32, 10_000, 4671),
        (512, 5150, 5150),
        (512, 5151, 5151),
        (512, 5152, 5151),
        (1, 1, 1),
    ],
)
def test_rows_hold_a_window_a_chunk_and_what_can_be_taken_back(window: int, capacity: int, rows: int) -> None:
    assert ring_rows(window, capacity) == rows


def test_constants_are_those_of_the_source() -> None:
    assert (PRIME_ROWS, REWIND_SLACK_ROWS, ALIGN_ROWS) == (4096, 512, 32)
    assert ROWS == WINDOW + 4096 + 512 + 31


def test_slack_before_the_window_survives_a_rebase_and_a_whole_chunk_still_fits() -> None:
    retain = retain_from(ROWS, WINDOW, 0)
    assert retain == 4128
    plan = Ring(ROWS, WINDOW).append_plan(ROWS, retain, PRIME_ROWS)
    assert plan == Rebase(4128, 1023, 4128, 1023)
    ring = Ring(ROWS, WINDOW).rebased(retain)
    for depth in (1, 32, 256, 512):
        assert ring.can_rewind_to(ROWS - depth)
        # an append behind the rewind asks for nothing that is gone
        assert retain_from(ROWS - depth, WINDOW, ring.base) == ring.base
        ring.append_plan(ROWS - depth, retain_from(ROWS - depth, WINDOW, ring.base), 1)
    assert not ring.can_rewind_to(ROWS - 1024)


def test_a_whole_chunk_fits_wherever_the_window_starts() -> None:
    kept = [length - retain_from(length, WINDOW, 0) for length in range(ROWS - 64, ROWS + 64)]
    assert max(kept) == 1054
    assert max(kept) + PRIME_ROWS == 5150 <= ROWS


def test_the_first_append_of_a_ring_lies_as_in_a_flat_buffer() -> None:
    ring = Ring(ROWS, WINDOW)
    assert ring.append_plan(0, 0, 1024) == Contiguous(0)
    assert ring.append_plan(1024, 1024, 7) == Contiguous(1024)
    assert ring.physical(0, 1024) == range(0, 1024)


def test_the_second_chunk_moves_the_aligned_view_to_row_0() -> None:
    ring, start = Ring(ROWS, WINDOW), (4096 - 511) & ~31
    assert start == view_start(4096, WINDOW) == 3584
    assert ring.append_plan(4096, start, 4096) == Rebase(3584, 512, 3584, 512)
    ring = ring.rebased(3584)
    assert ring.physical(3584, 8192) == range(0, 4608)
    assert [ring.can_rewind_to(length) for length in (4095, 4094, 0)] == [True, False, False]


def test_forty_thousand_tokens_in_chunks_rebase_where_the_source_says() -> None:
    ring, bases, kept = Ring(ROWS, WINDOW), [], []
    for length in range(0, 40_960, 4096):
        plan = ring.append_plan(length, retain_from(length, WINDOW, ring.base), 4096)
        if isinstance(plan, Rebase):
            ring = ring.rebased(plan.new_base)
            bases.append(ring.base)
            kept.append(plan.keep_rows)
    assert bases == list(range(3072, 35_841, 4096))
    assert set(kept) == {1024}
    assert ring.restore_plan(40_960) == RestorePlan(40_448, range(4608, 5120))
    with pytest.raises(CannotRewind):
        ring.restore_plan(400)


def test_a_ring_that_never_moved_restores_its_whole_prefix() -> None:
    assert Ring(ROWS, WINDOW).restore_plan(400) == RestorePlan(0, range(400))
    assert Ring(ROWS, WINDOW).restore_plan(0) == RestorePlan(0, range(0))


def test_a_full_ring_takes_nothing_at_row_0_and_one_row_after_a_move() -> None:
    ring = Ring(ROWS, WINDOW)
    assert ring.append_plan(ROWS - 1, 0, 1) == Contiguous(ROWS - 1)
    assert ring.append_plan(ROWS, 0, 0) == Contiguous(0)
    assert ring.append_plan(ROWS, ROWS - 1, 1) == Rebase(ROWS - 1, 1, ROWS - 1, 1)
    assert len(ring.physical(ROWS, ROWS)) == 0
    with pytest.raises(CapacityExceeded):
        ring.append_plan(ROWS, 0, 1)


def test_an_append_fits_to_the_last_row_and_no_further() -> None:
    ring = Ring(100, 10, base=64)
    assert ring.append_plan(164, 128, 64) == Rebase(64, 36, 128, 36)
    with pytest.raises(CapacityExceeded):
        ring.append_plan(164, 128, 65)
    assert ring.append_plan(164, 164, 100) == Rebase(100, 0, 164, 0)


@pytest.mark.parametrize(
    "arguments, error",
    [
        ((31, 31, 1), CannotRewind),
        ((60, 31, 1), CannotRewind),
        ((60, 61, 1), RecordError),
        ((133, 60, 1), CapacityExceeded),
        ((-1, 60, 1), RecordError),
        ((60, -1, 1), RecordError),
        ((60, 60, -1), RecordError),
        ((60, 60, 1.0), RecordError),
        ((60, 60, True), RecordError),
        ((60, 60, MAX_LENGTH), RecordError),
        ((1 << 31, 60, 1), RecordError),
    ],
)
def test_appends_that_cannot_be_are_refused(arguments: tuple[int, int, int], error: type[Exception]) -> None:
    ring = Ring(100, 10, base=32)
    with pytest.raises(error):
        ring.append_plan(*arguments)
    assert ring == Ring(100, 10, base=32)


@pytest.mark.parametrize(
    "span, found",
    [((32, 132), range(0, 100)), ((40, 60), range(8, 28)), ((131, 132), range(99, 100)), ((32, 32), range(0, 0))],
)
def test_positions_lie_their_distance_from_the_base_into_the_buffer(span: tuple[int, int], found: range) -> None:
    assert Ring(100, 10, base=32).physical(*span) == found


@pytest.mark.parametrize(
    "span, error", [((31, 40), CannotRewind), ((40, 39), RecordError), ((32, 133), CapacityExceeded), ((-1, 40), RecordError)]
)
def test_positions_a_ring_has_not_are_refused(span: tuple[int, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        Ring(100, 10, base=32).physical(*span)


def test_hydration_starts_where_its_rows_do() -> None:
    ring = Ring(ring_rows(32, 10_000), 32)
    assert ring.hydrated(8762, 4096) == Ring(4671, 32, 4096)
    assert ring.hydrated(8762, 8704).physical(8740, 8762) == range(36, 58)
    assert ring.hydrated(8762, 8762 - 4671) == Ring(4671, 32, 4091)
    assert ring.hydrated(0, 0) == ring


@pytest.mark.parametrize(
    "length, start, error",
    [
        (8762, 8732, CannotRewind),
        (8762, 8762, CannotRewind),
        (8762, 8762 - 4672, CapacityExceeded),
        (8762, 8763, RecordError),
        (32, 2, CannotRewind),
        (-1, 0, RecordError),
        (5, -1, RecordError),
    ],
)
def test_hydration_that_cannot_show_its_window_is_refused(length: int, start: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        Ring(4671, 32).hydrated(length, start)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 512])
def test_rows_of_the_window_alone_lie_behind_padding_up_to_the_aligned_view(window: int) -> None:
    for length in range(1000, 1033):
        first = length - (window - 1)
        ring = Ring(ring_rows(window, 10_000), window).hydrated(length, first)
        assert (ring.base, ring.valid_from) == (aligned_view(length, window), first)
        assert ring.physical(first, length) == range(ring.padding, ring.padding + window - 1)
        assert ring.can_rewind_to(length) and not ring.can_rewind_to(length - 1)
        assert ring.restore_plan(length) == RestorePlan(ring.base, range(ring.padding + window - 1), ring.padding)
        with pytest.raises(CannotRewind):
            ring.restore_plan(length - 1)


def test_padding_is_over_once_a_rebase_leaves_it_behind() -> None:
    ring = Ring(200, 40).hydrated(100, 61)
    assert ring == Ring(200, 40, 32, 29)
    assert ring.rebased(32) == ring
    assert ring.rebased(50) == Ring(200, 40, 50, 11)
    assert ring.rebased(61) == Ring(200, 40, 61)
    assert ring.rebased(96) == Ring(200, 40, 96)
    assert ring.restore_plan(200) == RestorePlan(160, range(128, 168))


def test_rows_from_before_the_view_need_no_padding() -> None:
    assert Ring(200, 40).hydrated(100, 17) == Ring(200, 40, 17)
    assert Ring(200, 40).hydrated(100, 32) == Ring(200, 40, 32)
    assert Ring(200, 40).hydrated(100, 33) == Ring(200, 40, 32, 1)


def test_a_base_never_goes_back() -> None:
    assert Ring(100, 10, 32).rebased(32) == Ring(100, 10, 32)
    with pytest.raises(CannotRewind):
        Ring(100, 10, 32).rebased(31)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 1), (1, 0), (-5, 3), (10, 2, -1), (10, 2, MAX_LENGTH + 1), (10, 2, 0, -1), (10, 2, MAX_LENGTH, 1), (1.5, 1),
        (True, 1),
    ],
)  # fmt: skip
def test_rings_of_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(RecordError):
        Ring(*sizes)


@pytest.mark.parametrize("window, capacity", [(0, 10), (10, 0), (-1, 10), (10, 1 << 31)])
def test_rows_of_impossible_sizes_are_refused(window: int, capacity: int) -> None:
    with pytest.raises(RecordError):
        ring_rows(window, capacity)


@given(length=st.integers(0, 100_000), window=st.integers(1, 6000), base=st.integers(0, 100_000))
@settings(deadline=None)
def test_views_and_what_is_retained_are_aligned_and_cover_the_window(length: int, window: int, base: int) -> None:
    start = view_start(length, window)
    assert start == aligned_view(length, window)
    kept = retain_from(length, window, base)
    assert kept >= base
    assert kept == base or kept == aligned_view(max(0, length - 512), window)


def test_an_append_of_nothing_keeps_the_wider_of_both_windows() -> None:
    assert retain_in_transaction(64, 64, 33) == 0
    assert view_start(64, 33) == 32


@given(committed=st.integers(0, 20_000), more=st.integers(1, 5000), window=st.integers(1, 6000))
@settings(deadline=None)
def test_a_transaction_keeps_what_either_end_of_it_reads(committed: int, more: int, window: int) -> None:
    target = committed + more
    kept = retain_in_transaction(target, committed, window)
    # the newest row sees itself and window - 1 rows before it; the source counts one more on that side
    assert kept == min(aligned_view(target - 1, window), aligned_view(committed, window))
    assert all(kept <= aligned_view(length, window) for length in range(committed, target + 1, max(1, more // 7)))


@pytest.mark.parametrize("window, rows, biggest", [(40, 200, 120), (1, 33, 34), (32, 64, 6), (64, 160, 70)])
def test_a_long_walk_reads_what_was_written_and_refuses_only_what_is_gone(window: int, rows: int, biggest: int) -> None:
    seen = walked(Ring(rows, window), biggest, steps=3000)
    assert min(seen[name] for name in ("append", "rebase", "no room", "rewind", "lapped")) > 5, seen


@pytest.mark.parametrize("window", [1, 33, 512])
def test_rings_of_the_planned_size_take_every_chunk_of_a_prompt(window: int) -> None:
    seen = walked(Ring(ring_rows(window, 262_144), window), PRIME_ROWS, steps=1500)
    assert seen["no room"] == 0
    assert min(seen[name] for name in ("append", "rebase", "rewind", "lapped")) > 5, seen


def walked(ring: Ring, biggest: int, steps: int) -> Counter[str]:
    """Appends of up to ``biggest`` rows, rewinds and restores at random; how often each came about."""
    rng = np.random.default_rng(ring.rows)
    walk = Walk(ring, Buffer(ring.rows), History())
    seen: Counter[str] = Counter()
    for _ in range(steps):
        deep = ring.rows if rng.random() < 0.1 else biggest // 2
        seen[walk.append(rng, biggest) if rng.random() < 0.7 else walk.rewind(int(rng.integers(0, deep + 1)))] += 1
        walk.check_views()
        if rng.random() < 0.02:
            walk.restore(aligned=rng.random() < 0.3)
    return seen


@dataclass
class Walk:
    """One ring, its buffer, and all that was ever written."""

    ring: Ring
    buffer: Buffer
    history: History

    @property
    def held(self) -> int:
        """The first position that can be found in the buffer."""
        return self.buffer.held_from(self.history.rows, len(self.history.rows) - 1 - self.ring.base)

    def append(self, rng: np.random.Generator, biggest: int) -> str:
        length, count, held = len(self.history.rows), int(rng.integers(0, biggest + 1)), self.held - self.ring.padding
        slack = rng.random() < 0.5
        retain = retain_from(length, self.ring.window, self.ring.base) if slack else aligned_view(length, self.ring.window)
        try:
            plan = self.ring.append_plan(length, retain, count)
        except CapacityExceeded:
            assert length - held + count > self.buffer.rows, "it would have fitted behind what is there"
            assert length - retain + count > self.buffer.rows, "it would have fitted behind what is kept"
            return "no room"
        numbers = self.history.new(count)
        if isinstance(plan, Rebase):
            assert length - held + count > self.buffer.rows, "rows moved for nothing"
            self.ring = self.ring.rebased(plan.new_base)
        self.buffer.move(plan)
        self.buffer.write(plan, numbers)
        self.history.append(numbers)
        return "rebase" if isinstance(plan, Rebase) else "append"

    def rewind(self, back: int) -> str:
        to = max(0, len(self.history.rows) - back)
        there = aligned_view(to, self.ring.window) >= self.ring.base and max(0, to - self.ring.window + 1) >= self.held
        assert self.ring.can_rewind_to(to) == there, (self.ring, to)
        if there:
            self.history.cut(to)
        else:
            with pytest.raises(CannotRewind):
                self.ring.restore_plan(to)
        return "rewind" if there else "lapped"

    def check_views(self) -> None:
        """All that is resident reads as it was written, and that is what the ring says, the window included."""
        rows, held = self.history.rows, self.held
        assert held == min(self.ring.valid_from, len(rows)) <= max(0, len(rows) - self.ring.window + 1)
        found = self.ring.physical(held, len(rows))
        assert np.array_equal(self.buffer.found[found.start : found.stop], rows[held:])
        assert len(self.ring.physical(aligned_view(len(rows), self.ring.window), len(rows))) < self.ring.window + ALIGN_ROWS

    def restore(self, *, aligned: bool) -> None:
        """Go on in a fresh ring that was given all that a read touches, or no more than the window."""
        rows, plan = self.history.rows, self.ring.restore_plan(len(self.history.rows))
        moved = self.buffer.found[plan.physical.start : plan.physical.stop]
        self.buffer = Buffer(self.buffer.rows)
        start = plan.base + plan.padding if aligned else max(0, len(rows) - self.ring.window + 1)
        self.ring = Ring(self.ring.rows, self.ring.window).hydrated(len(rows), start)
        assert self.ring.base == plan.base
        self.buffer.found[self.ring.padding : len(moved)] = moved[self.ring.padding :]
        self.check_views()
