"""The writer thread: it outlives every failure, says what failed, and tries again."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmkv.daemon.testing import eventually
from warmkv.kvstore.store import Store, lmdb_map, room, write_behind
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing import check_restore, save
from warmkv.schema.errors import ColdFull
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, RecordId

OpenStore = Callable[..., Store]
KIB = 1024
PATIENCE_S = 60.0


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def cold(store: Store) -> dict[str, Any]:
    found = store.stats()["cold"]
    assert isinstance(found, dict)
    return found


def test_a_parent_on_disk_stays_under_a_child_that_left_the_disk_only(open_store_with: OpenStore, wide: Identity) -> None:
    """Parent cold only, child in both tiers: making room on disk may take the child's copy, but
    not the parent, on which the child's copy in memory still builds."""
    store = open_store_with(True, warm_bytes=4 << 20, cold_bytes=700 * KIB)
    save(store, wide, ids(1), ack="disk")
    save(store, wide, ids(1, 200), ack="disk")
    engine = store.engine
    child, parent = (next(r for r in engine.index.records.values() if r.start == start) for start in (100, 0))
    with engine.index.changed:
        engine.warm.evict(child)
        engine.warm.evict(parent)
    engine.warm.reap()
    engine.promotion.promote(child)
    assert child.warm and not parent.warm
    with pytest.raises(ColdFull):
        save(store, wide, ids(2, 300), ack="disk")
    assert check(engine) == []
    check_restore(store, wide, [*ids(1, 200), 7], 200)


def test_a_budget_that_shrank_is_met_at_the_next_start(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, cold_bytes=8 << 20)
    for seed in range(8):
        save(store, wide, ids(seed), ack="disk")
    store.close()
    smaller = open_store_with(True, cold_bytes=700 * KIB)
    assert _until(smaller, lambda: cold(smaller)["bytes"] <= 700 * KIB)
    assert smaller.match(wide, [*ids(7), 1]).usable == 100
    assert smaller.match(wide, [*ids(0), 1]).usable == 0


def test_pins_over_a_shrunken_budget_do_not_end_the_writer(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, cold_bytes=8 << 20)
    for seed in range(6):
        save(store, wide, ids(seed), ack="disk")
        store.pin(wide, ids(seed), 3600)
    store.close()
    smaller = open_store_with(True, cold_bytes=700 * KIB)
    with pytest.raises(ColdFull, match="do not fit the cold budget"):
        save(smaller, wide, ids(9), ack="disk")
    assert smaller.flush(PATIENCE_S)
    for seed in range(6):
        assert smaller.match(wide, [*ids(seed), 1]).usable == 100
        smaller.unpin(wide, ids(seed))
    assert save(smaller, wide, ids(9), ack="disk").durable
    assert cold(smaller)["bytes"] <= 700 * KIB


