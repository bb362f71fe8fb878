"""Compaction and backup: copies of a store that serves, whole or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import warmkv
from warmkv.kvstore.store import Store, folder, lmdb_map
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.environment import Environment
from warmkv.kvstore.store.faults import Faults
from warmkv.kvstore.testing import check_restore, save
from warmkv.schema.errors import ColdFull, StoreError
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
MIB = 1 << 20


class Failing(Faults):
    """Raises where it is told to, as a disk does."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}
        self.seen: list[str] = []

    def reached(self, point: str) -> None:
        self.seen.append(point)
        if point in self.at:
            raise OSError(self.at[point], os.strerror(self.at[point]))


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def half_empty(store: Store, identity: Identity) -> dict[int, int]:
    """Save much, drop most; the lengths of what is left, by seed."""
    for seed in range(60):
        save(store, identity, ids(seed))
    assert store.flush(60)
    for seed in range(60):
        if seed % 6:
            assert store.forget(identity, ids(seed)).records == 1
    assert store.flush(60)
    return {seed: 100 for seed in range(0, 60, 6)}


def let_go(store: Store) -> None:
    assert store.flush(60)
    with store.engine.index.changed:
        for record in list(store.engine.index.warm_order):
            store.engine.warm.evict(record)
    store.engine.warm.reap()


def check_all(store: Store, identity: Identity, held: dict[int, int]) -> None:
    for seed, length in held.items():
        check_restore(store, identity, [*ids(seed, length), 7], length, verify=True)


def cold_of(store: Store):  # type: ignore[no-untyped-def]
    assert store.engine.cold is not None
    return store.engine.cold


def where(store: Store) -> Path:
    assert store.engine.options.path is not None
    return store.engine.options.path


# -- compaction ------------------------------------------------------------------------------


