"""Sealed shared memory: created, filled by pwrite, sealed, checked, mapped.

A container is written into a fresh memfd with pwrite (twice as fast as through a mapping:
no fault per page), then sealed against writing, shrinking and growing. From then on nobody,
its writer included, can change what a reader maps. Mappings are private: kernels before 6.7
refuse a shared mapping of a write-sealed file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat

from warmkv.schema.errors import DescriptorLimit, RemoteProtocolError, StoreError, TooLarge

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create(name: str, total_bytes: int) -> int:
    """A descriptor of an empty, sealable memfd of ``total_bytes``, close-on-exec. The caller
    closes it. Raises DescriptorLimit or StoreError."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        raise _translated(exc, "memfd_create") from exc
    try:
        os.ftruncate(fd, total_bytes)
    except OSError as exc:
        os.close(fd)
        raise _translated(exc, f"memfd of {total_bytes} bytes") from exc
    return fd


def write(fd: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite all of ``data``; StoreError when memory runs out."""
    view = memoryview(data).cast("B")
    while len(view):
        try:
            done = os.pwrite(fd, view, offset)
        except OSError as exc:
            raise _translated(exc, "pwrite into shared memory") from exc
        view, offset = view[done:], offset + done


def seal(fd: int) -> None:
    """Make the memfd immutable. Raises StoreError while a writable mapping of it exists."""
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except OSError as exc:
        raise _translated(exc, "sealing") from exc


def check_sealed(fd: int, max_bytes: int) -> int:
    """Size of a descriptor a peer passed, once it is proven to be sealed shared memory whose
    every page is allocated (reading a sparse one would allocate memory on our account).

    Raises RemoteProtocolError with what was found, TooLarge for a sound one of more than ``max_bytes``."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise RemoteProtocolError(f"descriptor is not shared memory (mode {stat.filemode(info.st_mode)})")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise RemoteProtocolError("descriptor is a plain file, expected sealed shared memory") from exc
    if seals & SEALS != SEALS:
        raise RemoteProtocolError(f"shared memory has seals {seals:#x}, expected at least {SEALS:#x} (write, shrink, grow)")
    if not info.st_size:
        raise RemoteProtocolError("shared memory is empty")
    if info.st_blocks * 512 < info.st_size:
        raise RemoteProtocolError(f"shared memory of {info.st_size} bytes has only {info.st_blocks * 512} allocated")
    if info.st_size > max_bytes:
        raise TooLarge(f"shared memory has {info.st_size} bytes, at most {max_bytes} can be taken")
    return info.st_size


def map_private(fd: int, total_bytes: int, *, writable: bool = False) -> mmap.mmap:
    """A private mapping of the whole memfd. With ``writable``, writes go to private copies of
    the pages touched and never reach the memfd or another process.

    The mapping lives as long as any view of it."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(fd, total_bytes, flags=mmap.MAP_PRIVATE, prot=prot)
    except (OSError, ValueError) as exc:
        raise _translated(exc, f"mapping {total_bytes} bytes") from exc


def read(fd: int, total_bytes: int, offset: int) -> bytes:
    """Exactly ``total_bytes`` from ``offset``, fewer only at the end of the memfd."""
    return os.pread(fd, total_bytes, offset)


def _translated(exc: Exception, what: str) -> StoreError:
    number = getattr(exc, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return DescriptorLimit(f"{what}: no file descriptor left")
    return StoreError(f"{what} failed: {exc}")
