"""One file of a model's weights: how it is found changed, and who may have it watched.

The file system's word comes first, because it costs nothing; the content is read only when that
word changed. A file that was only touched, copied back or linked anew keeps its digest.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

import xxhash

from warmkv.schema.errors import RecordError

MAX_PATH_BYTES = 4096
SLICE_BYTES = 4 << 20
#: Never follow a last symbolic link, never wait for a pipe's writer.
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


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


def signature(path: str) -> Signature | None:
    """The signature of a regular file now; None where there is none, or it cannot be looked at."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return Signature.of(found) if stat.S_ISREG(found.st_mode) else None


def read(path: str, keep_on: Callable[[], bool]) -> WeightFile | None:
    """The file with its digest, read slice by slice as long as ``keep_on`` says so. None where it
    cannot be read, is no regular file, changed while it was read, or the reading was given up."""
    try:
        fd = os.open(path, _OPEN)
    except (OSError, ValueError):
        return None
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return None
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
    refused = RecordError(f"weight file {name} is no regular file that uid {uid} may read")
    if not readable_by(name, uid):
        raise refused
    try:
        fd = os.open(name, _OPEN)
    except OSError as exc:
        raise refused from exc
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(found.st_mode):
        raise refused
    return WeightFile(name, Signature.of(found))


def readable_by(path: str, uid: int) -> bool:
    """Whether mode and owner let user ``uid`` reach and read a file. For root and for this process's
    own user, opening it will tell. Access lists and capabilities are not asked: they may allow more."""
    if uid in (0, os.geteuid()):
        return True
    groups = _groups(uid)
    try:
        above = [os.stat(str(folder)) for folder in PurePosixPath(path).parents]
        return all(_allows(item, uid, groups, 1) for item in above) and _allows(os.lstat(path), uid, groups, 4)
    except OSError:
        return False


def _allows(found: os.stat_result, uid: int, groups: set[int], bit: int) -> bool:
    """Whether ``bit`` (4 read, 1 search) is granted to the class the user falls into."""
    shift = 6 if found.st_uid == uid else 3 if found.st_gid in groups else 0
    return bool(found.st_mode >> shift & bit)


def _groups(uid: int) -> set[int]:
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return set()
    return set(os.getgrouplist(account.pw_name, account.pw_gid))
