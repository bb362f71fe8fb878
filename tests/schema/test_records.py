"""Packed records: layouts by hand, refusals on both sides, coverage."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_golden import ANCHORS, ATTACHMENTS, PLANES

from warmkv.schema.errors import FormatError, RecordError
from warmkv.schema.identity import ROTATED_BYTES as ROTATED
from warmkv.schema.identity import PlaneFormat, PlaneRole
from warmkv.schema.records import (
    ANCHOR_DTYPE,
    ATTACHMENT_DTYPE,
    MAX_TABLE_ROWS,
    MAX_TOKENS,
    PLANE_DTYPE,
    Anchor,
    AnchorKind,
    Attachment,
    Plane,
    as_tokens,
    check_attachments,
    coverage,
    has_row_bytes,
    pack_anchors,
    pack_attachments,
    pack_planes,
    row_bytes,
    unpack_anchors,
    unpack_attachments,
    unpack_planes,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
DIGEST = bytes(range(32))
PLANE = Plane(0, PlaneRole.KEY, PlaneFormat.F32, (2, 8), 0, 4, 64)
PLANE_ROW = struct.Struct("<IBBH4IQQQQ16s")


# -- tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 2**32 - 1],
        (0, 1, 2**32 - 1),
        np.array([0, 1, 2**32 - 1], dtype="<u4"),
        np.array([0, 1, 2**32 - 1], dtype=">u4"),
        np.array([0, 1, 2**32 - 1], dtype=np.int64),
        np.array([0, 9, 1, 9, 2**32 - 1], dtype=np.uint32)[::2],
        np.array([2**32 - 1, 1, 0], dtype=np.uint64)[::-1],
    ],
)
def test_tokens_are_little_endian_uint32_whatever_they_were(ids: Any) -> None:
    tokens = as_tokens(ids)
    assert tokens.dtype == np.dtype("<u4")
    assert tokens.flags.c_contiguous
    assert tokens.tobytes() == struct.pack("<3I", 0, 1, 2**32 - 1)


def test_tokens_that_fit_already_are_not_copied() -> None:
    ids = np.arange(10, dtype="<u4")
    assert np.shares_memory(as_tokens(ids), ids)


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [[1, 2]],
        [[1], [1, 2]],
        7,
        "123",
        b"123",
        None,
        [1.0],
        [True],
        ["1"],
        [None],
        [-1],
        [2**32],
        [2**70],
        [2**63, -1],
        np.zeros((2, 2), np.uint32),
        np.zeros(0, np.uint32),
        np.zeros(2, np.float32),
    ],
)
def test_what_is_no_row_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(RecordError):
        as_tokens(ids)


def test_too_many_tokens_are_refused_without_a_copy() -> None:
    crowd = np.broadcast_to(np.uint32(7), (MAX_TOKENS + 1,))
    with pytest.raises(RecordError):
        as_tokens(crowd)


# -- attachments ------------------------------------------------------------------------------


def test_attachment_layout() -> None:
    assert pack_attachments(ATTACHMENTS) == b"".join(struct.pack("<QQ32s", a.start, a.length, a.digest) for a in ATTACHMENTS)
    assert ATTACHMENT_DTYPE.itemsize == 48


@given(st.lists(st.builds(Attachment, U64, U64, st.binary(min_size=32, max_size=32)), max_size=5).map(tuple))
def test_attachments_round_trip(attachments: tuple[Attachment, ...]) -> None:
    assert unpack_attachments(pack_attachments(attachments)) == attachments


def test_attachments_come_sorted_and_may_touch() -> None:
    late, early = Attachment(4, 2, DIGEST), Attachment(1, 3, DIGEST)
    assert check_attachments([late, early], 6) == (early, late)
    assert check_attachments([], 0) == ()


@pytest.mark.parametrize(
    "attachments",
    [
        [Attachment(0, 0, DIGEST)],
        [Attachment(0, -1, DIGEST)],
        [Attachment(-1, 2, DIGEST)],
        [Attachment(4, 3, DIGEST)],
        [Attachment(6, 1, DIGEST)],
        [Attachment(0, 3, DIGEST), Attachment(2, 1, DIGEST)],
        [Attachment(2, 1, DIGEST), Attachment(2, 1, DIGEST)],
        [Attachment(0, 1, DIGEST[:31])],
        [Attachment(0, 1, DIGEST + b"\0")],
        [Attachment(0, 1, b"")],
    ],
)
def test_attachments_that_do_not_fit_are_refused(attachments: list[Attachment]) -> None:
    with pytest.raises(RecordError):
        check_attachments(attachments, 6)


@pytest.mark.parametrize("digest", [b"", b"x", DIGEST[:16], DIGEST * 2])
def test_a_digest_of_another_length_is_never_stretched(digest: bytes) -> None:
    """numpy would repeat one byte over the whole field."""
    with pytest.raises(RecordError):
        pack_attachments([Attachment(0, 1, digest)])


# -- anchors ----------------------------------------------------------------------------------


def test_anchor_layout() -> None:
    rows = [struct.pack("<QB3xIQq", a.position, a.kind, a.depth, a.semantic_hash, a.shift_offset) for a in ANCHORS]
    assert pack_anchors(ANCHORS) == b"".join(rows)
    assert ANCHOR_DTYPE.itemsize == 32


@given(
    st.lists(st.builds(Anchor, U64, st.sampled_from(AnchorKind), U32, U64, st.integers(-(2**63), 2**63 - 1)), max_size=5).map(
        tuple
    )
)
def test_anchors_round_trip(anchors: tuple[Anchor, ...]) -> None:
    assert unpack_anchors(pack_anchors(anchors)) == anchors


@pytest.mark.parametrize(
    "changes",
    [
        {"position": -1},
        {"position": 2**64},
        {"depth": -1},
        {"depth": 2**32},
        {"semantic_hash": -1},
        {"semantic_hash": 2**64},
        {"shift_offset": 2**63},
    ],
)
def test_anchor_numbers_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        pack_anchors([replace(Anchor(1), **changes)])


def test_unknown_anchor_kind_is_refused() -> None:
    with pytest.raises(FormatError):
        unpack_anchors(struct.pack("<QB3xIQq", 1, 7, 0, 0, 0))


# -- planes -----------------------------------------------------------------------------------


def plane_row(**changes: Any) -> bytes:
    values: dict[str, Any] = {
        "layer": 0,
        "role": 1,
        "format": 1,
        "dims": 2,
        "shape": (2, 8, 0, 0),
        "first_row": 0,
        "rows": 4,
        "row_bytes": 64,
        "offset": 0,
        "field": bytes(16),
    }
    assert set(changes) <= set(values)
    values.update(changes)
    flat = [part for value in values.values() for part in (value if isinstance(value, tuple) else (value,))]
    return PLANE_ROW.pack(*flat)


def test_plane_layout() -> None:
    assert PLANE_DTYPE.itemsize == PLANE_ROW.size == 72
    assert pack_planes([PLANE]) == plane_row()
    expected = [
        plane_row(
            layer=p.layer,
            role=int(p.role),
            format=int(p.format),
            dims=len(p.row_shape),
            shape=p.row_shape + (0,) * (4 - len(p.row_shape)),
            first_row=p.first_row,
            rows=p.rows,
            row_bytes=p.row_bytes,
            offset=p.offset,
            field=p.field,
        )
        for p in PLANES
    ]
    assert pack_planes(PLANES) == b"".join(expected)


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    format_ = draw(st.sampled_from(PlaneFormat))
    shape = tuple(draw(st.lists(st.integers(1, 2**15), min_size=1, max_size=4)))
    role = draw(st.sampled_from(PlaneRole))
    if format_ in ROTATED:
        shape = (*shape[:-1], 8 * shape[-1])
    bytes_ = row_bytes(format_, shape, role)
    numbers = [draw(U64) for _ in range(3)]
    field = draw(st.binary(min_size=16, max_size=16))
    return Plane(draw(U32), role, format_, shape, numbers[0], numbers[1], bytes_, numbers[2], field)


@given(st.lists(planes(), max_size=4).map(tuple))
def test_planes_round_trip(sample: tuple[Plane, ...]) -> None:
    assert unpack_planes(pack_planes(sample)) == sample


def test_unpacked_numbers_are_pythons_own() -> None:
    """numpy's uint32 would wrap in whatever is computed from a row shape."""
    (plane,) = unpack_planes(plane_row(format=4, shape=(2**16, 2**16, 0, 0), row_bytes=2**32))
    assert all(type(number) is int for number in (*plane.row_shape, plane.layer, plane.rows, plane.row_bytes, plane.offset))
    assert plane.row_shape[0] * plane.row_shape[1] == 2**32
    assert type(plane.field) is bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"role": 0},
        {"role": 13},
        {"role": 255},
        {"format": 0},
        {"format": 16},
        {"dims": 0},
        {"dims": 1},
        {"dims": 3},
        {"dims": 5, "shape": (2, 8, 1, 1)},
        {"dims": 65535, "shape": (2, 8, 1, 1)},
        {"shape": (0, 8, 0, 0)},
        {"shape": (2, 0, 0, 0)},
        {"shape": (2, 8, 0, 1)},
        {"row_bytes": 0},
        {"row_bytes": 63},
        {"row_bytes": 65},
        {"row_bytes": 2**64 - 1},
        {"format": 2, "row_bytes": 64},
        {"format": 5, "row_bytes": 0},
    ],
)
def test_planes_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        unpack_planes(plane_row(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": -1},
        {"layer": 2**32},
        {"first_row": -1},
        {"rows": 2**64},
        {"row_bytes": -1},
        {"offset": -64},
        {"row_shape": ()},
        {"row_shape": (1, 1, 1, 1, 1)},
        {"row_shape": (2**32,)},
        {"row_shape": (-1,)},
        {"field": b""},
        {"field": b"x"},
        {"field": bytes(32)},
    ],
)
def test_planes_that_do_not_fit_their_row_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        pack_planes([replace(PLANE, **changes)])


