"""fp8 e4m3fn against another implementation of it, code by code and at every edge between two codes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from warmkv.kernels.errors import NotFinite
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant import fp8, reference
from warmkv.kernels.testing import poisoned, rows

try:
    from warmkv.kernels.quant import fast
except ImportError:
    fast = None  # type: ignore[assignment]

by_backend = pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(reference, id="reference"),
        pytest.param(fast, id="fast", marks=pytest.mark.skipif(fast is None, reason="needs numba")),
    ],
)
ALL = np.arange(256, dtype=np.uint8)
NANS = {0x7F, 0xFF}


@pytest.fixture(autouse=True)
def outputs_are_poisoned() -> Iterator[None]:
    with poisoned():
        yield


def codes_of(kernels: ModuleType, numbers: object) -> np.ndarray:
    x = np.asarray(numbers, np.float32).reshape(1, -1)
    block = kernels.encode(x, RowFormat.FP8, keys=True)
    assert block.codes.dtype == np.uint8 and block.codes.shape == x.shape and block.scales is None
    return np.asarray(block.codes[0])


def oracle(numbers: np.ndarray) -> np.ndarray:
    """It does not saturate: what is too large has to be cut first."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    clipped = np.clip(np.asarray(numbers, np.float32), -448, 448)
    return clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@by_backend
def test_every_code_stands_for_what_the_variant_says(kernels: ModuleType) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = kernels.decode(Block(RowFormat.FP8, ALL[None]))[0]
    wanted = ALL.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(found, wanted, equal_nan=True) and set(np.flatnonzero(np.isnan(found))) == NANS
    numbers = ~np.isnan(found)
    assert np.array_equal(np.signbit(found[numbers]), ALL[numbers] >= 0x80)
    for other in ("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
        read = ALL.view(getattr(ml_dtypes, other)).astype(np.float32)
        assert np.count_nonzero(found != read) > 200, f"{other} is another format"


@by_backend
def test_every_number_there_is_keeps_its_code(kernels: ModuleType) -> None:
    kept = np.array([code for code in ALL.tolist() if code not in NANS], np.uint8)
    assert np.array_equal(codes_of(kernels, fp8.VALUES[kept]), kept)


@by_backend
def test_numbers_between_two_codes_go_to_the_nearer_and_ties_to_the_even(kernels: ModuleType) -> None:
    steps = fp8.VALUES[:0x7F].astype(np.float64)
    middle = ((steps[:-1] + steps[1:]) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64) * 2, steps[:-1] + steps[1:]), "ties are exact in float32"
    below, above = (np.nextafter(middle, np.float32(end)) for end in (0, np.inf))
    lower = np.arange(0x7E, dtype=np.uint8)
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert np.array_equal(codes_of(kernels, sign * below), lower | bit)
        assert np.array_equal(codes_of(kernels, sign * above), (lower + 1) | bit)
        assert np.array_equal(codes_of(kernels, sign * middle), (lower + (lower & 1)) | bit)


@by_backend
def test_known_numbers_have_known_codes(kernels: ModuleType) -> None:
    known = (
        (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-1.5, 0xBC), (17.0, 0x58), (240.0, 0x77), (448.0, 0x7E), (2.0**-9, 0x01),
        (2.0**-10, 0x00), (2.0**-10 * 1.0001, 0x01), (1e-45, 0x00), (-1e-45, 0x80),
    )  # fmt: skip
    for number, code in known:
        assert codes_of(kernels, [number]).tolist() == [code], number


@by_backend
def test_what_is_too_large_becomes_the_largest_and_never_nan(kernels: ModuleType) -> None:
    numbers = np.array([449, 463.9, 464, 465, 479.9, 480, 500, 512, 1000, 65504, 1e30, np.finfo(np.float32).max], np.float32)
    assert set(codes_of(kernels, numbers).tolist()) == {0x7E} and set(codes_of(kernels, -numbers).tolist()) == {0xFE}


@by_backend
def test_codes_are_those_of_another_implementation(kernels: ModuleType) -> None:
    x = np.concatenate([rows(2000, 160, seed=1, spread=spread).reshape(-1) for spread in (1e-3, 1, 10)])
    bits = np.random.default_rng(2).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, bits[np.isfinite(bits)]])
    assert x.size > 640_000 and np.array_equal(codes_of(kernels, x), oracle(x))


@by_backend
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_by_name(kernels: ModuleType, value: float) -> None:
    for at in ((0, 0), (3, 6), (4, 12)):
        x = rows(5, 13, seed=1)
        x[at], x[4, 12] = value, np.inf
        with pytest.raises(NotFinite, match=f"row {at[0]} has NaN") as caught:
            kernels.encode(x, RowFormat.FP8, keys=False)
        assert caught.value.row == at[0]


@pytest.mark.skipif(fast is None, reason="needs numba")
@pytest.mark.parametrize("size", [1, 7, 32, 33, 80])
@pytest.mark.parametrize("count", [0, 1, 33])
def test_compiled_twins_give_the_bits_of_the_reference(size: int, count: int) -> None:
    x = rows(count, 2 * size, seed=size, spread=30)[:, ::2]  # neighbours lie apart
    ours, theirs = fast.encode(x, RowFormat.FP8, keys=True), reference.encode(x, RowFormat.FP8, keys=True)
    assert ours.codes.shape == (count, size) and np.array_equal(ours.codes, theirs.codes)
    assert np.array_equal(fast.decode(ours), reference.decode(theirs)) and fast.decode(ours).shape == (count, size)
