"""One save: ask what is held, write what is not, hand it over.

A save is at most a few containers: rows that widen a window over tokens already held, the rows
behind them (cut where sinks end), and the states at the end. Each is committed on its own, what
it builds on first; a save that is interrupted leaves whole records, never half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from warmkv.kvstore.containers import Container, PlaneSource, write_segment, write_state
from warmkv.kvstore.needs import Provides, RowGroup, needs_of_model
from warmkv.kvstore.results import Saved
from warmkv.kvstore.resume import Intervals, SinksAndLast
from warmkv.kvstore.rows import CheckedRecords, LayerRows, LayerState, PlaneRows, row_bytes_of
from warmkv.kvstore.session import Session
from warmkv.schema import messages as m
from warmkv.schema.errors import OfferAgain, RemoteProtocolError, WarmKVError
from warmkv.schema.identity import Identity, PlaneFormat, PlaneRole
from warmkv.schema.records import ROOT, Attachment, Lineage, NamespaceKey, RecordId, Tokens, pack_attachments

#: A save offers again when what it builds on was evicted meanwhile; then it gives up.
SAVE_ROUNDS = 3
#: Allowance for a container's head and alignment beside tokens and planes.
HEAD_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Query:
    """A prompt of one model: what a request is about."""

    identity: Identity
    tokens: Tokens
    attachments: tuple[Attachment, ...]
    lineage: Lineage

    @property
    def packed(self) -> bytes:
        return pack_attachments(self.attachments)

    def cut(self, length: int) -> Query:
        """Its first ``length`` tokens, which end no attachment in the middle."""
        inside = tuple(item for item in self.attachments if item.start < length)
        return Query(self.identity, self.tokens[:length], inside, self.lineage)


@dataclass(frozen=True, slots=True)
class Save:
    """What is to be saved of a query; ``anchors`` and ``fields`` packed. All of its tokens took
    ``prefill_s`` seconds to compute, 0 if nobody knows."""

    query: Query
    records: CheckedRecords
    ack: int
    anchors: bytes
    fields: bytes
    prefill_s: float = 0.0

    def prefill_us(self, rows: int) -> int:
        """The part of so many rows in the time all took."""
        return round(self.prefill_s * 1e6 * rows / max(1, len(self.query.tokens)))

    def run(self, session: Session, key: NamespaceKey) -> Saved:
        """Carry it out, offering again while others evict what it builds on. Raises what the
        session raises; OfferAgain at last, too where rows that are needed were not handed in."""
        for _ in range(SAVE_ROUNDS - 1):
            try:
                return _Round(self, session, key).run()
            except OfferAgain:
                continue
        return _Round(self, session, key).run()


@dataclass(frozen=True, slots=True)
class _Step:
    """A container still to be written: of rows [start, end), or of state at ``start``."""

    start: int
    end: int
    write: Callable[[], Container]


class _Round:
    """One attempt: from one offer to the last commit."""

    def __init__(self, save: Save, session: Session, key: NamespaceKey) -> None:
        self._save = save
        self._query = save.query
        self._records = save.records
        self._session = session
        self._key = key
        self._needs = needs_of_model(save.query.identity.layers)
        self._length = len(save.query.tokens)
        self._window_from = self._earliest_window()
        self._segments: list[tuple[int, int, RecordId]] = []
        self._offered = session.offer(self._offer())
        self._held = min(self._offered.held, self._length)
        self._runs: list[tuple[int, int]] = []

    def _read_runs(self) -> list[tuple[int, int]]:
        """By group: where the run of rows that ends at ``held`` begins, where the one from 0 ends."""
        numbers = np.frombuffer(self._offered.runs, "<u8").tolist() if len(self._offered.runs) % 16 == 0 else []
        if self._held and len(numbers) != 2 * len(self._needs.groups):
            raise RemoteProtocolError(f"{len(self._offered.runs)} bytes of runs for {len(self._needs.groups)} groups of layers")
        return list(zip(numbers[::2], numbers[1::2], strict=True)) or [(0, 0)] * len(self._needs.groups)

    def run(self) -> Saved:
        offer, sent_bytes, fresh = self._offered, 0, False
        open_ = offer.reservation
        done: m.Committed | None = None
        try:
            self._runs = self._read_runs()
            steps = self._steps()
            # One segment takes acknowledgement and anchors along; more are settled at the end.
            # So do only models that resume anywhere: others may find windows and states held beside it.
            alone = len(steps) == 1 and steps[0].start < steps[0].end == self._length and self._needs.anywhere
            for number, step in enumerate(steps):
                more = number < len(steps) - 1
                ack, anchors = (self._save.ack, self._save.anchors) if alone else (m.ACK_MEMORY, b"")
                container = step.write()
                try:
                    open_ = open_ if more else 0
                    took_us = self._save.prefill_us(step.end - step.start)
                    commit = m.Commit(self._key, offer.epoch, offer.reservation, ack, anchors, more, took_us)
                    done = self._session.commit(commit, container.fd)
                finally:
                    container.close()
                if step.start < step.end:
                    self._segments.append((step.start, step.end, done.id))
                fresh, sent_bytes = fresh or not done.duplicate, sent_bytes + container.total_bytes
            if done is None or not alone:
                reservation, open_ = open_, 0
                done = self._session.annotate(self._note(self._save.ack, self._save.anchors, reservation, complete=True))
        except BaseException:
            if open_:
                self._give_back(open_)
            raise
        id_ = self._segments[-1][2] if self._segments else done.id
        return Saved(True, id_, done.held, self._held, sent_bytes, not fresh, done.durable)

    # -- asking ----------------------------------------------------------------------------

    def _offer(self) -> m.Offer:
        layers, records, query = self._query.identity.layers, self._records, self._query
        whole = {layer for group in self._needs.groups if group.whole for layer in group.layers}
        fixed = HEAD_BYTES + 8 * self._length + 128 * sum(len(layer.planes) for layer in layers)
        windows = [record.planes for index, found in records.rows.items() if index not in whole for record in found]
        states = [state.planes for state in (*records.states.values(), *records.constants.values())]
        fixed += sum(plane.rows.nbytes for planes in (*windows, *states) for plane in planes) + HEAD_BYTES * len(states)
        if records.logits is not None:
            fixed += records.logits.nbytes + HEAD_BYTES
        row_bytes = sum(row_bytes_of(layers[index]) for index in whole)
        about = (self._key, query.lineage, query.tokens, query.packed, self._save.fields)
        return m.Offer(*about, row_bytes, fixed, self._window_from)

    def _note(self, ack: int = m.ACK_MEMORY, anchors: bytes = b"", reservation: int = 0, *, complete: bool = False) -> m.Annotate:
        """The message that ends a save; ``complete`` where all that was handed in must be there."""
        query, records = self._query, self._records
        provides = Provides.NOTHING
        for layers, flag in ((self._needs.exact, Provides.EXACT), (self._needs.trimmable, Provides.TRIMMABLE)):
            provides |= flag if complete and any(layer in records.states for layer in layers) else Provides.NOTHING
        if complete and records.logits is not None:
            provides |= Provides.LOGITS
        complete = complete and bool(records.rows or records.states)
        about = (self._key, query.lineage, query.tokens, query.packed, ack, anchors, reservation)
        return m.Annotate(*about, complete, int(provides))

    def _give_back(self, reservation: int) -> None:
        """End a reservation that will not be used: an annotation ends it, whatever it answers."""
        try:
            self._session.annotate(self._note(reservation=reservation))
        except WarmKVError:
            pass

    # -- planning --------------------------------------------------------------------------

    def _steps(self) -> list[_Step]:
        """Containers to write, what others build on first. Raises OfferAgain where what is neither
        held nor handed in would be needed to resume at the end."""
        held, length = self._held, self._length
        if held < length and not (self._records.rows or self._records.states):
            raise OfferAgain(f"tokens [{held}, {length}) are not held, and nothing was handed in for them")
        steps = []
        for group, (run, prefix) in zip(self._needs.groups, self._runs, strict=True):
            self._require(group, run, prefix)
        sinks = self._lost_sinks()
        if sinks:
            steps.append(_Step(0, held, partial(self._segment, 0, held, ROOT, sinks)))
        widening = self._widening()
        if widening:
            parent = RecordId(self._offered.window_parent) if self._window_from else ROOT
            steps.append(_Step(self._window_from, held, partial(self._segment, self._window_from, held, parent, widening)))
        if held < length:
            steps.append(_Step(held, length, partial(self._rows, 0)))
            if any(_in_two(found, held) for found in self._records.rows.values()):
                steps.append(_Step(held, length, partial(self._rows, 1)))
        steps += self._constants()
        states = self._states(Provides(self._offered.provides))
        if states:
            steps.append(_Step(length, length, partial(self._state, length, states)))
        return steps

    def _widening(self) -> list[PlaneSource]:
        """Rows before ``held`` that windows need and that are not held."""
        found: list[PlaneSource] = []
        for group, (run, _) in zip(self._needs.groups, self._runs, strict=True):
            for need, end in () if group.whole else group.need.required(self._length)[-1:]:
                for layer in group.layers:
                    for record in self._records.rows.get(layer, ())[-1:]:
                        found += self._cut(record, self._window_from, max(need, self._window_from), min(run, self._held, end))
        return found

    def _require(self, group: RowGroup, run: int, prefix: int) -> None:
        """OfferAgain unless all rows a group needs at the end are held or were handed in."""
        given = [(record.first, record.end) for record in self._records.rows.get(group.layers[0], ())]
        have = Intervals([*given, (run, self._held), (0, prefix)])
        for start, end in group.need.required(self._length):
            reached = have.run_end(start)
            if reached < end:
                layer = group.layers[0]
                raise OfferAgain(
                    f"layer {layer}: rows from {reached} on are neither held nor handed in, [{start}, {end}) are needed"
                )

    def _lost_sinks(self) -> list[PlaneSource]:
        """Rows of sinks that were held once, as what builds on them is, and are no more."""
        found: list[PlaneSource] = []
        for group, (_, prefix) in zip(self._needs.groups, self._runs, strict=True):
            if isinstance(group.need, SinksAndLast) and self._held and prefix < min(group.need.s, self._held):
                for layer in group.layers:
                    for record in self._records.rows.get(layer, ())[:1]:
                        found += self._cut(record, 0, 0, min(group.need.s, self._held))
        return found

    def _earliest_window(self) -> int:
        """First row of the earliest window that was handed in and is needed, or where the
        attachment begins in which it lies; 0: none."""
        starts = []
        for group in self._needs.groups:
            found = () if group.whole else self._records.rows.get(group.layers[0], ())
            starts += [max(start, found[-1].first) for start, _ in group.need.required(self._length)[-1:] if found]
        first = min(starts, default=0)
        return next((item.start for item in self._query.attachments if item.start < first < item.end), first)

    def _constants(self) -> list[_Step]:
        """Encoder outputs, at the ends of their attachments, that are not held yet."""
        steps = []
        for position in sorted({position for _, position in self._records.constants}):
            known, query = None, self._query.cut(position)
            if position <= self._held:
                offer = m.Offer(self._key, query.lineage, query.tokens, query.packed, self._save.fields)
                known = self._session.offer(offer)
                if known.held < position or known.provides & Provides.CONSTANT:
                    continue
            found = [state for (_, at), state in self._records.constants.items() if at == position]
            sources = [source for state in found for source in self._planes(state)]
            steps.append(_Step(position, position, partial(self._state, position, sources, known.parent if known else None)))
        return steps

    def _states(self, provided: Provides) -> list[PlaneSource]:
        """State at the end that is not held yet."""
        records, needs = self._records, self._needs
        found: list[PlaneSource] = []
        for layers, flag in ((needs.exact, Provides.EXACT), (needs.trimmable, Provides.TRIMMABLE)):
            given = [records.states[layer] for layer in layers if layer in records.states]
            wanted = flag | (Provides.IMPORTANCE if any(_has_importance(state) for state in given) else flag)
            if provided & wanted != wanted:
                found += [source for state in given for source in self._planes(state)]
        if records.logits is not None and not provided & Provides.LOGITS:
            plane = PlaneRows(PlaneRole.LOGITS, PlaneFormat.F32, records.logits)
            found.append(PlaneSource(len(self._query.identity.layers), records.logits.shape[1:], 0, plane))
        return found

    # -- writing ---------------------------------------------------------------------------

    def _rows(self, part: int) -> Container:
        """The rows behind what is held: of layers that come in two ranges the first, and in a
        second segment over the same tokens the other; a plane of a segment is one range."""
        start, end = self._held, self._length
        sources: list[PlaneSource] = []
        for group in self._needs.groups:
            for layer in group.layers:
                given = self._records.rows.get(layer, ())
                if group.whole and part == 0 and not any(record.first <= start for record in given):
                    first = min((record.first for record in given), default=end)
                    raise OfferAgain(f"layer {layer} has rows from {first} on, rows from {start} on are needed")
                inside = [record for record in given if record.end > start]
                sources += [source for record in inside[part : part + 1] for source in self._cut(record, start, start, end)]
        return self._segment(start, end, self._offered.parent if start else ROOT, sources)

    def _segment(self, start: int, end: int, parent: RecordId, sources: Sequence[PlaneSource]) -> Container:
        query = self._query.cut(end)
        return write_segment(self._key, query.lineage, parent, start, query.tokens, query.attachments, sources)

    def _state(self, position: int, sources: Sequence[PlaneSource], parent: RecordId | None = None) -> Container:
        if parent is None:
            parent = self._offered.parent if position == self._held else self._at(position)
        query = self._query.cut(position)
        return write_state(self._key, query.lineage, parent, query.tokens, query.attachments, sources)

    def _at(self, position: int) -> RecordId:
        """A segment of this save that holds the token before ``position``."""
        found = [id_ for start, end, id_ in self._segments if start < position <= end]
        if not found:
            raise OfferAgain(f"no segment that holds token {position - 1} is known")
        return found[-1]

    def _planes(self, state: LayerState) -> Iterator[PlaneSource]:
        specs = {spec.role: spec for spec in self._query.identity.layers[state.layer].state_planes}
        for plane in state.planes:
            opaque = state.layer in self._needs.trimmable
            shape = tuple(plane.rows.shape[1:]) if opaque else specs[plane.role].row_shape
            yield PlaneSource(state.layer, shape, 0, plane)

    def _cut(self, record: LayerRows, segment: int, start: int, end: int) -> list[PlaneSource]:
        """Rows [start, end) of a record as far as it has them, for a segment that begins at
        ``segment``; nothing where it has none."""
        first, last = max(start, record.first), min(end, record.end)
        layer = self._query.identity.layers[record.layer]
        shapes = {spec.role: spec.row_shape for spec in (*layer.row_planes, *layer.field_planes)}
        found = []
        for plane in record.planes if first < last else ():
            if plane.role == PlaneRole.FIELD:
                found.append(PlaneSource(record.layer, shapes[plane.role], segment, plane))
            else:
                rows = plane.rows[first - record.first : last - record.first]
                cut = PlaneRows(plane.role, plane.format, rows, plane.field)
                found.append(PlaneSource(record.layer, shapes[plane.role], first, cut))
        return found


def _has_importance(state: LayerState) -> bool:
    return any(plane.role == PlaneRole.IMPORTANCE for plane in state.planes)


def _in_two(found: tuple[LayerRows, ...], held: int) -> bool:
    """Whether rows behind ``held`` come in two ranges, neither empty."""
    return len(found) > 1 and found[0].end > held and found[1].first < found[1].end
