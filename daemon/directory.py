"""The folder a socket lies in: who can write it can put another socket in the place of ours."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from warmkv.schema.errors import SocketPathError

MODE, GROUP_MODE = 0o700, 0o750


def require_private(path: Path, gid: int = -1) -> None:
    """Create ``path`` for us alone, and to pass through for group ``gid`` unless it is -1; or check
    that it is like that. Nobody else may replace what is in it or any directory above it.

    Raises SocketPathError."""
    try:
        missing = [item for item in (path, *path.parents) if not os.path.lexists(item)]
        for item in reversed(missing):
            _make(item, gid)
        found = os.stat(path)
    except OSError as exc:
        raise SocketPathError(f"cannot create directory {path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise SocketPathError(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise SocketPathError(f"directory {path} belongs to uid {found.st_uid}, expected {os.geteuid()}")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o022:
        raise SocketPathError(f"directory {path} is writable by others (mode {mode:04o}), expected {_mode(gid):04o}")
    if gid >= 0 and not mode & 0o001 and not (found.st_gid == gid and mode & 0o010):
        expected = f"group {gid} and mode {GROUP_MODE:04o}"
        raise SocketPathError(
            f"directory {path} of group {found.st_gid} and mode {mode:04o} keeps group {gid} out, expected {expected}"
        )
    for parent in path.resolve().parents:
        above = os.stat(parent)
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            raise SocketPathError(f"directory {parent} above the socket is writable by others and not sticky")


def _mode(gid: int) -> int:
    return MODE if gid < 0 else GROUP_MODE


def _make(path: Path, gid: int) -> None:
    try:
        os.mkdir(path, MODE)
    except FileExistsError:
        return  # another starter was faster; it is checked like any other
    if gid >= 0:
        os.chown(path, -1, gid)
    os.chmod(path, _mode(gid))
