"""The container: golden bytes, round trips, and every way a foreign head can lie.

Two kinds of attack: bytes changed by accident (the digest does not fit any more, so nothing may
be accepted) and heads forged by somebody who recomputes the digest (what is accepted must then
be sound, and everything else is a FormatError without a large allocation).
"""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from make_golden import (
    ATTACHMENTS,
    CREATED_NS,
    ID,
    LINEAGE,
    NAMESPACE,
    PARENT,
    PAYLOAD_BYTES,
    PLANES,
    ROTATED_PAYLOAD,
    ROTATED_SEGMENT,
    SEGMENT,
    STATE,
    STATE_PAYLOAD_BYTES,
    TOKENS,
    container,
    payload,
)

from warmkv.schema import flat, segment
from warmkv.schema.errors import DigestError, FormatError, RecordError, TooNewError
from warmkv.schema.generated import container_generated as gen
from warmkv.schema.identity import PlaneFormat, PlaneRole
from warmkv.schema.records import (
    CLEAN,
    MAX_TOKENS,
    ROOT,
    Attachment,
    Plane,
    pack_attachments,
    pack_planes,
    row_bytes,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
#: Magic, major, minor, kind, flags, reserved, header and payload geometry, digest, reserved.
PREAMBLE = struct.Struct("<8sHHBBHIQQ16s12s")
MIB = 1 << 20
HEAD, STATE_HEAD = segment.encode_head(SEGMENT, PAYLOAD_BYTES), segment.encode_head(STATE, STATE_PAYLOAD_BYTES)


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """No more than ``limit`` bytes may be allocated at any moment inside."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were allocated, expected less than {limit}"


def seal(body: bytes, payload_size: int, kind: int = 1, **changes: Any) -> bytes:
    """A head around any header, its digest recomputed as a forger would."""
    fields: dict[str, Any] = {
        "magic": b"WARMKV\r\n",
        "major": 1,
        "minor": 0,
        "kind": kind,
        "flags": 0,
        "reserved": 0,
        "header_bytes": len(body),
        "offset": -(-(64 + len(body)) // 4096) * 4096,
        "payload_bytes": payload_size,
    }
    assert set(changes) <= set(fields)
    fields.update(changes)
    digest = xxhash.xxh3_128_digest(PREAMBLE.pack(*fields.values(), b"", b"") + body)
    return PREAMBLE.pack(*fields.values(), digest, b"") + body


def forge(payload_bytes: int = PAYLOAD_BYTES, absent: tuple[str, ...] = (), **changes: Any) -> bytes:
    """The golden segment's head with fields of its table replaced, built with nothing of ours."""
    values: dict[str, Any] = {
        "Id": SEGMENT.id,
        "Namespace": NAMESPACE,
        "Lineage": LINEAGE,
        "Parent": PARENT,
        "Start": SEGMENT.start,
        "End": SEGMENT.end,
        "Tokens": SEGMENT.tokens,
        "Attachments": pack_attachments(SEGMENT.attachments),
        "Planes": pack_planes(PLANES),
        "Digests": SEGMENT.digests,
        "CreatedNs": CREATED_NS,
        "Writer": "forger",
    }
    assert set(changes) <= set(values)
    values.update(changes)
    return seal(_table(gen, "SegmentHeader", values, absent), payload_bytes)


def forge_state(payload_bytes: int = STATE_PAYLOAD_BYTES, absent: tuple[str, ...] = (), **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "Id": STATE.id,
        "Namespace": NAMESPACE,
        "Lineage": CLEAN,
        "Parent": PARENT,
        "Position": STATE.position,
        "Attachments": pack_attachments(ATTACHMENTS),
        "Planes": pack_planes(STATE.planes),
        "Digests": STATE.digests,
        "CreatedNs": CREATED_NS,
        "Writer": "forger",
    }
    assert set(changes) <= set(values)
    values.update(changes)
    return seal(_table(gen, "StateHeader", values, absent), payload_bytes, kind=2)


def _table(module: Any, name: str, values: dict[str, Any], absent: tuple[str, ...]) -> bytes:
    builder = flatbuffers.Builder(1024)
    ready: dict[str, Any] = {}
    for field, value in values.items():
        if isinstance(value, (bytes, bytearray)):
            ready[field] = builder.CreateByteVector(bytes(value))
        elif isinstance(value, np.ndarray):
            ready[field] = builder.CreateNumpyVector(value)
        elif isinstance(value, str):
            ready[field] = builder.CreateString(value)
        else:
            ready[field] = value
    getattr(module, f"{name}Start")(builder)
    for field, value in ready.items():
        if field not in absent:
            getattr(module, f"{name}Add{field}")(builder, value)
    builder.Finish(getattr(module, f"{name}End")(builder))
    return bytes(builder.Output())


def digests_for(payload_bytes: int) -> bytes:
    return bytes(16 * -(-payload_bytes // (4 * MIB)))


def same(one: segment.Header, other: segment.Header) -> bool:
    if isinstance(one, segment.SegmentHeader) and isinstance(other, segment.SegmentHeader):
        blank = np.zeros(0, "<u4")
        if not np.array_equal(one.tokens, other.tokens):
            return False
        return repr(replace(one, tokens=blank)) == repr(replace(other, tokens=blank))
    return one == other


def assert_sound(head: segment.Head) -> None:
    """Everything a reader of an accepted head relies on, checked in the plainest way."""
    header = head.header
    if isinstance(header, segment.SegmentHeader):
        first, last = header.start, header.end
        assert 0 <= first < last <= MAX_TOKENS
        assert len(header.tokens) == last - first
        position = last
    else:
        # The rows of a state are counted as its runtime counts them, not in tokens.
        first, last, position = 0, MAX_TOKENS, header.position
        assert 0 <= position <= MAX_TOKENS
    for id_ in (header.id, header.namespace, header.lineage, header.parent):
        assert len(id_) == 16
    assert len(header.digests) == 16 * -(-head.payload_bytes // segment.CHUNK_BYTES)
    spans = sorted((plane.offset, plane.offset + plane.total_bytes) for plane in header.planes)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for plane in header.planes:
        assert plane.offset % 64 == 0
        assert plane.offset + plane.total_bytes <= head.payload_bytes
        assert first <= plane.first_row <= plane.first_row + plane.rows <= last
        assert all(type(size) is int for size in (*plane.row_shape, plane.offset, plane.rows, plane.first_row, plane.row_bytes))
    assert len({(plane.layer, plane.role) for plane in header.planes}) == len(header.planes)
    spans = [(item.start, item.end) for item in header.attachments]
    assert spans == sorted(spans)
    assert all(first <= start < end <= position for start, end in spans)


# -- golden -----------------------------------------------------------------------------------


def test_golden_segment() -> None:
    data = (GOLDEN / "segment.bin").read_bytes()
    assert container(SEGMENT, payload(PAYLOAD_BYTES)) == data
    head = segment.decode_head(data, len(data))
    assert same(head.header, SEGMENT)
    assert data[head.payload_offset :] == payload(PAYLOAD_BYTES)


def test_golden_state() -> None:
    data = (GOLDEN / "state_head.bin").read_bytes()
    assert data == STATE_HEAD
    assert segment.decode_head(data).header == STATE


def test_golden_segment_of_rotated_rows() -> None:
    data = (GOLDEN / "segment_rotated.bin").read_bytes()
    assert container(ROTATED_SEGMENT, ROTATED_PAYLOAD) == data
    head = segment.decode_head(data, len(data))
    assert same(head.header, ROTATED_SEGMENT)
    assert [(plane.format.value, plane.row_shape, plane.offset, plane.row_bytes) for plane in head.header.planes] == [
        (13, (1, 64), 0, 28), (14, (1, 64), 64, 18), (15, (2, 24), 128, 22)
    ]  # fmt: skip
    norms = struct.pack("<ee", 2.990234375, 0.334716796875)
    codes, signs = bytes.fromhex("6a6dd229e20558d485916f9d19aba53b"), bytes.fromhex("ad01b52170b6bda8")
    assert data[4096:4124] == codes + signs + norms
    assert data[4160:4178] == codes + norms[:2]


@pytest.mark.parametrize(
    ("name", "kind", "payload_bytes"), [("segment.bin", 1, PAYLOAD_BYTES), ("state_head.bin", 2, STATE_PAYLOAD_BYTES)]
)
def test_golden_preamble_by_hand(name: str, kind: int, payload_bytes: int) -> None:
    data = (GOLDEN / name).read_bytes()
    magic, major, minor, found, flags, reserved, header_bytes, offset, size, digest, pad = PREAMBLE.unpack(data[:64])
    assert (magic, major, minor, found, flags, reserved, pad) == (b"WARMKV\r\n", 1, 0, kind, 0, 0, bytes(12))
    assert size == payload_bytes
    assert offset == 4096 >= 64 + header_bytes
    blanked = data[:36] + bytes(28) + data[64 : 64 + header_bytes]
    assert digest == xxhash.xxh3_128_digest(blanked)
    assert segment.head_size(data[:64]) == 64 + header_bytes


def test_golden_header_through_the_generated_readers() -> None:
    data = (GOLDEN / "segment.bin").read_bytes()
    table = gen.SegmentHeader.GetRootAs(data[64:], 0)
    assert table.IdAsNumpy().tobytes() == SEGMENT.id
    assert table.NamespaceAsNumpy().tobytes() == bytes(range(0xA0, 0xB0))
    assert table.LineageAsNumpy().tobytes() == bytes(range(0xB0, 0xC0))
    assert table.ParentAsNumpy().tobytes() == bytes(range(0xC0, 0xD0))
    assert (table.Start(), table.End(), table.CreatedNs(), table.Writer()) == (3, 8, CREATED_NS, b"golden 1")
    assert table.TokensLength() == 5
    assert [table.Tokens(at) for at in range(5)] == [2**32 - 1, 7, 7, 0x01020304, 49152]
    assert table.AttachmentsAsNumpy().tobytes() == struct.pack("<QQ", 5, 1) + bytes(range(32, 64))
    rows = struct.Struct("<IBBH4IQQQQ16s")
    assert [row[:1] + row[7:12] for row in rows.iter_unpack(table.PlanesAsNumpy().tobytes())] == [
        (0, 0, 3, 5, 60, 0),
        (0, 0, 3, 5, 30, 320),
        (1, 0, 5, 3, 34, 512),
    ]
    assert PAYLOAD_BYTES == 512 + 3 * 34
    assert table.DigestsAsNumpy().tobytes() == xxhash.xxh3_128_digest(data[4096:])


# -- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 8 * MIB])
def test_digests_are_one_per_chunk_at_every_size(size: int) -> None:
    data = payload(size)
    pieces = [data[at : at + 4 * MIB] for at in range(0, size, 4 * MIB)]
    digests = segment.payload_digests(data)
    assert digests == b"".join(xxhash.xxh3_128_digest(piece) for piece in pieces)
    assert segment.payload_digests(memoryview(data)) == digests
    assert segment.chunk_count(size) == len(pieces)
    planes = (Plane(0, PlaneRole.KEY, PlaneFormat.RAW, (size,), 3, 1, size),) if size else ()
    header = replace(SEGMENT, planes=planes, digests=digests)
    head = segment.decode_head(segment.encode_head(header, size))
    assert same(head.header, header)
    assert head.container_bytes == head.payload_offset + size


@st.composite
def plane_sets(draw: st.DrawFn) -> tuple[Plane, ...]:
    planes = []
    for layer in range(draw(st.integers(0, 5))):
        for role in draw(st.lists(st.sampled_from(PlaneRole), max_size=3, unique=True)):
            shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=4)))
            format_ = draw(
                st.sampled_from([PlaneFormat.F32, PlaneFormat.BF16, PlaneFormat.RAW, PlaneFormat.Q8_2F, PlaneFormat.TQ3])
            )
            shape = (*shape[:-1], 8 * shape[-1]) if format_ == PlaneFormat.TQ3 else shape
            size = row_bytes(format_, shape, role)
            first = draw(st.integers(0, 10))
            planes.append(Plane(layer, role, format_, shape, first, draw(st.integers(0, 20 - first)), size))
    return tuple(planes)


@given(
    plane_sets(), st.lists(st.integers(0, 2**32 - 1), min_size=20, max_size=20), st.text(st.characters(codec="utf-8"), max_size=9)
)
@settings(max_examples=60)
def test_heads_round_trip_at_odd_sizes(planes: tuple[Plane, ...], ids: list[int], writer: str) -> None:
    placed, size = segment.layout(planes)
    assert [replace(plane, offset=0) for plane in placed] == list(planes)
    digests = digests_for(size)
    rows = segment.SegmentHeader(
        ID, NAMESPACE, LINEAGE, ROOT, 0, 20, np.array(ids, "<u4"), (), placed, digests, 2**64 - 1, writer
    )
    state = segment.StateHeader(ID, NAMESPACE, LINEAGE, ROOT, 20, ATTACHMENTS, placed, digests, 0, writer)
    for header in (rows, state):
        head = segment.decode_head(segment.encode_head(header, size))
        assert same(head.header, header)
        assert (head.payload_bytes, head.payload_offset % 4096) == (size, 0)
        assert_sound(head)


@pytest.mark.parametrize("count", [1, 2, 3, 961, 1024, 65537])
def test_token_counts_round_trip(count: int) -> None:
    header = replace(
        SEGMENT, start=0, end=count, tokens=np.arange(count, dtype="<u4") * 40503, attachments=(), planes=(), digests=b""
    )
    head = segment.decode_head(segment.encode_head(header, 0))
    assert same(head.header, header)


def test_the_length_of_a_head_does_not_depend_on_its_digests() -> None:
    other = replace(SEGMENT, digests=bytes(len(SEGMENT.digests)))
    assert len(segment.encode_head(other, PAYLOAD_BYTES)) == len(HEAD)


def test_tokens_are_written_and_read_in_bulk() -> None:
    tokens = np.arange(200_000, dtype="<u4")
    header = replace(SEGMENT, start=0, end=len(tokens), tokens=tokens, attachments=(), planes=(), digests=b"")
    with peak_below(8 * tokens.nbytes):
        head = segment.encode_head(header, 0)
    with peak_below(3 * tokens.nbytes):
        assert np.array_equal(segment.decode_head(head).header.tokens, tokens)  # type: ignore[union-attr]


@pytest.mark.parametrize("shift", range(16))
def test_a_head_may_lie_at_any_address(shift: int) -> None:
    buffer = bytearray(b"\xee" * shift) + HEAD + b"\xee" * 7
    head = segment.decode_head(memoryview(buffer)[shift:])
    assert same(head.header, SEGMENT)
    tokens = head.header.tokens  # type: ignore[union-attr]
    assert tokens.flags.aligned and tokens.flags.c_contiguous
    assert tokens.dtype == np.dtype("<u4")
    buffer[:] = bytes(len(buffer))
    assert np.array_equal(tokens, TOKENS[3:]), "the header still looks into the caller's buffer"


def test_an_unaligned_vector_is_copied() -> None:
    view = np.frombuffer(b"\0" + TOKENS.tobytes(), "<u4", offset=1)
    assert not view.flags.aligned
    copied = flat.vector(view, "<u4")
    assert copied.flags.aligned
    assert np.array_equal(copied, TOKENS)


@pytest.mark.parametrize(
    "changes",
    [
        {"created_ns": -1},
        {"created_ns": 2**64},
        {"start": -1},
        {"start": 1.5},
        {"writer": "\udc80"},
        {"writer": None},
        {"id": None},
        {"tokens": SEGMENT.tokens.astype(np.int64)},
        {"tokens": SEGMENT.tokens.astype(np.uint8)},
        {"tokens": SEGMENT.tokens.reshape(1, -1)},
        {"planes": (replace(PLANES[0], row_shape=()),)},
        {"planes": (replace(PLANES[0], field=b"x"),)},
        {"attachments": (Attachment(5, 1, b"x"),)},
        {"attachments": (Attachment(-1, 1, bytes(32)),)},
    ],
)
def test_headers_that_cannot_be_written_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        segment.encode_head(replace(SEGMENT, **changes), PAYLOAD_BYTES)


# -- accidents: nothing is accepted -----------------------------------------------------------


@pytest.mark.parametrize("head", [HEAD, STATE_HEAD], ids=["segment", "state"])
def test_every_byte_flip_is_refused(head: bytes) -> None:
    for at in range(len(head)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            broken = bytearray(head)
            broken[at] ^= mask
            with pytest.raises(FormatError):
                segment.decode_head(bytes(broken))


@pytest.mark.parametrize("head", [HEAD, STATE_HEAD], ids=["segment", "state"])
def test_every_truncation_is_refused(head: bytes) -> None:
    for end in range(len(head)):
        with pytest.raises(FormatError):
            segment.decode_head(head[:end])
        if end < 64:
            with pytest.raises(FormatError):
                segment.head_size(head[:end])
    assert segment.decode_head(head + b"rest of the container").head_bytes == len(head)


@pytest.mark.parametrize("difference", [-4096, -1, 1, 4096])
def test_a_container_of_another_size_is_refused(difference: int) -> None:
    data = (GOLDEN / "segment.bin").read_bytes()
    with pytest.raises(FormatError):
        segment.decode_head(data, len(data) + difference)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for head in (data, HEAD[:8] + data, HEAD[:36] + data, HEAD[:64] + data):
        if head != HEAD:
            with pytest.raises(FormatError):
                segment.decode_head(head)


def test_swapped_kind_is_refused() -> None:
    """A state's head read as a segment's, digest and all."""
    for head, kind in ((HEAD, 2), (STATE_HEAD, 1)):
        size = struct.unpack_from("<Q", head, 28)[0]
        with pytest.raises(FormatError):
            segment.decode_head(seal(head[64:], size, kind=kind))


# -- forgeries of the preamble ----------------------------------------------------------------


@pytest.mark.parametrize("major", [2, 3, 255, 65535])
def test_a_future_major_version_is_too_new(major: int) -> None:
    with pytest.raises(TooNewError):
        segment.decode_head(seal(HEAD[64:], PAYLOAD_BYTES, major=major))
    with pytest.raises(TooNewError):
        segment.head_size(seal(HEAD[64:], PAYLOAD_BYTES, major=major)[:64])


def test_a_future_major_version_needs_no_readable_header() -> None:
    with pytest.raises(TooNewError):
        segment.decode_head(struct.pack("<8sH", b"WARMKV\r\n", 2) + b"\xff" * 54)


def test_a_future_minor_version_is_read() -> None:
    assert same(segment.decode_head(seal(HEAD[64:], PAYLOAD_BYTES, minor=7)).header, SEGMENT)


def test_a_forger_can_reproduce_the_original() -> None:
    assert seal(HEAD[64:], PAYLOAD_BYTES) == HEAD
    assert same(segment.decode_head(forge(Writer="golden 1")).header, SEGMENT)
    assert segment.decode_head(forge_state(Writer="golden 1")).header == STATE


@pytest.mark.parametrize(
    "changes",
    [
        {"magic": b"warmkv\r\n"},
        {"magic": b"WARMKV\n\n"},
        {"magic": bytes(8)},
        {"major": 0},
        {"kind": 0},
        {"kind": 3},
        {"kind": 255},
        {"flags": 1},
        {"reserved": 1},
        {"header_bytes": 0},
        {"header_bytes": len(HEAD) - 65},
        {"header_bytes": len(HEAD) - 63},
        {"header_bytes": 96 * MIB},
        {"header_bytes": 96 * MIB + 1},
        {"header_bytes": 2**32 - 1},
        {"offset": 0},
        {"offset": 64},
        {"offset": 8192},
        {"offset": 2**64 - 4096},
        {"payload_bytes": 0},
        {"payload_bytes": PAYLOAD_BYTES - 1},
        {"payload_bytes": PAYLOAD_BYTES + 64},
        {"payload_bytes": 2**44},
        {"payload_bytes": 2**44 + 1},
        {"payload_bytes": 2**64 - 1},
    ],
)
def test_lying_preambles_are_refused(changes: dict[str, Any]) -> None:
    with peak_below(MIB), pytest.raises(FormatError):
        segment.decode_head(seal(HEAD[64:], PAYLOAD_BYTES, **changes))


def test_caps_hold_before_a_head_is_read() -> None:
    """A reader asks for the size of a head first and allocates that much."""
    assert segment.head_size(seal(b"", 2**44, header_bytes=96 * MIB)) == 64 + 96 * MIB
    for changes in ({"header_bytes": 96 * MIB + 1}, {"header_bytes": 2**32 - 1}, {"payload_bytes": 2**44 + 1}):
        with pytest.raises(FormatError, match="caps"):
            segment.head_size(seal(b"", 0, **changes))


def test_digest_errors_are_told_apart() -> None:
    broken = bytearray(HEAD)
    broken[-1] ^= 1
    with pytest.raises(DigestError):
        segment.decode_head(bytes(broken))
    broken = bytearray(HEAD)
    broken[40] ^= 1
    with pytest.raises(DigestError):
        segment.decode_head(bytes(broken))


# -- forgeries of the header ------------------------------------------------------------------


def refused(head: bytes) -> None:
    with peak_below(MIB), pytest.raises(FormatError) as caught:
        segment.decode_head(head)
    assert not isinstance(caught.value, DigestError)


@pytest.mark.parametrize(
    ("start", "end", "count"),
    [
        (8, 3, 5),
        (3, 3, 0),
        (3, 8, 4),
        (3, 8, 6),
        (3, 8, 0),
        (0, 2**64 - 1, 5),
        (2**64 - 5, 2**64 - 1, 4),
        (MAX_TOKENS - 1, MAX_TOKENS + 4, 5),
        (2**63, 2**63 + 5, 5),
    ],
)
def test_wrong_ranges_and_token_counts_are_refused(start: int, end: int, count: int) -> None:
    refused(forge(0, Start=start, End=end, Tokens=np.zeros(count, "<u4"), Planes=b"", Digests=b"", Attachments=b""))


@pytest.mark.parametrize("position", [MAX_TOKENS + 1, 2**63, 2**64 - 1])
def test_state_positions_out_of_range_are_refused(position: int) -> None:
    refused(forge_state(0, Position=position, Planes=b"", Digests=b"", Attachments=b""))


@pytest.mark.parametrize("name", ["Id", "Namespace", "Lineage", "Parent"])
@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_ids_of_another_length_are_refused(name: str, length: int) -> None:
    changes: dict[str, Any] = {name: bytes(length)}
    refused(forge(**changes))
    refused(forge_state(**changes))


@pytest.mark.parametrize("name", ["Id", "Namespace", "Lineage", "Parent", "Tokens", "Start", "End", "Digests"])
def test_absent_required_fields_are_refused(name: str) -> None:
    refused(forge(absent=(name,)))


def test_absent_optional_fields_are_empty() -> None:
    absent = ("Attachments", "Planes", "Digests", "CreatedNs", "Writer")
    header = segment.decode_head(forge(0, absent=absent)).header
    assert (header.attachments, header.planes, header.digests, header.created_ns, header.writer) == ((), (), b"", 0, "")
    state = segment.decode_head(forge_state(0, absent=(*absent, "Position"))).header
    assert isinstance(state, segment.StateHeader) and state.position == 0


def keyed(**changes: Any) -> Plane:
    values: dict[str, Any] = {"first_row": 3, "rows": 5, "row_bytes": 64, "row_shape": (16,), "offset": 0, **changes}
    return Plane(layer=0, role=PlaneRole.KEY, format=PlaneFormat.F32, **values)


VALUE = replace(keyed(offset=320), role=PlaneRole.VALUE)
BAD_PLANES: dict[str, tuple[int, list[Plane]]] = {
    "overlap by a row": (640, [keyed(), replace(VALUE, offset=256)]),
    "overlap by all": (320, [keyed(), replace(VALUE, offset=0)]),
    "one inside the other": (640, [keyed(rows=5, row_bytes=128, row_shape=(32,)), replace(VALUE, offset=128, rows=1)]),
    "overlap in any order": (640, [replace(VALUE, offset=256), keyed()]),
    "unaligned": (640, [keyed(offset=32)]),
    "unaligned by one": (640, [keyed(offset=1)]),
    "outside": (640, [keyed(offset=640)]),
    "behind the end": (640, [keyed(offset=384)]),
    "offset beyond 64 bits": (640, [keyed(offset=2**64 - 64)]),
    "bytes beyond 64 bits": (640, [keyed(row_bytes=2**63, row_shape=(2**31, 2**30), rows=2)]),
    "rows before the segment": (640, [keyed(first_row=2, rows=6)]),
    "rows behind the segment": (640, [keyed(first_row=4)]),
    "rows elsewhere": (640, [keyed(first_row=2**63)]),
    "rows beyond 64 bits": (640, [keyed(first_row=2**64 - 1)]),
    "row count beyond 64 bits": (640, [keyed(rows=2**64 - 1)]),
    "two of one layer and role": (640, [keyed(), keyed(offset=320)]),
    "two empty ones of one layer and role": (0, [keyed(rows=0), keyed(rows=0)]),
    "payload behind the last": (704, [keyed(), VALUE]),
    "payload without planes": (64, []),
}


@pytest.mark.parametrize(("size", "planes"), BAD_PLANES.values(), ids=list(BAD_PLANES))
def test_planes_that_do_not_fit_are_refused(size: int, planes: list[Plane]) -> None:
    refused(forge(size, Planes=pack_planes(planes), Digests=digests_for(size)))


STATE_PLANE = replace(keyed(first_row=0, rows=1, row_bytes=4, row_shape=(1,)), role=PlaneRole.RECURRENT)


@pytest.mark.parametrize(
    ("first_row", "rows"),
    [(0, 1), (0, 9), (0, 1500), (7, 1), (8, 1), (9, 3), (MAX_TOKENS - 1, 1), (0, MAX_TOKENS), (MAX_TOKENS, 0)],
)
def test_rows_of_a_state_are_not_bounded_by_its_position(first_row: int, rows: int) -> None:
    """A ring has its own rows, an encoder's output those of its input."""
    plane = replace(STATE_PLANE, first_row=first_row, rows=rows)
    size = 4 * rows
    head = segment.decode_head(forge_state(size, Planes=pack_planes([plane]), Digests=digests_for(size)))
    assert head.header.planes == (plane,)
    assert_sound(head)


@pytest.mark.parametrize(
    ("first_row", "rows"),
    [(MAX_TOKENS, 1), (MAX_TOKENS + 1, 0), (1, MAX_TOKENS), (0, MAX_TOKENS + 1), (2**64 - 1, 1), (2**63, 0), (2**64 - 1, 0)],
)
def test_rows_of_a_state_beyond_all_counting_are_refused(first_row: int, rows: int) -> None:
    size = 4 * rows
    planes = pack_planes([replace(STATE_PLANE, first_row=first_row, rows=rows)])
    refused(forge_state(size, Planes=planes, Digests=digests_for(size)))


@pytest.mark.parametrize("name", [name for name in BAD_PLANES if "segment" not in name and name != "rows elsewhere"])
def test_planes_of_a_state_that_do_not_fit_are_refused(name: str) -> None:
    size, planes = BAD_PLANES[name]
    refused(forge_state(size, Planes=pack_planes(planes), Digests=digests_for(size)))


def test_the_planes_all_others_are_cut_from_fit() -> None:
    for planes, sizes in (([keyed(), VALUE], [640]), ([keyed(rows=1, row_bytes=4, row_shape=(1,))], [4, 5, 64])):
        for size in sizes:
            assert_sound(segment.decode_head(forge(size, Planes=pack_planes(planes), Digests=digests_for(size))))
        for size in (sizes[0] - 1, sizes[-1] + 1):
            refused(forge(size, Planes=pack_planes(planes), Digests=digests_for(size)))


@pytest.mark.parametrize("shift", [1, 71, 73, 144])
def test_plane_tables_of_broken_rows_are_refused(shift: int) -> None:
    table = pack_planes(PLANES) + bytes(72)
    refused(forge(Planes=table[:shift]))
    refused(forge(Planes=table))


@pytest.mark.parametrize("count", [0, 15, 17, 32, 16 * 1000])
def test_wrong_digest_counts_are_refused(count: int) -> None:
    refused(forge(Digests=bytes(count)))


@pytest.mark.parametrize(
    "attachments",
    [
        [(2, 2)],
        [(0, 1)],
        [(7, 2)],
        [(8, 1)],
        [(4, 0)],
        [(3, 3), (5, 1)],
        [(5, 1), (5, 1)],
        [(6, 1), (4, 1)],
        [(4, 2**64 - 1)],
        [(2**64 - 1, 2**64 - 1)],
        [(2**63, 2**63)],
    ],
)
def test_attachments_outside_or_overlapping_are_refused(attachments: list[tuple[int, int]]) -> None:
    table = b"".join(struct.pack("<QQ32s", start, length, bytes(32)) for start, length in attachments)
    refused(forge(Attachments=table))
    refused(forge(Attachments=table + b"\0"))


def test_attachments_of_states_reach_from_the_beginning() -> None:
    for span in ((0, 8), (0, 1), (7, 1)):
        assert_sound(segment.decode_head(forge_state(Attachments=struct.pack("<QQ32s", *span, bytes(32)))))
    for span in ((0, 9), (8, 1)):
        refused(forge_state(Attachments=struct.pack("<QQ32s", *span, bytes(32))))


def test_tokens_written_by_the_byte_call_are_refused() -> None:
    """A byte vector in a [uint] field claims four times the elements it has."""
    refused(forge(Tokens=TOKENS[3:].tobytes()))


@pytest.mark.parametrize("forged", [forge, forge_state])
def test_text_that_is_not_utf8_is_refused(forged: Callable[..., bytes]) -> None:
    refused(forged(Writer=b"\xff\xfe"))


# -- forgeries of offsets ---------------------------------------------------------------------


def outcome(head: bytes) -> bool:
    """Whether a forged head is accepted; it must be sound then, and a FormatError otherwise."""
    try:
        decoded = segment.decode_head(head)
    except FormatError:
        return False
    assert_sound(decoded)
    return True


def vector_length_at(body: bytes, content: bytes) -> int:
    """Where the u32 length of the vector with this content lies."""
    at = body.index(struct.pack("<I", len(content)) + content)
    assert body.count(content) == 1
    return at


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 0x40000001])
def test_vectors_longer_than_the_header_are_refused(length: int) -> None:
    body = HEAD[64:]
    contents = [bytes(SEGMENT.id), bytes(NAMESPACE), pack_planes(PLANES), SEGMENT.digests, pack_attachments(SEGMENT.attachments)]
    places = [vector_length_at(body, content) for content in contents]
    tokens = SEGMENT.tokens.tobytes()
    places.append(body.index(struct.pack("<I", 5) + tokens))
    for place in places:
        refused(seal(body[:place] + struct.pack("<I", length) + body[place + 4 :], PAYLOAD_BYTES))


