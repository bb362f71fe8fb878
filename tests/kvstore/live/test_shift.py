"""Context shift against keys that were turned for their new places at once, in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pytest
from dumps import dump_all
from naive_cache import start_on_prefix

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.rope.reference import Pairs, Rope, llama3_factors
from warmkv.kvstore.live import shift as shifting
from warmkv.kvstore.live.compression import Compression
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan
from warmkv.kvstore.live.shift import Ropes, shift
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError, UnsupportedError, WarmKVError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
SIZE, VALUE_SIZE, HEADS = 16, 12, 2
FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=HEADS, key_size=SIZE, value_size=VALUE_SIZE)
HALF = replace(FULL, key_format=RowFormat.F16, value_format=RowFormat.F16)
CONV = LayerPlan(LayerKind.CONV, conv=ConvPlan(5))
ROPE = Rope(SIZE, 10_000.0, Pairs.NEOX)
ROPES = [
    ROPE,
    replace(ROPE, pairs=Pairs.NORM),
    replace(ROPE, rotary=6),
    replace(ROPE, rotary=6, pairs=Pairs.NORM, factors=(1.0, 2.5, 8.0)),
    replace(ROPE, base=5e5, factors=llama3_factors(5e5, SIZE, factor=8.0, low=1.0, high=4.0, original=64)),
    replace(ROPE, rotary=0),
]


def turned(raw: F64, position: int, rope: Rope) -> F64:
    """A head (..., size) turned for ``position``: each pair is a complex number times e^(i angle)."""
    width = SIZE if rope.rotary is None else rope.rotary
    out = raw.astype(np.float64).copy()
    for pair in range(width // 2):
        one, other = (pair, pair + width // 2) if rope.pairs is Pairs.NEOX else (2 * pair, 2 * pair + 1)
        angle = position * rope.base ** (-2 * pair / width) / (1.0 if rope.factors is None else rope.factors[pair])
        moved = (raw[..., one] + 1j * raw[..., other]) * np.exp(1j * angle)
        out[..., one], out[..., other] = moved.real, moved.imag
    return out


@lru_cache(1000)
def raw_row(salt: int, token: int, size: int) -> F32:
    return np.random.default_rng((salt, token)).standard_normal((HEADS, size)).astype(np.float32)


@lru_cache(1000)
def conv_row(token: int, channels: int) -> F32:
    return np.random.default_rng(token).standard_normal((1, channels)).astype(np.float32)


def feed(cache: ModelCache, tokens: range | list[int], rope: Rope = ROPE) -> None:
    """``tokens`` at the next positions, keys turned for them."""
    for token in tokens:
        for layer in cache.own:
            if isinstance(layer, ConvLayer):
                layer.append(conv_row(token, layer.state.shape[1]))
                continue
            assert isinstance(layer, AttentionLayer)
            key = turned(raw_row(2 * layer.index, token, SIZE), layer.position, rope).astype(np.float32)
            layer.append(key[None], raw_row(2 * layer.index + 1, token, VALUE_SIZE)[None])


def decoded(layer: AttentionLayer) -> tuple[F32, F32]:
    """Keys and values (rows, heads, size) of a layer in f32 or f16."""
    planes = []
    for plane in (layer.keys, layer.values):
        heads = [np.concatenate([block.codes for block in plane.blocks(head)]) for head in range(plane.heads)]
        planes.append(np.stack(heads, axis=1).astype(np.float32))
    return planes[0], planes[1]


def cache_of(*layers: LayerPlan, **more: object) -> ModelCache:
    return ModelCache(ModelPlan(layers), backend="reference", **more)  # type: ignore[arg-type]


def attention(cache: ModelCache, index: int = 0) -> AttentionLayer:
    layer = cache.layers[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def test_half_precision_is_shifted_like_fresh() -> None:
    """The source's case: 12 tokens, 3 kept in front, 4 taken out, two heads of 16 channels, base 10000."""
    plan = replace(HALF, value_size=SIZE)
    cache = cache_of(plan, CONV)
    rows = np.array([[0.1 * head + 0.01 * channel for channel in range(SIZE)] for head in range(HEADS)])
    layer, conv = attention(cache), cache.layers[1]
    assert isinstance(conv, ConvLayer)
    for position in range(12):
        layer.append(turned(rows, position, ROPE).astype(np.float32)[None], rows.astype(np.float32)[None])
        conv.append(conv_row(position, 5))
    state = conv.state.copy()
    shift(cache, 3, 4, ROPE)
    assert cache.position == layer.rows == layer.position == 8 and cache.shift_offset == 4
    keys, values = decoded(layer)
    for position in range(8):
        assert np.abs(keys[position] - turned(rows, position, ROPE)).max() < 2e-3
        assert (values[position] == rows.astype(np.float16)).all()
    assert conv.state.tobytes() == state.tobytes() and conv.position == 8


