"""Rows and states on their way into a sealed container.

Planes end up token-major, so that a prefix of tokens is a prefix of bytes. Strided rows are
gathered through a small buffer; the payload is hashed while it is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash

from warmkv.kvstore import memfd
from warmkv.kvstore.rows import Array, PlaneRows
from warmkv.schema import ids
from warmkv.schema import segment as container
from warmkv.schema.records import NO_FIELD, Attachment, Lineage, NamespaceKey, Plane, RecordId, Tokens, coverage

#: Strided rows are gathered through a buffer that stays in the processor's cache.
GATHER_BYTES = 1 << 20
WRITER = "warmkv 1"


@dataclass(frozen=True, slots=True)
class PlaneSource:
    """Where a plane's bytes come from: ``rows`` are those from position ``first_row`` on, of
    ``row_shape`` as the identity has it."""

    layer: int
    row_shape: tuple[int, ...]
    first_row: int
    plane: PlaneRows

    @property
    def described(self) -> Plane:
        rows = self.plane.rows
        size = int(np.prod(rows.shape[1:])) * rows.itemsize
        field = self.plane.field or NO_FIELD
        return Plane(self.layer, self.plane.role, self.plane.format, self.row_shape, self.first_row, len(rows), size, field=field)


@dataclass(frozen=True, slots=True)
class Container:
    """A sealed container ready to be passed on. ``close`` it once it was."""

    fd: int
    id: RecordId
    total_bytes: int

    def close(self) -> None:
        os.close(self.fd)


def write_segment(
    namespace: NamespaceKey, lineage: Lineage, parent: RecordId, start: int, tokens: Tokens,
    attachments: Sequence[Attachment], sources: Sequence[PlaneSource],
) -> Container:  # fmt: skip
    """Write rows of [start, len(tokens)) into a new sealed memfd. ``tokens`` and ``attachments``
    are those of the whole prefix."""
    end = len(tokens)
    ordered, planes, payload_bytes = _placed(sources)
    before = [item for item in attachments if item.start < end]
    header = container.SegmentHeader(
        id=ids.segment_id(namespace, lineage, start, coverage(planes), before, tokens),
        namespace=namespace, lineage=lineage, parent=parent, start=start, end=end, tokens=tokens[start:],
        attachments=tuple(item for item in before if start <= item.start), planes=planes,
        digests=bytes(16 * container.chunk_count(payload_bytes)), created_ns=time.time_ns(), writer=WRITER,
    )  # fmt: skip
    return _write(header, payload_bytes, ordered)


def write_state(
    namespace: NamespaceKey, lineage: Lineage, parent: RecordId, tokens: Tokens, attachments: Sequence[Attachment],
    sources: Sequence[PlaneSource],
) -> Container:  # fmt: skip
    """Write states at position len(tokens) into a new sealed memfd."""
    ordered, planes, payload_bytes = _placed(sources)
    before = tuple(item for item in attachments if item.start < len(tokens))
    header = container.StateHeader(
        id=ids.state_id(namespace, lineage, coverage(planes), before, tokens),
        namespace=namespace, lineage=lineage, parent=parent, position=len(tokens), attachments=before, planes=planes,
        digests=bytes(16 * container.chunk_count(payload_bytes)), created_ns=time.time_ns(), writer=WRITER,
    )  # fmt: skip
    return _write(header, payload_bytes, ordered)


def _placed(sources: Sequence[PlaneSource]) -> tuple[list[PlaneSource], tuple[Plane, ...], int]:
    ordered = sorted(sources, key=lambda item: (item.layer, item.plane.role))
    planes, payload_bytes = container.layout([item.described for item in ordered])
    return ordered, planes, payload_bytes


def _write(header: container.Header, payload_bytes: int, sources: Sequence[PlaneSource]) -> Container:
    head = container.encode_head(header, payload_bytes)
    offset = container.align(len(head), container.PAYLOAD_ALIGNMENT)
    fd = memfd.create(f"warmkv:{header.id.hex()}", offset + payload_bytes)
    try:
        digests = _write_payload(fd, offset, header.planes, sources)
        memfd.write(fd, container.encode_head(replace(header, digests=digests), payload_bytes), 0)
        memfd.seal(fd)
    except BaseException:
        os.close(fd)
        raise
    return Container(fd, header.id, offset + payload_bytes)


def _write_payload(fd: int, base: int, planes: Sequence[Plane], sources: Sequence[PlaneSource]) -> bytes:
    """pwrite the planes, hashing each 4 MiB of payload on the way; the digests."""
    digests: list[bytes] = []
    hasher, filled, at = xxhash.xxh3_128(), 0, 0
    for plane, source in zip(planes, sources, strict=True):
        hasher, filled = _hash(hasher, filled, memoryview(bytes(plane.offset - at)), digests)
        at = plane.offset
        for piece in _pieces(source.plane.rows):
            memfd.write(fd, piece, base + at)
            hasher, filled = _hash(hasher, filled, piece, digests)
            at += len(piece)
    if filled:
        digests.append(hasher.digest())
    return b"".join(digests)


def _hash(hasher: xxhash.xxh3_128, filled: int, piece: memoryview, digests: list[bytes]) -> tuple[xxhash.xxh3_128, int]:
    """Feed a piece, closing a digest at each chunk boundary; the open hasher and its fill."""
    while len(piece):
        take = piece[: container.CHUNK_BYTES - filled]
        hasher.update(take)
        filled, piece = filled + len(take), piece[len(take) :]
        if filled == container.CHUNK_BYTES:
            digests.append(hasher.digest())
            hasher, filled = xxhash.xxh3_128(), 0
    return hasher, filled


def _pieces(rows: Array) -> Iterator[memoryview]:
    """The rows' bytes in token order, in pieces of about 1 MiB; contiguous rows are not copied."""
    if rows.size == 0:
        return
    step = max(1, GATHER_BYTES // (rows[0].nbytes))
    contiguous = rows.flags.c_contiguous
    buffer = None if contiguous else np.empty((min(step, len(rows)), *rows.shape[1:]), rows.dtype)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if buffer is not None:
            np.copyto(buffer[: len(part)], part)
            part = buffer[: len(part)]
        yield part.view(np.uint8).reshape(-1).data