@pytest.mark.parametrize("head", [HEAD, STATE_HEAD], ids=["segment", "state"])
def test_every_word_of_the_header_may_lie(head: bytes) -> None:
    """Offsets to themselves, to nowhere, backwards and beyond; lengths of every size."""
    kind, size = head[12], struct.unpack_from("<Q", head, 28)[0]
    body = head[64:]
    lies = [0, 1, 4, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, len(body), len(body) - 1, len(body) - 4]
    with peak_below(4 * MIB):
        for at in range(0, len(body) - 3, 2):
            for lie in [*lies, at, 2**32 - at - 4]:
                forged = body[:at] + struct.pack("<I", lie & 0xFFFFFFFF) + body[at + 4 :]
                outcome(seal(forged, size, kind=kind))


@pytest.mark.parametrize("head", [HEAD, STATE_HEAD], ids=["segment", "state"])
def test_every_byte_of_the_header_may_lie(head: bytes) -> None:
    kind, size = head[12], struct.unpack_from("<Q", head, 28)[0]
    body = head[64:]
    accepted = 0
    for at in range(len(body)):
        for mask in (1, 0x10, 0x80, 0xFF):
            forged = bytearray(body)
            forged[at] ^= mask
            accepted += outcome(seal(bytes(forged), size, kind=kind))
    assert accepted > 0, "ids, tokens and times may be forged; a test that accepts nothing tests nothing"


