"""Packing while everything else goes on: what is forgotten, saved, pinned, damaged or closed
meanwhile, budgets that are too small, and many who ask at once. Nobody sees a miss or another's
rows, nothing leaks, and the budget holds at every moment."""

from __future__ import annotations

import fcntl
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.testing import DaemonProcess, child_environ
from warmkv.kvstore import memfd
from warmkv.kvstore.client import connect
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store, packing
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.cold_reads import ColdReads
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing import assert_rows, check_restore, model_rows, save
from warmkv.schema import ids as naming
from warmkv.schema import segment as container
from warmkv.schema.errors import Busy, ClosedError, ColdFull, DescriptorLimit, StoreError
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB, MIB = 1024, 1 << 20
#: Longer than anything here takes; only a hang reaches it.
PATIENCE_S = 60.0
#: Turns of a conversation, two tokens each; in memory more than are left unpacked.
TURNS = 8
IDS = [100 + at for at in range(2 * TURNS)]


@pytest.fixture(autouse=True)
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_SEGMENTS", TURNS - 2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as made:
        yield made


def talk(store: Store, identity: Identity, ids: Sequence[int] = IDS, step: int = 2) -> None:
    """A conversation saved after each of its turns."""
    for length in range(step, len(ids) + 1, step):
        save(store, identity, ids[:length])


def talked(open_store_with: OpenStore, identity: Identity, cold: bool, **options: Any) -> Store:
    """A store in which it was had; with ``cold`` after a restart, with these options."""
    store = open_store_with(cold or None)
    talk(store, identity)
    if cold:
        assert store.flush(PATIENCE_S)
        store.close()
        store = open_store_with(True, **options)
    return store


def demote(store: Store) -> None:
    """Leave everything on disk alone."""
    assert store.flush(PATIENCE_S)
    with store.engine.index.changed:
        for record in sorted(store.engine.index.warm_order, key=lambda record: -record.start):
            store.engine.warm.evict(record)
    store.engine.warm.reap()


def segments(store: Store) -> list[Record]:
    return sorted(store.engine.index.records.values(), key=lambda record: (record.start, record.end))


def settled(store: Store) -> None:
    """Nothing is promised or under way any more, and every invariant holds."""
    ledger = store.engine.warm.ledger
    assert (ledger.promoting_bytes, ledger.promoting_entries, ledger.reserved_bytes, ledger.leased_bytes) == (0, 0, 0, 0)
    assert not any(record.promotion or record.leases for record in segments(store))
    assert not store.engine.acquisition._leased
    assert check(store.engine) == []


def right(restored: Restored, identity: Identity, ids: Sequence[int]) -> int:
    """How much of these ids came back, once it is proven to be theirs."""
    with restored:
        if restored:
            assert_rows(restored, model_rows(identity, ids))
        return restored.usable


class Gate:
    """Holds the first who comes to a step of packing until it is opened."""

    STEPS = ("plan", "make_room", "place", "finish")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store, step: str) -> None:
        self.arrived, self.opened = threading.Event(), False
        self._changed = store.engine.index.changed
        owner: Any = {"plan": packing, "make_room": store.engine.warm}.get(step, packing.Packer)
        work = getattr(owner, step)

        def held(*arguments: Any, **options: Any) -> Any:
            if not self.arrived.is_set():
                self.arrived.set()
                # Gives up the index lock where it is held, as a wait for room does.
                with self._changed:
                    assert self._changed.wait_for(lambda: self.opened, PATIENCE_S)
            return work(*arguments, **options)

        monkeypatch.setattr(owner, step, held)

    def open(self) -> None:
        with self._changed:
            self.opened = True
            self._changed.notify_all()


# -- what happens meanwhile -----------------------------------------------------------------------


def forgotten(store: Store, identity: Identity) -> None:
    assert store.forget(identity, IDS).records == TURNS


def cleared(store: Store, identity: Identity) -> None:
    store.clear()


def replaced(store: Store, identity: Identity) -> None:
    forgotten(store, identity)
    talk(store, identity)


def continued(store: Store, identity: Identity) -> None:
    save(store, identity, [*IDS, 1, 2, 3])


def parted(store: Store, identity: Identity) -> None:
    save(store, identity, [*IDS[:7], 1, 2, 3])


def pinned(store: Store, identity: Identity) -> None:
    assert store.pin(identity, IDS[:6], 3600) == 6


