"""The LMDB environment of a store: its directory, its lock, its life.

Opening takes the store's lock, sizes the map, checks the format and moves an unreadable
environment aside. Closing waits for calls under way: their views lie in the map it takes away.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from warmkv.kvstore.store.pages import check_pages
from warmkv.schema import lmdb_records
from warmkv.schema.errors import ClosedError, FormatError, StoreError, StoreInUse, StoreTooNew

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
#: LMDB needs free pages to delete and to find runs for chunks: the map is never fuller.
FILL = 0.8
MAP_SLACK_BYTES = 4 << 20
MIN_MAP_BYTES = 1 << 20
MAX_READERS = 1024
#: A slot is a cache line; the table's head takes less than a page.
READER_TABLE_BYTES = 64 * MAX_READERS + PAGE_BYTES
#: Deleting one record takes about ten pages; the first of these that the disk has is held.
RESERVE_BYTES = (256 << 10, 128 << 10, 64 << 10)
#: What LMDB raises for a file whose pages are not what they should be.
UNREADABLE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError, lmdb.PanicError)


class Environment:
    """An open environment with its tables in ``db``; ``budget_bytes`` is what of the wanted budget
    the map has room for. **Threading:** any thread, each use inside `call`."""

    def __init__(self, path: Path, lock_fd: int, wanted_bytes: int) -> None:
        self.path = path
        self.wanted_bytes = wanted_bytes
        self._lock_fd = lock_fd
        self._calls = threading.Condition()
        self._running = 0
        self._enter()

    def _enter(self) -> None:
        """Open the files below ``path``."""
        map_bytes = _map_bytes(self.path, self.wanted_bytes)
        self.budget_bytes = min(self.wanted_bytes, int(map_bytes * FILL))
        self._env = _environment(self.path, map_bytes)
        try:
            # A store of a newer format is left as it is: its tables are not ours to create.
            self.db: dict[bytes, Any] = {b"meta": self._env.open_db(b"meta")}
            self._check_format()
            self.db |= {name: self._env.open_db(name) for name in lmdb_records.TABLES}
            self.hold_reserve()
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def open(cls, path: Path, wanted_bytes: int) -> Environment:
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
                return cls(path, lock_fd, wanted_bytes)
            except (*UNREADABLE, FormatError) as exc:
                _move_aside(path, str(exc))
                return cls(path, lock_fd, wanted_bytes)
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
        """Move the files aside and begin fresh ones. Nobody else may use the environment yet.
        Raises StoreError."""
        self._env.close()
        try:
            _move_aside(self.path, reason)
            self._enter()
        except (lmdb.Error, OSError) as exc:
            raise StoreError(f"store {self.path} cannot be opened: {exc}") from exc

    def _check_format(self) -> None:
        with self._env.begin(write=True, db=self.db[b"meta"]) as txn:
            found = txn.get(b"format")
            if found is None:
                txn.put(b"format", lmdb_records.encode_format())
                return
        major, minor = lmdb_records.decode_format(bytes(found))
        if major > lmdb_records.STORE_MAJOR:
            raise StoreTooNew(
                f"store {self.path} has format {major}.{minor}, this program reads up to {lmdb_records.STORE_MAJOR}"
            )
        if major < lmdb_records.STORE_MAJOR:
            with self._env.begin(write=True, db=self.db[b"meta"]) as txn:
                txn.put(b"format", lmdb_records.encode_format())

    def begin(self, *, write: bool = False, db: Any = None) -> lmdb.Transaction[bytes]:
        """A transaction whose values are copies."""
        return self._env.begin(db=db, write=write)

    def begin_views(self) -> lmdb.Transaction[memoryview]:
        """A read transaction whose values are views of the map that end with it."""
        return self._env.begin(buffers=True)

    def reader_check(self) -> None:
        """Free the reader slots of processes that died."""
        self._env.reader_check()

    def hold_reserve(self) -> None:
        """Keep a little of the disk, or what is left of it, for deletions when it is full."""
        for size in RESERVE_BYTES:
            try:
                _allocate(self.path / "store.reserve", size)
            except OSError:
                continue
            return

    def release_reserve(self) -> bool:
        """Give the reserve to a deletion that finds the disk full; False when there is none."""
        try:
            held = (self.path / "store.reserve").stat().st_size
            os.truncate(self.path / "store.reserve", 0)
        except OSError:
            return False
        return held > 0

    def close(self) -> None:
        """Close the environment and give up the lock, once calls under way are done. Idempotent."""
        with self._calls:
            lock_fd, self._lock_fd = self._lock_fd, -1
            self._calls.wait_for(lambda: not self._running)
        if lock_fd >= 0:
            self._env.close()
            _unlock(lock_fd)

    @contextmanager
    def call(self) -> Iterator[None]:
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

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use."""
        with self.call():
            info, stat = self._env.info(), self._env.stat()
        return {
            "map_bytes": int(info["map_size"]),
            "file_bytes": int((info["last_pgno"] + 1) * stat["psize"]),
            "readers": int(info["num_readers"]),
        }


def _environment(path: Path, map_bytes: int) -> lmdb.Environment:
    data = path / "data.mdb"
    if data.exists():
        check_pages(data)
    # LMDB writes its reader slots through a mapping: on a full disk the first touch of a page
    # that has no place there yet would be a SIGBUS.
    _allocate(path / "lock.mdb", READER_TABLE_BYTES)
    env = lmdb.open(str(path), map_size=map_bytes, max_dbs=len(lmdb_records.TABLES), max_readers=MAX_READERS, mode=0o600)
    try:
        env.reader_check()
    except BaseException:
        env.close()
        raise
    return env


def _allocate(path: Path, size: int) -> None:
    """A file whose ``size`` bytes all have their place on the disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def _move_aside(path: Path, reason: str) -> None:
    aside = path / f"data.mdb.corrupt-{time.time_ns()}"
    os.rename(path / "data.mdb", aside)
    (path / "lock.mdb").unlink(missing_ok=True)
    log.error("store %s is not readable (%s); moved to %s, starting a fresh one", path, reason, aside.name)


def _map_bytes(path: Path, budget_bytes: int) -> int:
    """Budget / 0.8, as far as the disk has room beside a reserve, and always some more than the
    file: deletions need pages."""
    data = path / "data.mdb"
    existing = data.stat().st_size if data.exists() else 0
    free = shutil.disk_usage(path).free
    reserve = min(256 << 20, free // 10)
    wanted = min(int(budget_bytes / FILL) + MAP_SLACK_BYTES, existing + free - reserve)
    return max(MIN_MAP_BYTES, existing + MAP_SLACK_BYTES, wanted) // PAGE_BYTES * PAGE_BYTES


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
