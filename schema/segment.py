"""The container: preamble, FlatBuffers header, payload, digests (docs/formats.md).

A container is what a sealed memfd holds, what an export file holds, and, cut into head and
4 MiB chunks, what the cold tier holds. Decoding checks length, magic, version, caps and digest
before any accessor of the header runs, and every bound of every plane before a header is
handed out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Union

import flatbuffers
import numpy as np
import xxhash

from warmkv.schema import flat
from warmkv.schema.errors import DigestError, FormatError, RecordError, TooNewError
from warmkv.schema.generated import container_generated as gen
from warmkv.schema.records import (
    ALIGNMENT,
    ID_BYTES,
    MAX_TOKENS,
    Attachment,
    Lineage,
    NamespaceKey,
    Plane,
    RecordId,
    Tokens,
    pack_attachments,
    pack_planes,
    unpack_attachments,
    unpack_planes,
)

MAGIC = b"WARMKV\r\n"
MAJOR, MINOR = 1, 0
#: Payload digests cover pieces of this size; the cold tier stores the same pieces.
CHUNK_BYTES = 4 << 20
#: The payload begins on a page, so that views and reads of it are aligned.
PAYLOAD_ALIGNMENT = 4096
PREAMBLE = struct.Struct("<8sHHBBHIQQ16s12s")
MAX_HEADER_BYTES = 96 << 20
MAX_PAYLOAD_BYTES = 1 << 44
#: Headers up to this size are remembered after decoding (see `_read_header`).
REMEMBERED_HEADER_BYTES = 256 << 10
assert PREAMBLE.size == 64
#: Where the preamble has the digest, and what stands there and behind it when it is taken.
_DIGEST_AT = 36
_NO_DIGEST = bytes(PREAMBLE.size - _DIGEST_AT)


class ContainerKind(IntEnum):
    SEGMENT = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Header of rows [start, end); ``tokens`` are those positions, ``attachments`` those that
    begin among them, ``digests`` one 16-byte xxh3-128 per 4 MiB of payload."""

    id: RecordId
    namespace: NamespaceKey
    lineage: Lineage
    parent: RecordId
    start: int
    end: int
    tokens: Tokens
    attachments: tuple[Attachment, ...]
    planes: tuple[Plane, ...]
    digests: bytes
    created_ns: int
    writer: str


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Header of what layers have at exactly ``position``."""

    id: RecordId
    namespace: NamespaceKey
    lineage: Lineage
    parent: RecordId
    position: int
    attachments: tuple[Attachment, ...]
    planes: tuple[Plane, ...]
    digests: bytes
    created_ns: int
    writer: str


Header = Union[SegmentHeader, StateHeader]


@dataclass(frozen=True, slots=True)
class Head:
    """A decoded head: the header and where the payload lies in the container."""

    header: Header
    head_bytes: int
    payload_offset: int
    payload_bytes: int

    @property
    def container_bytes(self) -> int:
        return self.payload_offset + self.payload_bytes


def align(value: int, to: int = ALIGNMENT) -> int:
    return -(-value // to) * to


def layout(planes: Sequence[Plane]) -> tuple[tuple[Plane, ...], int]:
    """Planes with offsets assigned in order, each at a multiple of 64, and the payload's bytes."""
    placed, offset = [], 0
    for plane in planes:
        offset = align(offset)
        placed.append(replace(plane, offset=offset))
        offset += plane.total_bytes
    return tuple(placed), offset