@pytest.mark.parametrize("rope", ROPES, ids=["neox", "norm", "partial", "partial norm factors", "llama 3", "none turn"])
@pytest.mark.parametrize(("length", "keep", "count"), [(12, 3, 4), (7, 0, 6), (300, 1, 123), (9, 4, 5), (70, 64, 1)])
def test_float32_keys_are_those_of_their_new_positions(rope: Rope, length: int, keep: int, count: int) -> None:
    cache = cache_of(FULL, CONV, FULL)
    feed(cache, range(length), rope)
    first = decoded(attention(cache))[0][:keep].copy()
    shift(cache, keep, count, rope)
    left = [*range(keep), *range(keep + count, length)]
    for index in (0, 2):
        keys, values = decoded(attention(cache, index))
        assert len(keys) == len(left)
        for position, token in enumerate(left):
            raw = raw_row(2 * index, token, SIZE).astype(np.float64)
            bound = np.abs(raw).max() * np.sqrt(2) * (3e-7 + 1.2e-7 * length)
            assert np.abs(keys[position] - turned(raw, position, rope)).max() <= bound
            assert values[position].tobytes() == raw_row(2 * index + 1, token, VALUE_SIZE).tobytes()
    assert decoded(attention(cache))[0][:keep].tobytes() == first.tobytes()


def test_the_shifted_cache_attends_like_one_that_was_fed_so() -> None:
    cache, fresh = cache_of(FULL), cache_of(FULL)
    feed(cache, range(40))
    shift(cache, 4, 17, ROPE)
    feed(cache, [40, 41])
    feed(fresh, [*range(4), *range(21, 42)])
    q = np.random.default_rng(1).standard_normal((4, SIZE)).astype(np.float32)
    np.testing.assert_allclose(attention(cache).attend(q), attention(fresh).attend(q), rtol=0, atol=2e-6)


def test_drift_of_half_precision_is_that_of_its_roundings() -> None:
    """Relative RMS beside keys turned at once: 2.9e-4, 4.7e-4 and 8.6e-4 after 1, 4 and 16 shifts, the root of
    17 roundings of 2.1e-4. Shifts by few tokens hardly move slow pairs, so that they are rounded the same way
    each time: 16 shifts by 1 cost more."""
    assert drift(64) == pytest.approx({1: 2.9e-4, 4: 4.7e-4, 16: 8.6e-4}, rel=0.2)
    assert 1.5e-3 < drift(1)[16] < 2.3e-3


def drift(count: int) -> dict[int, float]:
    """The error after 1, 4 and 16 shifts by ``count``."""
    plan = replace(HALF, key_size=64, value_size=8, heads=HEADS)
    rope, cache = replace(ROPE, size=64), cache_of(plan)
    total = 16 * count + 300
    raw = np.random.default_rng(5).standard_normal((total, HEADS, 64))
    angles = np.arange(total)[:, None, None] * 10_000.0 ** (-np.arange(32) / 32)

    def at_once(rows: F64, by: F64) -> F64:
        moved = (rows[..., :32] + 1j * rows[..., 32:]) * np.exp(1j * by)
        return np.concatenate([moved.real, moved.imag], axis=-1)

    attention(cache).append(at_once(raw, angles).astype(np.float32), np.zeros((total, HEADS, 8), np.float32))
    found = {}
    for number in range(1, 17):
        shift(cache, 0, count, rope)
        if number in (1, 4, 16):
            gone = count * number
            exact = at_once(raw[gone:], angles[: total - gone])
            error = decoded(attention(cache))[0] - exact
            found[number] = float(np.sqrt((error**2).mean() / (exact**2).mean()))
    return found


