"""Intake: offers, reservations and commits, the way of new rows into the store.

Everything a peer hands over is proven before the index is touched: seals, size, allocated
pages, head digest, bounds, geometry against the identity, payload digests, parent, id.
"""

from __future__ import annotations

import fcntl
import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from warmkv.kvstore import memfd
from warmkv.kvstore.rows import require_served
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import ids
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import ColdFull, DescriptorLimit, DigestError, FormatError, OfferAgain, RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import (
    NO_FIELD,
    ROOT,
    Anchor,
    Attachment,
    Lineage,
    check_attachments,
    coverage,
    unpack_anchors,
    unpack_attachments,
)
from warmkv.schema.segment import SegmentHeader

MAX_ANCHORS = 4096
#: The name stays in the index as long as the record does, in whichever tier.
MAX_WRITER_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose namespace a request is about: enough to create it."""

    uid: int
    share: str
    identity: Identity


class Intake:
    """**Threading:** every method wants the index lock free."""

    def __init__(self, index: Index, warm: WarmTier, writer: WriteBehind | None, options: StoreOptions, epoch: int) -> None:
        self.saves = 0
        self.duplicates = 0
        self.received_bytes = 0
        self._index = index
        self._warm = warm
        self._writer = writer
        self._options = options
        self._epoch = epoch

    # -- offers --------------------------------------------------------------------------

    def offer(self, request: m.Offer, owner: Owner) -> m.Offered:
        """What is held of the tokens, and room reserved for the rest. Raises TooLarge, Busy."""
        require_served(owner.identity)
        attachments = check_attachments(unpack_attachments(request.attachments), len(request.tokens))
        tokens = request.tokens.tobytes()
        with self._index.changed:
            held, parent = self._held(request, tokens, attachments)
            wanted = (len(request.tokens) - held) * request.row_bytes + request.fixed_bytes if request.row_bytes else 0
            wanted = wanted if held < len(request.tokens) else 0
        reservation = 0
        try:
            if wanted:
                reservation = self._reserve(wanted, parent)
        finally:
            self._warm.reap()
        return m.Offered(held, parent.id if parent else ROOT, reservation, wanted, self._epoch)

    def _reserve(self, wanted: int, parent: Record | None) -> int:
        with self._index.changed:
            if parent is None or not parent.gone:
                self._warm.make_room(wanted, parent)
            if parent is not None and parent.gone:
                raise OfferAgain("what the save builds on went while room was made for it")
            return self._warm.ledger.reserve(wanted, self._warm.clock() + self._options.reservation_ttl_s)

    def _held(self, request: m.Offer, tokens: bytes, attachments: tuple[Attachment, ...]) -> tuple[int, Record | None]:
        found = self._index.find(request.namespace, Lineage(request.lineage), tokens, attachments)
        if not found.held or found.walk is None:
            return 0, None
        parent = self._index.covering(found.walk, found.held)
        if parent is not None:
            self._index.touch(self._index.chain_of(parent))
        return found.held, parent

    def give_back(self, reservation: int) -> None:
        """End a reservation; an unknown one is ignored."""
        with self._index.changed:
            self._warm.ledger.give_back(reservation)
            self._index.changed.notify_all()

    def living(self, reservations: set[int]) -> set[int]:
        """Those of the reservations that were neither used nor have expired."""
        with self._index.changed:
            self._warm.ledger.expire(self._warm.clock())
            return self._warm.ledger.living(reservations)

    # -- commits -------------------------------------------------------------------------

    def commit(self, request: m.Commit, fd: int, owner: Owner) -> m.Committed:
        """Check and take a sealed container; ``fd`` stays the caller's. Answers when ``ack`` is
        reached. Raises FormatError, RemoteProtocolError, UnsupportedError, RecordError, OfferAgain,
        TooLarge, Busy, ClosedError, ColdFull; then nothing changed (after ColdFull and Busy of a
        disk acknowledgement the rows are held in memory)."""
        try:
            require_served(owner.identity)
            if request.epoch != self._epoch:
                raise OfferAgain("the store was restarted since the offer")
            anchors = self._check_anchors(request.anchors)
            total_bytes = memfd.check_sealed(fd, self._warm.ledger.budget_bytes or 1)
            head = self._check_container(fd, total_bytes, request, owner)
            record, duplicate = self._take(request, head, fd, total_bytes, owner, anchors)
        finally:
            self.give_back(request.reservation)
            self._warm.reap()
        # Anchors that hang on older records are not in the transaction that stores this one.
        older = duplicate or any(anchor.position <= record.start for anchor in anchors)
        durable = self._acknowledge(record, request.ack, older and bool(anchors))
        held = head.header.end if isinstance(head.header, SegmentHeader) else 0
        return m.Committed(record.id, held, 0 if duplicate else total_bytes, duplicate, durable)

    def _check_container(self, fd: int, total_bytes: int, request: m.Commit, owner: Owner) -> container.Head:
        """Everything that can be checked without the index."""
        view = memoryview(memfd.map_private(fd, total_bytes))
        head = container.decode_head(view, total_bytes)
        header = head.header
        if not isinstance(header, SegmentHeader):
            raise FormatError("the container holds a state, expected a segment")
        if header.namespace != request.namespace:
            raise FormatError("the container belongs to another namespace than the commit")
        if len(header.writer) > MAX_WRITER_CHARACTERS:
            raise FormatError(f"the writer's name has {len(header.writer)} characters, expected at most {MAX_WRITER_CHARACTERS}")
        check_geometry(header, owner.identity)
        if container.payload_digests(view[head.payload_offset :]) != header.digests:
            raise DigestError("the payload does not match the digests in its head")
        return head

    def _take(
        self, request: m.Commit, head: container.Head, fd: int, total_bytes: int, owner: Owner, anchors: tuple[Anchor, ...]
    ) -> tuple[Record, bool]:
        header = head.header
        assert isinstance(header, SegmentHeader)
        with self._index.changed:
            parent, before, inherited = self._parent(header)
        tokens = before + header.tokens.tobytes()
        attachments = (*inherited, *header.attachments)
        self._check_id(header, tokens, attachments)
        _check_positions(anchors, header.end, attachments)
        with self._index.changed:
            known = self._known(header, tokens, attachments)
            if known is None:
                if parent is not None and parent.gone:
                    raise OfferAgain("what the save builds on was evicted meanwhile")
                self._warm.ledger.give_back(request.reservation)
                self._warm.make_room(total_bytes, parent)
                # Making room may have waited: somebody else may have saved or dropped the same.
                known = self._known(header, tokens, attachments)
            if known is not None:
                self._annotate(known, anchors)
                self.duplicates += 1
                return known, True
            if parent is not None and parent.gone:
                raise OfferAgain("what the save builds on went while room was made for it")
            record = self._admit(head, fd, total_bytes, owner, parent, tokens, attachments)
            self._annotate(record, anchors)
            if self._writer is not None:
                self._writer.enqueue(record)
            self._index.changed.notify_all()
            return record, False

    def _admit(
        self, head: container.Head, fd: int, total_bytes: int, owner: Owner, parent: Record | None, tokens: bytes,
        attachments: tuple[Attachment, ...],
    ) -> Record:  # fmt: skip
        header = head.header
        assert isinstance(header, SegmentHeader)
        try:
            own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
        except OSError as exc:
            raise DescriptorLimit("no descriptor left to keep the segment") from exc
        namespace = self._index.namespaces.get(header.namespace)
        if namespace is None:
            namespace = Namespace(header.namespace, owner.uid, owner.share, owner.identity, time.time_ns())
        record = Record(
            header.id, namespace, header.lineage, header.start, header.end, total_bytes, head.payload_bytes,
            header.created_ns, header.writer,
        )  # fmt: skip
        self._index.add(record, parent, tokens, attachments)
        self._warm.admit(record, own)
        self._index.touch(self._index.chain_of(record))
        self.saves += 1
        self.received_bytes += total_bytes
        return record

    def _parent(self, header: SegmentHeader) -> tuple[Record | None, bytes, tuple[Attachment, ...]]:
        """The record a segment builds on, with the tokens and attachments before its start."""
        if header.start == 0:
            if header.parent != ROOT:
                raise FormatError("a segment that begins at 0 names a parent")
            return None, b"", ()
        parent = self._index.records.get(header.parent)
        # A record of another namespace is answered like none at all: ids can be computed, and
        # whether somebody else holds a prompt is not for this peer to know.
        if parent is None or parent.node is None or parent.namespace.key != header.namespace:
            raise OfferAgain("what the save builds on is not held")
        if parent.lineage != header.lineage:
            raise FormatError("the parent belongs to another lineage")
        if not parent.start < header.start <= parent.end:
            raise FormatError(f"parent [{parent.start}, {parent.end}) does not reach {header.start}")
        tree = parent.namespace.trees[parent.lineage]
        tokens, attachments = tree.prefix(parent.node, header.start)
        if any(item.start < header.start < item.end for item in attachments):
            raise FormatError(f"a segment cannot begin at {header.start}, inside an attachment")
        return parent, tokens, attachments

    @staticmethod
    def _check_id(header: SegmentHeader, tokens: bytes, attachments: tuple[Attachment, ...]) -> None:
        whole = np.frombuffer(tokens, "<u4")
        expected = ids.segment_id(header.namespace, header.lineage, header.start, coverage(header.planes), attachments, whole)
        if expected != header.id:
            raise FormatError(f"segment id {header.id.hex()} does not name its rows, expected {expected.hex()}")

    def _known(self, header: SegmentHeader, tokens: bytes, attachments: tuple[Attachment, ...]) -> Record | None:
        """A record that already holds all the rows of ``header``."""
        found = self._index.find(header.namespace, header.lineage, tokens, attachments)
        if found.held < header.end or found.walk is None:
            return None
        return self._index.covering(found.walk, header.end)

    def annotate(self, request: m.Annotate) -> m.Committed:
        """Anchors for, and an acknowledgement of, rows that are held already. Raises OfferAgain."""
        self.give_back(request.reservation)
        anchors = self._check_anchors(request.anchors)
        attachments = check_attachments(unpack_attachments(request.attachments), len(request.tokens))
        _check_positions(anchors, len(request.tokens), attachments)
        with self._index.changed:
            found = self._index.find(request.namespace, Lineage(request.lineage), request.tokens.tobytes(), attachments)
            record = self._index.covering(found.walk, found.held) if found.walk else None
            if record is None or found.held < len(request.tokens):
                raise OfferAgain("what was held was evicted meanwhile")
            self._annotate(record, anchors)
            self.duplicates += 1
        durable = self._acknowledge(record, request.ack, bool(anchors))
        return m.Committed(record.id, found.held, 0, True, durable)

    def _annotate(self, record: Record, anchors: tuple[Anchor, ...]) -> None:
        """Hang each anchor on the record of the chain that holds its position; lock held.

        The deepest one: what it builds on may go on past its start, with other tokens."""
        chain = self._index.chain_of(record)
        starts = [link.start for link in chain]
        for anchor in anchors:
            link = chain[bisect_left(starts, anchor.position) - 1]
            link.anchors[(anchor.position, anchor.kind)] = anchor
            self._index.touched.add(link)

    @staticmethod
    def _check_anchors(packed: bytes) -> tuple[Anchor, ...]:
        anchors = unpack_anchors(packed)
        if len(anchors) > MAX_ANCHORS:
            raise RecordError(f"{len(anchors)} anchors in one save, at most {MAX_ANCHORS} are allowed")
        return anchors

    def _acknowledge(self, record: Record, ack: int, anchors: bool = False) -> bool:
        if ack != m.ACK_DISK:
            return record.cold == Cold.STORED
        if self._writer is None:
            raise ColdFull("the cold tier is off, nothing can be acknowledged as on disk; the rows are held in memory")
        with self._index.changed:
            if record.cold == Cold.ABSENT and not record.gone:
                self._writer.enqueue(record)
            self._writer.wait_durable(record, self._options.durable_timeout_s)
            if anchors:
                self._writer.carry_usage(self._options.durable_timeout_s)
        return True


def _check_positions(anchors: tuple[Anchor, ...], length: int, attachments: tuple[Attachment, ...]) -> None:
    for anchor in anchors:
        if not 0 < anchor.position <= length:
            raise RecordError(f"anchor at {anchor.position} lies outside the {length} tokens")
        if any(item.start < anchor.position < item.end for item in attachments):
            raise RecordError(f"anchor at {anchor.position} lies inside an attachment")


def check_geometry(header: SegmentHeader, identity: Identity) -> None:
    """FormatError unless the planes are exactly those of the identity, with all rows."""
    planes = {(plane.layer, plane.role): plane for plane in header.planes}
    expected = 0
    for index, layer in enumerate(identity.layers):
        for spec in layer.planes if layer.shared_with < 0 else ():
            expected += 1
            plane = planes.get((index, spec.role))
            if plane is None or plane.format != spec.format or plane.row_shape != spec.row_shape:
                raise FormatError(f"layer {index}: plane {spec.role.name} does not fit the identity")
            if plane.field != NO_FIELD:
                raise FormatError(f"layer {index}: plane {spec.role.name} names a field, {spec.format.name} has none")
            if plane.first_row != header.start or plane.rows != header.end - header.start:
                raise FormatError(f"layer {index}: plane {spec.role.name} does not hold rows [{header.start}, {header.end})")
    if expected != len(planes):
        raise FormatError(f"{len(planes)} planes, the identity has {expected}")
