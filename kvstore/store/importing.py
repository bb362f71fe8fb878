"""Import: snapshot packs and `.kvcache` files become records of the importing user.

Nothing in a file is believed. A record is entered only once its digest was compared, and then by
the way every commit goes, with all its checks. Ids depend on whose namespace it is, so containers
get new heads; payloads and their digests stay as they are. A damaged file raises, and neither the
record at hand nor one behind it is entered; what came before stays, and importing again adds the
rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from warmkv.kvstore import memfd
from warmkv.kvstore.store import kvcache_import, landing
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.exporting import require_file
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.store.intake import Owner
from warmkv.schema import ids, kvcache_file
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import Busy, ClosedError, ColdFull, FormatError, OfferAgain, StoreError, TooLarge
from warmkv.schema.identity import Identity
from warmkv.schema.pack_file import PackedRecord, PackReader
from warmkv.schema.records import ROOT, Attachment, RecordId, coverage, pack_anchors
from warmkv.schema.segment import SegmentHeader

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

#: One pack brings; what each was is remembered until its end.
MAX_RECORDS = 1 << 20
#: Of the reasons why records were left out, so many are told.
MAX_REASONS = 20
#: What budgets, or others who evict meanwhile, do to one record and what builds on it.
_REFUSALS = (Busy, ColdFull, OfferAgain, TooLarge)


@dataclass(frozen=True, slots=True)
class ImportResult:
    """``records`` entered with ``total_bytes``, ``duplicates`` that were there already, ``refused``
    for want of room, with the first few ``reasons``."""

    records: int
    duplicates: int
    total_bytes: int
    refused: int = 0
    reasons: tuple[str, ...] = ()


def import_file(engine: Engine, path: Path, uid: int, share: str = "", *, durable: bool = False) -> ImportResult:
    """Import the file ``path`` for user ``uid``, into a share that user may write or its own
    namespaces. By its name it is a `.kvcache` file, described by a `.toml` beside it, or a pack.
    With ``durable`` what it holds is on disk when this returns, where there is a disk.

    Raises FormatError and DigestError for a damaged file, AccessRefused, UnsupportedError,
    StoreError where it cannot be read; ColdFull and Busy where the disk did not take it, and then it
    is held in memory."""
    access = Access(uid, lambda: engine.options.shares)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc
    try:
        if path.suffix == kvcache_file.SUFFIX:
            done = kvcache_import.import_kvcache(engine, access, fd, kvcache_import.sidecar_of(path), durable=durable)
            return ImportResult(done.records, done.duplicates, done.total_bytes)
        return import_pack(engine, access, fd, share, durable=durable)
    finally:
        os.close(fd)


def import_pack(engine: Engine, access: Access, fd: int, share: str = "", *, durable: bool = False) -> ImportResult:
    """Import the pack in the regular file ``fd``, borrowed. As `import_file`."""
    total_bytes = require_file(fd, os.O_RDONLY)
    access.require_writable_share(share)
    reader = PackReader(_Source(fd).read, total_bytes)
    importer = _Importer(engine, Owner(access.uid, share, Identity.from_canonical(reader.identity)))
    for number, packed in enumerate(reader.records()):
        if number >= MAX_RECORDS:
            raise FormatError(f"more than {MAX_RECORDS} records in one pack")
        if not engine.serving:
            raise ClosedError("the store was closed while a pack was read")
        importer.take(packed)
    if durable:
        importer.await_disk()
    return importer.result()


class _Source:
    """Reads a file front to back without its shared position."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            try:
                part = os.pread(self._fd, size, self._at)
            except OSError as exc:
                raise StoreError(f"the file cannot be read: {exc.strerror}") from exc
            if not part:
                break
            parts.append(part)
            self._at, size = self._at + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(slots=True)
class _Arriving:
    """A container being read: its head, and what of it came with the head."""

    head: container.Head
    started: bytes
    rest: Iterator[bytes]

    def payload(self) -> Iterator[bytes]:
        """The payload in pieces; ends only if the record's digest was right."""
        skip = self.head.payload_offset
        for piece in chain((self.started,), self.rest):
            if skip < len(piece):
                yield piece[skip:]
            skip = max(0, skip - len(piece))

    def drain(self) -> None:
        for _ in self.rest:
            pass


