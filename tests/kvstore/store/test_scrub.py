"""The scrub: what went bad unasked is found, told, and can be saved anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import lmdb
import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.clock import NS, Clock
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.store.scrub import Scrubber
from warmkv.kvstore.testing import TOKENS, check_restore, save
from warmkv.schema import lmdb_records
from warmkv.schema.errors import StoreError
from warmkv.schema.identity import Identity
from warmkv.schema.records import RecordId

OpenStore = Callable[..., Store]
MIB = 1 << 20
DAY_S = 86400.0


def ids(seed: int, length: int = 30) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


class FakeTime:
    """Wall clock and elapsed time, set by the test."""

    def __init__(self, wall_s: float = 1e9) -> None:
        self.wall_ns = int(wall_s * NS)
        self.elapsed_ns = 0

    def clock(self) -> Clock:
        return Clock(lambda: self.elapsed_ns / NS, lambda: self.wall_ns, lambda: self.elapsed_ns)

    def advance(self, seconds: float) -> None:
        self.wall_ns += int(seconds * NS)
        self.elapsed_ns += int(seconds * NS)


def scrubber_of(store: Store) -> Scrubber:
    assert store.engine.scrubber is not None
    return store.engine.scrubber


def wait_until_it_sleeps(scrubber: Scrubber) -> None:
    """Return once the thread of a scrubber waits for its time."""
    while not scrubber._woken._waiters:  # type: ignore[attr-defined]
        threading.Event().wait(0.01)


def let_go(store: Store) -> None:
    assert store.flush(60)
    with store.engine.index.changed:
        for record in list(store.engine.index.warm_order):
            store.engine.warm.evict(record)
    store.engine.warm.reap()


def spoil(store: Store, table: bytes, key: bytes, at: int = 3) -> None:
    assert store.engine.cold is not None
    env = store.engine.cold._env
    with env.begin(write=True) as txn:
        value = bytearray(txn.get(key, db=env.db[table]) or b"")
        value[at] ^= 1
        txn.put(key, bytes(value), db=env.db[table])


def saved_id(store: Store, identity: Identity, tokens: list[int]) -> RecordId:
    found = save(store, identity, tokens, ack="disk").id
    assert found is not None
    return found


def test_all_that_is_sound_is_read_and_stays(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    for seed in range(5):
        save(store, identity, ids(seed), ack="disk")
    let_go(store)
    save(store, identity, ids(9), ack="disk")
    done = scrubber_of(store).run_once(paced=False)
    with store.engine.index.changed:
        once = sum(record.total_bytes for record in store.engine.index.records.values())
        twice = sum(record.total_bytes for record in store.engine.index.warm_order)
    assert (done.checked, done.bad, done.skipped) == (6, 0, 0) and done.checked_bytes == once + twice
    for seed in (0, 1, 2, 3, 4, 9):
        check_restore(store, identity, [*ids(seed), 7], 30, verify=True)


@pytest.mark.parametrize("table", [b"chunks", b"segments"])
def test_a_bad_entry_is_quarantined_once_and_can_be_saved_anew(
    open_store_with: OpenStore, identity: Identity, table: bytes
) -> None:
    store = open_store_with(True)
    bad = saved_id(store, identity, ids(1))
    saved_id(store, identity, [*ids(1), 5, 6])
    saved_id(store, identity, ids(2))
    let_go(store)
    spoil(store, table, lmdb_records.chunk_key(bad, 0) if table == b"chunks" else bad, at=40)
    done = scrubber_of(store).run_once(paced=False)
    assert done.bad == 1 and store.stats()["quarantines"] == 1
    assert store.stats()["entries"] == 1, "what builds on it goes with it"
    check_restore(store, identity, [*ids(1), 5, 6, 7], 0)
    check_restore(store, identity, [*ids(2), 7], 30)
    assert store.flush(60)
    again = scrubber_of(store).run_once(paced=False)
    assert (again.checked, again.bad) == (1, 0) and store.stats()["quarantines"] == 1
    assert store.engine.cold is not None and store.engine.cold.quarantined() == 1
    assert not save(store, identity, ids(1), ack="disk").duplicate
    assert store.engine.cold.quarantined() == 0
    let_go(store)
    check_restore(store, identity, [*ids(1), 7], 30, verify=True)
    store.close()
    check_restore(open_store_with(True), identity, [*ids(1), 7], 30, verify=True)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_bad_copy_in_memory_goes_and_the_one_on_disk_stays(
    open_store_with: OpenStore, identity: Identity, on_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit of memory behind the seal, played by another container under the record."""
    store = open_store_with(True)
    if not on_disk:
        monkeypatch.setattr(ColdTier, "write", refuse)
    save(store, identity, TOKENS)
    store.flush(60)
    (record,) = store.engine.index.records.values()
    assert (record.cold == Cold.STORED) is on_disk
    content = bytearray(os.pread(record.fd, record.total_bytes, 0))
    content[-5] ^= 16
    fd = memfd.create("spoiled", len(content))
    memfd.write(fd, bytes(content), 0)
    memfd.seal(fd)
    os.dup2(fd, record.fd, inheritable=False)
    os.close(fd)
    done = scrubber_of(store).run_once(paced=False)
    assert scrubber_of(store).found_bad == 1 and done.skipped == 0
    check_restore(store, identity, [*TOKENS, 1], 9 if on_disk else 0, verify=True)
    assert check(store.engine) == []
    monkeypatch.undo()
    assert save(store, identity, TOKENS, ack="disk").duplicate is on_disk


