"""All layers of one sequence, and what must happen to all of them or to none.

A `ModelCache` makes its layers from the plan and leaves running them to whoever runs the model: append
and attend are the layers' own. What is here concerns the sequence as a whole: its position, eviction to
a budget, taking tokens back, what it costs, and its lineage. With a `Residence` the layers are those of
devices, and nothing else changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Union

from warmkv.kernels import dispatch
from warmkv.kernels.dispatch import Backend, Kernels
from warmkv.kernels.formats import F32, WARMUP_ROWS
from warmkv.kvstore.live import evict, wire
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.devices.base import DeviceArray
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.kept import apply_all, truncation
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.memory import LayerMemory, added
from warmkv.kvstore.live.parked import ParkedLogits
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.replay import Mark, Replay
from warmkv.kvstore.live.rows.allocation import Allocate, allocate
from warmkv.schema.errors import FormatError, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN, ID_BYTES, Lineage

if TYPE_CHECKING:
    from warmkv.kvstore.live.parts import DevicePart
    from warmkv.kvstore.live.residence import Residence

DEFAULT_POLICY = Mass()
Layer = Union[AttentionLayer, BoundedLayer, ConvLayer, RecurrentLayer, ResidentRecurrentLayer, NystromLayer]


class ModelCache:
    """The live cache of one sequence.

    ``layers`` has an entry for each layer of the plan; a SHARED layer's is the very object it shares
    with. ``policy`` says what `evict` keeps (None: `DEFAULT_POLICY`, or the newest rows on devices, which count
    no attention). ``threads`` is how many the attention kernels may use; results do not depend on it.
    ``residence`` says which devices layers live on, with memory taken at once, and ``parts`` what each of
    them has; None is host memory that grows as it is needed. ``shift_offset`` counts the positions that
    context shifts took out (see `shift`); whoever puts state from elsewhere into the layers sets it beside
    the lineage.

    **Threading:** one caller at a time; caches of one process know nothing of each other."""

    def __init__(
        self, plan: ModelPlan, *, backend: Backend = "auto", threads: int = 1, policy: Policy | None = None,
        allocate: Allocate = allocate, residence: Residence | None = None,
    ) -> None:  # fmt: skip
        """Raises BackendMissing, OutOfMemory (rings are taken at once); with a ``residence`` also RecordError and
        UnsupportedError for layers that cannot live there. Nothing stays allocated then."""
        kernels = dispatch.kernels(backend)
        own: dict[int, Layer]
        self.parts: tuple[DevicePart, ...] = ()
        if residence is None:
            own = {
                index: make_layer(layer, index, kernels, threads, allocate)
                for index, layer in enumerate(plan.layers)
                if layer.kind is not LayerKind.SHARED
            }
        else:
            # Only here: caches of the host load nothing of devices.
            from warmkv.kvstore.live.parts import make_parts

            self.parts = make_parts(plan, residence, kernels)
            made = (layer for part in self.parts for layer in part.layers)
            own = {layer.index: layer for layer in sorted(made, key=lambda layer: layer.index)}
        self.plan, self.residence = plan, residence
        self.policy: Policy = policy or (DEFAULT_POLICY if residence is None else Recent())
        self.own: tuple[Layer, ...] = tuple(own.values())
        self.layers: tuple[Layer, ...] = tuple(
            own[layer.shared_with if layer.kind is LayerKind.SHARED else index] for index, layer in enumerate(plan.layers)
        )
        self._lineage = CLEAN
        self.shift_offset = 0
        #: Position up to which tokens decided what the lineage tells.
        self._decided = 0
        self._seals_told: set[int] = set()
        #: Checkpoints that tell whether they can still be gone back to, as long as somebody has them.
        self.checkpoints: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.replay = Replay()
        self._parked = ParkedLogits(residence.devices[-1] if residence is not None else None)

    @property
    def position(self) -> int:
        """Position of the next token: the furthest of the layers'. Not the rows stored, which are fewer
        after an eviction, a trim, or where none are kept."""
        return max(layer.position for layer in self.own)

    @property
    def replay_due(self) -> range:
        """Positions that recurrent layers have to see again after a rollback, empty for none: until they have,
        by normal updates, nothing is saved."""
        return self.replay.due(self.position)

    def require_replayed(self, what: str) -> None:
        """Raises ReplayDue, in which ``what`` cannot be done, while there is a `replay_due`."""
        self.replay.require(self.position, what)

    @property
    def parked_logits(self) -> F32 | None:
        """(vocabulary,) float32 logits after the last token, a host copy, for ``logits`` of a save; None unless
        they were parked at this position."""
        return self._parked.at(self.position)

    def park_logits(self, row: DeviceArray) -> None:
        """Keep a copy of the logits (vocabulary,) float32 after the last token on the last device, in memory taken
        for the first. Raises RecordError for another array, OutOfMemory."""
        self._parked.park(row, self.position)

    def prepare_logits(self, row: DeviceArray) -> Callable[[], None]:
        """Everything of `park_logits` that may fail, for who is about to change where the cache is: what is
        returned, called then, parks them. What was parked is forgotten now."""
        put = self._parked.prepare(row)
        return lambda: put(self.position)

    @property
    def needs_eviction(self) -> bool:
        """Whether a layer has as many rows as the plan allows. Layers that bound themselves (windows,
        rings, Nystroem states, before they are sealed too) do not count: nothing would be evicted."""
        limit = self.plan.max_rows
        return limit > 0 and any(layer.rows >= limit for layer in self._evictable)

    @property
    def lineage(self) -> Lineage:
        """What was done to the rows that the tokens do not tell; CLEAN for nothing. Seals are noticed
        when it is read."""
        for layer in self.own:
            if isinstance(layer, NystromLayer) and layer.sealed and layer.index not in self._seals_told:
                assert layer.plan.nystrom is not None
                self._lineage = lineages.sealed(self._lineage, layer.index, layer.plan.nystrom, layer.sealed_rows)
                self._seals_told.add(layer.index)
        return self._lineage

    @lineage.setter
    def lineage(self, found: Lineage) -> None:
        """Set by whoever just changed rows, or put state from elsewhere into the layers, seals among it
        included. Raises
        RecordError for anything that is no lineage."""
        _check_lineage(found)
        self._renewed("other state was put into the cache")
        self._lineage = found
        self._decided = 0 if found == CLEAN else self.position
        self._seals_told = {layer.index for layer in self.own if isinstance(layer, NystromLayer) and layer.sealed}

    def evict(self, keep: int) -> int:
        """Give up rows of every layer of full attention that has more than ``keep``, by the policy; other
        layers bound themselves. Returns how many rows went, over all layers. Positions stay, and the
        lineage changes unless nothing went.

        All layers are planned and their memory taken before the first is changed: for that moment the
        kept rows are there twice. Raises RecordError (a negative budget, `Mass` without importance) and
        OutOfMemory; no layer has changed then."""
        before = self.lineage
        plans = []
        for layer in self._evictable:
            kept = evict.plan(self.policy, layer.rows, keep, layer.importance)
            if kept is not None:
                plans.append((layer, kept))
        changes = [layer.prepare_keep(kept) for layer, kept in plans]
        if not changes:
            return 0
        after = lineages.evicted(before, self.policy, self.position, [(layer.index, kept) for layer, kept in plans])
        gone = sum(layer.rows - len(kept) for layer, kept in plans)
        for change in changes:
            change()
        self._lineage, self._decided = after, self.position
        return gone

    def check_room(self, count: int) -> None:
        """Raise CapacityExceeded where a layer has no room for ``count`` positions more, before a step is begun
        that would be refused half-way. Memory of the host grows, and is not asked."""
        for layer in self.own:
            if isinstance(layer, AttentionLayer):
                layer.check_room(count)

    def truncate_last(self, count: int) -> None:
        """Forget the newest ``count`` positions of every layer. Raises RecordError or CannotRewind where
        one layer cannot, and RecordError for layers at different positions, as a step that failed half-way leaves
        them (`checkpoint.rollback` and `clear` mend that); then none has.

        The lineage changes where something stays that forgotten tokens decided: an eviction or a shift at a later
        position (the rows between were first computed with what it gave up), or a field fixed from rows
        that are gone."""
        for layer in self.own:
            layer.check_truncate(count)
        positions = {layer.index: layer.position for layer in self.own}
        if count and len(set(positions.values())) > 1:
            raise RecordError(f"{count} positions to forget of layers at different ones: {positions} by layer")
        before = self.lineage
        apply_all([truncation(layer, count) for layer in self.own])
        if count:
            self.taken_back(before)

    def clear(self) -> None:
        """Forget the conversation in all layers; weights and sizes stay, the lineage is clean."""
        for layer in self.own:
            layer.clear()
        self._renewed("the cache was cleared")
        self._lineage, self._decided, self.shift_offset = CLEAN, 0, 0
        self._seals_told.clear()

    def free(self) -> None:
        """Take what it has on devices off their books; the cache is not to be used any more."""
        for part in self.parts:
            part.free()
        self._parked.free()

    def follow(self, other: ModelCache) -> None:
        """Take over what was done to the rows of ``other``, now that they are copied here: lineage, shifts and
        parked logits, which are this cache's from then on. Raises RecordError for another plan."""
        if other.plan != self.plan:
            raise RecordError(f"a cache of {len(other.plan.layers)} layers, expected one of this plan")
        self.lineage, self.shift_offset = other.lineage, other.shift_offset
        self._decided, self._parked, other._parked = other._decided, other._parked, self._parked

    def memory(self) -> LayerMemory:
        """What all layers have allocated, by purpose; shared rows count once. Each layer has its own
        report."""
        return added(layer.memory() for layer in self.own)

    def export_layers(self, *, f16: bool = False) -> tuple[bytes, ...]:
        """A record of the layer wire for each layer that shares with none, see `wire.export_layer`. Raises
        ReplayDue after a rollback, UnsupportedError on devices."""
        self.require_replayed("an export")
        self._require_host()
        return tuple(wire.export_layer(layer, f16=f16) for layer in self.own)

    def import_layers(self, records: Sequence[bytes], *, lineage: Lineage = CLEAN) -> None:
        """Replace the state of all layers by ``records`` as `export_layers` gives them, or of none.
        ``lineage`` is the sender's, which the wire does not carry; records of half precision, and rows
        with gaps, change it further.

        Raises FormatError, UnsupportedError, RecordError, OutOfMemory; no layer has changed then."""
        _check_lineage(lineage)
        self._require_host()
        if len(records) != len(self.own):
            raise FormatError(f"{len(records)} layer records, expected {len(self.own)}")
        prepared = [wire.prepare_import(layer, data) for layer, data in zip(self.own, records, strict=True)]
        positions = {record.position for record, _ in prepared}
        if len(positions) > 1:
            raise FormatError(f"layer records at positions {sorted(positions)}, expected one sequence")
        told = wire.lineage_of(lineage, self.own, [record for record, _ in prepared])
        for _, change in prepared:
            change()
        self.lineage = told
        self.shift_offset = 0

    def taken_back(self, before: Lineage) -> None:
        """To be called by who took positions back in every layer, of which the lineage was ``before``: tells what is
        left standing."""
        for taken in self.checkpoints:
            taken.passed(self.position)
        self._parked.passed(self.position)
        fields = _stale_fields(self.own)
        if fields or self.position < self._decided:
            self._lineage, self._decided = lineages.rewound(before, self.position, fields), self.position

    def _renewed(self, why: str) -> None:
        """What was held is no more, and neither is what was noted of it."""
        for taken in self.checkpoints:
            taken.retired = f"{why} since"
        self.replay.forget()
        self._parked.forget()

    def _require_host(self) -> None:
        if self.residence is not None:
            raise UnsupportedError("the layer wire is of caches in host memory; save what is on devices through the bridge")

    @property
    def _evictable(self) -> list[AttentionLayer]:
        return [layer for layer in self.own if isinstance(layer, AttentionLayer) and layer.plan.kind is LayerKind.FULL]