def evicted(store: Store, identity: Identity) -> None:
    """Somebody needs room, and takes what is on disk, or was not asked for lately, out of memory."""
    with store.engine.index.changed:
        for record in [item for item in store.engine.index.warm_order if item.cold == Cold.STORED or not item.leases]:
            store.engine.warm.evict(record)
    store.engine.warm.reap()


MEANWHILE = {work.__name__: work for work in (forgotten, cleared, replaced, continued, parted, pinned, evicted)}


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("step", Gate.STEPS)
@pytest.mark.parametrize("name", MEANWHILE)
def test_what_happens_while_a_chain_is_packed_has_happened_afterwards(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor,
    descriptors: Callable[[], int], cold: bool, step: str, name: str,
) -> None:  # fmt: skip
    store = talked(open_store_with, identity, cold)
    store.match(identity, IDS)
    empty = descriptors() - store.engine.warm.ledger.resident_entries
    gate = Gate(monkeypatch, store, step)
    reader = pool.submit(store.restore, identity, [*IDS, 7])
    assert gate.arrived.wait(PATIENCE_S)
    MEANWHILE[name](store, identity)
    gate.open()
    usable = right(reader.result(PATIENCE_S), identity, IDS)
    gone = name in ("forgotten", "cleared")
    assert usable == (0 if gone else 16) or name == "replaced"
    assert store.match(identity, IDS).matched == (0 if gone else 16)
    if name == "continued":
        check_restore(store, identity, [*IDS, 1, 2, 3, 7], 19, verify=True)
    if name == "parted":
        check_restore(store, identity, [*IDS[:7], 1, 2, 3, 7], 10, verify=True)
    if name == "pinned":
        assert any(record.pinned_until_ns and record.end >= 6 for record in segments(store))
    if not gone:
        check_restore(store, identity, [*IDS, 7], 16, verify=True)
    assert store.flush(PATIENCE_S)
    settled(store)
    gc.collect()
    assert descriptors() == empty + store.engine.warm.ledger.resident_entries
    store.clear()
    assert store.engine.warm.ledger.used_bytes == 0 and segments(store) == []


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("step", Gate.STEPS)
def test_a_store_closed_while_it_packs_keeps_nothing(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor,
    descriptors: Callable[[], int], cold: bool, step: str,
) -> None:  # fmt: skip
    before = descriptors()
    store = talked(open_store_with, identity, cold)
    gate = Gate(monkeypatch, store, step)
    reader = pool.submit(store.restore, identity, [*IDS, 7])
    assert gate.arrived.wait(PATIENCE_S)
    closing = pool.submit(store.close)
    changed = store.engine.index.changed
    with changed:
        assert changed.wait_for(lambda: store.engine.warm.closing, PATIENCE_S)
    gate.open()
    closing.result(PATIENCE_S)
    try:
        right(reader.result(PATIENCE_S), identity, IDS)
    except (ClosedError, StoreError):
        pass
    gc.collect()
    assert store.engine.warm.ledger.used_bytes == 0 and descriptors() == before
    assert not any(record.promotion for record in segments(store))


# -- many at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("turns", [TURNS, 140])
def test_twenty_who_ask_at_once_cause_one_pack(
    open_store_with: OpenStore, identity: Identity, pool: ThreadPoolExecutor, cold: bool, turns: int
) -> None:
    """Also where all of it is too long to be handed over as it is."""
    store, ids = open_store_with(cold or None), list(range(turns))
    talk(store, identity, ids, 1)
    if cold:
        demote(store)
    barrier = threading.Barrier(20)

    def read() -> Restored:
        barrier.wait(PATIENCE_S)
        return store.restore(identity, [*ids, 7])

    for task in [pool.submit(read) for _ in range(20)]:
        assert right(task.result(PATIENCE_S), identity, ids) == turns
    assert store.engine.promotion.packed == 1 and store.stats()["hits"] == 20
    settled(store)


READER = """
import sys
from warmkv.kvstore.client import connect
from warmkv.kvstore.testing import assert_rows, model_rows, random_identity
identity, ids = random_identity(), list(range(150))
client = connect(sys.argv[1], strict=True)
print("ready", flush=True)
sys.stdin.readline()
with client.restore(identity, [*ids, 7], verify=True) as restored:
    assert restored.usable == 150, restored.reason
    assert_rows(restored, model_rows(identity, ids))
"""