def test_row_bytes_by_element() -> None:
    assert [row_bytes(format_, (3, 5)) for format_ in (PlaneFormat.F32, PlaneFormat.F16, PlaneFormat.BF16, PlaneFormat.RAW)] == [
        60,
        30,
        30,
        15,
    ]
    assert row_bytes(PlaneFormat.F32, (2**32 - 1,) * 4) == 4 * (2**32 - 1) ** 4


KEY, VALUE = PlaneRole.KEY, PlaneRole.VALUE
#: Bytes of one row, counted by hand: a block is 32 elements of one head, the last one padded; Q8_2F
#: has an f32 scale for each 32 elements of a key's head, and one for a value's head; TurboQuant has bits and f16s.
ROW_BYTES: list[tuple[PlaneFormat, tuple[int, ...], PlaneRole, int]] = [
    (PlaneFormat.Q8_0, (1, 32), KEY, 34), (PlaneFormat.Q8_0, (3, 64), VALUE, 3 * 2 * 34),
    (PlaneFormat.Q8_0, (2, 33), KEY, 2 * 68), (PlaneFormat.Q8_0, (1,), KEY, 34),
    (PlaneFormat.Q8_0, (2, 3, 128), KEY, 6 * 4 * 34), (PlaneFormat.Q5_1, (1, 32), KEY, 24),
    (PlaneFormat.Q5_1, (8, 128), VALUE, 8 * 4 * 24), (PlaneFormat.Q5_1, (8, 1), KEY, 8 * 24),
    (PlaneFormat.Q4_0, (1, 32), KEY, 18), (PlaneFormat.Q4_0, (8, 96), VALUE, 8 * 3 * 18), (PlaneFormat.Q4_0, (31,), KEY, 18),
    (PlaneFormat.FP8_E4M3FN, (3, 5), KEY, 15), (PlaneFormat.FP8_E4M3FNUZ, (3, 5), VALUE, 15),
    (PlaneFormat.FP8_E5M2, (3, 5), KEY, 15), (PlaneFormat.FP8_E5M2FNUZ, (7,), VALUE, 7),
    (PlaneFormat.Q8_2F, (1, 32), KEY, 32 + 4), (PlaneFormat.Q8_2F, (8, 128), KEY, 8 * (128 + 16)),
    (PlaneFormat.Q8_2F, (2, 33), KEY, 2 * (33 + 8)), (PlaneFormat.Q8_2F, (1, 32), VALUE, 32 + 4),
    (PlaneFormat.Q8_2F, (8, 128), VALUE, 8 * (128 + 4)), (PlaneFormat.Q8_2F, (2, 33), VALUE, 2 * (33 + 4)),
    (PlaneFormat.TQ_KEY, (1, 64), KEY, 28), (PlaneFormat.TQ_KEY, (8, 128), KEY, 8 * 52), (PlaneFormat.TQ_KEY, (3, 40), KEY, 57),
    (PlaneFormat.TQ_VALUE, (1, 64), VALUE, 18), (PlaneFormat.TQ_VALUE, (8, 128), VALUE, 8 * 34),
    (PlaneFormat.TQ_VALUE, (8,), VALUE, 4), (PlaneFormat.TQ3, (1, 64), KEY, 26), (PlaneFormat.TQ3, (8, 128), KEY, 8 * 50),
    (PlaneFormat.TQ3, (5, 8), KEY, 5 * 5),
]  # fmt: skip


