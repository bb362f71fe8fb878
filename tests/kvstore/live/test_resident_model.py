"""A whole model on devices: bytes as estimated, layers where they belong, and all that a cache of the host can do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from devices_at_hand import KINDS, at_hand
from failing_device import FailingDevice

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import records_of, restore_into
from warmkv.kvstore.live import snapshot
from warmkv.kvstore.live.checkpoint import can_rollback, checkpoint, free, prepare_rollback, refresh, rollback
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.geometry import model_geometry
from warmkv.kvstore.live.layers.kept import apply_all
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.parts import bytes_by_device
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.sharding import shard_model
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing.live import contents, feed, fill, identity_of, prompt, replay, save
from warmkv.schema.errors import (
    CannotRewind,
    CapacityExceeded,
    DeviceFault,
    OutOfMemory,
    RecordError,
    ReplayDue,
    UnsupportedError,
)  # fmt: skip
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

Q8, Q5, FP8 = RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.FP8


def rows(heads: int, kv_heads: int, size: int, keys: RowFormat = Q8, values: RowFormat = Q5, window: int = 0) -> LayerPlan:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    return LayerPlan(
        kind, heads=heads, kv_heads=kv_heads, key_size=size, value_size=size, key_format=keys, value_format=values, window=window,
        importance=False,
    )  # fmt: skip


def shared(layer: int) -> LayerPlan:
    return LayerPlan(LayerKind.SHARED, shared_with=layer)


def gemma() -> ModelPlan:
    """Five windowed layers to each global one, of which the last ones share with the last that have rows."""
    windowed, wide = rows(8, 4, 64, window=512), rows(8, 2, 128, FP8, FP8)
    own = (*(windowed,) * 5, wide) * 2
    return ModelPlan((*own, *(shared(10),) * 3, shared(11)))


def qwen_next() -> ModelPlan:
    delta = LayerPlan(LayerKind.RECURRENT, state_size=8 * 128 * 128, conv=ConvPlan(2048, taps=3, history=0))
    return ModelPlan((delta, delta, delta, rows(16, 2, 256)) * 2 + (rows(16, 2, 256),), mtp=1)


def step() -> ModelPlan:
    """One of eight ranks."""
    whole = ModelPlan((rows(64, 8, 128), rows(64, 8, 128, window=512), rows(64, 8, 128, window=512)))
    return shard_model(whole, 3, 8)


#: By name a plan, the capacity it is allocated with here, and whether windows are rings.
MODELS = {
    "llama 8b": (ModelPlan.uniform(32, rows(32, 8, 128)), 40, False),
    "gemma flat": (gemma(), 96, False),
    "gemma rings": (gemma(), 6000, True),
    "qwen next": (qwen_next(), 33, False),
    "step": (step(), 8192, True),
}
SMALL = ModelPlan(
    (
        rows(4, 2, 32), LayerPlan(LayerKind.RECURRENT, state_size=9, conv=ConvPlan(3, taps=2, history=0)),
        rows(4, 2, 32, RowFormat.F16, RowFormat.F16, window=6), shared(2), LayerPlan(LayerKind.RECURRENT, state_size=5),
        rows(4, 2, 64, FP8, RowFormat.Q4_0),
    ),
    mtp=1,
)  # fmt: skip
PLAIN = ModelPlan((rows(4, 2, 32, RowFormat.F32, RowFormat.F32), rows(4, 2, 32, RowFormat.F16, RowFormat.F16), rows(4, 2, 32)))
CAPACITY = 48


@pytest.fixture
def devices() -> tuple[FailingDevice, FailingDevice]:
    return FailingDevice(name="a"), FailingDevice(name="b")


@pytest.fixture
def store(tmp_path: object) -> Iterator[Store]:
    with open_store(tmp_path) as opened:  # type: ignore[arg-type]
        yield opened


def on(plan: ModelPlan, *devices: Device, cut: int = 2, rings: bool = False, capacity: int = CAPACITY) -> ModelCache:
    cuts = (cut,) if len(devices) > 1 else ()
    return ModelCache(plan, backend="reference", residence=Residence(devices or (HostDevice(),), capacity, cuts, rings))


def host(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def state(cache: ModelCache) -> tuple[object, ...]:
    mirrors = [layer.mirrors() for layer in cache.own if isinstance(layer, ResidentLayer)]
    return cache.lineage, cache.position, contents(cache), mirrors


def in_step(cache: ModelCache) -> bool:
    """Whether every layer's mirrors say what the host knows."""
    return all(layer.mirrors() == layer.expected_mirrors for layer in cache.own if isinstance(layer, ResidentLayer))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_allocated_is_what_was_estimated(name: str, stages: int) -> None:
    plan, capacity, rings = MODELS[name]
    devices = tuple(HostDevice(name=str(stage)) for stage in range(stages))
    residence = Residence(devices, capacity, (1,) if stages > 1 else (), rings)
    if name.startswith("gemma") and stages > 1:
        residence = replace(residence, cuts=(4,))
    estimate = bytes_by_device(plan, residence)
    cache = ModelCache(plan, backend="reference", residence=residence)
    assert [device for device, _ in estimate] == [part.device for part in cache.parts] == list(devices)
    for (_, expected), part in zip(estimate, cache.parts, strict=True):
        assert part.allocated_bytes == part.device.allocated_bytes == expected
    geometry = model_geometry(plan, capacity, rings=rings)
    assert sum(part.allocated_bytes - part.workspace.allocated_bytes for part in cache.parts) == geometry.allocated_bytes
    assert cache.memory().total == sum(layer.allocated_bytes for layer in geometry.layers)


