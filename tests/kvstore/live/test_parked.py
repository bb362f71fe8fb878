"""Logits that are parked come back as long as they are those of the last token."""

from __future__ import annotations

import numpy as np
import pytest
from devices_at_hand import at_hand, brought
from failing_device import FailingDevice

from warmkv.kvstore.live.checkpoint import checkpoint, rollback
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.parked import ParkedLogits
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.testing.live import fill
from warmkv.schema.errors import DeviceFault, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

SIZE = 9
PLAN = ModelPlan((LayerPlan(LayerKind.FULL, heads=2, kv_heads=1, key_size=32, value_size=32, importance=False),))


def row(seed: int, size: int = SIZE) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("device", [None, HostDevice()], ids=["host", "device"])
def test_a_row_is_copied_and_comes_back_at_its_position(device: HostDevice | None) -> None:
    parked, given = ParkedLogits(device), row(1)
    assert parked.at(0) is None and parked.allocated_bytes == 0
    given[0] = np.nan
    expected = given.tobytes()
    parked.park(given, 5)
    given[:] = 0
    found = parked.at(5)
    assert found is not None and found.tobytes() == expected and parked.allocated_bytes == 4 * SIZE
    assert parked.at(4) is parked.at(6) is None
    found[:] = 7
    again = parked.at(5)
    assert again is not None and again.tobytes() == expected
    parked.forget()
    assert parked.at(5) is None


@pytest.mark.parametrize("kind", ["stand-in", "cuda"])
def test_rows_of_the_device_and_of_the_host_are_parked_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = at_hand(kind, monkeypatch)
    parked = ParkedLogits(device)
    for position, given in enumerate((brought(device, row(0)), row(1), brought(device, row(2)))):
        parked.park(given, position)
        found = parked.at(position)
        assert found is not None and found.tobytes() == row(position).tobytes()
    with pytest.raises(RecordError, match="neither the device's nor the host's"):
        ParkedLogits().park(brought(device, row(1)), 1)


def test_memory_is_taken_once() -> None:
    device = HostDevice()
    parked = ParkedLogits(device)
    assert device.allocations == 0
    for position in range(5):
        parked.park(row(position), position)
    assert device.allocations == 1 and device.allocated_bytes == 4 * SIZE


@pytest.mark.parametrize("bad", [row(1)[:-1], row(1)[None], row(1).astype(np.float64), row(1)[:0], list(row(1)), None])
@pytest.mark.parametrize("device", [None, HostDevice()], ids=["host", "device"])
def test_other_arrays_are_refused_unchanged(bad: object, device: HostDevice | None) -> None:
    parked = ParkedLogits(device)
    parked.park(row(3), 2)
    with pytest.raises(RecordError, match="logits are"):
        parked.park(bad, 3)
    found = parked.at(2)
    assert found is not None and found.tobytes() == row(3).tobytes()


def test_refused_memory_parks_nothing() -> None:
    device = FailingDevice()
    device.fail("alloc")
    parked = ParkedLogits(device)
    with pytest.raises(OutOfMemory):
        parked.park(row(1), 1)
    assert parked.at(1) is None and device.allocated_bytes == 0


@pytest.mark.parametrize("resident", [False, True])
def test_logits_go_with_the_tokens_they_came_from(resident: bool) -> None:
    device = HostDevice()
    cache = ModelCache(PLAN, backend="reference", residence=Residence((device,), 64) if resident else None)
    fill(cache, 4)
    taken = checkpoint(cache)
    fill(cache, 2)
    cache.park_logits(row(1))
    found = cache.parked_logits
    assert found is not None and found.tobytes() == row(1).tobytes()
    fill(cache, 1)
    assert cache.parked_logits is None
    cache.truncate_last(1)
    assert cache.parked_logits is not None
    cache.truncate_last(1)
    fill(cache, 1, seed=1)
    assert cache.position == 6 and cache.parked_logits is None
    cache.park_logits(row(2))
    rollback(cache, taken, 1)
    fill(cache, 1, seed=2)
    assert cache.position == 6 and cache.parked_logits is None
    cache.park_logits(row(3))
    cache.clear()
    fill(cache, 6)
    assert cache.parked_logits is None


def test_after_a_copy_that_failed_nothing_is_parked() -> None:
    """What lies there may be of two rows."""
    device = FailingDevice()
    parked, given = ParkedLogits(device), row(2)
    parked.park(row(1), 5)
    device.fail("copy_into")
    with pytest.raises(DeviceFault):
        parked.park(given, 6)
    device.heal()
    assert parked.at(5) is parked.at(6) is None
    parked.park(given, 7)
    assert parked.at(7) is not None


def test_rows_are_parked_once_a_position_is_told() -> None:
    parked = ParkedLogits(HostDevice())
    parked.park(row(1), 5)
    put = parked.prepare(row(2))
    assert parked.at(5) is parked.at(6) is None
    put(6)
    found = parked.at(6)
    assert found is not None and found.tobytes() == row(2).tobytes()
    with pytest.raises(RecordError, match="logits are"):
        parked.prepare(row(3, SIZE + 1))
    assert parked.at(6) is not None, "refused before anything was forgotten"
