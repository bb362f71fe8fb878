"""Records: what is stored about tokens, attachments, rows, states and anchors.

Frozen values with their packed little-endian spellings. Positions are token positions,
sizes are bytes. Nothing here reads or writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.identity import ELEMENT_BYTES, PlaneFormat, PlaneRole

NamespaceKey = NewType("NamespaceKey", bytes)
RecordId = NewType("RecordId", bytes)
Lineage = NewType("Lineage", bytes)
Tokens: TypeAlias = npt.NDArray[np.uint32]
TokensLike: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

ID_BYTES = 16
ROOT = RecordId(bytes(ID_BYTES))
#: Rows made by nothing but the model's own forward pass.
CLEAN = Lineage(bytes(ID_BYTES))
NO_FIELD = bytes(ID_BYTES)
MAX_TOKENS = 1 << 24
ALIGNMENT = 64

ATTACHMENT_DTYPE = np.dtype([("start", "<u8"), ("length", "<u8"), ("digest", "u1", (32,))])
ANCHOR_DTYPE = np.dtype(
    [
        ("position", "<u8"),
        ("kind", "u1"),
        ("pad", "u1", (3,)),
        ("depth", "<u4"),
        ("semantic_hash", "<u8"),
        ("shift_offset", "<i8"),
    ]
)
PLANE_DTYPE = np.dtype(
    [
        ("layer", "<u4"),
        ("role", "u1"),
        ("format", "u1"),
        ("dims", "<u2"),
        ("shape", "<u4", (4,)),
        ("first_row", "<u8"),
        ("rows", "<u8"),
        ("row_bytes", "<u8"),
        ("offset", "<u8"),
        ("field", "u1", (ID_BYTES,)),
    ]
)
_ROLES = {int(role): role for role in PlaneRole}
_FORMATS = {int(format_): format_ for format_ in PlaneFormat}
#: A plane's place in the payload says nothing about what it covers.
COVERAGE_COLUMNS = ["layer", "role", "format", "dims", "shape", "first_row", "rows", "row_bytes", "field"]


class AnchorKind(IntEnum):
    """Which boundary of a conversation a named position is."""

    UNSPECIFIED = 0
    TURN = 1
    TOOL_CALL = 2
    TOOL_OUTPUT = 3
    THINKING = 4
    IMAGE_TOKENS = 5
    SYSTEM_PROMPT = 6


@dataclass(frozen=True, slots=True)
class Anchor:
    """A named position: ``position`` tokens lie before it."""

    position: int
    kind: AnchorKind = AnchorKind.UNSPECIFIED
    depth: int = 0
    semantic_hash: int = 0
    shift_offset: int = 0


@dataclass(frozen=True, slots=True)
class Attachment:
    """``length`` positions from ``start`` stand for an input (image, audio, embedding) whose
    model-ready bytes have this 32-byte digest."""

    start: int
    length: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Plane:
    """Rows [first_row, first_row + rows) of one quantity of one layer, token-major.

    ``row_shape`` is the shape of one row, ``row_bytes`` its bytes, ``offset`` its place in the
    payload (a multiple of 64); ``field`` the digest of a frozen quantisation field, or zeros."""

    layer: int
    role: PlaneRole
    format: PlaneFormat
    row_shape: tuple[int, ...]
    first_row: int
    rows: int
    row_bytes: int
    offset: int = 0
    field: bytes = NO_FIELD

    @property
    def total_bytes(self) -> int:
        return self.rows * self.row_bytes


def as_tokens(ids: TokensLike) -> Tokens:
    """Token ids as a contiguous little-endian uint32 array; RecordError if one does not fit."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise RecordError(f"token ids have shape {array.shape}, expected one dimension and at least one id")
    if array.size > MAX_TOKENS:
        raise RecordError(f"{array.size} token ids, at most {MAX_TOKENS} are allowed")
    if array.dtype == np.uint32:
        return np.ascontiguousarray(array, dtype="<u4")
    if array.dtype.kind not in "iu":
        raise RecordError(f"token ids have dtype {array.dtype}, expected integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**32:
        raise RecordError(f"token ids span {low}..{high}, expected 0..{2**32 - 1}")
    return np.ascontiguousarray(array, dtype="<u4")


def check_attachments(attachments: Iterable[Attachment], length: int) -> tuple[Attachment, ...]:
    """Attachments sorted by start; RecordError where one is empty, outside, or overlaps another."""
    ordered = tuple(sorted(attachments, key=lambda item: item.start))
    end = 0
    for item in ordered:
        if len(item.digest) != 32:
            raise RecordError(f"attachment at {item.start} has a digest of {len(item.digest)} bytes, expected 32")
        if item.length < 1 or item.start < end or item.end > length:
            raise RecordError(f"attachment [{item.start}, {item.end}) is empty, overlaps, or leaves the {length} tokens")
        end = item.end
    return ordered


def pack_attachments(attachments: Sequence[Attachment]) -> bytes:
    table = np.zeros(len(attachments), ATTACHMENT_DTYPE)
    for row, item in zip(table, attachments, strict=True):
        row["start"], row["length"], row["digest"] = item.start, item.length, np.frombuffer(item.digest, np.uint8)
    return table.tobytes()


def unpack_attachments(data: bytes) -> tuple[Attachment, ...]:
    table = unpack_table(data, ATTACHMENT_DTYPE, "attachments")
    return tuple(Attachment(int(r["start"]), int(r["length"]), r["digest"].tobytes()) for r in table)


def pack_anchors(anchors: Sequence[Anchor]) -> bytes:
    table = np.zeros(len(anchors), ANCHOR_DTYPE)
    try:
        for row, item in zip(table, anchors, strict=True):
            row["position"], row["kind"], row["depth"] = item.position, int(item.kind), item.depth
            row["semantic_hash"], row["shift_offset"] = item.semantic_hash, item.shift_offset
    except OverflowError as exc:
        raise RecordError(f"anchor {item} has a number that does not fit its field") from exc
    return table.tobytes()


def unpack_anchors(data: bytes) -> tuple[Anchor, ...]:
    table = unpack_table(data, ANCHOR_DTYPE, "anchors")
    try:
        return tuple(
            Anchor(
                int(r["position"]), AnchorKind(int(r["kind"])), int(r["depth"]), int(r["semantic_hash"]), int(r["shift_offset"])
            )
            for r in table
        )
    except ValueError as exc:
        raise FormatError(f"unknown anchor kind: {exc}") from exc


def pack_planes(planes: Sequence[Plane]) -> bytes:
    table = np.zeros(len(planes), PLANE_DTYPE)
    for row, plane in zip(table, planes, strict=True):
        shape = tuple(plane.row_shape) + (0,) * (4 - len(plane.row_shape))
        row["layer"], row["role"], row["format"] = plane.layer, int(plane.role), int(plane.format)
        row["dims"], row["shape"], row["first_row"] = len(plane.row_shape), shape, plane.first_row
        row["rows"], row["row_bytes"], row["offset"] = plane.rows, plane.row_bytes, plane.offset
        row["field"] = np.frombuffer(plane.field, np.uint8)
    return table.tobytes()


def unpack_planes(data: bytes) -> tuple[Plane, ...]:
    """Planes of a packed table, each checked by itself (role, format, shape, row bytes)."""
    planes = []
    rows = unpack_table(data, PLANE_DTYPE, "planes").tolist()
    for index, (layer, role, format_, dims, sizes, first_row, count, bytes_, offset, field) in enumerate(rows):
        if role not in _ROLES or format_ not in _FORMATS:
            raise FormatError(f"plane {index}: role {role} or format {format_} is unknown")
        shape = tuple(sizes[:dims])
        if not 1 <= dims <= 4 or 0 in shape or any(sizes[dims:]):
            raise FormatError(f"plane {index}: shape {sizes} with {dims} dimensions")
        plane = Plane(layer, _ROLES[role], _FORMATS[format_], shape, first_row, count, bytes_, offset, bytes(field))
        if bytes_ < 1 or (plane.format in ELEMENT_BYTES and bytes_ != row_bytes(plane.format, shape)):
            raise FormatError(f"plane {index}: {bytes_} bytes a row do not fit {plane.format.name} {shape}")
        planes.append(plane)
    return tuple(planes)


def row_bytes(format_: PlaneFormat, row_shape: Sequence[int]) -> int:
    """Bytes of one row of a format whose elements stand alone."""
    size = ELEMENT_BYTES[format_]
    for extent in row_shape:
        size *= int(extent)
    return size


def coverage(planes: Sequence[Plane]) -> bytes:
    """What planes cover (planes, bases, formats, field digests), apart from where they lie."""
    table = np.frombuffer(pack_planes(planes), PLANE_DTYPE)
    order = np.lexsort((table["role"], table["layer"]))
    return b"".join(np.ascontiguousarray(table[order][name]).tobytes() for name in COVERAGE_COLUMNS)


def unpack_table(data: bytes, dtype: np.dtype[np.void], what: str) -> npt.NDArray[np.void]:
    if len(data) % dtype.itemsize:
        raise FormatError(f"{what}: {len(data)} bytes are no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)
