"""From descriptors to a restored prefix.

Everything is verified before anything is handed out: seals, sizes, head digests, namespace,
lineage, tokens, attachments, geometry and bounds, and with ``verify=True`` every payload byte.
A state carries no tokens; its id is computed anew from the tokens it must belong to.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from warmkv.kvstore import geometry, memfd
from warmkv.kvstore.digests import payload_digests
from warmkv.kvstore.handing_out import Piece, Places, Run, State, Wanted, make_layer, wanted_of
from warmkv.kvstore.needs import ModelNeeds, Provides, RowGroup
from warmkv.kvstore.restored import Flight, Layers, Restored, RestoredLayer, Rows
from warmkv.kvstore.results import Match
from warmkv.kvstore.session import Grant
from warmkv.schema import ids
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import DigestError, FormatError, RemoteProtocolError
from warmkv.schema.identity import Identity, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Attachment, NamespaceKey, Tokens, coverage, unpack_table
from warmkv.schema.segment import SegmentHeader, StateHeader


def restore(
    grant: Grant, match: Match, namespace: NamespaceKey, tokens: Tokens, *, verify: bool, writable: bool, logits: bool = False
) -> Restored:
    """Map and check a grant. On any failure the lease is released, every descriptor closed and
    the error raised; nothing is handed out. A grant of nothing becomes a miss."""
    flight = Flight(grant.release_flight) if grant.reply.flight else None
    try:
        found = _Assembly(match, namespace, tokens, verify, writable)
        found.take(grant, len(tokens) if logits else len(tokens) - 1)
        layers = found.layers() if match.usable else ()
        parked = found.logits() if match.usable == len(tokens) else None
    except BaseException:
        grant.release()
        if flight is not None:
            flight.close()
        raise
    if not match.usable:
        grant.release()
        return Restored(match, flight=flight)
    return Restored(match, layers, grant.reply.promoted_bytes, parked, flight, grant.release)


class _Same:
    """A header as a key, equal to itself only: headers are remembered after decoding, and the same
    ones come again and again."""

    __slots__ = ("header",)

    def __init__(self, header: SegmentHeader) -> None:
        self.header = header

    def __hash__(self) -> int:
        return id(self.header)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.header is self.header


@lru_cache(maxsize=256)
def _described(key: _Same, identity: Identity) -> tuple[geometry.Coverage, Places]:
    """What a segment covers, and its planes by layer and role. Raises FormatError unless they fit."""
    header = key.header
    return geometry.segment_coverage(header, identity), {(plane.layer, plane.role): plane for plane in header.planes}


@dataclass(slots=True)
class _Assembly:
    """Records of one grant, checked one by one, then put together by layer.

    ``path`` are the tokens known to lie on the way: those of the query up to what is usable, and
    behind them, where a state may lie there, those of the segments handed over."""

    match: Match
    namespace: NamespaceKey
    tokens: Tokens
    verify: bool
    writable: bool
    needs: ModelNeeds = field(init=False)
    wanted: tuple[Wanted, ...] = field(init=False)
    path: Tokens = field(init=False)
    beside: tuple[Attachment, ...] = field(init=False)
    segments: list[tuple[tuple[geometry.Extent, ...], Piece]] = field(default_factory=list)
    states: list[tuple[int, Provides, Piece]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.needs, self.wanted = wanted_of(self.match.identity)
        self.path = self.tokens[: self.match.usable]
        self.beside = tuple(item for item in self.match.attachments if item.start < self.match.usable)

    def take(self, grant: Grant, most: int) -> None:
        """Map and check every record; the descriptors are closed, whatever happens."""
        pending = list(grant.fds)
        try:
            if self.match.usable > max(0, most):
                raise RemoteProtocolError(f"{self.match.usable} usable tokens were announced, at most {most} can be")
            spans = unpack_table(grant.reply.spans, m.SPAN_DTYPE, "spans").tolist()
            if len(spans) != len(pending):
                raise RemoteProtocolError(f"{len(pending)} descriptors came for {len(spans)} spans")
            for id_, _, end, total_bytes in spans:
                memory = self._map(pending[0], total_bytes)
                os.close(pending.pop(0))
                self._enter(memory, bytes(id_), end)
        finally:
            for fd in pending:
                os.close(fd)

    def _map(self, fd: int, total_bytes: int) -> mmap.mmap:
        if memfd.check_sealed(fd, container.MAX_PAYLOAD_BYTES) != total_bytes:
            raise RemoteProtocolError(f"a descriptor is not {total_bytes} bytes long")
        return memfd.map_private(fd, total_bytes, writable=self.writable)

    def _enter(self, memory: mmap.mmap, id_: bytes, end: int) -> None:
        view = memoryview(memory)
        head = container.decode_head(view, len(view))
        header = head.header
        if header.id != id_:
            raise RemoteProtocolError("descriptor holds another record than was announced")
        if header.namespace != self.namespace or header.lineage != self.match.lineage:
            raise RemoteProtocolError("record belongs to another namespace or lineage")
        if self.verify and payload_digests(view[head.payload_offset :]) != header.digests:
            raise DigestError(f"payload of record {id_.hex()} does not match its digests")
        payload = np.frombuffer(memory, np.uint8)[head.payload_offset :]
        try:
            if isinstance(header, StateHeader):
                self._enter_state(header, Piece(payload, {(plane.layer, plane.role): plane for plane in header.planes}))
            else:
                self._enter_segment(header, payload, end)
        except FormatError as exc:
            raise RemoteProtocolError(str(exc)) from exc

    def _enter_segment(self, header: SegmentHeader, payload: Rows, end: int) -> None:
        if header.start > len(self.path):
            raise RemoteProtocolError(f"segment begins at {header.start}, {len(self.path)} tokens are known")
        self._prove(header)
        agree = self._agreement(header)
        if agree < min(end, self.match.usable):
            raise RemoteProtocolError(f"segment holds the rows of other tokens or attachments from {agree} on")
        # One that is too big to be remembered after decoding is not kept here either.
        remembered = header.tokens.nbytes <= container.REMEMBERED_HEADER_BYTES // 2
        described = _described if remembered else _described.__wrapped__
        covered, planes = described(_Same(header), self.match.identity)
        # Behind what agrees it may go on with another prompt, whose rows are not ours.
        extents = tuple((first, min(last, agree)) for first, last in covered.extents)
        self.segments.append((extents, Piece(payload, planes)))
        if self.needs.trimmable and agree == min(header.end, self.match.usable):
            self._go_on(header)

    def _prove(self, header: SegmentHeader) -> None:
        """Its id stands for every token before it too: rows behind another prefix are others."""
        if header.start == 0:
            return
        before = tuple(item for item in self.beside if item.start < header.start)
        tokens = np.concatenate([self.path[: header.start], header.tokens])
        around = (*before, *header.attachments)
        found = ids.segment_id(self.namespace, self.match.lineage, header.start, coverage(header.planes), around, tokens)
        if found != header.id:
            raise RemoteProtocolError(f"segment that begins at {header.start} belongs behind other tokens")

    def _go_on(self, header: SegmentHeader) -> None:
        """Take a segment's tokens behind what is resumed: a state may lie among them. Of several
        the last counts, and those that lead to the state come last."""
        cut = max(header.start, self.match.usable)
        if header.end > cut:
            self.path = np.concatenate([self.path[:cut], header.tokens[cut - header.start :]])
            behind = (item for item in header.attachments if item.start >= cut)
            self.beside = (*(item for item in self.beside if item.start < cut), *behind)

    def _agreement(self, header: SegmentHeader) -> int:
        """Up to where, at most to what is usable, a segment is of this query."""
        most = min(header.end, self.match.usable)
        differing = np.flatnonzero(header.tokens[: max(0, most - header.start)] != self.tokens[header.start : most])
        agree = header.start + int(differing[0]) if differing.size else most
        ours = {item for item in self.match.attachments if header.start <= item.start < agree}
        theirs = {item for item in header.attachments if item.start < agree}
        return min((item.start for item in ours ^ theirs), default=agree)

    def _enter_state(self, header: StateHeader, piece: Piece) -> None:
        if header.position > len(self.path):
            raise RemoteProtocolError(f"state at {header.position}, {len(self.path)} tokens are known")
        before = tuple(item for item in self.beside if item.start < header.position)
        if header.attachments != before:
            raise RemoteProtocolError("state belongs to other attachments")
        tokens = self.path[: header.position]
        if ids.state_id(self.namespace, self.match.lineage, coverage(header.planes), before, tokens) != header.id:
            raise RemoteProtocolError("state belongs to other tokens")
        self.states.append((header.position, geometry.state_provides(header, self.match.identity), piece))

    # -- putting together ------------------------------------------------------------------

    def layers(self) -> Layers:
        """The layers. Raises RemoteProtocolError where rows or states that they need did not come."""
        runs = [self._runs(number, group) for number, group in enumerate(self.needs.groups)]
        states = {index: self._states(index, wanted.state) for index, wanted in enumerate(self.wanted) if wanted.state}

        def make(index: int) -> RestoredLayer:
            wanted = self.wanted[index]
            return make_layer(index, wanted, runs[wanted.group] if wanted.group >= 0 else (), states.get(index, ()))

        return Layers(len(self.wanted), make)

    def _runs(self, number: int, group: RowGroup) -> tuple[Run, ...]:
        """The rows a group needs, from as few segments as possible."""
        runs: list[Run] = []
        for start, end in group.need.required(self.match.usable):
            at = start
            while at < end:
                stop, best = at, None
                for extents, piece in self.segments:
                    first, last = extents[number]
                    if first <= at and last > stop:
                        stop, best = min(last, end), piece
                if best is None:
                    raise RemoteProtocolError(f"layer {group.layers[0]}: row {at} of [{start}, {end}) did not come")
                runs.append(Run(best, at, stop))
                at = stop
        return tuple(runs)

    def _states(self, index: int, flag: Provides) -> tuple[State, ...]:
        """Where the states of a layer lie: encoder outputs of all attachments, else one."""
        usable = self.match.usable
        if flag == Provides.CONSTANT:
            inside = [item for item in self.match.attachments if item.end <= usable]
            return tuple(self._state(index, item.end, item.end, flag, item.start) for item in inside)
        return (self._state(index, usable, len(self.path) if flag == Provides.TRIMMABLE else usable, flag),)

    def _state(self, index: int, low: int, high: int, flag: Provides, start: int = -1) -> State:
        """A state of a layer at a position in low..high."""
        for position, provides, piece in self.states:
            if provides & flag and low <= position <= high:
                return State(piece, position, start)
        raise RemoteProtocolError(f"layer {index}: no {flag.name} state for {low} came")

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits parked at the end of the query."""
        place = (len(self.match.identity.layers), PlaneRole.LOGITS)
        for position, provides, piece in self.states:
            if provides & Provides.LOGITS and position == self.match.usable:
                plane = piece.planes[place]
                spec = PlaneSpec(PlaneRole.LOGITS, PlaneFormat.F32, plane.row_shape)
                row: npt.NDArray[np.float32] = piece.all_rows(plane, spec)[0]
                return row
        raise RemoteProtocolError("the whole query is usable, but no logits came")
