"""Devices that fail in the middle of a restore: what was there stays, or nothing does; never a mixture."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_caches import GEMMA, HYBRID, WINDOW, grow, host, in_step, on, rows, state
from failing_device import FAULTS, FailingDevice

import warmkv
from warmkv.kvstore.bridge import records_of, restore_into
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import DeviceFault, LiveError, OutOfMemory, RecordError
from warmkv.schema.records import CLEAN

FIELDS = ModelPlan((rows("q8_0/q5_1", window=WINDOW), rows("q8"), rows("fp8")))
PLANS = {"gemma": GEMMA, "hybrid": HYBRID, "fields": FIELDS}
LENGTH = 90


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def stored(store: Store, plan: ModelPlan) -> tuple[ModelCache, Restored]:
    cache, ids = host(plan), prompt(LENGTH + 1)
    grow(cache, LENGTH)
    save(store, identity_of(plan), ids[:LENGTH], cache)
    return cache, store.restore(identity_of(plan), ids)


def attempts(method: str, cache: ModelCache, device: FailingDevice, restored: Restored) -> Iterator[type[Exception]]:
    """Restores that fail in each call of ``method`` in turn, then one that does not."""
    for call in range(200):
        device.fail(method, call)
        try:
            restore_into(cache, restored)
        except LiveError as exc:
            device.heal()
            yield type(exc)
        else:
            device.heal()
            return
    raise AssertionError("it fails for ever")


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize(("used", "rings"), [(0, True), (30, False), (100, True)])
def test_what_fails_before_anything_moved_leaves_all_as_it_was(name: str, at: int, used: int, rings: bool, store: Store) -> None:
    """Where the new rows fit behind the old ones, and where they are brought into memory of their own."""
    twin, restored = stored(store, PLANS[name])
    devices = FailingDevice(name="a"), FailingDevice(name="b")
    cache = on(PLANS[name], *devices, rings=rings)
    grow(cache, used, seed=7)
    before, held = state(cache), [device.allocated_bytes for device in devices]
    failed = {method: 0 for method in ("alloc", "upload")}
    with restored:
        for method in failed:
            for error in attempts(method, cache, devices[at], restored):
                assert error is FAULTS[method] and state(cache) == before
                assert [device.allocated_bytes for device in devices] == held
                failed[method] += 1
            assert contents(cache) == contents(twin) and in_step(cache)
            cache.clear()
            grow(cache, used, seed=7)
            assert state(cache) == before
    assert failed["upload"] > 1 and (failed["alloc"] or used < 100 or not at)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("method", ["copy_into", "set_one"])
def test_a_device_that_breaks_while_rows_move_leaves_an_empty_cache(name: str, at: int, method: str, store: Store) -> None:
    """Layers of two sequences would answer, and wrongly."""
    twin, restored = stored(store, PLANS[name])
    devices = FailingDevice(name="a"), FailingDevice(name="b")
    cache, failed = on(PLANS[name], *devices, cut=2 if name == "hybrid" else 1, rings=True), 0
    grow(cache, 30, seed=7)
    cache.lineage = bytes(range(16))
    with restored:
        for error in attempts(method, cache, devices[at], restored):
            failed += 1
            assert error is DeviceFault and cache.position == 0 and cache.lineage == CLEAN
            assert not any(layer.ring.valid_from for layer in cache.own if isinstance(layer, ResidentLayer) and layer.ring)
            cache.clear()
            assert in_step(cache) and contents(cache) == contents(on(PLANS[name], rings=True))
            grow(cache, 30, seed=7)
            cache.lineage = bytes(range(16))
    assert failed and contents(cache) == contents(twin) and in_step(cache)


def test_answers_after_a_failed_restore_are_those_of_before(store: Store) -> None:
    """Though other rows lie behind what is visible."""
    _, restored = stored(store, FIELDS)
    device = FailingDevice()
    cache, twin = on(FIELDS, device), on(FIELDS)
    grow(cache, 30, seed=7), grow(twin, 30, seed=7)
    with restored:
        device.fail("upload", 5)
        with pytest.raises(DeviceFault):
            restore_into(cache, restored)
        device.heal()
    for mine, theirs in zip(feed(cache, 4, seed=7), feed(twin, 4, seed=7), strict=True):
        assert mine == theirs
    assert contents(cache) == contents(twin)


def test_refused_memory_is_refused_unchanged_though_others_had_theirs(store: Store) -> None:
    _, restored = stored(store, HYBRID)
    devices = FailingDevice(name="a"), FailingDevice(name="b")
    cache = on(HYBRID, *devices, capacity=100)
    fill(cache, 95, seed=7)
    before, held = state(cache), [device.allocated_bytes for device in devices]
    devices[1].limit_bytes = held[1] + 10
    with restored, pytest.raises(OutOfMemory, match="b: "):
        restore_into(cache, restored)
    assert state(cache) == before and [device.allocated_bytes for device in devices] == held


def test_logits_of_another_vocabulary_are_refused_before_anything_changes(store: Store) -> None:
    ids, logits = prompt(20), np.ones(9, np.float32)
    source = host(FIELDS)
    fill(source, 20)
    assert store.save(identity_of(FIELDS), ids, records_of(source, 20), logits=logits).stored
    cache = on(FIELDS)
    fill(cache, 5, seed=3)
    cache.park_logits(np.zeros(8, np.float32))
    before = state(cache)
    with store.restore(identity_of(FIELDS), ids, logits=True) as restored, pytest.raises(RecordError, match="logits are"):
        restore_into(cache, restored)
    assert state(cache) == before and cache.parked_logits is not None
