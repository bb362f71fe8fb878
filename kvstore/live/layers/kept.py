"""States set aside so that a layer that writes over its own can be taken back to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from warmkv.kvstore.live.layers.base import LayerState
from warmkv.schema.errors import LiveError


@dataclass(slots=True)
class KeptStates:
    """Real copies of what a layer held after ``position`` tokens, in memory of its own: ``state`` and
    ``conv`` where the layer has them, arrays of the layer's device. ``undo`` has room for what ``conv`` is
    put over, where that is no memory of the host's.

    ``generation`` is the layer's then: another one means that its state came from elsewhere since."""

    position: int
    generation: int
    state: Any
    conv: Any = None
    undo: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return sum(int(array.nbytes) for array in (self.state, self.conv, self.undo) if array is not None)


@dataclass(frozen=True, slots=True)
class Change:
    """One layer's part of a change of several. ``apply`` fails on a device that fails; ``undo`` makes the layer
    what it was before, whether or how far ``apply`` came."""

    apply: Callable[[], None]
    undo: Callable[[], None]


def sure(apply: Callable[[], None]) -> Change:
    """A change that cannot fail where it is the last, and that nobody has to take back: host memory's."""
    return Change(apply, lambda: None)


@runtime_checkable
class Untruncates(Protocol):
    """A layer of a device, where a count has a mirror whose writing may fail."""

    def untruncate_last(self, count: int) -> None:
        """Take back a `LayerState.truncate_last` just made."""
        ...


def truncation(layer: LayerState, count: int) -> Change:
    """What forgets the newest ``count`` positions of a layer that was asked whether it can."""
    position = layer.position

    def undo() -> None:
        if isinstance(layer, Untruncates) and layer.position != position:
            layer.untruncate_last(position - layer.position)

    return Change(lambda: layer.truncate_last(count), undo)


def apply_all(changes: Sequence[Change]) -> None:
    """Apply all or none: after a fault what was begun is undone, as far as devices let it."""
    begun: list[Change] = []
    try:
        for change in changes:
            begun.append(change)
            change.apply()
    except BaseException:
        for change in reversed(begun):
            with suppress(LiveError):
                change.undo()
        raise
