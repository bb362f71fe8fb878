"""Attention against one float64 softmax over everything, at odd sizes, windows, sinks and cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.attention import reference
from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import decode, encode, refield
from warmkv.kernels.testing import rows, softmax_attention

F32 = npt.NDArray[np.float32]
FORMATS = ["f32", "f16", "bf16", "q8_2f", "field"]


def stored(x: F32, format_: str, *, keys: bool) -> Block:
    if format_ == "field":
        return refield(encode(x, RowFormat.Q8_2F, keys=keys))
    return encode(x, RowFormat(format_), keys=keys)


def cut(block: Block, places: Sequence[int]) -> list[Block]:
    bounds = [0, *places, len(block)]
    return [block.rows(low, high) for low, high in itertools.pairwise(bounds)]


def oracle(
    q: F32, keys: Sequence[Block], values: Sequence[Block], **given: object
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    k, v = (np.concatenate([decode(block) for block in blocks]).astype(np.float64) for blocks in (keys, values))
    given.setdefault("upto", k.shape[0])
    return softmax_attention(q.astype(np.float64), k, v, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("size", [1, 7, 32, 80, 128, 192])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 66])
@pytest.mark.parametrize("heads", [1, 7])
def test_one_softmax_over_all_rows(format_: str, size: int, count: int, heads: int) -> None:
    q = rows(heads, size, seed=1, spread=0.3)
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, size, 3), format_, keys=False)
    importance = np.zeros(count, np.float32)
    done = reference.attend(q, [keys], [values], scale=size**-0.5, importance=importance)
    out, lse, p = oracle(q, [keys], [values], scale=size**-0.5, first=0, softcap=0.0, sinks=None)
    bound = 2e-6 * max(1.0, np.abs(decode(values)).max()) * max(1.0, np.abs(lse).max())
    np.testing.assert_allclose(done.out, out, rtol=0, atol=bound)
    np.testing.assert_allclose(done.lse, lse, rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(importance, p.sum(axis=0), rtol=0, atol=2e-6 * heads * max(1.0, np.abs(lse).max()))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("window", [1, 39, 40, 41, 100])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_caps_and_sinks(format_: str, window: int, softcap: float, with_sinks: bool) -> None:
    count, size, heads = 70, 48, 3
    q = rows(heads, size, seed=1, spread=0.2)
    sinks = np.array([0.7, -3.0, 60.0], np.float32) if with_sinks else None
    keys, values = stored(rows(count, size, 2), format_, keys=True), stored(rows(count, 40, 3), format_, keys=False)
    for upto in (1, 2, 40, 69, 70):
        first = max(0, upto - window)
        importance = np.full(count, np.float32(0.25))
        given = {"scale": 0.1, "first": first, "upto": upto, "softcap": softcap, "sinks": sinks}
        done = reference.attend(q, [keys], [values], importance=importance, **given)
        out, lse, p = oracle(q, [keys], [values], **given)
        np.testing.assert_allclose(done.out, out, rtol=0, atol=2e-4)
        np.testing.assert_allclose(done.lse, lse, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(importance - 0.25, p.sum(axis=0), rtol=0, atol=2e-5)
        assert np.all(importance[:first] == 0.25) and np.all(importance[upto:] == 0.25)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_head_alone_gives_the_bits_it_gives_in_its_group(format_: str) -> None:
    q = rows(5, 64, seed=9, spread=0.2)
    keys, values = stored(rows(70, 64, 2), format_, keys=True), stored(rows(70, 64, 3), format_, keys=False)
    together = reference.attend(q, [keys], [values], scale=0.125)
    for head in range(5):
        alone = reference.attend(q[head : head + 1], [keys], [values], scale=0.125)
        assert np.array_equal(alone.out[0], together.out[head]) and alone.lse[0] == together.lse[head]


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("window", [1, 13, 40])
def test_rows_that_are_not_seen_do_not_count_whether_they_are_there_or_not(format_: str, window: int) -> None:
    q = rows(2, 32, seed=9, spread=0.2)
    keys, values = stored(rows(70, 32, 2), format_, keys=True), stored(rows(70, 32, 3), format_, keys=False)
    whole = reference.attend(q, [keys], [values], scale=0.2, first=70 - window)
    for gone in (1, 70 - window):
        trimmed = reference.attend(q, [keys.rows(gone, 70)], [values.rows(gone, 70)], scale=0.2, first=70 - window - gone)
        assert np.array_equal(whole.out, trimmed.out) and np.array_equal(whole.lse, trimmed.lse)


@pytest.mark.parametrize("format_", FORMATS)
def test_blocks_cut_anywhere_give_the_answer_of_one(format_: str) -> None:
    q = rows(2, 32, seed=9, spread=0.2)
    keys, values = stored(rows(70, 32, 2), format_, keys=True), stored(rows(70, 32, 3), format_, keys=False)
    whole = reference.attend(q, [keys], [values], scale=0.2, first=5, upto=66)
    for places in ([0], [70], [1, 2, 3], [5, 66], list(range(0, 70, 3))):
        parts = reference.attend(q, cut(keys, places), cut(values, places[:1]), scale=0.2, first=5, upto=66)
        np.testing.assert_allclose(parts.out, whole.out, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("parts", [1, 2, 64])
def test_parts_attended_apart_merge_into_the_whole(offset: float, parts: int) -> None:
    """Logits moved by a constant, through one more channel in which all keys agree."""
    q, k, v = rows(3, 17, 1, 0.2), rows(192, 17, 2), rows(192, 9, 3)
    q, k = np.pad(q, ((0, 0), (0, 1)), constant_values=1), np.pad(k, ((0, 0), (0, 1)), constant_values=offset)
    keys, values = encode(k, RowFormat.F32, keys=True), encode(v, RowFormat.F32, keys=False)
    bounds = [192 * i // parts for i in range(parts)][1:]
    apart = [
        reference.attend(q, [a], [b], scale=1.0) for a, b in zip(cut(keys, bounds), cut(values, bounds), strict=True)
    ]  # fmt: skip
    nothing = reference.attend(q, [keys.rows(0, 0)], [values.rows(0, 0)], scale=1.0)
    merged = reference.merge([nothing, *apart, nothing])
    out, lse, _ = oracle(q, [keys], [values], scale=1.0, first=0, softcap=0.0, sinks=None)
    # A logit near 1e4 is known to 5e-4 in float32, whoever computes it.
    np.testing.assert_allclose(merged.out, out, rtol=0, atol=2e-5 if offset == 0 else 2e-2)
    whole = reference.attend(q, [keys], [values], scale=1.0)
    np.testing.assert_allclose(merged.out, whole.out, rtol=2e-6, atol=2e-6 * np.abs(v).max())
    np.testing.assert_allclose(merged.lse, whole.lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(whole.lse, lse, rtol=1e-6, atol=1e-5)


def test_nothing_seen_merges_to_nothing() -> None:
    keys = encode(rows(4, 8, 1), RowFormat.F32, keys=True)
    nothing = reference.attend(rows(2, 8, 1), [keys], [keys], scale=1.0, first=2, upto=2)
    merged = reference.merge([nothing, nothing])
    assert not merged.out.any() and np.isneginf(merged.lse).all() and np.isneginf(nothing.lse).all()


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("start", [0, 1, 30])
def test_a_chunk_is_its_positions_one_after_the_other(window: int, start: int) -> None:
    chunk, heads, size = 9, 2, 24
    count = start + chunk
    q = rows(chunk * heads, size, 4, 0.2).reshape(chunk, heads, size)
    keys, values = stored(rows(count, size, 2), "f32", keys=True), stored(rows(count, size, 3), "f32", keys=False)
    importance = np.zeros(count, np.float32)
    done = reference.attend_chunk(q, [keys], [values], scale=0.2, start=start, window=window, importance=importance)
    mass = np.zeros(count)
    for i in range(chunk):
        first = max(0, start + i + 1 - window) if window else 0
        out, lse, p = oracle(q[i], [keys], [values], scale=0.2, first=first, upto=start + i + 1, softcap=0.0, sinks=None)
        np.testing.assert_allclose(done.out[i], out, rtol=0, atol=2e-4)
        np.testing.assert_allclose(done.lse[i], lse, rtol=1e-5, atol=1e-5)
        mass += p.sum(axis=0)
    np.testing.assert_allclose(importance, mass, rtol=0, atol=1e-4)


def test_what_does_not_fit_is_refused_with_what_was_found() -> None:
    q = rows(2, 8, 1)
    keys, values = stored(rows(4, 8, 2), "f32", keys=True), stored(rows(4, 8, 3), "f32", keys=False)
    attend = reference.attend
    with pytest.raises(KernelError, match="float64"):
        attend(q.astype(np.float64), [keys], [values], scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="4 rows of keys, 3 of values"):
        attend(q, [keys], [values.rows(0, 3)], scale=1.0)
    with pytest.raises(KernelError, match=r"expected \(rows, 9\)"):
        attend(rows(2, 9, 1), [keys], [values], scale=1.0)
    with pytest.raises(KernelError, match=r"\(3,\) sink logits for 2 heads"):
        attend(q, [keys], [values], scale=1.0, sinks=np.zeros(3, np.float32))
    with pytest.raises(KernelError, match="importance"):
        attend(q, [keys], [values], scale=1.0, importance=np.zeros(3, np.float32))
    with pytest.raises(KernelError, match="needs scales"):
        attend(q, [Block(RowFormat.Q8_2F, np.zeros((4, 8), np.int8))], [values], scale=1.0)
    with pytest.raises(KernelError, match="apart"):
        attend(q, [Block(RowFormat.F32, np.zeros((4, 16), np.float32)[:, ::2])], [values], scale=1.0)
    with pytest.raises(KernelError, match="from 3 on over 4 rows"):
        reference.attend_chunk(q[None].repeat(2, axis=0), [keys], [values], scale=1.0, start=3)
