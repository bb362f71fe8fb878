"""Small files that are there whole or not at all, through a crash as well."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` (mode 0600). One writer at a time.

    **Durability:** synced with its directory when this returns. Raises OSError, and then the file
    is what it was."""
    beside = path.with_name(path.name + ".new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(beside, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was renamed, made or removed in a directory last. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