def test_a_writer_without_descriptors_says_so_and_lives(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    writer = store.engine.writer
    assert writer is not None

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(writer, "_item", refuse)
    with pytest.raises(ColdFull, match="Too many open files"):
        save(store, wide, ids(1), ack="disk")
    check_restore(store, wide, ids(1), 99)
    monkeypatch.undo()
    assert save(store, wide, ids(1), ack="disk").durable
    assert store.flush(PATIENCE_S) and check(store.engine) == []


def test_what_failed_is_written_once_more_at_close(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    full = _Refusing(store, "write", monkeypatch)
    save(store, wide, ids(1))
    save(store, wide, ids(1, 200))
    assert store.flush(PATIENCE_S)
    assert cold(store)["entries"] == 0 and full.calls > 0
    monkeypatch.undo()
    store.close()
    again = open_store_with(True)
    check_restore(again, wide, [*ids(1, 200), 7], 200, verify=True)


def test_a_refused_deletion_is_told_and_tried_again(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was forgotten does not come back with the next start, though the disk was full."""
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    _Refusing(store, "delete", monkeypatch)
    with pytest.raises(ColdFull, match="refused to delete"):
        store.forget(wide, ids(1))
    check_restore(store, wide, ids(1), 0)
    with pytest.raises(ColdFull, match="room could not be made"):
        save(store, wide, ids(1), ack="disk")
    check_restore(store, wide, ids(1), 99)
    monkeypatch.undo()
    assert store.forget(wide, ids(1)).records == 1
    store.close()
    again = open_store_with(True)
    assert again.engine.swept == 0
    check_restore(again, wide, ids(1), 0)


def test_a_record_saved_again_survives_the_late_deletion_of_its_namesake(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    _Refusing(store, "delete", monkeypatch)
    with pytest.raises(ColdFull):
        store.forget(wide, ids(1))
    monkeypatch.undo()
    assert save(store, wide, ids(1), ack="disk").durable
    assert save(store, wide, ids(2), ack="disk").durable
    store.close()
    check_restore(open_store_with(True), wide, ids(1), 99, verify=True)


def test_anchors_that_could_not_be_committed_are_not_acknowledged(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    named = {"anchors": [Anchor(50, AnchorKind.TURN)], "ack": "disk"}
    _Refusing(store, "write_usage", monkeypatch)
    with pytest.raises(ColdFull):
        save(store, wide, ids(1), **named)
    monkeypatch.undo()
    assert save(store, wide, ids(1), **named).durable
    store.close()
    assert open_store_with(True).match(wide, ids(1)).anchors == (Anchor(50, AnchorKind.TURN),)


def test_anchors_of_older_records_are_committed_with_the_save_that_names_them(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hang on records that were stored before: the transaction of the new one lacks them."""
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    written: list[RecordId] = []
    real = ColdTier.write_usage

    def note(tier: ColdTier, rows: Sequence[tuple[RecordId, Any, tuple[Anchor, ...]]], counter: int) -> None:
        written.extend(id_ for id_, _, anchors in rows if anchors)
        real(tier, rows, counter)

    monkeypatch.setattr(ColdTier, "write_usage", note)
    save(store, wide, ids(1, 200), ack="disk", anchors=[Anchor(50, AnchorKind.SYSTEM_PROMPT)])
    parent = next(record for record in store.engine.index.records.values() if record.start == 0)
    assert written == [parent.id]


def test_the_lock_is_given_up_though_a_child_holds_a_copy(open_store_with: OpenStore, identity: Identity) -> None:
    """A fork shares the lock's open file: closing it here must be enough."""
    store = open_store_with(True)
    path = store.engine.options.path
    assert path is not None and store.engine.cold is not None
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in _lock_descriptors(str(path / "store.lock"))]
    store.close()
    try:
        assert save(open_store_with(True), identity, ids(1, 5)).stored
    finally:
        for fd in copies:
            os.close(fd)


def _lock_descriptors(path: str) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == path:
                found.append(int(name))
        except OSError:
            continue
    assert found
    return found


class _Refusing:
    """The store's cold tier with one method that raises ColdFull until the patch is undone."""

    def __init__(self, store: Store, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0

        def refuse(*_: object) -> None:
            self.calls += 1
            raise ColdFull("no space left on device")

        assert store.engine.cold is not None
        monkeypatch.setattr(store.engine.cold, method, refuse)


def _until(store: Store, condition: Callable[[], bool]) -> bool:
    """Wait for the writer, which tells of every change, until ``condition``."""
    with store.engine.index.changed:
        return store.engine.index.changed.wait_for(condition, PATIENCE_S)


class LockWatch(logging.Handler):
    """Notes every record that is logged by a thread that holds the index lock."""

    def __init__(self, store: Store) -> None:
        super().__init__(logging.DEBUG)
        self.changed = store.engine.index.changed
        self.seen: list[str] = []
        self.under_lock: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        if self.changed._is_owned():  # type: ignore[attr-defined]
            self.under_lock.append(record.getMessage())


def test_nothing_is_logged_under_the_index_lock(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log handler has a lock of its own: held in two orders, the two would deadlock."""
    store = open_store_with(True, cold_bytes=700 * KIB)
    watch = LockWatch(store)
    logger = logging.getLogger("warmkv")
    logger.addHandler(watch)
    try:
        with pytest.raises(ColdFull):  # larger than the budget
            save(store, wide, ids(1, 500), ack="disk")

        def refuse(self: ColdTier, items: Sequence[object], counter: int) -> None:
            raise ColdFull("refused")

        monkeypatch.setattr(ColdTier, "write", refuse)
        with pytest.raises(ColdFull):
            save(store, wide, ids(2), ack="disk")
        assert store.flush(PATIENCE_S)
    finally:
        logger.removeHandler(watch)
    assert sum("stays in memory only" in line for line in watch.seen) >= 2
    assert watch.under_lock == []


def test_nothing_gives_way_before_who_waits_for_it_was_told(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the commit of a record and the moment in which its saver wakes others may want its room."""
    store = open_store_with(True)
    engine, writer = store.engine, store.engine.writer
    assert writer is not None
    wait = writer.wait_durable
    droppable: list[bool] = []

    def others_first(record: Record, timeout_s: float) -> None:
        assert writer.flush(PATIENCE_S) and record.cold == Cold.STORED
        writer.trim(1 << 40)
        droppable.append(room.droppable(record, engine.warm, 0))
        wait(record, timeout_s)

    monkeypatch.setattr(writer, "wait_durable", others_first)
    assert save(store, wide, ids(1), ack="disk").durable
    assert droppable == [False]
    assert engine.eviction.evict("cold", 0)["cold_records"] == 1, "once told it may go"
    assert check(engine) == []


def test_room_is_waited_for_while_savers_are_told(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget for one record: the next one waits until the saver of the first knows."""
    monkeypatch.setattr(write_behind, "TELL_S", PATIENCE_S)
    store = open_store_with(True, cold_bytes=700 * KIB)
    engine = store.engine
    save(store, wide, ids(1, 300), ack="disk")
    (first,) = engine.index.records.values()
    with engine.index.changed:
        first.awaited += 1
    save(store, wide, ids(2, 300))
    (second,) = (item for item in engine.index.records.values() if item is not first)
    assert eventually(lambda: second.cold == Cold.WRITING)  # nobody is told of that
    with engine.index.changed:
        assert (first.cold, second.cold) == (Cold.STORED, Cold.WRITING)
        first.awaited -= 1
        engine.index.changed.notify_all()
    assert store.flush(PATIENCE_S)
    assert (first.cold, second.cold, second.cold_error) == (Cold.ABSENT, Cold.STORED, "")
    assert check(engine) == []


def test_what_failed_and_was_queued_anew_is_written_before_what_builds_on_it(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    engine, writer = store.engine, store.engine.writer
    assert writer is not None and engine.cold is not None
    with monkeypatch.context() as patch:
        patch.setattr(engine.cold, "write", _refuse)
        save(store, wide, ids(1))
        save(store, wide, ids(1, 200))
        assert store.flush(PATIENCE_S)
    parent, child = sorted(engine.index.records.values(), key=lambda record: record.start)
    with engine.index.changed:
        # The child still stood in the queue when its parent failed, and somebody asks for that again.
        engine.index.set_cold(child, Cold.QUEUED)
        writer._queue.append(child)
        writer.enqueue(parent)
    assert store.flush(PATIENCE_S)
    assert (parent.cold, child.cold) == (Cold.STORED, Cold.STORED), child.cold_error
    assert check(engine) == []


def _refuse(*_: object) -> None:
    raise ColdFull("no room")


def test_more_gives_way_where_free_pages_lie_scattered(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the budget is free, but no 4 MiB of it in a row, and the map is full to its end."""
    monkeypatch.setattr(lmdb_map, "RUNS_BYTES", 0)
    store = open_store_with(True, warm_bytes=64 << 20, cold_bytes=16 << 20)
    engine = store.engine
    assert engine.writer is not None and engine.cold is not None
    seeds = 0
    while engine.writer.evictions == 0:
        save(store, wide, ids(seeds), ack="disk")
        seeds += 1
    for seed in range(1, seeds, 2):
        store.forget(wide, ids(seed))
    assert engine.writer.cold_bytes < 9 << 20
    large = list(range(10**6, 10**6 + 3000))
    assert save(store, wide, large, ack="disk").durable
    (stored,) = (record for record in engine.index.records.values() if record.end == 3000)
    assert stored.payload_bytes > 5 << 20 and engine.writer.cold_bytes <= 16 << 20
    assert check(engine) == []
    check_restore(store, wide, [*large, 7], 3000)


def test_what_is_forgotten_is_waited_for_however_much_is_saved_meanwhile(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    engine = store.engine
    assert engine.cold is not None
    save(store, wide, ids(0), ack="disk")
    write, more = engine.cold.write, iter(range(1, 100))
    forgotten = threading.Event()

    def write_and_find_more(items: Sequence[Any], counter: int) -> None:
        write(items, counter)
        if not forgotten.is_set() and (seed := next(more, 0)):
            save(store, wide, ids(seed))

    monkeypatch.setattr(engine.cold, "write", write_and_find_more)
    save(store, wide, ids(100))
    assert store.forget(wide, ids(0)).records == 1
    forgotten.set()
    assert next(more, 0), "forgetting ended before saving did"
    assert store.flush(PATIENCE_S)
    assert check(engine) == []
