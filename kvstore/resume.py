"""The one rule: where can a model resume?

A layer's need is a pure function of p: which rows, or which state, must be there to resume at
p. Every need answers one question, `last_valid(p)`: the greatest position at or before p at
which it is met. The greatest position at which all are met is then found by letting each need
lower p in turn until none does. Position 0 needs nothing and is always valid.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from warmkv.schema.identity import LayerKind, LayerSpec
from warmkv.schema.records import Attachment


class Intervals:
    """Disjoint, sorted, half-open row ranges; touching ones are merged. Immutable."""

    __slots__ = ("_starts", "_ends")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(item for item in ranges if item[0] < item[1]):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self._starts, self._ends = starts, ends

    @classmethod
    def until(cls, end: int) -> Intervals:
        """Rows [0, end)."""
        made = cls.__new__(cls)
        made._starts, made._ends = ([0], [end]) if end > 0 else ([], [])
        return made

    def run_end(self, start: int) -> int:
        """End of the unbroken run of rows that contains row ``start``; ``start`` if it is absent."""
        at = bisect_right(self._starts, start) - 1
        return max(start, self._ends[at]) if at >= 0 else start

    def run_ending(self, end: int) -> tuple[int, int]:
        """The run that contains row end-1, cut at ``end``; else the last run before it; else (0, 0)."""
        at = bisect_right(self._starts, end - 1) - 1
        return (self._starts[at], min(self._ends[at], end)) if at >= 0 else (0, 0)

    def covers(self, start: int, end: int) -> bool:
        return end <= start or self.run_end(start) >= end


@dataclass(slots=True)
class Held:
    """What is held of one layer along the matched path.

    ``rows`` it has; ``states`` sorted positions of exact states; ``agrees`` how far the longest
    trimmable state agrees with the query; ``constants`` starts of attachments whose record is held."""

    rows: Intervals = Intervals()
    states: tuple[int, ...] = ()
    agrees: int = 0
    constants: frozenset[int] = frozenset()


_NOTHING_HELD = Held()
Ranges = tuple[tuple[int, int], ...]


class Need(Protocol):
    def last_valid(self, p: int, held: Held) -> int:
        """Greatest q with 0 <= q <= p at which this need is met."""
        ...


class RowNeed(Need, Protocol):
    """A need that rows meet."""

    def required(self, p: int) -> Ranges:
        """The rows [start, end) that must be there to resume at p: disjoint, sorted, none empty."""
        ...


@dataclass(frozen=True, slots=True)
class All:
    """Full attention: rows [0, p)."""

    def last_valid(self, p: int, held: Held) -> int:
        return min(p, held.rows.run_end(0))

    def required(self, p: int) -> Ranges:
        return _ranges((0, p))


@dataclass(frozen=True, slots=True)
class Last:
    """Sliding window W with n = W - 1: rows [max(0, p - n), p)."""

    n: int

    def last_valid(self, p: int, held: Held) -> int:
        if self.n == 0:
            return p
        while p > 0:
            start, end = held.rows.run_ending(p)
            if end == 0:
                return 0
            if start == 0 or end - self.n >= start:
                return end
            p = start
        return 0

    def required(self, p: int) -> Ranges:
        return _ranges((max(0, p - self.n), p))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunked attention: rows [floor(p / c) * c, p)."""

    c: int

    def last_valid(self, p: int, held: Held) -> int:
        floor = p // self.c * self.c
        return min(p, held.rows.run_end(floor))

    def required(self, p: int) -> Ranges:
        return _ranges((p // self.c * self.c, p))


@dataclass(frozen=True, slots=True)
class SinksAndLast:
    """Row sinks with a window: rows [0, s) and the last n."""

    s: int
    n: int

    def last_valid(self, p: int, held: Held) -> int:
        prefix = held.rows.run_end(0)
        return min(p, prefix) if prefix < min(self.s, p) else Last(self.n).last_valid(p, held)

    def required(self, p: int) -> Ranges:
        sinks = min(self.s, p)
        return _ranges((0, sinks), (max(sinks, p - self.n), p)) if p - self.n > sinks else _ranges((0, p))


@dataclass(frozen=True, slots=True)
class Exact:
    """Conv, recurrent, ring, Nystroem, thinned rows, importance: the state stored at exactly p."""

    def last_valid(self, p: int, held: Held) -> int:
        at = bisect_right(held.states, p)
        return held.states[at - 1] if at else 0


@dataclass(frozen=True, slots=True)
class Trimmable:
    """A blob its runtime can cut back: a state at some q >= p that agrees up to p."""

    def last_valid(self, p: int, held: Held) -> int:
        return min(p, held.agrees)


@dataclass(frozen=True, slots=True)
class Const:
    """Encoder output: the record of every attachment that begins before p."""

    attachments: tuple[Attachment, ...]

    def last_valid(self, p: int, held: Held) -> int:
        missing = (item.start for item in self.attachments if item.start not in held.constants)
        return min(p, min(missing, default=p))


@dataclass(frozen=True, slots=True)
class Nothing:
    """Layers that keep nothing of their own (shared KV)."""

    def last_valid(self, p: int, held: Held) -> int:
        return p


@dataclass(frozen=True, slots=True)
class Outside:
    """Not a layer's need: no position strictly inside an attachment is resumable."""

    attachments: tuple[Attachment, ...]

    def last_valid(self, p: int, held: Held) -> int:
        return next((item.start for item in self.attachments if item.start < p < item.end), p)


def _ranges(*found: tuple[int, int]) -> Ranges:
    return tuple(item for item in found if item[0] < item[1])


def row_need(layer: LayerSpec) -> RowNeed | None:
    """What rows a layer needs; None for layers without rows of their own."""
    if not layer.row_planes:
        return None
    if layer.kind == LayerKind.SLIDING or (layer.kind == LayerKind.HYBRID and layer.window):
        return Last(layer.window - 1)
    if layer.kind == LayerKind.CHUNKED:
        return Chunk(layer.chunk)
    if layer.kind == LayerKind.SINK_WINDOW:
        return SinksAndLast(layer.sinks, layer.window - 1)
    return All()


def state_need(layer: LayerSpec, attachments: tuple[Attachment, ...] = ()) -> Need | None:
    """What state a layer needs; None for layers that have none. One that keeps the importance of its
    rows goes on weighing them: it too resumes only where that was stored."""
    if not layer.state_planes:
        return None
    if layer.kind == LayerKind.OPAQUE:
        return Trimmable()
    return Const(attachments) if layer.kind == LayerKind.ENCODER else Exact()


def needs_of(layer: LayerSpec, attachments: tuple[Attachment, ...] = ()) -> tuple[Need, ...]:
    """The needs of a layer; two for layers that keep rows and state, `Nothing` for shared ones."""
    found = tuple(need for need in (row_need(layer), state_need(layer, attachments)) if need is not None)
    return found or (Nothing(),)


def usable(
    needs: Sequence[tuple[Need, Held]],
    matched: int,
    length: int,
    attachments: tuple[Attachment, ...] = (),
    logits_at: Iterable[int] = (),
) -> int:
    """Greatest resumable position of a query of ``length`` tokens of which ``matched`` agree.

    One token must be left to feed, except where logits are parked at the very end."""
    everything = [*needs, (Outside(attachments), _NOTHING_HELD)] if attachments else needs
    if (
        matched >= length
        and length in set(logits_at)
        and all(need.last_valid(length, held) == length for need, held in everything)
    ):
        return length
    p = max(0, min(matched, length - 1))
    while p > 0:
        lowered = p
        for need, held in everything:
            lowered = need.last_valid(lowered, held)
        if lowered == p:
            break
        p = lowered
    return p
