"""A copy of what a cache holds at one position, to go back to as often as one likes.

In memory and in the bytes that are stored, each side a plane of its own: quantised on one side, on
both or on none, it comes back bit for bit. What outlives the process goes through `kvstore.bridge`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer, RecurrentState
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rows.allocation import refusals
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.records import Lineage


@dataclass(frozen=True, slots=True, eq=False)
class SavedRows:
    """Rows of an attention layer, in planes that nobody appends to."""

    keys: PlaneRows
    values: PlaneRows
    importance: F32 | None
    base: int
    gapless: bool

    @property
    def nbytes(self) -> int:
        mass = 0 if self.importance is None else self.importance.nbytes
        return self.keys.stored_bytes + self.values.stored_bytes + mass


#: Rows, the state of a recurrent layer, the inputs of a convolution.
Saved = Union[SavedRows, RecurrentState, F32]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The state of every layer that has one of its own, after ``position`` tokens. ``plan`` says how it is
    written and hence where it fits."""

    plan: ModelPlan
    position: int
    lineage: Lineage
    shift_offset: int
    layers: tuple[Saved, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of rows and states."""
        return sum(layer.nbytes for layer in self.layers)


def take(cache: ModelCache) -> Snapshot:
    """Copies of all layers. Raises RecordError where they are at different positions, UnsupportedError for
    rings and Nystroem layers, ReplayDue, OutOfMemory."""
    cache.require_replayed("copied aside")
    position = cache.position
    for layer in cache.own:
        if layer.position != position:
            raise RecordError(f"{where(layer.plan, layer.index)} is at position {layer.position}, others at {position}")
    saved = tuple(_saved(layer) for layer in cache.own)
    return Snapshot(cache.plan, position, cache.lineage, cache.shift_offset, saved)


def prepare(cache: ModelCache, snapshot: Snapshot, *, room: int = 0) -> Callable[[], None]:
    """What puts ``snapshot`` into ``cache`` when it is called, and then cannot fail; planes get memory for
    ``room`` rows in all where that is more than they need. Of earlier states of a convolution none are
    known then. Raises RecordError where the snapshot was taken of another geometry or written otherwise
    than this cache writes, OutOfMemory; nothing changed."""
    _check_fits(cache.plan, snapshot.plan)
    changes = [_prepared(layer, saved, snapshot.position, room) for layer, saved in zip(cache.own, snapshot.layers, strict=True)]

    def install() -> None:
        for change in changes:
            change()
        cache.lineage = snapshot.lineage
        cache.shift_offset = snapshot.shift_offset

    return install


def _saved(layer: Layer) -> Saved:
    if isinstance(layer, AttentionLayer):
        mass = None if layer.importance is None else _copy(layer.importance)
        return SavedRows(layer.keys.gathered(None), layer.values.gathered(None), mass, layer.base, layer.gapless)
    if isinstance(layer, (RecurrentLayer, ResidentRecurrentLayer)):
        return layer.taken()
    if isinstance(layer, ConvLayer):
        return _copy(layer.state)
    raise UnsupportedError(f"{where(layer.plan, layer.index)} cannot be copied aside; save it through the bridge")


def _prepared(layer: Layer, saved: Saved, position: int, room: int) -> Callable[[], None]:
    if isinstance(layer, AttentionLayer):
        assert isinstance(saved, SavedRows)
        more = max(0, room - len(saved.keys))
        return layer.prepare_adopt(
            saved.keys.gathered(None, more), saved.values.gathered(None, more), position=position, base=saved.base,
            importance=saved.importance, gapless=saved.gapless,
        )  # fmt: skip
    if isinstance(layer, (RecurrentLayer, ResidentRecurrentLayer)):
        assert isinstance(saved, RecurrentState)
        return layer.prepare_adopt(saved.state, position, conv=saved.conv)
    assert isinstance(layer, ConvLayer) and isinstance(saved, np.ndarray)
    return layer.prepare_adopt(saved, position)


def _check_fits(own: ModelPlan, taken: ModelPlan) -> None:
    if len(taken.layers) != len(own.layers):
        raise RecordError(f"a snapshot of {len(taken.layers)} layers, the cache has {len(own.layers)}")
    for index, (theirs, mine) in enumerate(zip(taken.layers, own.layers, strict=True)):
        name = where(mine, index)
        if _formats(theirs) != _formats(mine) and theirs.kind is mine.kind:
            found, expected = (", ".join(map(str, _formats(plan))) for plan in (theirs, mine))
            raise RecordError(f"{name}: a snapshot whose rows are stored as {found}, this cache stores {expected}")
        if theirs != mine:
            raise RecordError(f"{name}: a snapshot of {theirs}, the cache has {mine}")


def _formats(plan: LayerPlan) -> tuple[object, ...]:
    """How rows are written, and read: what deeper layers keep was computed from what was read."""
    about = () if plan.turboquant is None else (f"seed {plan.turboquant.seed}", plan.turboquant.estimator.value)
    return (plan.key_format.value, plan.value_format.value, *about)


def _copy(numbers: F32) -> F32:
    with refusals(numbers.nbytes, f"a copy of {numbers.shape}"):
        return numbers.copy()
