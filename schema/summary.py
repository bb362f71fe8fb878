"""What a restart wants to know of a stored record, packed into one small row beside its head.

A head has to be decoded plane by plane; a row is read at once. It says nothing that the head does
not say: it names the digest of the head it was made from, has a digest of its own over its key and
itself, and is made anew from the head where either does not fit. docs/formats.md has the layout.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.records import (
    ATTACHMENT_DTYPE,
    ID_BYTES,
    Attachment,
    Lineage,
    NamespaceKey,
    RecordId,
    pack_attachments,
    unpack_attachments,
)

#: Of the rules by which extents and uses follow from planes: a row of other rules is made anew.
VERSION = 1
_DIGEST_BYTES = 16
#: version, provides, tokens at; start, end, container bytes, payload bytes, created; head digest,
#: namespace, lineage, parent; extents, fields, attachments, bytes of the writer's name.
_ROW = struct.Struct("<HHIQQQQQ16s16s16s16sHHII")
_EXTENT = struct.Struct("<QQ")


class Summary(NamedTuple):
    """Of a segment or, where it ``provides`` something, a state (``start`` == ``end``).

    ``extents`` and ``fields`` are what a segment covers, one range a group of layers. A segment's
    tokens lie ``tokens_at`` bytes into its head, whose own digest is ``head_digest``."""

    head_digest: bytes
    namespace: NamespaceKey
    lineage: Lineage
    parent: RecordId
    start: int
    end: int
    total_bytes: int
    payload_bytes: int
    created_ns: int
    writer: str
    provides: int
    tokens_at: int
    extents: tuple[tuple[int, int], ...] = ()
    fields: tuple[bytes, ...] = ()
    attachments: tuple[Attachment, ...] = ()


def encode(id_: RecordId, summary: Summary) -> bytes:
    """The row of record ``id_``. Raises RecordError for a value its field cannot hold."""
    writer, attachments = summary.writer.encode("utf-8", "surrogatepass"), pack_attachments(summary.attachments)
    try:
        row = _ROW.pack(
            VERSION, summary.provides, summary.tokens_at, summary.start, summary.end, summary.total_bytes, summary.payload_bytes,
            summary.created_ns, summary.head_digest, summary.namespace, summary.lineage, summary.parent, len(summary.extents),
            len(summary.fields), len(summary.attachments), len(writer),
        )  # fmt: skip
        extents = b"".join(_EXTENT.pack(*extent) for extent in summary.extents)
    except struct.error as exc:
        raise RecordError(f"the summary of {id_.hex()} has a value its field cannot hold: {exc}") from exc
    body = b"".join((row, extents, *summary.fields, attachments, writer))
    return xxhash.xxh3_128_digest(id_ + body) + body


def decode(id_: RecordId, data: bytes) -> Summary:
    """Raises FormatError for what is no row of this record, or one made by other rules."""
    body = data[_DIGEST_BYTES:]
    if len(body) < _ROW.size or xxhash.xxh3_128_digest(id_ + body) != data[:_DIGEST_BYTES]:
        raise FormatError(f"the summary of {id_.hex()} ({len(data)} bytes) does not match its digest")
    (version, provides, tokens_at, start, end, total, payload, created, head, namespace, lineage, parent,
     extents, fields, attachments, writer) = _ROW.unpack_from(body)  # fmt: skip
    if version != VERSION:
        raise FormatError(f"the summary of {id_.hex()} is of version {version}, expected {VERSION}")
    fields_at = _ROW.size + _EXTENT.size * extents
    attachments_at = fields_at + ID_BYTES * fields
    writer_at = attachments_at + ATTACHMENT_DTYPE.itemsize * attachments
    if writer_at + writer != len(body):
        raise FormatError(f"the summary of {id_.hex()} has {len(body)} bytes, its counts need {writer_at + writer}")
    try:
        writer_name = body[writer_at:].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as exc:
        raise FormatError(f"the writer's name in the summary of {id_.hex()} is not UTF-8") from exc
    return Summary(
        head, namespace, lineage, parent, start, end, total, payload, created, writer_name,
        provides, tokens_at, _extents(body, extents),
        tuple(body[at : at + ID_BYTES] for at in range(fields_at, attachments_at, ID_BYTES)) if fields else (),
        unpack_attachments(body[attachments_at:writer_at]) if attachments else (),
    )  # fmt: skip


def _extents(body: bytes, count: int) -> tuple[tuple[int, int], ...]:
    if count == 1:  # most models, and a start reads hundreds of thousands
        return (_EXTENT.unpack_from(body, _ROW.size),)
    return tuple(_EXTENT.iter_unpack(body[_ROW.size : _ROW.size + _EXTENT.size * count]))
