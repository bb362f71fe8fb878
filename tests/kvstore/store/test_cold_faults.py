"""A disk that says no at any point of the cold tier's work: "not stored", never an end of service.

ENOSPC that comes as EIO is the same answer. What failed once is tried again on the same path.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.faults import POINTS, Faults
from warmkv.kvstore.testing import TOKENS, check_restore, save
from warmkv.schema.errors import ColdFull, StoreError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor

OpenStore = Callable[..., Store]
MIB = 1 << 20
CODES = [errno.EIO, errno.ENOSPC]


class Failing(Faults):
    """Raises an error of the system at points, so many times; notes every point."""

    def __init__(self) -> None:
        self.at: dict[str, tuple[int, int]] = {}
        self.seen: list[str] = []

    def reached(self, point: str) -> None:
        assert point in POINTS
        self.seen.append(point)
        code, times = self.at.get(point, (0, 0))
        if times:
            self.at[point] = (code, times - 1)
            raise OSError(code, os.strerror(code))


def ids(seed: int, length: int = 30) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def where(store: Store) -> Path:
    assert store.engine.options.path is not None
    return store.engine.options.path


def keys(path: Path) -> dict[str, set[bytes]]:
    """Ids that have something in each table of the closed store."""
    with lmdb.open(str(path), max_dbs=16, map_size=512 * MIB) as env, env.begin() as txn:
        tables = ("segments", "chunks", "usage", "summaries")
        return {name: {bytes(key)[:16] for key, _ in txn.cursor(env.open_db(name.encode(), txn))} for name in tables}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("point", ["commit.begin", "commit.chunk", "commit.split", "commit.metadata", "commit.sync"])
def test_a_save_the_disk_refuses_is_not_stored_and_the_next_one_is(
    open_store_with: OpenStore, wide: Identity, point: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmkv.kvstore.store.cold_writes.TRANSACTION_BYTES", 100)
    faults = Failing()
    store = open_store_with(True, faults=faults)
    first = save(store, wide, ids(1), ack="disk")
    faults.at = {point: (code, 10**6)}
    with pytest.raises(ColdFull, match=os.strerror(code)):
        save(store, wide, ids(4, 4200), ack="disk")
    faults.at = {}
    assert check(store.engine) == []
    check_restore(store, wide, [*ids(4, 4200), 7], 4200)
    again = save(store, wide, ids(4, 4200), ack="disk")
    assert again.durable and again.duplicate
    assert save(store, wide, ids(2), ack="disk").durable
    store.close()
    found = keys(where(store))
    assert len(found["segments"]) == 3 and first.id in found["segments"]
    assert all(ids_ == found["segments"] for ids_ in found.values()), "nothing of what failed is left over"
    last = open_store_with(True)
    assert last.engine.swept == 0
    check_restore(last, wide, [*ids(4, 4200), 7], 4200, verify=True)


@pytest.mark.parametrize("code", CODES)
def test_a_disk_that_refuses_for_long_never_ends_the_writer(open_store_with: OpenStore, identity: Identity, code: int) -> None:
    faults = Failing()
    store = open_store_with(True, faults=faults, usage_interval_s=0.05)
    faults.at = {point: (code, 10**6) for point in ("commit.begin", "usage.sync", "delete.metadata")}
    for seed in range(5):
        with pytest.raises(ColdFull):
            save(store, identity, ids(seed), ack="disk")
        check_restore(store, identity, [*ids(seed), 7], 30)
    with pytest.raises(ColdFull):
        save(store, identity, ids(0), ack="disk", anchors=[Anchor(3)])
    faults.at = {}
    for seed in range(5):
        assert save(store, identity, ids(seed), ack="disk").durable
    assert store.flush(60) and check(store.engine) == []


@pytest.mark.parametrize("code", CODES)
def test_usage_that_could_not_be_written_is_written_later(open_store_with: OpenStore, identity: Identity, code: int) -> None:
    faults = Failing()
    store = open_store_with(True, faults=faults)
    save(store, identity, TOKENS, ack="disk")
    faults.at = {"usage.sync": (code, 10**6)}
    with pytest.raises(ColdFull, match=os.strerror(code)):
        save(store, identity, TOKENS, ack="disk", anchors=[Anchor(4)])
    faults.at = {}
    assert save(store, identity, TOKENS, ack="disk", anchors=[Anchor(4)]).durable
    store.close()
    assert [anchor.position for anchor in open_store_with(True).match(identity, TOKENS).anchors] == [4]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("point", ["delete.metadata", "delete.chunks", "delete.done"])
@pytest.mark.parametrize("times", [1, 12])
def test_what_could_not_be_deleted_is_deleted_later(
    open_store_with: OpenStore, identity: Identity, point: str, code: int, times: int
) -> None:
    """Once is nothing to speak of; often is told, and the record is gone all the same."""
    faults = Failing()
    store = open_store_with(True, faults=faults)
    for seed in range(3):
        save(store, identity, ids(seed), ack="disk")
    faults.at = {point: (code, times)}
    try:
        store.forget(identity, ids(0))
    except StoreError:
        assert times > 1 or point == "delete.done"
    check_restore(store, identity, ids(0), 0)
    faults.at = {}
    assert save(store, identity, ids(7), ack="disk").durable
    store.clear()
    assert store.flush(60) and check(store.engine) == []
    store.close()
    assert set(map(len, keys(where(store)).values())) == {0}


@pytest.mark.parametrize("point", ["start.locked", "start.opened"])
def test_a_start_that_fails_gives_everything_back(
    open_store_with: OpenStore, identity: Identity, point: str, descriptors: Callable[[], int]
) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    store.close()
    faults, before = Failing(), descriptors()
    faults.at = {point: (errno.EIO, 3)}
    for _ in range(3):
        with pytest.raises(StoreError, match="Input/output error"):
            open_store_with(True, faults=faults)
        assert descriptors() == before
    check_restore(open_store_with(True, faults=faults), identity, [*TOKENS, 1], 9, verify=True)


@pytest.mark.parametrize("point", ["start.loaded", "start.swept", "delete.metadata"])
def test_a_sweep_that_fails_is_left_to_the_next_start(open_store_with: OpenStore, identity: Identity, point: str) -> None:
    store = open_store_with(True)
    save(store, identity, ids(1), ack="disk")
    lost = save(store, identity, ids(2), ack="disk").id
    store.close()
    with lmdb.open(str(where(store)), max_dbs=16, map_size=512 * MIB) as env:
        table = env.open_db(b"segments")
        with env.begin(write=True) as txn:
            txn.put(lost, b"no head", db=table)
    faults = Failing()
    faults.at = {point: (errno.EIO, 100)}
    broken = open_store_with(True, faults=faults)
    check_restore(broken, identity, [*ids(1), 7], 30, verify=True)
    assert broken.engine.swept == 1
    faults.at = {}
    broken.close()
    last = open_store_with(True)
    check_restore(last, identity, [*ids(1), 7], 30, verify=True)
    last.close()
    assert set(map(len, keys(where(store)).values())) == {1}


def test_every_point_of_the_cold_tier_is_reached(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("warmkv.kvstore.store.cold_writes.TRANSACTION_BYTES", 100)
    faults = Failing()
    store = open_store_with(True, faults=faults)
    save(store, wide, ids(1, 4200), ack="disk", anchors=[Anchor(3)])
    save(store, wide, ids(1, 4200), ack="disk", anchors=[Anchor(4)])
    assert store.engine.cold is not None
    store.engine.cold.backup(tmp_path / "copy")
    store.clear()
    store.engine.cold.compact()
    store.close()
    (where(store) / "data.mdb").write_bytes(os.urandom(1 << 16))
    open_store_with(True, faults=faults)
    parts = ("commit", "usage", "delete", "start", "compact", "backup", "aside")
    ours = [point for point in POINTS if point.split(".")[0] in parts]
    assert set(ours) <= set(faults.seen) and "stop.closed" in faults.seen
    at = {point: faults.seen.index(point) for point in ours}
    assert sorted(at, key=at.__getitem__)[:2] == ["start.locked", "start.opened"]
    commit = [at[f"commit.{step}"] for step in ("begin", "chunk", "split", "metadata", "sync", "done")]
    assert commit == sorted(commit)
