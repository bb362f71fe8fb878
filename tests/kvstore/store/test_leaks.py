"""What the process holds stays flat, whatever goes wrong; views hold what they show, no longer."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.testing import TOKENS, assert_rows, model_rows, random_rows, row_bits, save
from warmkv.schema.errors import Busy, DescriptorLimit, OfferAgain, RecordError, StoreError, TooLarge, WarmKVError
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB = 1024


def mappings() -> list[str]:
    """Mappings of shared memory in this process."""
    with open("/proc/self/maps") as lines:
        return [line for line in lines if "warmkv:" in line]


def holdings(store: Store) -> dict[str, Any]:
    """Everything that could grow unseen."""
    gc.collect()
    with open("/proc/self/maps") as lines:
        regions = sum(1 for _ in lines)
    stats: dict[str, Any] = store.stats()
    engine = store.engine
    with engine.index.changed:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "shared memory": len(mappings()),
            # The allocator takes and gives back arenas of its own now and then.
            "regions": regions // 16,
            "threads": threading.active_count(),
            "readers": stats["cold"]["readers"],
            "entries": stats["entries"],
            "anchors": stats["anchors"],
            "leases": stats["leases"],
            "reserved": engine.warm.ledger.reserved_bytes,
            "resident": engine.warm.ledger.resident_bytes,
            "leased": (engine.warm.ledger.leased_bytes, engine.warm.ledger.lent_bytes),
            "cold": stats["cold"]["bytes"],
            "kept for leases": len(engine.acquisition._leased),
            "flights": (len(engine.acquisition.flights), engine.acquisition.flights.waiting),
            "kept for sessions": (len(store._session._leases), len(store._session._reservations)),  # type: ignore[attr-defined]
            "touched": len(engine.index.touched),
            "orders": (len(engine.index.warm_order), len(engine.index.cold_order)),
            "doomed": len(engine.warm._doomed),
        }


def test_three_hundred_cycles_with_failures_leave_everything_as_it_was(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True, warm_bytes=400 * KIB, busy_timeout_s=0.01, usage_interval_s=0.001)
    rng = random.Random(1)
    failures: dict[str, int] = {}
    load, create = ColdTier.load, memfd.create
    broken: set[str] = set()

    def failing_load(tier: ColdTier, *arguments: Any) -> int:
        if "load" in broken:
            raise StoreError("the disk is asleep")
        return load(tier, *arguments)

    def failing_create(name: str, total_bytes: int) -> int:
        if "create" in broken:
            raise DescriptorLimit("no descriptor left")
        return create(name, total_bytes)

    monkeypatch.setattr(ColdTier, "load", failing_load)
    monkeypatch.setattr(memfd, "create", failing_create)

    def attempt(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except WarmKVError as exc:
            failures[type(exc).__name__] = failures.get(type(exc).__name__, 0) + 1
            return None

    def cycle(number: int) -> None:
        tokens = [number, *range(20)]
        attempt(lambda: save(store, wide, tokens, ack="disk" if number % 3 else "memory"))
        broken.update(kind for kind in ("load", "create") if rng.random() < 0.2)
        attempt(lambda: save(store, wide, [*tokens, 1, 2]))
        attempt(lambda: save(store, wide, list(range(1000))))  # never fits
        attempt(lambda: store.save(wide, tokens, random_rows(wide, 3)))  # no rows of these tokens
        wait_s = 0.001 if number % 3 == 0 else 0.0  # it promises to compute the rest
        restored = attempt(lambda: store.restore(wide, [*tokens, 5, 6], verify=number % 2 == 0, wait_s=wait_s))
        if restored:
            assert_rows(restored, model_rows(wide, [*tokens, 5, 6]))
            if number % 4 == 0:
                attempt(lambda: store.forget(wide, tokens))
            if number % 5:
                restored.close()  # else the collector does it
        broken.clear()
        del restored
        attempt(lambda: store.forget(wide, [*tokens, 1, 2]))
        attempt(store.clear)

    def settle() -> dict[str, Any]:
        assert store.flush(60)
        with store.engine.index.changed:
            assert store.engine.writer is not None
            store.engine.writer.carry_usage(60)
        return holdings(store)

    for number in range(20):
        cycle(number)
    before = settle()
    for number in range(20, 320):
        cycle(number)
    after = settle()
    assert after.pop("regions") <= before.pop("regions") + 1
    assert after == before
    assert before["entries"] == before["resident"] == 0 and failures.keys() >= {"TooLarge", "RecordError", "DescriptorLimit"}
    assert check(store.engine) == []


def test_failing_saves_and_restores_give_every_descriptor_back(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int]
) -> None:
    """Each step of a hand-over fails once, in turn, until it comes through."""
    store = open_store_with(warm_bytes=4 << 20)
    for length in (20, 40, 60):
        save(store, wide, list(range(length)))
    before, real, left = descriptors(), fcntl.fcntl, [0]

    def running_out(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_DUPFD_CLOEXEC:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(24, "Too many open files")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", running_out)
    for count in range(3):
        left[0] = count
        with pytest.raises(DescriptorLimit):
            store.restore(wide, list(range(61)))
        assert descriptors() == before and store.stats()["leases"] == 0
    left[0] = 0
    with pytest.raises(DescriptorLimit):
        save(store, wide, list(range(80)))
    assert descriptors() == before and store.engine.warm.ledger.reserved_bytes == 0
    left[0] = 3
    with store.restore(wide, list(range(61))) as restored:
        assert restored.usable == 60
    assert check(store.engine) == []


def test_threads_that_come_and_go_leave_no_reader_slot(open_store_with: OpenStore, wide: Identity) -> None:
    """LMDB ties a slot to a thread; readers here are as many as threads at once, not as ever were."""
    store = open_store_with(True, warm_bytes=72 * KIB)
    for seed in range(4):
        save(store, wide, [seed, *range(20)], ack="disk")

    def read(seed: int) -> None:
        store.restore(wide, [seed, *range(20), 1]).close()

    for number in range(60):
        thread = threading.Thread(target=read, args=(number % 4,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
    stats: Any = store.stats()
    assert stats["promotions"] >= 59
    assert stats["cold"]["readers"] <= 4


# -- views ------------------------------------------------------------------------------------


def test_a_view_keeps_its_mapping_and_gives_it_back(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with()
    save(store, identity, TOKENS)
    assert mappings() == []
    restored = store.restore(identity, TOKENS)
    assert len(mappings()) == 1  # both layers, all planes
    keys = restored.layers[0].keys
    restored.close()
    del restored
    store.clear()
    gc.collect()
    assert len(mappings()) == 1
    assert row_bits(keys, 8) == row_bits(model_rows(identity, TOKENS)[0].planes[0].rows, 8)
    part = np.asarray(keys[2:3, :1])
    del keys
    gc.collect()
    assert len(mappings()) == 1
    assert part.tobytes() == model_rows(identity, TOKENS)[0].planes[0].rows[2:3, :1].tobytes()
    del part
    gc.collect()
    assert mappings() == []


def test_mappings_of_a_chain_are_given_back_one_by_one(
    open_store_with: OpenStore, identity: Identity, descriptors: Callable[[], int]
) -> None:
    store = open_store_with()
    for length in (3, 6, 9):
        save(store, identity, TOKENS[:length])
    before = descriptors()
    restored = store.restore(identity, [*TOKENS, 1])
    blocks = list(restored.layers[1].planes.values())[0].blocks
    restored.close()
    del restored
    kept = list(blocks)
    del blocks
    for left in (3, 2, 1):
        gc.collect()
        assert len(mappings()) == left
        kept.pop()
    gc.collect()
    assert mappings() == [] and descriptors() == before


def test_the_memory_of_an_evicted_segment_lives_as_long_as_a_view(open_store_with: OpenStore, wide: Identity) -> None:
    """Evicted, forgotten and the store closed: the kernel counts, the bits stay."""
    store = open_store_with(warm_bytes=64 * KIB, lease_ttl_s=1e-9)
    save(store, wide, TOKENS)
    restored = store.restore(wide, TOKENS)
    values = restored.layers[0].values
    save(store, wide, list(range(500, 520)))
    assert store.match(wide, TOKENS).matched == 0
    assert store.engine.warm.ledger.lent_bytes > 0
    del restored
    gc.collect()
    assert store.engine.warm.ledger.lent_bytes == 0
    store.close()
    assert row_bits(values, 8) == row_bits(model_rows(wide, TOKENS)[0].planes[1].rows, 8)
    del values
    gc.collect()
    assert mappings() == []


def test_restored_state_that_nobody_closed_ends_its_lease(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with()
    save(store, identity, TOKENS)
    restored: Any = store.restore(identity, TOKENS)
    gone = weakref.ref(restored)
    restored.myself = restored  # only the collector can end it
    assert store.stats()["leases"] == 1
    del restored
    gc.collect()
    assert gone() is None and store.stats()["leases"] == 0
    assert mappings() == []


def test_a_restore_that_fails_its_checks_holds_nothing(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int]
) -> None:
    """The last segment of three is not what it should be: the first two are let go as well."""
    store = open_store_with()
    for length in (3, 6, 9):
        save(store, identity, TOKENS[:length])
    before, left, check_sealed = descriptors(), [0], memfd.check_sealed

    def failing(fd: int, max_bytes: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise StoreError("not as it should be")
        return check_sealed(fd, max_bytes)

    monkeypatch.setattr(memfd, "check_sealed", failing)
    for count in range(3):
        left[0] = count
        with pytest.raises(StoreError):
            store.restore(identity, [*TOKENS, 1])
        gc.collect()
        assert (mappings(), descriptors(), store.stats()["leases"]) == ([], before, 0)


def test_closing_gives_everything_back(open_store_with: OpenStore, identity: Identity, descriptors: Callable[[], int]) -> None:
    before = descriptors(), threading.active_count()
    for _ in range(5):
        store = open_store_with(True)
        for seed in range(5):
            try:
                save(store, identity, [seed, *TOKENS])
            except (Busy, OfferAgain, TooLarge, RecordError):
                pytest.fail("there is room for five")
        store.restore(identity, [1, *TOKENS]).close()
        store.close()
        store.close()
        assert (descriptors(), threading.active_count()) == before
