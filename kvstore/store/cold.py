"""The cold tier: containers cut into head and 4 MiB chunks in one LMDB environment.

Chunks of one size let LMDB reuse what deletions free; metadata is written in the last
transaction of a save, so that a record that can be found is whole. Default mode throughout:
no writemap (a full disk would be a SIGBUS), synchronous commits (a commit is a promise).

**Threading:** any thread; LMDB lets one write transaction run at a time, and all of them are short.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import xxhash

from warmkv.kvstore import memfd
from warmkv.schema import canonical, lmdb_records
from warmkv.schema import segment as container
from warmkv.schema.errors import ColdFull, CorruptStore, DigestError, FormatError, StoreError, StoreInUse, StoreTooNew
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

    def __init__(self, path: Path, env: lmdb.Environment, lock_fd: int, budget_bytes: int) -> None:
        self.path = path
        self.budget_bytes = budget_bytes
        self.bytes_written = 0
        self._env = env
        self._lock_fd = lock_fd
        self._db = {name: env.open_db(name) for name in lmdb_records.TABLES}
        self._namespaces: set[NamespaceKey] = set()

    @classmethod
    def open(cls, path: Path, budget_bytes: int) -> ColdTier:
        """Lock and open the store at ``path``, creating it if need be (directory 0700, files 0600).

        Raises StoreInUse, StoreTooNew, StoreError. An environment LMDB cannot read is moved
        aside with a message and a fresh one begun."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = _lock(path / "store.lock")
        try:
            tier = cls._open_environment(path, lock_fd, budget_bytes)
        except BaseException:
            os.close(lock_fd)
            raise
        return tier

    @classmethod
    def _open_environment(cls, path: Path, lock_fd: int, budget_bytes: int) -> ColdTier:
        map_bytes = _map_bytes(path, budget_bytes)
        try:
            env = _environment(path, map_bytes)
        except (CorruptStore, lmdb.InvalidError, lmdb.CorruptedError, lmdb.VersionMismatchError, lmdb.PanicError) as exc:
            aside = path / f"data.mdb.corrupt-{time.time_ns()}"
            os.rename(path / "data.mdb", aside)
            (path / "lock.mdb").unlink(missing_ok=True)
            log.error("store %s is not readable (%s); moved to %s, starting a fresh one", path, exc, aside.name)
            env = _environment(path, map_bytes)
        except lmdb.Error as exc:
            raise StoreError(f"store {path} cannot be opened: {exc}") from exc
        try:
            tier = cls(path, env, lock_fd, min(budget_bytes, int(map_bytes * FILL)))
            tier._check_format()
        except BaseException:
            env.close()
            raise
        return tier

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
        if self._lock_fd >= 0:
            self._env.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- writing -------------------------------------------------------------------------

    def write(self, items: Sequence[WriteItem], counter: int) -> None:
        """Commit records, parents before children, in transactions of at most 64 MB; metadata of
        all of them in the last one. Raises ColdFull, and then nothing of them can be found."""
        done: list[RecordId] = []
        try:
            self._write(items, counter, done)
        except (lmdb.MapFullError, lmdb.DiskError, lmdb.TxnFullError, lmdb.Error, OSError) as exc:
            self._remove_chunks(done)
            if isinstance(exc, lmdb.MapFullError) or getattr(exc, "errno", None) == errno.ENOSPC:
                raise ColdFull(f"no room left in {self.path}: {exc}") from exc
            raise ColdFull(f"writing to {self.path} failed: {exc}") from exc

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
            with self._env.begin(write=True) as txn:
                for id_, usage, anchors in rows:
                    txn.put(id_, lmdb_records.encode_usage(usage), db=self._db[b"usage"])
                    for anchor in anchors:
                        txn.put(lmdb_records.anchor_key(id_, anchor), lmdb_records.encode_anchor(anchor), db=self._db[b"anchors"])
                txn.put(b"counter", counter.to_bytes(8, "little"), db=self._db[b"meta"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing usage to {self.path} failed: {exc}") from exc

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Remove records: metadata in one transaction, then chunks in small ones."""
        if not ids:
            return
        with self._env.begin(write=True) as txn:
            for id_ in ids:
                for table in (b"segments", b"usage"):
                    txn.delete(id_, db=self._db[table])
                for key in [key for key, _ in _under(txn, self._db[b"anchors"], id_)]:
                    txn.delete(key, db=self._db[b"anchors"])
        self._remove_chunks(ids)

    def note_quarantine(self, id_: RecordId, reason: str) -> None:
        """Keep a note that a record's bytes were bad, until it is saved anew."""
        try:
            with self._env.begin(write=True) as txn:
                txn.put(id_, canonical.encode((reason, time.time_ns())), db=self._db[b"quarantine"])
        except lmdb.Error as exc:
            raise ColdFull(f"writing to {self.path} failed: {exc}") from exc

    def sweep(self, bad: Sequence[RecordId], empty: Sequence[NamespaceKey]) -> None:
        """At start: remove records that are not whole and namespaces that hold nothing."""
        self.delete(bad)
        if empty:
            with self._env.begin(write=True) as txn:
                for key in empty:
                    txn.delete(key, db=self._db[b"namespaces"])
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

    # -- reading -------------------------------------------------------------------------

    def load(self, id_: RecordId, total_bytes: int) -> int:
        """Copy a record into a new sealed memfd, checking head and every chunk; its descriptor,
        owned by the caller. Raises DigestError or FormatError for a record that is not whole."""
        with self._env.begin(buffers=True) as txn:
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

    def verify(self, id_: RecordId) -> container.Head:
        """Check head and payload of a record without copying it. Raises as `load` does."""
        with self._env.begin(buffers=True) as txn:
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
        """Namespaces on disk; unreadable ones are reported and left out."""
        with self._env.begin() as txn:
            for key, value in txn.cursor(self._db[b"namespaces"]):
                try:
                    record = lmdb_records.decode_namespace(value)
                except StoreError:
                    raise
                except Exception as exc:  # noqa: BLE001 - anything unreadable is skipped and said
                    log.warning("namespace %s on disk is not readable: %s", key.hex(), exc)
                    continue
                self._namespaces.add(NamespaceKey(key))
                yield NamespaceKey(key), record

    def records(self) -> tuple[list[ColdRecord], list[RecordId]]:
        """Whole records, and ids of those to be removed: unreadable heads, missing chunks, and
        chunks left by a write that never committed its metadata."""
        good: list[ColdRecord] = []
        with self._env.begin() as txn:
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
                raw = txn.get(id_, db=self._db[b"usage"])
                usage = lmdb_records.decode_usage(raw) if raw else Usage(0, 0, 0)
                anchors = tuple(lmdb_records.decode_anchor(item) for _, item in _under(txn, self._db[b"anchors"], id_))
                good.append(ColdRecord(head, usage, anchors))
                bad.discard(id_)
        return good, sorted(bad)

    def _chunk_counts(self, txn: lmdb.Transaction) -> dict[RecordId, int]:
        counts: dict[RecordId, int] = {}
        for key in txn.cursor(self._db[b"chunks"]).iternext(keys=True, values=False):
            id_, _ = lmdb_records.split_chunk_key(bytes(key))
            counts[id_] = counts.get(id_, 0) + 1
        return counts

    def counter(self) -> int:
        with self._env.begin(db=self._db[b"meta"]) as txn:
            return int.from_bytes(txn.get(b"counter") or b"", "little")

    def quarantined(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._db[b"quarantine"])["entries"])

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use."""
        info, stat = self._env.info(), self._env.stat()
        return {
            "map_bytes": int(info["map_size"]),
            "file_bytes": int((info["last_pgno"] + 1) * stat["psize"]),
            "readers": int(info["num_readers"]),
        }


def _environment(path: Path, map_bytes: int) -> lmdb.Environment:
    env = lmdb.open(str(path), map_size=map_bytes, max_dbs=len(lmdb_records.TABLES), max_readers=1024, mode=0o600)
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    actual = (path / "data.mdb").stat().st_size
    if actual < needed and env.info()["last_txnid"] > 0:
        # Reading past the end of the file would be a SIGBUS, not an error.
        env.close()
        raise CorruptStore(f"data file has {actual} bytes, its pages end at {needed}")
    env.reader_check()
    return env


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
    except OSError as exc:
        os.close(fd)
        raise StoreInUse(f"store {path.parent} is in use by another process") from exc
    return fd


def _under(txn: lmdb.Transaction, db: Any, prefix: bytes, limit: int = 1 << 30) -> Iterator[tuple[bytes, bytes]]:
    cursor = txn.cursor(db)
    if not cursor.set_range(prefix):
        return
    for key, value in cursor:
        if not bytes(key).startswith(prefix) or limit <= 0:
            return
        limit -= 1
        yield bytes(key), bytes(value)
