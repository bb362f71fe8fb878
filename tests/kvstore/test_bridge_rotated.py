"""Rotated rows as records: the bytes a row is made of, whose they are, and what they may become."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.turboquant.planes import Planes
from warmkv.kernels.turboquant.reference import Estimator, encode_keys, encode_plain_keys, encode_values
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kvstore.bridge import attention_of, field_digests, layer_specs, on_prefix, records_of, restore_into
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt, rotated, save, written
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

LENGTH = 70
ENCODERS = {RowFormat.TQ_KEY: encode_keys, RowFormat.TQ_VALUE: encode_values, RowFormat.TQ3: encode_plain_keys}
#: Order of what a row of one head is made of.
PARTS = {
    RowFormat.TQ_KEY: ("codes", "signs", "norms", "residuals"), RowFormat.TQ_VALUE: ("codes", "norms"),
    RowFormat.TQ3: ("codes", "norms"),
}  # fmt: skip
BOTH = PLANS["turboquant"]


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def one(layer: LayerPlan) -> ModelPlan:
    return ModelPlan((layer,))


def turned(plan: ModelPlan, **changes: object) -> ModelPlan:
    """The plan with another seed or estimator in every layer."""
    layers = (replace(layer, turboquant=replace(layer.turboquant, **changes)) for layer in plan.layers)  # type: ignore[type-var]
    return ModelPlan(tuple(layers))


def stored(store: Store, plan: ModelPlan, length: int = LENGTH) -> Restored:
    cache, ids = made(plan), prompt(length + 1)
    fill(cache, length)
    save(store, identity_of(plan), ids[:length], cache)
    found = store.restore(identity_of(plan), ids, lineage=cache.lineage, verify=True)
    assert found.usable == length
    return found


def attention(cache: ModelCache, index: int = 0) -> AttentionLayer:
    layer = cache.own[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def spelled(planes: Planes, format_: RowFormat, row: int) -> bytes:
    """One row of a layer as bytes, head after head."""
    heads = range(planes.norms.shape[1])
    return b"".join(np.ascontiguousarray(getattr(planes, part)[row, head]).tobytes() for head in heads for part in PARTS[format_])


@pytest.mark.parametrize("name", ["turboquant", "tqk", "tqv", "tq3", "tq3k"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_row_is_heads_of_codes_signs_and_lengths(name: str, length: int) -> None:
    """As the encoders have them, computed again here; the seed of a layer is the model's XOR its number."""
    layer = rotated(name, seed=0xDEADBEEF)
    cache = made(ModelPlan((written(layer, RowFormat.F32, RowFormat.F32, turboquant=None), layer)))
    numbers = np.random.default_rng(3)
    k, v = (numbers.standard_normal((length, 2, size)).astype(np.float32) for size in (40, 24))
    for own in cache.own:
        assert isinstance(own, AttentionLayer)
        own.append(k, v)
    (record,) = (record for record in records_of(cache, length) if record.layer == 1)
    for plane, format_, rows in zip(record.planes, (layer.key_format, layer.value_format), (k, v), strict=True):
        assert plane.field == bytes(16)
        if not format_.rotated:
            assert np.array_equal(plane.rows, rows.astype(plane.rows.dtype))
            continue
        rotation = Rotation.of(0xDEADBEEF ^ 1, 0, rows.shape[2])
        planes = ENCODERS[format_](rows, rotation)
        for row in range(length):
            assert plane.rows[row].tobytes() == spelled(planes, format_, row)
        bits, norms = {"tq_key": (3, 4), "tq_value": (2, 2), "tq3": (3, 2)}[format_.value]
        assert plane.rows.shape == (length, 2 * (rows.shape[2] * bits // 8 + norms))
    assert field_digests(cache) == ()


def test_specs_name_seed_and_sides() -> None:
    (both,) = layer_specs(one(rotated("turboquant", seed=7)))
    assert [(plane.role.name, plane.format.name, plane.row_shape, plane.parameters) for plane in both.planes] == [
        ("KEY", "TQ_KEY", (2, 40), "rotation seed 7"), ("VALUE", "TQ_VALUE", (2, 24), "rotation seed 7")
    ]  # fmt: skip
    assert both.kind == LayerKind.FULL and not both.field_planes
    (dead,) = layer_specs(one(rotated("tqv", kv_heads=4, alive=(True, False, True, False), importance=True)))
    assert [(plane.role.name, plane.parameters) for plane in dead.planes] == [
        ("KEY", "KV heads 0,2 of 4"), ("VALUE", "KV heads 0,2 of 4; rotation seed 42"), ("IMPORTANCE", "none")
    ]  # fmt: skip
    ways = [rotated(name, seed=seed) for name in ("turboquant", "tqk", "tqv", "tq3", "tq3k") for seed in (0, 1, 2**64 - 1)]
    ways += [written(ways[0], RowFormat.F32, RowFormat.F32, turboquant=None)]
    assert len({identity_of(one(layer)).canonical() for layer in ways}) == len(ways)
    for estimator in Estimator:
        same = turned(one(ways[0]), estimator=estimator)
        assert layer_specs(same) == layer_specs(one(ways[0])), "no byte of a row depends on it"


def test_attention_says_how_signs_of_keys_count() -> None:
    """Deeper layers keep what it made of them."""
    both, sided = rotated("turboquant"), rotated("tq3")
    plans = [turned(ModelPlan((both, sided)), estimator=estimator) for estimator in Estimator]
    assert [attention_of(plan, "warmkv") for plan in plans] == [
        "warmkv; signs unbiased", "warmkv; signs minimum_mse", "warmkv; signs cera_compat"
    ]  # fmt: skip
    for plain in (sided, rotated("tqv"), rotated("tq3k"), PLANS["q8"].layers[0]):
        assert attention_of(one(plain), "warmkv") == "warmkv", "there are no signs"
    mixed = ModelPlan((sided, plans[0].layers[0], plans[2].layers[0]))
    assert attention_of(mixed, "eager") == "eager; signs 1 unbiased, 2 cera_compat"
    turned_round = ModelPlan((sided, plans[2].layers[0], plans[0].layers[0]))
    assert attention_of(turned_round, "eager") == "eager; signs 1 cera_compat, 2 unbiased"


def test_readers_of_another_estimator_share_bytes(store: Store) -> None:
    other = turned(BOTH, estimator=Estimator.CERA_COMPAT)
    copied, lent, alone = made(other), made(other), made(other)
    fill(alone, LENGTH)
    with stored(store, BOTH) as restored:
        assert restore_into(copied, restored) == on_prefix(lent, restored) == LENGTH
    assert contents(copied) == contents(lent) == contents(alone) and copied.lineage == CLEAN
    unbiased = made(BOTH)
    fill(unbiased, LENGTH)
    assert contents(unbiased) == contents(copied)
    steps = feed(copied, 2)
    assert steps == feed(alone, 2) != feed(unbiased, 2)


def test_nothing_is_found_under_another_seed_or_side(store: Store) -> None:
    with stored(store, one(rotated("turboquant"))) as restored:
        for layer in (rotated("turboquant", seed=43), rotated("tqk"), rotated("tqv"), rotated("tq3")):
            plan, ids = one(layer), prompt(LENGTH + 1)
            assert store.match(identity_of(plan), ids).matched == 0
            cache = made(plan)
            fill(cache, 9, seed=1)
            before = contents(cache)
            for restore in (restore_into, on_prefix):
                with pytest.raises(RecordError, match="layer 0 was stored as .*convert=True"):
                    restore(cache, restored)
            assert contents(cache) == before and cache.position == 9


CONVERSIONS = {
    "to f32": ("turboquant", "f32", True), "of one side only": ("tqv", "f32", True), "from f32": ("f32", "turboquant", True),
    "one side more": ("tqk", "turboquant", True), "keys of other bits": ("turboquant", "tq3", True),
    "to q8": ("tq3", "q8", True), "from q8": ("q8", "turboquant", True), "nothing": ("turboquant", "turboquant", False),
}  # fmt: skip


def in_mode(name: str, seed: int = 42) -> ModelPlan:
    f32, q8 = RowFormat.F32, RowFormat.Q8_2F
    if name in ("f32", "q8"):
        return one(written(rotated("turboquant"), *((f32, f32) if name == "f32" else (q8, q8)), turboquant=None))
    return one(rotated(name, seed=seed))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_rows_written_anew_change_the_lineage(store: Store, name: str) -> None:
    source, target, changes = CONVERSIONS[name]
    original, cache = made(in_mode(source)), made(in_mode(target))
    fill(original, LENGTH)
    with stored(store, in_mode(source)) as restored:
        assert restore_into(cache, restored, convert=True) == LENGTH
    assert (cache.lineage != CLEAN) == changes
    before, after = attention(original), attention(cache)
    for ours, theirs in ((before.keys, after.keys), (before.values, after.values)):
        if ours.format is theirs.format:
            assert records_bytes(original, ours.keys) == records_bytes(cache, ours.keys), "a side that fits is not written anew"
    if source == "f32":
        direct = made(in_mode(target))
        fill(direct, LENGTH)
        assert contents(direct) == contents(cache)
    feed(cache, 2)


def records_bytes(cache: ModelCache, keys: bool) -> bytes:
    record = records_of(cache, LENGTH)[0]
    return record.planes[0 if keys else 1].rows.tobytes()


def test_what_is_written_anew_does_not_depend_on_who_reads(store: Store) -> None:
    """Else two programs would save different rows as the same."""
    found = []
    with stored(store, in_mode("turboquant")) as restored:
        for estimator in Estimator:
            cache = made(turned(one(rotated("tq3", seed=1)), estimator=estimator))
            assert restore_into(cache, restored, convert=True) == LENGTH
            found.append((contents(cache), cache.lineage))
    assert found[0] == found[1] == found[2]


def test_dead_heads_are_not_converted_into_others(store: Store) -> None:
    """What stands before the seed has to be the same."""
    dead = replace(rotated("turboquant"), heads=6, kv_heads=3, alive=(True, False, True))
    plan, plain = one(dead), one(written(dead, RowFormat.F16, RowFormat.F32, turboquant=None))
    other = one(rotated("tq3", heads=6, kv_heads=3, alive=(True, True, False)))
    cache, wrong = made(plain), made(other)
    with stored(store, plan) as restored:
        assert restore_into(cache, restored, convert=True) == LENGTH
        with pytest.raises(RecordError, match="layer 0 was stored as"):
            restore_into(wrong, restored, convert=True)
    assert wrong.position == 0 and cache.lineage != CLEAN


def test_another_seed_is_another_lineage(store: Store) -> None:
    told = set()
    with stored(store, in_mode("turboquant")) as restored:
        for seed in (0, 1, 43):
            cache = made(in_mode("turboquant", seed))
            with pytest.raises(RecordError, match="convert=True"):
                restore_into(cache, restored)
            assert restore_into(cache, restored, convert=True) == LENGTH
            told.add(cache.lineage)
    pair = (RowFormat.TQ_KEY, RowFormat.TQ_KEY), (RowFormat.TQ_VALUE, RowFormat.TQ_VALUE)
    assert told == {
        lineages.after(
            CLEAN, "requantised", 0, LENGTH, "tq_key", "tq_key", "tq_value", "tq_value", "42", str(seed), "42", str(seed)
        )
        for seed in (0, 1, 43)
    }
    assert lineages.requantised(CLEAN, 0, LENGTH, *pair, (42, 1, 42, 1)) in told


def test_rows_without_a_rotation_keep_the_lineage_they_had() -> None:
    pairs = (RowFormat.F32, RowFormat.Q8_2F), (RowFormat.F16, RowFormat.F32)
    expected = lineages.after(CLEAN, "requantised", 3, LENGTH, "f32", "q8_2f", "f16", "f32")
    assert lineages.requantised(CLEAN, 3, LENGTH, *pairs) == expected


def test_rows_at_odd_addresses_are_attended_where_they_lie(store: Store) -> None:
    """Heads of 40 channels take 19 bytes of keys: norms lie at odd addresses."""
    lent, copied = made(BOTH), made(BOTH)
    with stored(store, BOTH) as restored:
        assert on_prefix(lent, restored) == restore_into(copied, restored) == LENGTH
        for index in range(2):
            layer = attention(lent, index)
            for plane, role in ((layer.keys, 0), (layer.values, 1)):
                (block,) = list(restored.layers[index].planes.values())[role].blocks
                (mine,) = plane.blocks(1)
                assert np.shares_memory(mine.codes, block) and not mine.codes.flags.writeable
    assert lent.memory().mapped == copied.memory().stored > 0 == copied.memory().mapped
    outputs = [np.frombuffer(step, np.float32) for step in (*feed(lent, 4), *feed(copied, 4))]
    for ours, theirs in zip(outputs[:8], outputs[8:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * max(1.0, float(np.abs(theirs).max())))
    assert contents(lent) == contents(copied)