def test_free_pages_go_back_to_the_disk_and_records_stay(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    held = half_empty(store, wide)
    let_go(store)
    before = (where(store) / "data.mdb").stat().st_size
    done = cold_of(store).compact()
    after = (where(store) / "data.mdb").stat().st_size
    assert done == {"before_bytes": before, "after_bytes": after, "freed_bytes": before - after}
    assert after < before / 3
    check_all(store, wide, held)
    assert save(store, wide, ids(100), ack="disk").durable and check(store.engine) == []
    held[100] = 100
    assert (where(store) / "data.mdb").stat().st_mode & 0o777 == 0o600
    store.close()
    again = open_store_with(True)
    assert again.engine.swept == 0
    check_all(again, wide, held)


def test_a_store_is_compacted_while_it_serves(open_store_with: OpenStore, wide: Identity) -> None:
    """Saves, restores from disk and deletions go on during ten compactions."""
    store = open_store_with(True)
    held = half_empty(store, wide)
    over, problems = threading.Event(), []

    def serve(first: int) -> None:
        seed = first
        try:
            while not over.is_set():
                assert save(store, wide, ids(seed), ack="disk").durable
                let_go(store)
                check_restore(store, wide, [*ids(seed), 7], 100, verify=True)
                check_all(store, wide, held)
                assert store.forget(wide, ids(seed)).records == 1
                seed += 1
        except BaseException as exc:  # noqa: BLE001 - told to the test
            problems.append(exc)

    threads = [threading.Thread(target=serve, args=(first,)) for first in (1000,)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            cold_of(store).compact()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert problems == [] and check(store.engine) == []
    check_all(store, wide, held)


@pytest.mark.parametrize("point", ["compact.copied", "compact.renamed", "compact.done"])
@pytest.mark.parametrize("code", [5, 28])
def test_a_disk_that_fails_during_a_compaction_costs_nothing(
    open_store_with: OpenStore, wide: Identity, point: str, code: int
) -> None:
    faults = Failing()
    store = open_store_with(True, faults=faults)
    held = half_empty(store, wide)
    let_go(store)
    faults.at = {point: code}
    if point == "compact.copied":
        with pytest.raises(StoreError, match="not compacted"):
            cold_of(store).compact()
    elif point == "compact.done":
        with pytest.raises(OSError, match=os.strerror(code)):
            cold_of(store).compact()
    else:
        cold_of(store).compact()
    faults.at = {}
    assert not (where(store) / folder.COPY).exists()
    check_all(store, wide, held)
    assert save(store, wide, ids(200), ack="disk").durable
    assert cold_of(store).compact()["freed_bytes"] >= 0
    store.close()
    check_all(open_store_with(True), wide, held | {200: 100})


def test_a_copy_that_fails_leaves_the_store_alone(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store_with(True)
    held = half_empty(store, wide)
    inode = (where(store) / "data.mdb").stat().st_ino

    def broken(env: Environment, fd: int) -> None:
        os.write(fd, bytes(4096))
        raise StoreError("the disk said no")

    monkeypatch.setattr(Environment, "copy", broken)
    with pytest.raises(StoreError, match="the disk said no"):
        cold_of(store).compact()
    with pytest.raises(StoreError, match="the disk said no"):
        cold_of(store).backup(where(store).with_name("copy"))
    monkeypatch.undo()
    assert (where(store) / "data.mdb").stat().st_ino == inode
    assert sorted(item.name for item in where(store).parent.iterdir()) == ["store"]
    assert sorted(item.name for item in where(store).iterdir()) == ["data.mdb", "lock.mdb", "store.lock", "store.reserve"]
    check_all(store, wide, held)


def test_there_must_be_room_for_a_copy(open_store_with: OpenStore, wide: Identity, small_disk: Path) -> None:
    store = open_store_with(small_disk / "store", cold_bytes=30 * MIB)
    for seed in range(60):
        save(store, wide, ids(seed))
    assert store.flush(60)
    with open(small_disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(small_disk).f_bavail * 4096 - 4 * MIB)
    with pytest.raises(StoreError, match="may need"):
        cold_of(store).compact()
    assert not (small_disk / "store" / folder.COPY).exists()
    check_all(store, wide, {seed: 100 for seed in range(60)})


def test_an_environment_that_cannot_be_opened_again_is_tried_again(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then nothing is acknowledged, reads are misses, and health says why."""
    store = open_store_with(True)
    held = half_empty(store, wide)
    let_go(store)
    enter = Environment._enter

    def scarce(env: Environment, *, trusted: bool = False) -> None:
        raise lmdb.MemoryError("Cannot allocate memory")

    monkeypatch.setattr(Environment, "_enter", scarce)
    with pytest.raises(StoreError, match="could not be opened again"):
        cold_of(store).compact()
    assert "Cannot allocate memory" in store.engine.health.problems()["store"]
    assert store.stats()["cold"]["file_bytes"] == 0  # type: ignore[index]
    with store.restore(wide, [*ids(0), 7]) as restored:
        assert not restored
    with pytest.raises((ColdFull, StoreError)):
        save(store, wide, ids(300), ack="disk")
    monkeypatch.setattr(Environment, "_enter", enter)
    check_all(store, wide, held)
    assert store.engine.health.problems() == {}
    assert save(store, wide, ids(300), ack="disk").durable


def test_an_environment_that_lmdb_gave_up_is_opened_anew(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a commit whose last page failed LMDB refuses everything until it is opened again."""
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    env, begun = cold_of(store)._env, []
    real = env._env

    class Panicking:
        def begin(self, **options: object) -> object:
            begun.append(options)
            raise lmdb.PanicError("a fatal error occurred earlier")

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    env._env = Panicking()
    with monkeypatch.context() as closed:  # opened anew it would take the record at a second attempt, which nobody forbids

        def replace(move: object) -> None:
            raise StoreError("it stays closed for now")

        closed.setattr(env, "replace", replace)
        with pytest.raises(ColdFull, match="fatal error"):
            save(store, wide, ids(2), ack="disk")
    assert begun and save(store, wide, ids(3), ack="disk").durable
    assert store.flush(60) and save(store, wide, ids(2), ack="disk").durable
    check_all(store, wide, {seed: 100 for seed in (1, 2, 3)})
    assert store.engine.health.problems() == {}


KILLED = """
import os, signal, sys
from pathlib import Path
from warmkv.kvstore.store import StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.faults import Faults
class Kill(Faults):
    def reached(self, point):
        if point == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
engine = Engine.open(StoreOptions(Path(sys.argv[1]), 64 << 20, 256 << 20, faults=Kill()))
engine.cold.backup(Path(sys.argv[3])) if sys.argv[2] == "backup.copied" else engine.cold.compact()
"""


@pytest.mark.parametrize("point", ["compact.copied", "compact.renamed", "compact.done", "backup.copied"])
def test_a_process_killed_at_any_point_leaves_a_whole_store(
    open_store_with: OpenStore, wide: Identity, point: str, tmp_path: Path
) -> None:
    store = open_store_with(True)
    held = half_empty(store, wide)
    store.close()
    environ = {**os.environ, "PYTHONPATH": str(Path(warmkv.__file__).absolute().parent.parent)}
    command = [sys.executable, "-c", KILLED, str(where(store)), point, str(tmp_path / "copy")]
    done = subprocess.run(command, env=environ, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    again = open_store_with(True)
    assert again.engine.swept == 0 and not (where(store) / folder.COPY).exists()
    check_all(again, wide, held)
    assert not (tmp_path / "copy").exists()
    cold_of(again).backup(tmp_path / "copy")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["copy", "store"]


# -- backup ----------------------------------------------------------------------------------


def test_a_backup_is_a_store(open_store_with: OpenStore, wide: Identity, tmp_path: Path) -> None:
    store = open_store_with(True)
    held = half_empty(store, wide)
    target = tmp_path / "backup"
    told = cold_of(store).backup(target)
    assert told == {"path": str(target), "bytes": (target / "data.mdb").stat().st_size, "records": len(held)}
    assert target.stat().st_mode & 0o777 == 0o700 and (target / "data.mdb").stat().st_mode & 0o777 == 0o600
    assert [item.name for item in target.iterdir()] == ["data.mdb"]
    save(store, wide, ids(500), ack="disk")
    copy = open_store_with(target)
    assert copy.engine.swept == 0 and check(copy.engine) == []
    check_all(copy, wide, held)
    check_restore(copy, wide, ids(500), 0)
    check_all(store, wide, held | {500: 100})


def test_a_backup_never_replaces_anything(open_store_with: OpenStore, wide: Identity, tmp_path: Path) -> None:
    store = open_store_with(True)
    save(store, wide, ids(1), ack="disk")
    (tmp_path / "file").write_text("kept")
    (tmp_path / "directory").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "directory", "dangling"):
        with pytest.raises(StoreError, match="exists already"):
            cold_of(store).backup(tmp_path / name)
    with pytest.raises(StoreError, match="no backup was made"):
        cold_of(store).backup(tmp_path / "not" / "there" / "backup")
    assert (tmp_path / "file").read_text() == "kept" and list((tmp_path / "directory").iterdir()) == []


def test_what_is_stored_is_within_the_budget_as_soon_as_the_files_were_exchanged(
    open_store_with: OpenStore, wide: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others took the disk's room meanwhile. A writer that looks at that moment lets nothing go."""
    store = open_store_with(True, cold_bytes=8 << 20)
    for seed in range(4):
        save(store, wide, ids(seed), ack="disk")
    assert store.engine.cold is not None
    env, open_map = store.engine.cold._env, lmdb_map.open_map
    monkeypatch.setattr(lmdb_map, "open_map", lambda where, wanted: (open_map(where, wanted)[0], 4096))
    env.replace(lambda: None)
    assert env.live_bytes() <= env.budget_bytes < 8 << 20
