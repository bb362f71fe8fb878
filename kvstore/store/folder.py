"""The directory of a store: whose it is, who holds it, which files are its own.

Everything below it belongs to one user and is readable by nobody else; one process holds it for
life. What an environment becomes when it cannot be read, or while it is copied, is kept apart by name.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import stat
import time
from pathlib import Path

from warmkv.kvstore.store import filesystem
from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.schema.errors import ColdUnavailable, StoreError, StoreInUse

log = logging.getLogger(__name__)

DATA, READERS, LOCK, RESERVE = "data.mdb", "lock.mdb", "store.lock", "store.reserve"
#: A copy being made; nothing once it is whole, nor after a crash.
COPY = "data.mdb.compacting"
ASIDE = "data.mdb.corrupt-"
#: Unreadable environments that are kept, the newest.
KEPT_ASIDE = 3
#: Deleting one record takes about ten pages; the first of these that the disk has is held.
RESERVE_BYTES = (256 << 10, 128 << 10, 64 << 10)


class Folder:
    """Create with `open`; `close` gives the lock up. **Threading:** any thread."""

    def __init__(self, path: Path, lock_fd: int, faults: Faults) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._faults = faults
        self._opened: tuple[int, int] | None = None
        self._unsynced = False

    @classmethod
    def open(cls, path: Path, faults: Faults = NO_FAULTS, *, allow_network: bool = False) -> Folder:
        """Create (directory 0700, files 0600) or check the directory and take its lock for life.

        What is ours is closed to others. Raises StoreError where something is somebody else's,
        StoreInUse, ColdUnavailable on a file system that LMDB cannot be trusted to, OSError."""
        path = path.absolute()
        if not allow_network:
            _check_file_system(path)
        _make(path)
        _make_private(path)
        folder = cls(path, _lock(path / LOCK), faults)
        try:
            faults.reached("start.locked")
            folder._remove_unfinished()
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def data(self) -> Path:
        return self.path / DATA

    def note_opened(self) -> None:
        """The environment file that lies here now is the one in use. Raises OSError."""
        found = self.data.stat()
        self._opened = found.st_dev, found.st_ino

    def problem(self) -> str:
        """Why what is written to the open environment would not be found here by the next start, in
        a sentence; empty while it would."""
        try:
            found = self.data.stat()
        except OSError as exc:
            return f"the store's file {self.data} cannot be found any more ({exc.strerror}): the folder was moved or removed"
        if self._opened is not None and (found.st_dev, found.st_ino) != self._opened:
            return f"the store's file {self.data} is another one than was opened: the folder was replaced"
        if self._unsynced:
            try:
                self.sync()
            except OSError as exc:
                return f"the folder {self.path} cannot be synchronised: {exc}"
        return ""

    def sync(self) -> None:
        """Renames and new files here outlive a power loss from now on. Raises OSError, and then they
        may not: `problem` tries again."""
        self._unsynced = True
        sync(self.path)
        self._unsynced = False

    def unsynced(self) -> None:
        """A rename here may not outlive a power loss yet: `problem` synchronises until it does."""
        self._unsynced = True

    def move_aside(self, reason: str) -> None:
        """Give way to a fresh environment; the newest unreadable ones are kept. Raises OSError."""
        aside = self._unused_name()
        os.rename(self.data, aside)
        (self.path / READERS).unlink(missing_ok=True)
        log.error("store %s is not readable (%s); moved to %s, starting a fresh one", self.path, reason, aside.name)
        self._faults.reached("aside.renamed")
        # By the clock, which may have been set back: what was moved just now stays in any case.
        others = [item for item in self.aside() if item != aside]
        for old in others[: max(0, len(others) + 1 - KEPT_ASIDE)]:
            log.warning("removing %s: %d newer ones are kept", old, KEPT_ASIDE)
            old.unlink(missing_ok=True)

    def _unused_name(self) -> Path:
        names = (self.path / f"{ASIDE}{number}" for number in itertools.count(time.time_ns()))
        return next(name for name in names if not os.path.lexists(name))

    def aside(self) -> list[Path]:
        """Environments that could not be read, the oldest first."""
        try:
            return sorted(self.path.glob(f"{ASIDE}*"), key=lambda item: (item.stat().st_mtime_ns, item.name))
        except OSError:
            return []

    def hold_reserve(self) -> None:
        """Keep a little of the disk, or what is left of it, for deletions when it is full."""
        for size in RESERVE_BYTES:
            try:
                allocate(self.path / RESERVE, size)
            except OSError:
                continue
            return

    def release_reserve(self) -> bool:
        """Give the reserve to a deletion that finds the disk full; False when there is none."""
        try:
            held = (self.path / RESERVE).stat().st_size
            os.truncate(self.path / RESERVE, 0)
        except OSError:
            return False
        return held > 0

    def close(self) -> None:
        """Give up the lock, also for children a fork left with a copy of the descriptor. Idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _remove_unfinished(self) -> None:
        copy = self.path / COPY
        if copy.exists():
            copy.unlink()
            log.warning("removed %s, which a compaction that did not end left behind", copy)


def allocate(path: Path, size: int) -> None:
    """A file whose ``size`` bytes all have their place on the disk."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """fsync of a file or directory; a file system that has none for directories is left to itself."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def _make(path: Path) -> None:
    """The directory, whose name outlives a power loss."""
    missing = [item for item in (path, *path.parents) if not item.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for item in missing:
        try:
            sync(item.parent)
        except PermissionError:  # may be passed through, not read
            log.warning("the folder %s cannot be synchronised", item.parent)


def _check_file_system(path: Path) -> None:
    kind = filesystem.kind(path)
    if why := filesystem.refusal(kind):
        raise ColdUnavailable(f"store {path} would lie on {kind}, {why} (allow_network_store permits it)")


def _make_private(path: Path) -> None:
    """Close a directory of ours and the store's files in it to others. Raises StoreError for what is
    somebody else's or no plain file."""
    found, uid = path.stat(), os.geteuid()
    if found.st_uid != uid:
        raise StoreError(f"store {path} belongs to user {found.st_uid}, expected {uid}")
    if found.st_mode & 0o077:
        log.warning("store %s had mode %04o, now 0700", path, stat.S_IMODE(found.st_mode))
        os.chmod(path, 0o700)
    for name in (DATA, READERS, LOCK, RESERVE, COPY):
        file = path / name
        try:
            about = file.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(about.st_mode):
            raise StoreError(f"{file} is no plain file ({stat.filemode(about.st_mode)})")
        if about.st_uid != uid:
            raise StoreError(f"{file} belongs to user {about.st_uid}, expected {uid}")
        if about.st_mode & 0o177:
            os.chmod(file, 0o600)


def _lock(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            raise StoreInUse(f"store {path.parent} is in use, by another process or by this one") from exc
        raise
    return fd
