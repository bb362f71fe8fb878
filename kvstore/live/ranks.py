"""One cache of several tensor-parallel ranks: a cache a rank, and one book of what all of them hold.

Every rank has its share of heads and states (`sharding`) on its own devices; what may happen is decided once,
by one `ledger.Ledger`, and published when all ranks have done it. Where a device fails in between, all ranks
go back to the committed length, so that none of them ever answers for a token that another has not.

**Source:** memra `ResidentTpKvCache`. There the rows of a layer are the whole transaction; here a model's
layers are staged one after the other, as its forward pass comes to them, and count once all have their rows.

Every verb says here what may become of it, which makes the module long; `rank_group` does things to ranks, and
`rank_parts` shares out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from warmkv.kernels.dispatch import Backend
from warmkv.kernels.formats import F32
from warmkv.kvstore.live.devices.base import DeviceArray
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.recurrent import check_states
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.ledger import Ledger
from warmkv.kvstore.live.ledger_plans import FLAT, Layout, StagePlan
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.rank_group import RankGroup
from warmkv.kvstore.live.rank_parts import (
    Filling,
    Round,
    Rows,
    check_residences,
    count_of,
    enlarged,
    prepare_filling,
    renew,
    shares,
    starts_of,
)
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import Rebase
from warmkv.kvstore.live.sharding import shard_model
from warmkv.kvstore.live.transaction import Transaction
from warmkv.schema.errors import CannotRewind, DeviceFault, RecordError, TransactionError

Ask: TypeAlias = Callable[[ResidentLayer, DeviceArray], DeviceArray]


class RankedCache:
    """Caches of ``plan`` over as many ranks as there are ``residences``, alike in all but their devices.

    ``caches`` are the ranks' own: attend through them or through `attend`, give their layers sinks, but change
    rows and states through this cache alone. Rows are appended in a transaction, layer by layer; a layer sees its
    new rows at once, and they count (`staged`) when every attention layer has as many. `rollback`, and a `commit`
    of a part, put recurrent states back to where the transaction began; what was accepted is then to be replayed
    (`update`) before the next one.

    A DeviceFault or OutOfMemory of any call leaves every rank at `committed`, holding what it held, with no
    transaction; a device that works again can be gone on with. Where even going back fails, the cache says so
    from then on, in place of any length, until `clear` or `hydrate`. What is refused, by whatever other error,
    changes nothing.

    **Threading:** one caller at a time."""

    def __init__(self, plan: ModelPlan, residences: Sequence[Residence], *, backend: Backend = "auto") -> None:
        """Raises RecordError where heads and states have no equal shares or ``residences`` differ, UnsupportedError for
        layers that no device keeps and for rows with a field, which is fixed once and not to be taken back; before
        anything is allocated. OutOfMemory with nothing left allocated."""
        self.world = len(residences)
        check_residences(plan, residences)
        self.plan, self._backend = plan, backend
        made = partial(ModelCache, backend=backend)
        plans = [shard_model(plan, rank, self.world) for rank in range(self.world)]
        first = residences[0]
        layout = Layout.of(plans[0], first.capacity, ranks=self.world, rings=first.rings)
        self._ledger = Ledger.fresh(layout)
        makers = [partial(made, part, residence=home) for part, home in zip(plans, residences, strict=True)]
        self._group = RankGroup(plan, makers)
        self._round: Round | None = None
        self._fault = ""
        self._freed = False

    # -- what there is -----------------------------------------------------------------------

    @property
    def caches(self) -> tuple[ModelCache, ...]:
        """By rank; others after `grow`."""
        return self._group.caches

    @property
    def committed(self) -> int:
        """Tokens that every rank holds for good. Raises DeviceFault where that cannot be told."""
        return self._whole.committed

    @property
    def staged(self) -> int:
        """`committed`, and the rows of the open transaction that all layers have. Raises DeviceFault."""
        return self._whole.staged

    @property
    def active(self) -> Transaction | None:
        """The open transaction. Raises DeviceFault."""
        return self._whole.lengths.active

    @property
    def generation(self) -> int:
        """The number of the last transaction, 0 before the first. It is never used again, whatever happens."""
        return self._ledger.lengths.next_generation - 1

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self._ledger.layout.capacity

    @property
    def replay_due(self) -> range:
        """Positions that recurrent layers have to see again, by `update`, before the next transaction. Raises
        DeviceFault."""
        self._require_whole()
        return range(self._group.behind, self._ledger.committed)

    def can_rewind_to(self, length: int) -> bool:
        """Whether `rewind` would go. Raises RecordError for what is no length, DeviceFault."""
        if not self._whole.can_rewind_to(length) or self._round is not None:
            return False
        try:
            self._group.check_back(length, marked=self._marked)
        except (CannotRewind, RecordError):
            return False
        return True

    def attend(self, layer: int, q: Rows) -> tuple[DeviceArray, ...]:
        """By rank the answers (its query heads, value_size) to queries of the newest position: ``q`` is (heads,
        key_size) of all, or an array a rank. They lie in the ranks' workspaces, to be read before the next are
        asked for; side by side they are those of a cache that is not shared out."""
        return self._answers(layer, q, 0, lambda own, part: own.attend(part))

    def attend_chunk(self, layer: int, q: Rows) -> tuple[DeviceArray, ...]:
        """By rank the answers (n, its query heads, value_size) to queries (n, heads, key_size) of the newest n
        positions; see `attend`."""
        return self._answers(layer, q, 1, lambda own, part: own.attend_chunk(part))

    # -- transactions ------------------------------------------------------------------------

    def begin(self) -> Transaction:
        """Open a transaction at the committed length. Recurrent states are copied aside, in memory taken long ago.
        Raises TransactionError where one is open, ReplayDue, DeviceFault."""
        after = self._whole.begin()
        self._group.mark()
        self._ledger = after
        assert after.lengths.active is not None
        return after.lengths.active

    def stage(self, transaction: Transaction, layer: int, keys: Rows, values: Rows) -> None:
        """Append rows of the next positions to attention layer ``layer`` on all ranks: float32 (n, kv_heads, size) of
        all KV heads, or an array a rank, of the host or of its device. The other attention layers are to get as
        many before this one gets more. Numbers of device arrays are not checked beforehand: what a device refuses to
        store ends the transaction. Raises TransactionError, RecordError, CapacityExceeded; DeviceFault."""
        layers = self._group.attention(layer)
        parts = list(zip(shares(keys, self.world, 1, "keys"), shares(values, self.world, 1, "values"), strict=True))
        plan = self._whole.stage_plan(transaction, count_of(parts[0][0]))
        current = self._round_of(plan, layer)
        for own, (k, v) in zip(layers, parts, strict=True):
            own.check_append(k, v)
            if count_of(k) != plan.count:
                raise RecordError(f"{where(own.plan, layer)}: {count_of(k)} rows, another rank has {plan.count}")
        self._round = current
        window = FLAT if layers[0].ring is None else layers[0].plan.window
        try:
            for rank, (own, (k, v)) in enumerate(zip(layers, parts, strict=True)):
                place = plan.place(window, rank)
                if isinstance(place, Rebase):
                    current.moved.add(rank)
                    own.rebase(place.new_base)
                own.append(k, v)
        except BaseException as exc:
            self._go_back(exc)
            raise
        current.done.add(layer)
        if current.done == self._group.of_rows:
            self._ledger, self._round = self._ledger.publish(plan), None

    def update(
        self, layer: int, states: F32 | Sequence[F32], count: int = 1, *, convs: F32 | Sequence[F32] | None = None
    ) -> None:
        """The state (state_size,) of recurrent layer ``layer`` after ``count`` more positions, in the open transaction
        or in a replay, and (taps, channels) where it has a convolution: of all ranks, shared out, or an array a rank.
        Devices that compute states themselves call `ResidentRecurrentLayer.step` on every rank instead. Raises
        RecordError, TransactionError outside of both, DeviceFault."""
        layers = self._group.recurrent(layer)
        parts = shares(states, self.world, 0, "state")
        taps = [None] * self.world if convs is None else shares(convs, self.world, 1, "convolution")
        if self._whole.lengths.active is None and layers[0].position + count > self._ledger.committed:
            raise TransactionError(
                f"layer {layer}: {count} positions behind {layers[0].position} outside of a transaction, "
                f"{self._ledger.committed} are committed"
            )
        if count < 1:
            raise RecordError(f"layer {layer}: {count} positions, expected at least 1")
        for own, state, conv in zip(layers, parts, taps, strict=True):
            check_states(own.plan, layer, state, conv, count)
        try:
            for own, state, conv in zip(layers, parts, taps, strict=True):
                own.update(state, count, conv=conv)
        except BaseException as exc:
            self._go_back(exc)
            raise

    def commit(self, transaction: Transaction, accepted: int | None = None) -> None:
        """End ``transaction``, of which the first ``accepted`` rows stay (None: all). Raises TransactionError for another
        or more than were staged, and where a layer has no rows or no state yet of what stays; DeviceFault."""
        ledger = self._whole
        if self._round is not None:
            raise TransactionError(f"{self._round.told(self._group.of_rows)}; a commit needs the same rows in all")
        plan = ledger.finish_plan(transaction, ledger.staged - transaction.base if accepted is None else accepted)
        if plan.target > transaction.base:
            self._group.require_at(ledger.staged)
        self._take_back(plan.target)
        self._ledger = self._ledger.publish(plan)

    def rollback(self, transaction: Transaction) -> None:
        """End ``transaction`` as if it had never begun, whatever part of it was staged. Raises TransactionError for
        another, DeviceFault: every rank is back then, too."""
        self._whole.finish_plan(transaction, 0)
        try:
            self._settle()
        except BaseException as exc:
            self._go_back(exc)
            raise

    def rewind(self, length: int) -> None:
        """Only the first ``length`` tokens stay, of the staged ones too, and no transaction is open. Raises
        TransactionError beyond what is staged or while layers have different rows, CannotRewind where a ring or
        a state cannot go there, DeviceFault."""
        plan = self._whole.rewind_plan(length)
        if self._round is not None:
            raise TransactionError(f"{self._round.told(self._group.of_rows)}; roll back first")
        self._take_back(length)
        self._ledger = self._ledger.publish(plan)

    # -- memory ------------------------------------------------------------------------------

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens: caches on the same devices are filled with what a read touches, rings with their
        window, and take the place of `caches`, whose memory is given back only then. Generations go on. Raises
        TransactionError while a transaction is open, CapacityExceeded for no more room than now, ReplayDue;
        OutOfMemory, DeviceFault with nothing left allocated."""
        plan = self._whole.grow_plan(capacity)
        self._group.require_replayed("growth")
        grown = Ledger.fresh(plan.layout).publish(plan)
        starts = {window: ring.valid_from for window in plan.windows if (ring := grown.ring(window)) is not None}
        before = self._group
        self._group = RankGroup(self.plan, [partial(enlarged, cache, capacity, starts, self._backend) for cache in before.caches])
        self._ledger = grown
        for cache, old in zip(self._group.caches, before.caches, strict=True):
            cache.follow(old)
        before.free()

    def hydrate(self, length: int, ranks: Sequence[Sequence[Filling]]) -> None:
        """Fill an empty cache with ``length`` tokens: by rank and by layer that shares with none, in their order,
        `RankRows` or a `RecurrentState`. Raises TransactionError for a cache that holds anything, RecordError for
        parts that do not fit, CannotRewind for rows that show no whole window, CapacityExceeded; OutOfMemory and
        DeviceFault, with the cache as empty as before. The lineage of all ranks is clean then."""
        if self._fault:
            self.clear()
        self._require_memory()
        if self._ledger.committed or not self._ledger.lengths.quiescent:
            raise TransactionError(f"{self._ledger.staged} tokens are there; expected an empty cache")
        starts = starts_of(self.caches, length, ranks)
        Ledger.fresh(self._ledger.layout).hydrate_plan(length, starts)
        changes = [
            prepare_filling(layer, length, part)
            for cache, parts in zip(self.caches, ranks, strict=True)
            for layer, part in zip(cache.own, parts, strict=True)
        ]
        changes += [partial(renew, cache) for cache in self.caches]
        self.refill(length, changes)

    def refill(self, length: int, changes: Sequence[Callable[[], object]]) -> None:
        """Call ``changes``, which put ``length`` tokens in place of all that the ranks hold: the callables of
        `prepare_restore` and its like, everything that is refused having been refused. Raises TransactionError while a
        transaction is open, nothing changed; DeviceFault with every rank empty."""
        self.require_quiescent("what replaces all rows")
        try:
            for change in changes:
                change()
            starts = {
                layer.plan.window: layer.base
                for layer in self.caches[0].own
                if isinstance(layer, ResidentLayer) and layer.ring is not None
            }
            fresh = Ledger.fresh(self._ledger.layout)
            self._ledger = self._counting(fresh.publish(fresh.hydrate_plan(length, starts)))
        except BaseException:
            self.clear()
            raise

    def require_quiescent(self, what: str) -> None:
        """Raises TransactionError, in which ``what`` cannot be done, while a transaction is open; DeviceFault."""
        if not self._whole.lengths.quiescent:
            raise TransactionError(f"{what}, while transaction {self.generation} is open")

    def clear(self) -> None:
        """Forget everything, a fault too; transactions of before are over. Raises DeviceFault: every rank is empty then,
        too, unless the device fails again."""
        self._require_memory()
        try:
            self._empty()
        except BaseException as cause:
            self._fault = f"it was being cleared: {cause}"
            self._empty()
            raise

    def free(self) -> None:
        """Take everything off the devices' books; the cache is not to be used any more."""
        self._group.free()
        self._freed = True

    # -- shared pieces -----------------------------------------------------------------------

    @property
    def _whole(self) -> Ledger:
        """The book, where it can be believed."""
        self._require_whole()
        return self._ledger

    def _require_whole(self) -> None:
        """Raises DeviceFault where nothing can be told, RecordError once there is no memory."""
        self._require_memory()
        if self._fault:
            raise DeviceFault(f"ranks are in no common state, clear or hydrate the cache: {self._fault}")

    def _require_memory(self) -> None:
        if self._freed:
            raise RecordError("the memory of this cache was given back")

    def _empty(self) -> None:
        self._group.clear()
        self._ledger = self._counting(Ledger.fresh(self._ledger.layout))
        self._round, self._fault = None, ""

    def _counting(self, ledger: Ledger) -> Ledger:
        """The book with the generations of this one gone on with."""
        return replace(ledger, lengths=replace(ledger.lengths, next_generation=self._ledger.lengths.next_generation))

    def _answers(self, layer: int, q: Rows, axis: int, ask: Ask) -> tuple[DeviceArray, ...]:
        self._require_whole()
        layers = self._group.attention(layer, shared=True)
        return tuple(ask(own, part) for own, part in zip(layers, shares(q, self.world, axis, "queries"), strict=True))

    def _round_of(self, plan: StagePlan, layer: int) -> Round:
        """The round in which ``layer`` gets the rows of ``plan``."""
        if self._round is None:
            return Round(plan)
        if self._round.plan != plan or layer in self._round.done:
            raise TransactionError(f"layer {layer}, {plan.count} rows: {self._round.told(self._group.of_rows)}")
        return self._round

    @property
    def _marked(self) -> bool:
        """Whether states go back to the checkpoints: these belong to what is open or due."""
        return self._ledger.lengths.active is not None or self._group.behind < self._ledger.committed

    def _take_back(self, length: int) -> None:
        """Bring all layers of all ranks to ``length``, or after a fault to the committed length."""
        if self._group.is_at(length):
            return
        try:
            self._group.take_back(length, marked=self._marked)()
        except (CannotRewind, RecordError):
            raise
        except BaseException as exc:
            self._go_back(exc)
            raise

    def _go_back(self, cause: BaseException) -> None:
        """`_settle` after a fault, which may well happen once more on the way; what cannot be settled is told."""
        for last in (False, True):
            try:
                self._settle()
                return
            except BaseException as exc:  # noqa: BLE001 - ``cause`` is what is raised
                if last:
                    self._fault = f"{cause}; on the way back: {exc}"

    def _settle(self) -> None:
        """All ranks at the committed length, as they were there, and no transaction. Rings that a fault left half
        moved are moved to the end. May be done again after a fault."""
        current, ledger = self._round, self._ledger
        moves = [{} if current is None else current.moves(rank) for rank in range(self.world)]
        self._group.settle(ledger.committed, moves, marked=self._marked)
        self._ledger = ledger.abandoned() if current is None else ledger.faulted(current.plan, current.moved)
        self._round = None
