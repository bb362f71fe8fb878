"""The book of a cache over layers and ranks: the cases of its source, faults, and a walk that forgets nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from flat_oracle import Buffer, History, aligned_view

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.ledger import Ledger
from warmkv.kvstore.live.ledger_plans import FLAT, FinishPlan, GrowPlan, LayerRows, Layout, Plan, StagePlan
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rings import MAX_LENGTH, Contiguous, Rebase, RestorePlan, Ring, ring_rows
from warmkv.kvstore.live.transaction import LAST_GENERATION, Transaction
from warmkv.schema.errors import CannotRewind, CapacityExceeded, OutOfMemory, RecordError, TransactionError
from warmkv.schema.identity import LayerKind

ROWS = LayerRows(136, 96)
RING = LayerRows(136, 96, 32)


def flat(capacity: int, rows: LayerRows = ROWS, ranks: int = 1) -> Ledger:
    return Ledger.fresh(Layout((rows,), capacity, ranks))


def ringed(capacity: int, ranks: int = 1) -> Ledger:
    return flat(capacity, RING, ranks)


def hydrated(ledger: Ledger, length: int, start: int = 0) -> Ledger:
    window = ledger.layout.windows[0]
    return ledger.publish(ledger.hydrate_plan(length, {window: start}))


def committed(ledger: Ledger, count: int, accepted: int | None = None) -> Ledger:
    """After a transaction of ``count`` rows (0: none) of which ``accepted`` stay, all unless told."""
    ledger = ledger.begin()
    if count:
        ledger = ledger.publish(ledger.stage_plan(ledger.active, count))
    return ledger.publish(ledger.finish_plan(ledger.active, count if accepted is None else accepted))


def test_a_rebase_in_a_transaction_keeps_what_a_rollback_reads() -> None:
    ledger = hydrated(ringed(10_000), 8762, 4096)
    assert ledger.ring(32) == Ring(4671, 32, 4096)
    ledger = ledger.begin()
    transaction = ledger.active
    plan = ledger.stage_plan(transaction, 10)
    assert (plan.target, plan.rebases) == (8772, True)
    assert plan.place(32) == Rebase(4608, 58, 8704, 58)
    ledger = ledger.publish(plan)
    assert ledger.ring(32) == Ring(4671, 32, 8704)
    assert ledger.physical(8740, 8772, 32) == range(36, 68)
    ledger = ledger.publish(ledger.finish_plan(transaction, 0))
    assert (ledger.committed, ledger.staged) == (8762, 8762)
    assert not ledger.can_rewind_to(8200)
    with pytest.raises(CannotRewind):
        ledger.rewind_plan(8200)


def test_growth_keeps_the_generation_and_copies_the_committed_prefix() -> None:
    source = committed(committed(flat(8), 5), 0)
    plan = source.grow_plan(16, 3)
    assert plan.length == 3
    assert plan.move() == RestorePlan(0, range(3))
    assert plan.copied_bytes(0) == (3 * 136, 3 * 96)
    target = flat(16).publish(plan)
    assert (target.committed, target.staged, target.layout.capacity) == (3, 3, 16)
    assert target.begin().active == Transaction(3, 3)


def test_growth_of_a_ring_copies_the_live_window_only() -> None:
    source = committed(hydrated(ringed(10_000), 8250, 4096), 0)
    plan = source.grow_plan(20_000, 8250)
    assert plan.move(32) == RestorePlan(8192, range(4096, 4154))
    assert plan.copied_bytes(0) == (58 * 136, 58 * 96)
    target = ringed(20_000).publish(plan)
    assert target.ring(32) == Ring(4671, 32, 8192)
    assert (target.committed, target.staged) == (8250, 8250)
    assert target.physical(8192, 8250, 32) == range(58)
    assert target.begin().active == Transaction(2, 8250)
    assert ringed(20_000).publish(source.grow_plan(20_000)) == target


def test_growth_is_refused_from_what_is_busy_and_into_what_is_no_larger() -> None:
    with pytest.raises(TransactionError):
        flat(8).begin().grow_plan(16, 0)
    half = replace(flat(8), lengths=replace(flat(8).lengths, committed=2, staged=3))
    with pytest.raises(TransactionError):
        half.grow_plan(16, 0)
    source = hydrated(flat(8), 5)
    for capacity in (8, 7, 1):
        with pytest.raises(CapacityExceeded):
            source.grow_plan(capacity, 5)
    with pytest.raises(CapacityExceeded):
        source.grow_plan(MAX_LENGTH + 1)
    with pytest.raises(TransactionError):
        source.grow_plan(16, 6)
    for number in (-1, 2.0):
        with pytest.raises(RecordError):
            source.grow_plan(16, number)  # type: ignore[arg-type]
    lapped = hydrated(ringed(10_000), 8250, 8192)
    with pytest.raises(CannotRewind):
        lapped.grow_plan(20_000, 8000)


def test_growth_is_published_into_a_fresh_cache_of_the_same_layout_only() -> None:
    plan = hydrated(flat(8), 5).grow_plan(16, 4)
    layout = plan.layout
    others = (
        replace(layout, layers=(LayerRows(144, 96),)), replace(layout, layers=(LayerRows(136, 90),)),
        replace(layout, layers=(RING,)), replace(layout, layers=(ROWS, ROWS)), replace(layout, capacity=17),
        replace(layout, ranks=2),
    )  # fmt: skip
    for other in others:
        with pytest.raises(TransactionError):
            Ledger.fresh(other).publish(plan)
    for used in (hydrated(flat(16), 1), committed(flat(16), 0), flat(16).begin()):
        with pytest.raises(TransactionError):
            used.publish(plan)
    with pytest.raises(TransactionError):
        flat(16).publish(replace(plan, length=17))
    assert flat(16).publish(plan).committed == 4


def test_hydration_is_for_fresh_caches_and_shows_its_window() -> None:
    fresh = ringed(10_000)
    for length, start, error in ((8762, 8762 - 4672, CapacityExceeded), (8762, 8732, CannotRewind), (5, 6, RecordError)):
        with pytest.raises(error):
            fresh.hydrate_plan(length, {32: start})
    with pytest.raises(CapacityExceeded):
        fresh.hydrate_plan(10_001)
    with pytest.raises(RecordError):
        fresh.hydrate_plan(10, {33: 0})
    with pytest.raises(CannotRewind):
        flat(10_000).hydrate_plan(10, {FLAT: 1})
    plan = fresh.hydrate_plan(8762)
    assert (plan.start(32), plan.place(32)) == (8704, range(58))
    window = fresh.hydrate_plan(8762, {32: 8731})
    assert (window.start(32), window.place(32)) == (8731, range(27, 58))
    filled = fresh.publish(window)
    assert [filled.can_rewind_to(length) for length in (8761, 8762, 8763)] == [False, True, False]
    for forged in (replace(window, physical=plan.physical), replace(window, windows=(33,)), replace(window, starts=(8732,))):
        with pytest.raises(TransactionError):
            fresh.publish(forged)
    for used in (fresh.begin(), committed(fresh, 0), hydrated(fresh, 1)):
        with pytest.raises(TransactionError):
            used.hydrate_plan(3)
        with pytest.raises(TransactionError):
            used.publish(fresh.hydrate_plan(3))


def test_flat_and_ringed_layers_go_together() -> None:
    ledger = Ledger.fresh(Layout((ROWS, RING, LayerRows(10, 10, 512), RING, LayerRows(0, 0)), 40_000))
    assert ledger.layout.windows == (FLAT, 32, 512)
    ledger = ledger.publish(ledger.hydrate_plan(30_000))
    assert [ledger.physical(29_999, 30_000, window).start for window in (FLAT, 32, 512)] == [29_999, 47, 527]
    ledger = ledger.begin()
    plan = ledger.stage_plan(ledger.active, 4096)
    assert [plan.place(window) for window in ledger.layout.windows] == [Contiguous(30_000), Contiguous(48), Contiguous(528)]
    grown = committed(ledger.abandoned(), 0).grow_plan(50_000)
    assert [grown.copied_bytes(layer) for layer in range(4)] == [
        (30_000 * 136, 30_000 * 96), (48 * 136, 48 * 96), (5280, 5280), (48 * 136, 48 * 96),
    ]  # fmt: skip
    for ask in (plan.place, grown.move, ledger.ring):
        with pytest.raises(RecordError):
            ask(33)
        with pytest.raises(RecordError):
            ask(32, 1)
    with pytest.raises(RecordError):
        grown.copied_bytes(4, 1)


def test_a_plan_of_another_state_is_refused_and_changes_nothing() -> None:
    ledger = hydrated(ringed(10_000), 8762, 4096).begin()
    first, second = ledger.stage_plan(ledger.active, 10), ledger.stage_plan(ledger.active, 3)
    after = ledger.publish(first)
    done = after.publish(after.finish_plan(after.active, 4))
    stale: list[tuple[Ledger, Plan]] = [
        (after, first), (after, second), (done, first), (done, after.finish_plan(after.active, 4)),
        (done, ledger.rewind_plan(8762)),
    ]  # fmt: skip
    forged: list[tuple[Ledger, Plan]] = [
        (ledger, replace(first, target=8773)), (ledger, replace(first, count=11)), (ledger, replace(first, windows=(0,))),
        (ledger, replace(first, places=((Rebase(4608, 58, 8704, 59),),))), (ledger, replace(first, count=0, target=8762)),
        (ledger, replace(first, transaction=Transaction(1, 8761))), (ledger, replace(first, count=5000, target=13_762)),
        (after, FinishPlan(after.active, 11, 8773)), (after, FinishPlan(after.active, 4, 8765)),
        (done, replace(done.rewind_plan(8766), target=8767)),
        (ringed(10_000), replace(ringed(10_000).hydrate_plan(9), length=10_001)),
    ]  # fmt: skip
    for held, plan in stale + forged:
        kept = replace(held)
        with pytest.raises(TransactionError):
            held.publish(plan)
        assert held == kept


def test_foreign_plans_are_refused() -> None:
    ledger = hydrated(ringed(10_000), 100).begin()
    other = hydrated(flat(10_000), 100).begin()
    two = hydrated(ringed(10_000, ranks=2), 100).begin()
    for foreign in (other, two):
        with pytest.raises(TransactionError):
            ledger.publish(foreign.stage_plan(foreign.active, 5))


def test_appends_beyond_the_capacity_are_refused_at_its_last_row() -> None:
    ledger = hydrated(flat(8), 6).begin()
    assert ledger.stage_plan(ledger.active, 2).place() == Contiguous(6)
    with pytest.raises(CapacityExceeded):
        ledger.stage_plan(ledger.active, 3)
    with pytest.raises(RecordError):
        ledger.stage_plan(ledger.active, 0)
    full = committed(flat(8), 8).begin()
    with pytest.raises(CapacityExceeded):
        full.stage_plan(full.active, 1)


def test_a_transaction_longer_than_its_ring_is_refused_and_can_be_taken_back() -> None:
    ledger = hydrated(ringed(100_000), 50_000, 49_952).begin()
    for _ in range(2):
        plan = ledger.stage_plan(ledger.active, 2000)
        ledger = ledger.publish(plan)
    with pytest.raises(CapacityExceeded):
        ledger.stage_plan(ledger.active, 2000)
    back = ledger.publish(ledger.finish_plan(ledger.active, 0))
    assert back.committed == 50_000
    assert back.physical(49_969, 50_000, 32).stop <= 4671


def test_an_end_that_rings_do_not_hold_is_refused() -> None:
    ledger = hydrated(ringed(10_000), 8762, 8704).begin()
    ledger = ledger.publish(ledger.stage_plan(ledger.active, 200))
    moved = replace(ledger, rings=((Ring(4671, 32, 8800),),))
    assert moved.finish_plan(moved.active, 200).target == 8962
    with pytest.raises(CannotRewind):
        moved.finish_plan(moved.active, 0)


def test_used_up_generations_open_no_transaction() -> None:
    ledger = flat(8)
    spent = replace(ledger, lengths=replace(ledger.lengths, next_generation=LAST_GENERATION))
    with pytest.raises(TransactionError):
        spent.begin()
    with pytest.raises(TransactionError):
        _ = spent.active


@pytest.mark.parametrize(
    "layers, capacity, ranks, error",
    [
        ((ROWS,), 0, 1, RecordError),
        ((ROWS,), 8, 0, RecordError),
        ((ROWS,), MAX_LENGTH + 1, 1, CapacityExceeded),
        ((LayerRows(-1, 8),), 8, 1, RecordError),
        ((LayerRows(8, -8),), 8, 1, RecordError),
        ((LayerRows(8, 8, -1),), 8, 1, RecordError),
    ],
)
def test_impossible_layouts_are_refused(layers: tuple[LayerRows, ...], capacity: int, ranks: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        Layout(layers, capacity, ranks)
    assert Layout((ROWS,), MAX_LENGTH).capacity == MAX_LENGTH


def test_bytes_to_be_copied_beyond_64_bits_are_refused() -> None:
    ledger = hydrated(flat(MAX_LENGTH - 1, LayerRows(MAX_LENGTH, MAX_LENGTH)), MAX_LENGTH - 1)
    plan = ledger.grow_plan(MAX_LENGTH)
    assert plan.copied_bytes(0)[0] == (MAX_LENGTH - 1) * MAX_LENGTH
    with pytest.raises(OutOfMemory):
        replace(plan, layout=replace(plan.layout, layers=(LayerRows(MAX_LENGTH * 4, 1),))).copied_bytes(0)


def test_a_layout_follows_a_plan() -> None:
    full = LayerPlan(LayerKind.FULL, 4, 2, 64, 64, RowFormat.Q8_0, RowFormat.Q5_1, importance=False)
    near = replace(full, kind=LayerKind.SLIDING, window=32)
    plan = ModelPlan((full, near, LayerPlan(LayerKind.RECURRENT, state_size=10), LayerPlan(LayerKind.SHARED, shared_with=0)))
    rows, nothing = LayerRows(2 * 2 * 34, 2 * 2 * 24), LayerRows(0, 0)
    assert Layout.of(plan, 9000) == Layout((rows, rows, nothing, nothing), 9000)
    assert Layout.of(plan, 9000, ranks=2, rings=True) == Layout((rows, replace(rows, window=32), nothing, nothing), 9000, 2)


def test_growth_after_a_fault_takes_the_padding_of_any_rank_along() -> None:
    fresh = ringed(10_000, ranks=2)
    ledger = fresh.publish(fresh.hydrate_plan(5000, {32: 4969}))
    filled = committed(ledger, 4614).begin()
    plan = filled.stage_plan(filled.active, 60)
    assert plan.rebases
    ledger = filled.faulted(plan, moved={0})
    assert [ledger.ring(32, rank) for rank in range(2)] == [Ring(4671, 32, 9568), Ring(4671, 32, 4960, 9)]
    grown = ringed(20_000, ranks=2).publish(ledger.grow_plan(20_000))
    assert [grown.ring(32, rank) for rank in range(2)] == [Ring(4671, 32, 9568)] * 2
    padded = fresh.publish(fresh.hydrate_plan(5000, {32: 4969})).grow_plan(20_000)
    assert padded.move(32) == RestorePlan(4960, range(40), 9)
    assert ringed(20_000, ranks=2).publish(padded).ring(32) == Ring(4671, 32, 4960, 9)


def test_a_fault_leaves_every_rank_at_the_committed_length() -> None:
    ledger = hydrated(ringed(10_000, ranks=3), 8762, 4096).begin()
    plan = ledger.stage_plan(ledger.active, 10)
    after = ledger.faulted(plan, moved={0, 2})
    assert (after.committed, after.staged, after.lengths.active) == (8762, 8762, None)
    assert [after.ring(32, rank) for rank in range(3)] == [Ring(4671, 32, base) for base in (8704, 4096, 8704)]
    again = after.begin()
    assert again.active.generation == ledger.active.generation + 1
    repeated = again.stage_plan(again.active, 10)
    assert [repeated.place(32, rank) for rank in range(3)] == [Contiguous(58), Rebase(4608, 58, 8704, 58), Contiguous(58)]
    assert after.can_rewind_to(8735) and not after.can_rewind_to(8734)
    assert not after.can_rewind_to(8200)  # rank 1 could, the others cannot
    with pytest.raises(RecordError):
        ledger.faulted(plan, moved={3})
    with pytest.raises(TransactionError):
        after.faulted(plan, moved={0})


WINDOWS = (FLAT, 32, 512)
CAPACITIES = (6000, 13_000, 30_000, 60_000)


@dataclass
class Rank:
    """A rank's memory: a buffer per window."""

    capacity: int
    buffers: dict[int, Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = {window: Buffer(ring_rows(window, self.capacity) if window else self.capacity) for window in WINDOWS}

    def stage(self, plan: StagePlan, rank: int, numbers: np.ndarray, *, only_move: bool = False) -> None:
        for window, buffer in self.buffers.items():
            buffer.move(plan.place(window, rank))
        for window, buffer in self.buffers.items():
            if not only_move:
                buffer.write(plan.place(window, rank), numbers)

    def grown(self, plan: GrowPlan, rank: int) -> Rank:
        new = Rank(plan.layout.capacity)
        for window, buffer in self.buffers.items():
            physical = plan.move(window, rank).physical
            new.buffers[window].found[: len(physical)] = buffer.found[physical.start : physical.stop]
        return new


class Walk:
    """A ledger over two ranks beside all rows ever written; ``history`` has the staged ones too."""

    MOVES = {"begin": 4, "stage": 8, "finish": 3, "rewind": 0.7, "grow": 1, "hydrate": 0.05, "stale": 1}
    CHANCES = np.cumsum(list(MOVES.values()))

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.history = History()
        self.seen: Counter[str] = Counter()
        self.old: list[tuple[Ledger, Plan]] = []
        self.start(CAPACITIES[0])

    def start(self, capacity: int) -> None:
        self.ledger = Ledger.fresh(Layout(tuple(LayerRows(8, 8, window) for window in WINDOWS), capacity, 2))
        self.ranks = [Rank(capacity) for _ in range(2)]

    def step(self) -> None:
        at = np.searchsorted(self.CHANCES, self.rng.random() * self.CHANCES[-1], "right")
        self.seen[getattr(self, tuple(self.MOVES)[at])() or "idle"] += 1
        assert len(self.history.rows) == self.ledger.staged
        self.check_views(flat_rows=2000 if self.rng.random() < 0.98 else 1 << 20)

    def check_views(self, flat_rows: int) -> None:
        """What reads touch is as it was written; of flat layers the newest ``flat_rows`` rows."""
        rows, ledger = self.history.rows, self.ledger
        for number, rank in enumerate(self.ranks):
            for window, buffer in rank.buffers.items():
                start = max(0, ledger.committed - window + 1) if window else max(0, ledger.staged - flat_rows)
                found = ledger.physical(start, ledger.staged, window, number)
                assert np.array_equal(buffer.found[found.start : found.stop], rows[start:])

    def held(self, number: int, window: int) -> int:
        """The first position that is found in a rank's buffer."""
        ring = self.ledger.ring(window, number)
        base = 0 if ring is None else ring.base
        return self.ranks[number].buffers[window].held_from(self.history.rows, self.ledger.staged - 1 - base)

    def readable(self, length: int, number: int, window: int) -> bool:
        """Whether a read there would find its window, and start within the buffer."""
        ring = self.ledger.ring(window, number)
        assert ring is not None
        return aligned_view(length, window) >= ring.base and max(0, length - window + 1) >= self.held(number, window)

    def publish(self, plan: Plan) -> None:
        self.old.append((self.ledger, plan))
        self.ledger = self.ledger.publish(plan)

    def begin(self) -> str:
        if self.ledger.lengths.active is not None:
            with pytest.raises(TransactionError):
                self.ledger.begin()
            return "nested"
        self.ledger = self.ledger.begin()
        return "begin"

    def stage(self) -> str | None:
        ledger = self.ledger
        if ledger.lengths.active is None:
            return None
        count = int(self.rng.integers(1, 4097)) if self.rng.random() < 0.2 else int(self.rng.integers(1, 64))
        try:
            plan = ledger.stage_plan(ledger.active, count)
        except CapacityExceeded:
            assert ledger.staged + count > ledger.layout.capacity or any(
                ledger.staged - aligned_view(ledger.committed, window) + count > buffer.rows
                and ledger.staged - self.held(number, window) + count > buffer.rows
                for number, rank in enumerate(self.ranks)
                for window, buffer in rank.buffers.items()
                if window
            )
            return "no room"
        numbers = self.history.new(count)
        if self.rng.random() < (0.3 if plan.rebases else 0.1):
            return self.fault(plan, numbers)
        for number, rank in enumerate(self.ranks):
            rank.stage(plan, number, numbers)
        self.publish(plan)
        self.history.append(numbers)
        return "rebase" if plan.rebases else "stage"

    def fault(self, plan: StagePlan, numbers: np.ndarray) -> str:
        """The first rank does its part, the second fails before its rings moved or before it wrote."""
        both = bool(self.rng.random() < 0.5)
        self.ranks[0].stage(plan, 0, numbers)
        if both:
            self.ranks[1].stage(plan, 1, numbers, only_move=True)
        self.ledger = self.ledger.faulted(plan, moved={0, 1} if both else {0})
        self.history.cut(self.ledger.committed)
        return "fault between rebases" if plan.rebases and not both else "fault"

    def finish(self) -> str | None:
        if self.ledger.lengths.active is None:
            return None
        staged = self.ledger.staged - self.ledger.committed
        accepted = int(self.rng.choice([0, staged, self.rng.integers(0, staged + 1)]))
        with pytest.raises(TransactionError):
            self.ledger.finish_plan(self.ledger.active, staged + 1)
        self.publish(self.ledger.finish_plan(self.ledger.active, accepted))
        self.history.cut(self.ledger.committed)
        return "rollback" if not accepted else "commit" if accepted == staged else "partial commit"

    def rewind(self) -> str:
        deep = self.ledger.staged if self.rng.random() < 0.2 else 700
        target = max(0, self.ledger.staged - int(self.rng.integers(0, deep + 1)))
        there = all(self.readable(target, number, window) for number in range(2) for window in (32, 512))
        assert self.ledger.can_rewind_to(target) == there
        if not there:
            with pytest.raises(CannotRewind):
                self.ledger.rewind_plan(target)
            return "lapped"
        self.publish(self.ledger.rewind_plan(target))
        self.history.cut(target)
        return "rewind"

    def grow(self) -> str | None:
        larger = [capacity for capacity in CAPACITIES if capacity > self.ledger.layout.capacity]
        if not larger or self.ledger.staged < self.ledger.layout.capacity * 0.6:
            return None
        if self.ledger.lengths.active is not None:
            with pytest.raises(TransactionError):
                self.ledger.grow_plan(larger[0])
            return "busy"
        plan = self.ledger.grow_plan(larger[0])
        self.ranks = [rank.grown(plan, number) for number, rank in enumerate(self.ranks)]
        self.ledger = Ledger.fresh(plan.layout).publish(plan)
        return "grow"

    def hydrate(self) -> str:
        """A fresh cache is given what this one has committed, or a new one starts from nothing."""
        rows = self.history.rows[: self.ledger.committed].copy()
        with pytest.raises(TransactionError):
            committed(self.ledger.abandoned(), 0).hydrate_plan(3)
        self.history.cut(len(rows))
        if self.rng.random() < 0.5:
            rows = rows[:0]
            self.history.cut(0)
        self.start(CAPACITIES[0] if len(rows) <= CAPACITIES[0] else self.ledger.layout.capacity)
        start = max(0, len(rows) - 512 + 1 - int(self.rng.integers(0, 40)))
        plan = self.ledger.hydrate_plan(len(rows), {512: start})
        for rank in self.ranks:
            for window, buffer in rank.buffers.items():
                place = plan.place(window)
                buffer.found[place.start : place.stop] = rows[plan.start(window) :]
        self.old.clear()
        self.ledger = self.ledger.publish(plan)
        return "hydrate"

    def stale(self) -> str | None:
        """A plan of an earlier state is refused, but where that state is this one again."""
        if not self.old:
            return None
        before, plan = self.old[int(self.rng.integers(0, len(self.old)))]
        if before.lengths == self.ledger.lengths:
            return None
        with pytest.raises(TransactionError):
            self.ledger.publish(plan)
        return "stale"


def test_a_long_walk_over_two_ranks_loses_no_row_and_refuses_only_what_it_must() -> None:
    walk = Walk(np.random.default_rng(20))
    while walk.seen.total() - walk.seen["idle"] < 10_000:
        walk.step()
    expected = (
        "begin", "nested", "stage", "rebase", "no room", "fault", "fault between rebases", "rollback", "commit", "partial commit",
        "rewind", "lapped", "grow", "busy", "hydrate", "stale",
    )  # fmt: skip
    assert min(walk.seen[name] for name in expected) > 2, walk.seen
