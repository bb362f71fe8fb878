"""The eviction service with a clock moved by hand: watermarks, age, pins, floors, pressure, budgets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.clock import NS, Clock
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.store.ledger import CEILING_HOLD_S, CEILING_RISE_S
from warmkv.kvstore.testing import save
from warmkv.schema.errors import Busy, TooLarge
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB = 1 << 10
#: Of one save of 100 tokens of the wide model, in memory.
ENTRY = 208 * KIB


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def there(store: Store, identity: Identity, *seeds: int) -> list[int]:
    """Tokens of each entry that are held, asked without using it."""
    return [store.match(identity, ids(seed) + [7]).usable for seed in seeds]


class Hands:
    """What a clock reads, moved by hand: its monotonic and wall time, and the elapsed time behind both.

    Monotonic time moves by itself as well, a little, so that what waits for it ends."""

    def __init__(self, wall_s: float = 1.7e9) -> None:
        self.wall_s = wall_s
        self.elapsed_s = 0.0
        self.ticks = 0

    def clock(self) -> Clock:
        """A clock as the next life of the store has it."""
        return Clock(self.monotonic, lambda: int(self.wall_s * NS), lambda: int(self.elapsed_s * NS))

    def monotonic(self) -> float:
        self.ticks += 1
        return self.elapsed_s + self.ticks * 1e-6

    def pass_(self, seconds: float) -> None:
        self.wall_s += seconds
        self.elapsed_s += seconds


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_above_the_high_mark_all_goes_down_to_the_low_one_and_nothing_between(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=10 * ENTRY, high_watermark=0.75, low_watermark=0.45)
    for seed in range(7):
        save(store, wide, ids(seed))
    assert store.engine.eviction.run_once()["warm_records"] == 0
    save(store, wide, ids(7))
    done = store.engine.eviction.run_once()
    assert done["warm_records"] == 4 and done["warm_bytes"] > 3 * ENTRY * 0.9
    assert there(store, wide, *range(8)) == [0, 0, 0, 0, 100, 100, 100, 100]
    assert store.engine.eviction.run_once()["warm_records"] == 0


def test_the_cold_tier_has_the_same_marks(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, cold_bytes=10 * ENTRY, high_watermark=0.75, low_watermark=0.45)
    for seed in range(8):
        save(store, wide, ids(seed), ack="disk")
    done = store.engine.eviction.run_once()
    assert (done["warm_records"], done["cold_records"]) == (0, 4)
    assert store.engine.flush(60)
    assert store.engine.writer is not None and store.engine.writer.cold_bytes <= 4.5 * ENTRY
    kept = [record for record in store.engine.index.records.values() if record.cold == Cold.STORED]
    assert len(kept) == 4 and there(store, wide, *range(8)) == [100] * 8


@pytest.mark.parametrize("path", [None, True])
def test_what_was_not_used_for_its_time_is_dropped_from_both_tiers(
    open_store_with: OpenStore, wide: Identity, hands: Hands, path: bool | None
) -> None:
    store = open_store_with(path, ttl_s=1000.0, clock=hands.clock())
    for seed in (1, 2, 3, 4):
        save(store, wide, ids(seed), ack="disk" if path else "memory")
    save(store, wide, ids(1, 200))
    hands.pass_(600)
    with store.restore(wide, ids(2) + [7]) as restored:
        assert restored.usable == 100
    store.pin(wide, ids(3), 700)
    assert store.engine.flush(60)
    assert store.engine.eviction.run_once()["expired_records"] == 0
    hands.pass_(600)
    # 1 and what builds on it, and 4; 2 was used, 3 is pinned.
    assert store.engine.eviction.run_once()["expired_records"] == 3
    assert there(store, wide, 1, 2, 3, 4) == [0, 100, 100, 0]
    hands.pass_(300)
    assert store.engine.eviction.run_once()["expired_records"] == 1, "the pin is over, and so is its time"
    assert there(store, wide, 2, 3) == [100, 0]
    assert store.engine.flush(60) and check(store.engine) == []


def test_what_is_leased_outlives_its_time(open_store_with: OpenStore, wide: Identity, hands: Hands) -> None:
    store = open_store_with(ttl_s=100.0, lease_ttl_s=10_000.0, clock=hands.clock())
    save(store, wide, ids(1))
    with store.restore(wide, ids(1) + [7]):
        hands.pass_(500)
        assert store.engine.eviction.run_once()["expired_records"] == 0
    assert store.engine.eviction.run_once()["expired_records"] == 1


@pytest.mark.parametrize("jump_s", [10 * 365 * 86400.0, -10 * 365 * 86400.0])
def test_a_clock_that_jumps_while_serving_changes_no_age(
    open_store_with: OpenStore, wide: Identity, hands: Hands, jump_s: float
) -> None:
    store = open_store_with(ttl_s=1000.0, clock=hands.clock())
    save(store, wide, ids(1))
    store.pin(wide, ids(1), 100)
    hands.wall_s += jump_s
    hands.pass_(50)
    assert store.engine.eviction.run_once()["expired_records"] == 0
    assert next(iter(store.engine.index.records.values())).pinned_until_ns > 0
    hands.pass_(900)
    assert store.engine.eviction.run_once()["expired_records"] == 0
    assert next(iter(store.engine.index.records.values())).pinned_until_ns == 0
    hands.pass_(51)
    assert store.engine.eviction.run_once()["expired_records"] == 1


@pytest.mark.parametrize("jump_s", [10 * 365 * 86400.0, -10 * 365 * 86400.0])
def test_a_clock_that_jumped_between_two_lives_neither_drops_nor_keeps_for_ever(
    open_store_with: OpenStore, wide: Identity, hands: Hands, jump_s: float
) -> None:
    options: dict[str, Any] = {"ttl_s": 4000.0}
    store = open_store_with(True, clock=hands.clock(), **options)
    save(store, wide, ids(1), ack="disk")
    store.pin(wide, ids(1), 3000)
    store.close()
    hands.wall_s += jump_s
    hands.elapsed_s = 10.0  # the machine was started again
    store = open_store_with(True, clock=hands.clock(), **options)
    save(store, wide, ids(2), ack="disk")
    assert store.engine.eviction.run_once()["expired_records"] == 0
    assert there(store, wide, 1, 2) == [100, 100]
    old = next(record for record in store.engine.index.records.values() if record.pinned_until_ns)
    now_ns = store.engine.options.clock.wall_ns()
    assert now_ns < old.pinned_until_ns <= now_ns + 3000 * NS
    store.close()
    # Set right again: what was entered under the wrong time does not live the longer for it.
    hands.wall_s -= jump_s
    store = open_store_with(True, clock=hands.clock(), **options)
    assert store.engine.eviction.run_once()["expired_records"] == 0
    hands.pass_(4001)
    assert store.engine.eviction.run_once()["expired_records"] == 2


def test_a_namespace_keeps_its_floor_while_others_have_more(open_store_with: OpenStore, wide: Identity) -> None:
    other = replace(wide, parameters=b"other parameters")
    store = open_store_with(warm_bytes=10 * ENTRY, namespace_floor_bytes=400 * KIB, policy="lru")
    for seed in range(3):
        save(store, wide, ids(seed))
    for seed in range(20):
        save(store, other, ids(seed))
    assert there(store, wide, 0, 1, 2) == [0, 100, 100]
    assert sum(there(store, other, *range(20))) > 500


def test_shrinking_frees_what_was_asked_and_the_ceiling_rises_again(
    open_store_with: OpenStore, wide: Identity, hands: Hands
) -> None:
    store = open_store_with(warm_bytes=10 * ENTRY, busy_timeout_s=0.05, clock=hands.clock())
    for seed in range(8):
        save(store, wide, ids(seed))
    ledger = store.engine.warm.ledger
    before = ledger.resident_bytes
    freed = store.engine.eviction.shrink(0.5)
    assert freed >= before / 2 and ledger.resident_bytes == before - freed
    assert sum(there(store, wide, *range(8))) == 400
    # Calm is waited for: what is new takes the place of what is there.
    save(store, wide, ids(8))
    assert ledger.resident_bytes <= before - freed
    with pytest.raises(Busy):
        save(store, wide, ids(9, 500))
    hands.pass_(CEILING_HOLD_S + CEILING_RISE_S / 2)
    store.engine.eviction.run_once()
    assert before - freed < ledger.limit_bytes < ledger.budget_bytes
    hands.pass_(CEILING_RISE_S)
    store.engine.eviction.run_once()
    assert ledger.limit_bytes == ledger.budget_bytes == 10 * ENTRY
    save(store, wide, ids(9, 500))


def test_shrinking_waits_for_what_the_disk_has_not_yet(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, warm_bytes=10 * ENTRY)
    for seed in range(6):
        save(store, wide, ids(seed))
    freed = store.engine.eviction.shrink(1.0)
    assert freed > 5 * ENTRY and store.engine.warm.ledger.resident_bytes == 0
    assert there(store, wide, *range(6)) == [100] * 6, "dirty ones are on disk, none was lost"


def test_leased_and_pinned_records_survive_every_way_to_evict(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=10 * ENTRY)
    for seed in range(5):
        save(store, wide, ids(seed))
    store.pin(wide, ids(1), 1000)
    with store.restore(wide, ids(2) + [7]):
        store.engine.eviction.shrink(1.0)
        store.engine.eviction.evict("both", 0)
        assert there(store, wide, *range(5)) == [0, 100, 100, 0, 0]
    store.engine.eviction.evict("both", 0)
    assert there(store, wide, *range(5)) == [0, 100, 0, 0, 0]


def test_evicting_on_demand_tells_before_it_does(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, warm_bytes=10 * ENTRY)
    for seed in range(6):
        save(store, wide, ids(seed), ack="disk")
    service = store.engine.eviction
    room = 2 * ENTRY + 32 * KIB
    told = service.evict("both", room, dry_run=True)
    assert store.engine.warm.evictions == 0 and there(store, wide, *range(6)) == [100] * 6
    assert service.evict("both", room) == told
    assert store.engine.warm.ledger.resident_bytes <= room
    assert store.engine.writer is not None and store.engine.writer.cold_bytes <= room
    assert (told["warm_records"], told["cold_records"]) == (4, 4)
    assert service.evict("warm", 0)["warm_records"] == 2 and "cold_records" not in service.evict("warm", 0)


def test_a_smaller_budget_is_reached_and_uploads_keep_their_room(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, warm_bytes=10 * ENTRY, busy_timeout_s=60.0)
    for seed in range(6):
        save(store, wide, ids(seed))
    ledger = store.engine.warm.ledger
    reservation = ledger.reserve(2 * ENTRY, 1e12)
    store.engine.eviction.set_budgets(warm_bytes=4 * ENTRY, cold_bytes=3 * ENTRY)
    assert ledger.reserved_bytes == 2 * ENTRY and ledger.used_bytes <= 4 * ENTRY
    assert store.engine.flush(60) and store.engine.writer is not None
    assert store.engine.writer.cold_bytes <= 3 * ENTRY
    assert check(store.engine) == []
    ledger.give_back(reservation)
    save(store, wide, ids(9, 180))
    with pytest.raises(TooLarge):
        save(store, wide, ids(10, 500))
    store.engine.eviction.set_budgets(warm_bytes=10 * ENTRY)
    save(store, wide, ids(10, 500))


def test_a_budget_below_what_is_leased_is_reached_when_the_lease_ends(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=4 * ENTRY, busy_timeout_s=0.05)
    save(store, wide, ids(1))
    with store.restore(wide, ids(1) + [7]):
        store.engine.eviction.set_budgets(warm_bytes=ENTRY // 2)
        assert check(store.engine) == []
        with pytest.raises(Busy):
            save(store, wide, ids(2, 10))
    store.engine.eviction.run_once()
    assert store.engine.warm.ledger.used_bytes == 0 and check(store.engine) == []
    save(store, wide, ids(2, 10))


def test_the_service_runs_by_itself_and_ends(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=4 * ENTRY, evict_interval_s=0.01, high_watermark=0.5, low_watermark=0.3)
    deadline = time.monotonic() + 60
    for seed in range(3):
        save(store, wide, ids(seed))
    while store.engine.warm.ledger.resident_bytes > 2 * ENTRY and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.engine.warm.ledger.resident_bytes <= 2 * ENTRY and store.engine.health.problems() == {}
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "warmkv-eviction"]


def test_a_service_that_fails_says_so_and_goes_on(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(warm_bytes=4 * ENTRY, evict_interval_s=0.01)
    monkeypatch.setattr(store.engine.warm, "expire", lambda: 1 / 0)
    deadline = time.monotonic() + 60
    while "evictions" not in store.engine.health.problems() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "division" in store.engine.health.problems()["evictions"]
    monkeypatch.undo()
    while store.engine.health.problems() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert store.engine.health.problems() == {}


def test_an_index_that_grew_too_large_is_brought_down(
    open_store_with: OpenStore, wide: Identity, descriptors: Callable[[], int]
) -> None:
    store = open_store_with(True, policy="lru")
    before = descriptors()
    for seed in range(4):
        save(store, wide, ids(seed), ack="disk")
    store.close()
    store = open_store_with(True, policy="lru", max_tokens=200)
    assert store.engine.index.tokens == 400
    store.engine.eviction.run_once()
    assert store.engine.index.tokens == 200 and there(store, wide, *range(4)) == [0, 0, 100, 100]
    assert store.engine.flush(60) and check(store.engine) == []
    assert descriptors() <= before
