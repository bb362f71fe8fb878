"""Records: what is stored about tokens, attachments, rows, states and anchors.

Frozen values with their packed little-endian spellings. Positions are token positions,
sizes are bytes. Nothing here reads or writes anything.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.identity import BLOCK_BYTES, ELEMENT_BYTES, ROTATED_BYTES, ROTATED_STEP, PlaneFormat, PlaneRole

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
#: Rows of a packed table: more than any model or prompt needs, few enough that a foreign
#: table cannot make its reader allocate many times its own size.
MAX_TABLE_ROWS = 1 << 16

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
#: The same rows for writing: struct refuses what does not fit, numpy before 2 would wrap it.
_ATTACHMENT_ROW = struct.Struct("<QQ32s")
_ANCHOR_ROW = struct.Struct("<QB3xIQq")
_PLANE_ROW = struct.Struct("<IBBH4IQQQQ16s")
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
    try:
        array = np.asarray(ids)
    except ValueError as exc:
        raise RecordError(f"token ids are no array: {exc}") from exc
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
    """Attachments sorted by start; RecordError where one is empty, outside, or overlaps another,
    or where there are more than a table may hold."""
    ordered = tuple(sorted(attachments, key=lambda item: item.start))
    if len(ordered) > MAX_TABLE_ROWS:
        raise RecordError(f"{len(ordered)} attachments, at most {MAX_TABLE_ROWS} are allowed")
    end = 0
    for item in ordered:
        if len(item.digest) != 32:
            raise RecordError(f"attachment at {item.start} has a digest of {len(item.digest)} bytes, expected 32")
        if item.length < 1 or item.start < end or item.end > length:
            raise RecordError(f"attachment [{item.start}, {item.end}) is empty, overlaps, or leaves the {length} tokens")
        end = item.end
    return ordered


def check_shifts(anchors: Iterable[Anchor], lineage: Lineage) -> None:
    """RecordError for an anchor of shifted positions on a clean lineage: its rows would be handed to those whose
    tokens are where they always were."""
    for anchor in anchors:
        if anchor.shift_offset and lineage == CLEAN:
            raise RecordError(
                f"anchor at {anchor.position}: its rows were shifted by {anchor.shift_offset} positions, which a clean lineage "
                "does not say; save them under the lineage of the shift"
            )


def pack_attachments(attachments: Sequence[Attachment]) -> bytes:
    """Packed rows; RecordError for an attachment its row cannot hold."""
    rows = []
    for item in attachments:
        if len(item.digest) != 32:
            raise RecordError(f"attachment at {item.start} has a digest of {len(item.digest)} bytes, expected 32")
        rows.append(_row(_ATTACHMENT_ROW, item, item.start, item.length, item.digest))
    return b"".join(rows)


def _row(layout: struct.Struct, item: object, *values: int | bytes) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as exc:
        raise RecordError(f"{item} has a number that does not fit its field: {exc}") from exc


def unpack_attachments(data: bytes) -> tuple[Attachment, ...]:
    table = unpack_table(data, ATTACHMENT_DTYPE, "attachments")
    return tuple(Attachment(int(r["start"]), int(r["length"]), r["digest"].tobytes()) for r in table)


def pack_anchors(anchors: Sequence[Anchor]) -> bytes:
    """Packed rows; RecordError for an anchor its row cannot hold."""
    return b"".join(
        _row(_ANCHOR_ROW, item, item.position, int(item.kind), item.depth, item.semantic_hash, item.shift_offset)
        for item in anchors
    )


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
    """Packed rows; RecordError for a plane its row cannot hold."""
    rows = []
    for plane in planes:
        if not 1 <= len(plane.row_shape) <= 4 or len(plane.field) != ID_BYTES:
            raise RecordError(f"{plane} needs a row shape of 1-4 sizes and a field digest of {ID_BYTES} bytes")
        shape = tuple(plane.row_shape) + (0,) * (4 - len(plane.row_shape))
        kind = (plane.layer, int(plane.role), int(plane.format), len(plane.row_shape), *shape)
        rows.append(_row(_PLANE_ROW, plane, *kind, plane.first_row, plane.rows, plane.row_bytes, plane.offset, plane.field))
    return b"".join(rows)


def unpack_planes(data: bytes) -> tuple[Plane, ...]:
    """Planes of a packed table, each checked by itself (role, format, shape, row bytes)."""
    planes = []
    rows = unpack_table(data, PLANE_DTYPE, "planes").tolist()
    for index, (layer, role, format_, dims, sizes, first_row, count, bytes_, offset, field) in enumerate(rows):
        if role not in _ROLES or format_ not in _FORMATS:
            raise FormatError(f"plane {index}: role {role} or format {format_} is unknown")
        sizes = sizes.tolist()  # a subarray stays one in the row's tolist, and its uint32 would wrap
        shape = tuple(sizes[:dims])
        if not 1 <= dims <= 4 or 0 in shape or any(sizes[dims:]):
            raise FormatError(f"plane {index}: shape {sizes} with {dims} dimensions")
        plane = Plane(layer, _ROLES[role], _FORMATS[format_], shape, first_row, count, bytes_, offset, bytes(field))
        if not has_row_bytes(plane.format, shape) or bytes_ != row_bytes(plane.format, shape, plane.role):
            raise FormatError(f"plane {index}: {bytes_} bytes a row do not fit {plane.format.name} {shape}")
        planes.append(plane)
    return tuple(planes)


def row_bytes(format_: PlaneFormat, row_shape: Sequence[int], role: PlaneRole = PlaneRole.KEY) -> int:
    """Bytes of one row. Raises RecordError for a shape whose rows do not fill whole bytes in that format."""
    heads, size = math.prod(row_shape[:-1]), int(row_shape[-1])
    if format_ in ELEMENT_BYTES:
        return heads * size * ELEMENT_BYTES[format_]
    if format_ in BLOCK_BYTES:
        elements, bytes_ = BLOCK_BYTES[format_]
        return heads * -(-size // elements) * bytes_
    if format_ == PlaneFormat.Q8_2F:
        scales = -(-size // 32) if role == PlaneRole.KEY else 1
        return heads * (size + 4 * scales)
    if not has_row_bytes(format_, row_shape):
        raise RecordError(f"rows of {format_.name} with heads of {size} channels, expected a multiple of {ROTATED_STEP}")
    bits, norms = ROTATED_BYTES[format_]
    return heads * (size * bits // 8 + norms)


def has_row_bytes(format_: PlaneFormat, row_shape: Sequence[int]) -> bool:
    """Whether `row_bytes` knows how many there are."""
    return format_ not in ROTATED_BYTES or row_shape[-1] % ROTATED_STEP == 0


def coverage(planes: Sequence[Plane]) -> bytes:
    """What planes cover (planes, bases, formats, field digests), apart from where they lie."""
    table = np.frombuffer(pack_planes(planes), PLANE_DTYPE)
    order = np.lexsort((table["role"], table["layer"]))
    return b"".join(np.ascontiguousarray(table[order][name]).tobytes() for name in COVERAGE_COLUMNS)


def unpack_table(data: bytes, dtype: np.dtype[np.void], what: str) -> npt.NDArray[np.void]:
    if len(data) % dtype.itemsize:
        raise FormatError(f"{what}: {len(data)} bytes are no multiple of {dtype.itemsize}")
    if len(data) > MAX_TABLE_ROWS * dtype.itemsize:
        raise FormatError(f"{what}: {len(data) // dtype.itemsize} rows, at most {MAX_TABLE_ROWS} are allowed")
    return np.frombuffer(data, dtype)
