"""Cold prefixes on their way to readers: once however many ask, shorter where it does not fit,
and never another's rows while saves, evictions and restarts go on around them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store, arrivals
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.testing import assert_rows, model_rows, save
from warmkv.kvstore.testing.bounds import Task
from warmkv.schema import messages as m
from warmkv.schema.errors import Busy, ClosedError, ColdFull, OfferAgain, StoreError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, RecordId, as_tokens

OpenStore = Callable[..., Store]
KIB = 1024
#: Longer than anything here takes; only a hang reaches it.
PATIENCE_S = 60.0


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def reopened(store: Store, open_store_with: OpenStore, **options: Any) -> Store:
    """The same store after a restart: everything is cold."""
    assert store.flush(PATIENCE_S)
    store.close()
    return open_store_with(True, **options)


def promotions(store: Store) -> tuple[Any, Any]:
    stats = store.stats()
    return stats["promotions"], stats["promoted_bytes"]


def settled(store: Store) -> None:
    """Nothing is promised or under way any more, and every invariant holds."""
    ledger = store.engine.warm.ledger
    assert (ledger.promoting_bytes, ledger.promoting_entries, ledger.reserved_bytes, ledger.leased_bytes) == (0, 0, 0, 0)
    assert check(store.engine) == []


class Gate:
    """Holds whatever reads the disk, record by record, until it is opened, and tells when the
    first has come: one alone is loaded, neighbours are read into one packed segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open = threading.Event(), threading.Event()
        self.ids: list[RecordId] = []
        for name in ("load", "read"):
            monkeypatch.setattr(ColdTier, name, self._waiting(getattr(ColdTier, name)))

    def _waiting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(tier: ColdTier, id_: RecordId, *rest: Any) -> Any:
            self.ids.append(id_)
            self.arrived.set()
            assert self.open.wait(PATIENCE_S)
            return real(tier, id_, *rest)

        return waiting


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


# -- once -------------------------------------------------------------------------------------


def test_twenty_readers_of_a_cold_chain_read_each_segment_once(open_store_with: OpenStore, wide: Identity, gate: Gate) -> None:
    """What one of them makes of it, a packed segment, is what all map."""
    gate.open.set()
    store = open_store_with(True)
    lengths = (40, 80, 120, 160, 200)
    for length in lengths:
        save(store, wide, ids(1, length))
    store = reopened(store, open_store_with)
    rows, start = model_rows(wide, ids(1, 200)), threading.Barrier(20)

    def read() -> int:
        start.wait(PATIENCE_S)
        with store.restore(wide, ids(1, 200) + [7], verify=True) as restored:
            assert restored.usable == 200
            assert_rows(restored, rows)
            return restored.promoted_bytes

    copied = [task.outcome() for task in [Task(read) for _ in range(20)]]
    assert len(gate.ids) == len(set(gate.ids)) == len(lengths)
    ledger = store.engine.warm.ledger
    assert ledger.paged(sum(copied)) == ledger.resident_bytes and sum(map(bool, copied)) == 1
    count, total_bytes = promotions(store)
    assert count == 1
    with store.engine.index.changed:
        assert total_bytes == sum(record.total_bytes for record in store.engine.index.records.values() if not record.packed)
    assert store.stats()["hits"] == 20
    settled(store)


