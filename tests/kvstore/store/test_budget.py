"""The warm budget: refused before allocated, evicted before accepted, never exceeded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.session import LocalSession
from warmkv.kvstore.testing import assert_rows, model_rows, save
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity
from warmkv.schema import messages as m
from warmkv.schema.errors import BudgetError, Busy, OfferAgain, RemoteProtocolError, TooLarge
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, as_tokens

OpenStore = Callable[..., Store]
KIB = 1024


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def held(store: Store, identity: Identity, seed: int, length: int = 100) -> int:
    """Tokens of an entry that are held, asked without using it."""
    return store.match(identity, ids(seed, length) + [7]).usable


def test_budget_of_zero_switches_the_tier_off(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=0)
    with pytest.raises(TooLarge):
        save(store, wide, ids(1))
    assert not store.restore(wide, ids(1))


def test_negative_and_odd_budgets_are_refused(open_store_with: OpenStore) -> None:
    odd: Any = "1 GiB"
    for options in ({"warm_bytes": -1}, {"cold_bytes": -1}, {"warm_bytes": odd}, {"reservation_ttl_s": 0}, {"warm_entries": -2}):
        with pytest.raises(BudgetError):
            open_store_with(**options)


def test_oversize_is_refused_before_anything_is_allocated(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(warm_bytes=256 * KIB)
    save(store, wide, ids(1))

    def create(name: str, total_bytes: int) -> int:
        raise AssertionError(f"{total_bytes} bytes were allocated")

    monkeypatch.setattr(memfd, "create", create)
    with pytest.raises(TooLarge):
        save(store, wide, ids(2, 200))
    assert held(store, wide, 1) == 100


def test_room_is_made_before_a_save_is_accepted(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    save(store, wide, ids(1))
    save(store, wide, ids(2))
    assert (held(store, wide, 1), held(store, wide, 2)) == (0, 100)
    assert store.engine.warm.ledger.peak_bytes <= 300 * KIB


def test_least_recently_used_goes_first(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=700 * KIB)
    for seed in (1, 2, 3):
        save(store, wide, ids(seed))
    store.restore(wide, ids(1)).close()
    save(store, wide, ids(4))
    assert [held(store, wide, seed) for seed in (1, 2, 3, 4)] == [100, 0, 100, 100]


def test_leaves_go_before_what_they_build_on(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=700 * KIB)
    save(store, wide, ids(1))
    save(store, wide, ids(1, 200))
    save(store, wide, ids(2))
    save(store, wide, ids(3))
    assert held(store, wide, 1, 200) == 100
    save(store, wide, ids(4))
    assert held(store, wide, 1, 200) == 0


def test_a_save_does_not_evict_what_it_builds_on(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    save(store, wide, ids(1))
    for _ in range(2):
        with pytest.raises(Busy):
            save(store, wide, ids(1, 200))
    assert held(store, wide, 1) == 100


def test_leased_state_is_not_evicted(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    save(store, wide, ids(1))
    with store.restore(wide, ids(1)) as restored:
        with pytest.raises(Busy):
            save(store, wide, ids(2))
        assert_rows(restored, model_rows(wide, ids(1)))
    assert save(store, wide, ids(2)).stored


def test_pinned_state_is_not_evicted(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    save(store, wide, ids(1))
    store.pin(wide, ids(1), 1000)
    with pytest.raises(Busy):
        save(store, wide, ids(2))
    store.unpin(wide, ids(1))
    assert save(store, wide, ids(2)).stored


class Clock:
    """The engine's monotonic clock, moved by hand; it ticks when read, so that waits end."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_lease_protects_until_its_time_is_over(open_store_with: OpenStore, wide: Identity, clock: Clock) -> None:
    store = open_store_with(warm_bytes=300 * KIB, lease_ttl_s=50)
    store.engine.warm.clock = clock
    save(store, wide, ids(1))
    ledger = store.engine.warm.ledger
    with store.restore(wide, ids(1)) as restored:
        clock.now += 49
        with pytest.raises(Busy):
            save(store, wide, ids(2))
        clock.now += 2
        assert save(store, wide, ids(2)).stored
        assert ledger.lent_bytes > 200 * KIB
        assert_rows(restored, model_rows(wide, ids(1)))
    assert ledger.lent_bytes == 0


