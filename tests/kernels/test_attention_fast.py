"""The compiled twin against float64, against the reference, and against itself bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("numba")

from warmkv.kernels.attention import fast, reference
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import decode, encode, refield
from warmkv.kernels.testing import rows, softmax_attention

F32 = npt.NDArray[np.float32]
FORMATS = ["f32", "f16", "bf16", "q8_2f", "field"]
SIZES = [1, 7, 32, 80, 128, 192]


def stored(x: F32, format_: str, *, keys: bool) -> Block:
    if format_ == "field":
        return refield(encode(x, RowFormat.Q8_2F, keys=keys))
    return encode(x, RowFormat(format_), keys=keys)


def cut(block: Block, places: Sequence[int]) -> list[Block]:
    return [block.rows(low, high) for low, high in itertools.pairwise([0, *places, len(block)])]


def exact(
    q: F32, keys: Sequence[Block], values: Sequence[Block], *, scale: float, first: int = 0, upto: int | None = None,
    softcap: float = 0.0, sinks: F32 | None = None,
) -> tuple[npt.NDArray[np.float64], ...]:  # fmt: skip
    """One float64 softmax over what the blocks decode to."""
    k, v = (np.concatenate([decode(block) for block in blocks]).astype(np.float64) for blocks in (keys, values))
    last = len(k) if upto is None else upto
    return softmax_attention(q.astype(np.float64), k, v, scale, first, last, softcap, None if sinks is None else sinks.tolist())


def same(a: reference.Attended, b: reference.Attended) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name), equal_nan=True) for name in ("out", "top", "total"))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 63, 64, 65, 66])
@pytest.mark.parametrize("heads", [1, 7])
def test_one_softmax_over_all_rows(format_: str, size: int, count: int, heads: int) -> None:
    q = rows(heads, size, seed=1, spread=0.3)
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)
    importance = np.zeros(count, np.float32)
    done = fast.attend(q, [keys], [values], scale=size**-0.5, importance=importance)
    out, lse, p = exact(q, [keys], [values], scale=size**-0.5)
    known = 2e-6 * max(1.0, np.abs(lse).max())  # what float32 knows of logits this large
    np.testing.assert_allclose(done.out, out, rtol=0, atol=known * np.abs(decode(values)).max())
    np.testing.assert_allclose(done.lse, lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(importance, p.sum(axis=0), rtol=0, atol=known * heads)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("window", [1, 39, 40, 41, 100])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_caps_and_sinks(format_: str, window: int, softcap: float, with_sinks: bool) -> None:
    count, size, heads = 70, 48, 5
    q = rows(heads, size, seed=1, spread=0.2)
    sinks = np.array([0.7, -3.0, 60.0, -np.inf, 5.0], np.float32) if with_sinks else None
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, 40, 3), format_, keys=False)
    for upto in (1, 2, 40, 69, 70):
        first, importance = max(0, upto - window), np.full(count, np.float32(0.25))
        given = {"scale": 0.1, "first": first, "upto": upto, "softcap": softcap, "sinks": sinks}
        done = fast.attend(q, [keys], [values], importance=importance, **given)
        out, lse, p = exact(q, [keys], [values], **given)
        np.testing.assert_allclose(done.out, out, rtol=0, atol=1e-4)
        np.testing.assert_allclose(done.lse, lse, rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(importance - 0.25, p.sum(axis=0), rtol=0, atol=1e-5)
        assert np.all(importance[:first] == 0.25) and np.all(importance[upto:] == 0.25)


@pytest.mark.parametrize("sinks", [None, np.array([1.5, -2.0], np.float32)])
@pytest.mark.parametrize("cut_at", [0, 3, 9])
def test_where_nothing_is_seen_only_sinks_count(sinks: F32 | None, cut_at: int) -> None:
    q, keys = rows(2, 8, 1), stored(rows(9, 8, 2), "f16", keys=True)
    importance = np.zeros(9, np.float32)
    done = fast.attend(q, [keys], [keys], scale=1.0, first=cut_at, upto=cut_at, sinks=sinks, importance=importance)
    assert not done.out.any() and not importance.any()
    assert same(done, reference.attend(q, [keys], [keys], scale=1.0, first=cut_at, upto=cut_at, sinks=sinks))
    nothing = fast.attend(q, [], [], scale=1.0, sinks=sinks)
    assert same(nothing, reference.attend(q, [], [], scale=1.0, sinks=sinks))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("size", [7, 80, 128])
@pytest.mark.parametrize("heads", [2, 4, 5, 8])
def test_a_head_alone_gives_the_bits_it_gives_in_its_group(format_: str, size: int, heads: int) -> None:
    q = rows(heads, size, seed=9, spread=0.2)
    keys, values = stored(rows(131, size, 2), format_, keys=True), stored(rows(131, size, 3), format_, keys=False)
    given = {"scale": size**-0.5, "first": 2, "softcap": 30.0}
    masses = np.zeros((2, 131), np.float32)
    together = fast.attend(q, [keys], [values], importance=masses[0], **given)
    for head in range(heads):
        alone = fast.attend(q[head : head + 1], [keys], [values], importance=masses[1], **given)
        assert np.array_equal(alone.out[0], together.out[head])
        assert alone.top[0] == together.top[head] and alone.total[0] == together.total[head]
    assert np.array_equal(*masses)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("window", [1, 13, 64, 65, 150])
def test_rows_that_are_not_seen_do_not_count_whether_they_are_there_or_not(format_: str, window: int) -> None:
    count, size = 203, 72
    q = rows(5, size, seed=9, spread=0.2)
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)
    first, masses = count - 3 - window, np.zeros((3, count), np.float32)
    whole = fast.attend(q, [keys], [values], scale=0.2, first=first, upto=count - 3, importance=masses[0])
    for gone, mass in ((1, masses[1]), (first, masses[2])):
        left = keys.rows(gone, count), values.rows(gone, count)
        moved = replace(left[0], codes=left[0].codes.copy()), left[1]
        trimmed = fast.attend(q, [moved[0]], [moved[1]], scale=0.2, first=first - gone, upto=count - 3 - gone, importance=mass)
        assert same(whole, trimmed) and np.array_equal(mass[: count - gone], masses[0, gone:])


@pytest.mark.parametrize("format_", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("first", [0, 5])
def test_rows_out_of_sight_may_be_anything(format_: str, first: int) -> None:
    k, v = rows(70, 20, 2), rows(70, 20, 3)
    q, blocks = rows(5, 20, 1, 0.2), []
    for rubbish in (0.0, np.nan, np.inf):
        for plane in (k, v):
            plane[:first], plane[66:] = rubbish, -rubbish
        blocks.append((stored(k, format_, keys=True), stored(v, format_, keys=False)))
    done = [fast.attend(q, [a], [b], scale=0.2, first=first, upto=66) for a, b in blocks]
    assert np.isfinite(done[0].out).all()
    assert same(done[0], done[1]) and same(done[0], done[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("plane", ["keys", "values"])
@pytest.mark.parametrize("row", [0, 17, 69])
@pytest.mark.filterwarnings("error")  # a logit that is no number is an answer, not a mishap
def test_numbers_that_are_not_finite_poison_what_they_poison_in_the_reference(bad: float, plane: str, row: int) -> None:
    q, k, v = rows(5, 20, 1, 0.2), rows(70, 20, 2), rows(70, 20, 3)
    (k if plane == "keys" else v)[row, 3] = bad
    keys, values = stored(k, "f32", keys=True), stored(v, "f32", keys=False)
    masses = np.zeros((2, 70), np.float32)
    ours = fast.attend(q, [keys], [values], scale=0.01, importance=masses[0])
    theirs = reference.attend(q, [keys], [values], scale=0.01, importance=masses[1])
    np.testing.assert_allclose(ours.out, theirs.out, rtol=1e-5, atol=1e-5)  # NaN and infinity must be where they are there
    np.testing.assert_allclose(ours.top, theirs.top, rtol=1e-6)
    np.testing.assert_allclose(ours.total, theirs.total, rtol=1e-5)
    np.testing.assert_allclose(*masses, atol=1e-6)


def on_a_grid(count: int, size: int, seed: int) -> F32:
    """Multiples of 1/8 up to 2: their dot products have no rounding in float32."""
    return (np.random.default_rng(seed).integers(-16, 17, (count, size)) / 8).astype(np.float32)


@pytest.mark.parametrize("parts", [1, 2, 7, 64])
@pytest.mark.parametrize("offsets", [(0.0,), (1e4,), (-1e4,), (1e4, -1e4, 0.0), (1e4, 9998.0)])
def test_segments_of_any_format_give_one_softmax_over_everything(parts: int, offsets: tuple[float, ...]) -> None:
    """Each part's logits are moved by a constant, through one more channel; logits are exact, so is the
    oracle. Parts have f32, f16 and bf16 rows in turn, and empty ones lie between."""
    count, size, heads = 384, 17, 5
    q = np.pad(on_a_grid(heads, size, 1), ((0, 0), (0, 1)), constant_values=1)
    k, v = np.pad(on_a_grid(count, size, 2), ((0, 0), (0, 1))), rows(count, 40, 3)
    bounds = [count * i // parts for i in range(parts + 1)]
    keys, values = [], []
    for index, (low, high) in enumerate(itertools.pairwise(bounds)):
        k[low:high, -1] = offsets[index % len(offsets)]
        format_ = ["f32", "f16", "bf16"][index % 3]
        keys += [stored(k[low:high], format_, keys=True), stored(k[:0], "q8_2f", keys=True)]
        values += [stored(v[:0], "f16", keys=False), stored(v[low:high], ["field", "f32"][index % 2], keys=False)]
    masses = np.zeros(count, np.float32)
    done = fast.attend(q, keys, values, scale=0.25, importance=masses)
    out, lse, p = exact(q, keys, values, scale=0.25)
    np.testing.assert_allclose(done.out, out, rtol=0, atol=2e-6 * np.abs(out).max())
    np.testing.assert_allclose(done.lse, lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(masses, p.sum(axis=0), rtol=0, atol=2e-6 * heads)
    apart = [fast.attend(q, keys[i : i + 2], values[i : i + 2], scale=0.25) for i in range(0, len(keys), 2)]
    merged = reference.merge(apart)
    np.testing.assert_allclose(merged.out, out, rtol=0, atol=2e-6 * np.abs(out).max())
    np.testing.assert_allclose(merged.lse, lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("format_", FORMATS)
def test_cut_anywhere_is_as_good_as_whole(format_: str) -> None:
    q = rows(5, 96, seed=9, spread=0.05)
    keys, values = stored(rows(400, 96, 2), format_, keys=True), stored(rows(400, 96, 3), format_, keys=False)
    whole = fast.attend(q, [keys], [values], scale=0.1, first=5, upto=390)
    for places in ([0], [400], [1, 2, 3], [5, 390], list(range(0, 400, 7))):
        parts = fast.attend(q, cut(keys, places), cut(values, places[:1]), scale=0.1, first=5, upto=390)
        np.testing.assert_allclose(parts.out, whole.out, rtol=0, atol=2e-6 * np.abs(whole.out).max())
        assert np.array_equal(parts.top, whole.top) and np.array_equal(parts.total, whole.total)


def test_segments_with_fields_of_their_own() -> None:
    """Early rows with an open field, a segment with one, another with another, and an f16 tail."""
    kinds = ["q8_2f", "field", "field", "f16"]
    planes = [
        (stored(rows(33, 64, seed, 1 + seed), kind, keys=True), stored(rows(33, 64, 10 + seed, 1 + seed), kind, keys=False))
        for seed, kind in enumerate(kinds)
    ]
    keys, values = [plane[0] for plane in planes], [plane[1] for plane in planes]
    q = rows(3, 64, 1, 0.01)
    done = fast.attend(q, keys, values, scale=0.125, first=20, upto=120)
    out, lse, _ = exact(q, keys, values, scale=0.125, first=20, upto=120)
    np.testing.assert_allclose(done.out, out, rtol=0, atol=3e-6 * np.abs(out).max())
    np.testing.assert_allclose(done.lse, lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("groups", ["one", "many"])
@pytest.mark.parametrize("size", [33, 64, 100])
def test_either_plane_may_have_one_scale_a_row_or_one_a_group(groups: str, size: int) -> None:
    many = groups == "many"
    keys, values = stored(rows(90, size, 2), "field", keys=many), stored(rows(90, size, 3), "field", keys=many)
    q = rows(5, size, 1, 0.05)
    done = fast.attend(q, [keys], [values], scale=0.1)
    out, lse, _ = exact(q, [keys], [values], scale=0.1)
    np.testing.assert_allclose(done.out, out, rtol=0, atol=4e-6 * np.abs(out).max())
    np.testing.assert_allclose(done.lse, lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("skew", [0, 1, 3])
def test_rows_of_a_segment_are_read_where_they_lie(format_: str, skew: int) -> None:
    """Token-major rows of three heads, each with its scales before its codes, from any byte on."""
    size, count, heads = 40, 70, 3
    plain = [stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)]
    laid = []
    for block in plain:
        groups = 0 if block.scales is None else block.scales.shape[1]
        row_bytes = 4 * groups + block.codes.itemsize * size
        memory = np.full(skew + count * heads * row_bytes, 0xFF, np.uint8)
        start, apart = skew + row_bytes, heads * row_bytes
        codes = np.ndarray((count, size), block.codes.dtype, memory, start + 4 * groups, (apart, block.codes.itemsize))
        codes[:] = block.codes
        scales = None
        if block.scales is not None:
            scales = np.ndarray((count, groups), np.float32, memory, start, (apart, 4))
            scales[:] = block.scales
        memory.flags.writeable = False
        laid.append(replace(block, codes=codes, scales=scales))
    q = rows(6, size, 1, 0.2)
    ours = fast.attend(q, [laid[0]], [laid[1]], scale=0.1, first=1)
    assert same(ours, fast.attend(q, [plain[0]], [plain[1]], scale=0.1, first=1))


def test_rows_backwards_all_alike_and_scales_apart_are_read_as_numpy_reads_them() -> None:
    keys, values = stored(rows(70, 64, 2), "q8_2f", keys=True), stored(rows(70, 64, 3), "q8_2f", keys=False)
    assert keys.scales is not None
    wide = np.zeros((70, 4), np.float32)
    wide[:, ::2] = keys.scales
    views = [
        replace(keys, scales=wide[:, ::2]),
        Block(keys.format, keys.codes[::-1], keys.scales[::-1]),
        Block(keys.format, np.broadcast_to(keys.codes[:1], (70, 64)), np.broadcast_to(keys.scales[:1], (70, 2))),
    ]
    q = rows(5, 64, 1, 0.02)
    for view in views:
        solid = replace(view, codes=view.codes.copy(), scales=None if view.scales is None else view.scales.copy())
        assert same(fast.attend(q, [view], [values], scale=0.1), fast.attend(q, [solid], [values], scale=0.1))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 33, 80, 100])
def test_not_a_byte_beyond_a_row_is_touched(format_: str, size: int) -> None:
    """Planes that end where memory ends, and planes that begin where it begins."""
    count, heads = 70, 5
    plain = [stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)]
    q, mass = rows(heads, size, 1, 0.1), np.zeros(count, np.float32)
    want = fast.attend(q, plain[:1], plain[1:], scale=0.1, importance=mass)
    for at_end in (False, True):
        guarded = [
            replace(
                block, codes=_guarded(block.codes, at_end),
                scales=None if block.scales is None else _guarded(block.scales, at_end),
                field=None if block.field is None else _guarded(block.field, at_end),
            )
            for block in plain
        ]  # fmt: skip
        importance = _guarded(np.zeros(count, np.float32), at_end)
        assert same(want, fast.attend(q, guarded[:1], guarded[1:], scale=0.1, importance=importance))
        assert np.array_equal(importance, mass)


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
    start = page + room - array.nbytes if at_end else page
    copied = np.ndarray(array.shape, array.dtype, memory, start)
    copied[...] = array
    return copied


def test_exponentials_are_good_to_the_last_bits_down_to_the_smallest_numbers() -> None:
    x = np.concatenate([np.linspace(-87, 0, 1000), np.linspace(-120, -87, 200)]).astype(np.float32)
    keys, values = Block(RowFormat.F32, np.array([[1], [0]], np.float32)), Block(RowFormat.F32, np.array([[1], [0]], np.float32))
    done = fast.attend(x[:, None], [keys], [values], scale=1.0)
    e = np.exp(x.astype(np.float64))
    np.testing.assert_allclose(done.out[:, 0], e / (1 + e), rtol=2.5e-7, atol=3e-45)
    np.testing.assert_allclose(done.total, 1 + e, rtol=1.5e-7)


@pytest.mark.parametrize("softcap", [1.0, 30.0, 50.0])
def test_soft_caps_are_good_to_the_last_bits(softcap: float) -> None:
    spread = np.geomspace(1e-6, 1e3, 1000).astype(np.float32)
    x = np.concatenate([-spread, [0.0], spread]).astype(np.float32)
    one = Block(RowFormat.F32, np.ones((1, 1), np.float32))
    done = fast.attend(x[:, None], [one], [one], scale=1.0, softcap=softcap)
    np.testing.assert_allclose(done.top, softcap * np.tanh(x.astype(np.float64) / softcap), rtol=5e-7)


def test_long_rows_of_weights_keep_their_precision() -> None:
    """As many rows as float32 sums would lose digits over."""
    count, size = 40_000, 16
    keys, values = (
        encode(rows(count, size, 2), RowFormat.F16, keys=True),
        encode(rows(count, size, 3) + 5, RowFormat.F16, keys=False),
    )
    q = rows(2, size, 1, 0.01)
    done = fast.attend(q, [keys], [values], scale=0.1)
    out, lse, _ = exact(q, [keys], [values], scale=0.1)
    np.testing.assert_allclose(done.out, out, rtol=2e-6)
    np.testing.assert_allclose(done.lse, lse, rtol=2e-7)


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    q = rows(2, 8, 1)
    keys = stored(rows(4, 8, 2), "f32", keys=True)
    with pytest.raises(KernelError, match="float64"):
        fast.attend(q.astype(np.float64), [keys], [keys], scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="4 rows of keys, 3 of values"):
        fast.attend(q, [keys], [keys.rows(0, 3)], scale=1.0)
    with pytest.raises(KernelError, match="importance"):
        fast.attend(q, [keys], [keys], scale=1.0, importance=np.zeros(3, np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 128), (2, 3, 20)])
@pytest.mark.parametrize("parts", [1, 2, 9])
def test_parts_merge_to_the_bits_of_the_reference(shape: tuple[int, ...], parts: int) -> None:
    rng = np.random.default_rng(1)
    apart = [
        reference.Attended(
            rng.standard_normal(shape).astype(np.float32), rng.normal(0, 20, shape[:-1]).astype(np.float32),
            rng.uniform(1, 9, shape[:-1]).astype(np.float32),
        )
        for _ in range(parts)
    ]  # fmt: skip
    apart[0].out[0], apart[0].top[0], apart[0].total[0] = 0, -np.inf, 0  # saw nothing
    assert same(fast.merge(apart), reference.merge(apart))
    with pytest.raises(KernelError, match="cannot be merged"):
        fast.merge([])