def test_each_layer_may_turn_in_its_own_way_or_not_at_all() -> None:
    other = replace(ROPE, base=1e6)
    cache = cache_of(FULL, FULL, CONV, FULL)
    feed(cache, range(9))
    unturned = decoded(attention(cache, 3))[0]
    shift(cache, 2, 3, [ROPE, other, None, None])
    keys = decoded(attention(cache, 1))[0]
    for position in range(2, 6):
        fed = turned(raw_row(2, position + 3, SIZE), position + 3, ROPE)
        np.testing.assert_allclose(keys[position], turned(fed, -3, other), rtol=0, atol=3e-6)
    assert decoded(attention(cache, 3))[0].tobytes() == np.delete(unturned, [2, 3, 4], axis=0).tobytes()


def test_shift_offset_and_lineage_tell_what_was_done() -> None:
    cache = cache_of(FULL)
    feed(cache, range(20))
    shift(cache, 2, 5, ROPE)
    once = cache.lineage
    shift(cache, 2, 3, ROPE)
    assert once != CLEAN and cache.lineage not in (CLEAN, once)
    assert cache.shift_offset == 8 and cache.position == 12
    cache.clear()
    assert cache.shift_offset == 0 and cache.lineage == CLEAN


def lineage_of(length: int, keep: int, gone: list[int], ropes: Ropes = ROPE) -> bytes:
    cache = cache_of(FULL)
    feed(cache, range(length))
    shift(cache, keep, len(gone), ropes, gone=gone)
    return cache.lineage


def test_lineages_differ_with_all_that_decides_the_rows() -> None:
    gone = [7, 8, 9, 7, 2**32 - 1]
    ropes = [
        replace(ROPE, pairs=Pairs.NORM), replace(ROPE, base=9e3), replace(ROPE, rotary=8), replace(ROPE, factors=(2.0,) * 8),
    ]  # fmt: skip
    found = [
        lineage_of(20, 2, gone), lineage_of(21, 2, gone), lineage_of(20, 3, gone), lineage_of(20, 2, gone[:4]),
        lineage_of(20, 2, [7, 8, 9, 7, 7]), lineage_of(20, 2, gone, [None]), *(lineage_of(20, 2, gone, rope) for rope in ropes),
    ]  # fmt: skip
    assert len(set(found)) == len(found) and CLEAN not in found
    assert lineage_of(20, 2, gone) == found[0]


def test_a_shift_that_does_not_tell_what_went_has_a_lineage_of_its_own() -> None:
    """The rows that stay depend on the tokens that went: nobody may take them for another conversation's."""
    found = []
    for _ in range(2):
        cache = cache_of(FULL)
        feed(cache, range(20))
        shift(cache, 2, 5, ROPE)
        found.append(cache.lineage)
    assert found[0] != found[1]


def test_going_back_behind_a_shift_is_another_lineage_and_up_to_it_is_not() -> None:
    """Rows before the position of the shift, 15, saw the tokens that went; computed again they would not."""
    found = []
    for back in ([0], [4], [1, 3], [5], [2, 5], [7], [12]):
        cache = cache_of(FULL)
        feed(cache, range(20))
        shift(cache, 2, 5, ROPE, gone=[1] * 5)
        feed(cache, [20, 21, 22, 23])
        for count in back:
            cache.truncate_last(count)
        assert cache.position == 19 - sum(back) and cache.shift_offset == 5
        found.append(cache.lineage)
    assert found[0] == found[1] == found[2] and found[4] == found[5]
    assert len(set(found)) == 4


def test_going_back_twice_behind_a_shift_is_told_twice() -> None:
    cache = cache_of(FULL)
    feed(cache, range(20))
    shift(cache, 2, 5, ROPE, gone=[1] * 5)
    cache.truncate_last(5)
    once = cache.lineage
    feed(cache, range(5))
    cache.truncate_last(3)
    assert cache.lineage == once
    cache.truncate_last(3)
    assert cache.lineage != once


