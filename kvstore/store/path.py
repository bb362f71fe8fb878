"""What is stored along one query: the rule applied to it, and the records to resume from.

A path lives for one question under the index lock. Rows are looked at once a group of layers,
states once.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmkv.kvstore import resume
from warmkv.kvstore.needs import ModelNeeds, Provides
from warmkv.kvstore.resume import Const, Exact, Held, Intervals, Need, Trimmable
from warmkv.kvstore.store.radix import Node, Walk
from warmkv.schema.records import NO_FIELD, Anchor, Attachment

if TYPE_CHECKING:
    from warmkv.kvstore.store.index import Record

#: What two sets of flags share, as a number: of the operators of IntFlag each makes a new member,
#: which for every state of a path takes longer than all the rest.
_bits = int.__and__


@dataclass(slots=True)
class Span:
    """Tokens [start, end) for which rows are taken from a segment; of a state its position. Not
    frozen: there is one for each segment of an answer, and freezing makes three times the work."""

    record: Record
    start: int
    end: int


class Path:
    """See the module docstring. ``fields`` limits rows to those quantised with one of these (none:
    to those whose field is open)."""

    def __init__(
        self, needs: ModelNeeds, walk: Walk[Record], length: int, attachments: tuple[Attachment, ...],
        fields: frozenset[bytes] | None,
    ) -> None:  # fmt: skip
        self.walk = walk
        self.length = length
        self._needs = needs
        self._stateful = bool(needs.exact or needs.trimmable or needs.constant)
        self._attachments = attachments
        self._fields = fields if fields is None else fields or frozenset({NO_FIELD})
        #: Up to where the rows that every token needs are held; where no layer needs such, None.
        self._run: int | None = None
        self._rows: list[Held] = []
        for number, group in enumerate(needs.groups):
            if group.whole:
                self._run = self._whole_run()
                self._rows.append(Held(Intervals.until(self._run)))
            else:
                self._rows.append(Held(Intervals(self._ranges(number))))

    # -- what is held ----------------------------------------------------------------------

    def _whole_run(self) -> int:
        """How far all rows from the first on are held, of layers that need them all."""
        fields = self._fields
        for node in self.walk.nodes:
            for record in node.records:
                if record.complete and (fields is None or record.fields <= fields):
                    break
            else:
                return node.start
        return self.walk.matched

    def _ranges(self, group: int) -> list[tuple[int, int]]:
        """Rows of a group that are held along the walk."""
        matched, fields = self.walk.matched, self._fields
        found: list[tuple[int, int]] = []
        for node in self.walk.nodes:
            start, stop = node.start, node.end if node.end < matched else matched
            for record in node.records:
                first, last = record.extents[group]
                if last and (fields is None or record.fields <= fields):
                    found.append((first if first > start else start, last if last < stop else stop))
        return found

    def states(self, flag: Provides) -> Iterator[Record]:
        """States along the walk that are good for this, shallowest first."""
        matched = self.walk.matched
        for node in self.walk.nodes:
            for position, _, record in node.states:
                if position > matched:
                    return
                if _bits(record.provides, flag):
                    yield record

    def _states_at(self, position: int, flag: Provides) -> list[Record]:
        """States at a position that are good for this."""
        for node in reversed(self.walk.nodes):
            if node.start < position:
                return [record for at, _, record in node.states if at == position and _bits(record.provides, flag)]
        return []

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
        needs: list[tuple[Need, Held]] = [(group.need, held) for group, held in zip(self._needs.groups, self._rows, strict=True)]
        if self._stateful:
            needs += self._state_needs()
        matched = min(self.walk.matched, limit)
        parked: tuple[int, ...] = ()
        if logits and matched == self.length:
            parked = tuple(record.end for record in self.states(Provides.LOGITS) if record.end == matched)
        return resume.usable(needs, matched, self.length, self._attachments, parked)

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
        run = self._covered() if self._run is None else self._run
        if not self._attachments:
            return run
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
        found: list[Anchor] = []
        matched, before = self.walk.matched, 0
        for node in self.walk.nodes:
            for record in node.records:
                if record.anchors:
                    for anchor in record.anchors.values():
                        if node.start < anchor.position <= node.end and anchor.position <= matched:
                            found.append(anchor)
            if len(found) > before + 1:
                places = {(anchor.position, int(anchor.kind)): anchor for anchor in found[before:]}
                found[before:] = [places[place] for place in sorted(places)]
            before = len(found)
        return tuple(found)

    # -- records ---------------------------------------------------------------------------

    def covering(self, position: int) -> Record | None:
        """A segment that holds the token before ``position``: one with the rows that every token
        needs before others, the deepest reaching; one made of others only where those are gone."""
        for node in reversed(self.walk.nodes):
            if node.start < position <= node.end and node.records:
                return max(node.records, key=lambda record: (record.complete, not record.packed, record.end))
        return None

    def resumed_from(self, position: int) -> list[Record]:
        """All that is there to resume at a position, as far as it is held: segments, of the same
        rows those that packed ones were made of, then states."""
        found: dict[Record, None] = {}
        for number, (group, held) in enumerate(zip(self._needs.groups, self._rows, strict=True)):
            for start, end in group.need.required(position):
                if held.rows.covers(start, end):
                    found.update(dict.fromkeys(self._originals(number, start, end)))
        return [*found, *self._states_at(position, ~Provides.CONSTANT)]

    def _originals(self, group: int, start: int, end: int) -> Iterator[Record]:
        """Segments that hold rows [start, end) of a group, the last rows first."""
        for node in reversed(self.walk.nodes):
            while node.start < end > start:
                having = [record for record in node.records if record.extents[group][0] < end <= record.extents[group][1]]
                best = min(having, key=lambda record: (record.packed, record.extents[group][0]))
                yield best
                end = best.extents[group][0]

    def resumes(self, position: int, provides: Provides) -> bool:
        """Whether all rows to resume at a position are held, and states for all of this."""
        rows = all(
            held.rows.covers(start, end)
            for group, held in zip(self._needs.groups, self._rows, strict=True)
            for start, end in group.need.required(position)
        )
        return rows and self.provides(position) & provides == provides

    def providing(self, position: int, flags: Provides) -> Record | None:
        """A state at a position that is good for all of this."""
        return next(
            (record for record in self.states(flags) if record.end == position and record.provides & flags == flags), None
        )

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
            if group.whole:
                self._select_whole(number, usable, taken)
                continue
            for start, end in group.need.required(usable):
                self._select_rows(number, start, end, taken)
        spans = [*reversed(taken.values())]
        if len(self._needs.groups) != 1 or not self._needs.groups[0].whole:
            spans.sort(key=lambda span: (span.record.start, span.start))
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

    def _select_whole(self, group: int, end: int, taken: dict[Record, Span]) -> None:
        """Take rows [0, end) of a group that needs them all from segments, the last rows first."""
        span, begin = None, end
        for node in reversed(self.walk.nodes):
            if node.start < end:
                records = node.records
                best = records[0] if len(records) == 1 else _best_rows(records, group, begin, taken, span)
                if span is None or span.record is not best:
                    span = taken[best] = Span(best, node.start, begin)
                begin = span.start = node.start

    def _select_rows(self, group: int, start: int, end: int, taken: dict[Record, Span]) -> None:
        """Take rows [start, end) of a group from segments, the last rows first, each segment once."""
        others, span = bool(taken), None
        for node in reversed(self.walk.nodes):
            while node.start < end > start:
                records = node.records
                best = records[0] if len(records) == 1 else _best_rows(records, group, end, taken, span)
                first = best.extents[group][0]
                begin = first if first > start else start
                old = taken.get(best) if others else None
                span = Span(best, begin, end) if old is None else Span(best, min(old.start, begin), max(old.end, end))
                taken[best] = span
                end = begin

    def _select_states(self, usable: int) -> list[Record]:
        wanted: list[Record] = []
        if self._needs.exact:
            wanted.append(self._best(self._states_at(usable, Provides.EXACT)))
        if self._needs.constant:
            for item in self._attachments:
                if item.end <= usable:
                    wanted.append(self._best(self._states_at(item.end, Provides.CONSTANT)))
        if usable == self.length:
            wanted.append(self._best(self._states_at(usable, Provides.LOGITS)))
        return list(dict.fromkeys(wanted))

    def _trimmable(self, usable: int) -> Record:
        """A state that can be cut back to ``usable``, the nearest: what proves it is then short."""
        node = next(node for node in self.walk.nodes if node.start < usable <= node.end)
        found = _first_trimmable(node, usable)
        if found is None:
            raise AssertionError(f"no state can be cut back to {usable}")
        return found

    @staticmethod
    def _best(records: Iterable[Record]) -> Record:
        return min(records, key=lambda record: (not record.warm, -record.provides.bit_count(), record.total_bytes))


def _best_rows(records: Iterable[Record], group: int, end: int, taken: Container[Record], behind: Span | None) -> Record:
    """Of segments that lie side by side the one to take the row before ``end`` from; ``behind`` is that
    of the rows from there on: rows of one field are of use together."""
    holding = [record for record in records if record.extents[group][0] < end <= record.extents[group][1]]
    fields = None if behind is None else behind.record.fields

    def order(record: Record) -> tuple[bool, bool, bool, int]:
        other = fields is not None and record.fields != fields
        return record not in taken, other, not record.warm, record.extents[group][0]

    return min(holding, key=order)


def _chain(record: Record | None) -> list[Record]:
    chain: list[Record] = []
    while record is not None:
        chain.append(record)
        record = record.parent
    return chain[::-1]


def _first_trimmable(node: Node[Record], position: int) -> Record | None:
    """A state at or behind ``position``, at this node or as little below it as may be, that can be
    cut back."""
    pending = [(node.start, 0, node)]
    count = 1
    while pending:
        _, _, current = heapq.heappop(pending)
        for at, trimmable, record in current.states:
            if trimmable and at >= position:
                return record
        for child in current.children.values():
            if child.trimmable:
                heapq.heappush(pending, (child.start, count, child))
                count += 1
    return None
