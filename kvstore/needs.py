"""What a model needs to resume, layer by layer, put together once.

Layers whose rows are needed alike form a group: their rows come and go together, so positions
are worked out once a group. States are told apart by what they are good for (`Provides`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache

from warmkv.kvstore import resume
from warmkv.kvstore.resume import Const, Exact, Need, Trimmable
from warmkv.schema.identity import LayerSpec


class Provides(IntFlag):
    """What a state record is good for. Numbers travel on the wire and are final."""

    NOTHING = 0
    #: All layers that resume only where they stopped: conv, recurrent, ring, Nystroem, rows with gaps or importance.
    EXACT = 1
    #: All layers whose runtime can cut the state back.
    TRIMMABLE = 2
    #: Encoder output of the attachment that ends at the position.
    CONSTANT = 4
    #: Logits after the last token.
    LOGITS = 8
    #: Importance of rows beside the state; nobody resumes from it alone.
    IMPORTANCE = 16


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Layers whose rows are needed alike, in ascending order."""

    need: resume.RowNeed
    layers: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether every row from the first on is needed."""
        return isinstance(self.need, resume.All)


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Groups in the order of their first layers, and the layers that have state."""

    groups: tuple[RowGroup, ...]
    exact: tuple[int, ...]
    trimmable: tuple[int, ...]
    constant: tuple[int, ...]

    @property
    def windowed(self) -> bool:
        """Whether some group keeps only part of its rows."""
        return not all(group.whole for group in self.groups)

    @property
    def anywhere(self) -> bool:
        """Whether the model can resume at any position whose rows are held."""
        return not (self.exact or self.windowed)

    @property
    def layer_count(self) -> int:
        """Layers that need something of their own."""
        return len({layer for group in self.groups for layer in group.layers} | {*self.exact, *self.trimmable, *self.constant})

    def state_needs(self) -> tuple[Need, ...]:
        """Needs that states meet and that are the same for every query."""
        return (*((Exact(),) if self.exact else ()), *((Trimmable(),) if self.trimmable else ()))


@lru_cache(maxsize=64)
def needs_of_model(layers: tuple[LayerSpec, ...]) -> ModelNeeds:
    """What a model of these layers needs to resume."""
    by_need: dict[resume.RowNeed, list[int]] = {}
    exact: list[int] = []
    trimmable: list[int] = []
    constant: list[int] = []
    for index, layer in enumerate(layers):
        rows, state = resume.row_need(layer), resume.state_need(layer)
        if rows is not None:
            by_need.setdefault(rows, []).append(index)
        if isinstance(state, Trimmable):
            trimmable.append(index)
        elif isinstance(state, Const):
            constant.append(index)
        elif state is not None:
            exact.append(index)
    groups = tuple(RowGroup(need, tuple(found)) for need, found in by_need.items())
    return ModelNeeds(groups, tuple(exact), tuple(trimmable), tuple(constant))