def refuse(*arguments: object) -> None:
    raise StoreError("not now")


def test_what_cannot_be_read_just_now_is_not_bad(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    let_go(store)
    monkeypatch.setattr(ColdTier, "verify", refuse)
    done = scrubber_of(store).run_once(paced=False)
    assert (done.checked, done.bad, done.skipped) == (0, 0, 1)
    monkeypatch.undo()
    check_restore(store, identity, [*TOKENS, 1], 9)


def test_records_that_go_meanwhile_are_no_trouble(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    for seed in range(8):
        save(store, identity, ids(seed), ack="disk")
    let_go(store)
    verify, seen = ColdTier.verify, []

    def forgetting(tier: ColdTier, id_: RecordId) -> object:
        seen.append(id_)
        for seed in range(8):
            store.forget(identity, ids(seed))
        assert store.flush(60)
        return verify(tier, id_)

    monkeypatch.setattr(ColdTier, "verify", forgetting)
    done = scrubber_of(store).run_once(paced=False)
    assert len(seen) == 1 and done.bad == 0 and store.stats()["quarantines"] == 0


def test_it_reads_no_faster_than_it_may(open_store_with: OpenStore, identity: Identity) -> None:
    """By its own account of the time it waits for; a second of the clock is a second's bytes."""
    time = FakeTime()
    store = open_store_with(True, clock=time.clock(), scrub_bytes_per_s=10_000)
    for seed in range(6):
        save(store, identity, ids(seed), ack="disk")
    let_go(store)
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        time.advance(seconds)
        return False

    engine = store.engine
    assert engine.cold is not None
    paced = Scrubber(engine.index, engine.warm, engine.cold, engine.promotion, engine.options, wait=wait)
    done = paced.run_once()
    assert done.checked == 6 and sum(waited) == pytest.approx(done.checked_bytes / 10_000)
    stopped = Scrubber(engine.index, engine.warm, engine.cold, engine.promotion, engine.options, wait=lambda seconds: True)
    assert stopped.run_once().checked == 1 and stopped.passes == 0


# -- when ------------------------------------------------------------------------------------


class Passes:
    """Counts passes of a store's own thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.event = threading.Event()
        real = Scrubber.run_once

        def counted(scrubber: Scrubber, **options: Any) -> object:
            done = real(scrubber, **options)
            self.count += 1
            self.event.set()
            return done

        monkeypatch.setattr(Scrubber, "run_once", counted)


def poke(store: Store) -> None:
    """Let its thread look at the clock."""
    scrubber = scrubber_of(store)
    with scrubber._woken:
        scrubber._woken.notify_all()


def test_a_pass_is_due_after_an_interval_across_restarts(open_store_with: OpenStore, identity: Identity) -> None:
    time = FakeTime()
    options: dict[str, Any] = {"scrub_interval_s": 7 * DAY_S}
    store = open_store_with(True, clock=time.clock(), **options)
    assert scrubber_of(store)._due_s() == pytest.approx(7 * DAY_S)
    for _ in range(6):  # a machine that is switched off every night
        store.close()
        time.advance(DAY_S)
        store = open_store_with(True, clock=time.clock(), **options)
    assert scrubber_of(store)._due_s() == pytest.approx(DAY_S)
    scrubber_of(store).run_once()
    assert scrubber_of(store)._due_s() == pytest.approx(7 * DAY_S)
    store.close()
    time.advance(2 * DAY_S)
    store = open_store_with(True, clock=time.clock(), **options)
    assert scrubber_of(store)._due_s() == pytest.approx(5 * DAY_S)
    assert scrubber_of(store).progress()["completed_s"] == (time.wall_ns - int(2 * DAY_S * NS)) // NS


@pytest.mark.parametrize("jump_s", [-400 * DAY_S, 400 * DAY_S])
def test_a_clock_that_jumped_neither_stops_the_scrub_nor_makes_it_endless(
    open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    time = FakeTime()
    store = open_store_with(True, clock=time.clock(), scrub_interval_s=DAY_S)
    scrubber_of(store).run_once()
    store.close()
    time.wall_ns += int(jump_s * NS)
    passes = Passes(monkeypatch)
    store = open_store_with(True, clock=time.clock(), scrub_interval_s=DAY_S)
    if jump_s > 0:
        assert passes.event.wait(30)
    assert passes.count == (jump_s > 0) and 0 < scrubber_of(store)._due_s() <= DAY_S
    store.close()
    time.advance(DAY_S / 2)
    store = open_store_with(True, clock=time.clock(), scrub_interval_s=DAY_S)
    assert 0 < scrubber_of(store)._due_s() <= DAY_S / 2 + 1


def test_another_interval_counts_from_the_last_pass(open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that is read again: off, on, and shorter than what has passed already."""
    time = FakeTime()
    store = open_store_with(True, clock=time.clock())
    scrubber = scrubber_of(store)
    scrubber.run_once()
    time.advance(DAY_S)
    scrubber.set_pace(3 * DAY_S, MIB)
    assert scrubber._due_s() == pytest.approx(2 * DAY_S)
    wait_until_it_sleeps(scrubber)
    scrubber.set_pace(0, MIB)
    time.advance(9 * DAY_S)
    assert scrubber._due_s() > 0
    passes = Passes(monkeypatch)
    scrubber.set_pace(5 * DAY_S, MIB)
    assert passes.event.wait(30)


def test_a_pass_that_was_asked_for_begins_at_once(open_store_with: OpenStore, identity: Identity) -> None:
    """Also in a store that is never scrubbed by itself, and its thread ends with the store."""
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    scrubber = scrubber_of(store)
    assert not [thread for thread in threading.enumerate() if thread.name == "warmkv-scrub"]
    scrubber.scrub_now()
    assert scrubber.progress()["running"]
    while scrubber.progress()["running"]:
        threading.Event().wait(0.01)
    assert scrubber.progress()["passes"] == 1
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "warmkv-scrub"]


def test_a_pass_that_fails_is_not_the_last_one(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True, scrub_interval_s=DAY_S)
    save(store, identity, TOKENS, ack="disk")
    scrubber, real, failed = scrubber_of(store), Scrubber._all, threading.Event()

    def broken(scrubber: Scrubber) -> object:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("odd")
        return real(scrubber)

    monkeypatch.setattr(Scrubber, "_all", broken)
    scrubber.scrub_now()
    assert failed.wait(30)
    scrubber.scrub_now()
    while not scrubber.passes:
        threading.Event().wait(0.01)
    assert store.engine.health.problems() == {}


def test_a_thread_that_ended_is_a_health_problem(open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scrubber, "_run", lambda scrubber: None)
    store = open_store_with(True, scrub_interval_s=DAY_S)
    thread = scrubber_of(store)._thread
    assert thread is not None
    thread.join()
    assert "has ended" in store.engine.health.problems()["scrub"]


# -- readers ---------------------------------------------------------------------------------


def test_a_full_reader_table_is_looked_through_once_and_the_read_goes_on(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    let_go(store)
    assert store.engine.cold is not None
    env = store.engine.cold._env
    real, calls = env._env, []

    class Full:
        """As if the slots belonged to processes that died: looking for those frees them."""

        def begin(self, **options: Any) -> Any:
            calls.append("begin")
            if "reader_check" not in calls:
                raise lmdb.ReadersFullError("no slot")
            return real.begin(**options)

        def reader_check(self) -> int:
            calls.append("reader_check")
            return int(real.reader_check())

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    env._env = Full()
    check_restore(store, identity, [*TOKENS, 1], 9, verify=True)
    assert calls[:3] == ["begin", "reader_check", "begin"]
    env._env = real


def test_reads_that_fail_hold_no_reader_slots(open_store_with: OpenStore, identity: Identity) -> None:
    """Even while whoever called still has the exception: LMDB's slot lives as long as the
    transaction object, ended or not."""
    store = open_store_with(True)
    bad = saved_id(store, identity, ids(1))
    let_go(store)
    spoil(store, b"chunks", lmdb_records.chunk_key(bad, 0))
    assert store.engine.cold is not None
    kept: list[Exception] = []
    readers = store.engine.cold.info()["readers"]
    for _ in range(50):
        for use in (lambda: store.engine.cold.load(bad, 1), lambda: store.engine.cold.verify(bad)):  # type: ignore[union-attr]
            try:
                use()
            except Exception as exc:  # noqa: BLE001 - kept on purpose
                kept.append(exc)
    assert len(kept) == 100 and store.engine.cold.info()["readers"] <= readers + 2
    store.clear()


def test_what_is_being_read_does_not_give_way(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted, and stored anew, between the reading and the verdict it would be taken for bad."""
    store = open_store_with(True)
    engine = store.engine
    assert engine.cold is not None and engine.writer is not None
    save(store, identity, ids(1), ack="disk")
    verify, trimmed = engine.cold.verify, []

    def want_its_room(id_: RecordId) -> object:
        with engine.index.changed:
            trimmed.append(engine.writer.trim(1 << 40))
        assert engine.writer.flush(60)
        return verify(id_)

    monkeypatch.setattr(engine.cold, "verify", want_its_room)
    done = scrubber_of(store).run_once(paced=False)
    assert (done.checked, done.bad, trimmed) == (1, 0, [[]])
    assert store.report("verify")["bad"] == [] and trimmed == [[], []]
    assert engine.eviction.evict("cold", 0)["cold_records"] == 1, "afterwards it may go"
    assert check(engine) == []
