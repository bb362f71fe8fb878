"""The cold tier where no byte is left: of the disk, of the map, of the budget.

Whatever cannot be stored is refused by name. What is stored stays readable and can always be
deleted, and what that frees is used without a restart.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import lmdb
import pytest

import warmkv
from warmkv.kvstore.store import Store, lmdb_map, write_behind
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.store.cold_deletions import ColdDeletions
from warmkv.kvstore.store.folder import Folder
from warmkv.kvstore.testing import assert_rows, check_restore, random_identity, random_rows, save
from warmkv.schema.errors import ColdFull, StoreError
from warmkv.schema.identity import Identity
from warmkv.schema.records import RecordId

OpenStore = Callable[..., Store]
KIB, MIB = 1024, 1 << 20


def ids(seed: int, length: int) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def take_the_rest(disk: Path, but_bytes: int = 0) -> Path:
    """Somebody else fills the disk, but for some bytes."""
    filler = disk / f"filler {os.urandom(4).hex()}"
    free = shutil.disk_usage(disk).free - but_bytes
    with open(filler, "wb") as file:
        if free > 0:
            os.posix_fallocate(file.fileno(), 0, free)
    return filler


def save_until_full(store: Store, identity: Identity, length: Callable[[], int], refusals: int = 3) -> dict[int, int]:
    """Durable saves until some were refused; the lengths of the others, by seed."""
    stored: dict[int, int] = {}
    for seed in count():
        tokens = length()
        try:
            save(store, identity, ids(seed, tokens), ack="disk")
        except ColdFull:
            refusals -= 1
        else:
            stored[seed] = tokens
        if not refusals:
            return stored
    raise AssertionError("unreachable")


def check_all(store: Store, identity: Identity, stored: dict[int, int]) -> None:
    for seed, length in stored.items():
        check_restore(store, identity, [*ids(seed, length), 7], length, verify=True)


# -- the disk --------------------------------------------------------------------------------


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize(("dim", "longest", "free_bytes"), [(16, 40, 2 * MIB), (64, 3, 6 * MIB), (4096, 60, 12 * MIB)])
def test_what_fills_the_disk_can_be_deleted_and_the_room_used_again(
    open_store_with: OpenStore, small_disk: Path, dim: int, longest: int, free_bytes: int, everything: bool
) -> None:
    """Hundreds of small records share tree pages, a few large ones take runs of pages: a deletion
    of all at once needs many free pages, and there are none."""
    identity, rng = random_identity(1, 1, dim), random.Random(dim)
    path = small_disk / "store"
    store = open_store_with(path, cold_bytes=40 * MIB, warm_bytes=128 * MIB)
    take_the_rest(small_disk, free_bytes)
    stored = save_until_full(store, identity, lambda: rng.randint(1, longest))
    take_the_rest(small_disk)
    assert save(store, identity, ids(900_000, 3)).stored
    with pytest.raises(ColdFull):
        save(store, identity, ids(900_001, longest * 4), ack="disk")
    if everything:
        assert store.clear().records >= len(stored)
        stored = {}
    else:
        for seed in list(stored)[::2]:
            assert store.forget(identity, ids(seed, stored.pop(seed))).records == 1
    for seed in range(800_000, 800_004):
        save(store, identity, ids(seed, 2), ack="disk")
        stored[seed] = 2
    check_all(store, identity, stored)
    assert check(store.engine) == []
    store.close()
    check_all(open_store_with(path, cold_bytes=40 * MIB, warm_bytes=128 * MIB), identity, stored)


PROGRAM = """
import sys
from pathlib import Path
from warmkv.kvstore.store import StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.schema.errors import StoreError
try:
    engine = Engine.open(StoreOptions(Path(sys.argv[1]), 64 << 20, 20 << 20))
except StoreError:
    print("refused")
    sys.exit()
