"""Compiled quantisation against its reference: the same bits, or the same refusal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("numba")

from warmkv.kernels.errors import KernelError, NotFinite  # noqa: E402
from warmkv.kernels.formats import Block, RowFormat  # noqa: E402
from warmkv.kernels.quant import fast, reference  # noqa: E402
from warmkv.kernels.testing import poisoned, rows  # noqa: E402

SIZES = (1, 7, 31, 32, 33, 64, 80, 128, 192)


@pytest.fixture(autouse=True)
def outputs_are_poisoned() -> Iterator[None]:
    with poisoned():
        yield


def assert_same(ours: Block, theirs: Block) -> None:
    assert ours.format is theirs.format and ours.codes.dtype == theirs.codes.dtype
    assert np.array_equal(ours.codes, theirs.codes)
    for name in ("scales", "field"):
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and np.array_equal(one.view(np.uint32), other.view(np.uint32)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65])
def test_encoding_decoding_and_freezing_give_the_bits_of_the_reference(size: int, keys: bool, count: int) -> None:
    x = rows(count, size, seed=size + count)
    ours, theirs = fast.encode(x, RowFormat.Q8_2F, keys=keys), reference.encode(x, RowFormat.Q8_2F, keys=keys)
    assert_same(ours, theirs)
    assert np.array_equal(fast.decode(ours), reference.decode(theirs))
    frozen, expected = fast.refield(ours), reference.refield(theirs)
    assert_same(frozen, expected)
    later = rows(5, size, seed=9)
    for field in (expected.field, None):
        one = fast.encode(later, RowFormat.Q8_2F, keys=keys, field=field)
        other = reference.encode(later, RowFormat.Q8_2F, keys=keys, field=field)
        assert_same(one, other)
        assert np.array_equal(fast.decode(one), reference.decode(other))


@pytest.mark.parametrize("format_", [RowFormat.F32, RowFormat.F16, RowFormat.BF16])
def test_float_formats_give_the_bits_of_the_reference(format_: RowFormat) -> None:
    x = np.concatenate([rows(9, 33, seed=5), rows(9, 33, seed=6, spread=1e30), rows(9, 33, seed=7, spread=1e-40)])
    x[0, :3] = np.nan, np.inf, -np.inf
    ours, theirs = fast.encode(x, format_, keys=True), reference.encode(x, format_, keys=True)
    assert np.array_equal(ours.codes.view(np.uint8), theirs.codes.view(np.uint8))
    assert np.array_equal(fast.decode(ours), reference.decode(theirs), equal_nan=True)


def test_numbers_at_the_edges_of_float32_and_of_the_grid() -> None:
    tiny, big = np.float32(1e-45), np.finfo(np.float32).max
    special = np.array([0, -0.0, tiny, -tiny, 1e-12, 1.27e-10, big, -big, 126.5, 127, 127.5], np.float32)
    x = np.stack([np.roll(special, shift) for shift in range(len(special))] + [special * 0, special / big * 200])
    ties = np.arange(-127, 127, dtype=np.float32)[None].repeat(2, axis=0) + np.float32(0.5)
    ties[:, 0] = 127
    for data in (x, x.T.copy(), ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(200))):
        for keys in (True, False):
            with np.errstate(over="ignore"):
                assert_same(fast.encode(data, RowFormat.Q8_2F, keys=keys), reference.encode(data, RowFormat.Q8_2F, keys=keys))


def test_random_bit_patterns_give_the_bits_of_the_reference_or_its_refusal() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 32, (400, 40), dtype=np.uint64).astype(np.uint32).view(np.float32)
    x[:300] = np.where(np.isfinite(x[:300]), x[:300], np.float32(1))
    field = np.abs(rng.standard_normal(40)).astype(np.float32) + np.float32(1e-6)
    for row in x:
        for given in (None, field, field * np.float32(1e30)):
            try:
                with np.errstate(over="ignore"):
                    theirs = reference.encode(row[None], RowFormat.Q8_2F, keys=True, field=given)
            except NotFinite as refused:
                with pytest.raises(NotFinite) as caught:
                    fast.encode(row[None], RowFormat.Q8_2F, keys=True, field=given)
                assert str(caught.value) == str(refused)
            else:
                assert_same(fast.encode(row[None], RowFormat.Q8_2F, keys=True, field=given), theirs)


@pytest.mark.parametrize("encode", [fast.encode, reference.encode])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (3, 2), (4, 39)])
def test_a_row_that_is_not_finite_is_refused_by_name(encode: object, value: float, at: tuple[int, int]) -> None:
    x = rows(6, 40, seed=1)
    x[at], x[5, 39] = value, np.nan
    for field in (None, np.ones(40, np.float32)):
        with pytest.raises(NotFinite, match=f"row {at[0]} has NaN") as caught:
            encode(x, RowFormat.Q8_2F, keys=True, field=field)  # type: ignore[operator]
        assert caught.value.row == at[0]


@pytest.mark.parametrize("kernels", [fast, reference])
def test_a_row_too_large_beside_its_field_is_refused_by_name(kernels: object) -> None:
    x = rows(3, 8, seed=1)
    x[1, 4] = 3e38
    with pytest.raises(NotFinite, match="row 1 is too large") as caught:
        kernels.encode(x, RowFormat.Q8_2F, keys=False, field=np.full(8, 1e-6, np.float32))  # type: ignore[attr-defined]
    assert caught.value.row == 1


@pytest.mark.parametrize("kernels", [fast, reference])
def test_rows_whose_squares_overflow_keep_a_field_and_their_values(kernels: object) -> None:
    x = rows(70, 40, seed=1, spread=1e25)
    block = kernels.refield(kernels.encode(x, RowFormat.Q8_2F, keys=True))  # type: ignore[attr-defined]
    back = kernels.decode(block)  # type: ignore[attr-defined]
    assert np.isfinite(block.field).all() and np.abs(back - x).max() < 0.03 * np.abs(x).max()


def test_rows_that_lie_apart_and_cannot_be_written_are_read_as_they_are() -> None:
    whole = rows(50, 3 * 40, seed=2)
    whole.flags.writeable = False
    apart = whole.reshape(50, 3, 40)[:, 1]
    ours = fast.encode(apart, RowFormat.Q8_2F, keys=True)
    assert_same(ours, reference.encode(apart.copy(), RowFormat.Q8_2F, keys=True))
    packed = np.zeros((50, 2, 40), np.int8)
    packed[:, 1] = ours.codes
    packed.flags.writeable = False
    view = Block(RowFormat.Q8_2F, packed[:, 1], ours.scales)
    assert np.array_equal(fast.decode(view), reference.decode(ours))


def test_wrong_rows_are_refused_as_the_reference_does() -> None:
    with pytest.raises(KernelError, match="float64"):
        fast.encode(np.zeros((2, 2)), RowFormat.Q8_2F, keys=True)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"\(4,\)"):
        fast.encode(np.zeros(4, np.float32), RowFormat.Q8_2F, keys=True)
    with pytest.raises(KernelError, match=r"field of shape \(3,\)"):
        fast.encode(np.zeros((2, 4), np.float32), RowFormat.Q8_2F, keys=True, field=np.ones(3, np.float32))
    with pytest.raises(KernelError, match="no field"):
        fast.refield(fast.encode(np.zeros((2, 4), np.float32), RowFormat.F16, keys=True))