@pytest.mark.parametrize(("format_", "shape", "role", "expected"), ROW_BYTES)
def test_row_bytes_of_packed_formats(format_: PlaneFormat, shape: tuple[int, ...], role: PlaneRole, expected: int) -> None:
    assert row_bytes(format_, shape, role) == expected
    sizes = {"format": int(format_), "role": int(role), "dims": len(shape), "shape": shape + (0,) * (4 - len(shape))}
    assert unpack_planes(plane_row(**sizes, row_bytes=expected))[0].row_bytes == expected
    for other in (1, expected - 1, expected + 1, 2 * expected, 2**64 - 1):
        with pytest.raises(FormatError, match="bytes a row"):
            unpack_planes(plane_row(**sizes, row_bytes=other))


@pytest.mark.parametrize("format_", sorted(ROTATED))
def test_rotated_rows_have_bytes_where_eight_channels_fill_them(format_: PlaneFormat) -> None:
    for shape in ((3, 5), (2, 8, 12), (63,), (8, 4)):
        assert not has_row_bytes(format_, shape)
        with pytest.raises(RecordError, match=rf"{format_.name} with heads of {shape[-1]} channels"):
            row_bytes(format_, shape)
        padded = shape + (0,) * (4 - len(shape))
        with pytest.raises(FormatError, match="bytes a row"):
            unpack_planes(plane_row(format=int(format_), dims=len(shape), shape=padded, row_bytes=61))
    assert all(has_row_bytes(other, (3, 5)) for other in PlaneFormat if other not in ROTATED)
    assert row_bytes(format_, (2**32 - 1, 2**32 - 1, 2**31, 2**31)) > 2**100, "sizes do not wrap"


