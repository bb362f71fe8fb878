"""Rows in memory of their own: growth, gaps, the frozen field, and refusals of memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import decode, encode, refield
from warmkv.kvstore.live.rows.allocation import MIN_ROWS, allocate, grown
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.schema.errors import OutOfMemory, RecordError

FORMATS = [format_ for format_ in RowFormat if not format_.rotated]


def numbers(count: int, heads: int, size: int, seed: int = 0) -> np.ndarray:
    data = np.random.default_rng(seed).standard_normal((count, heads, size))
    data[..., ::3] *= 8
    return data.astype(np.float32)


def filled(format_: RowFormat, rows: np.ndarray, *, keys: bool = True, allocate=allocate) -> GrowingRows:
    plane = GrowingRows(format_, rows.shape[1], rows.shape[2], keys=keys, allocate=allocate)
    plane.reserve(len(rows))
    plane.append(rows)
    return plane


def content(plane: GrowingRows) -> list[tuple[bytes, bytes | None, bytes | None]]:
    found = []
    for head in range(plane.heads):
        (block,) = plane.blocks(head)
        extra = [None if part is None else part.tobytes() for part in (block.scales, block.field)]
        found.append((block.codes.tobytes(), *extra))
    return found


@pytest.mark.parametrize(
    "format_, size", [(format_, size) for format_ in FORMATS for size in (1, 7, 32, 33, 80, 96) if format_.refusal(size) is None]
)
@pytest.mark.parametrize("keys", [True, False])
def test_rows_are_stored_as_the_encoder_says(format_: RowFormat, size: int, keys: bool) -> None:
    rows = numbers(5, 3, size)
    plane = filled(format_, rows, keys=keys)
    for head in range(3):
        want = encode(np.ascontiguousarray(rows[:, head]), format_, keys=keys)
        (block,) = plane.blocks(head)
        assert block.codes.tobytes() == want.codes.tobytes() and block.codes.dtype == format_.code_dtype
        assert (block.scales is None) == (want.scales is None)
        assert block.scales is None or block.scales.tobytes() == want.scales.tobytes()
    groups = {True: -(-size // 32), False: 1}[keys] if format_.quantised else 0
    packed = {RowFormat.Q8_0: 34, RowFormat.Q5_1: 24, RowFormat.Q4_0: 18}
    bytes_ = size // 32 * packed[format_] if format_ in packed else size * format_.code_dtype.itemsize + 4 * groups
    assert plane.stored_bytes == 3 * 5 * bytes_


@pytest.mark.parametrize("keys", [True, False])
def test_frozen_field_divides_as_the_encoder_does_bit_for_bit(keys: bool) -> None:
    rows, more = numbers(70, 2, 40), numbers(9, 2, 40, seed=1)
    plane = filled(RowFormat.Q8_2F, rows, keys=keys)
    plane.freeze()
    plane.reserve(9)
    plane.append(more)
    for head in range(2):
        old = refield(encode(np.ascontiguousarray(rows[:, head]), RowFormat.Q8_2F, keys=keys))
        new = encode(np.ascontiguousarray(more[:, head]), RowFormat.Q8_2F, keys=keys, field=old.field)
        (block,) = plane.blocks(head)
        assert block.codes.tobytes() == old.codes.tobytes() + new.codes.tobytes()
        assert block.scales.tobytes() == old.scales.tobytes() + new.scales.tobytes()
        assert block.field.tobytes() == old.field.tobytes()
    assert plane.stored_bytes == 2 * (79 * RowFormat.Q8_2F.row_bytes(40, keys=keys) + 4 * 40)


def test_blocks_are_read_only_runs_of_adjacent_rows() -> None:
    plane = filled(RowFormat.Q8_2F, numbers(70, 2, 40))
    plane.freeze()
    plane.drop_front(3)
    (block,) = plane.blocks(1)
    assert block.codes.flags.c_contiguous
    for array in (block.codes, block.scales, block.field, plane.field):
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("format_", FORMATS)
def test_growth_and_sliding_keep_every_row(format_: RowFormat) -> None:
    size = 32 if format_.blocked else 5
    rng, rows = np.random.default_rng(3), numbers(4000, 2, size)
    plane = GrowingRows(format_, 2, size, keys=True)
    first = last = 0
    while last < len(rows):
        count = int(rng.integers(0, 90))
        part = rows[last : last + count]
        plane.reserve(len(part))
        plane.append(part)
        last += len(part)
        gone = int(rng.integers(0, min(100, last - first) + 1))
        plane.drop_front(gone)
        first += gone
        assert content(plane) == content(filled(format_, rows[first:last]))
    assert plane.capacity < 1000


def test_a_window_of_rows_takes_memory_of_the_window() -> None:
    plane, row = GrowingRows(RowFormat.F32, 1, 1, keys=True), np.ones((1, 1, 1), np.float32)
    for _ in range(5000):
        plane.reserve(1)
        plane.append(row)
        plane.drop_front(max(0, len(plane) - 300))
    assert len(plane) == 300 and plane.capacity < 2 * 300


def test_rows_move_up_only_where_enough_room_is_gained() -> None:
    plane, row = filled(RowFormat.F32, numbers(MIN_ROWS, 1, 1)), numbers(1, 1, 1)
    assert plane.capacity == MIN_ROWS
    plane.drop_front(1)
    plane.reserve(1)
    assert plane.capacity == 96, "moving 63 rows for the room of one would be done at every append"
    plane.append(row)
    plane.drop_front(40)
    plane.reserve(60)
    assert plane.capacity == 96


def test_growth_copies_each_row_a_bounded_number_of_times() -> None:
    asked: list[int] = []

    def counting(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        asked.append(shape[1])
        return allocate(shape, dtype)

    plane, row = GrowingRows(RowFormat.F32, 1, 1, keys=True, allocate=counting), np.ones((1, 1, 1), np.float32)
    for _ in range(20_000):
        plane.reserve(1)
        plane.append(row)
    copied = sum(asked[:-1])
    assert asked[0] == MIN_ROWS and copied < 3 * 20_000
    assert all(after == before + before // 2 for before, after in zip(asked, asked[1:], strict=False))


@pytest.mark.parametrize("capacity, rows, expected", [(0, 1, 64), (0, 65, 65), (64, 65, 96), (64, 200, 200), (96, 97, 144)])
def test_capacity_grows_by_half_or_to_what_is_needed(capacity: int, rows: int, expected: int) -> None:
    assert grown(capacity, rows) == expected


def test_sizes_beyond_addresses_are_refused_with_their_bytes() -> None:
    with pytest.raises(OutOfMemory) as caught:
        allocate((1 << 40, 1 << 40), np.dtype(np.float32))
    assert caught.value.requested_bytes == 4 << 80
    plane = filled(RowFormat.Q8_2F, numbers(3, 2, 4))
    before = content(plane), plane.capacity
    with pytest.raises(OutOfMemory) as caught:
        plane.reserve(sys.maxsize)
    assert caught.value.requested_bytes == 2 * (sys.maxsize + 3) * 4
    assert (content(plane), plane.capacity) == before


def test_memory_the_machine_does_not_have_is_refused_with_its_bytes() -> None:
    with pytest.raises(OutOfMemory) as caught:
        allocate((1 << 59,), np.dtype(np.float32))
    assert caught.value.requested_bytes == 1 << 61


@pytest.mark.parametrize("operation", ["encode", "refield"])
@pytest.mark.parametrize("at", range(2))
def test_memory_refused_inside_a_kernel_leaves_both_planes(operation: str, at: int) -> None:
    calls = {"left": 1 << 30}

    def failing(*args: object, **options: object) -> Block:
        if calls["left"] == 0:
            raise MemoryError
        calls["left"] -= 1
        return getattr(REFERENCE, operation)(*args, **options)

    weak = replace(REFERENCE, **{operation: failing})
    pair = [GrowingRows(RowFormat.Q8_2F, 1, 8, keys=keys, kernels=weak) for keys in (True, False)]
    planes, rows = Planes(pair), numbers(70, 1, 8)
    planes.append([rows[:60], rows[:60]])
    before = [content(plane) for plane in pair]
    # Rows up to the freeze are encoded first, then both planes are written anew, then the rest is encoded.
    calls["left"] = at + (2 if operation == "encode" else 0)
    with pytest.raises(OutOfMemory) as caught:
        planes.append([rows[60:], rows[60:]])
    assert caught.value.requested_bytes > 0
    assert [content(plane) for plane in pair] == before and len(planes) == 60 and planes.open
    calls["left"] = 1 << 30
    planes.append([rows[60:], rows[60:]])
    whole = Planes([GrowingRows(RowFormat.Q8_2F, 1, 8, keys=keys) for keys in (True, False)])
    whole.append([rows, rows])
    assert [content(plane) for plane in pair] == [content(plane) for plane in whole.planes]


@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_.finite_only and not format_.quantised])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_where_no_code_stands_for_them(format_: RowFormat, bad: float) -> None:
    plane, rows = filled(format_, numbers(66, 3, 64)), numbers(4, 3, 64)
    before = content(plane)
    rows[2, 1, 5] = bad
    plane.reserve(4)
    with pytest.raises(RecordError, match=f"head 1, row 68: NaN or infinity, which {format_.value} cannot hold"):
        plane.append(rows)
    assert content(plane) == before


@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_.blocked])
def test_numbers_too_large_for_their_scale_are_refused(format_: RowFormat) -> None:
    plane, rows = filled(format_, numbers(5, 2, 32)), numbers(3, 2, 32)
    before = content(plane)
    rows[1, 1, 30] = 1e9
    plane.reserve(3)
    with pytest.raises(RecordError, match="head 1, row 6: numbers too large for a float16 scale"):
        plane.append(rows)
    assert content(plane) == before


@pytest.mark.parametrize("format_", [format_ for format_ in FORMATS if format_.blocked])
def test_heads_that_blocks_do_not_fill_have_no_plane(format_: RowFormat) -> None:
    with pytest.raises(RecordError, match="values: heads of 80 channels: not a multiple of 32"):
        GrowingRows(format_, 2, 80, keys=False)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_quantised_rows_that_are_not_finite_are_refused_by_head_and_row(bad: float) -> None:
    plane, rows = filled(RowFormat.Q8_2F, numbers(66, 3, 8)), numbers(4, 3, 8)
    plane.freeze()
    before = content(plane)
    rows[2, 1, 5] = bad
    plane.reserve(4)
    with pytest.raises(RecordError, match="head 1, row 68"):
        plane.append(rows)
    assert content(plane) == before


def test_a_number_too_large_for_its_field_is_refused() -> None:
    plane = GrowingRows(RowFormat.Q8_2F, 1, 4, keys=False)
    plane.seed_field(np.full((1, 4), 1e-6, np.float32))
    plane.reserve(1)
    with pytest.raises(RecordError, match="row 0"):
        plane.append(np.full((1, 1, 4), 3e38, np.float32))
    assert len(plane) == 0


@pytest.mark.parametrize("format_", [RowFormat.F32, RowFormat.F16, RowFormat.BF16])
def test_float_rows_keep_nan_and_infinity(format_: RowFormat) -> None:
    rows = np.array([np.nan, np.inf, -np.inf, 1.5], np.float32).reshape(1, 1, 4)
    found = decode(filled(format_, rows).blocks(0)[0])
    assert np.array_equal(found, rows[:, 0], equal_nan=True)


def test_copies_own_their_bytes_and_their_field() -> None:
    plane = filled(RowFormat.Q8_2F, numbers(70, 2, 40))
    plane.freeze()
    before = content(plane)
    blocks = [plane.blocks(head) for head in range(2)]
    cut = [[block.rows(a, b) for (block,) in [head] for a, b in ((0, 13), (13, 13), (13, 70))] for head in blocks]
    copy = GrowingRows(RowFormat.Q8_2F, 2, 40, keys=True).copied(cut, room=5)
    assert content(copy) == before and copy.capacity == 75 and copy.frozen
    copy.append(numbers(5, 2, 40, seed=2))
    plane.clear()
    assert len(copy) == 75 and len(plane) == 0 and not plane.frozen
    assert [part[2] for part in content(copy)] == [part[2] for part in before]


def test_gather_keeps_the_bytes_of_the_rows_it_keeps() -> None:
    rows = numbers(9, 2, 3)
    plane = filled(RowFormat.F16, rows)
    plane.gather(np.array([0, 3, 4, 8]))
    assert content(plane) == content(filled(RowFormat.F16, rows[[0, 3, 4, 8]]))
    assert plane.allocated_bytes == plane.stored_bytes == 4 * 2 * 3 * 2


def test_clear_keeps_memory_and_release_gives_it_back() -> None:
    plane = filled(RowFormat.Q8_2F, numbers(70, 2, 4))
    plane.freeze()
    plane.reserve(1)
    held = plane.allocated_bytes - plane.field.nbytes
    plane.clear()
    assert (len(plane), plane.frozen, plane.stored_bytes, plane.allocated_bytes) == (0, False, 0, held)
    plane.release()
    assert plane.allocated_bytes == 0
    plane.reserve(1)
    plane.append(numbers(1, 2, 4))
    assert len(plane) == 1


@pytest.mark.parametrize(
    "field",
    [
        np.ones((2, 5), np.float32),
        np.ones((2, 4), np.float64),
        np.full((2, 4), np.nan, np.float32),
        np.zeros((2, 4), np.float32),
    ],
)
def test_field_that_does_not_fit_is_refused(field: np.ndarray) -> None:
    plane = GrowingRows(RowFormat.Q8_2F, 2, 4, keys=True)
    with pytest.raises(RecordError, match="field"):
        plane.seed_field(field)
    assert not plane.frozen


def test_field_of_a_plane_with_rows_or_without_quantisation_is_refused() -> None:
    for plane in (filled(RowFormat.Q8_2F, numbers(1, 2, 4)), GrowingRows(RowFormat.F32, 2, 4, keys=True)):
        with pytest.raises(RecordError, match="field"):
            plane.seed_field(np.ones((2, 4), np.float32))