def test_processes_that_ask_at_once_cause_one_pack(identity: Identity, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as daemon:
        with connect(daemon.socket, strict=True) as client:
            for length in range(1, 151):
                save(client, identity, range(length), ack="disk" if length == 150 else "memory")
        daemon.stop()
        daemon.start()
        command = [sys.executable, "-c", READER, str(daemon.socket)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": child_environ()}
        readers: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(5)]
        assert [reader.stdout.readline() for reader in readers] == [b"ready\n"] * 5
        for reader in readers:
            reader.stdin.write(b"\n")
            reader.stdin.flush()
        assert [(reader.communicate(timeout=PATIENCE_S), reader.returncode)[1] for reader in readers] == [0] * 5
        with connect(daemon.socket, strict=True) as client:
            stats = client.stats()
    assert (stats["packed"], stats["promotions"], stats["hits"], stats["leases"]) == (1, 1, 5, 0)


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
def test_two_who_pack_overlapping_runs_are_both_answered(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor, cold: bool
) -> None:
    """The second comes while the first packs half of what it wants itself."""
    store, ids = open_store_with(cold or None), list(range(300))
    talk(store, identity, ids, 1)
    if cold:
        demote(store)
    gate = Gate(monkeypatch, store, "place")
    first = pool.submit(store.restore, identity, [*ids[:150], 999])
    assert gate.arrived.wait(PATIENCE_S)
    others = [pool.submit(store.restore, identity, [*ids[:length], 999]) for length in (300, 140, 300, 20)]
    gate.open()
    assert right(first.result(PATIENCE_S), identity, ids) == 150
    assert [right(other.result(PATIENCE_S), identity, ids) for other in others] == [300, 140, 300, 20]
    settled(store)


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
def test_readers_never_see_a_miss_through_two_hundred_saves_and_packing(
    open_store_with: OpenStore, identity: Identity, pool: ThreadPoolExecutor, cold: bool
) -> None:
    store, budget = open_store_with(cold or None, warm_bytes=6 * MIB), 6 * MIB
    ids = list(range(400))
    rows, other = model_rows(identity, ids), [*ids[:30], *range(1000, 1400)]
    others = model_rows(identity, other)
    saved, done = [2, 30], threading.Event()

    def read(seed: int) -> int:
        rng, hits = random.Random(seed), 0
        while not done.is_set():
            which = rng.randrange(2)
            length = saved[which] if rng.random() < 0.5 else rng.randint(1, saved[which])
            asked = [*(ids, other)[which][:length], 9999]
            with store.restore(identity, asked, verify=rng.random() < 0.2) as restored:
                assert restored.usable == length, restored.reason
                assert_rows(restored, (rows, others)[which])
            hits += 1
        return hits

    def demoting() -> None:
        rng = random.Random(9)
        while not done.is_set():
            with store.engine.index.changed:
                for record in list(store.engine.index.warm_order):
                    copied = record.cold == Cold.STORED or (record.packed and not record.children)
                    if copied and not record.leases and rng.random() < 0.3:
                        store.engine.warm.evict(record)
                store.engine.index.changed.wait(0.01)
            store.engine.warm.reap()

    save(store, identity, ids[:2])
    save(store, identity, other[:30])
    work = [pool.submit(read, seed) for seed in range(4)] + ([pool.submit(demoting)] if cold else [])  # type: ignore[operator]
    try:
        for turn in range(2, 201):
            save(store, identity, ids[: 2 * turn])
            saved[0] = 2 * turn
            if turn % 4 == 0:
                save(store, identity, other[: 30 + turn])
                saved[1] = 30 + turn
    finally:
        done.set()
    assert all(task.result(PATIENCE_S) for task in work[:4])
    assert store.engine.promotion.packed > 20 and store.engine.warm.ledger.peak_bytes <= budget
    settled(store)


# -- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kib", [60, 110, 230, 420, 500, 830, 900, 1000, 1050, 1200, 2000])
@pytest.mark.parametrize("leased", [False, True])
def test_a_budget_that_is_too_small_gives_what_it_gives_without_packing(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, kib: int, leased: bool
) -> None:
    """Ten segments of 104 KiB: packing takes nothing from memory that the chain itself needs."""
    ids, other = list(range(500)), list(range(1000, 1150))
    options = {"warm_bytes": kib * KIB, "busy_timeout_s": 0.01}
    store = open_store_with(True)
    talk(store, wide, ids, 50)
    save(store, wide, other)
    found = []
    for factor in (4, 1 << 40):
        store.flush(PATIENCE_S)
        store.close()
        store = open_store_with(True, **options)
        monkeypatch.setattr(packing, "MAX_PACK_BYTES", (512 << 20) // factor)
        held = store.restore(wide, other) if leased else None
        found += [right(store.restore(wide, [*ids, 7]), wide, ids) for _ in range(2)]
        assert store.engine.warm.ledger.peak_bytes <= kib * KIB
        if held is not None:
            held.close()
        settled(store)
    assert found[:2] == found[2:]


@pytest.mark.parametrize("spare", [0, 4096, 10_000, 30_000])
def test_a_crowded_chain_in_a_full_memory_is_handed_over_as_it_is(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    """Nobody waits for room for a copy, whatever is being written: the segments are of use as they are."""
    store, ids = open_store_with(), list(range(12))
    talk(store, identity, ids, 1)
    ledger = store.engine.warm.ledger
    ledger.peak_bytes, ledger.budget_bytes = 0, ledger.resident_bytes + spare
    monkeypatch.setattr(store.engine.warm, "_waiting_helps", lambda: pytest.fail("waited for room"))
    for _ in range(2):
        assert right(store.restore(identity, [*ids, 7]), identity, ids) == 12
        settled(store)
    assert bool(store.engine.promotion.packed) == (spare > 5000)


def test_few_entries_are_enough_for_a_long_chain(open_store_with: OpenStore, identity: Identity) -> None:
    store = talked(open_store_with, identity, True, warm_entries=1, busy_timeout_s=0.01)
    assert right(store.restore(identity, [*IDS, 7]), identity, IDS) == 16
    settled(store)


def test_room_that_is_about_to_come_is_waited_for(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    """Segments on their way from disk need it anyhow: another's pack fails, its room is theirs."""
    store = open_store_with(True)
    chains = [[seed * 1000 + at for at in range(60)] for seed in range(2)]
    for ids in chains:
        talk(store, wide, ids, 20)
    store.flush(PATIENCE_S)
    store.close()
    store = open_store_with(True, warm_bytes=150 * KIB, busy_timeout_s=PATIENCE_S)
    monkeypatch.setattr(store.engine.promotion, "_runs", lambda spans: list(packing.runs(spans, 1 << 40)))
    gate = Gate(monkeypatch, store, "place")
    first = pool.submit(store.restore, wide, [*chains[0], 7])
    assert gate.arrived.wait(PATIENCE_S)
    second = pool.submit(store.restore, wide, [*chains[1], 7])
    assert store.forget(wide, chains[0]).records == 3
    gate.open()
    assert right(first.result(PATIENCE_S), wide, chains[0]) == 0
    assert right(second.result(PATIENCE_S), wide, chains[1]) == 60
    assert store.engine.promotion.packed == 1 and store.engine.warm.ledger.peak_bytes <= 150 * KIB
    settled(store)


# -- leases ---------------------------------------------------------------------------------------


def test_originals_somebody_looks_at_stay_until_they_are_let_go(
    open_store_with: OpenStore, identity: Identity, wide: Identity
) -> None:  # fmt: skip
    store = open_store_with(warm_bytes=2 * MIB)
    talk(store, identity)
    with store.restore(identity, [*IDS[:10], 7]) as held:
        assert right(store.restore(identity, [*IDS, 7]), identity, IDS) == 16
        assert [(record.end, record.packed) for record in segments(store)] == [
            (2, False), (16, True), (4, False), (6, False), (8, False), (10, False)
        ]  # fmt: skip
        assert check(store.engine) == []
        assert_rows(held, model_rows(identity, IDS))
        store.forget(identity, IDS)
        assert store.engine.warm.ledger.leased_bytes > 0 and segments(store) == []
        assert_rows(held, model_rows(identity, IDS))
    settled(store)


def test_a_packed_segment_is_leased_from_the_moment_it_is_there(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who makes room right then takes another one."""
    store = open_store_with(warm_bytes=1000 * KIB, busy_timeout_s=0.01)
    ids = list(range(80))
    talk(store, wide, ids, 10)
    replace = store.engine.promotion._replace

    def crowding(pack: Any, made: Record) -> None:
        replace(pack, made)
        assert made.leases and store.engine.warm.leased(made)
        with pytest.raises(Busy):
            store.engine.warm.make_room(999 * KIB)

    monkeypatch.setattr(store.engine.promotion, "_replace", crowding)
    assert right(store.restore(wide, [*ids, 7]), wide, ids) == 80
    settled(store)


def drop(store: Store, records: Sequence[Record]) -> None:
    """Take records out of both tiers, the last first, as evictions do."""
    removal: Any = store.engine.removal
    for record in reversed(records):
        with store.engine.index.changed:
            removal._drop(record)
        removal._finish([record])


def test_an_older_packed_segment_stays_as_long_as_something_builds_on_it(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk lost the originals and takes nothing any more: what is saved then names the packed one
    as its parent, and is to find it there once the disk works again."""

    def full_disk(*_: object) -> None:
        raise ColdFull("no room left")

    store, ids = talked(open_store_with, identity, True), [*IDS, 1, 2, 3]
    check_restore(store, identity, [*IDS, 7], 16)
    drop(store, [record for record in segments(store) if not record.packed])
    with monkeypatch.context() as full:
        full.setattr(ColdTier, "write", full_disk)
        full.setattr(packing, "MAX_SEGMENTS", 1)
        for length in (17, 18):
            save(store, identity, ids[:length])
        check_restore(store, identity, [*ids[:18], 7], 18)
        drop(store, [record for record in segments(store) if not record.packed])
        save(store, identity, ids)
        check_restore(store, identity, [*ids, 7], 19)
        assert store.flush(PATIENCE_S) and check(store.engine) == []
        assert [(record.start, record.end, record.packed) for record in segments(store)] == [
            (0, 16, True), (0, 19, True), (16, 18, True), (18, 19, False)
        ]  # fmt: skip
    assert save(store, identity, ids, ack="disk").durable
    store.close()
    check_restore(open_store_with(True), identity, [*ids, 7], 19, verify=True)


# -- damage ---------------------------------------------------------------------------------------


def damage(store: Store, record: Record) -> None:
    """Flip a bit of a record's rows on disk."""
    cold: Any = store.engine.cold
    with cold._env.begin(write=True) as txn:
        (key,) = [key for key, _ in txn.cursor(cold._env.db[b"chunks"]) if key.startswith(record.id)]
        chunk = bytearray(txn.get(key, db=cold._env.db[b"chunks"]))
        chunk[3] ^= 1
        txn.put(key, bytes(chunk), db=cold._env.db[b"chunks"])


@pytest.mark.parametrize("bad", [0, 1, 4, TURNS - 1])
def test_a_flipped_bit_in_one_part_takes_it_and_what_builds_on_it(
    open_store_with: OpenStore, identity: Identity, bad: int
) -> None:  # fmt: skip
    store = talked(open_store_with, identity, True)
    save(store, identity, [*IDS[:2], 50, 51])
    damage(store, segments(store)[bad if bad < 2 else bad + 1])
    with store.restore(identity, [*IDS, 7]) as restored:
        assert restored.usable == 2 * bad and "does not match its digest" in restored.reason
    assert right(store.restore(identity, [*IDS, 7]), identity, IDS) == 2 * bad
    check_restore(store, identity, [*IDS[:2], 50, 51, 7], 4 if bad else 0)
    stats: Any = store.stats()
    assert stats["quarantines"] == 1 and stats["cold"]["quarantined"] == 1
    talk(store, identity)
    check_restore(store, identity, [*IDS, 7], 16, verify=True)
    settled(store)


def test_a_packed_segment_outlives_the_damage_of_its_originals(open_store_with: OpenStore, identity: Identity) -> None:
    """It was made while they were whole."""
    store = talked(open_store_with, identity, True)
    check_restore(store, identity, [*IDS, 7], 16)
    damage(store, segments(store)[4])
    bad: Any = store.report("verify")["bad"]
    assert len(bad) == 1
    check_restore(store, identity, [*IDS, 7], 16, verify=True)
    assert save(store, identity, [*IDS, 1], ack="disk").durable
    store.close()
    check_restore(open_store_with(True), identity, [*IDS, 1, 7], 17, verify=True)


# -- leaks ----------------------------------------------------------------------------------------


def failing(error: Callable[[], Exception], after: int, work: Callable[..., Any]) -> Callable[..., Any]:
    """``work`` until it was called ``after`` times, then once the error."""
    calls = [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == after + 1:
            raise error()
        return work(*arguments, **options)

    return wrapped


#: Where packing may break off: owner, name, error.
BREAKS: dict[str, tuple[Any, str, Callable[[], Exception]]] = {
    "no descriptor": (memfd, "create", lambda: DescriptorLimit("no descriptor left")),
    "no memory": (memfd, "write", lambda: StoreError("pwrite into shared memory failed")),
    "not sealed": (memfd, "seal", lambda: StoreError("sealing failed")),
    "not mapped": (memfd, "map_private", lambda: StoreError("mapping failed")),
    "disk asleep": (ColdTier, "read", lambda: StoreError("the disk is asleep")),
    "part not opened": (fcntl, "fcntl", lambda: OSError(24, "Too many open files")),
}


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("name", BREAKS)
def test_packing_that_breaks_off_leaves_everything_as_it_was(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], int],
    cold: bool, name: str,
) -> None:  # fmt: skip
    store = talked(open_store_with, identity, cold)
    store.match(identity, IDS)
    empty, threads = descriptors() - store.engine.warm.ledger.resident_entries, threading.active_count()
    owner, attribute, error = BREAKS[name]
    for after in (0, 1, 5):
        with monkeypatch.context() as broken:
            broken.setattr(owner, attribute, failing(error, after, getattr(owner, attribute)))
            try:
                usable = right(store.restore(identity, [*IDS, 7]), identity, IDS)
                assert usable == 16
            except StoreError:  # met again where it is handed over
                pass
        settled(store)
        gc.collect()
        assert descriptors() == empty + store.engine.warm.ledger.resident_entries
        if cold:
            demote(store)
    check_restore(store, identity, [*IDS, 7], 16, verify=True)
    assert store.engine.promotion.packed and threading.active_count() == threads
    settled(store)


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
def test_an_error_that_is_not_ours_reaches_who_asks_and_nobody_else(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    store = talked(open_store_with, identity, cold)
    for owner, name in ((packing, "plan"), (packing.Packer, "place"), (packing.Packer, "finish")):
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                store.restore(identity, [*IDS, 7])
        settled(store)
    check_restore(store, identity, [*IDS, 7], 16, verify=True)


def test_rounds_of_packing_leave_nothing_behind(
    open_store_with: OpenStore, identity: Identity, descriptors: Callable[[], int]
) -> None:  # fmt: skip
    def mappings() -> int:
        gc.collect()
        with open("/proc/self/maps") as lines:
            return sum("warmkv:" in line for line in lines)

    for cold in (False, True):
        store = open_store_with(cold or None)
        held = []
        for _ in range(8):
            talk(store, identity)
            if cold:
                demote(store)
            assert right(store.restore(identity, [*IDS, 7]), identity, IDS) == 16
            store.clear()
            held.append((descriptors(), mappings(), threading.active_count(), store.stats()["leases"]))
        assert len(set(held[2:])) == 1 and held[-1][1] == 0
        settled(store)
        store.close()


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "disk"])
def test_nothing_slow_is_done_under_the_index_lock(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, cold: bool
) -> None:
    store = talked(open_store_with, identity, cold)
    changed: Any = store.engine.index.changed
    called: set[str] = set()

    def watched(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def checked(*arguments: Any, **options: Any) -> Any:
            assert not changed._is_owned(), f"{name} under the index lock"
            called.add(name)
            return work(*arguments, **options)

        monkeypatch.setattr(owner, name, checked)

    slow = {
        memfd: ("create", "write", "seal", "map_private"), container: ("payload_digests", "encode_head", "decode_head"),
        naming: ("segment_id",), ColdTier: ("read", "load"), ColdReads: ("_chunk",), packing.Packer: ("place", "finish"),
    }  # fmt: skip
    for owner, names in slow.items():
        for name in names:
            watched(owner, name)
    assert right(store.restore(identity, [*IDS, 7]), identity, IDS) == 16
    assert called >= {"create", "write", "seal", "payload_digests", "segment_id", "place", "finish"}
    assert store.engine.promotion.packed == 1


def test_who_waits_for_a_pack_that_fails_is_served_one_by_one(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    store = talked(open_store_with, identity, True)
    gate = Gate(monkeypatch, store, "finish")
    monkeypatch.setattr(packing.Packer, "finish", failing(lambda: StoreError("no memory"), 0, packing.Packer.finish))
    gate_first: Future[Restored] = pool.submit(store.restore, identity, [*IDS, 7])
    others = [pool.submit(store.restore, identity, [*IDS[:length], 7]) for length in (16, 9, 3)]
    gate.open()
    assert right(gate_first.result(PATIENCE_S), identity, IDS) == 16
    assert [right(other.result(PATIENCE_S), identity, IDS) for other in others] == [16, 9, 3]
    settled(store)
