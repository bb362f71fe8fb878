"""Which layers are behind after a rollback, until the tokens that were accepted went through them again.

A recurrent state that saw rejected tokens goes back to before the first of them. Rows of accepted tokens
stay, so that until the state has seen these once more the layers of a cache are those of different sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from warmkv.kvstore.live.layers.base import LayerState
from warmkv.schema.errors import ReplayDue


class Mark(Protocol):
    """What a cache tells of changes after which it cannot be gone back to."""

    retired: str

    def passed(self, position: int) -> None:
        """Tokens back to ``position`` were forgotten."""
        ...


class Replay:
    """Layers that have to catch up with the furthest, each with how many positions it is behind in any case.

    **Threading:** that of its cache."""

    def __init__(self) -> None:
        self.layers: tuple[tuple[LayerState, int], ...] = ()

    def left_behind(self, lags: Iterable[tuple[LayerState, int]], position: int) -> None:
        """Of these layers those are to catch up that are further behind ``position`` than they may be."""
        self.layers = tuple((layer, lag) for layer, lag in lags if layer.position + lag < position)

    def due(self, position: int) -> range:
        """Positions still to be seen again, empty for none; noticed for good when it is asked."""
        first = min((layer.position + lag for layer, lag in self.layers), default=position)
        if first >= position:
            self.forget()
        return range(min(first, position), position)

    def require(self, position: int, what: str) -> None:
        """Raises ReplayDue, in which ``what`` cannot be done, while positions are due."""
        due = self.due(position)
        if due:
            names = ", ".join(str(layer.index) for layer, lag in self.layers if layer.position + lag < position)
            raise ReplayDue(
                f"{what}: layers {names} have not seen positions [{due.start}, {due.stop}) again since the rollback; "
                "replay them first"
            )

    def forget(self) -> None:
        """No layer is behind any more."""
        self.layers = ()
