"""A folder of `.kvcache` files as cera keeps one: a file a prompt, named by two hashes.

Files appear whole or not at all. A name is no proof: hashes of prompts collide (64 bits, and there are
prompts that hash to zero and stay there), so tokens are compared whole, and a file is not written over
one of another prompt. What cannot be read is a miss with its reason.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, RecordError, StoreError, TooNewError
from warmkv.schema.kvcache_file import SUFFIX, KvFile
from warmkv.schema.records import Tokens

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(re.escape(SUFFIX) + r"\.tmp\.(\d{1,10})$")
#: What is older was left behind, even where its process's number is somebody's again.
STALE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a look for a prompt came to: the file, or why there is none."""

    file: KvFile | None
    reason: str = ""
    other_prompt: bool = False


def read(path: Path) -> KvFile:
    """The file ``path``. Raises FormatError, TooNewError, StoreError where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode):
                raise RecordError(f"{path} is {stat.filemode(about.st_mode)}, expected a plain file")
            if about.st_size > kvcache_file.MAX_FILE_BYTES:
                raise FormatError(f"{path.name} has {about.st_size} bytes, at most {kvcache_file.MAX_FILE_BYTES} are possible")
            return kvcache_file.decode(file.read())
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc


def files_in(folder: Path) -> list[Path]:
    """The `.kvcache` files of a folder, by name. Raises StoreError."""
    try:
        return sorted(item for item in folder.iterdir() if item.name.endswith(SUFFIX))
    except OSError as exc:
        raise StoreError(f"{folder} cannot be read: {exc.strerror}") from exc


def find(folder: Path, fingerprint: int, tokens: Tokens) -> Found:
    """The state after exactly ``tokens``. Whatever is wrong with what lies there is a miss."""
    path = folder / kvcache_file.file_name(fingerprint, tokens)
    try:
        file = read(path)
    except (FormatError, TooNewError, RecordError, StoreError) as exc:
        return Found(None, str(exc))
    if file.fingerprint != fingerprint:
        return Found(None, f"{path.name} is of model {file.fingerprint:016x}, its name says {fingerprint:016x}")
    if not np.array_equal(file.tokens, tokens):
        reason = f"{path.name} holds another prompt of {len(file.tokens)} tokens whose hash is the same"
        return Found(None, reason, other_prompt=True)
    return Found(file)


def write(folder: Path, file: KvFile, *, replace: bool = False) -> bool:
    """Write a file where it belongs; with ``replace`` over an older one of the same prompt. False where these
    very bytes lie there.

    **Durability:** synced with its folder when this returns. Raises StoreError for a file that is there, or
    is another prompt's, and where it cannot be written; FormatError for what the format does not hold. Then
    the folder is as it was."""
    path = folder / kvcache_file.file_name(file.fingerprint, file.tokens)
    data = kvcache_file.encode(file)
    if os.path.lexists(path):
        found = find(folder, file.fingerprint, file.tokens)
        if found.other_prompt:
            raise StoreError(found.reason)
        if found.file is not None and path.read_bytes() == data:
            return False
        if not replace:
            raise StoreError(f"{path} exists")
    write_whole(path, data)
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path``, private to its owner, in one step. One writer of a name and
    process at a time. Raises StoreError, and then ``path`` is what it was."""
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "wb") as out:
                out.write(data)
                out.flush()
                os.fsync(fd)
            os.rename(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
        _sync(path.parent)
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror}") from exc


def sweep(folder: Path, now_s: float | None = None) -> list[str]:
    """Remove what writers that ended left behind unfinished; the names. What a living process may still
    write stays, for a day."""
    swept = []
    now_s = time.time() if now_s is None else now_s
    try:
        names = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder) if ".tmp." in entry.name]
    except OSError:
        return []
    for name, about in sorted(names, key=lambda item: item[0]):
        found = _TEMPORARY.search(name)
        if found is None or not stat.S_ISREG(about.st_mode):
            continue
        if _runs(int(found[1])) and now_s - about.st_mtime < STALE_S:
            continue
        with contextlib.suppress(OSError):
            os.unlink(folder / name)
            log.info("removed %s, which a writer that ended left behind", folder / name)
            swept.append(name)
    return swept


def _runs(pid: int) -> bool:
    """Whether a process has this number; signal 0 only asks."""
    if not 0 < pid < 1 << 31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
