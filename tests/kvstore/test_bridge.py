"""Live caches to records and back: the same bytes, the same next steps, nothing of what was there before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warmkv
from warmkv.kvstore.bridge import field_digests, has_gaps, layer_specs, records_of, restore_into
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import CannotRewind, RecordError, SealError
from warmkv.schema.records import CLEAN

by_plan = pytest.mark.parametrize("name", PLANS)
LENGTHS = (1, 9, 64, 101)


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def exact(plan: ModelPlan, length: int) -> bool:
    """Whether a cache of this many tokens can be gone on with bit for bit. A window that is narrower than
    the rows a field is fixed from cannot while the field is open."""
    narrow = any(layer.quantised and 0 < layer.window <= min(length, 64) for layer in plan.layers)
    return not (narrow and length <= 64)


@by_plan
@pytest.mark.parametrize("length", LENGTHS)
def test_what_comes_back_into_a_used_cache_is_what_was_saved(store: Store, name: str, length: int) -> None:
    plan = PLANS[name]
    identity, ids = identity_of(plan), prompt(length + 1)
    cache, used = made(plan), made(plan)
    fill(cache, length)
    fill(used, 77, seed=9)
    before = {layer.index: layer.generation for layer in used.own}
    save(store, identity, ids[:length], cache)
    with store.restore(identity, ids, lineage=cache.lineage, verify=True) as restored:
        assert restored.usable == length
        taken = restore_into(used, restored)
    assert taken == (length if exact(plan, length) else 0)
    if not taken:
        twin = made(plan)
        fill(twin, 77, seed=9)
        assert contents(used) == contents(twin)
        return
    assert (used.position, used.lineage) == (length, cache.lineage)
    assert contents(used) == contents(cache)
    assert not {layer.generation for layer in used.own} & {*before.values(), *(layer.generation for layer in cache.own)}
    for ours, theirs in zip(used.own, cache.own, strict=True):
        if isinstance(ours, AttentionLayer) and isinstance(theirs, AttentionLayer) and not ours.plan.window:
            assert ours.abs_max() == theirs.abs_max()
    steps = 16 if length == 64 else 2
    assert feed(used, steps) == feed(cache, steps)
    assert contents(used) == contents(cache)


def test_planes_of_records_are_the_stored_bytes(store: Store) -> None:
    """By hand: token-major, head after head, scales before codes, keys' field before values'."""
    cache = made(PLANS["dead heads"])
    fill(cache, 70)
    (rows, plain) = (record for record in records_of(cache, 70) if record.layer in (0, 1))
    layer = cache.own[0]
    assert isinstance(layer, AttentionLayer) and isinstance(rows, warmkv.LayerRows) and isinstance(plain, warmkv.LayerRows)
    key, value, field = rows.planes
    for row in (0, 13, 69):
        for plane, stored in ((key, layer.keys), (value, layer.values)):
            expected = b""
            for head in range(3):
                (block,) = stored.blocks(head)
                assert block.scales is not None
                expected += block.scales[row].astype("<f4").tobytes() + block.codes[row].tobytes()
            assert plane.rows[row].tobytes() == expected
    assert layer.keys.field is not None and layer.values.field is not None
    assert field.rows.tobytes() == layer.keys.field.tobytes() + layer.values.field.tobytes()
    assert {key.field, value.field, field.field} == set(field_digests(cache))
    assert plain.planes[0].rows.shape == (70, 2, 40) and len(plain.planes) == 2


def test_specs_say_what_is_kept() -> None:
    full, other = layer_specs(PLANS["dead heads"])
    assert [(plane.role.name, plane.format.name, plane.row_shape) for plane in full.planes] == [
        ("KEY", "Q8_2F", (3, 40)), ("VALUE", "Q8_2F", (3, 7)), ("FIELD", "F32", (3 * 47,))
    ]  # fmt: skip
    assert {plane.parameters for plane in full.planes[:2]} == {"KV heads 1,2,4 of 5"}
    assert {plane.parameters for plane in other.planes} == {"none"}
    kinds = [spec.kind.name for spec in layer_specs(PLANS["everything"])]
    assert kinds == ["HYBRID", "SLIDING", "RING", "RECURRENT", "NYSTROM", "SHARED", "SLIDING", "CONV", "FULL"]
    assert [spec.kind.name for spec in layer_specs(PLANS["everything"], gaps=True)] == ["SPARSE", *kinds[1:-1], "SPARSE"]
    seen = {layer_specs(plan) for plan in PLANS.values()}
    assert len(seen) == len(PLANS)
    alive = replace(PLANS["dead heads"].layers[0], alive=(True, True, True, False, False))
    assert layer_specs(ModelPlan((alive,)))[0] != full


@pytest.mark.parametrize(
    "change", [{"scale": 0.3}, {"ring": {"inv_freq": (1.0, 0.2)}}, {"ring": {"rope_scale": 2.0}}, {"ring": {"sinks": 1}}]
)
def test_what_the_raw_keys_of_a_ring_mean_is_part_of_its_spec(change: dict[str, Any]) -> None:
    plan = PLANS["ring"].layers[0]
    assert plan.ring is not None
    other = replace(plan, **{**change, **({"ring": replace(plan.ring, **change["ring"])} if "ring" in change else {})})
    assert layer_specs(ModelPlan((other,))) != layer_specs(ModelPlan((plan,)))
    undo = replace(plan, ring=replace(plan.ring, undo_rows=1))
    assert layer_specs(ModelPlan((undo,))) == layer_specs(ModelPlan((plan,)))


@pytest.mark.parametrize(
    "change", [{"importance": False}, {"scale": 0.3}, {"heads": 8}, *({"nystrom": {name: 7}} for name in ("landmarks", "sinks"))]
)
def test_what_a_nystroem_state_means_is_part_of_its_spec(change: dict[str, Any]) -> None:
    plan = PLANS["nystroem"].layers[0]
    assert plan.nystrom is not None
    other = replace(
        plan, **{**change, **({"nystrom": replace(plan.nystrom, **change["nystrom"])} if "nystrom" in change else {})}
    )
    assert layer_specs(ModelPlan((other,))) != layer_specs(ModelPlan((plan,)))


def test_rows_given_up_behind_the_back_of_the_lineage_are_not_saved() -> None:
    cache = made(PLANS["f32"])
    fill(cache, 20)
    for layer in cache.own:
        assert isinstance(layer, AttentionLayer)
        layer.keep([0, 1, 18, 19])
    with pytest.raises(RecordError, match="lineage is clean"):
        records_of(cache, 20)
    cache.lineage = bytes(range(16))
    assert len(records_of(cache, 20)) == 2


@by_plan
def test_a_second_turn_sends_only_its_rows(store: Store, name: str) -> None:
    plan = PLANS[name]
    identity, ids = identity_of(plan), prompt(131)
    cache = made(plan)
    fill(cache, 100)
    save(store, identity, ids[:100], cache)
    fill(cache, 30)
    offer = store.offer(identity, ids[:130], fields=field_digests(cache), lineage=cache.lineage)
    assert offer.held == 100
    saved = save(store, identity, ids[:130], cache, held=offer.held)
    assert (saved.start, saved.held) == (100, 130)
    used = made(plan)
    with store.restore(identity, ids, lineage=cache.lineage) as restored:
        assert restore_into(used, restored) == 130
    assert contents(used) == contents(cache)
    assert feed(used, 4) == feed(cache, 4)


def test_nothing_of_the_old_sequence_is_left_to_go_back_to(store: Store) -> None:
    plan = PLANS["everything"]
    identity, ids = identity_of(plan), prompt(31)
    cache, used = made(plan), made(plan)
    fill(cache, 30)
    fill(used, 90, seed=5)
    recurrent = next(layer for layer in used.own if isinstance(layer, RecurrentLayer))
    recurrent.speculate(np.ones(33, np.float32))
    assert any(layer.undo_rows for layer in used.own if isinstance(layer, BoundedLayer))
    assert any(layer.sealed for layer in used.own if isinstance(layer, NystromLayer)) and used.lineage != CLEAN
    save(store, identity, ids[:30], cache)
    with store.restore(identity, ids) as restored:
        assert restore_into(used, restored) == 0  # a narrow window of q8 with an open field
    fill(cache, 40)
    longer = prompt(71)
    save(store, identity, longer[:70], cache)
    with store.restore(identity, longer, lineage=cache.lineage) as restored:
        assert restore_into(used, restored) == 70
    assert recurrent.scratch is None
    (ring,) = (layer for layer in used.own if isinstance(layer, BoundedLayer))
    assert ring.undo_rows == 0
    with pytest.raises(CannotRewind):
        used.truncate_last(1)
    assert contents(used) == contents(cache)


@pytest.mark.parametrize(("name", "policy"), [("importance", Mass()), ("q8", Recent()), ("bf16", Recent())])
def test_a_cache_with_gaps_is_another_models(store: Store, name: str, policy: Policy) -> None:
    plan = PLANS[name]
    cache, used = ModelCache(plan, backend="reference", policy=policy), made(plan)
    fill(cache, 90)
    assert not has_gaps(cache) and cache.evict(40) and has_gaps(cache)
    fill(cache, 10)
    identity, ids = identity_of(plan, gaps=True), prompt(101)
    save(store, identity, ids[:100], cache)
    assert store.restore(identity, ids).usable == 0, "lineages do not mix"
    fill(used, 33, seed=4)
    assert store.restore(identity, ids[:100], lineage=cache.lineage).usable == 0, "it resumes at its own end only"
    with store.restore(identity, ids, lineage=cache.lineage) as restored:
        assert restore_into(used, restored) == 100
    assert contents(used) == contents(cache) and used.lineage == cache.lineage != CLEAN and has_gaps(used)
    assert feed(used, 16) == feed(cache, 16)
    assert contents(used) == contents(cache)


def test_a_field_that_is_still_open_stays_open_in_a_cache_with_gaps(store: Store) -> None:
    """Below 64 rows after an eviction it is fixed later, from the rows there are then."""
    plan = PLANS["q8"]
    cache, used = ModelCache(plan, backend="reference", policy=Recent()), made(plan)
    fill(cache, 60)
    cache.evict(40)
    fill(used, 100, seed=2)
    identity, ids = identity_of(plan, gaps=True), prompt(61)
    save(store, identity, ids[:60], cache)
    with store.restore(identity, ids, lineage=cache.lineage) as restored:
        assert restore_into(used, restored) == 60
    assert not field_digests(used) and contents(used) == contents(cache)
    assert feed(used, 30) == feed(cache, 30)
    assert field_digests(used) and contents(used) == contents(cache)


def test_what_cannot_be_saved_is_refused() -> None:
    cache = made(PLANS["everything"])
    fill(cache, 30)
    with pytest.raises(RecordError, match=r"layer 0 \(FULL\) is at position 30, the ids end at 29"):
        records_of(cache, 29)
    with pytest.raises(RecordError, match="31 tokens held of 30"):
        records_of(cache, 30, held=31)
    nystroem = made(PLANS["nystroem"])
    layer = nystroem.own[0]
    assert isinstance(layer, NystromLayer)
    fill(nystroem, 20)
    layer.failure = "layer 0: it failed"
    with pytest.raises(SealError, match="nothing to save"):
        records_of(nystroem, 20)
