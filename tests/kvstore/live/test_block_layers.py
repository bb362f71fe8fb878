"""Layers of blocked and fp8 rows: plans, bytes at every length, what is refused, and what answers are made of."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
from dumps import dump_all, rows_of

from warmkv.kernels.dispatch import kernels as kernels_of
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.reference import decode, encode
from warmkv.kernels.rope.reference import Pairs, Rope
from warmkv.kernels.testing import softmax_attention
from warmkv.kvstore.live import sizing, snapshot
from warmkv.kvstore.live.compression import Compression
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, RingPlan, modes
from warmkv.kvstore.live.shift import shift
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

_NEW = {format_ for format_ in RowFormat if format_.blocked} | {RowFormat.FP8}
NAMES = [name for name, *sides in modes(blocked=True) if set(sides) <= _NEW]
by_name = pytest.mark.parametrize("name", NAMES)
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]
HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE = 4, 2, 64, 96
#: Bytes of 32 channels.
BYTES = {"q8_0": 34, "q5_1": 24, "q4_0": 18, "fp8": 32}


def plan(name: str = "q8_0/q5_1", **changes: object) -> LayerPlan:
    mode = Compression.named(name)
    made = LayerPlan(LayerKind.FULL, HEADS, KV_HEADS, KEY_SIZE, VALUE_SIZE, mode.keys, mode.values)
    return replace(made, **changes)  # type: ignore[arg-type]


def layer(found: LayerPlan, backend: str = "reference") -> AttentionLayer:
    return AttentionLayer(found, index=3, kernels=kernels_of(backend))  # type: ignore[arg-type]


def rows(found: LayerPlan, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal((count, found.kv_heads, size)).astype(np.float32) for size in (found.key_size, found.value_size)
    )  # type: ignore[return-value]


def codes(found: AttentionLayer) -> list[bytes]:
    return [
        b"".join(np.ascontiguousarray(block.codes).tobytes() for block in plane.blocks(head))
        for plane in (found.keys, found.values)
        for head in range(plane.heads)
    ]


def row_bytes(name: str) -> int:
    """Keys and values of one KV head."""
    keys, _, values = name.partition("/")
    return KEY_SIZE // 32 * BYTES[keys] + VALUE_SIZE // 32 * BYTES[values or keys]


@by_name
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [0, 1, 33, 64])
def test_rows_and_answers_are_those_of_what_was_stored(name: str, backend: str, length: int) -> None:
    found = plan(name)
    whole, steps = layer(found, backend), layer(found, backend)
    k, v = rows(found, length, seed=length)
    whole.append(k, v)
    for at in range(length):
        steps.append(k[at : at + 1], v[at : at + 1])
    expected = [
        encode(np.ascontiguousarray(part[:, head]), format_, keys=keys).codes.tobytes()
        for part, format_, keys in ((k, found.key_format, True), (v, found.value_format, False))
        for head in range(KV_HEADS)
    ]
    assert codes(whole) == codes(steps) == expected
    memory = whole.memory()
    assert memory.stored == sizing.stored_bytes(found, length) == length * KV_HEADS * row_bytes(name)
    q = np.random.default_rng(1).standard_normal((HEADS, KEY_SIZE)).astype(np.float32)
    out = whole.attend(q)
    if not length:
        assert not out.any()
        return
    for head in range(HEADS):
        (keys,), (values,) = whole.keys.blocks(head // 2), whole.values.blocks(head // 2)
        wide = [decode(block).astype(np.float64) for block in (keys, values)]
        wanted, _, _ = softmax_attention(q[head : head + 1].astype(np.float64), *wide, found.logit_scale, 0, length, 0.0, None)
        np.testing.assert_allclose(out[head], wanted[0], rtol=2e-5, atol=2e-5)
    chunk = min(length, 5)
    queries = np.random.default_rng(2).standard_normal((chunk, HEADS, KEY_SIZE)).astype(np.float32)
    answers = whole.attend_chunk(queries, observe=False)
    np.testing.assert_allclose(answers[-1], whole.attend(queries[-1], observe=False), rtol=2e-5, atol=2e-5)


@by_name
@pytest.mark.parametrize("window", [1, 31, 32, 33])
def test_windows_answer_as_rows_that_were_never_trimmed(name: str, window: int) -> None:
    found = plan(name, kind=LayerKind.SLIDING, window=window)
    trimmed, whole = layer(found), layer(found)
    k, v = rows(found, 100, seed=3)
    q = np.random.default_rng(5).standard_normal((HEADS, KEY_SIZE)).astype(np.float32)
    for first, last in itertools.pairwise((0, 1, 2, 33, 34, 65, 97, 98, 100)):
        for one in (trimmed, whole):
            one.append(k[first:last], v[first:last])
        trimmed.trim_window()
    assert trimmed.rows < whole.rows == 100
    assert trimmed.attend(q).tobytes() == whole.attend(q).tobytes()


@by_name
def test_rows_that_stay_keep_their_bytes_whatever_goes(name: str) -> None:
    found = plan(name)
    k, v = rows(found, 70)
    for kept in (range(33), range(31, 70), [0, 5, 31, 32, 69], []):
        one, other = layer(found), layer(found)
        one.append(k, v)
        one.keep(list(kept))
        other.append(k[list(kept)], v[list(kept)])
        assert codes(one) == codes(other) and one.position == 70
    one.append(k[:2], v[:2])
    one = layer(found)
    one.append(k, v)
    one.truncate_last(37)
    one.append(k[33:], v[33:])
    other = layer(found)
    other.append(k, v)
    assert codes(one) == codes(other)


@by_name
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused_on_either_side(name: str, bad: float) -> None:
    found = plan(name, alive=(True, False))
    one = layer(found)
    one.append(*rows(found, 7))
    before = rows_of(one)
    for side in range(2):
        given = rows(found, 3)
        given[side][1, 0, 30] = bad
        with pytest.raises(RecordError, match=re.escape("KV head 0, row 8 (position 8): NaN or infinity")):
            one.append(*given)
        assert rows_of(one) == before
        given[side][1, 0, 30] = 0
        given[side][:, 1] = bad
        layer(found).append(*given)  # of a dead head nothing is looked at


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q4_0", "q8_0/q4_0"])
@pytest.mark.parametrize("side", range(2))
def test_numbers_too_large_for_their_scale_are_refused_with_both_planes_unchanged(name: str, side: int) -> None:
    found = plan(name)
    one = layer(found)
    one.append(*rows(found, 7))
    before = rows_of(one)
    given = rows(found, 3)
    given[side][2, 1, 0] = 3e38
    with pytest.raises(RecordError, match=f"{('keys', 'values')[side]}, head 1, row 9: numbers too large for a float16 scale"):
        one.append(*given)
    assert rows_of(one) == before
    with pytest.raises(RecordError, match="too large"):
        one.adopt(*given, position=3, base=0, importance=np.zeros(3, np.float32), gapless=True)
    assert rows_of(one) == before


def test_fp8_takes_numbers_beyond_its_own_as_its_largest() -> None:
    found = plan("fp8")
    one = layer(found)
    one.append(*(part * np.float32(1e30) for part in rows(found, 3)))
    assert one.abs_max() == (448.0, 448.0) and {abs(x) for x in decode(one.keys.blocks(0)[0]).ravel().tolist()} == {448.0}


@by_name
def test_the_largest_magnitudes_are_those_of_what_is_stored(name: str) -> None:
    found = plan(name)
    one = layer(found)
    assert one.abs_max() == (0.0, 0.0)
    one.append(*rows(found, 33))
    wide = [max(float(np.abs(decode(plane.blocks(head)[0])).max()) for head in range(2)) for plane in (one.keys, one.values)]
    assert one.abs_max() == tuple(wide)


@pytest.mark.parametrize("size", [1, 40, 80, 112, 31, 33])
def test_heads_that_blocks_do_not_fill_are_refused_by_the_plan(size: int) -> None:
    for side, format_ in (("keys", "q8_0"), ("values", "q5_1")):
        changes = {"key_size" if side == "keys" else "value_size": size}
        with pytest.raises(RecordError, match=rf"layer 0 .*{side} as {format_}: heads of {size} channels: not a multiple of 32"):
            ModelPlan((plan(**changes),))
    with pytest.raises(RecordError, match="layer 1"):
        ModelPlan((plan(), plan("q4_0", value_size=size)))


@pytest.mark.parametrize(
    "sizes", [(32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (256, 256), (320, 320), (576, 512)]
)
def test_heads_of_whole_blocks_are_stored_also_where_keys_and_values_differ(sizes: tuple[int, int]) -> None:
    found = plan("q8_0/q4_0", key_size=sizes[0], value_size=sizes[1])
    one = layer(found)
    one.append(*rows(found, 2))
    assert one.memory().stored == 2 * KV_HEADS * (sizes[0] // 32 * 34 + sizes[1] // 32 * 18)
    assert one.attend(np.ones((HEADS, sizes[0]), np.float32)).shape == (HEADS, sizes[1])


@pytest.mark.parametrize("size", [1, 40, 80, 112])
def test_fp8_has_no_blocks_to_fill(size: int) -> None:
    found = plan("fp8", key_size=size, value_size=size)
    one = layer(found)
    one.append(*rows(found, 2))
    assert one.memory().stored == 2 * KV_HEADS * 2 * size


def test_a_pool_that_needs_other_rows_is_refused() -> None:
    for bounded in ({"kind": LayerKind.RING, "ring": RingPlan(8)}, {"kind": LayerKind.NYSTROM, "nystrom": NystromPlan(4, 8, 2)}):
        for name in NAMES:
            with pytest.raises(RecordError, match="expected f32"):
                ModelPlan((plan(name, **bounded),))


@by_name
def test_keys_of_blocks_are_not_turned(name: str) -> None:
    cache = ModelCache(ModelPlan((plan(name),)), backend="reference")
    (only,) = cache.own
    assert isinstance(only, AttentionLayer)
    only.append(*rows(only.plan, 20))
    before = dump_all(cache)
    stored = only.plan.key_format.value
    with pytest.raises(UnsupportedError, match=f"keys stored as {stored} .*Store keys as f32 or f16.*compute what stays again"):
        shift(cache, 2, 3, Rope(KEY_SIZE, 10_000.0, Pairs.NEOX))
    assert dump_all(cache) == before and cache.lineage == CLEAN
    beside = ModelCache(ModelPlan((plan(name, key_format=RowFormat.F16),)), backend="reference")
    (turned,) = beside.own
    assert isinstance(turned, AttentionLayer)
    k, v = rows(only.plan, 20)
    turned.append(k, v)
    shift(beside, 2, 3, Rope(KEY_SIZE, 10_000.0, Pairs.NEOX))
    kept = [*range(2), *range(5, 20)]
    values = encode(np.ascontiguousarray(v[kept, 1]), turned.plan.value_format, keys=False)
    assert turned.values.blocks(1)[0].codes.tobytes() == values.codes.tobytes(), "values move as they are"


@by_name
def test_snapshots_go_there_and_back_byte_for_byte(name: str) -> None:
    cache, other = (ModelCache(ModelPlan((plan(name), plan("f16"))), backend="reference") for _ in range(2))
    for own in cache.own:
        assert isinstance(own, AttentionLayer)
        own.append(*rows(own.plan, 33))
    snapshot.prepare(other, snapshot.take(cache))()
    assert other.position == 33
    for mine, theirs in zip(other.own, cache.own, strict=True):
        assert isinstance(mine, AttentionLayer) and isinstance(theirs, AttentionLayer) and codes(mine) == codes(theirs)


@by_name
def test_eviction_gathers_rows_as_they_lie(name: str) -> None:
    cache, whole = ModelCache(ModelPlan((plan(name),)), backend="reference"), layer(plan(name))
    (only,) = cache.own
    assert isinstance(only, AttentionLayer)
    for one in (only, whole):
        one.append(*rows(only.plan, 70))
    assert cache.evict(20) > 0 and only.rows <= 20 and cache.lineage != CLEAN
    every = {bytes_at(whole, row): row for row in range(70)}
    kept = [every[bytes_at(only, row)] for row in range(only.rows)]
    assert kept == sorted(kept) and len(every) == 70


def bytes_at(found: AttentionLayer, row: int) -> bytes:
    """A row of all heads, keys and values."""
    planes = [plane.blocks(head)[0] for plane in (found.keys, found.values) for head in range(plane.heads)]
    return b"".join(block.codes[row].tobytes() for block in planes)


@by_name
def test_what_a_token_costs_is_what_the_formula_says(name: str) -> None:
    found = plan(name)
    assert sizing.row_bytes(found) == KV_HEADS * row_bytes(name) and sizing.field_bytes(found) == 0
    wide = replace(found, heads=32, kv_heads=8, key_size=128, value_size=128, importance=False)
    halves = replace(wide, key_format=RowFormat.F16, value_format=RowFormat.F16)
    keys, _, values = name.partition("/")
    assert sizing.token_bytes(wide) == 8 * 4 * (BYTES[keys] + BYTES[values or keys])
    assert sizing.token_bytes(wide) < 0.54 * sizing.token_bytes(halves)
