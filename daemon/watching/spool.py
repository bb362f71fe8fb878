"""The spool: a folder whose files are imported, as the users they belong to.

A file is taken when its writer closed it or moved it in, or when it did not change for an interval.
It is moved into a folder that only we can write, so that nobody puts another in its place, and
imported there; then it goes to ``done``, or to ``failed`` with the reason beside it. What a crash
leaves there is imported again: ids make that harmless.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from warmkv.daemon import logs
from warmkv.daemon.watching.folders import Wanted
from warmkv.kvstore.store.importing import ImportResult
from warmkv.kvstore.store.kvcache_import import SIDECAR_SUFFIX
from warmkv.schema import kvcache_file, pack_file
from warmkv.schema.errors import ColdFull, StoreError, WarmKVError

log = logging.getLogger(__name__)

WORKING, DONE, FAILED = "working", "done", "failed"
#: A `.kvcache` file waits so long for its description.
SIDECAR_PATIENCE_S = 600.0
#: What a full store refused is tried so often, an interval apart.
ATTEMPTS = 5
MAX_HINTS = 4096
#: What is left of a name that something is added to.
STEM_BYTES = 200

Signature = tuple[int, int, int, int]
#: Imports a file for a user.
Import = Callable[[Path, int], ImportResult]


class Spool:
    """``folder`` gives the spool, None for none; ``permitted`` whether files of a user are taken;
    ``interval_s`` how long a file must not have changed.

    **Threading:** `look` on one thread, `hint` on any."""

    name = "the spool"

    def __init__(
        self, folder: Callable[[], Path | None], import_: Import, permitted: Callable[[int], bool],
        interval_s: Callable[[], float], monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.imported = 0
        self.failed = 0
        self._folder = folder
        self._import = import_
        self._permitted = permitted
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._closed: set[Path] = set()
        #: What each waiting file was when it was first seen so, and when that was.
        self._seen: dict[Path, tuple[Signature, float]] = {}
        #: Files that were refused for now: how often, and not to be tried before.
        self._later: dict[Path, tuple[int, float]] = {}
        #: Files that could not even be moved, which was logged.
        self._stuck: set[Path] = set()
        self._problem = ""

    def folders(self) -> Wanted:
        folder = self._folder()
        return {} if folder is None else {folder: None}

    def hint(self, path: Path, whole: bool) -> None:
        if whole:
            with self._lock:
                if len(self._closed) < MAX_HINTS:
                    self._closed.add(path)

    def problem(self) -> str:
        """A health check: why nothing can be imported, or empty."""
        return self._problem

    def look(self, keep_on: Callable[[], bool]) -> None:
        """Import what is complete."""
        with self._lock:
            closed, self._closed = self._closed, set()
        folder = self._folder()
        self._problem = "" if folder is None else self._prepared(folder)
        if folder is None or self._problem:
            return
        for path in self._waiting(folder):
            if keep_on() and self._complete(path, closed):
                self._claim(path)
        for path in sorted((folder / WORKING).iterdir()):
            if keep_on() and path.suffix in _SUFFIXES:
                self._take(path, keep_on)

    # -- what may be taken ---------------------------------------------------------------------

    def _prepared(self, folder: Path) -> str:
        """Make the folders below a spool; what is wrong with it."""
        try:
            found = os.lstat(folder)
            if not stat.S_ISDIR(found.st_mode):
                return f"spool {folder} is no folder"
            if found.st_uid not in (0, os.geteuid()):
                return f"spool {folder} belongs to uid {found.st_uid}, expected {os.geteuid()}"
            if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
                return f"spool {folder} is writable by others and not sticky (mode {stat.S_IMODE(found.st_mode):04o})"
            for name in (WORKING, DONE, FAILED):
                below = folder / name
                below.mkdir(mode=0o700, exist_ok=True)
                made = os.lstat(below)
                if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid() or made.st_mode & 0o022:
                    return f"{below} is no folder that only uid {os.geteuid()} can write"
        except OSError as exc:
            return f"spool {folder} cannot be used: {exc.strerror}"
        return ""

    def _waiting(self, folder: Path) -> list[Path]:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        found = [folder / name for name in names if Path(name).suffix in _SUFFIXES]
        known = {*found, *map(_sidecar, found)}
        self._seen = {path: seen for path, seen in self._seen.items() if path in known}
        self._stuck &= known
        return found

    def _complete(self, path: Path, closed: set[Path]) -> bool:
        """Whether a file, and the description of one that needs it, will not be written any more."""
        whole = self._settled(path, path in closed)
        if path.suffix != kvcache_file.SUFFIX:
            return whole
        beside = _sidecar(path)
        if os.path.lexists(beside):
            return self._settled(beside, beside in closed) and whole
        return path in self._seen and self._monotonic() - self._seen[path][1] >= SIDECAR_PATIENCE_S

    def _settled(self, path: Path, closed: bool) -> bool:
        signature = _signature(path)
        if signature is None:
            self._seen.pop(path, None)
            return False
        now = self._monotonic()
        if path not in self._seen or self._seen[path][0] != signature:
            self._seen[path] = (signature, now)
        return closed or now - self._seen[path][1] >= self._interval_s()

    def _claim(self, path: Path) -> None:
        """Move a file, and what describes it, to where only we can change names; one of that name
        which is still there comes first."""
        working = path.parent / WORKING
        if os.path.lexists(working / path.name):
            return
        for item in (_sidecar(path), path) if path.suffix == kvcache_file.SUFFIX else (path,):
            try:
                os.rename(item, working / item.name)
            except FileNotFoundError:
                continue
            except OSError as exc:  # a folder of somebody else, a name too long: the others do not wait for it
                if path not in self._stuck:
                    log.warning("%r cannot be taken out of the spool: %s", path.name, exc.strerror)
                self._stuck.add(path)
                return
        for item in (path, _sidecar(path)):
            self._seen.pop(item, None)

    # -- taking it -----------------------------------------------------------------------------

    def _take(self, path: Path, keep_on: Callable[[], bool]) -> None:
        attempts, not_before = self._later.get(path, (0, 0.0))
        if self._monotonic() < not_before:
            return
        before = _signature(path)
        try:
            uid = self._owner(path)
            result = self._import(path, uid)
        except WarmKVError as exc:
            if not keep_on():
                return  # the store is being closed; the next daemon takes it from here
            if _signature(path) != before or exc.retryable or isinstance(exc, ColdFull):
                self._try_later(path, attempts, str(exc))  # its writer goes on writing, or we are short of room
            else:
                self._fail(path, str(exc))
            return
        except Exception as exc:  # noqa: BLE001 - one file must not keep the others waiting
            logs.defect(log, f"importing {path.name!r}", exc)
            self._fail(path, f"importing failed with {type(exc).__qualname__}; the log has more")
            return
        if _signature(path) != before:
            self._try_later(path, attempts, "it changed while it was imported")
        elif result.refused:
            self._try_later(path, attempts, "; ".join(result.reasons))
        else:
            log.info("imported %r for uid %d: %d records, %d known already", path.name, uid, result.records, result.duplicates)
            self.imported += 1
            self._file_away(path, DONE)

    def _owner(self, path: Path) -> int:
        """Whose namespace a file goes to. Raises StoreError for one that is not taken."""
        paths = [path, _sidecar(path)] if path.suffix == kvcache_file.SUFFIX else [path]
        owners = set()
        for item in paths:
            try:
                found = os.lstat(item)
            except FileNotFoundError as exc:
                raise StoreError(f"{item.name} is missing") from exc
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise StoreError(f"{item.name} is no regular file of a single name")
            owners.add(found.st_uid)
        if len(owners) > 1:
            raise StoreError(f"{path.name} and its description belong to different users")
        uid = owners.pop()
        if not self._permitted(uid):
            raise StoreError(f"{path.name} belongs to uid {uid}, which may not use this daemon")
        return uid

    def _try_later(self, path: Path, attempts: int, reason: str) -> None:
        if attempts + 1 >= ATTEMPTS:
            self._fail(path, reason)
            return
        log.info("%r is imported later: %s", path.name, reason)
        self._later[path] = (attempts + 1, self._monotonic() + self._interval_s())

    def _fail(self, path: Path, reason: str) -> None:
        log.warning("%r cannot be imported: %s", path.name, reason)
        self.failed += 1
        target = self._file_away(path, FAILED)
        if target is None:
            return
        try:
            target.with_name(target.name + ".reason").write_text(reason + "\n", "utf-8", "replace")
        except OSError as exc:
            log.warning("the reason cannot be written beside %r: %s", target.name, exc.strerror)

    def _file_away(self, path: Path, name: str) -> Path | None:
        """Move a file and its description to ``done`` or ``failed``, beside what has its name there."""
        self._later.pop(path, None)
        folder = path.parent.parent / name
        target, number = folder / path.name, 1
        stem = os.fsdecode(os.fsencode(path.stem)[:STEM_BYTES])
        while os.path.lexists(target):
            target, number = folder / f"{stem}-{number}{path.suffix}", number + 1
        try:
            os.rename(path, target)
            if path.suffix == kvcache_file.SUFFIX and os.path.lexists(_sidecar(path)):
                os.rename(_sidecar(path), _sidecar(target))
        except OSError as exc:
            log.error("%r cannot be moved to %s: %s", path.name, folder, exc.strerror)
            return None
        return target


_SUFFIXES = frozenset({kvcache_file.SUFFIX, pack_file.SUFFIX})


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + SIDECAR_SUFFIX)


def _signature(path: Path) -> Signature | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_uid
