"""The LMDB environment of a store: its map, its tables, its life.

Opening sizes the map, checks the format and moves an unreadable environment aside. Calls share it;
closing it, and putting another file in its place, waits for those under way: their views lie in the
map that goes away.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from warmkv.kvstore.store import lmdb_map
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.kvstore.store.folder import Folder
from warmkv.kvstore.store.lmdb_map import PAGE_BYTES
from warmkv.kvstore.store.pages import check_pages
from warmkv.schema import lmdb_records
from warmkv.schema.errors import ClosedError, FormatError, StoreError, StoreTooNew

log = logging.getLogger(__name__)

#: What LMDB raises for a file whose pages are not what they should be.
UNREADABLE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.IncompatibleError, lmdb.PanicError)
T = TypeVar("T")


class Environment:
    """An open environment with its tables in ``db``; ``budget_bytes`` is what of the wanted budget
    the map has room for. **Threading:** any thread, each use inside `call`, which does not nest;
    whoever changes what is stored holds `writing` as well."""

    def __init__(self, folder: Folder, wanted_bytes: int, faults: Faults) -> None:
        self.folder = folder
        self.wanted_bytes = wanted_bytes
        self.faults = faults
        #: Held around every change: a copy that is to take the environment's place misses none.
        self.writing = threading.RLock()
        self._calls = threading.Condition()
        self._running = 0
        self._closed = False
        self._swapping = False
        #: Why there is no environment, after one could not be opened again.
        self._lost = ""
        self._enter()

    def _enter(self, *, trusted: bool = False) -> None:
        """Open the file in the folder; ``trusted``: it was just made, its pages are sound."""
        if self.folder.data.exists() and not trusted:
            check_pages(self.folder.data)
        self._env, room_bytes = lmdb_map.open_map(self.folder, self.wanted_bytes)
        budget_bytes = min(self.wanted_bytes, room_bytes)
        try:
            self._env.reader_check()
            # A store of a newer format is left as it is: its tables are not ours to create.
            self.db: dict[bytes, Any] = {b"meta": self._env.open_db(b"meta")}
            self._check_format()
            self.db |= {name: self._env.open_db(name) for name in lmdb_records.TABLES}
            self.folder.note_opened()
            self.folder.hold_reserve()
            if trusted:
                # Others took the disk's room meanwhile: what is stored stays, at no moment it has to go.
                budget_bytes = max(budget_bytes, min(self.wanted_bytes, self._live_bytes()))
            else:
                # LMDB synchronises its file, not the name of a file that is new.
                self.folder.sync()
            self.budget_bytes = budget_bytes
        except BaseException:
            self._env.close()
            raise

    @classmethod
    def open(
        cls, path: Path, wanted_bytes: int, faults: Faults = NO_FAULTS, *, allow_network: bool = False
    ) -> Environment:  # fmt: skip
        """Lock and open the store at ``path``, creating it if need be.

        Raises StoreInUse, StoreTooNew, StoreError, ColdUnavailable. An environment LMDB cannot read
        is moved aside with a message and a fresh one begun."""
        try:
            folder = Folder.open(path, faults, allow_network=allow_network)
        except OSError as exc:
            raise StoreError(f"store {path} cannot be opened: {exc}") from exc
        try:
            try:
                env = cls(folder, wanted_bytes, faults)
            except (*UNREADABLE, FormatError) as exc:
                folder.move_aside(str(exc))
                env = cls(folder, wanted_bytes, faults)
            try:
                faults.reached("start.opened")
            except BaseException:
                env.close()
                raise
            return env
        except BaseException as exc:
            folder.close()
            if isinstance(exc, lmdb.VersionMismatchError):
                raise StoreTooNew(f"store {path} was written by another version of LMDB: {exc}") from exc
            if isinstance(exc, (lmdb.Error, OSError)):
                raise StoreError(f"store {path} cannot be opened: {exc}") from exc
            raise

    def begin_anew(self, reason: str) -> None:
        """Move the files aside and begin fresh ones. Nobody else may use the environment yet.
        Raises StoreError."""
        self._env.close()
        try:
            self.folder.move_aside(reason)
            self._enter()
        except (lmdb.Error, OSError) as exc:
            raise StoreError(f"store {self.folder.path} cannot be opened: {exc}") from exc

    def _check_format(self) -> None:
        with self._env.begin(write=True, db=self.db[b"meta"]) as txn:
            found = txn.get(b"format")
            if found is None:
                txn.put(b"format", lmdb_records.encode_format())
                return
        major, minor = lmdb_records.decode_format(bytes(found))
        ours = lmdb_records.STORE_MAJOR, lmdb_records.STORE_MINOR
        if major > ours[0]:
            raise StoreTooNew(f"store {self.folder.path} has format {major}.{minor}, this program reads up to {ours[0]}")
        if (major, minor) < ours:
            with self._env.begin(write=True, db=self.db[b"meta"]) as txn:
                txn.put(b"format", lmdb_records.encode_format())

    # -- use -----------------------------------------------------------------------------

    def begin(self, *, write: bool = False, db: Any = None) -> lmdb.Transaction[bytes]:
        """A transaction whose values are copies."""
        return self._begin(lambda: self._env.begin(db=db, write=write))

    def begin_views(self) -> lmdb.Transaction[memoryview]:
        """A read transaction whose values are views of the map that end with it."""
        return self._begin(lambda: self._env.begin(buffers=True))

    def _begin(self, begin: Callable[[], T]) -> T:
        try:
            return begin()
        except lmdb.ReadersFullError:
            # Slots of processes that died: once freed they are enough.
            self._env.reader_check()
            return begin()
        except lmdb.PanicError as exc:
            # A commit whose last page failed: LMDB goes on only with an environment opened anew.
            self._lost = str(exc)
            raise

    def reader_check(self) -> int:
        """Free the reader slots of processes that died; how many."""
        with self.call():
            return int(self._env.reader_check())

    @contextmanager
    def call(self) -> Iterator[None]:
        """The environment stays open inside. Raises ClosedError once it is not, StoreError where it
        could not be opened again after a failure; each call tries that once more."""
        with self._calls:
            self._calls.wait_for(lambda: not self._swapping)
            if self._closed:
                raise ClosedError(f"store {self.folder.path} is closed")
        if self._lost:
            self._revive()
        with self._calls:
            self._calls.wait_for(lambda: not self._swapping)
            if self._closed:
                raise ClosedError(f"store {self.folder.path} is closed")
            self._running += 1
        try:
            yield
        finally:
            with self._calls:
                self._running -= 1
                self._calls.notify_all()

    def replace(self, move: Callable[[], None]) -> None:
        """Close the environment once calls under way are done, ``move`` files, open what lies there
        then. New calls wait meanwhile; inside one this would wait for ever. Raises what ``move`` raises
        (and then the same environment goes on), StoreError, ClosedError."""
        with self._calls:
            self._calls.wait_for(lambda: not self._swapping)
            if self._closed:
                raise ClosedError(f"store {self.folder.path} is closed")
            self._swapping = True
            self._calls.wait_for(lambda: not self._running)
        try:
            self._env.close()
            try:
                move()
            finally:
                self._enter_again()
        finally:
            with self._calls:
                self._swapping = False
                self._calls.notify_all()

    def _revive(self) -> None:
        lost = self._lost
        try:
            self.replace(lambda: None)
        except ClosedError:
            raise
        except StoreError as exc:
            raise StoreError(f"store {self.folder.path} is not open ({lost}): {exc}") from exc
        log.warning("store %s was opened anew: %s", self.folder.path, lost)

    def _enter_again(self) -> None:
        problem = self.folder.problem() if self._lost else ""
        try:
            if problem:
                raise StoreError(problem)
            self._enter(trusted=True)
        except (lmdb.Error, OSError, FormatError, StoreError) as exc:
            self._lost = str(exc)
            raise StoreError(f"store {self.folder.path} could not be opened again: {exc}") from exc
        self._lost = ""

    def problem(self) -> str:
        """What keeps this environment from storing for good, in a sentence; empty when nothing."""
        if self._closed:
            return ""
        if self._lost:
            return f"store {self.folder.path} is not open: {self._lost}"
        return self.folder.problem()

    def close(self) -> None:
        """Close the environment and give up the lock, once calls under way are done. Idempotent."""
        with self._calls:
            self._calls.wait_for(lambda: not self._swapping)
            closed, self._closed = self._closed, True
            self._calls.wait_for(lambda: not self._running)
        if not closed:
            self._env.close()
            self.folder.close()

    def copy(self, fd: int) -> None:
        """Write what is committed now, without free pages, as an environment file to ``fd``; others
        go on. Raises StoreError."""
        with self.call():
            try:
                self._env.copyfd(fd, compact=True)
            except (lmdb.Error, OSError) as exc:
                raise StoreError(f"store {self.folder.path} could not be copied: {exc}") from exc

    def live_bytes(self) -> int:
        """Bytes of the pages that are not free: what a copy takes."""
        with self.call():
            return self._live_bytes()

    def _live_bytes(self) -> int:
        with self._env.begin() as txn:
            stats = [self._env.stat(), *(txn.stat(db) for db in self.db.values())]
        return sum(item["branch_pages"] + item["leaf_pages"] + item["overflow_pages"] for item in stats) * PAGE_BYTES

    def info(self) -> dict[str, int]:
        """File and map sizes, readers in use, unreadable environments that were moved aside."""
        with self.call():
            info, stat = self._env.info(), self._env.stat()
        return {
            "map_bytes": int(info["map_size"]),
            "file_bytes": int((info["last_pgno"] + 1) * stat["psize"]),
            "readers": int(info["num_readers"]),
            "moved_aside": len(self.folder.aside()),
        }


def no_room(exc: BaseException) -> bool:
    """Whether map or disk are full, by what LMDB or the system said."""
    return isinstance(exc, lmdb.MapFullError) or getattr(exc, "errno", None) == errno.ENOSPC