def test_a_step_like_rank_takes_the_bytes_of_its_source() -> None:
    plan, capacity, _ = MODELS["step"]
    cache = ModelCache(plan, residence=Residence((HostDevice(),), capacity, rings=True))
    flat, ring, other = (layer for part in cache.parts for layer in part.layers)
    assert flat.allocated_bytes == 232 * capacity + 20 and ring.allocated_bytes == other.allocated_bytes == 232 * 5151 + 20
    assert cache.parts[0].bases is not None and cache.parts[0].bases.nbytes == 8
    whole = model_geometry(plan, 262_144, rings=True)
    assert [layer.allocated_bytes for layer in whole.layers] == [232 * 262_144 + 20, 232 * 5151 + 20, 232 * 5151 + 20]


def test_each_device_has_its_layers_and_nothing_else() -> None:
    devices = tuple(HostDevice(name=str(stage)) for stage in range(3))
    cache = ModelCache(SMALL, residence=Residence(devices, CAPACITY, (1, 4)))
    assert [[layer.index for layer in part.layers] for part in cache.parts] == [[0], [1, 2], [4, 5]]
    assert all(layer.device is part.device for part in cache.parts for layer in part.layers)
    assert [layer.index for layer in cache.own] == [0, 1, 2, 4, 5] and cache.layers[3] is cache.layers[2]
    kinds = [ResidentLayer, ResidentRecurrentLayer, ResidentLayer, ResidentLayer, ResidentRecurrentLayer, ResidentLayer]
    assert [type(layer) for layer in cache.layers] == kinds


def test_a_device_of_two_stages_has_one_workspace() -> None:
    device = HostDevice()
    (part,) = on(SMALL, device, device).parts
    assert part.allocated_bytes == device.allocated_bytes == on(SMALL, HostDevice()).parts[0].allocated_bytes


@pytest.mark.parametrize("at", [0, 1])
def test_refused_memory_on_one_device_leaves_none_on_any(at: int, devices: tuple[FailingDevice, FailingDevice]) -> None:
    calls = 0
    while True:
        devices[at].fail("alloc", calls)
        try:
            on(SMALL, *devices)
        except OutOfMemory:
            assert [device.allocated_bytes for device in devices] == [0, 0]
            calls += 1
        else:
            break
    assert calls >= 8


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (ModelPlan((PLAIN.layers[0], replace(PLAIN.layers[0], importance=True))), UnsupportedError),
        (ModelPlan((PLAIN.layers[0], LayerPlan(LayerKind.CONV, conv=ConvPlan(3)))), UnsupportedError),
        (ModelPlan((PLAIN.layers[0], replace(PLAIN.layers[0], alive=(True, False)))), UnsupportedError),
        (ModelPlan((PLAIN.layers[0],)), RecordError),
    ],
)
def test_what_cannot_live_there_is_refused_before_anything_is_allocated(
    plan: ModelPlan, error: type[Exception], devices: tuple[FailingDevice, FailingDevice]
) -> None:
    with pytest.raises(error):
        on(plan, *devices, cut=1)
    assert [device.allocations for device in devices] == [0, 0]


