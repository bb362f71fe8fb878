"""A cache that stands on restored rows where they were mapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.dispatch import Backend, kernels
from warmkv.kernels.errors import BackendMissing
from warmkv.kvstore.bridge import has_gaps, on_prefix, restore_into
from warmkv.kvstore.live.evict import Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import CannotRewind
from warmkv.schema.identity import PlaneRole

LENGTH = 100
NOT_ROWS = frozenset({"convolutions", "ring", "recurrent", "hybrid", "nystroem", "everything"})
#: Plans all of whose layers keep rows.
OF_ROWS = {name: plan for name, plan in PLANS.items() if name not in NOT_ROWS}
by_plan = pytest.mark.parametrize("name", OF_ROWS)


@pytest.fixture(params=["reference", "fast"])
def backend(request: pytest.FixtureRequest) -> Backend:
    wanted: Backend = request.param
    try:
        kernels(wanted)
    except BackendMissing as exc:
        pytest.skip(str(exc))
    return wanted


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def stored(store: Store, plan: ModelPlan, *lengths: int) -> Restored:
    """A prompt saved at these lengths, one segment each, then restored up to the last."""
    identity, ids, cache = identity_of(plan), prompt(lengths[-1] + 1), ModelCache(plan, backend="reference")
    for length in lengths:
        fill(cache, length - cache.position)
        save(store, identity, ids[:length], cache)
    found = store.restore(identity, ids, lineage=cache.lineage)
    assert found.usable == lengths[-1]
    return found


def attention(cache: ModelCache) -> list[AttentionLayer]:
    return [layer for layer in cache.own if isinstance(layer, AttentionLayer)]


def assert_alike(ours: list[bytes], theirs: list[bytes]) -> None:
    """Outputs over rows in several blocks are those over one, but for the order of a sum."""
    for mine, other in zip(ours, theirs, strict=True):
        wanted = np.frombuffer(other, np.float32)
        bound = 2e-6 * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(np.frombuffer(mine, np.float32), wanted, rtol=0, atol=bound)


def same_rows(ours: ModelCache, theirs: ModelCache) -> bool:
    return contents(ours, importance=False) == contents(theirs, importance=False)


@by_plan
def test_rows_are_attended_where_they_were_mapped(store: Store, name: str, backend: Backend) -> None:
    plan = OF_ROWS[name]
    lent, copied = (ModelCache(plan, backend=backend) for _ in range(2))
    fill(lent, 33, seed=8)
    with stored(store, plan, LENGTH) as restored:
        assert restore_into(copied, restored) == on_prefix(lent, restored) == LENGTH
        for layer in attention(lent):
            for role, plane in ((PlaneRole.KEY, layer.keys), (PlaneRole.VALUE, layer.values)):
                (block,) = restored.layers[layer.index].planes[role].blocks
                for head in range(plane.heads):
                    (mine,) = plane.blocks(head)
                    assert np.shares_memory(mine.codes, block) and not mine.codes.flags.writeable
                    if mine.scales is not None:
                        aligned = (4 * plane.format.groups(plane.size, keys=plane.keys) + plane.size) % 4 == 0
                        assert np.shares_memory(mine.scales, block) == aligned
    store.clear()  # nobody but the views keeps the memory now
    assert lent.memory().mapped == sum(
        plane.stored_bytes - (0 if plane.field is None else plane.field.nbytes)
        for layer in attention(copied)
        for plane in (layer.keys, layer.values)
    )
    assert same_rows(lent, copied)
    assert_alike(feed(lent, 20), feed(copied, 20))
    assert same_rows(lent, copied)


@by_plan
def test_cutting_into_the_prefix_and_going_on(store: Store, name: str) -> None:
    plan = OF_ROWS[name]
    lent, copied = (ModelCache(plan, backend="reference") for _ in range(2))
    with stored(store, plan, LENGTH) as restored:
        restore_into(copied, restored)
        on_prefix(lent, restored)
    full = not any(layer.window for layer in plan.layers)
    for back, more in ((0, 5), (3, 0), (30, 9)) if full else ((0, 6), (5, 2)):
        for cache in (lent, copied):
            cache.truncate_last(back)
            fill(cache, more, seed=5)
        assert same_rows(lent, copied)
    if not full:
        with pytest.raises(CannotRewind):
            lent.truncate_last(LENGTH // 2)
    assert_alike(feed(lent, 5), feed(copied, 5))


@pytest.mark.parametrize("name", ["f32", "f16", "q8", "q8v", "dead heads"])
def test_eviction_from_the_prefix_copies_and_leaves_it_as_it_was(store: Store, name: str) -> None:
    plan = OF_ROWS[name]
    lent, copied = (ModelCache(plan, backend="reference", policy=Recent()) for _ in range(2))
    restored = stored(store, plan, LENGTH)
    restore_into(copied, restored)
    on_prefix(lent, restored)
    before = [block.tobytes() for layer in restored.layers for plane in layer.planes.values() for block in plane.blocks]
    for layer in attention(lent):
        layer.keep([0, 1, 5, *range(60, LENGTH)])
    for layer in attention(copied):
        layer.keep([0, 1, 5, *range(60, LENGTH)])
    assert lent.memory().mapped == 0 and has_gaps(lent)
    assert same_rows(lent, copied)
    assert lent.evict(20) == copied.evict(20)
    assert_alike(feed(lent, 8), feed(copied, 8))
    assert same_rows(lent, copied)
    assert before == [block.tobytes() for layer in restored.layers for plane in layer.planes.values() for block in plane.blocks]
    restored.close()


@pytest.mark.parametrize("length", [60, 64])
def test_a_field_that_is_fixed_behind_the_prefix_copies_it(store: Store, length: int) -> None:
    plan = OF_ROWS["q8"]
    lent, twin = (ModelCache(plan, backend="reference") for _ in range(2))
    with stored(store, plan, length) as restored:
        assert on_prefix(lent, restored) == length
    fill(twin, length)
    assert lent.memory().mapped and not attention(lent)[0].keys.frozen
    assert_alike(feed(lent, 8), feed(twin, 8))
    assert not lent.memory().mapped and same_rows(lent, twin)


def test_a_window_that_moves_out_of_the_prefix_lets_it_go(store: Store) -> None:
    plan = OF_ROWS["window f16"]
    lent = ModelCache(plan, backend="reference")
    with stored(store, plan, LENGTH) as restored:
        on_prefix(lent, restored)
    sliding, full = attention(lent)
    assert (sliding.base, sliding.rows, sliding.position) == (LENGTH - 8, 8, LENGTH)
    fill(lent, 40)
    sliding.trim_window()
    assert sliding.memory().mapped == 0 and full.memory().mapped
    assert sliding.position == LENGTH + 40 and sliding.rows >= 9


@pytest.mark.parametrize("name", ["f32", "f16", "q8", "importance"])
def test_many_segments_are_attended_as_one(store: Store, name: str, backend: Backend) -> None:
    plan = OF_ROWS[name]
    lent, copied = (ModelCache(plan, backend=backend) for _ in range(2))
    with stored(store, plan, 64, 65, 70, 71, 90, 128) as restored:
        assert on_prefix(lent, restored) == restore_into(copied, restored) == 128
    assert name != "f32" or len(attention(lent)[0].keys.blocks(0)) == 6
    assert_alike(feed(lent, 6), feed(copied, 6))


def test_what_is_saved_from_the_prefix_is_what_is_saved_from_a_copy(store: Store) -> None:
    plan = OF_ROWS["q8"]
    lent, twin = (ModelCache(plan, backend="reference") for _ in range(2))
    restored = stored(store, plan, 64, 90)
    on_prefix(lent, restored)
    restored.close()
    fill(twin, 90)
    for cache in (lent, twin):
        fill(cache, 20)
    saved = save(store, identity_of(plan), prompt(110), lent)
    assert (saved.start, saved.held) == (90, 110)
    assert save(store, identity_of(plan), prompt(110), twin).duplicate


def test_weights_of_layers_stay(store: Store) -> None:
    plan = OF_ROWS["f32"]
    cache = ModelCache(plan, backend="reference")
    sinks = np.array([0.5, 1, 2, 3], np.float32)
    attention(cache)[0].sinks = sinks
    with stored(store, plan, 12) as restored:
        on_prefix(cache, restored)
        restore_into(cache, restored)
    kept = attention(cache)[0].sinks
    assert kept is not None and np.array_equal(kept, sinks)


def test_what_is_no_prefix_of_rows_is_copied(store: Store) -> None:
    plan = PLANS["everything"]
    lent, copied = (ModelCache(plan, backend="reference") for _ in range(2))
    with stored(store, plan, LENGTH) as restored:
        assert on_prefix(lent, restored) == restore_into(copied, restored) == LENGTH
    assert same_rows(lent, copied) and lent.lineage == copied.lineage
    assert_alike(feed(lent, 10), feed(copied, 10))
    missed = store.restore(identity_of(replace(plan, max_rows=5), seed=1), prompt(9))
    assert on_prefix(lent, missed) == restore_into(copied, missed) == 0
    assert same_rows(lent, copied)
