"""Attention over blocks of 32 channels and fp8, against what other libraries say their bytes are."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from dataclasses import replace
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants

from warmkv.kernels.attention.layer import attend_heads, attend_heads_chunk
from warmkv.kernels.attention.reference import Attended
from warmkv.kernels.dispatch import Kernels, kernels
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant import reference as quant
from warmkv.kernels.quant.packed import pack, view
from warmkv.kernels.testing import poisoned, rows, softmax_attention
from warmkv.kernels.turboquant import block as turned
from warmkv.kernels.turboquant.attend import REFERENCE as TURBO
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]
TYPES = {
    RowFormat.Q8_0: GGMLQuantizationType.Q8_0, RowFormat.Q5_1: GGMLQuantizationType.Q5_1,
    RowFormat.Q4_0: GGMLQuantizationType.Q4_0,
}  # fmt: skip
NEW = [*TYPES, RowFormat.FP8]
#: A key format and a value format each; every new one on either side, beside others too.
PAIRS = [
    (RowFormat.Q8_0, RowFormat.Q5_1), (RowFormat.FP8, RowFormat.Q4_0), (RowFormat.Q5_1, RowFormat.FP8),
    (RowFormat.Q4_0, RowFormat.Q8_0), (RowFormat.Q8_0, RowFormat.F16), (RowFormat.Q8_2F, RowFormat.Q5_1),
    (RowFormat.TQ_KEY, RowFormat.Q4_0), (RowFormat.FP8, RowFormat.TQ_VALUE),
]  # fmt: skip
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]
fast_only = pytest.mark.skipif(find_spec("numba") is None, reason="needs numba")


@pytest.fixture(params=BACKENDS)
def table(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


def stored(x: F32, format_: RowFormat, *, keys: bool) -> Block:
    """Rows as another library stores them, where one does."""
    if format_ in TYPES:
        return Block(format_, quants.quantize(x, TYPES[format_]))
    if format_ is RowFormat.FP8:
        return Block(format_, np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    if format_.rotated:
        by = Turn(Rotation.of(42, 1, x.shape[1]))
        return Block(format_, turned.encode(TURBO, x[:, None], format_, by)[:, 0], turn=by)
    return quant.encode(x, format_, keys=keys)


def numbers(block: Block) -> F64:
    """What the bytes of a block stand for."""
    if block.format in TYPES:
        wide: F64 = quants.dequantize(np.ascontiguousarray(block.codes), TYPES[block.format]).astype(np.float64)
        return wide
    if block.format is RowFormat.FP8:
        return np.ascontiguousarray(block.codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return quant.decode(block).astype(np.float64)


def same(a: Attended, b: Attended) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in ("out", "top", "total"))


def close(done: Attended, mass: F32, expected: tuple[F64, F64, F64], largest: float, loose: float = 1.0) -> None:
    out, lse, p = expected
    logits = max(1.0, float(np.abs(lse[np.isfinite(lse)]).max(initial=0)))
    known = 2e-6 * loose * logits  # what float32 knows of logits this large
    np.testing.assert_allclose(done.out, out, rtol=0, atol=known * max(1.0, largest))
    np.testing.assert_allclose(done.lse, lse, rtol=3e-6 * loose, atol=3e-6 * loose)
    np.testing.assert_allclose(mass, p.sum(axis=0), rtol=0, atol=known * len(lse))


@pytest.mark.parametrize("format_", NEW)
@pytest.mark.parametrize("size, heads", [(32, 7), (96, 7), (160, 1), (192, 7), (256, 7)])
@pytest.mark.parametrize("count", [1, 3, 64, 66])
def test_one_softmax_over_all_rows(table: Kernels, format_: RowFormat, size: int, heads: int, count: int) -> None:
    q, mass = rows(heads, size, 1, 0.3), np.zeros(count, np.float32)
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)
    done = table.attend(q, [keys], [values], scale=size**-0.5, importance=mass)
    expected = softmax_attention(q.astype(np.float64), numbers(keys), numbers(values), size**-0.5, 0, count, 0.0, None)
    close(done, mass, expected, float(np.abs(numbers(values)).max()))


@pytest.mark.parametrize("size", [1, 7, 15, 17, 31, 33, 80])
def test_fp8_heads_of_any_size(table: Kernels, size: int) -> None:
    q, mass = rows(5, size, 1, 0.3), np.zeros(67, np.float32)
    keys, values = (stored(rows(67, size, seed), RowFormat.FP8, keys=seed == 2) for seed in (2, 3))
    done = table.attend(q, [keys], [values], scale=size**-0.5, importance=mass)
    expected = softmax_attention(q.astype(np.float64), numbers(keys), numbers(values), size**-0.5, 0, 67, 0.0, None)
    close(done, mass, expected, float(np.abs(numbers(values)).max()))


@pytest.mark.parametrize("format_", NEW)
def test_every_code_is_read_as_the_other_library_reads_it(table: Kernels, format_: RowFormat) -> None:
    """Rows of all bytes there are, seen one at a time: what comes out is the row."""
    if format_ is RowFormat.FP8:
        block = Block(format_, np.arange(256, dtype=np.uint8).reshape(8, 32))
    else:
        codes = np.random.default_rng(5).integers(0, 256, (150, 2, format_.row_bytes(32, keys=True)), np.uint8)
        codes[..., 1] &= 0xBF  # scales that are finite
        codes[..., 3] &= 0xBF if format_ is RowFormat.Q5_1 else 0xFF
        block = Block(format_, codes.reshape(150, -1))
    want = numbers(block)
    keys = Block(RowFormat.F32, np.zeros((len(block), 4), np.float32))
    for row in range(len(block)):
        with np.errstate(invalid="ignore"):
            done = table.attend(np.ones((1, 4), np.float32), [keys], [block], scale=1.0, first=row, upto=row + 1)
            np.testing.assert_array_equal(done.out[0], want[row].astype(np.float32))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(side.value for side in pair))
@pytest.mark.parametrize("window", [1, 39, 100])
@pytest.mark.parametrize("softcap, with_sinks", [(0.0, False), (20.0, True)])
def test_windows_caps_and_sinks(
    table: Kernels, pair: tuple[RowFormat, RowFormat], window: int, softcap: float, with_sinks: bool
) -> None:
    count, size, heads = 70, 64, 5
    q = rows(heads, size, 1, 0.2)
    sinks = np.array([0.7, -3.0, 60.0, -np.inf, 5.0], np.float32) if with_sinks else None
    keys, values = stored(rows(count, size, 2), pair[0], keys=True), stored(rows(count, 32, 3), pair[1], keys=False)
    for upto in (1, 40, 70):
        first, mass = max(0, upto - window), np.zeros(count, np.float32)
        given = {"scale": 0.1, "first": first, "upto": upto, "softcap": softcap}
        done = table.attend(q, [keys], [values], sinks=sinks, importance=mass, **given)
        listed = None if sinks is None else sinks.tolist()
        expected = softmax_attention(q.astype(np.float64), numbers(keys), numbers(values), sinks=listed, **given)
        close(done, mass, expected, float(np.abs(numbers(values)).max()), 4.0)
        assert not mass[:first].any() and not mass[upto:].any()


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(side.value for side in pair))
@pytest.mark.parametrize("window", [0, 13, 70])
def test_a_chunk_is_its_positions_one_after_the_other(table: Kernels, pair: tuple[RowFormat, RowFormat], window: int) -> None:
    start, count, heads, size = 61, 9, 3, 64
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    keys = stored(rows(70, size, 2), pair[0], keys=True)
    values = stored(rows(70, 96 if pair[1].blocked else 64, 3), pair[1], keys=False)
    sinks, mass, each = np.array([0.5, 3.0, -2.0], np.float32), np.zeros(70, np.float32), np.zeros(70, np.float32)
    given = {"scale": 0.1, "start": start, "window": window, "sinks": sinks}
    table.attend_chunk(q, [keys], [values], importance=each.copy(), **given)
    with poisoned():
        done = table.attend_chunk(q, [keys], [values], importance=mass, **given)
    for i in range(count):
        first = max(0, start + i + 1 - window) if window else 0
        alone = softmax_attention(
            q[i].astype(np.float64), numbers(keys), numbers(values), 0.1, first, start + i + 1, 0.0, sinks.tolist()
        )  # fmt: skip
        np.testing.assert_allclose(done.out[i], alone[0], rtol=0, atol=2e-4)
        np.testing.assert_allclose(done.lse[i], alone[1], rtol=1e-5, atol=1e-5)
        each += alone[2].sum(axis=0).astype(np.float32)
    np.testing.assert_allclose(mass, each, rtol=0, atol=1e-4)


@pytest.mark.parametrize("format_", NEW)
@pytest.mark.parametrize("heads", [2, 4, 5, 8])
def test_a_head_alone_gives_the_bits_it_gives_in_its_group(table: Kernels, format_: RowFormat, heads: int) -> None:
    q = rows(heads, 96, 9, 0.2)
    keys, values = stored(rows(131, 96, 2), format_, keys=True), stored(rows(131, 160, 3), format_, keys=False)
    masses = np.zeros((2, 131), np.float32)
    together = table.attend(q, [keys], [values], scale=0.1, first=2, softcap=30.0, importance=masses[0])
    for head in range(heads):
        alone = table.attend(q[head : head + 1], [keys], [values], scale=0.1, first=2, softcap=30.0, importance=masses[1])
        assert np.array_equal(alone.out[0], together.out[head])
        assert alone.top[0] == together.top[head] and alone.total[0] == together.total[head]
    assert np.array_equal(*masses)


@pytest.mark.parametrize("format_", NEW)
@pytest.mark.parametrize("window", [1, 13, 64, 65, 150])
def test_rows_that_are_not_seen_do_not_count_whether_they_are_there_or_not(
    table: Kernels, format_: RowFormat, window: int
) -> None:
    q = rows(5, 64, 9, 0.2)
    keys, values = stored(rows(203, 64, 2), format_, keys=True), stored(rows(203, 64, 3), format_, keys=False)
    first, masses = 200 - window, np.zeros((2, 203), np.float32)
    whole = table.attend(q, [keys], [values], scale=0.2, first=first, upto=200, importance=masses[0])
    wild = [replace(block, codes=block.codes.copy()) for block in (keys, values)]
    for block in wild:
        block.codes[:first] = block.codes[200:] = 0x7F  # NaN, or as large as can be
    for a, b in ((keys.rows(first, 203), values.rows(first, 203)), [block.rows(first, 203) for block in wild]):
        trimmed = table.attend(q, [a], [b], scale=0.2, upto=window, importance=masses[1, first:])
        assert same(whole, trimmed) and np.array_equal(*masses)
        masses[1] = 0
    assert same(whole, table.attend(q, wild[:1], wild[1:], scale=0.2, first=first, upto=200))


def test_a_head_sees_nan_where_a_row_of_fp8_has_it_and_nobody_else_does(table: Kernels) -> None:
    q = rows(2, 32, 1, 0.2)
    keys, values = stored(rows(70, 32, 2), RowFormat.FP8, keys=True), stored(rows(70, 32, 3), RowFormat.FP8, keys=False)
    values.codes[5, 3] = 0xFF
    with np.errstate(invalid="ignore"):
        seen = table.attend(q, [keys], [values], scale=0.1)
        assert np.isnan(seen.out[:, 3]).all() and np.isfinite(np.delete(seen.out, 3, axis=1)).all()
        assert np.isfinite(table.attend(q, [keys], [values], scale=0.1, first=6).out).all()


@pytest.mark.parametrize("format_", NEW)
@pytest.mark.parametrize("skew", [0, 1, 2])
def test_rows_of_a_segment_are_read_where_they_lie(table: Kernels, format_: RowFormat, skew: int) -> None:
    """Token-major rows of three KV heads from any byte on, in one call, beside dense ones in three."""
    heads, count, size = 3, 140, 64
    planes = []
    for seed in (0, 10):
        dense = [stored(rows(count, size, seed + head), format_, keys=seed == 0) for head in range(heads)]
        width = dense[0].codes.shape[1]
        memory = np.full(skew + count * heads * width, 0xFF, np.uint8)
        laid = memory[skew:].reshape(count, heads, width)
        laid[:] = np.stack([block.codes for block in dense], axis=1)
        laid.flags.writeable = False
        planes.append((dense, [Block(format_, laid[:, head]) for head in range(heads)]))
    (near_keys, far_keys), (near_values, far_values) = planes
    q, mass = rows(6, size, 1, 0.2), np.zeros((2, count), np.float32)
    given = {"scale": 0.1, "first": 1}
    far = attend_heads(table, q, [[k] for k in far_keys], [[v] for v in far_values], importance=mass[0], threads=2, **given)
    for head in range(heads):
        mine = slice(2 * head, 2 * head + 2)
        near = table.attend(q[mine], near_keys[head : head + 1], near_values[head : head + 1], importance=mass[1], **given)
        assert all(np.array_equal(getattr(far, name)[mine], getattr(near, name)) for name in ("out", "top", "total"))
    np.testing.assert_allclose(*mass, rtol=1e-6, atol=1e-7)
    chunk = q[None].repeat(2, axis=0)
    both = [
        attend_heads_chunk(table, chunk, [[k] for k in keys], [[v] for v in values], scale=0.1, start=count - 2)
        for keys, values in ((near_keys, near_values), (far_keys, far_values))
    ]
    assert same(*both)


def test_segments_of_all_formats_give_one_softmax_over_everything(table: Kernels) -> None:
    """One after the other, cut differently on the two sides, empty ones between."""
    count, size, heads = 9 * 37, 64, 5
    q, k, v = rows(heads, size, 1, 0.05), rows(count, size, 2), rows(count, size, 3)
    kinds = [format_ for format_ in RowFormat if format_.stores(keys=True)]
    keys, values = [], []
    for index, format_ in enumerate(kinds):
        low, high = count * index // len(kinds), count * (index + 1) // len(kinds)
        keys += [stored(k[low:high], format_, keys=True), stored(k[:1], RowFormat.Q5_1, keys=True).rows(0, 0)]
    sides = [format_ for format_ in RowFormat if format_.stores(keys=False)][::-1]
    for index, (low, high) in enumerate(itertools.pairwise(count * i // len(sides) for i in range(len(sides) + 1))):
        values.append(stored(v[low:high], sides[index], keys=False))
    mass = np.zeros(count, np.float32)
    table.attend(q, keys, values, scale=0.125)
    with poisoned():
        done = table.attend(q, keys, values, scale=0.125, first=20, upto=count - 3, importance=mass)
    whole = [np.concatenate([numbers(block) for block in blocks if len(block)]) for blocks in (keys, values)]
    expected = softmax_attention(q.astype(np.float64), *whole, 0.125, 20, count - 3, 0.0, None)
    close(done, mass, expected, float(np.abs(whole[1]).max()), 2.0)


#: Sizes that whole vectors leave something of, where a format has them.
GUARDED = [*itertools.product(TYPES, (32, 96, 160)), *((RowFormat.FP8, size) for size in (1, 17, 33, 47, 160))]


@fast_only
@pytest.mark.parametrize("format_, size", GUARDED)
@pytest.mark.parametrize("heads", [1, 3])
def test_not_a_byte_beyond_a_row_is_touched(format_: RowFormat, size: int, heads: int) -> None:
    """Segments that end where memory ends, and segments that begin where it begins; most rows at odd addresses."""
    q, table = rows(5 * heads, size, 1, 0.1), kernels("fast")
    for count in (1, 7, 66):
        plain = [[[stored(rows(count, size, seed + head), format_, keys=seed == 2)] for head in range(heads)] for seed in (2, 9)]
        want = attend_heads(table, q, *plain, scale=0.1, threads=1)
        packed = [pack(plane, format_, size, keys=index == 0) for index, plane in enumerate(plain)]
        for at_end in (False, True):
            laid = [view(_guarded(part, at_end), format_, heads, size, keys=index == 0) for index, part in enumerate(packed)]
            guarded = [[[block] for block in plane] for plane in laid]
            assert same(want, attend_heads(table, q, *guarded, scale=0.1, threads=1))
            for (block,), (near,) in zip(guarded[0] + guarded[1], plain[0] + plain[1], strict=True):
                assert np.array_equal(table.decode(block), table.decode(near))


def _guarded(array: npt.NDArray[np.generic], at_end: bool) -> npt.NDArray[np.generic]:
    """A copy between two pages that cannot be touched, at the end or the beginning of what can."""
    page = mmap.PAGESIZE
    room = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (base, base + page + room):
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
            pytest.skip(f"no guard pages: errno {ctypes.get_errno()}")
    copied = np.ndarray(array.shape, array.dtype, memory, page + room - array.nbytes if at_end else page)
    copied[...] = array
    return copied


@pytest.mark.parametrize("format_", list(TYPES))
def test_queries_that_no_blocks_fit_are_refused(table: Kernels, format_: RowFormat) -> None:
    keys, values = stored(rows(4, 64, 2), format_, keys=True), stored(rows(4, 64, 3), format_, keys=False)
    for size in (32, 40, 96):
        with pytest.raises(KernelError, match=f"{size}|expected"):
            table.attend(rows(2, size, 1), [keys], [values], scale=1.0)