@pytest.mark.parametrize("length", [0, 1, 17])
def test_holds_and_answers_what_a_cache_of_the_host_does(length: int) -> None:
    cache, twin = on(PLAIN, HostDevice(), HostDevice(), cut=1), host(PLAIN)
    fill(cache, length), fill(twin, length)
    for _ in range(3):
        for mine, theirs in zip(feed(cache, 1), feed(twin, 1), strict=True):
            np.testing.assert_allclose(np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), rtol=1e-4, atol=1e-5)
    assert contents(cache) == contents(twin) and cache.position == length + 3 and in_step(cache)
    assert cache.lineage == CLEAN and not cache.needs_eviction


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_tokens_are_taken_back_in_all_layers(count: int) -> None:
    cache, twin = on(PLAIN), host(PLAIN)
    fill(cache, 9), fill(twin, 9 - count)
    cache.truncate_last(count)
    assert contents(cache) == contents(twin) and in_step(cache)
    cache.clear()
    assert cache.position == 0 and in_step(cache) and contents(cache) == contents(host(PLAIN))


def test_recurrent_layers_keep_the_others_from_going_back() -> None:
    cache = on(SMALL)
    fill(cache, 9)
    before = state(cache)
    with pytest.raises(CannotRewind, match="layer 1"):
        cache.truncate_last(1)
    assert state(cache) == before


def test_eviction_keeps_the_newest_rows() -> None:
    cache = on(PLAIN)
    fill(cache, 20)
    assert cache.evict(8) == 36 and cache.position == 20 and cache.lineage != CLEAN and in_step(cache)
    assert [layer.rows for layer in cache.own if isinstance(layer, ResidentLayer)] == [8, 8, 8]


def test_a_full_buffer_refuses_more_and_keeps_what_it_has() -> None:
    cache = on(PLAIN, capacity=9)
    fill(cache, 9)
    before = state(cache)
    with pytest.raises(CapacityExceeded):
        fill(cache, 1)
    assert state(cache) == before


def test_the_layer_wire_is_of_host_memory() -> None:
    cache = on(ModelPlan(PLAIN.layers[:1]))
    for attempt in (cache.export_layers, lambda: cache.import_layers([b""])):
        with pytest.raises(UnsupportedError, match="the layer wire is of caches in host memory"):
            attempt()


def test_a_snapshot_comes_back_on_devices_and_on_the_host() -> None:
    plan = ModelPlan((*PLAIN.layers, SMALL.layers[1]))
    cache = on(plan)
    fill(cache, 9)
    expected, taken = contents(cache), snapshot.take(cache)
    fill(cache, 3, seed=1)
    snapshot.prepare(cache, taken)()
    assert contents(cache) == expected and in_step(cache)
    other = host(plan)
    snapshot.prepare(other, taken)()
    assert contents(other) == expected


@pytest.mark.parametrize("name", ["plain", "small"])
def test_what_devices_save_the_host_restores_and_the_other_way_round(name: str, store: Store) -> None:
    plan = {"plain": PLAIN, "small": SMALL}[name]
    ids, identity = prompt(9), identity_of(plan)
    cache, twin = on(plan, HostDevice(), HostDevice()), host(plan)
    fill(cache, 9), fill(twin, 9)
    assert contents(cache) == contents(twin)
    save(store, identity, ids, cache)
    for other in (host(plan), on(plan, HostDevice(), HostDevice())):
        with store.restore(identity, [*ids, 1]) as restored:
            assert restore_into(other, restored) == 9
        assert contents(other) == contents(twin) and in_step(other)
    store.forget(identity, ids)


