"""What is shared out over ranks, and what each of them is made, filled and grown from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Union

import numpy as np

from warmkv.kernels.dispatch import Backend
from warmkv.kernels.formats import F32
from warmkv.kernels.quant.packed import Packed
from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.devices.base import DeviceArray
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.recurrent import RecurrentState
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.ledger_plans import FLAT, StagePlan
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.parts import bytes_by_device
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import Rebase
from warmkv.kvstore.live.sharding import shard_model
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

#: Rows of all ranks in one array of the host, or an array a rank.
Rows = Union[F32, Sequence[Union[F32, DeviceArray]]]


@dataclass(frozen=True, slots=True, eq=False)
class RankRows:
    """Rows of one layer on one rank as records have them, one part after the other, from position ``start`` on; see
    `ResidentLayer.prepare_restore`."""

    keys: Sequence[Packed]
    values: Sequence[Packed]
    start: int = 0


#: What a layer of one rank is filled from.
Filling = Union[RankRows, RecurrentState]


@dataclass(slots=True)
class Round:
    """Rows that layer by layer is getting: ``done`` are the layers that have them on all ranks, ``moved`` the ranks
    on which a ring began to move."""

    plan: StagePlan
    done: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)

    def moves(self, rank: int) -> dict[int, int]:
        """By window the position that comes to lie at row 0 of its rings, on a rank where one has begun to move:
        rings of one window and rank stay alike."""
        if rank not in self.moved:
            return {}
        places = zip(self.plan.windows, self.plan.places[rank], strict=True)
        return {window: place.new_base for window, place in places if isinstance(place, Rebase)}

    def told(self, layers: set[int]) -> str:
        missing = ", ".join(map(str, sorted(layers - self.done)))
        have = ", ".join(map(str, sorted(self.done)))
        return f"layers {have} have {self.plan.count} rows up to position {self.plan.target}, layers {missing} have not"


def check_residences(plan: ModelPlan, residences: Sequence[Residence]) -> None:
    """Raises RecordError unless there is at least one and all are alike but for their devices, and as
    `parts.bytes_by_device` does; UnsupportedError for rows with a field and for plans without rows."""
    if not residences:
        raise RecordError("no rank, expected at least 1")
    first = residences[0]
    for rank, other in enumerate(residences):
        if replace(other, devices=first.devices) != first:
            raise RecordError(f"rank {rank} lives in {_told(other)}, rank 0 in {_told(first)}; expected them alike")
    if not any(layer.kv_heads for layer in plan.layers):
        raise UnsupportedError(f"{len(plan.layers)} layers, none of which has rows; tokens are counted by rows")
    for index, layer in enumerate(plan.layers):
        if layer.quantised:
            raise UnsupportedError(f"{where(layer, index)}: a field that ranks fix from their rows cannot be taken back")
    for rank, residence in enumerate(residences):
        bytes_by_device(shard_model(plan, rank, len(residences)), residence)


def bytes_by_rank(plan: ModelPlan, residences: Sequence[Residence]) -> tuple[int, ...]:
    """What `RankedCache` will ask the devices of each rank for: caches, and the copies of recurrent states that a
    rollback goes back to. Raises as that does."""
    check_residences(plan, residences)
    found = []
    for rank, residence in enumerate(residences):
        own = shard_model(plan, rank, len(residences))
        states = (layer for layer in own.layers if layer.kind is LayerKind.RECURRENT)
        copies = (sizing.total(4 * layer.state_size, 2 * sizing.conv_bytes(layer)) for layer in states)
        found.append(sizing.total(*copies, *(count for _, count in bytes_by_device(own, residence))))
    return tuple(found)


def shares(given: Rows, world: int, axis: int, what: str) -> list[DeviceArray]:
    """By rank its part of ``given``, equal shares along ``axis`` of an array of the host, as views. Raises
    RecordError where there are none; sizes are the layers' to check."""
    if isinstance(given, np.ndarray):
        if given.ndim <= axis or given.shape[axis] % world:
            raise RecordError(f"{what} of shape {given.shape}, expected axis {axis} in equal shares over {world} ranks")
        size = given.shape[axis] // world
        before = (slice(None),) * axis
        return [given[(*before, slice(rank * size, (rank + 1) * size))] for rank in range(world)]
    if not isinstance(given, (list, tuple)) or len(given) != world:
        found = f"{len(given)} of them" if isinstance(given, (list, tuple)) else type(given).__name__
        raise RecordError(f"{what}: {found}, expected one numpy array, or an array for each of {world} ranks")
    return list(given)


