"""One file of a model's weights: how it is found changed, and who may have it watched.

The file system's word comes first, because it costs nothing; the content is read only when that
word changed. A file that was only touched, copied back or linked anew keeps its digest.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

import xxhash

from warmkv.schema.errors import RecordError

MAX_PATH_BYTES = 4096
SLICE_BYTES = 4 << 20
#: Larger is no model, but a file of holes that would be read for hours.
MAX_FILE_BYTES = 1 << 40
#: Never follow a last symbolic link, never wait for a pipe's writer.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Signature:
    """What changes when a file does, unless somebody forges it: device and inode, size, times of the
    last change of content and of the entry itself."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Signature:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file as it was when last looked at. ``digest`` is the xxh3-128 of its content in hex, empty
    until it was read for the first time."""

    path: str
    signature: Signature
    digest: str = ""


def signature(path: str, uid: int) -> Signature | None:
    """The signature of a regular file now; None where user ``uid`` finds none that may be read."""
    try:
        with _above(path, uid) as (folder, name):
            return Signature.of(_found(folder, name, uid))
    except (OSError, ValueError):
        return None


def read(path: str, uid: int, keep_on: Callable[[], bool]) -> WeightFile | None:
    """The file with its digest, read slice by slice as long as ``keep_on`` says so. None where user
    ``uid`` could not read it, it is no regular file, changed while it was read, or the reading was given up."""
    try:
        fd = _opened(path, uid)
    except (OSError, ValueError):
        return None
    try:
        before = os.fstat(fd)
        state = xxhash.xxh3_128()
        while keep_on():
            data = os.read(fd, SLICE_BYTES)
            if not data:
                same = Signature.of(os.fstat(fd)) == Signature.of(before)
                return WeightFile(path, Signature.of(before), state.hexdigest()) if same else None
            state.update(data)
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


def check_path(path: object) -> str:
    """The path itself, if it names a file without ambiguity. Raises RecordError."""
    if not isinstance(path, str) or "\0" in path:
        raise RecordError(f"weight file {path!r}: expected a path without zero bytes")
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as exc:
        raise RecordError(f"weight file {path!r} has no name that a file may have") from exc
    if size > MAX_PATH_BYTES:
        raise RecordError(f"path of a weight file has {size} bytes, at most {MAX_PATH_BYTES} are possible")
    parts = PurePosixPath(path)
    if not parts.is_absolute() or ".." in parts.parts or str(parts) != path:
        raise RecordError(f"weight file {path!r}: expected an absolute path without '.', '..' and doubled slashes")
    return path


def first_look(path: object, uid: int) -> WeightFile:
    """A file that user ``uid`` wants watched. Raises RecordError for anything but a regular file that
    this user may read, in the same words whichever it is."""
    name = check_path(path)
    found = signature(name, uid)
    if found is None:
        raise RecordError(f"weight file {name!r} is no regular file that uid {uid} may read")
    return WeightFile(name, found)


def _opened(path: str, uid: int) -> int:
    """A descriptor of a file that user ``uid`` may read. Raises OSError, ValueError."""
    with _above(path, uid) as (folder, name):
        _found(folder, name, uid)  # first: opening some of what is no file has consequences
        fd = os.open(name, _OPEN, dir_fd=folder)
    try:
        _require_readable(os.fstat(fd), uid)
    except OSError:
        os.close(fd)
        raise
    return fd


def _found(folder: int | None, name: str, uid: int) -> os.stat_result:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    _require_readable(found, uid)
    return found


def _require_readable(found: os.stat_result, uid: int) -> None:
    """Raises OSError for anything but a regular file that user ``uid`` may read."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
        raise OSError("no regular file of a model's size")
    if not _trusted(uid) and not _allows(found, uid, groups_of(uid), 4):
        raise PermissionError(f"uid {uid} may not read it")


@contextmanager
def _above(path: str, uid: int) -> Iterator[tuple[int | None, str]]:
    """The folder a file is looked for in, and its name there. For another user that is where the path
    leads as it is now, each folder on the way entered by itself and only if that user may: whoever can
    put a link in the place of a folder leads us nowhere else. Access lists and capabilities are not asked:
    they may allow more. Raises OSError."""
    if _trusted(uid):
        yield None, path
        return
    groups = groups_of(uid)
    if not all(_allows(os.stat(folder), uid, groups, 1) for folder in PurePosixPath(path).parents):
        raise PermissionError(f"uid {uid} may not look there")
    parent, name = os.path.split(path)
    at = os.open("/", _FOLDER)
    try:
        for part in (*PurePosixPath(os.path.realpath(parent)).parts[1:], ""):
            if not _allows(os.fstat(at), uid, groups, 1):
                raise PermissionError(f"uid {uid} may not look there")
            if part:
                below = os.open(part, _FOLDER, dir_fd=at)
                os.close(at)
                at = below
        yield at, name
    finally:
        os.close(at)


def _trusted(uid: int) -> bool:
    """Root and this process's own user: what may be opened is theirs to know."""
    return uid in (0, os.geteuid())


def _allows(found: os.stat_result, uid: int, groups: set[int], bit: int) -> bool:
    """Whether ``bit`` (4 read, 1 search) is granted to the class the user falls into."""
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    return bool(found.st_mode >> shift & bit)


def groups_of(uid: int) -> set[int]:
    """Groups of a user, as the account database has them; none for an unknown one."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(account.pw_name, account.pw_gid))
