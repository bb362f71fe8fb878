"""Compressed keys and values of a layer as single byte strings: TQK1 and TQV1 of the CERA runtime.

    magic (4) | heads u32 | head size u32 | rows u32 | planes, all little-endian

    TQK1   codes, signs, norms, residuals     16 + heads * rows * (3 size / 8 + 4) bytes
    TQV1   codes, norms                       16 + heads * rows * (size / 4 + 2) bytes

Every plane has all rows of head 0, then all of head 1, and so on: a blob cannot be appended to, so live
rows are kept as `planes` and written out when a file asks for it. Neither the seed nor the estimator
is in a blob; who reads one must know the rotation.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.turboquant.planes import F16, KeyPlanes, Planes, ValuePlanes

_HEADER = struct.Struct("<4s3I")
_U32 = (1 << 32) - 1
P = TypeVar("P", KeyPlanes, ValuePlanes)


class BlobError(KernelError):
    """Bytes that are no TQK1 or TQV1 blob."""


def write_keys(keys: KeyPlanes) -> bytes:
    """``keys`` of a layer as a TQK1 blob. Raises KernelError."""
    return _write(b"TQK1", keys)


def write_values(values: ValuePlanes) -> bytes:
    """``values`` of a layer as a TQV1 blob. Raises KernelError."""
    return _write(b"TQV1", values)


def read_keys(blob: bytes | bytearray | memoryview) -> KeyPlanes:
    """The planes of a TQK1 blob, as copies in token order. Raises BlobError."""
    return _read(b"TQK1", 8, KeyPlanes, memoryview(blob))


def read_values(blob: bytes | bytearray | memoryview) -> ValuePlanes:
    """The planes of a TQV1 blob, as copies in token order. Raises BlobError."""
    return _read(b"TQV1", 4, ValuePlanes, memoryview(blob))


def _write(magic: bytes, planes: Planes) -> bytes:
    planes.check(2, "planes of a layer")
    rows, heads = planes.norms.shape
    if max(rows, heads, planes.size) > _U32 or not heads or not planes.size:
        raise KernelError(f"{rows} rows of {heads} heads with {planes.size} channels have no blob")
    body = [np.ascontiguousarray(np.swapaxes(getattr(planes, name), 0, 1)).tobytes() for name in planes.bits]
    return b"".join([_HEADER.pack(magic, heads, planes.size, rows), *body])


def _read(magic: bytes, step: int, kind: type[P], blob: memoryview) -> P:
    """Counts are multiplied as unbounded whole numbers and compared before anything is allocated."""
    blob = blob.cast("B")
    name = magic.decode()
    if len(blob) < _HEADER.size:
        raise BlobError(f"{name}: {len(blob)} bytes, expected a header of {_HEADER.size}")
    found, heads, size, rows = _HEADER.unpack_from(blob)
    if found != magic:
        raise BlobError(f"{name}: begins with {found!r}")
    if heads == 0 or size == 0 or size % step:
        raise BlobError(f"{name}: {heads} heads of {size} channels, expected some, and a multiple of {step} channels")
    expected = _HEADER.size + heads * rows * kind.row_bytes(size)
    if len(blob) != expected:
        raise BlobError(f"{name}: {len(blob)} bytes, expected {expected} for {rows} rows of {heads} heads with {size} channels")
    arrays: dict[str, Any] = {}
    at = _HEADER.size
    for plane, bits in kind.bits.items():
        width = size * bits // 8 if bits else 2
        part = np.frombuffer(blob[at : at + heads * rows * width], np.uint8).reshape(heads, rows, width)
        at += heads * rows * width
        copied = np.ascontiguousarray(np.swapaxes(part, 0, 1))
        arrays[plane] = copied if bits else copied.view("<f2")[..., 0]
        if not bits:
            _check_norms(f"{name}, {plane}", arrays[plane])
    return kind(size, **arrays)


def _check_norms(where: str, norms: F16) -> None:
    bad = ~np.isfinite(norms) | np.signbit(norms)
    if bad.any():
        row, head = (int(index) for index in np.argwhere(bad)[0])
        raise BlobError(f"{where}: {float(norms[row, head])} for head {head} at row {row}, expected a finite length")
