"""Containers that outlived their process are taken back after the checks of an arrival, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from warmkv.kvstore import memfd
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.store.intake import Owner
from warmkv.kvstore.testing import assert_rows, model_rows, save
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB = 1 << 10


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


class Keeper:
    """Keeps a duplicate of what is warm, as a service manager does."""

    def __init__(self) -> None:
        self.fds: dict[bytes, int] = {}
        self.evictions: list[bytes] = []

    def admitted(self, record: Record) -> None:
        self.fds[record.id] = os.dup(record.fd)

    def evicted(self, record: Record) -> None:
        assert os.fstat(record.fd).st_size == record.total_bytes
        self.evictions.append(record.id)
        os.close(self.fds.pop(record.id))


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    for fd in keeper.fds.values():
        os.close(fd)


def owner(identity: Identity) -> Owner:
    return Owner(os.getuid(), "", identity)


def test_listeners_hear_of_every_container_but_not_of_the_end(open_store_with: OpenStore, wide: Identity, keeper: Keeper) -> None:
    store = open_store_with(warm_bytes=700 * KIB, policy="lru")
    store.engine.warm.listeners.append(keeper)
    for seed in range(5):
        save(store, wide, ids(seed))
    assert set(keeper.fds) == {record.id for record in store.engine.index.warm_order}
    assert len(keeper.evictions) == 2
    store.close()
    assert len(keeper.fds) == 3, "what is warm at the end is for the next process"


@pytest.mark.parametrize("path", [None, True])
def test_a_kept_tier_is_warm_again(
    open_store_with: OpenStore, wide: Identity, keeper: Keeper, descriptors: Callable[[], int], path: bool | None
) -> None:
    store = open_store_with(path)
    store.engine.warm.listeners.append(keeper)
    save(store, wide, ids(1))
    save(store, wide, ids(1, 200))
    save(store, wide, ids(2))
    store.close()
    store = open_store_with(path)
    before = descriptors()
    found = list(keeper.fds.values())  # in the order in which they were saved: parents first
    assert [store.engine.intake.adopt(fd, owner(wide)) for fd in found] == [None] * 3
    assert descriptors() == before + 3
    with store.restore(wide, ids(1, 200) + [7]) as restored:
        assert restored.usable == 200 and restored.promoted_bytes == 0
        assert_rows(restored, model_rows(wide, ids(1, 200)))
    assert store.engine.flush(60) and check(store.engine) == []
    if path:
        assert all(record.cold == Cold.STORED for record in store.engine.index.records.values())


def test_a_record_on_disk_only_gets_its_container_back(open_store_with: OpenStore, wide: Identity, keeper: Keeper) -> None:
    store = open_store_with(True)
    store.engine.warm.listeners.append(keeper)
    save(store, wide, ids(1), ack="disk")
    store.close()
    store = open_store_with(True)
    record = next(iter(store.engine.index.records.values()))
    (fd,) = keeper.fds.values()
    assert not record.warm and store.engine.intake.adopt(fd, os.getuid()) is None
    assert record.warm and record.cold == Cold.STORED
    reason = store.engine.intake.adopt(fd, os.getuid())
    assert reason is not None and "held already" in reason
    store.engine.promotion.quarantine(record, "test")
    assert store.engine.flush(60) and check(store.engine) == []


def test_what_does_not_fit_is_refused_with_a_reason(
    open_store_with: OpenStore, wide: Identity, keeper: Keeper, descriptors: Callable[[], int]
) -> None:
    store = open_store_with()
    store.engine.warm.listeners.append(keeper)
    save(store, wide, ids(1))
    save(store, wide, ids(1, 200))
    store.close()
    root, child = keeper.fds.values()
    size = os.fstat(root).st_size
    flipped = memfd.create("flipped", size)
    data = bytearray(os.pread(root, size, 0))
    data[-100] ^= 1
    memfd.write(flipped, bytes(data), 0)
    memfd.seal(flipped)
    plain = os.open("/proc/self/status", os.O_RDONLY)
    other = replace(wide, parameters=b"other parameters")
    store = open_store_with(warm_bytes=512 * KIB)
    adopt, before = store.engine.intake.adopt, descriptors()
    for fd, whose, said in (
        (child, owner(wide), "not held"),
        (root, owner(other), "another namespace"),
        (root, os.getuid(), "not known"),
        (root, Owner(os.getuid() + 1, "", wide), "another namespace"),
        (flipped, owner(wide), "digest"),
        (plain, owner(wide), ""),
    ):
        reason = adopt(fd, whose)
        assert reason is not None and said in reason
    os.close(plain)
    os.close(flipped)
    open_ = memfd.create("open", size)
    memfd.write(open_, os.pread(root, size, 0), 0)
    reason = adopt(open_, owner(wide))
    assert reason is not None and "seals" in reason
    os.close(open_)
    assert descriptors() == before - 2 and len(store.engine.index.records) == 0
    assert store.engine.warm.ledger.used_bytes == 0
    assert adopt(root, owner(wide)) is None
    assert adopt(child, owner(wide)) is None
    assert store.match(wide, ids(1, 200) + [7]).usable == 200


def test_adoption_stays_within_the_budget(open_store_with: OpenStore, wide: Identity, keeper: Keeper) -> None:
    store = open_store_with()
    store.engine.warm.listeners.append(keeper)
    for seed in range(4):
        save(store, wide, ids(seed))
    store.close()
    store = open_store_with(warm_bytes=450 * KIB)
    for fd in keeper.fds.values():
        store.engine.intake.adopt(fd, owner(wide))
    assert store.engine.warm.ledger.resident_entries == 2 and store.engine.warm.ledger.peak_bytes <= 450 * KIB
