"""Storage formats: what is decoded against what the formulas of the format say, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant import reference
from warmkv.kernels.testing import rows

SIZES = (1, 7, 31, 32, 33, 64, 80, 128, 192)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_codes_are_the_nearest_on_the_grid_of_their_group(size: int, keys: bool, count: int) -> None:
    x = rows(count, size, seed=size + count)
    block = reference.encode(x, RowFormat.Q8_2F, keys=keys)
    group = 32 if keys else size
    assert block.scales is not None and block.scales.shape == (count, -(-size // group))
    for row in range(count):
        for at in range(0, size, group):
            part = x[row, at : at + group].astype(np.float64)
            scale = max(np.abs(part).max() / 127, 1e-12)
            assert block.scales[row, at // group] == pytest.approx(scale, rel=1e-6)
            codes = block.codes[row, at : at + group].astype(np.float64)
            assert np.all(np.abs(codes - part / scale) <= 0.5 + 1e-4) and np.abs(codes).max() <= 127


def test_halves_are_rounded_away_from_zero() -> None:
    x = np.array([[127.0, 0.5, -0.5, 1.5, -1.5, 2.5, 0.49]], np.float32)
    block = reference.encode(x, RowFormat.Q8_2F, keys=False)
    assert block.codes.tolist() == [[127, 1, -1, 2, -2, 3, 0]]


@pytest.mark.parametrize("size", [7, 32, 80])
def test_a_field_takes_out_what_channels_differ_by(size: int) -> None:
    x = rows(100, size, seed=3)
    x[:, 0] *= 30
    plain = reference.encode(x, RowFormat.Q8_2F, keys=False)
    block = reference.refield(plain)
    stored = reference.decode(plain).astype(np.float64)
    assert block.field is not None
    np.testing.assert_allclose(block.field, np.maximum(np.sqrt((stored**2).mean(axis=0)), 1e-6), rtol=1e-5)
    quiet = np.abs(x[:, 1:] - reference.decode(plain)[:, 1:]).max()
    assert np.abs(stored[:, 1:] - reference.decode(block)[:, 1:]).max() < quiet / 2
    later = reference.encode(x, RowFormat.Q8_2F, keys=False, field=block.field)
    error = np.abs(reference.decode(later).astype(np.float64) - x)
    assert later.scales is not None
    assert np.all(error <= 0.5001 * later.scales * block.field)


def test_all_zero_rows_are_exact_zeros_also_with_a_field() -> None:
    block = reference.refield(reference.encode(np.zeros((70, 40), np.float32), RowFormat.Q8_2F, keys=True))
    assert not reference.decode(block).any() and np.isfinite(reference.decode(block)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_by_name_and_kept_by_float_formats(value: float) -> None:
    x = rows(5, 8, seed=1)
    x[3, 2] = value
    with pytest.raises(NotFinite, match="row 3") as caught:
        reference.encode(x, RowFormat.Q8_2F, keys=True)
    assert caught.value.row == 3
    for format_ in (RowFormat.F32, RowFormat.F16, RowFormat.BF16):
        back = reference.decode(reference.encode(x, format_, keys=True))
        assert np.array_equal(back[3, 2], np.float32(value), equal_nan=True)


def test_half_formats_round_to_nearest_even() -> None:
    torch = pytest.importorskip("torch")
    x = np.concatenate([rows(50, 33, seed=5), rows(50, 33, seed=6, spread=1e30), rows(9, 33, seed=7, spread=1e-40)])
    bits = reference.encode(x, RowFormat.BF16, keys=True).codes
    assert np.array_equal(bits, torch.from_numpy(x).to(torch.bfloat16).view(torch.uint16).numpy())
    with np.errstate(over="ignore"):
        assert np.array_equal(reference.encode(x, RowFormat.F16, keys=True).codes, x.astype(np.float16))


def test_wrong_rows_are_refused() -> None:
    with pytest.raises(KernelError, match="float64"):
        reference.encode(np.zeros((2, 2)), RowFormat.F32, keys=True)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=r"\(4,\)"):
        reference.encode(np.zeros(4, np.float32), RowFormat.F32, keys=True)
    with pytest.raises(KernelError, match="no field"):
        reference.refield(reference.encode(np.zeros((2, 4), np.float32), RowFormat.F16, keys=True))


def test_bytes_of_a_row_are_those_of_its_arrays() -> None:
    for format_ in (format_ for format_ in RowFormat if not format_.rotated):
        for size in (size for size in SIZES if format_.refusal(size) is None):
            for keys in (True, False):
                block = reference.encode(rows(3, size, seed=1), format_, keys=keys)
                held = block.codes.nbytes + (0 if block.scales is None else block.scales.nbytes)
                assert held == 3 * format_.row_bytes(size, keys=keys)
