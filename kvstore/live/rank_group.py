"""The caches of all ranks as one: each change is made to every rank, or all can be brought to one length.

What is written here may be broken off by a device that fails, anywhere. `RankGroup.settle` then goes on from wherever
that was, and may be broken off and called again itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from warmkv.kvstore.live.checkpoint import Checkpoint, checkpoint, free, prepare_rollback, refresh
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.kept import Change, truncation
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.schema.errors import RecordError, TransactionError
from warmkv.schema.identity import LayerKind

#: Positions that come to lie at row 0, by the window of rings that are to move.
Moves = Mapping[int, int]


class RankGroup:
    """``caches`` by rank, of equal shares of ``plan``, each with a checkpoint that its recurrent states go back to.
    All are at one position but in the middle of a change.

    **Threading:** one caller at a time."""

    def __init__(self, plan: ModelPlan, makers: Sequence[Callable[[], ModelCache]]) -> None:
        """Raises what making them does, with nothing left allocated."""
        caches: list[ModelCache] = []
        marks: list[Checkpoint] = []
        with ExitStack() as undo:
            for make in makers:
                caches.append(make())
                undo.callback(caches[-1].free)
            for cache in caches:
                marks.append(checkpoint(cache))
                undo.callback(free, marks[-1], cache)
            undo.pop_all()
        self.plan, self.caches, self._marks = plan, tuple(caches), tuple(marks)
        #: Layers that have rows of their own.
        self.of_rows = {layer.index for layer in caches[0].own if isinstance(layer, ResidentLayer)}

    @property
    def behind(self) -> int:
        """The first position that recurrent layers have to see again; that of the caches where none has to."""
        return min(cache.replay_due.start for cache in self.caches)

    def attention(self, index: int, *, shared: bool = False) -> list[ResidentLayer]:
        """Layer ``index`` of every rank; ``shared``: the one it shares with, where it does. Raises RecordError for
        others than attention layers."""
        layers = self.plan.layers
        if not 0 <= index < len(layers):
            raise RecordError(f"layer {index}, there are {len(layers)}")
        found = [layer for layer in (cache.layers[index] for cache in self.caches) if isinstance(layer, ResidentLayer)]
        if not found or (layers[index].kind is LayerKind.SHARED and not shared):
            raise RecordError(f"{where(layers[index], index)} has no rows of its own")
        return found

    def recurrent(self, index: int) -> list[ResidentRecurrentLayer]:
        """Layer ``index`` of every rank. Raises RecordError for others than recurrent ones."""
        layers = [cache.layers[index] for cache in self.caches if 0 <= index < len(self.plan.layers)]
        found = [layer for layer in layers if isinstance(layer, ResidentRecurrentLayer)]
        if not found:
            raise RecordError(f"layer {index} is no recurrent layer")
        return found

    def mark(self) -> None:
        """Renew the checkpoints; asks for no memory. Raises ReplayDue, and DeviceFault, after which nobody may go back
        to them."""
        self.require_replayed("a transaction")
        for mark, cache in zip(self._marks, self.caches, strict=True):
            refresh(mark, cache)

    def require_replayed(self, what: str) -> None:
        """See `ModelCache.require_replayed`."""
        for cache in self.caches:
            cache.require_replayed(what)

    def require_at(self, position: int) -> None:
        """Raises TransactionError unless every layer of every rank is at ``position``."""
        for rank, cache in enumerate(self.caches):
            for layer in cache.own:
                if layer.position != position:
                    name = f"{where(layer.plan, layer.index)} of rank {rank}"
                    raise TransactionError(f"{name} is at position {layer.position}, {position} tokens are staged")

    def is_at(self, position: int) -> bool:
        return all(layer.position == position for cache in self.caches for layer in cache.own)

    def check_back(self, length: int, *, marked: bool) -> None:
        """Raises what `ways_back` would: CannotRewind, RecordError."""
        for cache, mark in zip(self.caches, self._marks, strict=True):
            for layer in cache.own:
                if not (isinstance(layer, ResidentRecurrentLayer) and marked and length >= mark.position):
                    layer.check_truncate(layer.position - length)

    def take_back(self, length: int, *, marked: bool) -> Callable[[], None]:
        """What brings every layer to ``length`` when it is called, recurrent ones by the checkpoints where these are
        ``marked`` as what to go back to. Raises CannotRewind and RecordError, nothing changed; DeviceFault."""
        ways = [self._way(cache, mark, length, marked) for cache, mark in zip(self.caches, self._marks, strict=True)]

        def apply() -> None:
            for changes, _ in ways:
                for change in changes:
                    change.apply()
            for _, finish in ways:
                finish()

        return apply

    def settle(self, length: int, moves: Sequence[Moves], *, marked: bool) -> None:
        """Bring every rank to ``length``: rows, forward too where nothing was stored since they were left, recurrent
        states by the checkpoints if ``marked``; and finish the ``moves`` of each rank's rings. Raises DeviceFault
        where a device fails again."""
        for cache, mark, own in zip(self.caches, self._marks, moves, strict=True):
            _settle(cache, mark if marked else None, length, own)

    def clear(self) -> None:
        """Forget everything; checkpoints are worth nothing then. Raises DeviceFault; to be called again."""
        for cache in self.caches:
            cache.clear()

    def free(self) -> None:
        """Take everything off the devices' books; not to be used any more."""
        for cache, mark in zip(self.caches, self._marks, strict=True):
            free(mark, cache)
            cache.free()

    @staticmethod
    def _way(cache: ModelCache, mark: Checkpoint, length: int, marked: bool) -> tuple[list[Change], Callable[[], None]]:
        if marked and length >= mark.position:
            return prepare_rollback(cache, mark, length - mark.position)
        for layer in cache.own:
            layer.check_truncate(layer.position - length)
        before = cache.lineage
        return [truncation(layer, layer.position - length) for layer in cache.own], lambda: cache.taken_back(before)


def _settle(cache: ModelCache, mark: Checkpoint | None, length: int, moves: Moves) -> None:
    before, last = cache.lineage, cache.position
    for at, layer in enumerate(cache.own):
        if isinstance(layer, ResidentLayer):
            if layer.ring is not None and layer.plan.window in moves:
                layer.rebase(moves[layer.plan.window])
            over = layer.position - length
            if over < 0:
                layer.untruncate_last(-over)
            else:
                layer.truncate_last(over)
        elif mark is not None:
            assert isinstance(layer, ResidentRecurrentLayer)
            kept = mark.kept[at]
            assert kept is not None
            layer.prepare_return(kept).apply()
    if mark is not None:
        cache.replay.left_behind(((layer, 0) for layer in cache.own), length)
    if cache.position < last:
        cache.taken_back(before)