def make_layer(plan: LayerPlan, index: int, kernels: Kernels, threads: int, allocate: Allocate = allocate) -> Layer:
    """The layer a plan describes. Raises RecordError for SHARED, which has no state of its own."""
    if plan.kind is LayerKind.RECURRENT:
        return RecurrentLayer(plan, index=index, allocate=allocate)
    if plan.kind is LayerKind.CONV:
        return ConvLayer(plan, index=index, allocate=allocate)
    if plan.kind is LayerKind.RING:
        return BoundedLayer(plan, index=index, kernels=kernels, allocate=allocate)
    if plan.kind is LayerKind.NYSTROM:
        return NystromLayer(plan, index=index, kernels=kernels, threads=threads, allocate=allocate)
    if plan.kind in (LayerKind.FULL, LayerKind.SLIDING):
        return AttentionLayer(plan, index=index, kernels=kernels, threads=threads, allocate=allocate)
    raise RecordError(f"layer {index} ({plan.kind.name}) has no state of its own")


def _check_lineage(found: Lineage) -> None:
    if not isinstance(found, bytes) or len(found) != ID_BYTES:
        size = f"{len(found)} bytes" if isinstance(found, bytes) else type(found).__name__
        raise RecordError(f"a lineage of {size}, expected {ID_BYTES} bytes")


def _stale_fields(layers: Sequence[Layer]) -> tuple[tuple[int, bytes], ...]:
    """(layer, field) of frozen fields that were fixed from more rows than there are now. Windows are never
    trimmed before that, so that their position tells; of evicted layers too many are taken for stale."""
    found = []
    for layer in layers:
        if isinstance(layer, AttentionLayer) and layer.plan.quantised:
            rows = layer.position if layer.plan.window else layer.rows
            fields = [plane.field for plane in (layer.keys, layer.values)]
            found += [(layer.index, field.tobytes()) for field in fields if field is not None and rows < WARMUP_ROWS]
    return tuple(found)
