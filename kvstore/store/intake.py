"""Intake: offers, reservations and commits, the way of new rows into the store.

Everything a peer hands over is proven before the index is touched: seals, size, allocated
pages, head digest, bounds, geometry against the identity, payload digests, parent, id.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TypedDict

import numpy as np

from warmkv.kvstore import memfd
from warmkv.kvstore.needs import Provides, needs_of_model
from warmkv.kvstore.rows import require_served
from warmkv.kvstore.store import arrivals, room
from warmkv.kvstore.store.adoption import Adoption
from warmkv.kvstore.store.arrivals import Arrival, Owner
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import messages as m
from warmkv.schema.errors import Busy, ColdFull, FormatError, OfferAgain, RecordError, StoreError
from warmkv.schema.records import (
    ID_BYTES,
    ROOT,
    Anchor,
    Attachment,
    Lineage,
    NamespaceKey,
    check_attachments,
    check_shifts,
    unpack_anchors,
    unpack_attachments,
)
from warmkv.schema.segment import SegmentHeader

__all__ = ["Intake", "Owner"]

#: In one save, and on one segment: of more the oldest give way.
MAX_ANCHORS = 4096
#: Rows that came too late are refused where they are this part of a segment or more; of fewer
#: the second copy costs less than another round.
TWICE = 8
MAX_FIELDS = 4096


class _Known(TypedDict):
    runs: bytes
    window_parent: bytes
    provides: int


class _Copying:
    """Room for a copy, held in the ledger until it is given back, once; lock held."""

    def __init__(self, warm: WarmTier, uid: int, total_bytes: int) -> None:
        self._warm, self._uid, self._total_bytes = warm, uid, total_bytes
        warm.ledger.promote(uid, total_bytes)

    def give_back(self) -> None:
        if self._total_bytes:
            self._warm.ledger.promote(self._uid, -self._total_bytes)
        self._total_bytes = 0


class _Awaited:
    """Records that a request waits for until they are on disk: none gives way before it was told.
    As a context manager it lets go of them; the index lock is free then."""

    def __init__(self, index: Index, ack: int) -> None:
        self._index, self._ack = index, ack
        self.records: list[Record] = []

    def add(self, records: Sequence[Record]) -> None:
        """In the same hold of the lock in which they were found."""
        self.records += records
        for record in records if self._ack == m.ACK_DISK else ():
            record.awaited += 1

    def __enter__(self) -> _Awaited:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        if self.records and self._ack == m.ACK_DISK:
            with self._index.changed:
                for record in self.records:
                    record.awaited -= 1
                self._index.changed.notify_all()


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
        #: Takes a container that outlived the process which held it, see `Adoption.adopt`.
        self.adopt = Adoption(index, warm, self._take).adopt

    # -- offers --------------------------------------------------------------------------

    def offer(self, request: m.Offer, owner: Owner) -> m.Offered:
        """What is held of the tokens, and room reserved for the rest. Raises TooLarge, Busy."""
        require_served(owner.identity)
        attachments = check_attachments(unpack_attachments(request.attachments), len(request.tokens))
        fields = _fields(request.fields)
        tokens = request.tokens.tobytes()
        reservation = wanted = 0
        try:
            with self._index.changed:
                held, parent, known = self._held(request, tokens, attachments, fields)
                missing = len(request.tokens) - held
                # Where any position will do and all rows are held, nothing is going to be sent.
                if missing or not needs_of_model(owner.identity.layers).anywhere:
                    wanted = missing * request.row_bytes + request.fixed_bytes
                if wanted:
                    uid = self._uid(request.namespace, owner)
                    if not self._warm.ledger.may_reserve(uid):
                        raise Busy(f"{self._warm.ledger.reservations} uploads are announced already")
                    self._warm.make_room(wanted, parent, uid=uid)
                    now = self._held(request, tokens, attachments, fields)
                    if now[0] != held:
                        raise OfferAgain("what the save builds on went while room was made for it")
                    held, parent, known = now
                    reservation = self._warm.ledger.reserve(wanted, self._warm.clock() + self._options.reservation_ttl_s, uid)
        finally:
            self._warm.reap()
        return m.Offered(held, parent.id if parent else ROOT, reservation, wanted, self._epoch, **known)

    def _held(
        self, request: m.Offer, tokens: bytes, attachments: tuple[Attachment, ...], fields: frozenset[bytes]
    ) -> tuple[int, Record | None, _Known]:
        """How far all rows are held, the segment that holds the last, and the rest of the reply."""
        path = self._index.path(request.namespace, Lineage(request.lineage), tokens, attachments, fields)
        held = path.held() if path is not None else 0
        if path is None or not held:
            return 0, None, _Known(runs=b"", window_parent=ROOT, provides=0)
        parent = path.covering(held)
        if parent is not None:
            self._index.touch([parent, *path.resumed_from(len(request.tokens))])
        above = path.covering(request.window_from) if 0 < request.window_from <= held else None
        known = _Known(
            runs=np.array(path.runs(held), "<u8").tobytes(), window_parent=above.id if above else ROOT,
            provides=int(path.provides(len(request.tokens))),
        )  # fmt: skip
        return held, parent, known

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

    def commit(self, request: m.Commit, fd: int, owner: Owner, *, copy: bool = False, twice: bool = False) -> m.Committed:
        """Check and take a sealed container; ``fd`` stays the caller's. With ``copy`` it is charged to
        somebody else's memory, and is copied into this process's own; with ``twice`` rows are taken
        though they lie in other pieces here already. Answers when ``ack`` is reached.

        Raises FormatError, RemoteProtocolError, UnsupportedError, RecordError, OfferAgain, TooLarge,
        Busy, ClosedError, ColdFull; then nothing changed (after ColdFull and Busy of a disk
        acknowledgement the rows are held in memory)."""
        done = False
        with _Awaited(self._index, request.ack) as awaited:
            try:
                require_served(owner.identity)
                if request.epoch != self._epoch:
                    raise OfferAgain("the store was restarted since the offer")
                anchors = self._check_anchors(request.anchors)
                total_bytes = memfd.check_sealed(fd, self._warm.ledger.budget_bytes or 1)
                self._options.faults.reached("save.received")
                arrival = arrivals.check(fd, total_bytes, request.namespace, owner.identity, request.prefill_us)
                take = self._take_copy if copy else partial(self._take, twice=twice)
                record, duplicate = take(request.reservation, arrival, owner, anchors, awaited=awaited)
                self._options.faults.reached("save.admitted")
                done = True
            finally:
                if not (done and request.more):
                    self.give_back(request.reservation)
                self._warm.reap()
            # Anchors that hang on older records are not in the transaction that stores this one.
            older = duplicate or any(anchor.position <= record.start for anchor in anchors)
            durable = self._acknowledge(awaited.records, request.ack, older and bool(anchors))
        return m.Committed(record.id, arrival.end, 0 if duplicate else total_bytes, duplicate, durable)

    def _take_copy(
        self, reservation: int, arrival: Arrival, owner: Owner, anchors: tuple[Anchor, ...], *,
        awaited: _Awaited | None = None,
    ) -> tuple[Record, bool]:  # fmt: skip
        """`_take` of a copy, unless the record is there already. The copy counts from before it is
        made."""
        with self._index.changed:
            known = self._index.records.get(arrival.header.id)
            copying = None
            if known is None or known.packed:
                parent, uid = self._index.records.get(arrival.header.parent), self._uid(arrival.header.namespace, owner)
                self._warm.ledger.use(reservation, arrival.total_bytes)
                self._warm.make_room(arrival.total_bytes, parent, uid=uid)
                copying = _Copying(self._warm, uid, arrival.total_bytes)
        if copying is None:
            return self._take(reservation, arrival, owner, anchors, awaited=awaited)
        own = -1
        try:
            self._warm.reap()
            copied = arrival.copied()
            own = copied.fd
            self._options.faults.reached("save.copied")
            return self._take(0, copied, owner, anchors, copying, awaited=awaited)
        except OSError as exc:
            raise StoreError(f"the upload could not be copied: {exc}") from exc
        finally:
            if own >= 0:
                os.close(own)
            with self._index.changed:
                copying.give_back()

    def _take(
        self, reservation: int, arrival: Arrival, owner: Owner, anchors: tuple[Anchor, ...], copying: _Copying | None = None,
        *, twice: bool = False, awaited: _Awaited | None = None,
    ) -> tuple[Record, bool]:  # fmt: skip
        with self._index.changed:
            parent, tokens, attachments = self._whole(arrival)
        arrival.check_id(tokens, attachments)
        header_id = arrival.header.id
        _check_positions(anchors, arrival.end, attachments, arrival.header.lineage)
        with self._index.changed:
            known = self._known(arrival, tokens, attachments)
            if known is None:
                if parent is not None and parent.gone:
                    raise OfferAgain("what the save builds on was evicted meanwhile")
                if not twice:
                    self._refuse_twice(arrival, tokens, attachments)
                self._warm.ledger.use(reservation, arrival.total_bytes)
                self._await_disk(arrival.total_bytes)
                room.for_tokens(self._index, self._warm, self._writer, arrival.tokens, self._options.max_tokens, parent)
                if copying is not None:
                    copying.give_back()
                self._warm.make_room(arrival.total_bytes, parent, uid=self._uid(arrival.header.namespace, owner))
                # Making room may have waited: somebody else may have saved or dropped the same.
                known = self._known(arrival, tokens, attachments)
            if known is not None:
                self._annotate(known[0], anchors)
                self.duplicates += 1
                if awaited is not None:
                    awaited.add(known)
                return known[0], True
            if parent is not None and parent.gone:
                raise OfferAgain("what the save builds on went while room was made for it")
            if header_id in self._index.records:
                raise OfferAgain("a packed copy of these rows is there, and not all that it was made of")
            record = self._admit(arrival, owner, parent, tokens, attachments)
            self._annotate(record, anchors)
            self._warm.keep_anchors(record.namespace, self._options.anchors, newest=[record])
            if self._writer is not None:
                self._writer.enqueue(record)
            if awaited is not None:
                awaited.add([record])
            self._index.changed.notify_all()
            return record, False

    def _await_disk(self, total_bytes: int) -> None:
        """Wait until so many bytes more may wait for the disk; lock held, given up meanwhile. One
        record may always. Raises Busy where the disk does not follow."""
        limit = self._options.max_dirty_bytes
        if self._writer is None or limit is None:
            return

        def fits() -> bool:
            return not self._index.dirty_bytes or self._index.dirty_bytes + total_bytes <= limit or self._warm.closing

        if not self._index.changed.wait_for(fits, self._options.busy_timeout_s):
            raise Busy(f"{self._index.dirty_bytes} bytes wait for the disk, {limit} may")

    def _uid(self, key: NamespaceKey, owner: Owner) -> int:
        """Whose share of the budget a namespace takes; lock held."""
        namespace = self._index.namespaces.get(key)
        return owner.uid if namespace is None else namespace.owner_uid

    def _admit(
        self, arrival: Arrival, owner: Owner, parent: Record | None, tokens: bytes, attachments: tuple[Attachment, ...]
    ) -> Record:
        header = arrival.header
        own = arrivals.duplicate(arrival.fd)
        namespace = self._index.namespaces.get(header.namespace)
        if namespace is None:
            namespace = Namespace(header.namespace, owner.uid, owner.share, owner.identity, self._options.clock.wall_ns())
        record = Record(
            header.id, namespace, header.lineage, arrival.start, arrival.end, arrival.total_bytes, arrival.head.payload_bytes,
            header.created_ns, header.writer, coverage=arrival.coverage, provides=arrival.provides,
            prefill_us=arrival.prefill_us,
        )  # fmt: skip
        self._index.add(record, parent, tokens, attachments)
        self._warm.admit(record, own)
        self._index.touch([record])
        self.saves += 1
        self.received_bytes += arrival.total_bytes
        return record

    def _whole(self, arrival: Arrival) -> tuple[Record | None, bytes, tuple[Attachment, ...]]:
        """The segment a container builds on, and all tokens and attachments up to its end."""
        header = arrival.header
        if isinstance(header, SegmentHeader) and header.start == 0:
            if header.parent != ROOT:
                raise FormatError("a segment that begins at 0 names a parent")
            return None, header.tokens.tobytes(), header.attachments
        parent = self._index.records.get(header.parent)
        # A record of another namespace is answered like none at all: ids can be computed, and
        # whether somebody else holds a prompt is not for this peer to know.
        if parent is None or parent.node is None or parent.namespace.key != header.namespace:
            raise OfferAgain("what the save builds on is not held")
        if parent.lineage != header.lineage:
            raise FormatError("the parent belongs to another lineage")
        if not parent.start < arrival.start <= parent.end:
            raise FormatError(f"parent [{parent.start}, {parent.end}) does not reach {arrival.start}")
        tree = parent.namespace.trees[parent.lineage]
        tokens, attachments = tree.prefix(parent.node, arrival.start)
        if any(item.start < arrival.start < item.end for item in attachments):
            raise FormatError(f"a record cannot begin at {arrival.start}, inside an attachment")
        if isinstance(header, SegmentHeader):
            return parent, tokens + header.tokens.tobytes(), (*attachments, *header.attachments)
        if attachments != header.attachments:
            raise FormatError(f"a state at {arrival.start} names other attachments than what it builds on")
        return parent, tokens, attachments

    def _known(self, arrival: Arrival, tokens: bytes, attachments: tuple[Attachment, ...]) -> list[Record] | None:
        """A record, and others beside it, that already hold all that would arrive."""
        header = arrival.header
        same = self._index.records.get(header.id)
        if same is not None and not same.packed:
            return [same]
        path = self._index.path(header.namespace, header.lineage, tokens, attachments, arrival.coverage.fields or None)
        if path is None:
            return None
        if isinstance(header, SegmentHeader):
            holds = path.holds(arrival.coverage.extents) and path.held() >= header.end
            record = path.covering(header.end) if holds else None
            # Windowed rows may lie in segments that it does not build on.
            return list(dict.fromkeys([record, *path.resumed_from(header.end)])) if record is not None else None
        state = path.providing(header.position, arrival.provides)
        return [state] if state is not None else None

    def _refuse_twice(self, arrival: Arrival, tokens: bytes, attachments: tuple[Attachment, ...]) -> None:
        """OfferAgain where somebody else saved a good part of these rows since they were offered:
        rows are stored once, and what is left to send is less."""
        header = arrival.header
        if not isinstance(header, SegmentHeader):
            return
        namespace = self._index.namespaces.get(header.namespace)
        groups = namespace.needs.groups if namespace is not None else ()
        if not any(group.whole and last for group, (_, last) in zip(groups, arrival.coverage.extents, strict=False)):
            return
        path = self._index.path(header.namespace, header.lineage, tokens, attachments, arrival.coverage.fields or None)
        held = path.held() if path is not None else 0
        if (held - header.start) * TWICE >= header.end - header.start:
            raise OfferAgain(f"rows [{header.start}, {held}) were saved by somebody else meanwhile")

    def annotate(self, request: m.Annotate) -> m.Committed:
        """Anchors for, and an acknowledgement of, what is held already. Raises OfferAgain."""
        self.give_back(request.reservation)
        anchors = self._check_anchors(request.anchors)
        length = len(request.tokens)
        attachments = check_attachments(unpack_attachments(request.attachments), length)
        _check_positions(anchors, length, attachments, Lineage(request.lineage))
        with _Awaited(self._index, request.ack) as awaited:
            with self._index.changed:
                path = self._index.path(request.namespace, Lineage(request.lineage), request.tokens.tobytes(), attachments)
                held = path.held() if path is not None else 0
                record = path.covering(held) if path is not None else None
                if path is None or record is None or held < length:
                    raise OfferAgain("what was held was evicted meanwhile")
                if request.complete and not path.resumes(length, Provides(request.provides)):
                    raise OfferAgain("of what is needed to resume there something was evicted meanwhile")
                needed = path.resumed_from(length)
                self._annotate(record, anchors)
                self._warm.keep_anchors(record.namespace, self._options.anchors, newest=needed)
                self.duplicates += 1
                awaited.add(list(dict.fromkeys([record, *needed])))
            self._warm.reap()
            durable = self._acknowledge(awaited.records, request.ack, bool(anchors))
        return m.Committed(record.id, held, 0, True, durable)

    def _annotate(self, record: Record, anchors: tuple[Anchor, ...]) -> None:
        """Hang each anchor on the segment of the chain that holds its position; lock held.

        The deepest one: what it builds on may go on past its start, with other tokens."""
        chain = [link for link in self._index.chain_of(record) if not link.is_state]
        starts = [link.start for link in chain]
        for anchor in anchors:
            link = chain[bisect_left(starts, anchor.position) - 1]
            while len(link.anchors) >= MAX_ANCHORS and (anchor.position, anchor.kind) not in link.anchors:
                del link.anchors[next(iter(link.anchors))]
            link.anchors[(anchor.position, anchor.kind)] = anchor
            self._index.touched.add(link)

    @staticmethod
    def _check_anchors(packed: bytes) -> tuple[Anchor, ...]:
        anchors = unpack_anchors(packed)
        if len(anchors) > MAX_ANCHORS:
            raise RecordError(f"{len(anchors)} anchors in one save, at most {MAX_ANCHORS} are allowed")
        return anchors

    def _acknowledge(self, records: Sequence[Record], ack: int, anchors: bool = False) -> bool:
        if ack != m.ACK_DISK:
            return all(record.cold == Cold.STORED for record in records)
        if self._writer is None:
            raise ColdFull("the cold tier is off, nothing can be acknowledged as on disk; the rows are held in memory")
        with self._index.changed:
            for record in records:
                if record.cold == Cold.ABSENT and not record.gone:
                    self._writer.enqueue(record)
            for record in records:
                self._writer.wait_durable(record, self._options.durable_timeout_s)
            if anchors:
                self._writer.carry_usage(self._options.durable_timeout_s)
        return True


def _fields(packed: bytes) -> frozenset[bytes]:
    """Digests of quantisation fields. Raises RecordError for what is no list of a sane length."""
    if len(packed) % ID_BYTES or len(packed) > MAX_FIELDS * ID_BYTES:
        raise RecordError(f"{len(packed)} bytes of field digests, expected at most {MAX_FIELDS} of {ID_BYTES} bytes")
    return frozenset(packed[at : at + ID_BYTES] for at in range(0, len(packed), ID_BYTES))


def _check_positions(
    anchors: tuple[Anchor, ...], length: int, attachments: tuple[Attachment, ...], lineage: Lineage
) -> None:  # fmt: skip
    check_shifts(anchors, lineage)
    for anchor in anchors:
        if not 0 < anchor.position <= length:
            raise RecordError(f"anchor at {anchor.position} lies outside the {length} tokens")
        if any(item.start < anchor.position < item.end for item in attachments):
            raise RecordError(f"anchor at {anchor.position} lies inside an attachment")