def chunk_count(payload_bytes: int) -> int:
    return -(-payload_bytes // CHUNK_BYTES)


def payload_digests(payload: memoryview | bytes) -> bytes:
    """One xxh3-128 per 4 MiB of ``payload``, in order."""
    view = memoryview(payload)
    pieces = range(0, len(view), CHUNK_BYTES)
    return b"".join(xxhash.xxh3_128_digest(view[at : at + CHUNK_BYTES]) for at in pieces)


def encode_head(header: Header, payload_bytes: int) -> bytes:
    """Preamble and header. The length depends on counts only, not on digests, so a writer may
    lay out the payload first and encode the final head afterwards.

    Raises RecordError for a value its field cannot hold."""
    is_segment = isinstance(header, SegmentHeader)
    try:
        body = _encode_segment(header) if isinstance(header, SegmentHeader) else _encode_state(header)
    except (TypeError, ValueError, OverflowError, struct.error) as exc:
        raise RecordError(f"{type(header).__name__} has a value its field cannot hold: {exc}") from exc
    kind = ContainerKind.SEGMENT if is_segment else ContainerKind.STATE
    offset = align(PREAMBLE.size + len(body), PAYLOAD_ALIGNMENT)
    fields = (MAGIC, MAJOR, MINOR, int(kind), 0, 0, len(body), offset, payload_bytes)
    digest = xxhash.xxh3_128_digest(PREAMBLE.pack(*fields, b"", b"") + body)
    return PREAMBLE.pack(*fields, digest, b"") + body


def head_digest(data: bytes) -> bytes:
    """The digest that a head, alone in ``data``, carries and matches: bytes with an equal one are the
    same head. Raises FormatError, of what `decode_head` checks, for flipped bits and a wrong length."""
    header_bytes, digest = int(_check_preamble(data)[6]), data[_DIGEST_AT : _DIGEST_AT + 16]
    if len(data) != PREAMBLE.size + header_bytes:
        raise FormatError(f"container head has {len(data)} bytes, its preamble claims {PREAMBLE.size + header_bytes}")
    if xxhash.xxh3_128_digest(data[:_DIGEST_AT] + _NO_DIGEST + data[PREAMBLE.size :]) != digest:
        raise DigestError("container head does not match its digest")
    return digest


def is_head(data: bytes, digest: bytes) -> bool:
    """Whether ``data`` is, byte for byte, the head for which `head_digest` said ``digest``."""
    if data[_DIGEST_AT : PREAMBLE.size] != digest + _NO_DIGEST[len(digest) :]:
        return False
    return bool(xxhash.xxh3_128_digest(data[:_DIGEST_AT] + _NO_DIGEST + data[PREAMBLE.size :]) == digest)


def head_size(preamble: bytes) -> int:
    """Bytes of preamble and header together, from the first 64 bytes alone."""
    return PREAMBLE.size + int(_check_preamble(preamble)[6])


def decode_head(data: bytes | memoryview, container_bytes: int | None = None) -> Head:
    """Check and decode a head. ``data`` begins with it and may go on; ``container_bytes`` is the
    size of the whole container where the caller knows it (a file, a memfd).

    Raises FormatError (TooNewError for a newer major version, DigestError for flipped bits)."""
    view = memoryview(data)
    fields = _check_preamble(bytes(view[: PREAMBLE.size]))
    kind, header_bytes, offset, payload_bytes, digest = fields[3], fields[6], fields[7], fields[8], fields[9]
    end = PREAMBLE.size + header_bytes
    if len(view) < end:
        raise FormatError(f"container head is cut: {len(view)} bytes, the preamble claims {end}")
    body = bytes(view[PREAMBLE.size : end])
    if xxhash.xxh3_128_digest(PREAMBLE.pack(*fields[:9], b"", b"") + body) != digest:
        raise DigestError("container head does not match its digest")
    if offset != align(end, PAYLOAD_ALIGNMENT):
        raise FormatError(f"payload begins at {offset}, expected {align(end, PAYLOAD_ALIGNMENT)}")
    if container_bytes is not None and container_bytes != offset + payload_bytes:
        raise FormatError(f"container has {container_bytes} bytes, its head describes {offset + payload_bytes}")
    read = _read_header if len(body) <= REMEMBERED_HEADER_BYTES else _read_header.__wrapped__
    return Head(read(kind, body, payload_bytes), end, offset, payload_bytes)


@lru_cache(maxsize=256)
def _read_header(kind: int, body: bytes, payload_bytes: int) -> Header:
    """The checked header behind ``body``. The same segments are mapped again and again, hence
    the memory; it compares whole bodies, so one header never stands in for another."""
    with flat.reading("container header"):
        header: Header = _decode_segment(body) if kind == ContainerKind.SEGMENT else _decode_state(body)
    _check_header(header, payload_bytes)
    if isinstance(header, SegmentHeader):
        header.tokens.flags.writeable = False
    return header


def _check_preamble(data: bytes) -> tuple:  # type: ignore[type-arg]
    if len(data) < PREAMBLE.size:
        raise FormatError(f"container preamble is {len(data)} bytes, expected {PREAMBLE.size}")
    fields = PREAMBLE.unpack(data[: PREAMBLE.size])
    if fields[0] != MAGIC:
        raise FormatError(f"magic is {fields[0]!r}, expected {MAGIC!r}")
    if fields[1] > MAJOR:
        raise TooNewError(f"container major version {fields[1]}, this program reads up to {MAJOR}")
    if fields[1] != MAJOR or fields[4] or fields[5] or any(fields[10]):
        raise FormatError(f"container version {fields[1]}.{fields[2]} with reserved bytes {fields[4:6]} is not readable")
    if fields[3] not in (ContainerKind.SEGMENT, ContainerKind.STATE):
        raise FormatError(f"container kind {fields[3]} is unknown")
    if fields[6] > MAX_HEADER_BYTES or fields[8] > MAX_PAYLOAD_BYTES:
        raise FormatError(f"header of {fields[6]} or payload of {fields[8]} bytes is beyond the caps")
    return fields


def _check_header(header: Header, payload_bytes: int) -> None:
    """Everything a reader relies on: token count, attachments, plane bounds, digest count."""
    if isinstance(header, SegmentHeader):
        if not 0 <= header.start < header.end <= MAX_TOKENS:
            raise FormatError(f"segment rows [{header.start}, {header.end}) are empty, reversed or too many")
        if len(header.tokens) != header.end - header.start:
            raise FormatError(f"segment [{header.start}, {header.end}) carries {len(header.tokens)} tokens")
        first, last = header.start, header.end
    else:
        if not 0 <= header.position <= MAX_TOKENS:
            raise FormatError(f"state position {header.position} is out of range")
        # What a state holds is not counted in tokens: a ring has its own rows, an encoder's
        # output those of its input.
        first, last = 0, MAX_TOKENS
    _check_attachments(header.attachments, first, last if isinstance(header, SegmentHeader) else header.position)
    _check_planes(header.planes, payload_bytes, first, last)
    expected = ID_BYTES * chunk_count(payload_bytes)
    if len(header.digests) != expected:
        raise FormatError(f"{len(header.digests)} bytes of digests, {payload_bytes} bytes of payload need {expected}")


def _check_attachments(attachments: tuple[Attachment, ...], first: int, last: int) -> None:
    before = first
    for item in attachments:
        if item.length < 1 or item.start < before or item.end > last:
            raise FormatError(f"attachment [{item.start}, {item.end}) leaves [{first}, {last}) or overlaps another")
        before = item.end


def _check_planes(planes: tuple[Plane, ...], payload_bytes: int, first: int, last: int) -> None:
    end = 0
    for plane in sorted(planes, key=lambda item: (item.offset, item.total_bytes)):
        name = f"plane {plane.role.name} of layer {plane.layer}"
        if plane.offset % ALIGNMENT or plane.offset < end:
            raise FormatError(f"{name} at {plane.offset} is unaligned or overlaps the plane before it, which ends at {end}")
        end = plane.offset + plane.total_bytes
        if end > payload_bytes:
            raise FormatError(f"{name} ends at {end}, the payload at {payload_bytes}")
        if plane.first_row < first or plane.first_row + plane.rows > last:
            rows = f"[{plane.first_row}, {plane.first_row + plane.rows})"
            raise FormatError(f"{name} holds rows {rows} outside [{first}, {last})")
    if len({(plane.layer, plane.role) for plane in planes}) != len(planes):
        raise FormatError("two planes of one layer and role")
    if align(end) < payload_bytes:
        raise FormatError(f"{payload_bytes - end} bytes of payload behind the last plane")


def _encode_segment(header: SegmentHeader) -> bytes:
    builder = flatbuffers.Builder(1024 + header.tokens.nbytes)
    id_ = flat.put_bytes(builder, header.id)
    namespace = flat.put_bytes(builder, header.namespace)
    lineage = flat.put_bytes(builder, header.lineage)
    parent = flat.put_bytes(builder, header.parent)
    tokens = flat.put_array(builder, header.tokens, "<u4")
    attachments = flat.put_bytes(builder, pack_attachments(header.attachments))
    planes = flat.put_bytes(builder, pack_planes(header.planes))
    digests = flat.put_bytes(builder, header.digests)
    writer = builder.CreateString(header.writer)
    gen.SegmentHeaderStart(builder)
    gen.SegmentHeaderAddId(builder, id_)
    gen.SegmentHeaderAddNamespace(builder, namespace)
    gen.SegmentHeaderAddLineage(builder, lineage)
    gen.SegmentHeaderAddParent(builder, parent)
    gen.SegmentHeaderAddStart(builder, header.start)
    gen.SegmentHeaderAddEnd(builder, header.end)
    gen.SegmentHeaderAddTokens(builder, tokens)
    gen.SegmentHeaderAddAttachments(builder, attachments)
    gen.SegmentHeaderAddPlanes(builder, planes)
    gen.SegmentHeaderAddDigests(builder, digests)
    gen.SegmentHeaderAddCreatedNs(builder, header.created_ns)
    gen.SegmentHeaderAddWriter(builder, writer)
    builder.Finish(gen.SegmentHeaderEnd(builder))
    return bytes(builder.Output())


def _encode_state(header: StateHeader) -> bytes:
    builder = flatbuffers.Builder(1024)
    id_ = flat.put_bytes(builder, header.id)
    namespace = flat.put_bytes(builder, header.namespace)
    lineage = flat.put_bytes(builder, header.lineage)
    parent = flat.put_bytes(builder, header.parent)
    attachments = flat.put_bytes(builder, pack_attachments(header.attachments))
    planes = flat.put_bytes(builder, pack_planes(header.planes))
    digests = flat.put_bytes(builder, header.digests)
    writer = builder.CreateString(header.writer)
    gen.StateHeaderStart(builder)
    gen.StateHeaderAddId(builder, id_)
    gen.StateHeaderAddNamespace(builder, namespace)
    gen.StateHeaderAddLineage(builder, lineage)
    gen.StateHeaderAddParent(builder, parent)
    gen.StateHeaderAddPosition(builder, header.position)
    gen.StateHeaderAddAttachments(builder, attachments)
    gen.StateHeaderAddPlanes(builder, planes)
    gen.StateHeaderAddDigests(builder, digests)
    gen.StateHeaderAddCreatedNs(builder, header.created_ns)
    gen.StateHeaderAddWriter(builder, writer)
    builder.Finish(gen.StateHeaderEnd(builder))
    return bytes(builder.Output())


def _id(value: object, what: str) -> bytes:
    data = flat.octets(value)
    if len(data) != ID_BYTES:
        raise FormatError(f"{what} has {len(data)} bytes, expected {ID_BYTES}")
    return data


def _decode_segment(body: bytes) -> SegmentHeader:
    table = gen.SegmentHeader.GetRootAs(body, 0)
    return SegmentHeader(
        id=RecordId(_id(table.IdAsNumpy(), "segment id")),
        namespace=NamespaceKey(_id(table.NamespaceAsNumpy(), "namespace")),
        lineage=Lineage(_id(table.LineageAsNumpy(), "lineage")),
        parent=RecordId(_id(table.ParentAsNumpy(), "parent")),
        start=table.Start(),
        end=table.End(),
        tokens=np.ascontiguousarray(flat.vector(table.TokensAsNumpy(), "<u4"), dtype="<u4"),
        attachments=unpack_attachments(flat.octets(table.AttachmentsAsNumpy())),
        planes=unpack_planes(flat.octets(table.PlanesAsNumpy())),
        digests=flat.octets(table.DigestsAsNumpy()),
        created_ns=table.CreatedNs(),
        writer=flat.text(table.Writer()),
    )


def _decode_state(body: bytes) -> StateHeader:
    table = gen.StateHeader.GetRootAs(body, 0)
    return StateHeader(
        id=RecordId(_id(table.IdAsNumpy(), "state id")),
        namespace=NamespaceKey(_id(table.NamespaceAsNumpy(), "namespace")),
        lineage=Lineage(_id(table.LineageAsNumpy(), "lineage")),
        parent=RecordId(_id(table.ParentAsNumpy(), "parent")),
        position=table.Position(),
        attachments=unpack_attachments(flat.octets(table.AttachmentsAsNumpy())),
        planes=unpack_planes(flat.octets(table.PlanesAsNumpy())),
        digests=flat.octets(table.DigestsAsNumpy()),
        created_ns=table.CreatedNs(),
        writer=flat.text(table.Writer()),
    )