@pytest.mark.parametrize("head", [HEAD, STATE_HEAD], ids=["segment", "state"])
def test_cut_headers_with_a_fresh_digest_are_refused_or_sound(head: bytes) -> None:
    kind, size = head[12], struct.unpack_from("<Q", head, 28)[0]
    for end in range(len(head) - 64):
        outcome(seal(head[64 : 64 + end], size, kind=kind))


@given(st.binary(max_size=200), st.integers(1, 2), st.sampled_from([0, 64, PAYLOAD_BYTES, 4 * MIB + 1]))
def test_random_headers_with_a_fresh_digest_are_refused_or_sound(body: bytes, kind: int, size: int) -> None:
    outcome(seal(body, size, kind=kind))


def test_a_root_that_points_at_itself_is_refused() -> None:
    for root in (0, 4, 8):
        refused(seal(struct.pack("<I", root) + bytes(60), 0))


def test_a_backward_vtable_is_refused_or_sound() -> None:
    body = bytearray(HEAD[64:])
    root = struct.unpack_from("<I", body, 0)[0]
    for offset in (-1, -(2**31), 2**31 - 1, root + 1, 0, 1):
        forged = bytearray(body)
        struct.pack_into("<i", forged, root, offset)
        outcome(seal(bytes(forged), PAYLOAD_BYTES))


def test_a_header_of_zeros_of_the_largest_size_costs_its_own_size_only() -> None:
    """16 MiB of header that claim nothing: hashed, copied once, refused."""
    head = seal(bytes(16 * MIB), 0)
    with peak_below(40 * MIB), pytest.raises(FormatError):
        segment.decode_head(head)


def test_a_million_planes_are_refused_before_they_become_objects() -> None:
    table = pack_planes([keyed()]) * 1_000_000
    head = forge(Planes=table)
    with peak_below(4 * len(table)), pytest.raises(FormatError, match="rows"):
        segment.decode_head(head)
