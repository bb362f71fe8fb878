"""Attention of a chunk, tile by tile, against position after position and one float64 softmax."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.attention import chunk, reference
from warmkv.kernels.attention.reference import Attended
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import decode, encode, refield
from warmkv.kernels.testing import rows, softmax_attention

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]
FORMATS = ["f32", "f16", "bf16", "q8_2f", "field"]
SOFTENED = ["numpy", "compiled"]


@pytest.fixture(params=SOFTENED)
def attend(request: pytest.FixtureRequest) -> Callable[..., Attended]:
    if request.param == "numpy":
        return chunk.attend_chunk
    pytest.importorskip("numba")
    from warmkv.kernels.attention.soften import soften

    return lambda *given, **more: chunk.attend_chunk(*given, soften=soften, **more)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles and groups of queries without many rows."""
    monkeypatch.setattr(chunk, "TILE_ROWS", 13)
    monkeypatch.setattr(chunk, "QUERY_ROWS", 8)


def stored(x: F32, format_: str, *, keys: bool) -> Block:
    if format_ == "field":
        return refield(encode(x, RowFormat.Q8_2F, keys=keys))
    return encode(x, RowFormat(format_), keys=keys)


def cut(block: Block, places: list[int]) -> list[Block]:
    return [block.rows(low, high) for low, high in itertools.pairwise([0, *places, len(block)])]


def oracle(q: F32, keys: Block, values: Block, start: int, window: int, **given: object) -> tuple[F64, F64, F64]:
    """Outputs, logarithms of the denominators and summed probabilities, query after query."""
    k, v = decode(keys).astype(np.float64), decode(values).astype(np.float64)
    outs, sums, mass = [], [], np.zeros(len(keys))
    for i in range(len(q)):
        upto = start + i + 1
        first = max(0, upto - window) if window else 0
        out, lse, p = softmax_attention(q[i].astype(np.float64), k, v, first=first, upto=upto, **given)  # type: ignore[arg-type]
        outs.append(out)
        sums.append(lse)
        mass += p.sum(axis=0)
    return np.stack(outs), np.stack(sums), mass


def check(done: Attended, mass: F32, expected: tuple[F64, F64, F64], values: Block, heads: int) -> None:
    out, lse, p = expected
    logits = max(1.0, float(np.abs(lse).max()))
    np.testing.assert_allclose(done.out, out, rtol=0, atol=2e-6 * max(1.0, float(np.abs(decode(values)).max())) * logits)
    np.testing.assert_allclose(done.lse, lse, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(mass, p, rtol=4e-6 * logits, atol=2e-6 * logits * heads)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 32, 80, 128, 192])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 27), (62, 1), (63, 3)])
@pytest.mark.parametrize("heads", [1, 7])
def test_every_format_and_size_is_one_softmax(
    attend: Callable[..., Attended], format_: str, size: int, start: int, count: int, heads: int
) -> None:
    q = rows(count * heads, size, 1, 0.3).reshape(count, heads, size)
    keys = stored(rows(start + count, size, 2), format_, keys=True)
    values = stored(rows(start + count, size, 3), format_, keys=False)
    mass = np.zeros(start + count, np.float32)
    done = attend(q, [keys], [values], scale=size**-0.5, start=start, importance=mass)
    expected = oracle(q, keys, values, start, 0, scale=size**-0.5, softcap=0.0, sinks=None)
    check(done, mass, expected, values, heads)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [0, 1, 12, 13, 14, 40])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("sinks", [None, [0.7, -np.inf, 30.0]])