def test_parked_logits_are_saved_with_the_last_token(store: Store) -> None:
    ids, identity = prompt(9), identity_of(SMALL)
    device = HostDevice()
    cache = on(SMALL, device)
    fill(cache, 9)
    row = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    cache.park_logits(row)
    expected, asked = row.copy(), device.allocations
    row[:] = 0
    cache.park_logits(expected)
    assert device.allocations == asked and cache.parked_logits is not None
    saved = store.save(identity, ids, records_of(cache, 9), logits=cache.parked_logits)
    assert saved.stored
    with store.restore(identity, ids, logits=True) as restored:
        assert restored.logits is not None and np.array_equal(np.asarray(restored.logits).reshape(-1), expected)
    fill(cache, 1)
    assert cache.parked_logits is None


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("accepted", range(4))
def test_rollback_leaves_what_was_accepted(length: int, accepted: int) -> None:
    cache, twin = on(SMALL, HostDevice(), HostDevice()), host(SMALL)
    fill(cache, length), fill(twin, length + accepted)
    taken = checkpoint(cache)
    feed(cache, 3)
    assert can_rollback(cache, taken, accepted)
    rollback(cache, taken, accepted)
    assert cache.position == length + accepted and cache.replay_due == range(length, length + accepted) and in_step(cache)
    if accepted:
        with pytest.raises(ReplayDue):
            records_of(cache, cache.position)
    replay(cache)
    assert contents(cache) == contents(twin)
    records_of(cache, cache.position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_its_way_on_every_device(kind: str, monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    first = at_hand(kind, monkeypatch)
    second = first if kind == "stand-in" else at_hand(kind, monkeypatch)  # of which there is one at a time
    attention = rows(4, 2, 32)
    plan = ModelPlan(
        (attention, SMALL.layers[1], replace(attention, kind=LayerKind.SLIDING, window=40), shared(2), attention), mtp=1
    )
    cache, twin, ids, identity = on(plan, first, second), host(plan), prompt(9), identity_of(plan)
    fill(cache, 6), fill(twin, 6)
    taken = checkpoint(cache)
    asked = first.allocations, second.allocations
    for accepted in (2, 0, 1):
        refresh(taken, cache)
        mine, theirs = (np.concatenate([np.frombuffer(out, np.float32) for out in feed(each, 3)]) for each in (cache, twin))
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-4)
        rollback(cache, taken, accepted)
        assert in_step(cache)
        replay(cache)
        twin = host(plan)
        fill(twin, taken.position + accepted)
        assert contents(cache) == contents(twin)
    assert (first.allocations, second.allocations) == asked and cache.position == 9
    save(store, identity, ids, cache)
    other = on(plan, first, second)
    with store.restore(identity, [*ids, 1]) as restored:
        assert restore_into(other, restored) == 9
    assert contents(other) == contents(twin) and in_step(other)
    other.clear()
    assert other.position == 0 and in_step(other) and contents(other) == contents(host(plan))


def test_rounds_ask_devices_for_nothing() -> None:
    devices = HostDevice(), HostDevice()
    cache = on(SMALL, *devices)
    fill(cache, 3)
    taken = checkpoint(cache)
    asked = [device.allocations for device in devices]
    assert taken.nbytes == sum(
        device.allocated_bytes - part.allocated_bytes for device, part in zip(devices, cache.parts, strict=True)
    )
    for seed in range(6):
        refresh(taken, cache)
        feed(cache, 3, seed)
        rollback(cache, taken, seed % 3)
        replay(cache, seed)
    assert [device.allocations for device in devices] == asked and cache.position == 3 + 0 + 1 + 2 + 0 + 1 + 2


def test_refused_memory_makes_no_checkpoint_on_any_device(devices: tuple[FailingDevice, FailingDevice]) -> None:
    cache = on(SMALL, *devices, cut=2)
    fill(cache, 3)
    held = [device.allocated_bytes for device in devices]
    for at, fails in ((0, 3), (1, 1)):
        for call in range(fails):
            devices[at].fail("copy", call)
            with pytest.raises(OutOfMemory) as refused:  # which keeps what was on the way there
                checkpoint(cache)
            assert [device.allocated_bytes for device in devices] == held and refused.traceback
            devices[at].heal()


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("method", ["copy_into", "set_one"])
def test_a_fault_on_one_device_rolls_no_layer_back(at: int, method: str, devices: tuple[FailingDevice, FailingDevice]) -> None:
    cache = on(SMALL, *devices, cut=2)
    fill(cache, 9)
    taken = checkpoint(cache)
    fill(cache, 3)
    before, calls = state(cache), 0
    while True:
        devices[at].fail(method, calls)
        try:
            rollback(cache, taken, 1)
        except DeviceFault:
            devices[at].heal()
            assert state(cache)[:3] == before[:3] and not cache.replay_due
            calls += 1
        else:
            break
    devices[at].heal()
    assert calls >= 1 and cache.replay_due == range(9, 10) and in_step(cache)


@pytest.mark.parametrize("at", [0, 1])
def test_a_fault_on_one_device_takes_no_token_back(at: int, devices: tuple[FailingDevice, FailingDevice]) -> None:
    cache = on(PLAIN, *devices, cut=1)
    fill(cache, 9)
    before = state(cache)
    devices[at].fail("set_one")
    with pytest.raises(DeviceFault):
        cache.truncate_last(2)
    devices[at].heal()
    assert state(cache) == before and in_step(cache)


def test_a_checkpoint_whose_window_was_lapped_is_refused_unchanged() -> None:
    window = rows(2, 1, 32, window=8)
    plan = ModelPlan((window, LayerPlan(LayerKind.RECURRENT, state_size=3)))
    cache = on(plan, rings=True, capacity=20_000)
    layer = cache.own[0]
    assert isinstance(layer, ResidentLayer) and layer.ring is not None

    def take(count: int) -> None:
        numbers = np.random.default_rng(layer.position).standard_normal((2, count, 1, 32)).astype(np.float32)
        layer.append(*numbers)
        for recurrent in cache.own[1:]:
            assert isinstance(recurrent, ResidentRecurrentLayer)
            recurrent.step(count)

    take(1000)
    taken = checkpoint(cache)
    take(3000), take(1000)
    assert layer.ring.base > 1000
    before = state(cache)
    assert not can_rollback(cache, taken, 0) and can_rollback(cache, taken, 4000)
    with pytest.raises(CannotRewind, match="layer 0 .SLIDING."):
        rollback(cache, taken, 0)
    assert state(cache) == before and in_step(cache)


def test_blocks_behind_the_trunk_live_where_it_ends() -> None:
    devices = HostDevice(), HostDevice()
    cache = on(SMALL, *devices, cut=1)
    assert cache.own[-1].index == 5 and cache.parts[1].layers[-1] is cache.own[-1]
    assert SMALL.trunk == 5


def test_a_cache_that_is_freed_leaves_nothing_on_the_books() -> None:
    devices = HostDevice(), HostDevice()
    cache = on(SMALL, *devices, rings=True)
    fill(cache, 3)
    cache.park_logits(np.zeros(4, np.float32))
    taken = checkpoint(cache)
    free(taken, cache)
    assert not can_rollback(cache, taken, 0)
    cache.free()
    assert [device.allocated_bytes for device in devices] == [0, 0] and cache.own


def test_caches_are_taken_back_together_or_not_at_all(devices: tuple[FailingDevice, FailingDevice]) -> None:
    caches = on(PLAIN, devices[0]), on(PLAIN, devices[1])
    for cache in caches:
        fill(cache, 5)
    marks = [checkpoint(cache) for cache in caches]
    for cache in caches:
        fill(cache, 3)
    before = [state(cache) for cache in caches]
    parts = [prepare_rollback(cache, mark, 1) for cache, mark in zip(caches, marks, strict=True)]
    devices[1].fail("set_one")
    with pytest.raises(DeviceFault):
        apply_all([change for changes, _ in parts for change in changes])
    devices[1].heal()
    assert [state(cache) for cache in caches] == before
    parts = [prepare_rollback(cache, mark, 1) for cache, mark in zip(caches, marks, strict=True)]
    apply_all([change for changes, _ in parts for change in changes])
    for _, finish in parts:
        finish()
    assert [cache.position for cache in caches] == [6, 6] and all(map(in_step, caches))
