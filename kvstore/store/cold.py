"""The cold tier: containers cut into head and 4 MiB chunks in one LMDB environment.

Chunks of one size let LMDB reuse what deletions free; metadata is written in the last
transaction of a save, so that a record that can be found is whole. Default mode throughout:
no writemap (a full disk would be a SIGBUS), synchronous commits (a commit is a promise).

**Threading:** any thread; LMDB lets one write transaction run at a time, and all of them are
short. `close` waits for calls under way: their views lie in the map it takes away.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from warmkv.kvstore import memfd
from warmkv.kvstore.store.environment import PAGE_BYTES, Environment
from warmkv.schema import canonical, lmdb_records
from warmkv.schema import segment as container
from warmkv.schema.errors import (
    ColdFull,
    CorruptStore,
    DigestError,
    FormatError,
    StoreError,
    WarmKVError,
)
from warmkv.schema.ids import fingerprint, namespace_key
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import Anchor, NamespaceKey, RecordId
from warmkv.schema.segment import StateHeader

log = logging.getLogger(__name__)

TRANSACTION_BYTES = 64 << 20
#: Records, and chunks, that one transaction deletes at most: it must find room for its copies
#: of tree pages and its list of freed ones.
DELETE_RECORDS = 32
_CHUNK = container.CHUNK_BYTES
#: Tables of heads, by id; no id is in both.
_HEADS = (b"segments", b"states")


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One record on its way to disk; ``fd`` is its sealed container, borrowed."""

    id: RecordId
    is_state: bool
    namespace: NamespaceKey
    namespace_record: NamespaceRecord
    fd: int
    total_bytes: int
    usage: Usage
    anchors: tuple[Anchor, ...]


@dataclass(frozen=True, slots=True)
class ColdRecord:
    """What a restart finds of one record."""

    head: container.Head
    usage: Usage
    anchors: tuple[Anchor, ...]


def stored_bytes(total_bytes: int, payload_bytes: int) -> int:
    """Pages a container takes in LMDB."""
    full, rest = divmod(payload_bytes, _CHUNK)
    pages = full * _pages(_CHUNK) + (_pages(rest) if rest else 0) + _pages(total_bytes - payload_bytes)
    return pages * PAGE_BYTES


