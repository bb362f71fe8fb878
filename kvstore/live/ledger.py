"""One book of a resident cache over all its layers and ranks: lengths, rings, and plans of what changes them.

A change goes three steps: the ledger makes a plan, each rank does its part of it in its own memory, and only
when all have is the plan published, which gives the next ledger. A rank that fails in between leaves
nothing behind: rows beyond the committed length are nobody's, and a ring that has moved still holds all that
a read at the committed length touches (`Ledger.faulted`). A plan is good for as long as asking again gives
the same one; any other is refused. Ledgers and plans are values, so what would happen can be asked for free.

Layers with one window have equal rings, so there is one ring per window and rank; flat layers go by window 0.

**Source:** transactions, growth and hydration of the memra engine's tensor-parallel caches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from warmkv.kvstore.live.geometry import check_capacity
from warmkv.kvstore.live.ledger_plans import FLAT, FinishPlan, GrowPlan, HydratePlan, Layout, Plan, RewindPlan, StagePlan
from warmkv.kvstore.live.rings import (
    AppendPlan,
    Contiguous,
    Rebase,
    RestorePlan,
    Ring,
    check_count,
    retain_in_transaction,
    view_start,
)
from warmkv.kvstore.live.transaction import Transaction, TransactionState
from warmkv.schema.errors import CannotRewind, CapacityExceeded, LiveError, RecordError, TransactionError


@dataclass(frozen=True, slots=True)
class Ledger:
    """Made by `fresh`. ``rings`` has a row per rank and in it a ring per window of the layout, None for flat
    layers. Rings of ranks differ only after a fault.

    Methods that end in ``_plan`` change nothing and raise TransactionError, CannotRewind where rows are
    gone, CapacityExceeded where they do not fit and RecordError for numbers that are none."""

    layout: Layout
    lengths: TransactionState
    rings: tuple[tuple[Ring | None, ...], ...]

    @classmethod
    def fresh(cls, layout: Layout) -> Ledger:
        return cls(layout, TransactionState(), (layout.fresh_rings(),) * layout.ranks)

    @property
    def committed(self) -> int:
        return self.lengths.committed

    @property
    def staged(self) -> int:
        return self.lengths.staged

    @property
    def active(self) -> Transaction:
        """The open transaction. Raises TransactionError where there is none."""
        if self.lengths.active is None:
            raise TransactionError("no transaction is open")
        return self.lengths.active

    def begin(self) -> Ledger:
        """With a transaction open, its `active`. No rank has to do anything for that. Raises TransactionError."""
        return replace(self, lengths=self.lengths.begun())

    def ring(self, window: int, rank: int = 0) -> Ring | None:
        """The ring of layers of ``window``, None for `FLAT`. Raises RecordError where there are no such layers."""
        if window not in self.layout.windows or not 0 <= rank < self.layout.ranks:
            raise RecordError(f"window {window} of rank {rank}, expected one of {self.layout.windows}, {self.layout.ranks} ranks")
        return self.rings[rank][self.layout.windows.index(window)]

    def physical(self, start: int, end: int, window: int = FLAT, rank: int = 0) -> range:
        """The rows of positions [start, end) in layers of ``window``. Raises as `rings.Ring.physical`."""
        return _physical(self.ring(window, rank), start, end, self.layout.capacity)

    def can_rewind_to(self, length: int) -> bool:
        """Whether every rank still has what a read at ``length`` touches."""
        check_count("length", length)
        return length <= self.staged and all(ring is None or ring.can_rewind_to(length) for rank in self.rings for ring in rank)

    def stage_plan(self, transaction: Transaction, count: int) -> StagePlan:
        """``count`` rows more in ``transaction``, such that it can still be rolled back."""
        target = self.lengths.append_target(transaction, count, self.layout.capacity)
        places = tuple(tuple(self._place(ring, target, transaction.base) for ring in rank) for rank in self.rings)
        return StagePlan(self.layout.windows, transaction, count, target, places)

    def finish_plan(self, transaction: Transaction, accepted: int) -> FinishPlan:
        """The end of ``transaction``, of which the first ``accepted`` rows stay; 0 takes all back."""
        target = self.lengths.commit_target(transaction, accepted)
        self._check_held(target)
        return FinishPlan(transaction, accepted, target)

    def rewind_plan(self, target: int) -> RewindPlan:
        """``target`` rows stay, committed; a transaction that is open is over."""
        self.lengths.rewound(target)
        self._check_held(target)
        return RewindPlan(target, self.lengths)

    def grow_plan(self, capacity: int, length: int | None = None) -> GrowPlan:
        """The first ``length`` committed rows (default: all) for a fresh cache of more ``capacity``, which goes
        on counting generations where this one stopped: publish it there."""
        if not self.lengths.quiescent:
            raise TransactionError(f"{self.committed} rows committed, {self.staged} staged; expected no transaction")
        check_capacity(capacity)
        if capacity <= self.layout.capacity:
            raise CapacityExceeded(f"a capacity of {capacity}, expected more than {self.layout.capacity}")
        length = self.committed if length is None else length
        check_count("length", length)
        if length > self.committed:
            raise TransactionError(f"{length} rows to be copied, {self.committed} are committed")
        moves = tuple(tuple(_restore_plan(ring, length) for ring in rank) for rank in self.rings)
        layout = replace(self.layout, capacity=capacity)
        return GrowPlan(layout.windows, layout, length, self.lengths.next_generation, moves)

    def hydrate_plan(self, length: int, starts: Mapping[int, int] | None = None) -> HydratePlan:
        """``length`` rows from elsewhere for this cache, to which nothing was ever done. ``starts`` says per
        window which position is the first handed in; without a word rings are given what a read touches,
        and flat layers everything."""
        self.lengths.check_fresh()
        check_count("length", length)
        if length > self.layout.capacity:
            raise CapacityExceeded(f"{length} rows, there is room for {self.layout.capacity}")
        said = dict(starts or {})
        if not said.keys() <= set(self.layout.windows):
            raise RecordError(f"rows of windows {sorted(said)}, expected some of {self.layout.windows}")
        chosen = tuple(said.get(window, view_start(length, window) if window else 0) for window in self.layout.windows)
        physical = tuple(_hydrated_rows(ring, length, start) for ring, start in zip(self.rings[0], chosen, strict=True))
        return HydratePlan(self.layout.windows, length, chosen, physical)

    def publish(self, plan: Plan) -> Ledger:
        """The ledger after ``plan``, which every rank has done. Raises TransactionError for a plan that this
        ledger would not make now: a stale one, one of another cache, one that is out of range."""
        try:
            return self._published(plan)
        except TransactionError:
            raise
        except (LiveError, RecordError) as exc:
            raise TransactionError(f"{type(plan).__name__}: {exc}") from exc

    def faulted(self, plan: StagePlan, moved: Collection[int]) -> Ledger:
        """After ``plan`` failed on some rank: the committed length on all of them and no transaction. ``moved``
        are the ranks whose rings did move their rows; what they keep covers the committed length. Raises
        TransactionError for a plan this ledger would not make, RecordError for ranks there are none of."""
        self._check_same(plan, self.stage_plan(plan.transaction, plan.count))
        if not set(moved) <= set(range(self.layout.ranks)):
            raise RecordError(f"ranks {sorted(moved)}, there are {self.layout.ranks}")
        rings = tuple(_after(rank, plan.places[number]) if number in moved else rank for number, rank in enumerate(self.rings))
        return replace(self, rings=rings).abandoned()

    def abandoned(self) -> Ledger:
        """With no transaction, at the committed length, where ranks can always go."""
        return replace(self, lengths=self.lengths.rewound(self.committed))

    def _published(self, plan: Plan) -> Ledger:
        if isinstance(plan, StagePlan):
            self._check_same(plan, self.stage_plan(plan.transaction, plan.count))
            rings = tuple(_after(rank, places) for rank, places in zip(self.rings, plan.places, strict=True))
            return replace(self, lengths=self.lengths.appended(plan.transaction, plan.target), rings=rings)
        if isinstance(plan, FinishPlan):
            self._check_same(plan, self.finish_plan(plan.transaction, plan.accepted))
            return replace(self, lengths=self.lengths.finished(plan.transaction, plan.target))
        if isinstance(plan, RewindPlan):
            self._check_same(plan, self.rewind_plan(plan.target))
            return replace(self, lengths=self.lengths.rewound(plan.target))
        if isinstance(plan, HydratePlan):
            again = self.hydrate_plan(plan.length, dict(zip(plan.windows, plan.starts, strict=True)))
            self._check_same(plan, again)
            return self._filled(plan.length, plan.starts)
        return self._grown(plan)

    def _grown(self, plan: GrowPlan) -> Ledger:
        self.lengths.check_fresh()
        if plan.layout != self.layout:
            raise TransactionError(f"growth into {plan.layout}, this cache is {self.layout}")
        starts = tuple(max(move.base + move.padding for move in moves) for moves in zip(*plan.moves, strict=True))
        again = self.hydrate_plan(plan.length, dict(zip(plan.windows, starts, strict=True)))
        grown = self._filled(again.length, again.starts)
        return replace(grown, lengths=replace(grown.lengths, next_generation=plan.next_generation))

    def _filled(self, length: int, starts: tuple[int, ...]) -> Ledger:
        rings = tuple(
            tuple(None if ring is None else ring.hydrated(length, start) for ring, start in zip(rank, starts, strict=True))
            for rank in self.rings
        )
        return replace(self, lengths=self.lengths.hydrated(length), rings=rings)

    def _place(self, ring: Ring | None, target: int, committed: int) -> AppendPlan:
        if ring is None:
            return Contiguous(self.staged)
        return ring.append_plan(self.staged, retain_in_transaction(target, committed, ring.window), target - self.staged)

    def _check_held(self, length: int) -> None:
        if not self.can_rewind_to(length):
            first = max((ring.valid_from for rank in self.rings for ring in rank if ring is not None), default=0)
            raise CannotRewind(
                f"a length of {length}: what a read there touches is gone, rings hold rows from {first} to {self.staged}"
            )

    def _check_same(self, plan: Plan, again: Plan) -> None:
        if plan != again:
            raise TransactionError(
                f"{type(plan).__name__} for another state, {self.committed} rows committed, {self.staged} staged"
            )


def _physical(ring: Ring | None, start: int, end: int, capacity: int) -> range:
    if ring is not None:
        return ring.physical(start, end)
    check_count("start", start)
    check_count("end", end)
    if end < start:
        raise RecordError(f"positions [{start}, {end})")
    if end > capacity:
        raise CapacityExceeded(f"positions [{start}, {end}), there is room for {capacity}")
    return range(start, end)


def _hydrated_rows(ring: Ring | None, length: int, start: int) -> range:
    if ring is not None:
        return ring.hydrated(length, start).physical(start, length)
    if start:
        raise CannotRewind(f"flat layers from position {start} on, expected all from 0 on")
    return range(length)


def _restore_plan(ring: Ring | None, length: int) -> RestorePlan:
    return RestorePlan(0, range(length)) if ring is None else ring.restore_plan(length)


def _after(rings: tuple[Ring | None, ...], places: tuple[AppendPlan, ...]) -> tuple[Ring | None, ...]:
    return tuple(
        ring.rebased(place.new_base) if ring is not None and isinstance(place, Rebase) else ring
        for ring, place in zip(rings, places, strict=True)
    )
