"""What every kind of layer can do, and what they share."""

from __future__ import annotations

from itertools import count
from typing import Protocol

import numpy as np

from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import RecordError

_generations = count(1)


def next_generation() -> int:
    """A value no layer of this process has had. With the row count it tells whoever mirrors a layer
    elsewhere that the rows there are still these.

    **Threading:** any thread; `next` of a C iterator is one step."""
    return next(_generations)


class LayerState(Protocol):
    """One layer of one sequence, whatever it keeps.

    **Threading:** one caller at a time."""

    plan: LayerPlan
    index: int

    @property
    def position(self) -> int:
        """Position of the next token; not the row count where rows were evicted or never kept."""
        ...

    @property
    def generation(self) -> int:
        """Fresh after every change a mirror of the rows cannot follow by their count; appending and
        truncating leave it alone, but for the append that fixes a field and writes old rows anew."""
        ...

    def check_truncate(self, count: int) -> None:
        """Raise what `truncate_last` would, changing nothing: so many layers can be asked before one
        is touched."""
        ...

    def truncate_last(self, count: int) -> None:
        """Forget the newest ``count`` positions. Raises RecordError for a count that is negative or
        beyond the start, CannotRewind where the state cannot go back; nothing changed."""
        ...

    def clear(self) -> None:
        """Forget the conversation; keep what belongs to the model: sinks, window, sizes."""
        ...

    def memory(self) -> LayerMemory:
        """What this layer has allocated."""
        ...


def where(plan: LayerPlan, index: int) -> str:
    """How messages name a layer."""
    return f"layer {index} ({plan.kind.name})"


def check_count(name: str, count: int, position: int) -> None:
    """Raises RecordError unless ``count`` is a whole number and 0 <= ``count`` <= ``position``; ``name`` is
    what `where` gives."""
    if not isinstance(count, (int, np.integer)):
        raise RecordError(f"{name}: {count!r} positions to forget, expected a whole number")
    if not 0 <= count <= position:
        raise RecordError(f"{name}: {count} positions to forget, expected 0 to {position}")