def count_of(rows: DeviceArray) -> int:
    """How many rows an array has. Raises RecordError for what has none to count."""
    shape = getattr(rows, "shape", ())
    if not shape:
        raise RecordError(f"rows are {type(rows).__name__}, expected an array (n, kv_heads, size)")
    return int(shape[0])


def enlarged(cache: ModelCache, capacity: int, starts: Mapping[int, int], backend: Backend) -> ModelCache:
    """A cache of the same plan and devices with room for ``capacity`` tokens that holds what ``cache`` holds, copied
    on the devices; of rings the positions from ``starts`` of their window on. `ModelCache.follow` is left to be
    called. Raises OutOfMemory and DeviceFault with nothing left allocated, and then ``cache`` is as it was."""
    assert cache.residence is not None
    home = replace(cache.residence, capacity=capacity)
    grown = ModelCache(cache.plan, backend=backend, policy=cache.policy, residence=home)
    try:
        for layer, source in zip(grown.own, cache.own, strict=True):
            if isinstance(layer, ResidentLayer) and isinstance(source, ResidentLayer):
                layer.take_over(source, starts.get(layer.plan.window, 0))
            elif isinstance(layer, ResidentRecurrentLayer) and isinstance(source, ResidentRecurrentLayer):
                layer.take_over(source)
    except BaseException:
        grown.free()
        raise
    return grown


def starts_of(caches: Sequence[ModelCache], length: int, ranks: Sequence[Sequence[Filling]]) -> dict[int, int]:
    """By window the position that its rings begin at, if ``ranks`` are what is put into ``caches``. Raises RecordError
    for parts that are no parts of these layers, or differ where ranks and layers of a window must not."""
    if len(ranks) != len(caches):
        raise RecordError(f"state of {len(ranks)} ranks, there are {len(caches)}")
    starts: dict[int, int] = {}
    for rank, (cache, parts) in enumerate(zip(caches, ranks, strict=True)):
        if len(parts) != len(cache.own):
            raise RecordError(f"rank {rank}: state of {len(parts)} layers, expected {len(cache.own)}")
        for layer, part in zip(cache.own, parts, strict=True):
            expected = RankRows if isinstance(layer, ResidentLayer) else RecurrentState
            name = f"rank {rank}, {where(layer.plan, layer.index)}"
            if not isinstance(part, expected):
                raise RecordError(f"{name}: {type(part).__name__}, expected {expected.__name__}")
            if isinstance(part, RankRows) and part.start + sum(map(len, part.keys)) != length:
                raise RecordError(f"{name}: {sum(map(len, part.keys))} rows from {part.start} on, expected them up to {length}")
            if isinstance(part, RankRows) and isinstance(layer, ResidentLayer):
                ringed = layer.ring is not None
                if not ringed and layer.plan.window:
                    continue
                start = starts.setdefault(layer.plan.window if ringed else FLAT, part.start)
                if start != part.start:
                    raise RecordError(f"{name}: rows from {part.start} on, others of its kind begin at {start}")
    return starts


def prepare_filling(layer: Layer, length: int, part: Filling) -> Callable[[], None]:
    """What fills a layer of one rank, all that may be refused having been refused: see `ResidentLayer.prepare_restore`
    and `ResidentRecurrentLayer.prepare_adopt`."""
    if isinstance(layer, ResidentRecurrentLayer):
        assert isinstance(part, RecurrentState)
        return layer.prepare_adopt(part.state, length, conv=part.conv)
    assert isinstance(layer, ResidentLayer) and isinstance(part, RankRows)
    return layer.prepare_restore(part.keys, part.values, position=length, base=part.start)


def renew(cache: ModelCache) -> None:
    """Rows of ``cache`` came from elsewhere, and nothing is known to have been done to them."""
    cache.lineage, cache.shift_offset = CLEAN, 0


def _told(residence: Residence) -> str:
    return f"{len(residence.devices)} devices with cuts {residence.cuts}, capacity {residence.capacity}, rings {residence.rings}"