def test_a_clean_cache_goes_back_as_often_as_it_likes() -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(20))
    cache.truncate_last(7)
    assert cache.lineage == CLEAN
    shift(cache, 2, 5, ROPE)
    cache.clear()
    feed(cache, range(20))
    cache.truncate_last(7)
    assert cache.lineage == CLEAN


@pytest.mark.parametrize("gone", [[], [1, 2], [1, 2, 3, 4], [1, 2, -1], [1, 2, 2**32]])
def test_ids_that_are_not_those_that_go_are_refused_unchanged(gone: list[int]) -> None:
    cache = cache_of(FULL)
    feed(cache, range(20))
    before = dump_all(cache)
    with pytest.raises(RecordError):
        shift(cache, 2, 3, ROPE, gone=gone)
    assert dump_all(cache) == before


def test_a_shift_of_layers_already_shifted_starts_from_their_lineage() -> None:
    one, other = cache_of(FULL), cache_of(FULL)
    for cache, gone in ((one, ([1, 2, 3], [4, 5, 6, 7])), (other, ([1, 2, 3, 4], [5, 6, 7]))):
        feed(cache, range(20))
        for ids in gone:
            shift(cache, 1, len(ids), ROPE, gone=ids)
    assert one.position == other.position and one.lineage != other.lineage


@pytest.mark.parametrize(("keep", "count"), [(0, 13), (3, 10), (12, 1), (-1, 2), (3, 0), (3, -2), (13, 1), (0, 1 << 70)])
def test_ranges_beyond_the_sequence_are_refused_unchanged(keep: int, count: int) -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(12))
    before = dump_all(cache)
    with pytest.raises(RecordError, match=f"a shift by {count} behind the first {keep} of 12 tokens"):
        shift(cache, keep, count, ROPE)
    assert dump_all(cache) == before


def test_whole_numbers_of_numpy_shift_and_take_back_like_others() -> None:
    one, other = cache_of(FULL, CONV), cache_of(FULL, CONV)
    for cache, number in ((one, int), (other, np.int64)):
        feed(cache, range(12))
        shift(cache, number(2), number(3), ROPE, gone=[5, 6, 7])
        cache.truncate_last(number(4))
    np.testing.assert_array_equal(decoded(attention(one))[0], decoded(attention(other))[0])
    assert one.position == other.position == 5
    assert one.lineage == other.lineage and one.shift_offset == other.shift_offset
    assert {type(layer.position) for layer in other.own} | {type(other.shift_offset)} == {int}


@pytest.mark.parametrize(("keep", "count"), [(2.5, 1), (2, 1.0), ("2", 1), (2, None)])
def test_ranges_of_other_things_than_whole_numbers_are_refused_unchanged(keep: object, count: object) -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(12))
    before = dump_all(cache)
    with pytest.raises(RecordError, match="expected whole numbers"):
        shift(cache, keep, count, ROPE)  # type: ignore[arg-type]
    assert dump_all(cache) == before


def test_a_float32_key_that_would_overflow_is_named_and_nothing_changes() -> None:
    cache = cache_of(FULL)
    feed(cache, range(12))
    attention(cache).keys.writable(1)[9] = np.finfo(np.float32).max  # type: ignore[attr-defined]
    before = dump_all(cache)
    with pytest.raises(RecordError, match=r"layer 0 \(FULL\), head 1, row 6 after the shift"):
        shift(cache, 2, 3, ROPE)
    assert dump_all(cache) == before and cache.lineage == CLEAN


def test_a_rope_of_whole_numbers_is_told_like_one_of_floats() -> None:
    lineages = set()
    for base in (10_000, 10_000.0, np.float32(10_000)):
        cache = cache_of(FULL)
        feed(cache, range(12))
        shift(cache, 2, 3, replace(ROPE, base=base), gone=[5, 6, 7])
        lineages.add(cache.lineage)
    assert len(lineages) == 1


