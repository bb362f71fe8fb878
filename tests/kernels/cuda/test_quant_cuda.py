"""Rows into planes and back by CUDA: the bytes and numbers of the numpy reference, and nothing beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant import cuda
from warmkv.kernels.quant.packed import pack, packed_dtype, packed_shape
from warmkv.kernels.quant.packed import view as packed_view
from warmkv.kernels.quant.reference import decode, encode
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.testing import rows
from warmkv.schema.identity import PlaneFormat

PLAIN = [format_ for format_ in RowFormat if not format_.rotated]
#: Of heads: powers of two, others whose rows are not as aligned, and odd ones, which have no wide loads.
SIZES = {RowFormat.Q8_2F: [1, 33, 40, 128]} | dict.fromkeys((RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0), [32, 96])
CASES = [(format_, size, keys) for format_ in PLAIN for size in SIZES.get(format_, [7, 40, 128]) for keys in (True, False)]
# Other formats are the same on both sides.
CASES = [case for case in CASES if case[0] is RowFormat.Q8_2F or case[2] == (case[1] % 3 != 0)]
HEADS = 3
WITH_FIELDS = [(*case, field) for case in CASES for field in (False, True)[: 1 + case[0].quantised]]
by_case_and_field = pytest.mark.parametrize(
    "format_, size, keys, with_field", WITH_FIELDS, ids=lambda value: getattr(value, "value", str(value))
)
FILL = 0x55


def counters(machine: Any, length: int, base: int) -> Counters:
    return Counters(*(machine.put(np.array([number], np.int32)) for number in (length, base)))


def plane_of(
    machine: Any, format_: RowFormat, heads: int, size: int, capacity: int, *, keys: bool, field: Any = None, stored: Any = None
) -> ResidentPlane:
    """Of ``stored`` bytes, or of FILL."""
    data = np.full(capacity * heads * format_.row_bytes(size, keys=keys) + TAIL_PAD, FILL, np.uint8)
    if stored is not None:
        data[: stored.size] = stored.ravel()
    return ResidentPlane(format_, heads, size, keys, capacity, machine.put(data), None if field is None else machine.put(field))


def packed(numbers: Any, format_: RowFormat, *, keys: bool, field: Any = None) -> Any:
    """Bytes (rows, row bytes) of the reference, for numbers (rows, heads, size)."""
    heads = range(numbers.shape[1])
    blocks = [[encode(numbers[:, head], format_, keys=keys, field=None if field is None else field[head])] for head in heads]
    made = np.ascontiguousarray(pack(blocks, format_, numbers.shape[2], keys=keys))
    return made.reshape(len(numbers), -1).view(np.uint8)


def field_of(heads: int, size: int) -> Any:
    return np.exp(np.random.default_rng(size).standard_normal((heads, size))).astype(np.float32)


def test_numbers_of_formats_are_those_of_records() -> None:
    names = {RowFormat.FP8: PlaneFormat.FP8_E4M3FN}
    assert FORMAT_NUMBERS == {format_: int(names.get(format_) or PlaneFormat[format_.name]) for format_ in RowFormat}


@by_case_and_field
def test_appended_rows_are_the_bytes_of_the_reference(
    machine: Any, format_: RowFormat, size: int, keys: bool, with_field: bool
) -> None:
    heads, capacity, base, held = HEADS, 9, 100, 2
    field = field_of(heads, size) if with_field else None
    plane = plane_of(machine, format_, heads, size, capacity, keys=keys, field=field)
    numbers = rows(5 * heads, size, seed=size).reshape(5, heads, size)
    numbers[1, 1] = 0.0
    numbers[2, 0] *= 1e-6
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, base + held, base))
    found = machine.get(plane.data)
    want = np.full_like(found, FILL)
    want[held * plane.row_bytes : (held + 5) * plane.row_bytes] = packed(numbers, format_, keys=keys, field=field).ravel()
    np.testing.assert_array_equal(found, want)


@by_case_and_field
def test_decoded_rows_are_exactly_what_their_bytes_stand_for(
    machine: Any, format_: RowFormat, size: int, keys: bool, with_field: bool
) -> None:
    heads, capacity = HEADS, 6
    field = field_of(heads, size) if with_field else None
    numbers = rows(capacity * heads, size, seed=size).reshape(capacity, heads, size)
    stored = packed(numbers, format_, keys=keys, field=field)
    plane = plane_of(machine, format_, heads, size, capacity, keys=keys, field=field, stored=stored)
    out = machine.put(np.full((4, heads, size), np.nan, np.float32))
    cuda.decode(machine.launcher, plane, 1, 5, out)
    shaped = stored.view(packed_dtype(format_)).reshape(capacity, *packed_shape(format_, heads, size, keys=keys))
    blocks = packed_view(shaped, format_, heads, size, keys=keys, field=field)
    want = np.stack([decode(block) for block in blocks], axis=1)[1:5]
    np.testing.assert_array_equal(machine.get(out).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("format_", PLAIN, ids=lambda value: value.value)
@pytest.mark.parametrize(
    "length, base, fits",
    [(0, 0, range(0, 4)), (4, 0, range(0, 0)), (2, 0, range(0, 2)), (5, 8, range(3, 4)), (9, 7, range(0, 2))],
)
def test_rows_outside_of_the_plane_are_left_out(machine: Any, format_: RowFormat, length: int, base: int, fits: range) -> None:
    heads, size, capacity, count = HEADS, 32 if format_.blocked else 40, 4, 4
    plane = plane_of(machine, format_, heads, size, capacity, keys=True)
    numbers = rows(count * heads, size, seed=3).reshape(count, heads, size)
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, length, base))
    want = np.full(capacity * plane.row_bytes + TAIL_PAD, FILL, np.uint8)
    bytes_ = packed(numbers, format_, keys=True)
    for row in fits:
        at = (length - base + row) * plane.row_bytes
        want[at : at + plane.row_bytes] = bytes_[row]
    np.testing.assert_array_equal(machine.get(plane.data), want)


@pytest.mark.parametrize("format_", PLAIN, ids=lambda value: value.value)
def test_a_row_that_is_not_finite_spoils_no_other(machine: Any, format_: RowFormat) -> None:
    size, count = 32 if format_.blocked else 40, 4
    numbers = rows(count * HEADS, size, seed=8).reshape(count, HEADS, size)
    want = packed(numbers, format_, keys=True)
    numbers[1, 0, 3], numbers[2, 2, 30], numbers[2, 1, 0] = np.nan, np.inf, -np.inf
    plane = plane_of(machine, format_, HEADS, size, count, keys=True)
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, 0, 0))
    found = machine.get(plane.data)[:-TAIL_PAD].reshape(want.shape)
    np.testing.assert_array_equal(found[[0, 3]], want[[0, 3]])
    spoiled = np.zeros((count, HEADS), bool)
    spoiled[[1, 2, 2], [0, 2, 1]] = True
    heads = (count, HEADS, -1)
    np.testing.assert_array_equal(found.reshape(heads)[~spoiled], want.reshape(heads)[~spoiled])


@pytest.mark.parametrize("format_", PLAIN, ids=lambda value: value.value)
def test_no_rows_are_no_launch(machine: Any, format_: RowFormat) -> None:
    plane = plane_of(machine, format_, 1, 32, 3, keys=True)
    before = machine.get(plane.data)
    cuda.append(machine.launcher, plane, machine.put(np.empty((0, 1, 32), np.float32)), counters(machine, 1, 0))
    cuda.decode(machine.launcher, plane, 3, 3, machine.put(np.empty((0, 1, 32), np.float32)))
    np.testing.assert_array_equal(machine.get(plane.data), before)


def all_of(machine: Any, kernel: str, format_: RowFormat, given: Any) -> Any:
    """``given`` numbers through a plane of one channel a row: bytes for "append", numbers for "decode"."""
    dtype, stored = np.dtype(format_.code_dtype), None if kernel == "append" else given.view(np.uint8)
    plane = plane_of(machine, format_, 1, 1, len(given), keys=True, stored=stored)
    if kernel == "append":
        cuda.append(machine.launcher, plane, machine.put(given.reshape(-1, 1, 1)), counters(machine, 0, 0))
        return machine.get(plane.data)[: len(given) * dtype.itemsize].view(dtype)
    out = machine.put(np.full((len(given), 1, 1), 1.5, np.float32))
    cuda.decode(machine.launcher, plane, 0, len(given), out)
    return machine.get(out).ravel()


def hard_numbers(step: int) -> Any:
    """float32 of every exponent and sign, with mantissas at, just below and just above what a format that keeps
    ``step`` fewer bits has and ties of it: all if they are few, else the least and largest, and those of subnormal
    numbers, which keep fewer bits still."""
    heads = np.arange(512, dtype=np.uint32) << np.uint32(23)
    count = 1 << (24 - step)
    kept = range(count) if count <= 16 else [*range(8), *range(count - 8, count)]
    places = [place << (step - 1) for place in kept] + [odd << (cut - 1) for cut in range(step, 24) for odd in (1, 2, 3)]
    ends = np.unique(np.array([place + off for place in places for off in (-1, 0, 1)]) & 0x7FFFFF).astype(np.uint32)
    return (heads[:, None] | ends).ravel().view(np.float32)


def test_every_float16_and_bf16_and_fp8_reads_as_it_should(machine: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(1 << 16, dtype=np.uint16)
    for format_, kind in (
        (RowFormat.F16, np.float16),
        (RowFormat.BF16, ml_dtypes.bfloat16),
        (RowFormat.FP8, ml_dtypes.float8_e4m3fn),
    ):
        given = codes[: 1 << 8 * format_.code_dtype.itemsize].astype(format_.code_dtype.str.replace("f", "u"))
        want = given.view(kind).astype(np.float32)
        found = all_of(machine, "decode", format_, given.view(format_.code_dtype))
        np.testing.assert_array_equal(found, want)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(want)[number])


def test_numbers_narrow_to_the_nearest_and_ties_to_even(machine: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = (
        (RowFormat.F16, np.float16, 13),
        (RowFormat.BF16, ml_dtypes.bfloat16, 16),
        (RowFormat.FP8, ml_dtypes.float8_e4m3fn, 20),
    )
    for format_, kind, step in kinds:
        given = hard_numbers(step)
        found = all_of(machine, "append", format_, given).view(kind).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            want = (np.clip(given, -448, 448) if format_ is RowFormat.FP8 else given).astype(kind).astype(np.float32)
        np.testing.assert_array_equal(found, want)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(want)[number])


@pytest.mark.parametrize("format_", [RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0], ids=lambda value: value.value)
def test_blocks_are_those_of_gguf(machine: Any, format_: RowFormat) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType[format_.name]
    heads, size, count = HEADS, 96, 200
    numbers = rows(count * heads, size, seed=11).reshape(count, heads, size)
    plane = plane_of(machine, format_, heads, size, count, keys=True)
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, 0, 0))
    found = machine.get(plane.data)[:-TAIL_PAD].reshape(count * heads, -1)
    np.testing.assert_array_equal(found, quants.quantize(numbers.reshape(count * heads, size), kind))
    out = machine.put(np.full_like(numbers, np.nan))
    cuda.decode(machine.launcher, plane, 0, count, out)
    np.testing.assert_array_equal(machine.get(out).reshape(count * heads, size), quants.dequantize(found, kind))


@pytest.mark.parametrize("format_", [RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0], ids=lambda value: value.value)
def test_blocks_with_ties_zeros_of_both_signs_and_tiny_numbers(machine: Any, format_: RowFormat) -> None:
    """Whole and half numbers of few values make extremes that several channels share, and codes half way."""
    drawn = np.random.default_rng(5)
    numbers = drawn.integers(-6, 7, (100, HEADS, 32)).astype(np.float32) / 2
    numbers[::3] *= drawn.choice(np.array([0.0, -0.0, 1.0], np.float32), (34, HEADS, 32))
    numbers[::7] *= np.float32(1e-39)
    numbers[::11] = np.where(drawn.random((10, HEADS, 32)) < 0.5, 0.0, -0.0)
    plane = plane_of(machine, format_, HEADS, 32, len(numbers), keys=True)
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, 0, 0))
    found = machine.get(plane.data)[:-TAIL_PAD].reshape(len(numbers), -1)
    np.testing.assert_array_equal(found, packed(numbers, format_, keys=True))


@pytest.mark.parametrize("format_, low, high, size", [
    (RowFormat.Q8_0, -127, 127, 32), (RowFormat.Q5_1, 0, 31, 32), (RowFormat.Q4_0, -8, 8, 32), (RowFormat.Q8_2F, -127, 127, 40),
], ids=lambda value: getattr(value, "value", str(value)))  # fmt: skip
def test_numbers_half_way_between_codes(machine: Any, format_: RowFormat, low: int, high: int, size: int) -> None:
    """Groups of channels whose scale is 1, so that every other number is a tie."""
    numbers = np.random.default_rng(9).integers(2 * low + 1, 2 * high, (60, HEADS, size)).astype(np.float32) / 2
    numbers[..., ::32], numbers[..., 1::32] = low, high
    plane = plane_of(machine, format_, HEADS, size, len(numbers), keys=True)
    cuda.append(machine.launcher, plane, machine.put(numbers), counters(machine, 0, 0))
    found = machine.get(plane.data)[:-TAIL_PAD].reshape(len(numbers), -1)
    np.testing.assert_array_equal(found, packed(numbers, format_, keys=True))
    # They are ties: what comes back is half a step away.
    back = machine.put(np.full_like(numbers, np.nan))
    cuda.decode(machine.launcher, plane, 0, len(numbers), back)
    away = np.abs(machine.get(back) - numbers)
    assert (away[numbers % 1 != 0] >= 0.5).all() and (away[numbers % 1 == 0] <= (format_ is RowFormat.Q4_0)).all()


def test_the_length_goes_on_where_it_lies(machine: Any) -> None:
    both = counters(machine, 41, 7)
    cuda.advance(machine.launcher, both, 5)
    cuda.advance(machine.launcher, both, -2)
    assert (int(machine.get(both.length)[0]), int(machine.get(both.base)[0])) == (44, 7)


@pytest.mark.parametrize("format_, size, heads", [
    (RowFormat.F32, 8, 1), (RowFormat.Q5_1, 32, 1), (RowFormat.F16, 6, 1), (RowFormat.Q8_0, 32, 1), (RowFormat.FP8, 7, 3),
], ids=lambda value: getattr(value, "value", str(value)))  # fmt: skip
@pytest.mark.parametrize("kept", [[], [0], [11], [0, 1, 2], [3, 4, 9], list(range(1, 12)), list(range(12))])
def test_kept_rows_come_to_the_front_and_others_stay(
    machine: Any, format_: RowFormat, size: int, heads: int, kept: list[int]
) -> None:
    capacity = 12
    length = capacity * heads * format_.row_bytes(size, keys=False) + TAIL_PAD
    data = np.random.default_rng(1).integers(0, 256, length).astype(np.uint8)
    plane = plane_of(machine, format_, heads, size, capacity, keys=False, stored=data)
    want = data.copy()
    by_row = data[: capacity * plane.row_bytes].reshape(capacity, -1)
    want[: len(kept) * plane.row_bytes] = by_row[kept].ravel()
    scratch = machine.put(np.zeros(max(1, len(kept)) * plane.row_bytes, np.uint8))
    cuda.gather(machine.launcher, plane, machine.put(np.array(kept, np.int32)), scratch)
    np.testing.assert_array_equal(machine.get(plane.data), want)


def test_rows_that_are_not_there_are_gathered_as_zeros(machine: Any) -> None:
    """Only the device knows which rows are kept."""
    data = np.arange(1, 4 * 8 + TAIL_PAD + 1).astype(np.uint8)
    plane = plane_of(machine, RowFormat.F32, 1, 2, 4, keys=False, stored=data)
    kept = np.array([1, 4, -1, 2**31 - 1], np.int32)
    cuda.gather(machine.launcher, plane, machine.put(kept), machine.put(np.full(4 * 8, 7, np.uint8)))
    want = data.copy()
    want[:8], want[8:32] = data[8:16], 0
    np.testing.assert_array_equal(machine.get(plane.data), want)


def test_what_does_not_fit_a_plane_is_refused(machine: Any) -> None:
    plane, both = plane_of(machine, RowFormat.Q8_0, 2, 32, 4, keys=True), counters(machine, 0, 0)
    launcher, put = machine.launcher, machine.put
    fine = put(np.zeros((2, 2, 32), np.float32))
    for rows_ in (
        put(np.zeros((2, 2, 32), np.float16)),
        put(np.zeros((2, 32), np.float32)),
        put(np.zeros((2, 1, 32), np.float32)),
        put(np.zeros((2, 2, 31), np.float32)),
    ):
        with pytest.raises(KernelError):
            cuda.append(launcher, plane, rows_, both)
    for first, last in ((-1, 1), (3, 5), (2, 1), (0, 3)):
        with pytest.raises(KernelError):
            cuda.decode(launcher, plane, first, last, fine)
    scratch = put(np.zeros(2 * plane.row_bytes - 1, np.uint8))
    for kept, room in (([0, 1], scratch), ([0, 1, 2, 3, 3], put(np.zeros(5 * plane.row_bytes, np.uint8)))):
        with pytest.raises(KernelError):
            cuda.gather(launcher, plane, put(np.array(kept, np.int32)), room)
    with pytest.raises(KernelError):
        cuda.gather(launcher, plane, put(np.array([0], np.int64)), put(np.zeros(plane.row_bytes, np.uint8)))
    with pytest.raises(KernelError, match="turboquant"):
        cuda.program("append", RowFormat.TQ3, 1, 32, keys=True)