def test_those_who_wait_get_what_the_first_one_brought(
    open_store_with: OpenStore, wide: Identity, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All twenty have asked before the first byte is there."""
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    asked = threading.Semaphore(0)
    settled_already = store.engine.promotion.settled

    def counted(records: Any) -> bool:
        asked.release()
        return settled_already(records)

    monkeypatch.setattr(store.engine.promotion, "settled", counted)
    tasks = [Task(lambda: store.restore(wide, ids(1))) for _ in range(20)]
    for _ in tasks:
        assert asked.acquire(timeout=PATIENCE_S)
    gate.open.set()
    for task in tasks:
        with task.outcome() as restored:
            assert_rows(restored, model_rows(wide, ids(1)))
    assert len(gate.ids) == 1 and promotions(store)[0] == 1
    settled(store)


def test_a_promotion_that_fails_is_tried_by_the_next(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    load, failing = ColdTier.load, [2]

    def fails(tier: ColdTier, id_: RecordId, total_bytes: int) -> int:
        if failing[0]:
            failing[0] -= 1
            raise StoreError("the disk is asleep")
        return load(tier, id_, total_bytes)

    monkeypatch.setattr(ColdTier, "load", fails)
    outcomes = [task.outcome() for task in [Task(lambda: store.restore(wide, ids(1))) for _ in range(6)]]
    assert sorted(restored.usable for restored in outcomes) == [0, 0, 99, 99, 99, 99]
    for restored in outcomes:
        assert restored or "the disk is asleep" in restored.reason
        restored.close()
    assert promotions(store)[0] == 1 and store.stats()["quarantines"] == 0
    settled(store)


def test_a_promotion_that_breaks_leaves_nothing_behind(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int]
) -> None:
    """Not one of our errors: it reaches the caller, and the record can be promoted afterwards."""
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    store.match(wide, ids(1))
    before = descriptors()
    with monkeypatch.context() as broken:
        broken.setattr(ColdTier, "load", lambda *_: 1 // 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                store.restore(wide, ids(1))
    assert descriptors() == before and store.stats()["leases"] == 0
    settled(store)
    with store.restore(wide, ids(1)) as restored:
        assert restored.usable == 99


# -- what does not fit ------------------------------------------------------------------------


def test_chain_larger_than_the_budget_is_handed_over_as_far_as_it_fits(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    for length in (50, 100, 150, 200):
        save(store, wide, ids(1, length))
    store = reopened(store, open_store_with, warm_bytes=280 * KIB, busy_timeout_s=0.01)
    assert store.match(wide, ids(1, 200)).usable == 199
    with store.restore(wide, ids(1, 200)) as restored:
        assert (restored.matched, restored.usable, restored.tier) == (200, 100, "cold")
        assert "more than can be evicted" in restored.reason
        assert_rows(restored, model_rows(wide, ids(1, 100)))
    settled(store)


def test_segment_larger_than_the_budget_is_a_miss_with_the_reason(
    open_store_with: OpenStore, wide: Identity, descriptors: Callable[[], int]
) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1, 200))
    save(store, wide, ids(2, 20))
    store = reopened(store, open_store_with, warm_bytes=200 * KIB)
    store.match(wide, ids(1))
    before = descriptors()
    restored = store.restore(wide, ids(1, 200))
    assert (restored.matched, restored.usable, restored.tier, restored.layers) == (200, 0, None, ())
    assert "do not fit the warm budget" in restored.reason
    restored.close()
    assert descriptors() == before and store.stats()["leases"] == 0
    settled(store)
    with store.restore(wide, ids(2, 20)) as small:
        assert small.usable == 19


def test_first_part_that_fits_is_handed_over_when_the_second_is_too_large(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1, 20), anchors=[Anchor(10)])
    save(store, wide, ids(1, 200))
    store = reopened(store, open_store_with, warm_bytes=200 * KIB)
    with store.restore(wide, ids(1, 200)) as restored:
        assert restored.usable == 20 and "do not fit" in restored.reason
        assert_rows(restored, model_rows(wide, ids(1, 20)))
    with store.restore(wide, ids(1, 200), at="anchor") as restored:
        assert restored.usable == 10 and restored.anchor is not None
    settled(store)


def test_leased_memory_is_not_taken_for_a_promotion(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, warm_bytes=300 * KIB, busy_timeout_s=0.01)
    for seed in (1, 2):
        save(store, wide, ids(seed), ack="disk")
    with store.restore(wide, ids(1)) as held:
        refused = store.restore(wide, ids(2))
        assert (refused.matched, refused.usable) == (100, 0) and "more than can be evicted" in refused.reason
        refused.close()
        assert_rows(held, model_rows(wide, ids(1)))
    with store.restore(wide, ids(2)) as restored:
        assert restored.usable == 99
    settled(store)


def test_a_promotion_waits_for_room_that_is_about_to_come(open_store_with: OpenStore, wide: Identity, gate: Gate) -> None:
    """Room promised to another promotion is worth waiting for: it fails, and its room is ours."""
    store = open_store_with(True)
    for seed in (1, 2):
        save(store, wide, ids(seed), ack="disk")
    store = reopened(store, open_store_with, warm_bytes=300 * KIB, busy_timeout_s=PATIENCE_S)
    first = Task(lambda: store.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    second = Task(lambda: store.restore(wide, ids(2)))
    forgotten = Task(lambda: store.forget(wide, ids(1)))
    assert forgotten.outcome().records == 1
    gate.open.set()
    first.outcome().close()
    with second.outcome() as restored:
        assert_rows(restored, model_rows(wide, ids(2)))
    assert store.engine.warm.ledger.peak_bytes <= 300 * KIB
    settled(store)


# -- what goes away meanwhile -----------------------------------------------------------------


def test_record_forgotten_while_it_is_promoted(
    open_store_with: OpenStore, wide: Identity, gate: Gate, descriptors: Callable[[], int]
) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1, 50))
    save(store, wide, ids(1, 100))
    store = reopened(store, open_store_with)
    store.match(wide, ids(1))
    before = descriptors()
    reader = Task(lambda: store.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    assert store.forget(wide, ids(1)).records == 2
    assert store.match(wide, ids(1)).matched == 0
    gate.open.set()
    restored = reader.outcome()
    assert not restored and restored.reason
    restored.close()
    assert store.engine.warm.ledger.resident_bytes == 0 and promotions(store) == (0, 0)
    assert descriptors() == before and store.stats()["leases"] == 0
    settled(store)


def test_record_forgotten_and_saved_again_while_it_is_promoted(open_store_with: OpenStore, wide: Identity, gate: Gate) -> None:
    """The promotion is of a record that is gone; the new one, of the same id, is not touched by it."""
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    reader = Task(lambda: store.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    store.forget(wide, ids(1))
    assert not save(store, wide, ids(1), ack="disk").duplicate
    gate.open.set()
    with reader.outcome() as restored:
        if restored:
            assert_rows(restored, model_rows(wide, ids(1)))
    assert store.stats()["entries"] == 1
    settled(store)
    with store.restore(wide, ids(1), verify=True) as again:
        assert again.usable == 99


def test_deepest_record_forgotten_while_the_first_is_promoted(open_store_with: OpenStore, wide: Identity, gate: Gate) -> None:
    """What is left of the chain is handed over."""
    store = open_store_with(True)
    for length in (50, 100):
        save(store, wide, ids(1, length))
    save(store, wide, ids(1, 50) + [3])
    store = reopened(store, open_store_with)
    reader = Task(lambda: store.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    assert store.forget(wide, ids(1)).records == 1
    gate.open.set()
    with reader.outcome() as restored:
        assert restored.usable == 50
        assert_rows(restored, model_rows(wide, ids(1, 50)))
    settled(store)


def test_namespace_cleared_while_readers_promote(open_store_with: OpenStore, wide: Identity, gate: Gate) -> None:
    store = open_store_with(True)
    for seed in range(4):
        save(store, wide, ids(seed))
    store = reopened(store, open_store_with)
    readers = [Task(lambda seed=seed: store.restore(wide, ids(seed))) for seed in range(4)]  # type: ignore[misc]
    assert gate.arrived.wait(PATIENCE_S)
    assert store.clear().records == 4
    gate.open.set()
    for reader in readers:
        restored = reader.outcome()
        assert not restored
        restored.close()
    assert store.stats()["entries"] == 0 and store.engine.warm.ledger.used_bytes == 0
    settled(store)


def test_store_closed_while_a_record_is_promoted_keeps_no_descriptor(
    open_store_with: OpenStore, wide: Identity, gate: Gate, descriptors: Callable[[], int]
) -> None:
    """The promotion ends after everything warm was let go: it must not come back to life."""
    before = descriptors()
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    reader = Task(lambda: store.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    closing = Task(store.close)
    with store.engine.index.changed:
        assert store.engine.index.changed.wait_for(lambda: store.engine.warm.closing, PATIENCE_S)
    gate.open.set()
    closing.outcome()
    try:
        restored = reader.outcome()
        assert not restored and restored.reason
        restored.close()
    except ClosedError:
        pass
    assert store.engine.warm.ledger.used_bytes == 0
    assert descriptors() == before


def test_save_that_meets_the_end_of_the_store_is_refused_not_lost(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int]
) -> None:
    """An acknowledgement that comes after the last write-behind round would be a lie."""
    before = descriptors()
    store = open_store_with(True)
    save(store, wide, ids(1))
    checked, go_on = threading.Event(), threading.Event()
    check = arrivals.check

    def slow(*arguments: Any) -> Any:
        head = check(*arguments)
        checked.set()
        assert go_on.wait(PATIENCE_S)
        return head

    monkeypatch.setattr(arrivals, "check", slow)
    saving = Task(lambda: save(store, wide, ids(2)))
    assert checked.wait(PATIENCE_S)
    store.engine.close()
    go_on.set()
    with pytest.raises(ClosedError):
        saving.outcome()
    store.close()
    assert store.engine.warm.ledger.used_bytes == 0
    assert descriptors() == before
    store = open_store_with(True)
    assert (store.match(wide, ids(1)).matched, store.match(wide, ids(2)).matched) == (100, 0)


def test_session_closed_while_it_acquires_leaves_no_lease(
    open_store_with: OpenStore, wide: Identity, gate: Gate, descriptors: Callable[[], int]
) -> None:
    """A peer that hangs up in the middle: its connection's session ends, the store lives on."""
    store = open_store_with(True)
    save(store, wide, ids(1))
    store = reopened(store, open_store_with)
    other = Store(store.engine)
    other.match(wide, ids(1))
    before = descriptors()
    reader = Task(lambda: other.restore(wide, ids(1)))
    assert gate.arrived.wait(PATIENCE_S)
    other._session.close()
    gate.open.set()
    with pytest.raises(ClosedError):
        reader.outcome()
    assert store.stats()["leases"] == 0
    assert descriptors() == before + 1  # the record is warm now
    settled(store)


def test_session_closed_while_it_offers_leaves_no_reservation(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(warm_bytes=900 * KIB)
    other = store.engine.session(0)
    key = other.open(wide.canonical(), "")
    offer = store.engine.intake.offer

    def hanging_up(*arguments: Any) -> Any:
        reply = offer(*arguments)
        other.close()
        return reply

    monkeypatch.setattr(store.engine.intake, "offer", hanging_up)
    with pytest.raises(ClosedError):
        other.offer(m.Offer(key, CLEAN, as_tokens(ids(1)), row_bytes=100))
    settled(store)


def test_room_made_for_a_promotion_that_is_given_up_is_given_back(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int]
) -> None:
    """What was evicted for it leaves memory at once, not with the next promotion that works."""
    store = open_store_with(True, warm_bytes=300 * KIB)
    for seed in (1, 2):
        save(store, wide, ids(seed), ack="disk")
    before, make_room = descriptors(), store.engine.warm.make_room

    def in_vain(wanted_bytes: int, **options: int) -> None:
        make_room(wanted_bytes, **options)
        raise Busy("somebody was faster")

    monkeypatch.setattr(store.engine.warm, "make_room", in_vain)
    restored = store.restore(wide, ids(1))
    assert not restored and "somebody was faster" in restored.reason
    assert store.engine.warm.ledger.resident_bytes == 0 and descriptors() == before - 1
    settled(store)


# -- everything at once -----------------------------------------------------------------------


def test_readers_see_their_own_rows_through_saves_evictions_and_reopen(open_store_with: OpenStore, wide: Identity) -> None:
    """Two prefixes are pinned and must be there at every moment; the others may come and go."""
    budget = 1200 * KIB
    options = {"warm_bytes": budget, "cold_bytes": 4 << 20, "busy_timeout_s": 5.0}
    store = open_store_with(True, **options)
    pinned, trunk = (901, 902), ids(7, 40)
    prompts = {seed: trunk + ids(seed, 60) for seed in [*pinned, *range(12)]}
    rows = {seed: model_rows(wide, prompts[seed]) for seed in prompts}
    for seed in pinned:
        assert save(store, wide, prompts[seed], ack="disk").durable
        assert store.pin(wide, prompts[seed], 3600) == 100
    hits, evicted = {seed: 0 for seed in prompts}, 0

    def read(seed: int, done: threading.Event) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            for which in (pinned[seed % 2], rng.randrange(12)):
                with store.restore(wide, prompts[which], verify=rng.random() < 0.2) as restored:
                    if which in pinned:
                        assert restored.usable == 99, restored.reason
                    if restored:
                        assert_rows(restored, rows[which])
                        hits[which] += 1

    for _ in range(2):
        done = threading.Event()
        readers = [Task(lambda seed=seed, done=done: read(seed, done)) for seed in range(4)]  # type: ignore[misc]
        try:
            for step in range(50):
                seed = step * 5 % 12
                try:
                    save(store, wide, prompts[seed], ack="disk" if step % 7 == 0 else "memory")
                except (Busy, OfferAgain, ColdFull):
                    pass
                if step % 9 == 4:
                    store.forget(wide, prompts[(seed + 5) % 12])
        finally:
            done.set()
        for reader in readers:
            reader.outcome()
        assert store.flush(PATIENCE_S)
        assert check(store.engine) == []
        assert store.engine.warm.ledger.peak_bytes <= budget
        evicted += store.engine.warm.evictions
        store = reopened(store, open_store_with, **options)
    assert evicted > 20 and all(hits[seed] > 0 for seed in pinned) and sum(hits[seed] for seed in range(12)) > 0
    for seed in pinned:
        with store.restore(wide, prompts[seed], verify=True) as restored:
            assert (restored.usable, restored.tier) == (99, "cold")
            assert_rows(restored, rows[seed])
    settled(store)


def test_hits_and_misses_are_counted_by_every_thread(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with()
    save(store, identity, ids(1, 5))

    def ask() -> None:
        for step in range(50):
            store.restore(identity, ids(1 + step % 2, 5)).close()

    for task in [Task(ask) for _ in range(8)]:
        task.outcome()
    stats = store.stats()
    assert (stats["hits"], stats["misses"], stats["tokens_usable"], stats["leases"]) == (200, 200, 800, 0)


# -- leases that end at any moment --------------------------------------------------------------


def test_lease_may_end_while_leases_are_looked_through(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector closes a forgotten `Restored` wherever it runs, within the very loop
    over what is leased."""
    store = open_store_with(warm_bytes=900 * KIB, busy_timeout_s=0.01)
    kept: list[Restored] = []
    for seed in (1, 2):
        save(store, wide, ids(seed))
        kept.append(store.restore(wide, ids(seed)))
        store.forget(wide, ids(seed))
    warm = store.engine.warm
    assert warm.ledger.leased_bytes > 400 * KIB
    leased = warm.leased

    def collecting(record: Any) -> bool:
        answer = leased(record)
        while kept:
            kept.pop().close()
        return answer

    monkeypatch.setattr(warm, "leased", collecting)
    assert save(store, wide, ids(3)).stored
    assert (warm.ledger.leased_bytes, warm.ledger.lent_bytes) == (0, 0)
    settled(store)


@pytest.mark.parametrize("after", ["looking", "expiry"])
def test_lease_may_end_while_its_record_is_let_go(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Counted as leased or lent after that, the bytes would be so for ever."""
    store = open_store_with(warm_bytes=900 * KIB)
    save(store, wide, ids(1))
    restored = store.restore(wide, ids(1))
    warm, leased = store.engine.warm, store.engine.warm.leased

    def collecting(record: Any) -> bool:
        answer = leased(record)
        restored.close()
        return answer and after == "looking"

    if after == "expiry":
        store.forget(wide, ids(1))
        monkeypatch.setattr(warm, "leased", collecting)
        save(store, wide, ids(2))
    else:
        monkeypatch.setattr(warm, "leased", collecting)
        store.forget(wide, ids(1))
    assert (warm.ledger.leased_bytes, warm.ledger.lent_bytes) == (0, 0)
    assert (warm._leased, warm._lent) == ({}, {})
    settled(store)