def test_all_tokens_may_go() -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(12))
    shift(cache, 0, 12, ROPE)
    assert cache.position == 0 and attention(cache).rows == 0 and cache.shift_offset == 12
    feed(cache, range(3))
    assert cache.position == 3


@pytest.mark.parametrize("name", ["q8", "q8k", "bf16", "turboquant", "tqk", "tq3", "tq3k"])
def test_keys_of_other_formats_are_refused_with_the_way_out(name: str) -> None:
    plan = Compression.named(name).applied(ModelPlan((replace(FULL, value_size=16),)))
    cache = ModelCache(plan, backend="reference")
    layer = attention(cache)
    layer.append(np.ones((5, HEADS, SIZE), np.float32), np.ones((5, HEADS, 16), np.float32))
    before = dump_all(cache)
    with pytest.raises(
        UnsupportedError, match="layer 0 .FULL.: keys stored as .*Store keys as f32 or f16.*compute what stays again"
    ):
        shift(cache, 1, 2, ROPE)
    assert dump_all(cache) == before


@pytest.mark.parametrize("name", ["q8v", "tqv"])
def test_quantised_values_move_as_they_are_stored(name: str) -> None:
    plan = Compression.named(name).applied(ModelPlan((replace(FULL, value_size=16),)))
    cache = ModelCache(plan, backend="reference")
    numbers = np.random.default_rng(3).standard_normal((90, HEADS, 16)).astype(np.float32)
    layer = attention(cache)
    layer.append(numbers, numbers)
    stored = [np.asarray(layer.values.blocks(head)[0].codes).copy() for head in range(HEADS)]
    shift(cache, 10, 33, ROPE)
    kept = [*range(10), *range(43, 90)]
    for head in range(HEADS):
        assert np.asarray(layer.values.blocks(head)[0].codes).tobytes() == stored[head][kept].tobytes()


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(LayerKind.RECURRENT, state_size=4),
        replace(FULL, kind=LayerKind.RING, ring=RingPlan(4)),
        replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 8, 2)),
    ],
    ids=lambda plan: plan.kind.name,
)
def test_layers_that_cannot_forget_a_token_are_refused_by_name(plan: LayerPlan) -> None:
    cache = cache_of(FULL, plan)
    attention(cache).append(np.ones((5, HEADS, SIZE), np.float32), np.ones((5, HEADS, VALUE_SIZE), np.float32))
    before = dump_all(cache)
    with pytest.raises(UnsupportedError, match=f"layer 1 .{plan.kind.name}. cannot forget tokens in its midst"):
        shift(cache, 1, 2, ROPE)
    assert dump_all(cache) == before


def test_a_rope_of_another_size_or_count_is_refused_unchanged() -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(5))
    before = dump_all(cache)
    with pytest.raises(RecordError, match="layer 0 .FULL.: a rope of 8 channels for keys of 16"):
        shift(cache, 1, 2, replace(ROPE, size=8))
    for ropes in ([ROPE], [ROPE, None, None]):
        with pytest.raises(RecordError, match=f"ropes of {len(ropes)} layers, the plan has 2"):
            shift(cache, 1, 2, ropes)
    assert dump_all(cache) == before


def test_evicted_rows_and_uneven_layers_are_refused_unchanged() -> None:
    cache = cache_of(FULL, CONV)
    feed(cache, range(9))
    attention(cache).keep([0, 3, 8])
    before = dump_all(cache)
    with pytest.raises(RecordError, match="rows were evicted"):
        shift(cache, 1, 2, ROPE)
    assert dump_all(cache) == before
    cache.clear()
    feed(cache, range(4))
    attention(cache).truncate_last(1)
    with pytest.raises(RecordError, match="layer 0 .FULL. is at position 3, others at 4"):
        shift(cache, 1, 2, ROPE)


