"""Blocks of 32 channels against ggml's own quantiser, and against what the formulas say where it says nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from warmkv.kernels.errors import KernelError, NotFinite, TooLarge
from warmkv.kernels.formats import Block, RowFormat, check_block
from warmkv.kernels.quant import reference
from warmkv.kernels.testing import poisoned, rows

try:
    from warmkv.kernels.quant import fast
except ImportError:
    fast = None  # type: ignore[assignment]

FORMATS = [format_ for format_ in RowFormat if format_.blocked]
BACKENDS = [
    pytest.param(reference, id="reference"),
    pytest.param(fast, id="fast", marks=pytest.mark.skipif(fast is None, reason="needs numba")),
]
by_format = pytest.mark.parametrize("format_", FORMATS)
by_backend = pytest.mark.parametrize("kernels", BACKENDS)
#: Of x_i = (i - 13) * 0.37, from the published layouts.
GOLDEN = {
    RowFormat.Q8_0: "b62aa4abb2b9c1c8cfd6dde4ebf2f900070e151c232a31383f474e555c636a71787f",
    RowFormat.Q5_1: "ec35cfc40000ffff00112233445566778899aabbccddeeff",
    RowFormat.Q4_0: "a9ba7e6d6d5c5c4c4b4b3a3a292918180807",
}
#: The least magnitude whose scale is infinite in float16, where numbers of either sign are as large.
TOO_LARGE = {RowFormat.Q8_0: 127 * 65520.0, RowFormat.Q5_1: 65520.0, RowFormat.Q4_0: 8 * 65520.0}


@pytest.fixture(autouse=True)
def outputs_are_poisoned() -> Iterator[None]:
    with poisoned():
        yield


def spread(count: int, seed: int = 0) -> np.ndarray:
    """Blocks of magnitudes from 1e-5 to 1e4."""
    rng = np.random.default_rng(seed)
    scales = 10 ** rng.uniform(-5, 4, (count, 1))
    return (rng.standard_normal((count, 32)) * scales).astype(np.float32)


def edges() -> dict[str, np.ndarray]:
    """Blocks at the edges of what the layouts can tell."""
    shape = rows(1, 32, seed=4)[0]
    shape /= np.abs(shape).max()
    upper = np.abs(shape)
    found = {
        "zeros": np.zeros(32), "minus zeros": -np.zeros(32), "constant": np.full(32, 0.01), "below zero": np.full(32, -0.01),
        "scale rounds to 0": shape * 3e-6, "scale is the smallest": shape * 4e-6, "scale has few bits": shape * 1e-4,
        "largest is positive": np.where(upper == 1, 2.0, shape), "largest is negative": np.where(upper == 1, -2.0, shape),
        "largest of both signs": np.where(np.arange(32) == 7, 1, np.where(np.arange(32) == 3, -1, shape / 2)),
        "ties": np.arange(32) - 15.5, "ties of bytes": np.append(np.arange(31) * 4 - 60.5, 127.0), "127.5": np.full(32, 127.5),
        "large": shape * 65000.0, "one": np.eye(32)[5], "subnormal scale": shape * 1e-36,
    }  # fmt: skip
    return {name: np.asarray(block, np.float32) for name, block in found.items()}


def gguf_type(format_: RowFormat) -> tuple[ModuleType, object]:
    quants = pytest.importorskip("gguf.quants")
    return quants, pytest.importorskip("gguf").GGMLQuantizationType[format_.name]


@by_format
@by_backend
def test_a_known_block_is_its_known_bytes(kernels: ModuleType, format_: RowFormat) -> None:
    x = ((np.arange(32) - 13).astype(np.float32) * np.float32(0.37))[None]
    block = kernels.encode(x, format_, keys=True)
    assert block.codes.tobytes().hex() == GOLDEN[format_] and block.scales is None and block.size == 32
    assert np.abs(kernels.decode(block) - x).max() < {34: 0.03, 24: 0.2, 18: 0.5}[block.codes.shape[1]]


@by_format
@by_backend
def test_bytes_are_those_of_ggml_both_ways(kernels: ModuleType, format_: RowFormat) -> None:
    quants, kind = gguf_type(format_)
    x = spread(20_000).reshape(5_000, 128)
    block = kernels.encode(x, format_, keys=True)
    assert x.size >= 640_000 and np.array_equal(block.codes, quants.quantize(x, kind))
    assert kernels.decode(block).tobytes() == quants.dequantize(block.codes, kind).tobytes()


@by_format
@by_backend
def test_bytes_are_those_of_ggml_whatever_exponents_a_block_has(kernels: ModuleType, format_: RowFormat) -> None:
    """Magnitudes from subnormal ones to the largest there are, next to zeros and to others of their own bits."""
    quants, kind = gguf_type(format_)
    rng, shape = np.random.default_rng(6), (6_000, 32)
    below = rng.integers(0, rng.integers(1, 13, (6_000, 1)), shape)
    exponents = np.maximum(rng.integers(0, 158, (6_000, 1)) - below, 0)
    bits = (rng.integers(0, 2, shape) << 31) | (exponents << 23) | (rng.integers(0, 1 << 23, shape) & 0x7F0000)
    x = bits.astype(np.uint32).view(np.float32)
    x[::3, 5:9], x[1::5] = 0, x[1::5, :1]
    least, magnitude = x.min(axis=1), np.abs(x).max(axis=1)
    scale = {RowFormat.Q8_0: magnitude / 127, RowFormat.Q5_1: (x.max(axis=1) - least) / 31, RowFormat.Q4_0: magnitude / 8}[
        format_
    ]
    told = (scale >= 2.0**-127) | (scale == 0)  # below, ggml makes whole numbers of infinity
    told &= (scale < 65500) & ((np.abs(least) < 65500) | (format_ is not RowFormat.Q5_1))
    codes = kernels.encode(x[told], format_, keys=True).codes
    assert 2_000 < told.sum() < 6_000 and np.array_equal(codes, quants.quantize(x[told], kind))


@by_format
@by_backend
@pytest.mark.parametrize("name", edges())
def test_bytes_of_edge_blocks_are_those_of_ggml(kernels: ModuleType, format_: RowFormat, name: str) -> None:
    quants, kind = gguf_type(format_)
    x = edges()[name][None]
    block = kernels.encode(x, format_, keys=False)
    assert np.array_equal(block.codes, quants.quantize(x, kind))
    back = kernels.decode(block)
    assert np.isfinite(back).all() and back.tobytes() == quants.dequantize(block.codes, kind).tobytes()


@by_format
@by_backend
def test_zero_blocks_are_exact_zeros(kernels: ModuleType, format_: RowFormat) -> None:
    for zero in (0.0, -0.0):
        assert not kernels.decode(kernels.encode(np.full((2, 64), zero, np.float32), format_, keys=True)).any()


@by_format
@by_backend
def test_what_is_decoded_is_the_grid_of_the_stored_scale(kernels: ModuleType, format_: RowFormat) -> None:
    """Also where float16 rounds a scale away, or to 89 per cent more than it was: no number is made up."""
    for x in (edges()["scale rounds to 0"], edges()["scale is the smallest"], edges()["scale has few bits"], spread(1)[0]):
        block = kernels.encode(x[None], format_, keys=True)
        header = block.codes[0, :4].copy().view("<f2").astype(np.float64)
        span = {RowFormat.Q8_0: np.abs(x).max() / 127, RowFormat.Q5_1: (x.max() - x.min()) / 31}
        wanted = span.get(format_, x[np.argmax(np.abs(x))] / -8)
        assert header[0] == np.float64(np.float16(wanted))
        steps = (kernels.decode(block)[0].astype(np.float64) - (header[1] if format_ is RowFormat.Q5_1 else 0)) / (header[0] or 1)
        assert np.abs(steps - np.rint(steps)).max() < 1e-3 and np.abs(steps).max() < 127.001
        if not header[0]:
            assert not steps.any()


@by_backend
def test_halves_go_away_from_zero_and_not_to_even(kernels: ModuleType) -> None:
    """The other rule in the field gives 0, 2, 0, -2: a documented difference of one step at exact ties."""
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 127, 0.5, 2.5, -0.5, -2.5
    codes = kernels.encode(x, RowFormat.Q8_0, keys=True).codes[0, 2:].view(np.int8)
    assert codes[:5].tolist() == [127, 1, 3, -1, -3] and not codes[5:].any()
    x[0, :5] = 31, 0.5, 1.5, 2.5, 0
    assert kernels.encode(x, RowFormat.Q5_1, keys=True).codes[0, 8:13].tolist() == [15, 1, 2, 3, 0]


@by_backend
def test_of_equal_magnitudes_the_first_sets_the_scale_and_of_zeros_the_sign(kernels: ModuleType) -> None:
    x = np.zeros((2, 32), np.float32)
    x[0, [3, 9]], x[1, [3, 9]] = (5, -5), (-5, 5)
    scales = kernels.encode(x, RowFormat.Q4_0, keys=True).codes[:, :2].copy().view("<f2")
    assert scales[:, 0].tolist() == [-0.625, 0.625]
    x = np.array([[-0.0, 0.0] * 16, [0.0, -0.0] * 16], np.float32)
    lows = kernels.encode(x, RowFormat.Q5_1, keys=True).codes[:, :4].copy().view("<f2")
    assert np.signbit(lows[:, 1]).tolist() == [True, False] and not np.signbit(lows[:, 0]).any()


@by_format
@by_backend
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_by_name(kernels: ModuleType, format_: RowFormat, value: float) -> None:
    for at, last in itertools.product(((0, 0), (3, 33), (5, 95)), (value, np.nan)):
        x = rows(6, 96, seed=1)
        x[5, 95], x[at] = last, value
        with pytest.raises(NotFinite, match=f"row {at[0]} has NaN") as caught:
            kernels.encode(x, format_, keys=True)
        assert caught.value.row == at[0]


@by_format
@by_backend
@pytest.mark.parametrize("sign", [1, -1])
def test_a_scale_that_float16_does_not_reach_is_refused_and_the_largest_kept(
    kernels: ModuleType, format_: RowFormat, sign: int
) -> None:
    limit = np.float32(TOO_LARGE[format_])
    x = rows(4, 64, seed=2)
    x[2, 40] = sign * np.nextafter(limit, np.float32(0))
    assert np.isfinite(kernels.decode(kernels.encode(x, format_, keys=True))).all()
    if format_ is RowFormat.Q5_1 and sign > 0:
        limit = np.float32(31 * 65520.0) + x[2, 32:].min()
    x[2, 40] = sign * np.nextafter(limit, np.float32(np.inf))
    for big in (x[2, 40], np.float32(sign) * np.finfo(np.float32).max):
        x[2, 40] = x[3, 1] = big
        with pytest.raises(TooLarge, match="row 2 has numbers whose scale") as caught:
            kernels.encode(x, format_, keys=True)
        assert caught.value.row == 2


@by_backend
def test_a_span_beyond_float32_is_refused(kernels: ModuleType) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    with pytest.raises(TooLarge):
        kernels.encode(x, RowFormat.Q5_1, keys=True)


@by_format
def test_magnitudes_whose_inverse_scale_overflows_are_zeros(format_: RowFormat) -> None:
    for top in (1e-38, 1e-40, 1e-45):
        x = np.linspace(-top, top, 32, dtype=np.float32)[None]
        for kernels in filter(None, (reference, fast)):
            assert not kernels.decode(kernels.encode(x, format_, keys=True)).any()


@pytest.mark.skipif(fast is None, reason="needs numba")
@by_format
@pytest.mark.parametrize("size", [32, 64, 96, 320, 576])
@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_compiled_twins_give_the_bits_of_the_reference(format_: RowFormat, size: int, count: int) -> None:
    x = rows(count, size, seed=size)
    ours, theirs = fast.encode(x, format_, keys=True), reference.encode(x, format_, keys=True)
    assert ours.codes.shape == (count, format_.row_bytes(size, keys=True)) == theirs.codes.shape
    assert np.array_equal(ours.codes, theirs.codes)
    assert fast.decode(ours).tobytes() == reference.decode(ours).tobytes() and fast.decode(ours).shape == (count, size)


@pytest.mark.skipif(fast is None, reason="needs numba")
@by_format
def test_any_bits_give_the_bits_of_the_reference_or_its_refusal(format_: RowFormat) -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 1 << 32, (300, 32), dtype=np.uint64).astype(np.uint32)
    x = ((x & 0x807FFFFF) | (rng.integers(0, 255, (300, 1)).astype(np.uint32) << 23)).view(np.float32)
    x[::7, :3], x[200:250:5, 3] = (0.0, -0.0, 1e-45), np.nan
    refused = 0
    for row in x:
        try:
            theirs = reference.encode(row[None], format_, keys=True)
        except NotFinite as exc:
            refused += 1
            with pytest.raises(type(exc)) as caught:
                fast.encode(row[None], format_, keys=True)
            assert str(caught.value) == str(exc)
        else:
            assert np.array_equal(fast.encode(row[None], format_, keys=True).codes, theirs.codes)
    assert 50 < refused < 250


@by_format
@by_backend
def test_bytes_from_elsewhere_decode_to_what_they_say(kernels: ModuleType, format_: RowFormat) -> None:
    """Any bytes: scales that are subnormal, infinite or NaN."""
    quants, kind = gguf_type(format_)
    width = format_.row_bytes(64, keys=True)
    codes = np.frombuffer(np.random.default_rng(1).bytes(2_000 * width), np.uint8).reshape(-1, width)
    with np.errstate(all="ignore"):
        wanted = quants.dequantize(codes.copy(), kind)
    found = kernels.decode(Block(format_, codes))
    assert not np.isfinite(found).all() and np.array_equal(found, wanted, equal_nan=True)


@by_format
@by_backend
def test_rows_that_lie_apart_and_cannot_be_written_are_read_where_they_lie(kernels: ModuleType, format_: RowFormat) -> None:
    whole = rows(20, 3 * 64, seed=2).reshape(20, 3, 64)
    width = format_.row_bytes(64, keys=True)
    memory = np.zeros(20 * 3 * width + 1, np.uint8)
    packed = memory[1:].reshape(20, 3, width)  # at odd addresses
    for head in range(3):
        packed[:, head] = kernels.encode(whole[:, head], format_, keys=True).codes
    packed.flags.writeable = False
    for head in range(3):
        alone = reference.encode(whole[:, head].copy(), format_, keys=True)
        assert kernels.decode(Block(format_, packed[:, head]).rows(3, 17)).tobytes() == reference.decode(alone)[3:17].tobytes()
        assert np.array_equal(kernels.decode(Block(format_, packed[::-3, head])), reference.decode(alone)[::-3])


@by_backend
@pytest.mark.parametrize("format_", [*FORMATS, RowFormat.FP8])
def test_numbers_are_encoded_however_they_lie_and_only_as_float32(kernels: ModuleType, format_: RowFormat) -> None:
    x = rows(5, 64, seed=3)
    memory = np.zeros(x.nbytes + 1, np.uint8)
    odd = memory[1:].view(np.float32).reshape(x.shape)
    odd[:] = x
    memory.flags.writeable = odd.flags.writeable = False
    codes = reference.encode(x, format_, keys=True).codes
    for laid in (odd, np.asfortranarray(x), np.repeat(x, 3, axis=1)[:, ::3], x[::-1].copy()[::-1], x[:, ::-1].copy()[:, ::-1]):
        assert np.array_equal(kernels.encode(laid, format_, keys=True).codes, codes)
    same = np.broadcast_to(x[:1], x.shape)
    assert (kernels.encode(same, format_, keys=True).codes == codes[0]).all()
    for other in (x.astype(np.float64), x.astype(np.float16), x.astype(">f4"), x[0], x[None]):
        with pytest.raises(KernelError, match="expected float32"):
            kernels.encode(other, format_, keys=True)


@by_format
@by_backend
@pytest.mark.parametrize("size", [0, 1, 31, 33, 40, 80, 112])
def test_heads_that_blocks_do_not_fill_are_refused(kernels: ModuleType, format_: RowFormat, size: int) -> None:
    assert format_.refusal(size) is not None
    with pytest.raises(KernelError, match=f"heads of {size} channels: not a multiple of 32"):
        kernels.encode(rows(2, size, seed=1), format_, keys=True)
    with pytest.raises(KernelError, match="multiple of 32"):
        check_block(Block(format_, np.zeros((2, format_.columns(size)), np.uint8)), size, "here")


@by_format
def test_blocks_of_another_width_or_with_scales_are_refused(format_: RowFormat) -> None:
    good = reference.encode(rows(2, 64, seed=1), format_, keys=True)
    check_block(good, 64, "here")
    for bad in (
        Block(format_, good.codes[:, 1:]), Block(format_, good.codes.view(np.int8)),
        Block(format_, good.codes, np.ones((2, 2), np.float32)), Block(format_, good.codes, None, np.ones(64, np.float32)),
        Block(format_, good.codes[:, ::-1]),
    ):  # fmt: skip
        with pytest.raises(KernelError, match="here"):
            check_block(bad, 64, "here")
    with pytest.raises(KernelError, match="here: codes have shape"):
        check_block(good, 32, "here")
    with pytest.raises(KernelError, match="no field"):
        reference.refield(good)