@pytest.mark.parametrize("start", [0, 5, 45])
def test_windows_caps_and_sinks(
    attend: Callable[..., Attended], window: int, softcap: float, sinks: list[float] | None, start: int
) -> None:
    count, heads, size = 30, 3, 24
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    keys = stored(rows(start + count, size, 2), "f32", keys=True)
    values = stored(rows(start + count, 20, 3), "field", keys=False)
    given = {"scale": 0.2, "softcap": softcap, "sinks": None if sinks is None else np.array(sinks, np.float32)}
    mass = np.full(start + count + 2, np.float32(0.25))
    done = attend(q, [keys], [values], start=start, window=window, importance=mass, **given)
    assert np.all(mass[start + count :] == 0.25)
    check(done, mass[: start + count] - np.float32(0.25), oracle(q, keys, values, start, window, **given), values, heads)
    plain = attend(q, [keys], [values], start=start, window=window, **given)
    assert np.array_equal(plain.out, done.out) and np.array_equal(plain.lse, done.lse)


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("window", [0, 77])
def test_a_chunk_is_its_positions_one_after_the_other(attend: Callable[..., Attended], format_: str, window: int) -> None:
    start, count, heads, size = 700, 40, 3, 32
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    keys = stored(rows(start + count, size, 2), format_, keys=True)
    values = stored(rows(start + count, size, 3), format_, keys=False)
    given = {"scale": 0.2, "start": start, "window": window, "sinks": np.array([0.5, 3.0, -2.0], np.float32)}
    ours, theirs = np.zeros(740, np.float32), np.zeros(740, np.float32)
    done = attend(q, cut(keys, [1, 600, 600]), cut(values, [64]), importance=ours, **given)
    one = reference.attend_chunk(q, [keys], [values], importance=theirs, **given)
    logits = max(1.0, float(np.abs(one.top).max()))
    top = float(np.abs(decode(values)).max())
    np.testing.assert_allclose(done.out, one.out, rtol=2e-6, atol=2e-7 * top * logits)
    np.testing.assert_allclose(done.lse, one.lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6 * logits, atol=2e-6 * logits)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [0, 9, 30])
def test_rows_that_a_query_does_not_see_do_not_touch_it(attend: Callable[..., Attended], poison: float, window: int) -> None:
    start, count, heads, size = 33, 21, 2, 16
    end = start + count
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    k, v = rows(end, size, 2), rows(end, size, 3)
    given = {"scale": 0.2, "start": start, "window": window}
    for at in range(20, end, 3):
        clean = {"importance": np.zeros(end, np.float32)}
        whole = attend(q, [stored(k, "f32", keys=True)], [stored(v, "f32", keys=False)], **clean, **given)
        marked_k, marked_v = k.copy(), v.copy()
        marked_k[at], marked_v[at] = poison, poison
        mass = np.zeros(end, np.float32)
        marked = attend(q, [stored(marked_k, "f32", keys=True)], [stored(marked_v, "f32", keys=False)], importance=mass, **given)
        sees = [at <= start + i and (not window or at > start + i - window) for i in range(count)]
        blind = ~np.array(sees)
        assert np.array_equal(marked.out[blind], whole.out[blind]) and np.array_equal(marked.lse[blind], whole.lse[blind])
        seen_rows = np.zeros(end, bool)
        for i in np.flatnonzero(sees):
            seen_rows[max(0, start + i + 1 - window) if window else 0 : start + i + 1] = True
        untouched = ~seen_rows
        assert np.allclose(mass[untouched], clean["importance"][untouched], rtol=1e-5, atol=1e-7)
        if not np.isneginf(poison):
            assert not np.isfinite(marked.out[sees]).any() or poison == np.inf


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_dropped_in_front_of_the_window_change_no_bit(attend: Callable[..., Attended], format_: str) -> None:
    start, count, heads, size, window = 650, 33, 3, 32, 70
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    keys = stored(rows(start + count, size, 2), format_, keys=True)
    values = stored(rows(start + count, size, 3), format_, keys=False)
    whole = attend(q, [keys], [values], scale=0.2, start=start, window=window)
    for gone in (1, 580, start + 1 - window):
        left, right = keys.rows(gone, len(keys)), values.rows(gone, len(values))
        trimmed = attend(q, [left], [right], scale=0.2, start=start - gone, window=window)
        assert np.array_equal(whole.out, trimmed.out) and np.array_equal(whole.lse, trimmed.lse)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("parts", [1, 2, 64])