@pytest.mark.parametrize("chunk", [1, 2, 4096])
def test_a_half_that_would_overflow_is_named_and_nothing_changes(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifting, "_CHUNK", chunk)
    cache = cache_of(FULL, HALF)
    keys = np.zeros((8, HEADS, SIZE), np.float32)
    keys[6, 1, [0, 8]] = 6e4
    for index in (0, 1):
        attention(cache, index).append(keys, np.zeros((8, HEADS, VALUE_SIZE), np.float32))
    before = dump_all(cache)
    with pytest.raises(RecordError, match="layer 1 .FULL., head 1, row 4 after the shift: .*too large for float16"):
        shift(cache, 1, 2, ROPE)
    assert dump_all(cache) == before


def windowed(window: int, *, trim: bool) -> ModelCache:
    cache = cache_of(replace(FULL, kind=LayerKind.SLIDING, window=window))
    feed(cache, range(30))
    if trim:
        assert attention(cache).trim_window(slack=3) == 30 - window - 3
    return cache


def test_windows_shift_what_they_hold() -> None:
    cache = windowed(8, trim=True)
    layer = attention(cache)
    assert layer.base == 19
    shift(cache, 2, 5, ROPE)
    assert (layer.base, layer.rows, layer.position) == (14, 11, 25)
    keys, _ = decoded(layer)
    for row, token in enumerate(range(19, 30)):
        np.testing.assert_allclose(keys[row], turned(raw_row(0, token, SIZE), token - 5, ROPE), rtol=0, atol=2e-5)


def test_a_window_that_would_reach_rows_given_up_is_refused_unchanged() -> None:
    cache = windowed(8, trim=True)
    before = dump_all(cache)
    with pytest.raises(CannotRewind, match="layer 0 .SLIDING.: at position 8 a window of 8 starts before row"):
        shift(cache, 2, 22, ROPE)
    assert dump_all(cache) == before
    whole = windowed(8, trim=False)
    shift(whole, 2, 22, ROPE)
    assert (attention(whole).base, attention(whole).rows) == (0, 8)


def test_a_window_may_lose_rows_down_to_what_the_next_query_sees() -> None:
    """It sees itself and 7 before it: of rows 22 to 29 one may go, two may not."""
    cache = windowed(8, trim=False)
    assert attention(cache).trim_window() == 22
    before = dump_all(cache)
    with pytest.raises(CannotRewind):
        shift(cache, 22, 2, ROPE)
    assert dump_all(cache) == before
    shift(cache, 22, 1, ROPE)
    assert (attention(cache).base, attention(cache).rows, cache.position) == (22, 7, 29)


