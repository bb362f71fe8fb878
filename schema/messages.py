"""Wire messages as frozen dataclasses, and their FlatBuffers spelling.

Each class mirrors one table of ``fbs/wire.fbs``; the annotation of a field picks its spelling.
The in-process engine and the socket speak in these same objects.
"""

from __future__ import annotations

import struct
import typing
from dataclasses import dataclass, fields
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from warmkv.schema import flat
from warmkv.schema.errors import FormatError
from warmkv.schema.generated import wire_generated as gen
from warmkv.schema.records import MAX_TOKENS, NamespaceKey, RecordId, Tokens
from warmkv.schema.tables import Tables, field_of, read, table_at

#: Largest body a peer may announce: the longest prompt, twice, with room for the rest.
MAX_BODY_BYTES = 4 * MAX_TOKENS + (4 << 20)
MAX_FDS = 250
#: Packed rows of Acquired.spans: which rows [start, end) each passed descriptor contributes.
#: The span of a state is empty, at its position.
SPAN_DTYPE = np.dtype([("id", "u1", (16,)), ("start", "<u8"), ("end", "<u8"), ("container_bytes", "<u8")])
#: Packed rows of Matched.groups: a layer of the group, and what of the query it could resume from.
GROUP_DTYPE = np.dtype([("layer", "<u8"), ("usable", "<u8")])

AT_LONGEST, AT_ANCHOR = 0, 1
ACK_MEMORY, ACK_DISK = 0, 1
TIER_NONE, TIER_WARM, TIER_COLD = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a client: the protocol versions it speaks."""

    version_min: int
    version_max: int
    client: str
    pid: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The version chosen, the daemon's epoch, and the uid it took the client for."""

    version: int
    epoch: int
    server: str
    max_body_bytes: int
    uid: int


@dataclass(frozen=True, slots=True)
class Open:
    """Announce an identity on this connection (canonical bytes). Creates nothing."""

    identity: bytes
    share: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    namespace: NamespaceKey


