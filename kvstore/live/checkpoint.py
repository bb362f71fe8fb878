"""A place a cache can be taken back to once a draft was verified: lengths, and copies of what is written over.

Rows are only counted: what was appended behind a checkpoint is dropped by dropping its count. Recurrent
states are copied, on the device they live on. A rollback keeps the rows of accepted tokens and takes
recurrent states back to before them, so that they are behind until these tokens were replayed
(`ModelCache.replay_due`); until then nothing is saved.

**Source:** memra `CacheSnapshot`, `rollback`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Union

import numpy as np

from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.kept import Change, KeptStates, apply_all, truncation
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.schema.errors import CannotRewind, DeviceFault, RecordError

#: Layers whose state is written over and hence copied.
Kept = Union[ConvLayer, RecurrentLayer, ResidentRecurrentLayer]
_KEPT = (ConvLayer, RecurrentLayer, ResidentRecurrentLayer)


class Checkpoint:
    """What `checkpoint` makes and `refresh` renews: of one cache, after ``position`` tokens.

    **Threading:** that of its cache."""

    def __init__(self, cache: ModelCache) -> None:
        self.plan = cache.plan
        self.position = 0
        #: By layer its position; layers of MTP blocks may be behind the trunk.
        self.positions: list[int] = []
        self.kept: list[KeptStates | None] = []
        #: Why it cannot be gone back to any more; empty while it can.
        self.retired = ""
        self._cache = weakref.ref(cache)

    @property
    def nbytes(self) -> int:
        """Bytes of copied states."""
        return sum(kept.nbytes for kept in self.kept if kept is not None)

    def is_of(self, cache: ModelCache) -> bool:
        """Whether it was taken of this very cache."""
        return self._cache() is cache

    def passed(self, position: int) -> None:
        """Tokens back to ``position`` were forgotten: others may stand there by now."""
        if self.position > position:
            self.retired = f"tokens were taken back to position {position} since"

    def _note(self, cache: ModelCache) -> None:
        self.position, self.retired = cache.position, ""
        self.positions[:] = [layer.position for layer in cache.own]
        cache.checkpoints.add(self)


def checkpoint(cache: ModelCache) -> Checkpoint:
    """Where ``cache`` is. Raises ReplayDue, OutOfMemory with nothing left allocated."""
    cache.require_replayed("the start of a checkpoint")
    made = Checkpoint(cache)
    try:
        for layer in cache.own:
            made.kept.append(layer.set_aside() if isinstance(layer, _KEPT) else None)
    except BaseException:
        free(made, cache)
        raise
    made._note(cache)
    return made


def refresh(taken: Checkpoint, cache: ModelCache) -> None:
    """Make ``taken`` what `checkpoint` would give now, in the memory it has: none is asked for. Raises
    RecordError for another cache's, ReplayDue; nothing changed."""
    _require_own(taken, cache)
    cache.require_replayed("the start of a checkpoint")
    for layer, kept in zip(cache.own, taken.kept, strict=True):
        if isinstance(layer, _KEPT):
            assert kept is not None
            layer.set_aside_into(kept)
    taken._note(cache)


def can_rollback(cache: ModelCache, taken: Checkpoint, accepted: int) -> bool:
    """Whether `rollback` would go; changes nothing."""
    try:
        _check(cache, taken, accepted)
    except (CannotRewind, RecordError, DeviceFault):
        return False
    return True


def rollback(cache: ModelCache, taken: Checkpoint, accepted: int) -> None:
    """Back to ``taken`` and the ``accepted`` tokens behind it: rows are kept up to there, recurrent states are
    those of the checkpoint. Convolutions that remember the place go there and need no replay.

    What is still to be replayed, through the layers that are behind, `ModelCache.replay_due` tells. The
    checkpoint stays good. As with `ModelCache.truncate_last` the lineage changes where something stays that
    forgotten tokens decided.

    All layers are checked before one is touched. Raises RecordError for another cache's checkpoint and for
    more accepted tokens than were appended, CannotRewind where a layer cannot go back (a ring that has
    lapped, a seal, a cache that was cleared or filled anew since) and DeviceFault; nothing changed."""
    changes, finish = prepare_rollback(cache, taken, accepted)
    apply_all(changes)
    finish()


def prepare_rollback(cache: ModelCache, taken: Checkpoint, accepted: int) -> tuple[list[Change], Callable[[], None]]:
    """`rollback` in two steps, for who takes several caches back or none: all that may be refused is checked now.
    `apply_all` of the changes, those of other caches among them, and what is called then cannot fail."""
    returned = _check(cache, taken, accepted)
    before, last = cache.lineage, cache.position
    changes = [
        layer.prepare_return(kept)
        if isinstance(layer, _KEPT) and kept is not None and layer.index in returned
        else truncation(layer, layer.position - min(layer.position, saved + accepted))
        for layer, saved, kept in zip(cache.own, taken.positions, taken.kept, strict=True)
    ]

    def finish() -> None:
        lags = ((layer, taken.position - saved) for layer, saved in zip(cache.own, taken.positions, strict=True))
        cache.replay.left_behind(lags, cache.position)
        if cache.position < last:
            cache.taken_back(before)

    return changes, finish


def free(taken: Checkpoint, cache: ModelCache) -> None:
    """Take its copies off the books of their devices; it is not to be used any more."""
    taken.retired = "its copies were given back"
    for layer, kept in zip(cache.own, taken.kept, strict=False):
        if isinstance(layer, ResidentRecurrentLayer) and kept is not None:
            layer.free_kept(kept)


def _check(cache: ModelCache, taken: Checkpoint, accepted: int) -> frozenset[int]:
    """Everything of `rollback` that may be refused. Returns the layers that go to their copies."""
    _require_own(taken, cache)
    if not isinstance(accepted, (int, np.integer)) or isinstance(accepted, bool) or accepted < 0:
        raise RecordError(f"{accepted!r} tokens accepted, expected a whole number of at least 0")
    if taken.retired:
        raise CannotRewind(f"a checkpoint of position {taken.position}: {taken.retired}")
    returned = set()
    for layer, saved, kept in zip(cache.own, taken.positions, taken.kept, strict=True):
        if kept is not None and layer.generation != kept.generation:
            raise CannotRewind(f"{where(layer.plan, layer.index)}: its state was replaced since the checkpoint of {saved} tokens")
        if kept is not None and not _remembers(layer, saved + accepted):
            returned.add(layer.index)
        elif kept is None:
            _check_rows(cache, layer, saved, accepted)
    return frozenset(returned)


def _check_rows(cache: ModelCache, layer: Layer, saved: int, accepted: int) -> None:
    """Rows behind a checkpoint: as many as were accepted, but that blocks that draft may have drafted less."""
    short = saved + accepted - layer.position
    if layer.position < saved or (short > 0 and layer.index < cache.plan.trunk):
        raise RecordError(
            f"{where(layer.plan, layer.index)}: {accepted} tokens accepted behind position {saved}, it is at {layer.position}"
        )
    layer.check_truncate(max(0, -short))


def _remembers(layer: Layer, position: int) -> bool:
    """Whether a convolution can go back to ``position`` by itself."""
    if not isinstance(layer, ConvLayer) or layer.position < position:
        return False
    return layer.position == position or layer.history.has_pos(position)


def _require_own(taken: Checkpoint, cache: ModelCache) -> None:
    if not taken.is_of(cache):
        raise RecordError(f"a checkpoint of another cache, of {len(taken.plan.layers)} layers at position {taken.position}")
