"""Rows of another format on their way to a device: written anew a few at a time, when asked for, and told of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from device_caches import WINDOW, grow, host, in_step, on, pair, records, rows, state

import warmkv
from warmkv.kvstore.bridge import records_of, restore_into
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.plan import ModelPlan, TurboQuantPlan
from warmkv.kvstore.live.rows import written
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import contents, fill, identity_of, prompt, save
from warmkv.schema.errors import RecordError
from warmkv.schema.records import CLEAN

#: As stored, and as wanted.
CONVERSIONS = [
    ("f32", "q8_0/q5_1"), ("q8_0/q5_1", "f16"), ("f16", "q8"), ("q8", "fp8"), ("q8k", "q8"), ("q8", "q8v"),
    ("turboquant", "q8_0"), ("bf16", "turboquant"), ("fp8", "tq3"), ("q8_0/q5_1", "q8_0/q4_0"), ("q4_0", "q8"), ("q8_0", "q8_0"),
]  # fmt: skip
ROW_BYTES = 4 * 2 * 64
#: Of float32 rows at once: of the wider keys five.
PIECE_BYTES = 5 * ROW_BYTES


class Watched(HostDevice):
    """Notes how much goes up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def upload(self, host: np.ndarray, out: np.ndarray, offset: int = 0) -> None:
        self.sizes.append(host.nbytes)
        super().upload(host, out, offset)


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def stored(store: Store, plan: ModelPlan, length: int) -> Restored:
    cache, ids = host(plan), prompt(length + 1)
    grow(cache, length)
    save(store, identity_of(plan), ids[:length], cache)
    found = store.restore(identity_of(plan), ids, lineage=cache.lineage)
    assert found.usable == length
    return found


@pytest.mark.parametrize(("source", "target"), CONVERSIONS)
@pytest.mark.parametrize("rings", [False, True], ids=["flat", "rings"])
def test_written_anew_they_are_what_host_memory_makes_of_them(
    source: str, target: str, rings: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields included, which are fixed from the first rows there are."""
    for length in (101,) if rings else (3, 66 if "q8" in (source, target) else WINDOW + 1):
        with stored(store, pair(source), length) as restored:
            twin = host(pair(target))
            restore_into(twin, restored, convert=True)
            monkeypatch.setattr(written, "PIECE_BYTES", PIECE_BYTES)
            cache, other = on(pair(target), rings=rings, capacity=180), host(pair(target))
            fill(cache, 13, seed=2)
            before = state(cache)
            if source != target:
                with pytest.raises(RecordError, match="layer 0 was stored as .*convert=True"):
                    restore_into(cache, restored)
                assert state(cache) == before
            for each in (cache, other):
                assert restore_into(each, restored, convert=True) == length
            monkeypatch.undo()
        assert contents(cache) == contents(other) == contents(twin) and in_step(cache)
        assert cache.lineage == twin.lineage and (cache.lineage == CLEAN) == (source == target)
        assert records(cache, length) == records(twin, length)
        grow(cache, 66), grow(twin, 66)
        assert contents(cache) == contents(twin)


def test_other_rotations_are_other_formats(store: Store) -> None:
    plan = pair("turboquant")
    reseeded = ModelPlan(tuple(replace(layer, turboquant=TurboQuantPlan(6)) for layer in plan.layers))
    cache, twin = on(reseeded), host(reseeded)
    fill(cache, 5)
    before = state(cache)
    with stored(store, plan, 90) as restored:
        with pytest.raises(RecordError, match="convert=True"):
            restore_into(cache, restored)
        assert state(cache) == before
        assert restore_into(cache, restored, convert=True) == restore_into(twin, restored, convert=True) == 90
    assert contents(cache) == contents(twin) and cache.lineage == twin.lineage != CLEAN


@pytest.mark.parametrize("target", ["q8_0", "f32", "q8"])
def test_never_are_all_rows_there_as_numbers(target: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Watched()
    cache = on(ModelPlan((rows(target),)), device)
    read: list[int] = []
    original = written.GrowingRows.encode

    def encode(self: written.GrowingRows, numbers: np.ndarray, **about: int) -> object:
        read.append(numbers.nbytes)
        return original(self, numbers, **about)

    monkeypatch.setattr(written, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(written.GrowingRows, "encode", encode)
    with stored(store, ModelPlan((rows("f16"),)), 150) as restored:
        read.clear(), device.sizes.clear()
        restore_into(cache, restored, convert=True)
    lead = ROW_BYTES * 64 if target == "q8" else 0  # what a field is fixed from
    assert len(read) > 20 and max(read) == max(PIECE_BYTES, lead) and len(device.sizes) > 20
    (layer,) = cache.own
    assert isinstance(layer, ResidentLayer)
    assert max(device.sizes) <= max(PIECE_BYTES, 65 * layer.keys.row_bytes if lead else 0)


def test_of_a_window_no_more_rows_are_read_than_it_needs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    original = written.packed_of

    def packed_of(encoded: written.Encoded, plane: written.GrowingRows) -> object:
        counted.append(encoded.codes.shape[1])
        return original(encoded, plane)

    plan = ModelPlan((rows("q8_0", window=WINDOW),))
    with stored(store, ModelPlan((rows("f16", window=WINDOW),)), 150) as restored:
        cache = on(plan, rings=True)
        monkeypatch.setattr(written, "packed_of", packed_of)
        assert restore_into(cache, restored, convert=True) == 150
    assert sum(counted) == 2 * (WINDOW - 1)


@pytest.mark.parametrize("row", [0, 4, 5, 137])
def test_rows_that_the_format_cannot_hold_are_named_and_leave_all_as_it_was(
    row: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever pieces are cut."""
    plan, length, ids = ModelPlan((rows("f32"), rows("f32"))), 150, prompt(151)
    source = host(plan)
    for index, layer in enumerate(source.own):
        numbers = np.random.default_rng(index)
        keys, values = (numbers.standard_normal((length, 2, size)).astype(np.float32) for size in (64, 32))
        if index == 1:
            keys[row, 1, 7] = np.nan
        layer.append(keys, values)  # type: ignore[union-attr]
    save(store, identity_of(plan), ids[:length], source)
    cache = on(ModelPlan((rows("q8_0"), rows("q8_0"))))
    fill(cache, 9)
    before = state(cache)
    monkeypatch.setattr(written, "PIECE_BYTES", PIECE_BYTES)
    with store.restore(identity_of(plan), ids) as restored:
        for each in (cache, host(cache.plan)):
            with pytest.raises(RecordError, match=f"layer 1 .*keys, head 1, row {row}: NaN"):
                restore_into(each, restored, convert=True)
    assert state(cache) == before


def test_logits_of_other_rows_are_not_parked(store: Store) -> None:
    plan, ids = ModelPlan((rows("f32"),)), prompt(20)
    source = host(plan)
    fill(source, 20)
    source.park_logits(np.ones(9, np.float32))
    cache, twin = on(ModelPlan((rows("fp8"),))), on(plan)
    assert store.save(identity_of(plan), ids, records_of(source, 20), logits=source.parked_logits).stored
    with store.restore(identity_of(plan), ids, logits=True) as restored:
        assert restored.logits is not None
        assert restore_into(twin, restored) == restore_into(cache, restored, convert=True) == 20
    assert twin.parked_logits is not None and cache.parked_logits is None
