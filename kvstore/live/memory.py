"""What a live cache costs: bytes by what they are for, as allocated, never estimated from geometry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Bytes of one layer, or of several added up.

    ``attention``: codes, scales and fields of keys and values, capacity beyond the stored rows included.
    ``importance``: attention mass, capacity included. ``recurrent``: the state vector and its scratch.
    ``conv``: the last inputs of convolutions and their earlier states.
    ``bounded``: rings and their undo rows. ``constant``: what attention in constant memory keeps beside
    rows: the query trace while it collects, its groups once sealed.

    ``stored`` is the part of ``attention`` that rows take now: the formula of their formats. ``mapped``
    (rows that lie in somebody else's memory) and ``weights`` (learned sinks, sink rows, rotation tables: the
    model's) belong to others and are in no sum."""

    attention: int = 0
    importance: int = 0
    recurrent: int = 0
    conv: int = 0
    bounded: int = 0
    constant: int = 0
    stored: int = 0
    mapped: int = 0
    weights: int = 0

    @property
    def total(self) -> int:
        """What the cache has allocated for the conversation."""
        return self.attention + self.importance + self.recurrent + self.conv + self.bounded + self.constant

    def __add__(self, other: LayerMemory) -> LayerMemory:
        return LayerMemory(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


def added(parts: Iterable[LayerMemory]) -> LayerMemory:
    """The sum of the layers' reports."""
    return sum(parts, LayerMemory())