def test_segments_give_the_answer_of_one(attend: Callable[..., Attended], offset: float, parts: int) -> None:
    count, heads, size, end = 16, 2, 8, 640
    k, v = rows(end, size, 2, 0.1), rows(end, size, 3)
    k[:, -1] = np.float32(offset)
    q = rows(count * heads, size, 4, 0.2).reshape(count, heads, size)
    q[..., -1] = 1
    keys, values = stored(k, "f32", keys=True), stored(v, "f32", keys=False)
    places = [end * i // parts for i in range(1, parts)]
    whole = attend(q, [keys], [values], scale=1.0, start=end - count)
    cut_up = attend(q, cut(keys, places), cut(values, places), scale=1.0, start=end - count)
    np.testing.assert_allclose(cut_up.out, whole.out, rtol=2e-6, atol=2e-6 * np.abs(v).max())
    expected = oracle(q, keys, values, end - count, 0, scale=1.0, softcap=0.0, sinks=None)[0]
    # A logit near 1e4 is known to 5e-4 in float32, whoever computes it.
    np.testing.assert_allclose(whole.out, expected, rtol=0, atol=5e-5 if offset == 0 else 2e-2)


def test_rows_of_a_token_major_segment_are_read_where_they_lie(attend: Callable[..., Attended]) -> None:
    far = rows(90, 3 * 16, 5).reshape(90, 3, 16)
    q = rows(8 * 2, 16, 4, 0.2).reshape(8, 2, 16)
    apart = attend(q, [Block(RowFormat.F32, far[:, 1])], [Block(RowFormat.F32, far[:, 2])], scale=0.25, start=82)
    keys, values = (Block(RowFormat.F32, far[:, i].copy()) for i in (1, 2))
    expected = oracle(q, keys, values, 82, 0, scale=0.25, softcap=0.0, sinks=None)[0]
    np.testing.assert_allclose(apart.out, expected, rtol=0, atol=1e-4)


def test_memory_is_bounded_by_tiles_and_not_by_rows(attend: Callable[..., Attended]) -> None:
    count, heads, size, end = 64, 4, 8, 12_000
    q, k = np.ones((count, heads, size), np.float32), [Block(RowFormat.F32, np.zeros((end, size), np.float32))]
    mass = np.zeros(end, np.float32)
    attend(q[:8], k, k, scale=1.0, start=0)
    tracemalloc.start()
    try:
        attend(q, k, k, scale=1.0, start=end - count, importance=mass)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20 < 4 * count * heads * end
    assert mass.sum() == pytest.approx(count * heads, rel=1e-4)


def test_a_chunk_of_nothing_is_nothing(attend: Callable[..., Attended]) -> None:
    block = stored(rows(4, 8, 2), "f32", keys=True)
    done = attend(np.zeros((0, 3, 8), np.float32), [block], [block], scale=1.0, start=4)
    assert done.out.shape == (0, 3, 8) and done.lse.shape == (0, 3)


def test_what_does_not_fit_is_refused_and_importance_is_as_it_was(attend: Callable[..., Attended]) -> None:
    block, q, mass = stored(rows(4, 8, 2), "f32", keys=True), rows(4, 8, 1).reshape(2, 2, 8), np.zeros(4, np.float32)
    with pytest.raises(KernelError, match="from 3 on over 4 rows"):
        attend(q, [block], [block], scale=1.0, start=3, importance=mass)
    with pytest.raises(KernelError, match="float64"):
        attend(q.astype(np.float64), [block], [block], scale=1.0, start=2, importance=mass)
    with pytest.raises(KernelError, match=r"\(3,\) sink logits for 2 heads"):
        attend(q, [block], [block], scale=1.0, start=2, sinks=np.zeros(3, np.float32), importance=mass)
    with pytest.raises(KernelError, match="4 rows of keys, 3 of values"):
        attend(q, [block], [block.rows(0, 3)], scale=1.0, start=2, importance=mass)
    with pytest.raises(KernelError, match="importance"):
        attend(q, [block], [block], scale=1.0, start=2, importance=np.zeros(3, np.float32))
    assert not mass.any()
