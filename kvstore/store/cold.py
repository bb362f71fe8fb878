"""The cold tier: containers cut into head and 4 MiB chunks in one LMDB environment.

Chunks of one size let LMDB reuse what deletions free; metadata is written in the last
transaction of a save, so that a record that can be found is whole. Default mode throughout:
no writemap (a full disk would be a SIGBUS), synchronous commits (a commit is a promise).

**Threading:** any thread; LMDB lets one write transaction run at a time, and all of them are
short. `close` waits for calls under way: their views lie in the map it takes away.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from warmkv.kvstore import memfd
from warmkv.schema import canonical, lmdb_records
from warmkv.schema import segment as container
from warmkv.schema.errors import (
    ClosedError,
    ColdFull,
    CorruptStore,
    DigestError,
    FormatError,
    StoreError,
    StoreInUse,
    StoreTooNew,
    WarmKVError,
)
from warmkv.schema.lmdb_records import NamespaceRecord, Usage
from warmkv.schema.records import Anchor, NamespaceKey, RecordId

log = logging.getLogger(__name__)

TRANSACTION_BYTES = 64 << 20
PAGE_BYTES = 4096
#: LMDB needs free pages to delete and to find runs for chunks: the map is never fuller.
FILL = 0.8
MAP_SLACK_BYTES = 4 << 20
MIN_MAP_BYTES = 1 << 20
_CHUNK = container.CHUNK_BYTES
#: What LMDB raises for a file whose pages are not what they should be.
UNREADABLE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError, lmdb.PanicError)


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One record on its way to disk; ``fd`` is its sealed container, borrowed."""

    id: RecordId
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
    """See the module docstring. Create with `open`; `close` releases the environment and the lock."""

    def __init__(self, path: Path, lock_fd: int, wanted_bytes: int) -> None:
        self.path = path
        self.bytes_written = 0
        self._wanted_bytes = wanted_bytes
        self._lock_fd = lock_fd
        self._namespaces: set[NamespaceKey] = set()
        #: Chunks of failed writes that could not be removed either; `delete` tries again.
        self._leftover: set[RecordId] = set()
        self._calls = threading.Condition()
        self._running = 0
        map_bytes = _map_bytes(path, wanted_bytes)
        self.budget_bytes = min(wanted_bytes, int(map_bytes * FILL))
        self._env, self.suspect = _environment(path, map_bytes)
        try:
            self._db = {name: self._env.open_db(name) for name in lmdb_records.TABLES}
            self._check_format()
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def open(cls, path: Path, budget_bytes: int) -> ColdTier:
        """Lock and open the store at ``path``, creating it if need be (directory 0700, files 0600).

        Raises StoreInUse, StoreTooNew, StoreError. An environment LMDB cannot read is moved
        aside with a message and a fresh one begun."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock_fd = _lock(path / "store.lock")
        except OSError as exc:
            raise StoreError(f"store {path} cannot be opened: {exc}") from exc
        try:
            try:
                return cls(path, lock_fd, budget_bytes)
            except (*UNREADABLE, FormatError) as exc:
                _move_aside(path, str(exc))
                return cls(path, lock_fd, budget_bytes)
        except lmdb.VersionMismatchError as exc:
            _unlock(lock_fd)
            raise StoreTooNew(f"store {path} was written by another version of LMDB: {exc}") from exc
        except (lmdb.Error, OSError) as exc:
            _unlock(lock_fd)
            raise StoreError(f"store {path} cannot be opened: {exc}") from exc
        except BaseException:
            _unlock(lock_fd)
            raise

    def begin_anew(self, reason: str) -> None:
        """Move the environment aside, since it turned out unreadable, and begin a fresh one.
        Nobody else may use the tier yet. Raises StoreError."""
        self._env.close()
        try:
            _move_aside(self.path, reason)
            self.__init__(self.path, self._lock_fd, self._wanted_bytes)  # type: ignore[misc]
        except (lmdb.Error, OSError) as exc:
            raise StoreError(f"store {self.path} cannot be opened: {exc}") from exc

    def _check_format(self) -> None:
        with self._env.begin(write=True, db=self._db[b"meta"]) as txn:
            found = txn.get(b"format")
            if found is None:
                txn.put(b"format", lmdb_records.encode_format())
                return
        major, minor = lmdb_records.decode_format(bytes(found))
        if major > lmdb_records.STORE_MAJOR:
            raise StoreTooNew(
                f"store {self.path} has format {major}.{minor}, this program reads up to {lmdb_records.STORE_MAJOR}"
            )

    def close(self) -> None:
        """Close the environment and give up the lock. Idempotent."""
        with self._calls:
            lock_fd, self._lock_fd = self._lock_fd, -1
            self._calls.wait_for(lambda: not self._running)
        if lock_fd >= 0:
            self._env.close()
            _unlock(lock_fd)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """The environment stays open inside. Raises ClosedError once it is not."""
        with self._calls:
            if self._lock_fd < 0:
                raise ClosedError(f"store {self.path} is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._calls:
                self._running -= 1
                self._calls.notify_all()

    # -- writing -------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], counter: int) -> None:
        """Commit records, parents before children, in transactions of at most 64 MB; metadata of
        all of them in the last one. Raises ColdFull, and then nothing of them can be found."""
        done: list[RecordId] = []
        with self._call():
            try:
                self._write(items, counter, done)
            except BaseException as exc:
                self._leftover.update(done)
                self._remove_leftover()
                if isinstance(exc, lmdb.MapFullError) or getattr(exc, "errno", None) == errno.ENOSPC:
                    raise ColdFull(f"no room left in {self.path}: {exc}") from exc
                if isinstance(exc, (lmdb.Error, OSError, WarmKVError)):
                    raise ColdFull(f"writing to {self.path} failed: {exc}") from exc
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
                    txn.put(lmdb_records.chunk_key(item.id, index), piece, db=self._db[b"chunks"])
                    pending += len(piece)
                    self.bytes_written += len(piece)
            for item, head in zip(items, heads, strict=True):
                self._put_metadata(txn, item, head)
            txn.put(b"counter", counter.to_bytes(8, "little"), db=self._db[b"meta"])
            txn.commit()
        except BaseException:
            txn.abort()
            raise
        self._namespaces.update(item.namespace for item in items)

    def _put_metadata(self, txn: lmdb.Transaction, item: WriteItem, head: bytes) -> None:
        if item.namespace not in self._namespaces:
            txn.put(item.namespace, lmdb_records.encode_namespace(item.namespace_record), db=self._db[b"namespaces"])
        txn.put(item.id, head, db=self._db[b"segments"])
        txn.put(item.id, lmdb_records.encode_usage(item.usage), db=self._db[b"usage"])
        txn.delete(item.id, db=self._db[b"quarantine"])
        for anchor in item.anchors:
            txn.put(lmdb_records.anchor_key(item.id, anchor), lmdb_records.encode_anchor(anchor), db=self._db[b"anchors"])
        self.bytes_written += len(head)

    def write_usage(self, rows: Iterable[tuple[RecordId, Usage, tuple[Anchor, ...]]], counter: int) -> None:
        """One transaction of usage and anchors of stored records, and the recency counter."""
        try:
            with self._call(), self._env.begin(write=True) as txn:
                for id_, usage, anchors in rows:
                    txn.put(id_, lmdb_records.encode_usage(usage), db=self._db[b"usage"])
                    for anchor in anchors:
                        txn.put(lmdb_records.anchor_key(id_, anchor), lmdb_records.encode_anchor(anchor), db=self._db[b"anchors"])
                txn.put(b"counter", counter.to_bytes(8, "little"), db=self._db[b"meta"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing usage to {self.path} failed: {exc}") from exc

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Remove records: metadata in one transaction, then chunks in small ones. Raises
        ColdFull when the disk refuses; the same call may be made again."""
        if not ids and not self._leftover:
            return
        try:
            with self._call():
                with self._env.begin(write=True) as txn:
                    for id_ in ids:
                        for table in (b"segments", b"usage"):
                            txn.delete(id_, db=self._db[table])
                        for key in [key for key, _ in _under(txn, self._db[b"anchors"], id_)]:
                            txn.delete(key, db=self._db[b"anchors"])
                self._remove_chunks(ids)
                self._remove_leftover()
        except (lmdb.Error, OSError) as exc:
            raise ColdFull(f"deleting from {self.path} failed: {exc}") from exc

    def note_quarantine(self, id_: RecordId, reason: str) -> None:
        """Keep a note that a record's bytes were bad, until it is saved anew."""
        try:
            with self._call(), self._env.begin(write=True) as txn:
                txn.put(id_, canonical.encode((reason, time.time_ns())), db=self._db[b"quarantine"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing to {self.path} failed: {exc}") from exc

    def sweep(self, bad: Sequence[RecordId], empty: Sequence[NamespaceKey]) -> None:
        """At start: remove records that are not whole and namespaces that hold nothing."""
        self.delete(bad)
        try:
            with self._call(), self._env.begin(write=True) as txn:
                for key in empty:
                    txn.delete(key, db=self._db[b"namespaces"])
        except (lmdb.Error, OSError) as exc:
            raise ColdFull(f"deleting from {self.path} failed: {exc}") from exc
        self._namespaces.difference_update(empty)

    def _remove_chunks(self, ids: Sequence[RecordId]) -> None:
        for id_ in ids:
            while True:
                with self._env.begin(write=True) as txn:
                    keys = [key for key, _ in _under(txn, self._db[b"chunks"], id_, limit=256)]
                    for key in keys:
                        txn.delete(key, db=self._db[b"chunks"])
                if len(keys) < 256:
                    break

    def _remove_leftover(self) -> None:
        try:
            for id_ in sorted(self._leftover):
                self._remove_chunks([id_])
                self._leftover.discard(id_)
        except (lmdb.Error, OSError) as exc:
            log.warning("chunks of %d failed writes could not be removed yet: %s", len(self._leftover), exc)

    # -- reading -------------------------------------------------------------------------

    def load(self, id_: RecordId, total_bytes: int) -> int:
        """Copy a record into a new sealed memfd, checking head and every chunk; its descriptor,
        owned by the caller. Raises DigestError or FormatError for a record that is not whole,
        StoreError when it cannot be read just now."""
        with self._reading() as txn:
            raw = txn.get(id_, db=self._db[b"segments"])
            if raw is None:
                raise FormatError(f"segment {id_.hex()} is not in the cold tier")
            head = container.decode_head(raw)
            if head.container_bytes != total_bytes:
                raise FormatError(f"segment {id_.hex()} has {head.container_bytes} bytes, expected {total_bytes}")
            fd = memfd.create(f"warmkv:{id_.hex()}", total_bytes)
            try:
                memfd.write(fd, raw, 0)
                memfd.write(fd, bytes(head.payload_offset - head.head_bytes), head.head_bytes)
                for index in range(container.chunk_count(head.payload_bytes)):
                    piece = self._chunk(txn, id_, index, head)
                    # The copy first: it takes the page faults without the interpreter lock, and
                    # leaves the bytes in the cache for the digest.
                    memfd.write(fd, piece, head.payload_offset + index * _CHUNK)
                    if xxhash.xxh3_128_digest(piece) != head.header.digests[16 * index : 16 * index + 16]:
                        raise DigestError(f"chunk {index} of segment {id_.hex()} does not match its digest")
                memfd.seal(fd)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _chunk(self, txn: lmdb.Transaction, id_: RecordId, index: int, head: container.Head) -> memoryview:
        piece = txn.get(lmdb_records.chunk_key(id_, index), db=self._db[b"chunks"])
        expected = min(_CHUNK, head.payload_bytes - index * _CHUNK)
        if piece is None or len(piece) != expected:
            raise FormatError(
                f"chunk {index} of segment {id_.hex()} has {0 if piece is None else len(piece)} bytes, not {expected}"
            )
        return memoryview(piece)

    @contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        with self._call():
            try:
                with self._env.begin(buffers=True) as txn:
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
            raw = txn.get(id_, db=self._db[b"segments"])
            if raw is None:
                raise FormatError(f"segment {id_.hex()} is not in the cold tier")
            head = container.decode_head(raw)
            for index in range(container.chunk_count(head.payload_bytes)):
                digest = xxhash.xxh3_128_digest(self._chunk(txn, id_, index, head))
                if digest != head.header.digests[16 * index : 16 * index + 16]:
                    raise DigestError(f"chunk {index} of segment {id_.hex()} does not match its digest")
        return head

    # -- restart -------------------------------------------------------------------------

    def namespaces(self) -> Iterator[tuple[NamespaceKey, NamespaceRecord]]:
        """Namespaces on disk; unreadable ones are reported and left out. Raises CorruptStore."""
        try:
            with self._call(), self._env.begin() as txn:
                rows = [(NamespaceKey(key), value) for key, value in txn.cursor(self._db[b"namespaces"])]
        except lmdb.Error as exc:
            raise CorruptStore(str(exc)) from exc
        for key, value in rows:
            try:
                record = lmdb_records.decode_namespace(value)
            except WarmKVError as exc:
                log.warning("namespace %s on disk is not readable: %s", key.hex(), exc)
                continue
            self._namespaces.add(key)
            yield key, record

    def records(self) -> tuple[list[ColdRecord], list[RecordId]]:
        """Whole records, and ids of those to be removed: unreadable heads, missing chunks, and
        chunks left by a write that never committed its metadata.

        Raises CorruptStore where the tables themselves cannot be read, or where the file was
        too short and a record is not whole."""
        try:
            good, bad = self._records()
            if self.suspect:
                for record in good:
                    self.verify(record.head.header.id)
        except (lmdb.Error, FormatError) as exc:
            raise CorruptStore(str(exc)) from exc
        return good, bad

    def _records(self) -> tuple[list[ColdRecord], list[RecordId]]:
        good: list[ColdRecord] = []
        with self._call(), self._env.begin() as txn:
            counts = self._chunk_counts(txn)
            bad = set(counts)
            for key, value in txn.cursor(self._db[b"segments"]):
                id_ = RecordId(key)
                bad.add(id_)
                try:
                    head = container.decode_head(value)
                except FormatError as exc:
                    log.warning("segment %s on disk is not readable: %s", id_.hex(), exc)
                    continue
                if head.header.id != id_ or counts.get(id_, 0) != container.chunk_count(head.payload_bytes):
                    log.warning("segment %s on disk is not whole", id_.hex())
                    continue
                good.append(ColdRecord(head, self._usage(txn, id_), self._anchors(txn, id_)))
                bad.discard(id_)
        return good, sorted(bad)

    def _usage(self, txn: lmdb.Transaction, id_: RecordId) -> Usage:
        try:
            return lmdb_records.decode_usage(bytes(txn.get(id_, db=self._db[b"usage"]) or b""))
        except FormatError:
            return Usage(0, 0, 0)

    def _anchors(self, txn: lmdb.Transaction, id_: RecordId) -> tuple[Anchor, ...]:
        """Anchors of a record; those of an unknown kind are left out."""
        anchors = []
        for _, value in _under(txn, self._db[b"anchors"], id_):
            try:
                anchors.append(lmdb_records.decode_anchor(value))
            except FormatError as exc:
                log.warning("an anchor of segment %s on disk is not readable: %s", id_.hex(), exc)
        return tuple(anchors)

    def _chunk_counts(self, txn: lmdb.Transaction) -> dict[RecordId, int]:
        counts: dict[RecordId, int] = {}
        for key in txn.cursor(self._db[b"chunks"]).iternext(keys=True, values=False):
            id_, _ = lmdb_records.split_chunk_key(bytes(key))
            counts[id_] = counts.get(id_, 0) + 1
        return counts

    def counter(self) -> int:
        with self._call(), self._env.begin(db=self._db[b"meta"]) as txn:
            return int.from_bytes(txn.get(b"counter") or b"", "little")

    def quarantined(self) -> int:
        with self._call(), self._env.begin() as txn:
            return int(txn.stat(self._db[b"quarantine"])["entries"])

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use."""
        with self._call():
            info, stat = self._env.info(), self._env.stat()
        return {
            "map_bytes": int(info["map_size"]),
            "file_bytes": int((info["last_pgno"] + 1) * stat["psize"]),
            "readers": int(info["num_readers"]),
        }


def _environment(path: Path, map_bytes: int) -> tuple[lmdb.Environment, bool]:
    """The environment, and whether its file was shorter than its pages.

    That is no proof of damage: LMDB never writes a last page that one transaction took and gave
    back. But reading past the end would be a SIGBUS, so the file is made long enough, with zeros
    that no check mistakes for data."""
    env = lmdb.open(str(path), map_size=map_bytes, max_dbs=len(lmdb_records.TABLES), max_readers=1024, mode=0o600)
    try:
        data = path / "data.mdb"
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        short = data.stat().st_size < needed and env.info()["last_txnid"] > 0
        if short:
            os.truncate(data, needed)
        env.reader_check()
    except BaseException:
        env.close()
        raise
    return env, short


def _move_aside(path: Path, reason: str) -> None:
    aside = path / f"data.mdb.corrupt-{time.time_ns()}"
    os.rename(path / "data.mdb", aside)
    (path / "lock.mdb").unlink(missing_ok=True)
    log.error("store %s is not readable (%s); moved to %s, starting a fresh one", path, reason, aside.name)


def _map_bytes(path: Path, budget_bytes: int) -> int:
    """Budget / 0.8, as far as the disk has room beside a reserve."""
    data = path / "data.mdb"
    existing = data.stat().st_size if data.exists() else 0
    free = shutil.disk_usage(path).free
    reserve = min(256 << 20, free // 10)
    wanted = min(int(budget_bytes / FILL) + MAP_SLACK_BYTES, existing + free - reserve)
    return max(MIN_MAP_BYTES, existing, wanted) // PAGE_BYTES * PAGE_BYTES


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            raise StoreInUse(f"store {path.parent} is in use, by another process or by this one") from exc
        raise
    return fd


def _unlock(fd: int) -> None:
    """Give up the lock, also for children a fork left with a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _under(txn: lmdb.Transaction, db: Any, prefix: bytes, limit: int = 1 << 30) -> Iterator[tuple[bytes, bytes]]:
    cursor = txn.cursor(db)
    if not cursor.set_range(prefix):
        return
    for key, value in cursor:
        if not bytes(key).startswith(prefix) or limit <= 0:
            return
        limit -= 1
        yield bytes(key), bytes(value)