@dataclass(frozen=True, slots=True)
class Match:
    """How much of these tokens is known, and from where one could resume.

    ``detail`` asks for it per group of layers; ``logits`` says that parked logits are of use, so
    that the whole query may be usable; with ``prefill_tps`` > 0 (tokens a second this client
    computes) what would take longer to load than to compute is not offered."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    at: int = AT_LONGEST
    detail: bool = False
    logits: bool = False
    prefill_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class Matched:
    """``groups`` are packed GROUP_DTYPE rows, ``identity_difference`` the names, separated by
    commas, of the fields in which the nearest readable model differs where none is the same."""

    matched: int = 0
    usable: int = 0
    tier: int = TIER_NONE
    segments: int = 0
    total_bytes: int = 0
    load_us: int = 0
    anchors: bytes = b""
    diff_position: int = -1
    diff_query: int = 0
    diff_stored: int = 0
    reason: str = ""
    epoch: int = 0
    groups: bytes = b""
    identity_difference: str = ""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Match, lease and promote in one round; the reply carries descriptors. ``limit`` > 0 asks
    for at most that many tokens.

    With ``wait_ms`` > 0 a peer that computes a prefix of these tokens right now is waited for;
    where there is none, and tokens are missing, the reply's ``flight`` names this client as the
    one who computes them, until it is released like a lease."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    at: int = AT_LONGEST
    limit: int = 0
    logits: bool = False
    prefill_tps: float = 0.0
    wait_ms: int = 0


@dataclass(frozen=True, slots=True)
class Acquired(Matched):
    lease: int = 0
    promoted_bytes: int = 0
    spans: bytes = b""
    flight: int = 0
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Promote what a later Acquire will want; hands out nothing."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    at: int = AT_LONGEST


@dataclass(frozen=True, slots=True)
class Release:
    """End leases. One-way: there is no reply."""

    leases: npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Offer:
    """What of these tokens is held? ``row_bytes`` per missing token plus ``fixed_bytes`` are
    reserved for the upload. ``window_from`` is the first row of the earliest window at hand, 0
    where layers have none; ``fields`` the digests of the quantisation fields of the rows."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    fields: bytes = b""
    row_bytes: int = 0
    fixed_bytes: int = 0
    window_from: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """All that every token needs is held up to ``held``, the last of it by the segment
    ``parent``. ``runs`` are packed little-endian uint64, two per group of layers with rows: where
    the unbroken run of rows that ends at ``held`` begins, and where the one from 0 on ends.
    ``window_parent`` is the segment on which rows from ``window_from`` would hang; ``provides``
    what states at the end of the tokens hold."""

    held: int
    parent: RecordId
    reservation: int
    reserved_bytes: int
    epoch: int
    runs: bytes = b""
    window_parent: bytes = b""
    provides: int = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Take the sealed container passed with this message. Answered when ``ack`` is reached.
    ``more`` keeps what is left of the reservation for another container. ``prefill_us`` is how long
    its own rows took to compute; 0: unknown."""

    namespace: NamespaceKey
    epoch: int
    reservation: int
    ack: int = ACK_MEMORY
    anchors: bytes = b""
    more: bool = False
    prefill_us: int = 0


@dataclass(frozen=True, slots=True)
class Annotate:
    """Name anchors, and wait until what is held of these tokens, states at their end included,
    reaches ``ack``. Ends a save that had nothing, or several containers, to send. With
    ``complete`` all that is needed to resume at their end, states that provide ``provides`` among
    it, must be there."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    ack: int = ACK_MEMORY
    anchors: bytes = b""
    reservation: int = 0
    complete: bool = False
    provides: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    id: RecordId
    held: int
    stored_bytes: int
    duplicate: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the chain of these tokens for ``ttl_ms``; 0 unpins."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    held: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop, in both tiers, what of this prefix no other prefix needs."""

    namespace: NamespaceKey
    lineage: bytes
    tokens: Tokens
    attachments: bytes = b""


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop a whole namespace, or everything this peer may write."""

    namespace: bytes = b""
    everything: bool = False


@dataclass(frozen=True, slots=True)
class Forgotten:
    records: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """An administrative question; ``arguments`` is a JSON object. Export and import come with the
    open file they are about, every other report without."""

    verb: str
    arguments: bytes = b"{}"


@dataclass(frozen=True, slots=True)
class Document:
    json: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """The request failed; ``code`` is that of the error class (schema/errors.py)."""

    code: int
    message: str
    retryable: bool


Message = Union[
    Hello, Welcome, Open, Opened, Match, Matched, Acquire, Acquired, Prefetch, Release, Offer, Offered, Commit,
    Annotate, Committed, Pin, Pinned, Forget, Clear, Forgotten, Report, Document, Fault,
]  # fmt: skip
CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Message)}

#: Byte fields of a fixed length.
_SIZES = {"namespace": (0, 16), "lineage": (16,), "parent": (16,), "id": (16,), "window_parent": (0, 16)}
#: Elements of the array fields.
_ELEMENTS = {"tokens": "<u4", "leases": "<u8"}
#: Text for people: a file name in it that is not UTF-8 must not cost the peer its answer.
_PROSE = frozenset({"message"})


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is spelled."""

    name: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a message class is spelled."""

    fields: tuple[_Field, ...]
    tables: Tables
    number: int


def _spelling(cls: type[Any]) -> _Spelling:
    hints = typing.get_type_hints(cls)
    name, rows, found = cls.__name__, [], []
    for item in fields(cls):
        hint = hints[item.name]
        kind = "scalar" if hint in (int, bool, float) else "text" if hint is str else "array"
        if hint is bytes or getattr(hint, "__supertype__", None) is bytes:
            kind = "bytes"
        camel = "".join(part.capitalize() for part in item.name.split("_"))
        rows.append(_Field(item.name, kind))
        found.append(field_of(getattr(gen, f"{name}Add{camel}")))
    return _Spelling(tuple(rows), Tables(_ENVELOPE, found), getattr(gen.Body, name))


_ENVELOPE = tuple(field_of(setter) for setter in (gen.MessageAddId, gen.MessageAddBodyType, gen.MessageAddBody))
SPELLINGS = {cls: _spelling(cls) for cls in CLASSES.values()}
_BY_NUMBER = {spelling.number: cls for cls, spelling in SPELLINGS.items()}


def encode(message: Message, request_id: int) -> bytes:
    """Body of a frame. Raises FormatError for a value its field cannot hold."""
    spelling = SPELLINGS[type(message)]
    values: list[Any] = []
    try:
        for field in spelling.fields:
            value = getattr(message, field.name)
            if field.kind == "bytes":
                value = (len(value), 1, bytes(value))
            elif field.kind == "text":
                data = value.encode("utf-8", "backslashreplace" if field.name in _PROSE else "strict")
                value = (len(data), 1, data + b"\0")
            elif field.kind == "array":
                value = flat.elements(value, _ELEMENTS[field.name])
            values.append(value)
        return spelling.tables.write((request_id, spelling.number), values)
    except (TypeError, ValueError, AttributeError, OverflowError, struct.error) as exc:
        raise FormatError(f"{type(message).__name__} has a value its field cannot hold: {exc}") from exc


def decode(body: bytes) -> tuple[int, Message]:
    """Request id and message of a frame's body. Raises FormatError; never reads outside it."""
    if not 16 <= len(body) <= MAX_BODY_BYTES:
        raise FormatError(f"message body has {len(body)} bytes, expected 16..{MAX_BODY_BYTES}")
    with flat.reading("message"):
        request_id, number, (at, _) = read(_ENVELOPE, body, table_at(body, 0))
        cls = _BY_NUMBER.get(number)
        if cls is None or not at:
            raise FormatError(f"message type {number} is unknown")
        spelling = SPELLINGS[cls]
        values = spelling.tables.read(body, at - 4)
        return request_id, cls(*[_value(field, value, body) for field, value in zip(spelling.fields, values, strict=True)])


def _value(field: _Field, raw: Any, body: bytes) -> object:
    if field.kind == "scalar":
        return raw
    at, count = raw
    if field.kind == "array":
        if not count:
            return np.zeros(0, _ELEMENTS[field.name])
        if count > MAX_TOKENS:
            raise FormatError(f"{field.name}: {count} elements, at most {MAX_TOKENS} are allowed")
        return flat.vector(np.frombuffer(body, _ELEMENTS[field.name], count, at), _ELEMENTS[field.name])
    if at + count > len(body):
        raise FormatError(f"{field.name}: {count} bytes at {at} of {len(body)}")
    data = body[at : at + count]
    if field.kind == "text":
        return flat.text(data)
    if field.name in _SIZES and len(data) not in _SIZES[field.name]:
        raise FormatError(f"{field.name} has {len(data)} bytes, expected {_SIZES[field.name]}")
    return data