# -- tables -----------------------------------------------------------------------------------

TABLES = [
    (unpack_attachments, ATTACHMENT_DTYPE, bytes(48)),
    (unpack_anchors, ANCHOR_DTYPE, bytes(32)),
    (unpack_planes, PLANE_DTYPE, plane_row()),
]


@pytest.mark.parametrize(("unpack", "dtype", "row"), TABLES)
def test_tables_are_whole_rows_or_empty(unpack: Any, dtype: np.dtype[np.void], row: bytes) -> None:
    assert unpack(b"") == ()
    assert len(unpack(row * 3)) == 3
    for cut in range(1, dtype.itemsize):
        with pytest.raises(FormatError):
            unpack((row * 2)[:-cut])


@pytest.mark.parametrize(("unpack", "dtype", "row"), TABLES)
def test_a_huge_table_is_refused_before_it_becomes_objects(unpack: Any, dtype: np.dtype[np.void], row: bytes) -> None:
    data = row * (MAX_TABLE_ROWS + 1)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_the_caller_hears_of_too_many_attachments_first() -> None:
    crowd = [Attachment(at, 1, DIGEST) for at in range(MAX_TABLE_ROWS + 1)]
    assert len(check_attachments(crowd[1:], MAX_TOKENS)) == MAX_TABLE_ROWS
    with pytest.raises(RecordError):
        check_attachments(crowd, MAX_TOKENS)


# -- coverage ---------------------------------------------------------------------------------


def test_coverage_ignores_place_and_order_only() -> None:
    moved = tuple(replace(plane, offset=plane.offset + 4096) for plane in reversed(PLANES))
    assert coverage(moved) == coverage(PLANES)
    assert coverage(()) == b""


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 9},
        {"role": PlaneRole.LATENT},
        {"format": PlaneFormat.FP8_E5M2},
        {"row_shape": (5, 3)},
        {"row_shape": (15,)},
        {"row_shape": (3, 5, 1)},
        {"first_row": 4},
        {"rows": 4},
        {"row_bytes": 61},
        {"field": bytes(15) + b"\1"},
    ],
)
def test_coverage_tells_everything_else_apart(changes: dict[str, Any]) -> None:
    first, *rest = PLANES
    assert coverage([replace(first, **changes), *rest]) != coverage(PLANES)
    assert coverage(rest) != coverage(PLANES)


def test_a_plane_knows_its_bytes() -> None:
    assert PLANE.total_bytes == 256
    assert replace(PLANE, rows=2**40).total_bytes == 2**46
    assert Attachment(3, 4, DIGEST).end == 7