@pytest.mark.parametrize("plan", [FULL, HALF])
def test_keys_turned_in_pieces_are_those_turned_at_once(plan: LayerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, pieces = cache_of(plan), cache_of(plan)
    for cache in (whole, pieces):
        feed(cache, range(30))
    shift(whole, 3, 4, ROPE)
    monkeypatch.setattr(shifting, "_CHUNK", 7)
    shift(pieces, 3, 4, ROPE)
    assert dump_all(whole)[2][-1] == dump_all(pieces)[2][-1]  # type: ignore[index]


def test_rows_on_a_mapped_prefix_are_copied_before_they_move() -> None:
    cache, mapped = cache_of(FULL), cache_of(FULL)
    feed(cache, range(30))
    start_on_prefix(attention(mapped), *decoded(attention(cache)))
    prefix = [block.codes for head in range(HEADS) for block in attention(mapped).keys.blocks(head)]
    before = [codes.tobytes() for codes in prefix]
    assert attention(mapped).memory().mapped > 0
    shift(mapped, 3, 20, ROPE)
    assert attention(mapped).memory().mapped == 0 and [codes.tobytes() for codes in prefix] == before
    shift(cache, 3, 20, ROPE)
    for one, other in zip(decoded(attention(cache)), decoded(attention(mapped)), strict=True):
        assert one.tobytes() == other.tobytes()


def test_importance_moves_with_its_rows() -> None:
    cache = cache_of(FULL)
    feed(cache, range(10))
    attention(cache).accumulate(np.arange(10, dtype=np.float32))
    shift(cache, 2, 3, ROPE)
    importance = attention(cache).importance
    assert importance is not None and importance.tolist() == [0, 1, 5, 6, 7, 8, 9]


def test_earlier_states_of_a_convolution_keep_the_tokens_they_stand_for() -> None:
    """After a shift position 9 is another token's: a state recorded at the old one must not be found there."""
    cache = cache_of(CONV)
    feed(cache, range(20))
    layer = cache.layers[0]
    assert isinstance(layer, ConvLayer)
    shift(cache, 6, 4, ROPE)
    assert layer.history.positions == (1, 2, 3, 4, 5, 6, *range(7, 17))
    for position in range(15, 6, -1):
        layer.truncate_last(1)
        token = position + 3
        assert layer.position == position
        assert layer.state.tobytes() == np.concatenate([conv_row(token - 1, 5), conv_row(token, 5)]).tobytes()
    layer.truncate_last(1)
    assert layer.state.tobytes() == np.concatenate([conv_row(4, 5), conv_row(5, 5)]).tobytes()


def test_a_shift_to_the_end_leaves_the_convolution_as_it_is() -> None:
    cache = cache_of(CONV)
    feed(cache, range(20))
    layer = cache.layers[0]
    assert isinstance(layer, ConvLayer)
    state = layer.state.copy()
    shift(cache, 6, 14, ROPE)
    assert layer.position == 6 and layer.history.positions == (1, 2, 3, 4, 5, 6)
    feed(cache, [20])
    layer.truncate_last(1)
    assert layer.state.tobytes() == state.tobytes()


@pytest.mark.parametrize("plans", [(FULL, CONV, FULL), (HALF, FULL)])
def test_refused_memory_at_any_point_leaves_all_layers_as_they_were(plans: tuple[LayerPlan, ...]) -> None:
    left = [1 << 30]

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfMemory("refused", int(np.prod(shape)) * dtype.itemsize)
        return np.empty(shape, dtype)

    cache = cache_of(*plans, allocate=allocate)
    feed(cache, range(20))
    before = dump_all(cache)
    for granted in range(100):
        left[0] = granted
        try:
            shift(cache, 3, 9, ROPE)
            break
        except OutOfMemory as refused:
            assert refused.requested_bytes > 0 and dump_all(cache) == before
    assert granted >= 2 * sum(plan.kind is LayerKind.FULL for plan in plans) and cache.position == 11


@pytest.mark.parametrize("seed", range(12))
def test_random_walk_equals_tokens_that_know_their_place(seed: int) -> None:
    """The twin is a list of tokens; every key is turned anew for its place in it."""
    rng = random.Random(seed)
    rope, half = rng.choice(ROPES), rng.random() < 0.5
    cache = cache_of(HALF if half else FULL, CONV)
    tokens: list[int] = []
    inputs: list[int] = []
    made = 0
    for _ in range(60):
        match rng.randrange(4):
            case 0 | 1:
                fresh = list(range(made, made + rng.randrange(5)))
                feed(cache, fresh, rope)
                made += len(fresh)
                tokens += fresh
                inputs += fresh
            case 2:
                keep, count = rng.randrange(6), rng.randrange(6)
                if count < 1 or keep + count > len(tokens):
                    with pytest.raises(RecordError):
                        shift(cache, keep, count, rope)
                else:
                    shift(cache, keep, count, rope)
                    del tokens[keep : keep + count]
            case 3:
                count = rng.randrange(3)
                try:
                    cache.truncate_last(count)
                except WarmKVError:
                    continue
                if count:
                    del tokens[len(tokens) - count :]
                    inputs = list(tokens)
        keys, values = decoded(attention(cache))
        assert cache.position == len(keys) == len(tokens)
        for position, token in enumerate(tokens):
            expected = turned(raw_row(0, token, SIZE), position, rope)
            assert np.abs(keys[position] - expected).max() < (2e-2 if half else 5e-5)
            sent = raw_row(1, token, VALUE_SIZE)
            assert (values[position] == (sent.astype(np.float16) if half else sent)).all()
        conv = cache.layers[1]
        assert isinstance(conv, ConvLayer) and conv.position == len(tokens)
        if inputs and len(tokens) >= 2 and inputs[-2:] == tokens[-2:]:
            assert conv.state[-1].tobytes() == conv_row(inputs[-1], 5)[0].tobytes()
