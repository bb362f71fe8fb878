"""Budgets of every kind under every kind of load: refused before allocated, evicted before accepted,
one user's excess never at the cost of another's, and exceeded at no moment anybody looks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.faults import Faults
from warmkv.kvstore.testing import model_rows, save
from warmkv.kvstore.testing.bounds import Task
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import messages as m
from warmkv.schema.errors import Busy, ColdFull, TooLarge, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, ROOT, as_tokens

OpenStore = Callable[..., Store]
KIB, MIB = 1 << 10, 1 << 20
#: Of one save of 100 tokens of the wide model: what is reserved for it; it takes somewhat less.
ENTRY = 224 * KIB
PATIENCE_S = 60.0


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def there(store: Verbs, identity: Identity, *seeds: int) -> list[int]:
    return [store.match(identity, ids(seed) + [7]).usable for seed in seeds]


class User(Verbs):
    """The verbs of one user, whose failures raise."""

    def _failed(self, exc: WarmKVError) -> NoReturn:
        raise exc


@pytest.fixture
def users(open_store_with: OpenStore) -> Callable[..., tuple[Store, Verbs, Verbs]]:
    """A store, and two users of it."""

    def make(path: bool | None = None, **options: Any) -> tuple[Store, Verbs, Verbs]:
        store = open_store_with(path, **options)
        return store, User(store.engine.session(1001)), User(store.engine.session(1002))

    return make


Users = Callable[..., tuple[Store, Verbs, Verbs]]


def test_two_mib_into_one_are_refused(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=MIB)
    with pytest.raises(TooLarge):
        save(store, wide, ids(1, 1000))
    assert store.engine.warm.ledger.peak_bytes == 0


def test_sixty_and_sixty_into_a_hundred(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=1000 * KIB, busy_timeout_s=0.05)
    save(store, wide, ids(1, 290))
    save(store, wide, ids(2, 290))
    assert [store.match(wide, ids(seed, 290) + [7]).usable for seed in (1, 2)] == [0, 290]
    with store.restore(wide, ids(2, 290) + [7]), pytest.raises(Busy):
        save(store, wide, ids(1, 290))
    assert store.engine.warm.ledger.peak_bytes <= 1000 * KIB


def test_twenty_puts_at_once_stay_within_the_budget(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(warm_bytes=3 * ENTRY)
    start = threading.Barrier(20)

    def put(seed: int) -> int:
        start.wait(PATIENCE_S)
        return save(store, wide, ids(seed)).sent_bytes

    assert all(task.outcome() for task in [Task(lambda seed=seed: put(seed)) for seed in range(20)])  # type: ignore[misc]
    assert store.engine.warm.ledger.peak_bytes <= 3 * ENTRY
    assert sum(there(store, wide, *range(20))) == 300


def test_what_a_user_has_too_much_is_taken_from_its_own(users: Users, wide: Identity) -> None:
    store, first, second = users(warm_bytes=8 * ENTRY, uid_share=0.5, policy="lru")
    for seed in range(3):
        save(first, wide, ids(seed))
    for seed in range(9):
        save(second, wide, ids(seed))
    assert there(first, wide, 0, 1, 2) == [100] * 3
    assert sum(there(second, wide, *range(9))) == 400
    ledger = store.engine.warm.ledger
    assert ledger.user_bytes[1002] <= 4 * ENTRY and ledger.user_entries[1002] == 4


def test_a_user_whose_share_is_in_use_is_refused_though_others_could_give_way(users: Users, wide: Identity) -> None:
    store, first, second = users(warm_bytes=8 * ENTRY, uid_share=0.25, busy_timeout_s=0.05)
    save(first, wide, ids(1))
    save(second, wide, ids(1, 150))
    with second.restore(wide, ids(1, 150) + [7]), pytest.raises(Busy, match="user 1002"):
        save(second, wide, ids(2))
    with pytest.raises(TooLarge):
        save(second, wide, ids(3, 300))
    assert there(first, wide, 1) == [100] and store.engine.warm.evictions == 0


def test_reservations_count_for_a_users_share(users: Users, wide: Identity) -> None:
    store, first, second = users(warm_bytes=8 * ENTRY, uid_share=0.5, busy_timeout_s=0.05)
    session = store.engine.session(1002)
    key = session.open(wide.canonical(), "")
    offer = m.Offer(key, CLEAN, as_tokens(ids(1)), b"", b"", 2048, 1024)
    for _ in range(4):
        session.offer(offer)
    with pytest.raises(Busy):
        session.offer(offer)
    save(first, wide, ids(1))
    session.close()
    save(second, wide, ids(1))


def test_entries_are_shared_too(users: Users, wide: Identity) -> None:
    store, first, second = users(warm_entries=8, uid_share=0.5, policy="lru")
    save(first, wide, ids(1, 10))
    for seed in range(12):
        save(second, wide, ids(seed, 10))
    assert store.engine.warm.ledger.user_entries == {1001: 1, 1002: 4}


def test_the_disk_is_shared_too(users: Users, wide: Identity) -> None:
    store, first, second = users(True, cold_bytes=8 * ENTRY, uid_share=0.5, warm_bytes=64 * MIB, policy="lru")
    save(first, wide, ids(1), ack="disk")
    for seed in range(7):
        save(second, wide, ids(seed), ack="disk")
    writer = store.engine.writer
    assert writer is not None and writer.user_bytes[1002] <= 4 * ENTRY < writer.cold_bytes + ENTRY
    assert next(iter(store.engine.index.records.values())).namespace.owner_uid == 1001
    assert first.save(wide, ids(1), model_rows(wide, ids(1)), ack="disk").durable
    with pytest.raises(ColdFull, match="one user"):
        save(second, wide, ids(9, 500), ack="disk")


def test_tokens_are_bounded_and_the_worst_give_way(open_store_with: OpenStore, wide: Identity) -> None:
    for path in (None, True):
        store = open_store_with(path, max_tokens=350, policy="lru")
        for seed in range(5):
            save(store, wide, ids(seed), ack="disk" if path else "memory")
            assert store.engine.index.tokens <= 350
        assert there(store, wide, *range(5)) == [0, 0, 100, 100, 100]
        with pytest.raises(TooLarge):
            save(store, wide, ids(7, 400))
        with store.restore(wide, ids(2) + [7]), store.restore(wide, ids(3) + [7]), store.restore(wide, ids(4) + [7]):
            with pytest.raises(Busy):
                save(store, wide, ids(8))
        assert there(store, wide, *range(5)) == [0, 0, 100, 100, 100]
        assert store.engine.flush(PATIENCE_S) and check(store.engine) == []
        store.close()


def test_tokens_are_counted_again_at_the_next_start(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1))
    save(store, wide, ids(1, 150))
    save(store, wide, ids(2))
    before = store.engine.index.tokens
    store.close()
    store = open_store_with(True)
    assert store.engine.index.tokens == before == 250
    store.clear()
    assert store.engine.index.tokens == 0


def test_a_save_waits_a_bounded_time_for_a_disk_that_does_not_follow(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = ColdTier.write

    def slow(self: ColdTier, *arguments: Any) -> None:
        assert go_on.wait(PATIENCE_S)
        write(self, *arguments)

    monkeypatch.setattr(ColdTier, "write", slow)
    store = open_store_with(True, max_dirty_bytes=2 * ENTRY, busy_timeout_s=0.1)
    save(store, wide, ids(1))
    save(store, wide, ids(2))
    with pytest.raises(Busy, match="wait for the disk"):
        save(store, wide, ids(3))
    assert store.engine.index.dirty_bytes <= 2 * ENTRY
    go_on.set()
    assert store.engine.flush(PATIENCE_S) and store.engine.index.dirty_bytes == 0
    assert save(store, wide, ids(3), ack="disk").durable
    # One that is larger than all that may wait is let in alone.
    assert save(store, wide, ids(4, 300), ack="disk").durable


def container(store: Store, identity: Identity, tokens: Sequence[int], uid: int) -> tuple[Any, Any, int]:
    """A session, its key, and a sealed container of these tokens that somebody else made."""
    session = store.engine.session(uid)
    key = session.open(identity.canonical(), "")
    layers = [record for record in model_rows(identity, tokens) if isinstance(record, LayerRows)]
    planes = [
        PlaneSource(record.layer, tuple(plane.rows.shape[1:]), 0, plane) for record in layers for plane in record.planes
    ]  # fmt: skip
    made = write_segment(key, CLEAN, ROOT, 0, np.array(tokens, np.uint32), (), planes)
    fd = os.dup(made.fd)
    made.close()
    return session, key, fd


def test_foreign_memory_is_copied_and_the_copy_is_what_is_kept(
    open_store_with: OpenStore, wide: Identity, descriptors: Callable[[], int]
) -> None:
    reached: list[tuple[str, int, bool]] = []

    class Told(Faults):
        def reached(self, point: str) -> None:
            if point.startswith("save"):
                ledger = store.engine.warm.ledger
                reached.append((point, ledger.promoting_bytes, store.engine.index.changed._is_owned()))  # type: ignore[attr-defined]

    store = open_store_with(warm_bytes=3 * ENTRY, faults=Told())
    before = descriptors()
    session, key, fd = container(store, wide, ids(1), 1001)
    owner = session._owners[key]
    done = store.engine.intake.commit(m.Commit(key, store.engine.epoch, 0), fd, owner, copy=True)
    record = store.engine.index.records[done.id]
    assert os.fstat(record.fd).st_ino != os.fstat(fd).st_ino
    assert memfd.check_sealed(record.fd, 10 * MIB) == record.total_bytes
    assert os.pread(record.fd, 10 * MIB, 0) == os.pread(fd, 10 * MIB, 0)
    points = [point for point, _, _ in reached]
    assert points == ["save.received", "save.copied", "save.admitted"]
    assert ENTRY / 2 < reached[1][1] <= ENTRY and not reached[1][2], "the copy was not counted while it was made"
    assert store.engine.warm.ledger.promoting_bytes == 0
    again = store.engine.intake.commit(m.Commit(key, store.engine.epoch, 0), fd, owner, copy=True)
    assert again.duplicate and [point for point, _, _ in reached].count("save.copied") == 1
    os.close(fd)
    session.close()
    assert descriptors() == before + 1 and store.engine.warm.ledger.peak_bytes <= ENTRY


def test_a_copy_that_finds_no_room_changes_nothing(
    open_store_with: OpenStore, wide: Identity, descriptors: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(warm_bytes=ENTRY, busy_timeout_s=0.05)
    save(store, wide, ids(2))
    session, key, fd = container(store, wide, ids(1), os.getuid())
    before = descriptors()
    with store.restore(wide, ids(2) + [7]), pytest.raises(Busy):
        store.engine.intake.commit(m.Commit(key, store.engine.epoch, 0), fd, session._owners[key], copy=True)

    def full(name: str, total_bytes: int) -> int:
        raise WarmKVError("no memory")

    monkeypatch.setattr(memfd, "create", full)
    with pytest.raises(WarmKVError, match="no memory"):
        store.engine.intake.commit(m.Commit(key, store.engine.epoch, 0), fd, session._owners[key], copy=True)
    monkeypatch.undo()
    assert store.engine.warm.ledger.promoting_bytes == 0 and descriptors() <= before
    os.close(fd)
    session.close()


def test_budgets_hold_at_every_moment_somebody_looks(users: Users, wide: Identity) -> None:
    """Saves, copies, restores, promotions and the service at once, sampled all along."""
    limit, dirty = 6 * ENTRY, 3 * ENTRY
    store, first, second = users(
        True, warm_bytes=limit, cold_bytes=16 * ENTRY, uid_share=0.75, max_dirty_bytes=dirty, max_tokens=2000,
        evict_interval_s=0.01, busy_timeout_s=2.0, usage_interval_s=0.05,
    )  # fmt: skip
    engine, over, samples, ended = store.engine, [], 0, threading.Event()

    def watch() -> None:
        nonlocal samples
        while not ended.is_set():
            with engine.index.changed:
                ledger, writer = engine.warm.ledger, engine.writer
                assert writer is not None
                seen = {
                    "warm": (ledger.used_bytes, limit), "peak": (ledger.peak_bytes, limit),
                    "cold": (writer.cold_bytes, 16 * ENTRY), "dirty": (engine.index.dirty_bytes, dirty),
                    "tokens": (engine.index.tokens, 2000),
                    **{f"user {uid}": (held, limit * 0.75) for uid, held in ledger.user_bytes.items()},
                }  # fmt: skip
                over.extend((name, have, most) for name, (have, most) in seen.items() if have > most)
            samples += 1
            time.sleep(0.0005)

    def work(verbs: Verbs, seed: int) -> int:
        done = 0
        for at in range(25):
            number = (seed * 7 + at * 3) % 23
            try:
                done += save(verbs, wide, ids(number, 60 + number)).stored
                with verbs.restore(wide, ids((number + 5) % 23) + [7]) as restored:
                    done += bool(restored)
            except (Busy, TooLarge):
                continue
        return done

    watching = Task(watch)
    tasks = [Task(lambda verbs=verbs, seed=seed: work(verbs, seed)) for seed in range(2) for verbs in (first, second)]  # type: ignore[misc]
    assert all([task.outcome() for task in tasks])
    ended.set()
    watching.outcome()
    assert over == [] and samples > 50
    assert engine.flush(PATIENCE_S) and check(engine) == []
