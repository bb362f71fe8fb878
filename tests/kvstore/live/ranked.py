"""A cache over ranks beside lists that forget nothing, on devices that fail once when told to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from flat_oracle import aligned_view
from resident_oracle import HEADS, KV_HEADS, SIZE, Oracle, plan_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.recurrent import RecurrentState
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.rank_parts import RankRows
from warmkv.kvstore.live.ranks import RankedCache
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.transaction import Transaction
from warmkv.schema.errors import CannotRewind, CapacityExceeded, DeviceFault, OutOfMemory, ReplayDue, TransactionError
from warmkv.schema.identity import LayerKind

WORLD = 2
F32, F16, Q8, Q5 = RowFormat.F32, RowFormat.F16, RowFormat.Q8_0, RowFormat.Q5_1
#: What a device can be told to fail at, and as what.
KINDS: dict[str, type[Exception]] = {
    "alloc": OutOfMemory, "copy": OutOfMemory, "upload": DeviceFault, "copy_into": DeviceFault, "set_one": DeviceFault,
    "append": KernelError, "advance": KernelError,
}  # fmt: skip


def whole(keys: RowFormat = Q8, values: RowFormat = Q5, window: int = 0) -> LayerPlan:
    """A layer of which a rank of `WORLD` has what `Oracle` knows."""
    return replace(plan_of(keys, values, window=window), heads=WORLD * HEADS, kv_heads=WORLD * KV_HEADS)


DELTA = LayerPlan(LayerKind.RECURRENT, state_size=6, conv=ConvPlan(4, taps=2, history=0))
STATE = LayerPlan(LayerKind.RECURRENT, state_size=4)
ROWS = ModelPlan((whole(F32, F32), whole(F16, F16, window=6), whole(F32, F16, window=40)))
HYBRID = ModelPlan((DELTA, whole(F16, F16), whole(window=6), STATE, LayerPlan(LayerKind.SHARED, shared_with=1)))


@dataclass
class Faults:
    """Counts operations of all devices that have it, and fails at one of them: number ``at``, of ``kind`` where one is
    named, and ``more`` that follow. ``late``: once it is done. ``lasting``: at every one from then on."""

    at: int = -1
    kind: str = ""
    late: bool = False
    lasting: bool = False
    more: int = 0
    fired: int = 0

    def arm(self, at: int, kind: str = "", *, late: bool = False, lasting: bool = False, more: int = 0) -> None:
        self.at, self.kind, self.late, self.lasting, self.more, self.fired = at, kind, late, lasting, more, 0

    def disarm(self) -> None:
        self.at = -1

    def counted(self, kind: str, name: str, work: Callable[[], Any]) -> Any:
        fails = False
        if self.at >= 0 and self.kind in ("", kind):
            fails = self.at == 0
            again = fails and (self.lasting or self.more > 0)
            self.at -= 0 if again else 1
            self.more -= 1 if again else 0
        if fails:
            self.fired += 1
            # What moves rows onto themselves cannot be done twice; a device that did it does not say it failed.
            if self.late and kind in ("upload", "set_one", "append", "advance"):
                work()
            raise KINDS[kind](f"{name}: {kind} fails because it was told to")
        return work()


class OneFault(HostDevice):
    """A host device of ``faults``."""

    def __init__(self, faults: Faults, name: str) -> None:
        self.faults = faults
        super().__init__(_Operations(HostOperations(REFERENCE), faults, name), name=name)  # type: ignore[arg-type]

    def alloc(self, *args: Any) -> Any:
        return self.faults.counted("alloc", self.name, lambda: HostDevice.alloc(self, *args))

    def copy(self, *args: Any) -> Any:
        return self.faults.counted("copy", self.name, lambda: HostDevice.copy(self, *args))

    def upload(self, *args: Any) -> None:
        self.faults.counted("upload", self.name, lambda: HostDevice.upload(self, *args))

    def copy_into(self, *args: Any) -> None:
        self.faults.counted("copy_into", self.name, lambda: HostDevice.copy_into(self, *args))

    def set_one(self, *args: Any) -> None:
        self.faults.counted("set_one", self.name, lambda: HostDevice.set_one(self, *args))


class _Operations:
    def __init__(self, operations: HostOperations, faults: Faults, name: str) -> None:
        self._operations, self._faults, self._name = operations, faults, name

    def append(self, *args: Any) -> None:
        self._faults.counted("append", self._name, lambda: self._operations.append(*args))

    def advance(self, *args: Any) -> None:
        self._faults.counted("advance", self._name, lambda: self._operations.advance(*args))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operations, name)


class Listed(Oracle):
    """Rows that are stored as they come, or rounded, are not taken apart by an encoder to know it."""

    def _written(self, rows: np.ndarray, format_: RowFormat, *, keys: bool) -> list[tuple[bytes, np.ndarray]]:
        if format_ not in (F32, F16):
            return super()._written(rows, format_, keys=keys)
        stored = rows.astype(np.float32 if format_ is F32 else np.float16)
        return [(row.tobytes(), row) for row in stored]


def homes(capacity: int, *, rings: bool = True, faults: Faults | None = None, world: int = WORLD) -> tuple[Residence, ...]:
    """A device a rank."""
    faults = Faults() if faults is None else faults
    return tuple(Residence((OneFault(faults, f"rank {rank}"),), capacity, rings=rings) for rank in range(world))


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


@dataclass
class States:
    """What a recurrent layer of all ranks holds."""

    state: np.ndarray
    conv: np.ndarray | None
    position: int = 0

    @classmethod
    def zeros(cls, plan: LayerPlan) -> States:
        conv = None if plan.conv is None else np.zeros((plan.conv.taps, plan.conv.channels), np.float32)
        return cls(np.zeros(plan.state_size, np.float32), conv)

    def of(self, rank: int) -> States:
        conv = None if self.conv is None else np.split(self.conv, WORLD, axis=1)[rank]
        return States(np.split(self.state, WORLD)[rank], conv, self.position)


@dataclass
class Twin:
    """A `RankedCache` beside what it has to hold. Each method does one thing to both and returns what came of it;
    what is refused has to be refused for a reason that is found without the cache."""

    plan: ModelPlan
    rng: np.random.Generator
    capacity: int = 160
    faults: Faults = field(default_factory=Faults)
    committed: int = 0
    began: int = 0
    active: Transaction | None = None
    staged: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    stale: list[Transaction] = field(default_factory=list)
    #: Whether the last step was more than a refusal.
    did_something: bool = True

    def __post_init__(self) -> None:
        self.cache = RankedCache(self.plan, homes(self.capacity, faults=self.faults), backend="reference")
        self.forget()

    def forget(self) -> None:
        plans = self.cache.caches[0].plan.layers
        self.of_rows = [at for at, plan in enumerate(plans) if plan.kv_heads]
        self.of_states = [at for at, plan in enumerate(plans) if plan.kind is LayerKind.RECURRENT]
        self.rows = {(rank, at): Listed(plans[at]) for rank in range(WORLD) for at in self.of_rows}
        self.states = {at: States.zeros(self.plan.layers[at]) for at in self.of_states}
        self.kept = dict(self.states)
        self.committed = self.staged = 0
        self.active = None

    # -- what may be done --------------------------------------------------------------------

    def begin(self) -> str:
        if self.active is not None or self.due:
            with pytest.raises(TransactionError if self.active is not None else ReplayDue):
                self.cache.begin()
            return "begin refused"
        self.active = self.cache.begin()
        self.began += 1
        assert self.active == Transaction(self.began, self.committed) and self.cache.generation == self.began
        self.kept = dict(self.states)
        return "begin"

    def stage(self, count: int, upto: int | None = None) -> str:
        """A round, of which ``upto`` says how many layers it comes to."""
        if self.active is None:
            with pytest.raises(TransactionError):
                self.cache.stage(self.stale[-1] if self.stale else Transaction(9, 0), self.of_rows[0], *self.new(count))
            return "stage refused"
        order = self.rng.permutation(self.of_rows).tolist()
        full = not self.fits(count)
        for at in order[:upto]:
            k, v = self.new(count)
            if full:
                with pytest.raises(CapacityExceeded):
                    self.cache.stage(self.active, at, k, v)
                return "no room"
            if self.rng.random() < 0.5:
                self.cache.stage(self.active, at, k, v)
            else:
                self.cache.stage(self.active, at, np.split(k, WORLD, axis=1), np.split(v, WORLD, axis=1))
            for rank in range(WORLD):
                self.rows[rank, at].append(np.split(k, WORLD, axis=1)[rank], np.split(v, WORLD, axis=1)[rank])
        if upto is not None and upto < len(order):
            self.half_staged(count, order, upto)
            return "half a round"
        self.staged += count
        for at in self.of_states:
            self.update(at, count)
        return "stage"

    def half_staged(self, count: int, order: list[int], upto: int) -> None:
        """Layers that have rows get no more, the others as many, and only a rollback ends this."""
        assert self.active is not None and self.cache.staged == self.staged
        refused = [(order[0], count)] if upto else []
        if upto and self.fits(count + 1):
            refused.append((order[upto], count + 1))
        for at, wrong in refused:
            with pytest.raises(TransactionError):
                self.cache.stage(self.active, at, *self.new(wrong))
        if upto:
            with pytest.raises(TransactionError):
                self.cache.commit(self.active)
            with pytest.raises(TransactionError):
                self.cache.rewind(self.committed)
        self.rollback()

    def commit(self, accepted: int | None = None) -> str:
        if self.active is None:
            return "idle"
        found, self.stale = self.active, [*self.stale[-3:], self.active]
        drafted = self.staged - self.committed
        with pytest.raises(TransactionError):
            self.cache.commit(found, drafted + 1)
        self.cache.commit(found, accepted)
        stays = drafted if accepted is None else accepted
        self.end(self.committed + stays)
        return "commit" if stays == drafted else "commit a part"

    def rollback(self) -> str:
        if self.active is None:
            if self.stale:
                with pytest.raises(TransactionError):
                    self.cache.rollback(self.stale[int(self.rng.integers(len(self.stale)))])
            return "stale"
        found, self.stale = self.active, [*self.stale[-3:], self.active]
        self.cache.rollback(found)
        self.end(self.committed)
        return "rollback"

    def rewind(self, length: int) -> str:
        if length > self.staged:
            with pytest.raises(TransactionError):
                self.cache.rewind(length)
            return "no rewind forward"
        reason = self.lost(length)
        assert self.cache.can_rewind_to(length) == (reason == "")
        if reason:
            with pytest.raises(CannotRewind):
                self.cache.rewind(length)
            return f"no rewind: {reason}"
        self.cache.rewind(length)
        self.end(length)
        return "rewind"

    def replay(self) -> str:
        due = self.due
        found = self.cache.replay_due
        assert found == due or not (found or due)
        for at in self.of_states:
            if self.states[at].position < due.stop:
                self.update(at, due.stop - self.states[at].position)
        return "replay" if due else "idle"

    def grow(self, capacity: int) -> str:
        if self.active is not None or capacity <= self.capacity or self.due:
            errors = (TransactionError, CapacityExceeded, ReplayDue)
            with pytest.raises(errors):
                self.cache.grow(capacity)
            return "grow refused"
        before = [cache.parts[0].device.allocated_bytes for cache in self.cache.caches]
        try:
            self.cache.grow(capacity)
        except (DeviceFault, OutOfMemory):
            assert [cache.parts[0].device.allocated_bytes for cache in self.cache.caches] == before
            raise
        self.capacity = capacity
        return "grow"

    def clear(self) -> str:
        try:
            self.cache.clear()
        except DeviceFault:
            self.cache.clear()
            raise
        finally:
            self.forget()
        return "clear"

    def hydrate(self, length: int, reach: int = 0) -> str:
        """From rows of which windows have ``reach`` more than they need."""
        if self.committed or self.active is not None:
            with pytest.raises(TransactionError):
                self.cache.hydrate(1, [[] for _ in range(WORLD)])
            return "hydrate refused"
        made = {key: Listed(oracle.plan) for key, oracle in self.rows.items()}
        states = {at: self.made_state(at, length) for at in self.of_states}
        for at in self.of_rows:
            k, v = self.new(length)
            for rank in range(WORLD):
                made[rank, at].append(np.split(k, WORLD, axis=1)[rank], np.split(v, WORLD, axis=1)[rank])
        self.cache.hydrate(length, [self.records(rank, made, states, length, reach) for rank in range(WORLD)])
        self.rows, self.states = made, states
        self.committed = self.staged = length
        return "hydrate"

    # -- what has to be ----------------------------------------------------------------------

    @property
    def due(self) -> range:
        behind = min((found.position for found in self.states.values()), default=self.committed)
        return range(behind, self.committed) if self.active is None else range(0)

    def check(self, newest: int | None = None) -> None:
        """All ranks hold what they have to, and mirrors say so; of rows the ``newest``, all that are stored if None."""
        cache = self.cache
        assert (cache.committed, cache.staged, cache.active) == (self.committed, self.staged, self.active)
        assert cache.capacity == self.capacity and cache.generation == self.began
        for (rank, at), oracle in self.rows.items():
            layer = cache.caches[rank].layers[at]
            assert isinstance(layer, ResidentLayer) and layer.position == self.staged
            if newest is None or layer.rows <= newest:
                oracle.check(layer)
            else:
                assert layer.mirrors() == layer.expected_mirrors
                for side, plane in enumerate((layer.keys, layer.values)):
                    stored = b"".join(row.stored[side] for row in oracle.rows[-newest:])
                    assert plane.packed(layer.rows - newest).tobytes() == stored
            if layer.ring is not None:
                assert cache._ledger.ring(layer.plan.window, rank) == layer.ring, "the book and a ring differ"
            first = max(0, self.committed - layer.plan.window + 1) if layer.plan.window else 0
            assert layer.base <= first, "rows are gone that a read at the committed length touches"
        for own in cache.caches:
            assert self.active is not None or (own.replay_due or range(0)) == (self.due or range(0))
        for at, found in self.states.items():
            for rank in range(WORLD):
                own, mine = cache.caches[rank].layers[at], found.of(rank)
                assert isinstance(own, ResidentRecurrentLayer) and own.position == mine.position
                taken = own.taken()
                assert np.array_equal(taken.state, mine.state)
                assert mine.conv is None or np.array_equal(taken.conv, mine.conv)

    def abandoned(self) -> None:
        """After a fault: as before the transaction, or before the replay."""
        if self.active is not None or self.due:
            self.states = {at: replace(found) for at, found in self.kept.items()}
        self.end(self.committed)

    def attempt(self, step: Callable[[], str]) -> bool:
        """Do a step; whether no device failed."""
        self.did_something = True
        try:
            what = step()
            self.seen[what] += 1
            self.did_something = not any(word in what for word in ("refused", "no ", "idle", "stale"))
        except (DeviceFault, OutOfMemory):
            assert self.faults.fired
            self.began = self.cache.generation
            self.seen["fault"] += 1
            self.abandoned()
            self.check()
            return False
        return True

    def lost(self, length: int) -> str:
        """Why there is no way back to ``length``; empty where there is one."""
        for (rank, at), oracle in self.rows.items():
            layer = self.cache.caches[rank].layers[at]
            assert isinstance(layer, ResidentLayer)
            window = oracle.plan.window
            if layer.ring is not None and (
                aligned_view(length, window) < layer.ring.base or max(0, length - window + 1) < layer.base
            ):
                return "a ring"
        marked = self.active is not None or bool(self.due)
        mark = min((found.position for found in self.kept.values()), default=0)
        stays = marked and length >= mark
        return "a state" if not stays and any(found.position != length for found in self.states.values()) else ""

    def fits(self, count: int) -> bool:
        if self.staged + count > self.capacity:
            return False
        for rank, at in self.rows:
            layer = self.cache.caches[rank].layers[at]
            assert isinstance(layer, ResidentLayer)
            if layer.ring is not None and self.staged - layer.ring.base + count > layer.ring.rows:
                window, target = layer.plan.window, self.staged + count
                first = min(max(0, target - window) // 32 * 32, aligned_view(self.committed, window))
                if first < layer.ring.base or self.staged - first + count > layer.ring.rows:
                    return False
        return True

    def end(self, length: int) -> None:
        for oracle in self.rows.values():
            oracle.truncate(oracle.position - length)
        if any(found.position > length for found in self.states.values()) or length < self.staged:
            self.states = {at: replace(found) for at, found in self.kept.items()} if self.states else {}
        self.committed = self.staged = length
        self.active = None

    def update(self, at: int, count: int) -> None:
        made = self.made_state(at, self.states[at].position + count)
        self.cache.update(at, made.state, count, convs=made.conv)
        self.states[at] = made

    def made_state(self, at: int, position: int) -> States:
        zeros = States.zeros(self.plan.layers[at])
        conv = None if zeros.conv is None else numbers(self.rng, *zeros.conv.shape)
        return States(numbers(self.rng, *zeros.state.shape), conv, position)

    def new(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        return tuple(numbers(self.rng, count, WORLD * KV_HEADS, SIZE) for _ in range(2))  # type: ignore[return-value]

    def records(self, rank: int, made: dict[tuple[int, int], Oracle], states: dict[int, States], length: int, reach: int) -> list:
        """What a rank is filled from: rows as they are stored."""
        parts: list[RankRows | RecurrentState] = []
        for layer in self.cache.caches[rank].own:
            if not isinstance(layer, ResidentLayer):
                mine = states[layer.index].of(rank)
                parts.append(RecurrentState(mine.state, mine.conv))
                continue
            window = layer.plan.window
            start = max(0, length - window + 1 - reach) if window else 0
            stored = made[rank, layer.index].rows[start:]
            sides = []
            for side, plane in enumerate((layer.keys, layer.values)):
                raw = np.frombuffer(b"".join(row.stored[side] for row in stored), np.uint8)
                sides.append(
                    [plane._shaped(part) for part in np.split(raw, [raw.size // plane.row_bytes // 2 * plane.row_bytes])]
                )
            parts.append(RankRows(*sides, start))
        return parts