class _Importer:
    """Enters the records of one pack."""

    def __init__(self, engine: Engine, owner: Owner) -> None:
        self.records = self.duplicates = self.total_bytes = self.refused = 0
        self.reasons: list[str] = []
        #: By id in the pack, what holds its rows here; None where it was refused.
        self.held: dict[RecordId, Record | None] = {}
        self.engine = engine
        self.owner = owner
        self._key = ids.namespace_key(owner.uid, owner.share, ids.fingerprint(owner.identity))

    def result(self) -> ImportResult:
        return ImportResult(self.records, self.duplicates, self.total_bytes, self.refused, tuple(self.reasons))

    def await_disk(self) -> None:
        """Until what was entered, and is not evicted again, is committed. Raises ColdFull, Busy,
        ClosedError."""
        engine, writer = self.engine, self.engine.writer
        if writer is None:
            return
        for record in {item for item in self.held.values() if item is not None}:
            with engine.index.changed:
                if record.cold == Cold.ABSENT and not record.gone:
                    writer.enqueue(record)
                if not record.gone:
                    writer.wait_durable(record, engine.options.durable_timeout_s)

    def take(self, packed: PackedRecord) -> None:
        """Enter one record. Raises FormatError, DigestError, UnsupportedError."""
        arriving = _begin(packed)
        theirs = arriving.head.header
        try:
            header = self._renamed(theirs)
            if self._holds(header.id):
                arriving.drain()
                self.held[theirs.id] = self.engine.index.records.get(header.id)
                self.duplicates += 1
                return
            self.held[theirs.id] = self._enter(arriving, header, packed)
        except _REFUSALS as exc:
            arriving.drain()
            self.held[theirs.id] = None
            self.refused += 1
            if len(self.reasons) < MAX_REASONS:
                self.reasons.append(f"record {theirs.id.hex()}: {exc}")

    def _renamed(self, theirs: container.Header) -> container.Header:
        """The header as it must be here: namespace, parent and id. Raises OfferAgain where what it
        builds on is not held."""
        with self.engine.index.changed:
            parent = self._parent(theirs)
            tokens: bytes = b""
            attachments: tuple[Attachment, ...] = ()
            if parent is not None:
                start = theirs.start if isinstance(theirs, SegmentHeader) else theirs.position
                assert parent.node is not None
                tokens, attachments = parent.namespace.trees[parent.lineage].prefix(parent.node, start)
            parent_id = parent.id if parent is not None else ROOT
        about = (self._key, theirs.lineage)
        covered = coverage(theirs.planes)
        if isinstance(theirs, SegmentHeader):
            whole = np.frombuffer(tokens + theirs.tokens.tobytes(), "<u4")
            every: tuple[Attachment, ...] = (*attachments, *theirs.attachments)
            id_ = ids.segment_id(*about, theirs.start, covered, every, whole)
        else:
            id_ = ids.state_id(*about, covered, attachments, np.frombuffer(tokens, "<u4"))
        return replace(theirs, id=id_, namespace=self._key, parent=parent_id)

    def _parent(self, theirs: container.Header) -> Record | None:
        """What a record builds on, as it is held here: perhaps another record with the same rows.
        The index lock is held."""
        if theirs.parent == ROOT:
            return None
        if theirs.parent not in self.held:
            raise FormatError(f"record {theirs.id.hex()} builds on {theirs.parent.hex()}, which does not come before it")
        start = theirs.start if isinstance(theirs, SegmentHeader) else theirs.position
        parent = self.held[theirs.parent]
        while parent is not None and not parent.gone and not parent.start < start <= parent.end:
            parent = parent.parent
        if parent is None or parent.gone or parent.node is None:
            raise OfferAgain("what it builds on was refused, or evicted again")
        return parent

    def _holds(self, id_: RecordId) -> bool:
        with self.engine.index.changed:
            found = self.engine.index.records.get(id_)
            return found is not None and not found.packed

    def _enter(self, arriving: _Arriving, header: container.Header, packed: PackedRecord) -> Record | None:
        payload_bytes = arriving.head.payload_bytes
        raw = container.encode_head(header, payload_bytes)
        offset = container.align(len(raw), container.PAYLOAD_ALIGNMENT)
        total_bytes = offset + payload_bytes
        with landing.room(self.engine, total_bytes, self.owner.uid, self._key, header.parent) as reservation:
            fd = memfd.create(f"warmkv:{header.id.hex()}", total_bytes)
            try:
                memfd.write(fd, raw + bytes(offset - len(raw)), 0)
                for piece in arriving.payload():
                    memfd.write(fd, piece, offset)
                    offset += len(piece)
                memfd.seal(fd)
                about = (self._key, self.engine.epoch, reservation)
                return self._commit(m.Commit(*about, anchors=pack_anchors(packed.anchors), prefill_us=packed.prefill_us), fd)
            finally:
                os.close(fd)

    def _commit(self, request: m.Commit, fd: int) -> Record | None:
        done = self.engine.intake.commit(request, fd, self.owner, twice=True)
        if done.duplicate:
            self.duplicates += 1
        else:
            self.records += 1
            self.total_bytes += done.stored_bytes
        with self.engine.index.changed:
            return self.engine.index.records.get(done.id)


def _begin(packed: PackedRecord) -> _Arriving:
    """Read a container's head. Raises FormatError."""
    started = next(packed.pieces)
    size = container.head_size(started[: container.PREAMBLE.size])
    if size > packed.container_bytes:
        raise FormatError(f"a head of {size} bytes in a container of {packed.container_bytes}")
    while len(started) < size:
        started += next(packed.pieces)
    return _Arriving(container.decode_head(started, packed.container_bytes), started, packed.pieces)