def _pages(size: int) -> int:
    return -(-(size + 16) // PAGE_BYTES)


class ColdTier:
    """See the module docstring. Create with `open`; `close` releases environment and lock."""

    def __init__(self, env: Environment) -> None:
        self.bytes_written = 0
        self._env = env
        self._namespaces: set[NamespaceKey] = set()
        #: Chunks of failed writes that could not be removed either; `delete` tries again.
        self._leftover: set[RecordId] = set()

    @classmethod
    def open(cls, path: Path, budget_bytes: int) -> ColdTier:
        """Open or create the store in the directory ``path``. Raises as `Environment.open` does."""
        return cls(Environment.open(path, budget_bytes))

    @property
    def path(self) -> Path:
        return self._env.path

    @property
    def budget_bytes(self) -> int:
        return self._env.budget_bytes

    def keep_room_for(self, total_bytes: int) -> None:
        """What is stored stays within the budget though others took the disk's room meanwhile:
        evicting it would give nothing back to the disk."""
        self._env.budget_bytes = max(self._env.budget_bytes, min(self._env.wanted_bytes, total_bytes))

    def begin_anew(self, reason: str) -> None:
        """Move an environment that turned out unreadable aside and begin a fresh one. Nobody else
        may use the tier yet. Raises StoreError."""
        self._env.begin_anew(reason)
        self._namespaces.clear()
        self._leftover.clear()

    def close(self) -> None:
        """Close the environment and give up the lock. Idempotent."""
        self._env.close()

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use."""
        return self._env.info()

    # -- writing -------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], counter: int) -> None:
        """Commit records, parents before children, in transactions of at most 64 MB; metadata of
        all of them in the last one. Raises ColdFull, and then nothing of them can be found."""
        with self._env.call():
            try:
                self._write_or_clean_up(items, counter)
            except lmdb.Error as exc:
                # LMDB gives freed pages back only once another transaction was committed after
                # the one that freed them: what was deleted for these records counts now.
                if not self._commit_counter(counter):
                    raise self._no_room(exc) from exc
                try:
                    self._write_or_clean_up(items, counter)
                except (lmdb.Error, OSError, WarmKVError) as again:
                    raise self._no_room(again) from again
            except (OSError, WarmKVError) as exc:
                raise self._no_room(exc) from exc

    def _no_room(self, exc: Exception) -> ColdFull:
        if isinstance(exc, lmdb.MapFullError) or getattr(exc, "errno", None) == errno.ENOSPC:
            return ColdFull(f"no room left in {self.path}: {exc}")
        return ColdFull(f"writing to {self.path} failed: {exc}")

    def _commit_counter(self, counter: int) -> bool:
        try:
            with self._env.begin(write=True) as txn:
                txn.put(b"counter", counter.to_bytes(8, "little"), db=self._env.db[b"meta"])
        except lmdb.Error:
            return False
        return True

    def _write_or_clean_up(self, items: Sequence[WriteItem], counter: int) -> None:
        done: list[RecordId] = []
        try:
            self._write(items, counter, done)
        except BaseException:
            self._leftover.update(done)
            self._remove_leftover()
            raise
        self._leftover.difference_update(done)

    def _write(self, items: Sequence[WriteItem], counter: int, done: list[RecordId]) -> None:
        heads: list[bytes] = []
        txn = self._env.begin(write=True)
        pending = 0
        try:
            for item in items:
                done.append(item.id)
                view = memoryview(memfd.map_private(item.fd, item.total_bytes))
                size = container.head_size(bytes(view[: container.PREAMBLE.size]))
                heads.append(bytes(view[:size]))
                payload = view[container.align(size, container.PAYLOAD_ALIGNMENT) :]
                for index, at in enumerate(range(0, len(payload), _CHUNK)):
                    piece = payload[at : at + _CHUNK]
                    if pending and pending + len(piece) > TRANSACTION_BYTES:
                        txn.commit()
                        txn, pending = self._env.begin(write=True), 0
                    txn.put(lmdb_records.chunk_key(item.id, index), piece, db=self._env.db[b"chunks"])
                    pending += len(piece)
                    self.bytes_written += len(piece)
            for item, head in zip(items, heads, strict=True):
                self._put_metadata(txn, item, head)
            txn.put(b"counter", counter.to_bytes(8, "little"), db=self._env.db[b"meta"])
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        self._namespaces.update(item.namespace for item in items)

    def _put_metadata(self, txn: lmdb.Transaction, item: WriteItem, head: bytes) -> None:
        if item.namespace not in self._namespaces:
            txn.put(item.namespace, lmdb_records.encode_namespace(item.namespace_record), db=self._env.db[b"namespaces"])
        txn.put(item.id, head, db=self._env.db[b"states" if item.is_state else b"segments"])
        txn.put(item.id, lmdb_records.encode_usage(item.usage), db=self._env.db[b"usage"])
        txn.delete(item.id, db=self._env.db[b"quarantine"])
        for anchor in item.anchors:
            self._put_anchor(txn, item.id, anchor)
        self.bytes_written += len(head)

    def _put_anchor(self, txn: lmdb.Transaction, id_: RecordId, anchor: Anchor) -> None:
        txn.put(lmdb_records.anchor_key(id_, anchor), lmdb_records.encode_anchor(anchor), db=self._env.db[b"anchors"])

    def write_usage(self, rows: Iterable[tuple[RecordId, Usage, tuple[Anchor, ...]]], counter: int) -> None:
        """One transaction of usage and anchors of stored records, and the recency counter."""
        try:
            with self._env.call(), self._env.begin(write=True) as txn:
                for id_, usage, anchors in rows:
                    txn.put(id_, lmdb_records.encode_usage(usage), db=self._env.db[b"usage"])
                    for anchor in anchors:
                        self._put_anchor(txn, id_, anchor)
                txn.put(b"counter", counter.to_bytes(8, "little"), db=self._env.db[b"meta"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing usage to {self.path} failed: {exc}") from exc

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Remove records, of each its metadata before its chunks. Raises ColdFull when the disk
        refuses; the same call may be made again."""
        try:
            with self._env.call():
                self._remove(ids)
                self._remove_leftover()
        except (lmdb.Error, OSError) as exc:
            raise ColdFull(f"deleting from {self.path} failed: {exc}") from exc

    def note_quarantine(self, id_: RecordId, reason: str) -> None:
        """Keep a note that a record's bytes were bad, until it is saved anew."""
        try:
            with self._env.call(), self._env.begin(write=True) as txn:
                txn.put(id_, canonical.encode((reason, time.time_ns())), db=self._env.db[b"quarantine"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing to {self.path} failed: {exc}") from exc

    def sweep(self, bad: Sequence[RecordId], empty: Sequence[NamespaceKey]) -> None:
        """At start: remove records that are not whole and namespaces that hold nothing."""
        self.delete(bad)
        try:
            with self._env.call(), self._env.begin(write=True) as txn:
                for key in empty:
                    txn.delete(key, db=self._env.db[b"namespaces"])
        except (lmdb.Error, OSError) as exc:
            raise ColdFull(f"deleting from {self.path} failed: {exc}") from exc
        self._namespaces.difference_update(empty)

    def _remove(self, ids: Iterable[RecordId]) -> None:
        """Remove records in transactions of `DELETE_RECORDS`, of fewer where the disk is too full
        for those: each needs free pages for its copies of tree pages. What one alone cannot find
        comes out of the reserve."""
        pending, size, released = deque(ids), DELETE_RECORDS, False
        try:
            while pending:
                batch = list(islice(pending, size))
                try:
                    self._remove_metadata(batch)
                    self._remove_chunks(batch, size)
                except lmdb.Error:
                    if size > 1:
                        size //= 2
                    elif released or not (released := self._env.release_reserve()):
                        raise
                    continue
                for id_ in batch:
                    pending.popleft()
                    self._leftover.discard(id_)
                size = min(2 * size, DELETE_RECORDS)
        finally:
            if released:
                self._env.hold_reserve()

    def _remove_metadata(self, ids: Sequence[RecordId]) -> None:
        with self._env.begin(write=True) as txn:
            for id_ in ids:
                for table in (*_HEADS, b"usage"):
                    txn.delete(id_, db=self._env.db[table])
                for key in _keys_under(txn, self._env.db[b"anchors"], id_):
                    txn.delete(key, db=self._env.db[b"anchors"])

    def _remove_chunks(self, ids: Sequence[RecordId], limit: int) -> None:
        """Remove the chunks of ``ids``, ``limit`` a transaction."""
        pending = list(ids)
        while pending:
            room = limit
            with self._env.begin(write=True) as txn:
                while pending and room:
                    keys = _keys_under(txn, self._env.db[b"chunks"], pending[-1], limit=room)
                    for key in keys:
                        txn.delete(key, db=self._env.db[b"chunks"])
                    if len(keys) < room:
                        pending.pop()
                    room -= len(keys)

    def _remove_leftover(self) -> None:
        try:
            self._remove(sorted(self._leftover))
        except (lmdb.Error, OSError) as exc:
            log.warning("chunks of %d failed writes could not be removed yet: %s", len(self._leftover), exc)

    # -- reading -------------------------------------------------------------------------

    def load(self, id_: RecordId, total_bytes: int) -> int:
        """Copy a record into a new sealed memfd, checking head and every chunk; its descriptor,
        owned by the caller. Raises DigestError or FormatError for a record that is not whole,
        StoreError when it cannot be read just now."""
        with self._reading() as txn:
            raw, head = self._head(txn, id_)
            if head.container_bytes != total_bytes:
                raise FormatError(f"record {id_.hex()} has {head.container_bytes} bytes, expected {total_bytes}")
            fd = memfd.create(f"warmkv:{id_.hex()}", total_bytes)
            try:
                memfd.write(fd, raw, 0)
                memfd.write(fd, bytes(head.payload_offset - head.head_bytes), head.head_bytes)
                self._copy(txn, id_, head, lambda at, piece: memfd.write(fd, piece, head.payload_offset + at))
                memfd.seal(fd)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def read(self, id_: RecordId, place: Callable[[container.Header, int, memoryview], None]) -> None:
        """Hand the payload of a record to ``place`` in pieces, each with its offset, checking head
        and every chunk; a chunk is checked after it was handed over. Raises as `load` does."""
        with self._reading() as txn:
            _, head = self._head(txn, id_)
            self._copy(txn, id_, head, partial(place, head.header))

    def _copy(self, txn: lmdb.Transaction, id_: RecordId, head: container.Head, place: Callable[[int, memoryview], None]) -> None:
        for index in range(container.chunk_count(head.payload_bytes)):
            piece = self._chunk(txn, id_, index, head)
            # The copy first: it takes the page faults without the interpreter lock, and leaves
            # the bytes in the cache for the digest.
            place(index * _CHUNK, piece)
            if xxhash.xxh3_128_digest(piece) != head.header.digests[16 * index : 16 * index + 16]:
                raise DigestError(f"chunk {index} of record {id_.hex()} does not match its digest")

    def _head(self, txn: lmdb.Transaction, id_: RecordId) -> tuple[memoryview, container.Head]:
        raw = next((found for table in _HEADS if (found := txn.get(id_, db=self._env.db[table])) is not None), None)
        if raw is None:
            raise FormatError(f"segment {id_.hex()} is not in the cold tier")
        head = container.decode_head(raw)
        if head.header.id != id_:
            raise FormatError(f"the head of segment {id_.hex()} is that of {head.header.id.hex()}")
        return memoryview(raw), head

    def _chunk(self, txn: lmdb.Transaction, id_: RecordId, index: int, head: container.Head) -> memoryview:
        piece = txn.get(lmdb_records.chunk_key(id_, index), db=self._env.db[b"chunks"])
        expected = min(_CHUNK, head.payload_bytes - index * _CHUNK)
        if piece is None or len(piece) != expected:
            raise FormatError(
                f"chunk {index} of segment {id_.hex()} has {0 if piece is None else len(piece)} bytes, not {expected}"
            )
        return memoryview(piece)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        with self._env.call():
            try:
                with self._env.begin_views() as txn:
                    yield txn
            except (lmdb.CorruptedError, lmdb.PageNotFoundError) as exc:
                raise FormatError(f"pages of {self.path} are not readable: {exc}") from exc
            except lmdb.ReadersFullError as exc:
                self._env.reader_check()
                raise StoreError(f"no reader slot left in {self.path}") from exc
            except lmdb.Error as exc:
                raise StoreError(f"reading from {self.path} failed: {exc}") from exc

    def verify(self, id_: RecordId) -> container.Head:
        """Check head and payload of a record without copying it. Raises as `load` does."""
        with self._reading() as txn:
            _, head = self._head(txn, id_)
            for index in range(container.chunk_count(head.payload_bytes)):
                digest = xxhash.xxh3_128_digest(self._chunk(txn, id_, index, head))
                if digest != head.header.digests[16 * index : 16 * index + 16]:
                    raise DigestError(f"chunk {index} of segment {id_.hex()} does not match its digest")
        return head

    # -- restart -------------------------------------------------------------------------

    def namespaces(self) -> Iterator[tuple[NamespaceKey, NamespaceRecord]]:
        """Namespaces on disk; unreadable ones are reported and left out. Raises CorruptStore."""
        try:
            with self._env.call(), self._env.begin() as txn:
                rows = [(NamespaceKey(key), value) for key, value in txn.cursor(self._env.db[b"namespaces"])]
        except lmdb.Error as exc:
            raise CorruptStore(str(exc)) from exc
        for key, value in rows:
            try:
                record = lmdb_records.decode_namespace(value)
                if namespace_key(record.owner_uid, record.share, fingerprint(record.identity)) != key:
                    raise FormatError("its owner and identity belong to another key")
            except WarmKVError as exc:
                log.warning("namespace %s on disk is not readable: %s", key.hex(), exc)
                continue
            self._namespaces.add(key)
            yield key, record

    def records(self, take: Callable[[ColdRecord], None]) -> list[RecordId]:
        """Hand every whole record to ``take``, one at a time: their heads together would take many
        times the memory of what is made of them. Ids of those to be removed: unreadable heads,
        missing chunks, and chunks left by a write that never committed its metadata.

        Raises CorruptStore where the tables themselves cannot be read."""
        try:
            return self._records(take)
        except (lmdb.Error, FormatError) as exc:
            raise CorruptStore(str(exc)) from exc

    def _records(self, take: Callable[[ColdRecord], None]) -> list[RecordId]:
        with self._env.call(), self._env.begin() as txn:
            counts = self._chunk_counts(txn)
            bad = set(counts)
            for table in _HEADS:
                for key, value in txn.cursor(self._env.db[table]):
                    id_ = RecordId(key)
                    bad.add(id_)
                    try:
                        head = container.decode_head(value)
                    except FormatError as exc:
                        log.warning("record %s on disk is not readable: %s", id_.hex(), exc)
                        continue
                    whole = counts.get(id_, 0) == container.chunk_count(head.payload_bytes)
                    if not whole or head.header.id != id_ or isinstance(head.header, StateHeader) != (table == b"states"):
                        log.warning("record %s on disk is not whole", id_.hex())
                        continue
                    take(ColdRecord(head, self._usage(txn, id_), self._anchors(txn, id_)))
                    bad.discard(id_)
        return sorted(bad)

    def _usage(self, txn: lmdb.Transaction, id_: RecordId) -> Usage:
        try:
            return lmdb_records.decode_usage(bytes(txn.get(id_, db=self._env.db[b"usage"]) or b""))
        except FormatError:
            return Usage(0, 0, 0)

    def _anchors(self, txn: lmdb.Transaction, id_: RecordId) -> tuple[Anchor, ...]:
        """Anchors of a record; those of an unknown kind are left out."""
        anchors = []
        for key in _keys_under(txn, self._env.db[b"anchors"], id_):
            try:
                anchors.append(lmdb_records.decode_anchor(bytes(txn.get(key, db=self._env.db[b"anchors"]) or b"")))
            except FormatError as exc:
                log.warning("an anchor of segment %s on disk is not readable: %s", id_.hex(), exc)
        return tuple(anchors)

    def _chunk_counts(self, txn: lmdb.Transaction) -> dict[RecordId, int]:
        counts: dict[RecordId, int] = {}
        for key in txn.cursor(self._env.db[b"chunks"]).iternext(keys=True, values=False):
            id_, _ = lmdb_records.split_chunk_key(bytes(key))
            counts[id_] = counts.get(id_, 0) + 1
        return counts

    def counter(self) -> int:
        with self._env.call(), self._env.begin(db=self._env.db[b"meta"]) as txn:
            return int.from_bytes(txn.get(b"counter") or b"", "little")

    def quarantined(self) -> int:
        with self._reading() as txn:
            return int(txn.stat(self._env.db[b"quarantine"])["entries"])


def _keys_under(txn: lmdb.Transaction, db: Any, prefix: bytes, limit: int = 1 << 30) -> list[bytes]:
    """Up to ``limit`` keys that begin with ``prefix``; their values are not read."""
    cursor = txn.cursor(db)
    if not cursor.set_range(prefix):
        return []
    keys = map(bytes, cursor.iternext(keys=True, values=False))
    return list(takewhile(lambda key: key.startswith(prefix), islice(keys, limit)))
