"""Captured steps: the host's counts follow what launches did on the device alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from devices_at_hand import KINDS, at_hand, brought

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live import captured
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import ring_rows
from warmkv.schema.errors import CapacityExceeded, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

SIZES = {"heads": 2, "kv_heads": 1, "key_size": 32, "value_size": 32, "importance": False}
WIDE = LayerPlan(LayerKind.FULL, key_format=RowFormat.Q8_0, value_format=RowFormat.Q5_1, **SIZES)
NEAR = LayerPlan(LayerKind.SLIDING, window=9, **SIZES)
STATE = LayerPlan(LayerKind.RECURRENT, state_size=5)
PLAN = ModelPlan((NEAR, WIDE, STATE))
CAPACITY = 6000


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield at_hand(request.param, monkeypatch)


def cache_on(device: Device, plan: ModelPlan = PLAN, capacity: int = CAPACITY) -> ModelCache:
    return ModelCache(plan, backend="reference", residence=Residence((device,), capacity=capacity, rings=True))


def rows(count: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    numbers = np.random.default_rng(seed)
    return [tuple(numbers.standard_normal((count, 1, 32), dtype=np.float32) for _ in "kv") for _ in range(2)]


def fed(cache: ModelCache, given: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Rows by calls of the host."""
    for layer, (k, v) in zip((layer for layer in cache.own if isinstance(layer, ResidentLayer)), given, strict=True):
        layer.append(k, v)
    for layer in cache.own:
        if isinstance(layer, ResidentRecurrentLayer):
            layer.step(len(given[0][0]))


def launched(cache: ModelCache, device: Device, given: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """What a captured step does when it runs again: nothing of the host's is asked or told."""
    for layer, pair in zip((layer for layer in cache.own if isinstance(layer, ResidentLayer)), given, strict=True):
        for plane, numbers in zip((layer.keys, layer.values), pair, strict=True):
            device.operations.append(plane.plane, brought(device, numbers), layer.counters)
        device.operations.advance(layer.counters, len(pair[0]))


def seen(cache: ModelCache) -> list[tuple[object, ...]]:
    """All that can be asked of its rows, and what counters on the device say."""
    found: list[tuple[object, ...]] = []
    for layer in cache.own:
        if isinstance(layer, ResidentLayer):
            packed = tuple(plane.packed().tobytes() for plane in (layer.keys, layer.values))
            assert layer.mirrors() == layer.expected_mirrors
            found.append((layer.position, layer.rows, *packed))
        else:
            found.append((layer.position,))
    return found


@pytest.mark.parametrize("before", [0, 1, 8, 9, 10, 33])
@pytest.mark.parametrize("steps", [1, 7])
def test_steps_that_ran_on_the_device_count_as_if_the_host_had_made_them(device: Device, before: int, steps: int) -> None:
    given = rows(before + steps, 1)
    ran, called = cache_on(device), cache_on(device)
    for cache in (ran, called):
        fed(cache, [(k[:before], v[:before]) for k, v in given])
    captured.prepare(ran, steps)
    for at in range(before, before + steps):
        step = [(k[at : at + 1], v[at : at + 1]) for k, v in given]
        launched(ran, device, step)
        fed(called, step)
    captured.ran(ran, steps)
    assert seen(ran) == seen(called)
    recurrent = ran.own[2]
    assert isinstance(recurrent, ResidentRecurrentLayer) and recurrent.position == before + steps


def test_a_ring_makes_room_before_and_never_while_launches_run(device: Device) -> None:
    ran = cache_on(device)
    room = ring_rows(NEAR.window, CAPACITY)
    given = rows(room, 2)
    for first in range(0, room, 1000):
        fed(ran, [(k[first : first + 1000], v[first : first + 1000]) for k, v in given])
    ring = ran.own[0]
    assert isinstance(ring, ResidentLayer) and ring.ring is not None and ring.ring.base == 0
    captured.prepare(ran, 3)
    base = ring.ring.base
    assert base > 0 and ring.position == room
    extra = rows(3, 3)
    for at in range(3):
        launched(ran, device, [(k[at : at + 1], v[at : at + 1]) for k, v in extra])
    captured.ran(ran, 3)
    assert ring.ring.base == base and ring.position == room + 3
    whole = np.concatenate([given[0][0], extra[0][0]])
    assert ring.keys.packed().tobytes() == whole[-ring.rows :].tobytes()
    assert ring.mirrors() == ring.expected_mirrors == (room + 3, base)


def test_what_was_not_prepared_for_is_refused_and_no_layer_follows(device: Device) -> None:
    cache = cache_on(device, capacity=40)
    fed(cache, rows(38, 4))
    before = seen(cache)
    for refused in (lambda: captured.prepare(cache, 3), lambda: captured.ran(cache, 3)):
        with pytest.raises(CapacityExceeded):
            refused()
    for wrong in (-1, 1.5, True):
        with pytest.raises(RecordError):
            captured.prepare(cache, wrong)  # type: ignore[arg-type]
    assert seen(cache) == before


def test_room_is_asked_for_before_a_step_is_begun(device: Device) -> None:
    cache = cache_on(device, capacity=40)
    fed(cache, rows(38, 4))
    before = seen(cache)
    cache.check_room(2)
    with pytest.raises(CapacityExceeded, match="layer 0"):
        cache.check_room(3)
    ModelCache(PLAN).check_room(10**6)
    assert seen(cache) == before


def test_a_freed_layer_neither_answers_nor_takes_memory_again(device: Device) -> None:
    cache = cache_on(device, capacity=40)
    given = rows(2, 5)
    fed(cache, given)
    cache.free()
    held = device.allocated_bytes
    layer = cache.own[1]
    assert isinstance(layer, ResidentLayer)
    q = np.zeros((2, 32), np.float32)
    for refused in (lambda: layer.append(*given[1]), lambda: layer.attend(q), lambda: layer.keys.packed()):
        with pytest.raises(RecordError, match="freed"):
            refused()
    assert device.allocated_bytes == held


def test_an_open_field_and_a_cache_of_the_host_are_refused(device: Device) -> None:
    fields = LayerPlan(LayerKind.FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F, **SIZES)
    cache = cache_on(device, ModelPlan((fields,)), 100)
    with pytest.raises(RecordError, match="field is open"):
        captured.prepare(cache, 1)
    numbers = np.random.default_rng(0).standard_normal((65, 1, 32), dtype=np.float32)
    layer = cache.own[0]
    assert isinstance(layer, ResidentLayer)
    layer.append(numbers, numbers)
    captured.prepare(cache, 1)
    with pytest.raises(UnsupportedError, match="host memory"):
        captured.prepare(ModelCache(PLAN), 1)
