"""What an answer relies on is there: acknowledgements, pins and saves cover windows and states too."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.rows import LayerRows, PlaneRows, stored_shape
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing import check_restore, mixed_identity, model_logits, save
from warmkv.kvstore.testing.samples import layer_of, sliding
from warmkv.schema import messages as m
from warmkv.schema.errors import ColdFull, OfferAgain, RecordError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec

OpenStore = Callable[..., Store]
WINDOWED = mixed_identity(layer_of(LayerKind.FULL), sliding(16))
HYBRID = mixed_identity(layer_of(LayerKind.FULL), layer_of(LayerKind.RECURRENT))
FIRST = list(range(100, 200))
BRANCH = [*FIRST[:60], 1, 2, 3, 4, 5]
FURTHER = [*BRANCH, 7, 8, 9]


def records(store: Store) -> list[Record]:
    return list(store.engine.index.records.values())


def test_a_disk_acknowledgement_covers_windows_that_failed_to_be_written_before(
    open_store_with: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, WINDOWED, FIRST)
    store.flush(60)
    cold = store.engine.cold
    assert cold is not None
    write, failures = cold.write, [ColdFull("no room for a moment")]

    def failing(*args: Any) -> None:
        if failures:
            raise failures.pop()
        write(*args)

    monkeypatch.setattr(cold, "write", failing)
    save(store, WINDOWED, BRANCH)
    store.flush(60)
    assert any(record.cold == Cold.ABSENT for record in records(store)), "nothing failed"
    assert save(store, WINDOWED, FURTHER, ack="disk").durable
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    check_restore(open_store_with(tmp_path / "killed"), WINDOWED, [*FURTHER, 0], len(FURTHER))


def test_the_segment_with_all_rows_is_built_on_before_one_with_a_window(open_store_with: OpenStore) -> None:
    store = open_store_with()
    for ids in (FIRST, BRANCH, FURTHER):
        save(store, WINDOWED, ids)
    for record in records(store):
        assert record.parent is None or record.parent.complete


def test_what_an_offer_reports_as_held_is_not_evicted_for_its_room(open_store_with: OpenStore) -> None:
    ids = list(range(200, 208))
    store = open_store_with(warm_bytes=44 << 10)
    save(store, HYBRID, ids)
    save(store, HYBRID, [900] * 8)
    try:
        saved = save(store, HYBRID, ids, logits=model_logits(HYBRID, ids))
    except Exception:  # noqa: BLE001 - no room is an answer; a lie is not
        return
    assert saved.stored and store.match(HYBRID, [*ids, 1]).usable == 8


def test_a_state_that_goes_between_offer_and_acknowledgement_is_sent_again(open_store_with: OpenStore) -> None:
    store = open_store_with(True)
    ids = list(range(200, 208))
    save(store, HYBRID, ids)
    session: Any = store._session
    offer, losses = session.offer, [1]

    def losing(request: m.Offer) -> m.Offered:
        answer: m.Offered = offer(request)
        if losses and losses.pop():
            state = next(record for record in records(store) if record.is_state)
            with store.engine.index.changed:
                store.engine.removal._drop(state)
            store.engine.removal._finish([state])
        return answer

    session.offer = losing
    assert save(store, HYBRID, ids, ack="disk").durable
    check_restore(store, HYBRID, [*ids, 1], 8)


def test_pins_keep_windows_as_well(open_store_with: OpenStore) -> None:
    store = open_store_with()
    for ids in (FIRST, BRANCH):
        save(store, WINDOWED, ids)
    assert store.pin(WINDOWED, BRANCH, 60) == len(BRANCH)
    assert all(record.pinned_until_ns for record in records(store))


def test_fields_of_rows_need_not_be_named_again(open_store_with: OpenStore) -> None:
    planes = tuple(PlaneSpec(role, PlaneFormat.Q8_2F, (1, 32)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    identity = mixed_identity(LayerSpec(LayerKind.FULL, planes))
    store = open_store_with()

    def rows(n: int, field: bytes) -> list[LayerRows]:
        made = [PlaneRows(p.role, p.format, np.ones((n, *stored_shape(p)[1]), np.uint8), field) for p in planes]
        return [LayerRows(0, tuple(made))]

    assert store.save(identity, list(range(100)), rows(100, b"F" * 16)).start == 0
    assert store.save(identity, list(range(110)), rows(110, b"F" * 16)).start == 100
    assert store.save(identity, list(range(110)), rows(110, b"G" * 16)).start == 0, "rows of another field were taken for these"
    with store.restore(identity, [*range(110), 5]) as restored:
        plane = restored.layers[0].planes[PlaneRole.KEY]
        assert len(set(plane.fields)) >= 1 and len(plane.fields) == len(plane.blocks)


@pytest.mark.parametrize("length", [15, 16 * 4097])
def test_fields_that_are_no_list_of_digests_are_refused(open_store_with: OpenStore, length: int) -> None:
    store = open_store_with()
    key = store._session.open(HYBRID.canonical(), "")
    with pytest.raises(RecordError, match="field digests"):
        store._session.offer(m.Offer(key, bytes(16), np.arange(4, dtype="<u4"), fields=bytes(length)))


@pytest.mark.parametrize("wait_s", [-1.0, float("inf"), float("nan")])
def test_waits_that_cannot_be_are_refused(open_store_with: OpenStore, wait_s: float) -> None:
    with pytest.raises(RecordError, match="wait"):
        open_store_with().restore(HYBRID, [1, 2], wait_s=wait_s)


def test_a_blob_whose_proof_cannot_be_loaded_is_given_up_at_once(
    open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = mixed_identity(layer_of(LayerKind.OPAQUE), layer_of(LayerKind.FULL))
    store = open_store_with()
    ids = list(range(400))
    for length in (150, 160, 400):
        save(store, identity, ids[:length])
    for state in [record for record in records(store) if record.is_state and record.end < 400]:
        with store.engine.index.changed:
            store.engine.warm.evict(state)
    tried: list[Record] = []

    def refusing(record: Record) -> int:
        tried.append(record)
        if record.end == 400:
            raise OfferAgain("not now")
        return 0

    monkeypatch.setattr(store.engine.promotion, "promote", refusing)
    assert store.restore(identity, [*ids[:155], 9]).usable == 0
    assert len(tried) < 10
