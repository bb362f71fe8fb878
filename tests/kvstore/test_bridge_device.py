"""Caches on devices to records and back: the bytes that host memory would hold, uploaded and downloaded once."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_caches import (
    CAPACITY,
    GEMMA,
    HYBRID,
    MODES,
    WINDOW,
    grow,
    host,
    in_step,
    on,
    opens_late,
    pair,
    records,
    rows,
    state,
)  # fmt: skip
from devices_at_hand import KINDS, at_hand

import warmkv
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore.bridge import attention_of, field_digests, has_gaps, layer_specs, on_prefix, records_of, restore_into
from warmkv.kvstore.bridge.restoring import prepare
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing.live import contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import CapacityExceeded, RecordError, UnsupportedError
from warmkv.schema.identity import PlaneRole
from warmkv.schema.records import CLEAN

MODELS = {"gemma": GEMMA, "hybrid": HYBRID}
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 101)
ringed = pytest.mark.parametrize("rings", [False, True], ids=["flat", "rings"])


class Watched(HostDevice):
    """Notes what goes up and comes down."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads: list[np.ndarray] = []
        self.downloaded_bytes = 0

    def upload(self, host: np.ndarray, out: np.ndarray, offset: int = 0) -> None:
        self.uploads.append(host)
        super().upload(host, out, offset)

    def download(self, array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        self.downloaded_bytes += array.nbytes
        return super().download(array, out)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def stored(store: Store, plan: ModelPlan, length: int, cache: ModelCache | None = None) -> tuple[ModelCache, Restored]:
    """A cache of so many tokens, of the host unless another is given, and what came back of it."""
    cache, ids = cache or host(plan), prompt(length + 1)
    grow(cache, length - cache.position)
    save(store, identity_of(plan), ids[:length], cache)
    found = store.restore(identity_of(plan), ids, lineage=cache.lineage, verify=True)
    assert found.usable == length
    return cache, found


def near(mine: list[bytes], theirs: list[bytes]) -> None:
    for ours, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(np.frombuffer(ours, np.float32), np.frombuffer(expected, np.float32), rtol=1e-3, atol=1e-4)


@ringed
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_every_format_go_to_a_device_and_back(mode: str, rings: bool, store: Store) -> None:
    """Into caches that held others; what is stored then by their own devices is what host memory stores."""
    plan, used = pair(mode), None
    for length in LENGTHS if rings else LENGTHS[::2]:
        twin, restored = stored(store, plan, length)
        used = used or on(plan, rings=rings)
        before = state(used)
        with restored:
            taken = restore_into(used, restored)
        if opens_late(plan, length):
            assert (taken, state(used)) == (0, before)
            continue
        assert taken == used.position == length and in_step(used)
        assert contents(used) == contents(twin) and used.lineage == twin.lineage
        assert records(used, length) == records(twin, length) and field_digests(used) == field_digests(twin)
        near(feed(used, 2), feed(twin, 2))
        assert contents(used) == contents(twin) and in_step(used)


@ringed
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stages", [1, 2])
def test_models_go_between_hosts_and_devices_in_any_number_of_stages(name: str, stages: int, rings: bool, store: Store) -> None:
    plan = MODELS[name]
    devices = tuple(HostDevice(name=str(stage)) for stage in range(stages))
    for length, saved_on_device in ((101, False), (WINDOW + 3, True)):
        origin = on(plan, *devices, rings=rings) if saved_on_device else None
        cache, restored = stored(store, plan, length, origin)
        with restored:
            for other in (on(plan, *devices, rings=rings), on(plan, HostDevice(), rings=not rings), host(plan)):
                fill(other, 11, seed=3)
                assert restore_into(other, restored) == length
                assert contents(other) == contents(cache) and in_step(other)
                assert records(other, length) == records(cache, length)


@pytest.mark.parametrize("kind", KINDS)
@ringed
def test_every_device_takes_and_gives_the_same_bytes(
    kind: str, rings: bool, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:  # fmt: skip
    device = at_hand(kind, monkeypatch)
    plan = ModelPlan((rows("q8_0/q5_1", window=WINDOW), rows("q8"), rows("turboquant"), HYBRID.layers[0]))
    twin, restored = stored(store, plan, 77)
    cache = on(plan, device, rings=rings)
    with restored:
        for _ in range(2):
            assert restore_into(cache, restored) == 77
            assert records(cache, 77) == records(twin, 77) and in_step(cache)
            fill(cache, 3, seed=4)
        assert restore_into(cache, restored) == 77
    near(feed(cache, 2), feed(twin, 2))
    assert in_step(cache)


def test_the_same_plan_is_the_same_identity_wherever_rows_live() -> None:
    cache, twin = on(GEMMA), host(GEMMA)
    assert layer_specs(cache.plan) == layer_specs(twin.plan)
    assert attention_of(cache.plan, "warmkv cuda") != attention_of(twin.plan, "warmkv host")
    fill(cache, 5), fill(twin, 5)
    assert has_gaps(cache) is has_gaps(twin) is False and cache.lineage == twin.lineage == CLEAN


def test_what_is_saved_of_no_tokens_is_nothing() -> None:
    for plan in (GEMMA, HYBRID):
        assert records(on(plan, rings=True), 0) == records(host(plan), 0)


@pytest.mark.parametrize("length", [1, 19, 20, 21, 64, 65, 300])
def test_a_ring_that_went_round_is_saved_and_restored(length: int, store: Store) -> None:
    """However far: its rows begin in the middle of the sequence, behind padding after a restore."""
    plan = ModelPlan((rows("q8_0/q5_1", window=20), rows("f16", window=3), rows("fp8", window=1)))
    cache = on(plan, rings=True, capacity=64)
    _, restored = stored(store, plan, length, cache)
    twin = host(plan)
    grow(twin, length)
    assert records(cache, length) == records(twin, length)
    with restored:
        for other in (on(plan, rings=True, capacity=64), on(plan, capacity=64), host(plan)):
            assert restore_into(other, restored) == length
            assert contents(other) == contents(twin) and records(other, length) == records(twin, length)
    again = on(plan, rings=True, capacity=64)
    with store.restore(identity_of(plan), prompt(length + 1)) as found:
        restore_into(again, found)
    grow(again, 100), grow(twin, 100)
    assert contents(again) == contents(twin) and in_step(again)
    assert records(again, length + 100) == records(twin, length + 100)


@pytest.mark.parametrize("usable", [1, 63, 64, 70])
def test_a_hit_of_fewer_tokens_than_were_stored_fills_only_these(usable: int, store: Store) -> None:
    plan = ModelPlan((rows("q8_0/q5_1"), rows("tq3"), rows("bf16")))
    stored(store, plan, 100)[1].close()
    ids = np.concatenate([prompt(100)[:usable], prompt(30, seed=9)])
    cache, twin = on(plan), host(plan)
    fill(cache, 90, seed=2)
    with store.restore(identity_of(plan), ids) as restored:
        assert restored.usable == usable
        assert restore_into(cache, restored) == restore_into(twin, restored) == usable
    assert contents(cache) == contents(twin) and in_step(cache)
    assert [layer.rows for layer in cache.own if isinstance(layer, ResidentLayer)] == [usable] * 3


def test_writers_in_turn_send_only_what_the_store_has_not(store: Store) -> None:
    """And download only that: rows that are held stay where they are."""
    plan, ids = ModelPlan((rows("q8_0/q5_1"), rows("q8"), rows("f16", window=WINDOW))), prompt(131)
    identity, twin, device = identity_of(plan), host(plan), Watched()
    held = 0
    for length, writer in ((70, host(plan)), (100, on(plan, device)), (117, on(plan, device, rings=True)), (130, host(plan))):
        with store.restore(identity, ids[: length + 1]) as restored:
            assert restore_into(writer, restored) == held
        grow(writer, length - held), grow(twin, length - twin.position)
        offer = store.offer(identity, ids[:length], fields=field_digests(writer))
        assert offer.held == held
        before = device.downloaded_bytes
        found = records_of(writer, length, held=held)
        if writer.residence is not None:
            sent = sum(plane.rows.nbytes for record in found for plane in record.planes if plane.role is not PlaneRole.FIELD)
            token = sum(
                side.heads * side.format.row_bytes(side.size, keys=side.keys)
                for layer in writer.own[:2]
                if isinstance(layer, ResidentLayer)
                for side in (layer.keys, layer.values)
            )
            assert device.downloaded_bytes - before == sent == (length - held) * token + (WINDOW - 1) * 2 * 2 * (64 + 32)
        assert save(store, identity, ids[:length], writer, held=held).start == held
        assert contents(writer) == contents(twin)
        held = length


def test_rows_go_from_where_they_are_mapped_to_the_device_and_nowhere_else(store: Store) -> None:
    """One upload a block, and nothing but them; a cache that holds nothing needs no memory for it either."""
    plan, device = ModelPlan((rows("q8_0/q5_1", window=WINDOW), rows("q8"), rows("turboquant"), rows("bf16"))), Watched()
    _, restored = stored(store, plan, 100)
    cache = on(plan, device)
    device.uploads.clear()
    with restored:
        blocks = [
            block for layer in restored.layers for role in (PlaneRole.KEY, PlaneRole.VALUE) for block in layer.planes[role].blocks
        ]
        asked = device.allocations
        restore_into(cache, restored)
        (field,) = restored.layers[1].fields.values()
        moved = [upload for upload in device.uploads if upload.dtype == np.uint8 and upload.size]
        assert len(moved) == len(blocks)
        for upload, block in zip(moved, blocks, strict=True):
            assert np.shares_memory(upload, block) and upload.nbytes == block.nbytes
        others = sum(upload.nbytes for upload in device.uploads) - sum(upload.nbytes for upload in moved)
        assert others == np.asarray(field).nbytes and device.allocations == asked + 2
    assert sum(block.nbytes for block in blocks) == sum(
        plane.row_bytes * min(len(plane), WINDOW - 1 if layer.plan.window else 100)
        for layer in cache.own
        if isinstance(layer, ResidentLayer)
        for plane in (layer.keys, layer.values)
    )


def test_what_devices_saved_is_there_after_the_store_was_opened_again(tmp_path: Path) -> None:
    ids, expected = prompt(102), {}
    with open_store(tmp_path) as first:
        for name, plan in MODELS.items():
            cache = on(plan, HostDevice(), HostDevice(), rings=True)
            grow(cache, 101)
            assert save(first, identity_of(plan), ids[:101], cache, ack="disk").durable
            expected[name] = contents(cache)
    with open_store(tmp_path) as second:
        for name, plan in MODELS.items():
            for cache in (on(plan), on(plan, rings=True), host(plan)):
                with second.restore(identity_of(plan), ids, verify=True) as restored:
                    assert restored.usable == 101
                    assert restore_into(cache, restored) == 101
                assert contents(cache) == expected[name] and in_step(cache)


def test_a_restore_keeps_no_mapping_and_no_descriptor(store: Store) -> None:
    """What is on a device needs what it came from no more."""

    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as lines:
            return sum("warmkv:" in line for line in lines), len(os.listdir("/proc/self/fd"))

    cache, twin, seen = on(GEMMA), host(GEMMA), []
    grow(twin, 60)
    save(store, identity_of(GEMMA), prompt(60), twin, ack="disk")
    for _ in range(4):
        with store.restore(identity_of(GEMMA), prompt(61)) as found:
            assert restore_into(cache, found) == 60
        del found
        seen.append(held())
    assert seen[1:] == seen[:-1] and not seen[0][0]
    store.clear()
    assert contents(cache) == contents(twin)


def test_a_cache_with_gaps_goes_to_a_device_and_back(store: Store) -> None:
    plan = ModelPlan((rows("q8_0/q5_1"), rows("q8")))
    identity, ids = identity_of(plan, gaps=True), prompt(91)
    cache = on(plan)
    fill(cache, 90)
    for layer in cache.own:
        assert isinstance(layer, ResidentLayer)
        layer.keep([0, 1, 2, 3, *range(70, 90)])
    assert has_gaps(cache)
    cache.lineage = bytes(range(16))
    save(store, identity, ids[:90], cache)
    with store.restore(identity, ids, lineage=cache.lineage) as restored:
        for other in (on(plan), host(plan)):
            fill(other, 33, seed=4)
            assert restore_into(other, restored) == 90 and has_gaps(other) and in_step(other)
            assert contents(other) == contents(cache) and other.lineage == cache.lineage
            assert records(other, 90) == records(cache, 90)


def test_logits_come_back_parked_and_are_saved_again(store: Store) -> None:
    ids, logits = prompt(50), np.random.default_rng(1).standard_normal(77).astype(np.float32)
    cache = on(HYBRID)
    fill(cache, 50)
    cache.park_logits(logits)
    assert store.save(identity_of(HYBRID), ids, records_of(cache, 50), logits=cache.parked_logits).stored
    for other in (on(HYBRID, HostDevice(), HostDevice()), host(HYBRID)):
        with store.restore(identity_of(HYBRID), ids, logits=True) as restored:
            assert restore_into(other, restored) == 50
        assert other.parked_logits is not None and other.parked_logits.tobytes() == logits.tobytes()
        with store.restore(identity_of(HYBRID), [*ids, 3]) as restored:
            assert restore_into(other, restored) == 50
        assert other.parked_logits is None, "no logits came back with these"


def test_rows_on_a_device_are_not_attended_where_they_are_mapped(store: Store) -> None:
    _, restored = stored(store, GEMMA, 50)
    cache = on(GEMMA, HostDevice(name="a"), HostDevice(name="b"))
    fill(cache, 9, seed=2)
    before = state(cache)
    with restored, pytest.raises(UnsupportedError, match="mapped rows cannot be attended on a, b: restore_into uploads them"):
        on_prefix(cache, restored)
    assert state(cache) == before


def test_more_rows_than_there_is_room_for_are_refused_unchanged(store: Store) -> None:
    _, restored = stored(store, GEMMA, 50)
    cache = on(GEMMA, capacity=49)
    fill(cache, 9, seed=2)
    before = state(cache)
    with restored, pytest.raises(CapacityExceeded, match="layer 2 .*50 rows"):
        restore_into(cache, restored)
    assert state(cache) == before


def test_a_device_is_filled_through_a_daemon(short: Path) -> None:
    twin, ids = host(GEMMA), prompt(102)
    grow(twin, 101)
    with DaemonProcess(short) as served, warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
        cache = on(GEMMA, rings=True)
        grow(cache, 60)
        save(client, identity_of(GEMMA), ids[:60], cache)
        with client.restore(identity_of(GEMMA), ids) as restored:
            assert restore_into(other := on(GEMMA), restored) == 60
        grow(other, 41)
        save(client, identity_of(GEMMA), ids[:101], other, held=60)
        with client.restore(identity_of(GEMMA), ids) as restored:
            assert restore_into(last := on(GEMMA, rings=True, capacity=CAPACITY), restored) == 101
    assert contents(last) == contents(twin) and in_step(last)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="warmkv-") as path:
        yield Path(path)


@pytest.mark.parametrize("used", [0, 5, 60])
@ringed
def test_of_two_prepared_restores_the_first_never_brings_what_the_second_did(used: int, rings: bool, store: Store) -> None:
    """Though the second's rows were uploaded over its own."""
    twins = []
    for length, seed in ((31, 1), (40, 2)):
        twins.append(host(GEMMA))
        fill(twins[-1], length, seed=seed)
        logits = np.full(4, seed, np.float32)
        store.save(identity_of(GEMMA), prompt(length, seed), records_of(twins[-1], length), logits=logits)
    cache = on(GEMMA, rings=rings, capacity=100)
    fill(cache, used)
    with (
        store.restore(identity_of(GEMMA), prompt(31, 1), logits=True) as first,
        store.restore(identity_of(GEMMA), prompt(40, 2), logits=True) as second,
    ):
        ways = [prepare(cache, found) for found in (first, second)]
        assert ways[0] is not None and ways[1] is not None
        with pytest.raises(RecordError, match="other rows were brought"):
            ways[0]()
        assert cache.position == 0 and cache.parked_logits is None
        assert restore_into(cache, second) == 40
        assert contents(cache) == contents(twins[1]) and in_step(cache)
        assert cache.parked_logits is not None and cache.parked_logits.tolist() == [2] * 4
        other = host(GEMMA)
        ways = [prepare(other, found) for found in (first, second)]
        assert ways[0] is not None and ways[0]() == 31
        assert contents(other) == contents(twins[0]) and other.parked_logits is None
