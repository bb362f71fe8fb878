"""What is stored along one query: the rule applied to it, and the records to resume from.

A path lives for one question under the index lock. Rows are looked at once a group of layers,
states once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmkv.kvstore import resume
from warmkv.kvstore.needs import ModelNeeds, Provides
from warmkv.kvstore.resume import Const, Exact, Held, Intervals, Need, Trimmable
from warmkv.kvstore.store.radix import Node, Walk
from warmkv.schema.records import ID_BYTES, NO_FIELD, Anchor, AnchorKind, Attachment

if TYPE_CHECKING:
    from warmkv.kvstore.store.index import Record


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) for which rows are taken from a segment; of a state its position."""

    record: Record
    start: int
    end: int


class Path:
    """See the module docstring. ``fields`` limits rows to those quantised with one of these
    (16 bytes each; none: to those whose field is open)."""

    def __init__(
        self, needs: ModelNeeds, walk: Walk[Record], length: int, attachments: tuple[Attachment, ...], fields: bytes | None
    ) -> None:
        self.walk = walk
        self.length = length
        self._needs = needs
        self._attachments = attachments
        self._fields: frozenset[bytes] | None = None
        if fields is not None:
            cut = range(0, len(fields), ID_BYTES)
            self._fields = frozenset(fields[at : at + ID_BYTES] for at in cut) or frozenset({NO_FIELD})
        self._rows: list[Held] = [self._held_rows(number, group.whole) for number, group in enumerate(needs.groups)]

    # -- what is held ----------------------------------------------------------------------

    def _held_rows(self, group: int, whole: bool) -> Held:
        """Rows of a group along the walk; of one that needs all of them only the run from 0."""
        found: list[tuple[int, int]] = []
        matched, at = self.walk.matched, 0
        for node in self.walk.nodes:
            stop = node.end if node.end < matched else matched
            start = node.start
            for record in node.records:
                first, last = record.extents[group]
                if last and (self._fields is None or record.fields <= self._fields):
                    if whole:
                        at = stop
                        break
                    found.append((max(first, start), min(last, stop)))
            else:
                if whole:
                    break
        return Held(Intervals([(0, at)] if whole else found))

    def states(self, flag: Provides) -> Iterator[Record]:
        """States along the walk that are good for this, shallowest first."""
        matched = self.walk.matched
        for node in self.walk.nodes:
            for position, _, record in node.states:
                if position > matched:
                    return
                if record.provides & flag:
                    yield record

    def _agrees(self) -> int:
        """How far the query agrees with some state that can be cut back."""
        for node in reversed(self.walk.nodes):
            stop = min(node.end, self.walk.matched)
            inside = [at for at, trimmable, _ in node.states if trimmable]
            # What lies below is not on the walk: else a deeper node would have answered.
            if node.trimmable > len(inside) or any(at > stop for at in inside):
                return stop
            if inside:
                return inside[-1]
        return 0

    def _state_needs(self) -> list[tuple[Need, Held]]:
        needs: list[tuple[Need, Held]] = []
        if self._needs.exact:
            needs.append((Exact(), Held(states=tuple(record.end for record in self.states(Provides.EXACT)))))
        if self._needs.trimmable:
            needs.append((Trimmable(), Held(agrees=self._agrees())))
        if self._needs.constant and self._attachments:
            ends = {record.end for record in self.states(Provides.CONSTANT)}
            found = frozenset(item.start for item in self._attachments if item.end in ends)
            needs.append((Const(self._attachments), Held(constants=found)))
        return needs

    # -- positions -------------------------------------------------------------------------

    def usable(self, limit: int, *, logits: bool = False) -> int:
        """Where one can resume, at ``limit`` or before it."""
        needs = [(group.need, held) for group, held in zip(self._needs.groups, self._rows, strict=True)]
        matched = min(self.walk.matched, limit)
        parked: tuple[int, ...] = ()
        if logits and matched == self.length:
            parked = tuple(record.end for record in self.states(Provides.LOGITS) if record.end == matched)
        return resume.usable([*needs, *self._state_needs()], matched, self.length, self._attachments, parked)

    def usable_by_layer(self) -> tuple[tuple[int, int], ...]:
        """(layer, where it alone could resume), a layer for each group and each kind of state."""
        rows = [(group.layers[0], group.need, held) for group, held in zip(self._needs.groups, self._rows, strict=True)]
        named: list[tuple[int, Need, Held]] = [*rows]
        owners = {Exact: self._needs.exact, Trimmable: self._needs.trimmable, Const: self._needs.constant}
        named += [(owners[type(need)][0], need, held) for need, held in self._state_needs()]
        matched = self.walk.matched
        return tuple(
            (layer, resume.usable([(need, held)], matched, self.length, self._attachments)) for layer, need, held in named
        )

    def held(self) -> int:
        """Up to where all that every token needs is held without a gap, not inside an attachment.
        Where no layer needs all rows that is what is stored of the tokens."""
        runs = [held.rows.run_end(0) for group, held in zip(self._needs.groups, self._rows, strict=True) if group.whole]
        run = min(runs) if runs else self._covered()
        return next((item.start for item in self._attachments if item.start < run < item.end), run)

    def _covered(self) -> int:
        at = 0
        for node in self.walk.nodes:
            if not any(self._fields is None or record.fields <= self._fields for record in node.records):
                break
            at = min(node.end, self.walk.matched)
        return at

    def runs(self, end: int) -> tuple[tuple[int, int], ...]:
        """By group: where the unbroken run of rows that ends at ``end`` begins (``end``: none), and
        where the one that begins at 0 ends."""
        found = []
        for held in self._rows:
            start, last = held.rows.run_ending(end) if end else (0, 0)
            found.append((start if last == end else end, min(end, held.rows.run_end(0))))
        return tuple(found)

    def holds(self, extents: tuple[tuple[int, int], ...]) -> bool:
        """Whether every row of these ranges, one a group, is held already."""
        return all(held.rows.covers(*extent) for held, extent in zip(self._rows, extents, strict=True))

    def provides(self, position: int) -> Provides:
        """What the states at a position are good for together."""
        found = Provides.NOTHING
        for node in self.walk.nodes:
            if node.start < position <= node.end and position <= self.walk.matched:
                for at, _, record in node.states:
                    found |= record.provides if at == position else Provides.NOTHING
        return found

    def anchors(self) -> tuple[Anchor, ...]:
        """Named positions along the walk."""
        seen: dict[tuple[int, AnchorKind], Anchor] = {}
        for node in self.walk.nodes:
            for record in node.records:
                if record.anchors:
                    for place, anchor in record.anchors.items():
                        if node.start < place[0] <= min(node.end, self.walk.matched):
                            seen[place] = anchor
        return tuple(seen[place] for place in sorted(seen))

    # -- records ---------------------------------------------------------------------------

    def covering(self, position: int) -> Record | None:
        """A segment that holds the token before ``position``, the deepest reaching one; one made
        of others only where those are gone."""
        for node in reversed(self.walk.nodes):
            if node.start < position <= node.end and node.records:
                return max(node.records, key=lambda record: (not record.packed, record.end))
        return None

    def providing(self, position: int, flags: Provides) -> Record | None:
        """A state at a position that is good for all of this."""
        return next(
            (record for record in self.states(flags) if record.end == position and record.provides & flags == flags), None
        )

    def windows(self, position: int) -> list[Record]:
        """Segments that hold the rows to resume at a position of the layers that do not need all
        of them, as far as they are held."""
        taken: dict[Record, Span] = {}
        for number, (group, held) in enumerate(zip(self._needs.groups, self._rows, strict=True)):
            for start, end in () if group.whole else group.need.required(position):
                if held.rows.covers(start, end):
                    self._select_rows(number, start, end, taken)
        return list(taken)

    def along(self) -> list[Record]:
        """Segments that end, and states that lie, on the walk."""
        matched = self.walk.matched
        ends = {node for node in self.walk.nodes if node.end <= matched}
        found = dict.fromkeys(record for node in self.walk.nodes for record in node.records if record.node in ends)
        return [*found, *(state for node in self.walk.nodes for at, _, state in node.states if at <= matched)]

    def shared(self) -> int:
        """Up to where on the walk another stored prompt goes along, to part from it or go on."""
        shared, along = 0, set(self.along())
        for node, following in zip(self.walk.nodes, (*self.walk.nodes[1:], None), strict=False):
            others = any(child is not following for child in node.children.values())
            if others or any(record not in along for record in node.records):
                shared = min(node.end, self.walk.matched)
        return shared

    def select(self, usable: int) -> tuple[Span, ...]:
        """The records to resume at ``usable`` from: warm ones before cold ones, as few as possible."""
        if not usable:
            return ()
        taken: dict[Record, Span] = {}
        for number, group in enumerate(self._needs.groups):
            for start, end in group.need.required(usable):
                self._select_rows(number, start, end, taken)
        spans = sorted(taken.values(), key=lambda span: (span.record.start, span.start))
        if not (self._stateful or self.walk.nodes[-1].states):
            return tuple(spans)
        states = [Span(record, record.end, record.end) for record in self._select_states(usable)]
        if not self._needs.trimmable:
            return (*spans, *states)
        # Its tokens behind ``usable`` prove a state to be of this prompt: they come last, in order.
        blob = self._trimmable(usable)
        chain = _chain(blob.parent)
        ends = [*(link.start for link in chain[1:]), blob.end]
        proof = [link for link, end in zip(chain, ends, strict=True) if end > usable]
        spans = [span for span in spans if span.record not in proof]
        spans += [taken.get(link) or Span(link, usable, usable) for link in proof]
        return (*spans, *states, Span(blob, blob.end, blob.end))

    @property
    def _stateful(self) -> bool:
        return bool(self._needs.exact or self._needs.trimmable or self._needs.constant)

    def _select_rows(self, group: int, start: int, end: int, taken: dict[Record, Span]) -> None:
        nodes = self.walk.nodes
        at = len(nodes) - 1
        while end > start:
            while nodes[at].start >= end:
                at -= 1
            best: Record | None = None
            key = (True, True, end)
            for record in nodes[at].records:
                first, last = record.extents[group]
                if first < end <= last:
                    mine = (record not in taken, not record.warm, first)
                    if best is None or mine < key:
                        best, key = record, mine
            assert best is not None
            begin = max(start, best.extents[group][0])
            old = taken.get(best)
            taken[best] = Span(best, begin, end) if old is None else Span(best, min(old.start, begin), max(old.end, end))
            end = begin

    def _select_states(self, usable: int) -> list[Record]:
        wanted: list[Record] = []
        if self._needs.exact:
            wanted.append(self._best(record for record in self.states(Provides.EXACT) if record.end == usable))
        if self._needs.constant:
            for item in self._attachments:
                if item.end <= usable:
                    wanted.append(self._best(r for r in self.states(Provides.CONSTANT) if r.end == item.end))
        if usable == self.length:
            wanted.append(self._best(record for record in self.states(Provides.LOGITS) if record.end == usable))
        return list(dict.fromkeys(wanted))

    def _trimmable(self, usable: int) -> Record:
        """A state that can be cut back to ``usable``: on the way if there is one, else below it."""
        for node in reversed(self.walk.nodes):
            if node.trimmable and node.end >= usable:
                found = _first_trimmable(node, usable)
                if found is not None:
                    return found
        raise AssertionError(f"no state can be cut back to {usable}")

    @staticmethod
    def _best(records: Iterator[Record]) -> Record:
        return min(records, key=lambda record: (not record.warm, record.total_bytes))


def _chain(record: Record | None) -> list[Record]:
    chain: list[Record] = []
    while record is not None:
        chain.append(record)
        record = record.parent
    return chain[::-1]


def _first_trimmable(node: Node[Record], position: int) -> Record | None:
    """The nearest state at or behind ``position`` at this node or below it that can be cut back."""
    pending = [node]
    while pending:
        current = pending.pop()
        for at, trimmable, record in current.states:
            if trimmable and at >= position:
                return record
        pending.extend(child for child in current.children.values() if child.trimmable)
    return None
