"""What a `ledger.Ledger` is made for, and the plans it makes: values that each rank does its part of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.geometry import check_capacity, model_geometry
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.rings import AppendPlan, Rebase, RestorePlan, Ring, check_count, ring_rows
from warmkv.kvstore.live.transaction import Transaction, TransactionState
from warmkv.schema.errors import RecordError

#: The window by which flat layers go.
FLAT = 0


@dataclass(frozen=True, slots=True)
class LayerRows:
    """What a token takes in one layer of a rank, and the window of its ring (`FLAT` for none)."""

    key_bytes: int
    value_bytes: int
    window: int = FLAT


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of one rank, as many ranks alike, and the positions there is room for. ``windows`` are those of
    layers that have rows, each once, ascending. Raises RecordError, CapacityExceeded beyond int32."""

    layers: tuple[LayerRows, ...]
    capacity: int
    ranks: int = 1
    windows: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_capacity(self.capacity)
        check_count("ranks", self.ranks, least=1)
        for layer in self.layers:
            check_count("window", layer.window)
            if min(layer.key_bytes, layer.value_bytes) < 0:
                raise RecordError(f"{layer}, expected at least 0 bytes")
        windows = {layer.window for layer in self.layers if layer.key_bytes + layer.value_bytes}
        object.__setattr__(self, "windows", tuple(sorted(windows)))

    @classmethod
    def of(cls, plan: ModelPlan, capacity: int, *, ranks: int = 1, rings: bool = False) -> Layout:
        """Of caches whose ranks have ``plan`` (see `sharding.shard_model`). Raises as `geometry.model_geometry`."""
        geometry = model_geometry(plan, capacity, rings=rings)
        layers = (
            LayerRows(found.key_bytes, found.value_bytes, layer.window if found.ringed else FLAT)
            for layer, found in zip(plan.layers, geometry.layers, strict=True)
        )
        return cls(tuple(layers), capacity, ranks)

    def fresh_rings(self) -> tuple[Ring | None, ...]:
        """Those of one rank, None for flat layers, in the order of ``windows``."""
        return tuple(Ring(ring_rows(window, self.capacity), window) if window else None for window in self.windows)


@dataclass(frozen=True, slots=True)
class _Placed:
    """Something per rank and window."""

    windows: tuple[int, ...]

    def _at(self, window: int, rank: int, ranks: int) -> tuple[int, int]:
        if window not in self.windows or not 0 <= rank < ranks:
            raise RecordError(f"window {window} of rank {rank}, expected one of {self.windows} and of {ranks} ranks")
        return rank, self.windows.index(window)


@dataclass(frozen=True, slots=True)
class StagePlan(_Placed):
    """``count`` rows to be staged in a transaction, up to ``target``: where they go in each layer."""

    transaction: Transaction
    count: int
    target: int
    places: tuple[tuple[AppendPlan, ...], ...]

    def place(self, window: int = FLAT, rank: int = 0) -> AppendPlan:
        """Where rows go in layers of ``window``. Raises RecordError where there are none."""
        rank, column = self._at(window, rank, len(self.places))
        return self.places[rank][column]

    @property
    def rebases(self) -> bool:
        """Whether a ring moves rows."""
        return any(isinstance(place, Rebase) for places in self.places for place in places)


@dataclass(frozen=True, slots=True)
class FinishPlan:
    """The end of a transaction of which ``accepted`` rows stay: the length of every rank becomes ``target``."""

    transaction: Transaction
    accepted: int
    target: int


@dataclass(frozen=True, slots=True)
class RewindPlan:
    """The length of every rank becomes ``target``. ``lengths`` are what it was made for."""

    target: int
    lengths: TransactionState


@dataclass(frozen=True, slots=True)
class GrowPlan(_Placed):
    """``length`` rows for a fresh cache of another capacity, ``layout``: what is copied of each layer."""

    layout: Layout
    length: int
    next_generation: int
    moves: tuple[tuple[RestorePlan, ...], ...]

    def move(self, window: int = FLAT, rank: int = 0) -> RestorePlan:
        """The rows of layers of ``window`` that go to row 0 of the new ones. Raises RecordError."""
        rank, column = self._at(window, rank, len(self.moves))
        return self.moves[rank][column]

    def copied_bytes(self, layer: int, rank: int = 0) -> tuple[int, int]:
        """Bytes of keys and of values that are copied of one layer. Raises RecordError for one without
        rows, OutOfMemory beyond 64 bits."""
        about = self.layout.layers[layer]
        rows = len(self.move(about.window, rank).physical)
        return sizing.product(rows, about.key_bytes), sizing.product(rows, about.value_bytes)


@dataclass(frozen=True, slots=True)
class HydratePlan(_Placed):
    """``length`` rows that a fresh cache is given: layers of ``windows[i]`` have those from ``starts[i]`` on, at
    rows ``physical[i]``; rows before these are padding, to be filled with zeros."""

    length: int
    starts: tuple[int, ...]
    physical: tuple[range, ...]

    def start(self, window: int = FLAT) -> int:
        """The first position of layers of ``window``. Raises RecordError where there are none."""
        return self.starts[self._at(window, 0, 1)[1]]

    def place(self, window: int = FLAT) -> range:
        """The rows that positions from `start` on go to. Raises RecordError."""
        return self.physical[self._at(window, 0, 1)[1]]


Plan: TypeAlias = StagePlan | FinishPlan | RewindPlan | GrowPlan | HydratePlan