def test_what_is_forgotten_under_a_lease_counts_until_the_lease_ends(
    open_store_with: OpenStore, wide: Identity, clock: Clock
) -> None:
    store = open_store_with(warm_bytes=300 * KIB, lease_ttl_s=50)
    store.engine.warm.clock = clock
    ledger = store.engine.warm.ledger
    save(store, wide, ids(1))
    restored = store.restore(wide, ids(1))
    store.forget(wide, ids(1))
    assert ledger.leased_bytes > 200 * KIB and ledger.resident_bytes == 0
    with pytest.raises(Busy):
        save(store, wide, ids(2))
    restored.close()
    assert (ledger.leased_bytes, ledger.lent_bytes) == (0, 0)
    save(store, wide, ids(1))
    with store.restore(wide, ids(1)):
        store.forget(wide, ids(1))
        clock.now += 51
        assert save(store, wide, ids(2)).stored
        assert ledger.leased_bytes == 0 and ledger.lent_bytes > 200 * KIB
    assert ledger.lent_bytes == 0


def test_lent_bytes_return_to_zero_when_evicted_twice(open_store_with: OpenStore, wide: Identity, clock: Clock) -> None:
    """The same record evicted under a lease, promoted under another, evicted again."""
    store = open_store_with(True, warm_bytes=300 * KIB, lease_ttl_s=50)
    store.engine.warm.clock = clock
    save(store, wide, ids(1), ack="disk")
    leases = []
    for seed in (2, 3):
        leases.append(store.restore(wide, ids(1)))
        clock.now += 51
        save(store, wide, ids(seed), ack="disk")
    assert store.engine.warm.ledger.lent_bytes > 400 * KIB
    for restored in leases:
        assert_rows(restored, model_rows(wide, ids(1)))
        restored.close()
    assert store.engine.warm.ledger.lent_bytes == 0


def reserve(store: Store, identity: Identity, tokens: int) -> tuple[m.Offered, LocalSession]:
    session = store.engine.session(0)
    key = session.open(identity.canonical(), "")
    query = m.Offer(key, CLEAN, as_tokens(ids(9, tokens)), row_bytes=2048, fixed_bytes=1024)
    return session.offer(query), session


def test_reservations_count_and_end_with_their_session(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB, busy_timeout_s=0.001)
    offered, session = reserve(store, wide, 100)
    assert offered.reserved_bytes == 100 * 2048 + 1024 == store.engine.warm.ledger.reserved_bytes
    with pytest.raises(Busy):
        save(store, wide, ids(1))
    session.close()
    assert store.engine.warm.ledger.reserved_bytes == 0
    assert save(store, wide, ids(1)).stored


def test_reservations_expire(open_store_with: OpenStore, wide: Identity, clock: Clock) -> None:
    store = open_store_with(warm_bytes=300 * KIB, busy_timeout_s=0.001, reservation_ttl_s=60)
    store.engine.warm.clock = clock
    _, session = reserve(store, wide, 100)
    clock.now += 61
    assert save(store, wide, ids(1)).stored
    assert store.engine.warm.ledger.reserved_bytes == 0
    session.close()
    assert check(store.engine) == []


def test_promotion_takes_the_room_of_an_expired_reservation(open_store_with: OpenStore, wide: Identity, clock: Clock) -> None:
    store = open_store_with(True, warm_bytes=300 * KIB, busy_timeout_s=0.001, reservation_ttl_s=60)
    store.engine.warm.clock = clock
    save(store, wide, ids(1), ack="disk")
    _, session = reserve(store, wide, 100)
    assert not store.restore(wide, ids(1))
    clock.now += 61
    with store.restore(wide, ids(1)) as restored:
        assert restored.usable == 99
    session.close()


