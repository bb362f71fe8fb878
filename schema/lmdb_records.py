"""Values of the cold tier's tables that are not containers (docs/formats.md).

Keys are fixed-size binary: 16-byte ids, or an id followed by big-endian numbers so that the
pieces of a record lie next to each other in order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from warmkv.schema import canonical
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, RecordId, pack_anchors, unpack_anchors

#: 2: states beside segments, segments that hold rows of some layers only. A store of format 1
#: is one without either; opening it makes it a store of format 2, which older programs refuse.
#: 2.1: usage names prefill time and when it was used last, where 2.0 has zeros; summaries (see
#: `schema.summary`), made from the heads where they are missing.
STORE_MAJOR, STORE_MINOR = 2, 1
TABLES = (b"meta", b"namespaces", b"segments", b"states", b"chunks", b"usage", b"anchors", b"quarantine", b"summaries")
_USAGE = struct.Struct("<QQQII")
_U32 = 2**32 - 1
_CHUNK = struct.Struct(">16sI")
_ANCHOR = struct.Struct(">16sQB")
_FORMAT = struct.Struct("<HH")


class Usage(NamedTuple):
    """``last_used`` is a logical counter, not a clock; ``pinned_until_ns`` and ``used_at_s`` are wall
    clock. ``prefill_us`` is how long the record's own rows took to compute; 0 where nobody said."""

    last_used: int
    hits: int
    pinned_until_ns: int
    prefill_us: int = 0
    used_at_s: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceRecord:
    """Who owns a namespace and whose state it holds. ``share`` empty: the uid's own."""

    owner_uid: int
    share: str
    identity: Identity
    created_ns: int


def chunk_key(record: RecordId, index: int) -> bytes:
    return _CHUNK.pack(record, index)


def split_chunk_key(key: bytes) -> tuple[RecordId, int]:
    if len(key) != _CHUNK.size:
        raise FormatError(f"chunk key has {len(key)} bytes, expected {_CHUNK.size}")
    record, index = _CHUNK.unpack(key)
    return RecordId(record), index


def anchor_key(record: RecordId, anchor: Anchor) -> bytes:
    return _ANCHOR.pack(record, anchor.position, int(anchor.kind))


def encode_anchor(anchor: Anchor) -> bytes:
    return pack_anchors([anchor])


def decode_anchor(data: bytes) -> Anchor:
    anchors = unpack_anchors(data)
    if len(anchors) != 1:
        raise FormatError(f"anchor value holds {len(anchors)} anchors, expected 1")
    return anchors[0]


def encode_usage(usage: Usage) -> bytes:
    prefill_us, used_at_s = min(usage.prefill_us, _U32), min(usage.used_at_s, _U32)
    return _USAGE.pack(usage.last_used, usage.hits, usage.pinned_until_ns, prefill_us, used_at_s)


def decode_usage(data: bytes) -> Usage:
    if len(data) != _USAGE.size:
        raise FormatError(f"usage value has {len(data)} bytes, expected {_USAGE.size}")
    return Usage(*_USAGE.unpack(data))


def encode_namespace(record: NamespaceRecord) -> bytes:
    return canonical.encode(("namespace", record.owner_uid, record.share, record.identity.canonical(), record.created_ns))


def decode_namespace(data: bytes) -> NamespaceRecord:
    try:
        tag, uid, share, identity, created = canonical.decode(data)  # type: ignore[misc]
    except (TypeError, ValueError) as exc:
        raise FormatError("namespace value is not readable") from exc
    if tag != "namespace" or type(uid) is not int or not isinstance(share, str) or not isinstance(identity, bytes):
        raise FormatError("namespace value has unexpected fields")
    if type(created) is not int:
        raise FormatError("namespace value has unexpected fields")
    return NamespaceRecord(uid, share, Identity.from_canonical(identity), created)


def encode_format() -> bytes:
    return _FORMAT.pack(STORE_MAJOR, STORE_MINOR)


def decode_format(data: bytes) -> tuple[int, int]:
    if len(data) != _FORMAT.size:
        raise FormatError(f"store format value has {len(data)} bytes, expected {_FORMAT.size}")
    major, minor = _FORMAT.unpack(data)
    return int(major), int(minor)