if len(sys.argv) > 2:
    disk = Path(sys.argv[2])
    with open(disk / "filler of the child", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
transactions = [engine.cold._env.begin_views() for _ in range(1000)]
del transactions
engine.close()
print("opened")
"""


def run_child(*arguments: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(Path(warmkv.__file__).absolute().parent.parent)}
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
    return done.stdout.strip()


def test_many_readers_on_a_full_disk_do_not_end_the_process(small_disk: Path) -> None:
    """Reader slots are written through a mapping: the file behind it must have all its blocks."""
    assert run_child(small_disk / "store", small_disk) == "opened"


def test_a_store_is_opened_or_refused_on_a_full_disk(small_disk: Path) -> None:
    answers = set()
    for pages in (0, 1, 3, 8, 16, 18, 20, 24, 40):
        filler = take_the_rest(small_disk, pages * 4096)
        answers.add(run_child(small_disk / "store"))
        filler.unlink()
        shutil.rmtree(small_disk / "store", ignore_errors=True)
    assert answers == {"opened", "refused"}


def test_a_store_without_a_reserve_still_serves(open_store_with: OpenStore, wide: Identity, small_disk: Path) -> None:
    path = small_disk / "store"
    store = open_store_with(path, cold_bytes=20 * MIB)
    save(store, wide, ids(1, 100), ack="disk")
    store.close()
    (path / "store.reserve").unlink()
    take_the_rest(small_disk)
    again = open_store_with(path, cold_bytes=20 * MIB)
    check_restore(again, wide, ids(1, 100), 99, verify=True)
    assert save(again, wide, ids(2, 100)).stored


# -- the budget ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cold_mib", "sizes_kib"),
    [(16, (14 * KIB,)), (16, (9 * KIB,)), (64, range(32, 20 * KIB)), (40, (32, 32, 160, 6400, 9600)), (8, (32, 160, 640, 1920))],
)
def test_saves_within_the_budget_are_never_refused(open_store_with: OpenStore, cold_mib: int, sizes_kib: range) -> None:
    """Sizes that leave holes nothing fits into, and a record that takes the place of one as large
    as itself: room is found though LMDB gives freed pages back late."""
    identity, rng = random_identity(1, 1, 4096), random.Random(cold_mib)
    store = open_store_with(True, warm_bytes=256 * MIB, cold_bytes=cold_mib * MIB)
    assert store.engine.writer is not None and store.engine.cold is not None
    last: list[int] = []
    for seed in range(60):
        last = ids(seed, max(1, rng.choice(sizes_kib) // 32))
        rows = random_rows(identity, len(last), seed)
        assert store.save(identity, last, rows, ack="disk").durable
        assert store.engine.writer.cold_bytes <= store.engine.cold.budget_bytes
    assert store.engine.writer.evictions > 0 and store.engine.writer.failures == 0
    assert check(store.engine) == []
    store.close()
    with open_store_with(True, warm_bytes=256 * MIB, cold_bytes=cold_mib * MIB).restore(identity, [*last, 7], verify=True) as got:
        assert got.usable == len(last)
        assert_rows(got, rows)


def test_the_oldest_leave_the_disk_first(open_store_with: OpenStore, wide: Identity) -> None:
    """Also those that were used in another life of the store."""
    store = open_store_with(True, cold_bytes=2 * MIB)
    for seed in range(8):
        save(store, wide, ids(seed, 100), ack="disk")
    store.restore(wide, ids(0, 100)).close()
    store.close()
    again = open_store_with(True, cold_bytes=2 * MIB)
    for seed in range(8, 12):
        save(again, wide, ids(seed, 100), ack="disk")
    held = [seed for seed in range(12) if again.match(wide, [*ids(seed, 100), 7]).usable]
    assert held == [0, *range(12 - len(held) + 1, 12)] and len(held) >= 8


def test_nothing_of_what_was_forgotten_is_left_in_the_file(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    for seed in range(40):
        save(store, wide, ids(seed, 30), ack="disk")
        save(store, wide, ids(seed, 60))
    for seed in range(0, 40, 2):
        assert store.forget(wide, ids(seed, 60)).records == 2
    path = store.engine.options.path
    tables = (b"segments", b"chunks", b"usage", b"anchors")
    kept = {record.id for record in store.engine.index.records.values()}
    store.close()
    assert keys(path, tables) == [kept, kept, kept, set()]
    again = open_store_with(True)
    assert again.clear().records == 40
    again.close()
    assert keys(path, tables) == [set()] * 4


def keys(path: Path | None, tables: tuple[bytes, ...]) -> list[set[bytes]]:
    """Records that have something in each table."""
    with lmdb.open(str(path), max_dbs=16, map_size=512 * MIB) as env, env.begin() as txn:
        return [{bytes(key)[:16] for key, _ in txn.cursor(env.open_db(name, txn))} for name in tables]


# -- the map ---------------------------------------------------------------------------------


def test_a_map_smaller_than_the_budget_refuses_and_recovers(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB itself says that the map is full, which the budget should have prevented."""
    monkeypatch.setattr(lmdb_map, "FILL", 10.0)
    monkeypatch.setattr(lmdb_map, "RUNS_BYTES", 4 * MIB)
    monkeypatch.setattr(write_behind, "MORE_ROOM", 0)  # else others would give way
    store = open_store_with(True, cold_bytes=40 * MIB)
    rng = random.Random(3)
    with pytest.raises(ColdFull, match="MAP_FULL"):
        for seed in count():
            save(store, wide, ids(10_000 + seed, 100), ack="disk")
    stored = save_until_full(store, wide, lambda: rng.randint(1, 99))
    check_all(store, wide, stored)
    assert save(store, wide, ids(900, 100)).stored
    for seed in stored:
        assert store.forget(wide, ids(seed, stored[seed])).records == 1
    store.clear()
    for seed in range(20):
        assert save(store, wide, ids(seed, 100), ack="disk").durable
    assert check(store.engine) == []


def test_chunks_of_a_save_that_failed_halfway_do_not_stay(
    open_store_with: OpenStore, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of several transactions, of which the disk takes only the first."""
    monkeypatch.setattr("warmkv.kvstore.store.cold_writes.TRANSACTION_BYTES", 4 * MIB)
    identity = random_identity(1, 1, 1 << 18)
    path = small_disk / "store"
    store = open_store_with(path, cold_bytes=38 * MIB, warm_bytes=128 * MIB)
    save(store, identity, ids(1, 2), ack="disk")
    take_the_rest(small_disk, 14 * MIB)
    with pytest.raises(ColdFull):
        store.save(identity, ids(2, 11), random_rows(identity, 11), ack="disk")
    assert isinstance(store.engine.cold, ColdTier) and not store.engine.cold._deletions.leftover
    assert save(store, identity, ids(3, 4), ack="disk").durable
    kept = {record.id for record in store.engine.index.records.values() if record.start == 0 and record in stored(store)}
    store.close()
    assert keys(path, (b"segments", b"chunks")) == [kept, kept]


def stored(store: Store) -> set[object]:
    return set(store.engine.index.cold_order)


def test_a_deletion_that_finds_no_room_uses_the_reserve(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One record alone is refused as long as the reserve is held; it is held again afterwards."""
    store = open_store_with(True)
    save(store, identity, ids(1, 10), ack="disk")
    save(store, identity, ids(2, 10), ack="disk")
    assert store.engine.options.path is not None
    reserve = store.engine.options.path / "store.reserve"
    held = reserve.stat().st_size
    assert held > 0
    remove = ColdDeletions._remove_metadata
    sizes: list[int] = []

    def refuse(tier: ColdDeletions, batch: list[RecordId]) -> None:
        sizes.append(len(batch))
        if reserve.stat().st_size:
            raise lmdb.Error("no space left on device")
        remove(tier, batch)

    monkeypatch.setattr(ColdDeletions, "_remove_metadata", refuse)
    assert store.clear().records == 2
    assert sizes[-1] == 1 and reserve.stat().st_size == held
    monkeypatch.setattr(Folder, "release_reserve", lambda self: False)
    save(store, identity, ids(3, 10), ack="disk")
    with pytest.raises(StoreError):
        store.clear()
    monkeypatch.undo()
    assert save(store, identity, ids(3, 10), ack="disk").durable