def test_a_reservation_belongs_to_its_session(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    offered, session = reserve(store, wide, 100)
    other = store.engine.session(0)
    key = other.open(wide.canonical(), "")
    with pytest.raises(OfferAgain):
        other.annotate(m.Annotate(key, CLEAN, as_tokens(ids(9)), reservation=offered.reservation))
    assert store.engine.warm.ledger.reserved_bytes == offered.reserved_bytes
    session.close()


def test_failed_commit_gives_its_reservation_back(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=300 * KIB)
    offered, session = reserve(store, wide, 100)
    key = session.open(wide.canonical(), "")
    fd = memfd.create("not sealed", 4096)
    with pytest.raises(RemoteProtocolError, match="seals"):
        session.commit(m.Commit(key, offered.epoch, offered.reservation), fd)
    memfd.seal(fd)
    assert store.engine.warm.ledger.reserved_bytes == 0
    os.close(fd)


def test_number_of_entries_is_bounded(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(warm_entries=3)
    for seed in range(6):
        save(store, identity, ids(seed, 5))
    assert store.engine.warm.ledger.resident_entries == 3
    assert [held(store, identity, seed, 5) for seed in range(6)] == [0, 0, 0, 5, 5, 5]


# -- states at named positions ---------------------------------------------------------------

STATEFUL = mixed_identity(FULL, RECURRENT)


def save_named(store: Store, seed: int, length: int = 5, **options: Any) -> None:
    save(store, STATEFUL, ids(seed, length), anchors=[Anchor(length)], **options)


def resumes(store: Store, seed: int, length: int = 5) -> bool:
    """Whether there is a state to resume from, asked without using it."""
    return store.match(STATEFUL, [*ids(seed, length), 7]).usable == length


def test_states_at_named_positions_have_a_number_of_their_own(open_store_with: OpenStore) -> None:
    store = open_store_with(anchors=3)
    for seed in range(6):
        save_named(store, seed)
    assert [resumes(store, seed) for seed in range(6)] == [False, False, False, True, True, True]
    # Their rows stay, and other states are not counted.
    assert all(store.match(STATEFUL, ids(seed, 5)).matched == 5 for seed in range(6))
    for seed in range(10, 16):
        save(store, STATEFUL, ids(seed, 5))
    assert all(resumes(store, seed) for seed in (3, 4, 5, *range(10, 16)))


def test_the_state_at_a_named_position_used_last_stays(open_store_with: OpenStore) -> None:
    store = open_store_with(anchors=3)
    for seed in range(3):
        save_named(store, seed)
    store.restore(STATEFUL, [*ids(0, 5), 7]).close()
    save_named(store, 3)
    assert [resumes(store, seed) for seed in range(4)] == [True, False, True, True]


def test_no_number_is_no_limit(open_store_with: OpenStore) -> None:
    store = open_store_with()
    for seed in range(20):
        save_named(store, seed)
    assert all(resumes(store, seed) for seed in range(20))


def test_the_number_counts_one_model_at_a_time(open_store_with: OpenStore) -> None:
    store, other = open_store_with(anchors=2), mixed_identity(FULL, RECURRENT, seed=1)
    for seed in range(2):
        save_named(store, seed)
    for seed in range(2, 5):
        save(store, other, ids(seed, 5), anchors=[Anchor(5)])
    assert resumes(store, 0) and resumes(store, 1)
    assert [store.match(other, [*ids(seed, 5), 7]).usable for seed in range(2, 5)] == [0, 5, 5]


def test_leased_and_pinned_states_stay_beyond_the_number(open_store_with: OpenStore) -> None:
    store = open_store_with(anchors=1)
    save_named(store, 0)
    store.pin(STATEFUL, ids(0, 5), 1000)
    save_named(store, 1)
    with store.restore(STATEFUL, [*ids(1, 5), 7]) as restored:
        assert restored.usable == 5
        for seed in (2, 3):
            save_named(store, seed)
        assert [resumes(store, seed) for seed in range(4)] == [True, True, False, True]
    store.unpin(STATEFUL, ids(0, 5))
    save_named(store, 4)
    assert [resumes(store, seed) for seed in range(5)] == [False, False, False, False, True]


def test_states_that_leave_memory_for_the_number_stay_on_disk(open_store_with: OpenStore) -> None:
    store = open_store_with(True, anchors=2)
    for seed in range(5):
        save_named(store, seed, ack="disk")
    assert store.flush(60)
    save_named(store, 5, ack="disk")
    with store.engine.index.changed:
        warm = [record for record in store.engine.index.records.values() if record.is_state and record.warm]
    assert len(warm) <= 3
    assert all(resumes(store, seed) for seed in range(6))


@pytest.mark.parametrize("anchors", [-1, 1.5, "3", None, 2**30])
def test_numbers_of_anchors_that_are_none_are_refused(open_store_with: OpenStore, anchors: Any) -> None:
    with pytest.raises(BudgetError, match="anchors"):
        open_store_with(anchors=anchors)


def test_peak_stays_within_the_budget_under_threads(open_store_with: OpenStore, wide: Identity) -> None:
    """8 threads save and restore more than fits; only typed refusals, never a byte too many."""
    store = open_store_with(True, warm_bytes=900 * KIB, cold_bytes=3 << 20, busy_timeout_s=0.2)
    failures: list[BaseException] = []
    hits = [0]

    def work(thread: int) -> None:
        try:
            for step in range(25):
                seed = (thread * 7 + step * 3) % 12
                try:
                    save(store, wide, ids(seed, 60 + 20 * (step % 3)))
                except (Busy, OfferAgain):
                    pass
                with store.restore(wide, ids(seed + 1 if step % 2 else seed)) as restored:
                    if restored:
                        hits[0] += 1
                        assert_rows(restored, model_rows(wide, ids(seed + 1 if step % 2 else seed)))
        except BaseException as exc:  # noqa: BLE001 - shown by the main thread
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert hits[0] > 0
    assert store.flush(60)
    assert check(store.engine) == []
    ledger = store.engine.warm.ledger
    assert ledger.peak_bytes <= 900 * KIB
    assert (ledger.reserved_bytes, ledger.promoting_bytes, ledger.leased_bytes, ledger.lent_bytes) == (0, 0, 0, 0)
