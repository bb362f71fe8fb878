"""The folder of a store: private, one process's, local, and still there."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import warmkv
from warmkv.kvstore.store import Store, filesystem, folder, lmdb_map
from warmkv.kvstore.store.cold import ColdTier
from warmkv.kvstore.testing import TOKENS, check_restore, save
from warmkv.schema.errors import ColdFull, ColdUnavailable, StoreError
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
MIB = 1 << 20


def where(store: Store) -> Path:
    assert store.engine.options.path is not None
    return store.engine.options.path


def filled(open_store_with: OpenStore, identity: Identity) -> Path:
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    store.close()
    return where(store)


# -- whose it is -----------------------------------------------------------------------------


def test_what_others_could_read_is_closed_to_them(open_store_with: OpenStore, identity: Identity) -> None:
    path = filled(open_store_with, identity)
    os.chmod(path, 0o755)
    for item in path.iterdir():
        os.chmod(item, 0o664)
    store = open_store_with(True)
    check_restore(store, identity, [*TOKENS, 1], 9)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {item.name: item.stat().st_mode & 0o777 for item in path.iterdir()} == dict.fromkeys(
        ("data.mdb", "lock.mdb", "store.lock", "store.reserve"), 0o600
    )


@pytest.mark.parametrize("name", ["", "data.mdb", "lock.mdb", "store.lock"])
def test_what_belongs_to_another_user_is_refused(
    open_store_with: OpenStore, identity: Identity, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = filled(open_store_with, identity)
    if os.geteuid() == 0:
        os.chown(path / name, 1234, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="belongs to user"):
        open_store_with(True)


@pytest.mark.parametrize("name", ["data.mdb", "store.lock", "store.reserve", "lock.mdb"])
def test_a_link_in_the_place_of_a_file_is_refused_and_not_followed(
    open_store_with: OpenStore, identity: Identity, name: str, tmp_path: Path
) -> None:
    path = filled(open_store_with, identity)
    victim = tmp_path / "victim"
    victim.write_bytes(b"somebody's")
    (path / name).unlink()
    (path / name).symlink_to(victim)
    with pytest.raises(StoreError, match="no plain file"):
        open_store_with(True)
    assert victim.read_bytes() == b"somebody's"


# -- where it lies ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs"])
def test_a_network_folder_is_not_used_unless_permitted(
    open_store_with: OpenStore, identity: Identity, kind: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    """Then there is memory only, one line that says so, and a health problem."""
    monkeypatch.setattr(filesystem, "kind", lambda path: kind)
    with caplog.at_level(logging.INFO):
        store = open_store_with(True)
    assert store.engine.cold is None and not (tmp_path / "store").exists()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert kind in line and "allow_network_store" in line and "only in memory" in line
    assert kind in store.engine.health.problems()["store"]
    assert save(store, identity, TOKENS).stored and not save(store, identity, TOKENS).durable
    check_restore(store, identity, [*TOKENS, 1], 9)
    with pytest.raises(ColdFull):
        save(store, identity, [*TOKENS, 1, 2], ack="disk")
    store.close()
    permitted = open_store_with(True, allow_network_store=True)
    assert save(permitted, identity, TOKENS, ack="disk").durable and permitted.engine.health.problems() == {}


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "unknown", "fuseblk"])
def test_a_local_folder_is_used(open_store_with: OpenStore, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "kind", lambda path: kind)
    assert open_store_with(True).engine.cold is not None


def test_the_kind_of_a_file_system_is_the_kernels(tmp_path: Path, small_disk: Path) -> None:
    assert filesystem.kind(Path("/proc/self")) == "proc"
    assert filesystem.kind(small_disk / "not" / "there" / "yet") == "tmpfs"
    assert filesystem.doubt("tmpfs") and filesystem.doubt("fuse.anything") and not filesystem.doubt("ext4")
    assert filesystem.refusal("nfs") and not filesystem.refusal("tmpfs")


# -- whether it is still there ---------------------------------------------------------------


def remove(path: Path) -> None:
    shutil.rmtree(path)


def move(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def swap(path: Path) -> None:
    """Another store in its place, as a careless restore of a backup puts it there."""
    shutil.copytree(path, path.with_name("copy"))
    path.rename(path.with_name("elsewhere"))
    path.with_name("copy").rename(path)


def replace_file(path: Path) -> None:
    shutil.copy(path / "data.mdb", path / "new")
    os.replace(path / "new", path / "data.mdb")


@pytest.mark.parametrize("change", [remove, move, swap, replace_file])
def test_nothing_is_acknowledged_that_the_next_start_would_not_find(
    open_store_with: OpenStore, identity: Identity, change: Callable[[Path], None]
) -> None:
    """What is open can still be read, memory still takes saves."""
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    assert store.engine.health.problems() == {}
    change(where(store))
    with pytest.raises(ColdFull, match="the folder was"):
        save(store, identity, [*TOKENS, 1, 2], ack="disk")
    assert "the folder was" in store.engine.health.problems()["store"]
    assert save(store, identity, [*TOKENS, 3, 4]).stored
    with store.engine.index.changed:
        for record in list(store.engine.index.warm_order):
            if record.cold.name == "STORED" and not record.children:
                store.engine.warm.evict(record)
    store.engine.warm.reap()
    check_restore(store, identity, [*TOKENS, 9], 9, verify=True)
    check_restore(store, identity, [*TOKENS, 3, 4, 9], 11)
    with pytest.raises(StoreError, match="the folder was"):
        store.engine.cold.compact()  # type: ignore[union-attr]
    store.close()


def test_a_folder_that_comes_back_is_used_again(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    path = where(store)
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(ColdFull):
        save(store, identity, [*TOKENS, 1], ack="disk")
    path.with_name("elsewhere").rename(path)
    assert store.engine.health.problems() == {}
    assert save(store, identity, [*TOKENS, 1], ack="disk").durable
    store.close()
    check_restore(open_store_with(True), identity, [*TOKENS, 1, 2], 10, verify=True)


def test_an_unsynchronised_folder_acknowledges_nothing_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = ColdTier.open(tmp_path / "store", 16 * MIB)

    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    cold._env.folder.unsynced()
    monkeypatch.setattr(folder, "sync", broken)
    assert "Input/output error" in cold.problem()
    with pytest.raises(ColdFull):
        cold.write([], 1)
    monkeypatch.undo()
    cold.write([], 1)
    assert cold.problem() == "" and cold.counter() == 1
    cold.close()


# -- what is kept apart ----------------------------------------------------------------------


def test_the_newest_unreadable_environments_are_kept_and_counted(
    open_store_with: OpenStore, identity: Identity, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(open_store_with, identity)
    kept: list[bytes] = []
    for number in range(5):
        garbage = os.urandom(64) * 1024
        (path / "data.mdb").write_bytes(garbage)
        kept.append(garbage)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            store = open_store_with(True)
        assert store.engine.cold is not None and store.engine.cold.info()["moved_aside"] == min(number + 1, 3)
        assert any("moved to data.mdb.corrupt-" in record.getMessage() for record in caplog.records)
        assert any("newer ones are kept" in record.getMessage() for record in caplog.records) == (number >= 3)
        store.close()
    assert sorted(item.read_bytes() for item in path.glob("data.mdb.corrupt-*")) == sorted(kept[-3:])


def test_a_clock_that_was_set_back_costs_no_unreadable_environment(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither under the name of an older one nor as the oldest does the newest go."""
    path = filled(open_store_with, identity)
    monkeypatch.setattr(folder.time, "time_ns", lambda: 1000)
    for number in range(5):
        (path / "data.mdb").write_bytes(bytes([number]) * 65536)
        os.utime(path / "data.mdb", ns=(10**18 - number, 10**18 - number))
        open_store_with(True).close()
        kept = [item.read_bytes()[0] for item in path.glob("data.mdb.corrupt-*")]
        assert len(kept) == min(number + 1, 3) and number in kept


def test_what_a_compaction_left_behind_is_removed(open_store_with: OpenStore, identity: Identity) -> None:
    path = filled(open_store_with, identity)
    (path / folder.COPY).write_bytes(b"half a copy")
    check_restore(open_store_with(True), identity, [*TOKENS, 1], 9, verify=True)
    assert not (path / folder.COPY).exists()


# -- how much of it a process may map --------------------------------------------------------


LIMITED = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import TOKENS, check_restore, random_identity, save
store, identity = Store(Engine.open(StoreOptions(Path(sys.argv[1]), 64 << 20, 1 << 40))), random_identity()
assert save(store, identity, TOKENS, ack="disk").durable
check_restore(store, identity, [*TOKENS, 1], 9, verify=True)
print(store.engine.cold.info()["map_bytes"], store.engine.cold.budget_bytes)
store.close()
"""


def test_a_process_with_a_limit_takes_half_of_it_for_the_map(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(warmkv.__file__).absolute().parent.parent)}
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "store")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    map_bytes, budget_bytes = map(int, done.stdout.split())
    assert MIB < budget_bytes < map_bytes <= 2 << 30


def test_refused_address_space_is_less_of_a_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = lmdb_map._open

    def scarce(path: Path, map_bytes: int) -> lmdb.Environment:
        asked.append(map_bytes)
        if map_bytes > 20 * MIB:
            raise lmdb.MemoryError("Cannot allocate memory")
        return real(path, map_bytes)

    monkeypatch.setattr(lmdb_map, "_open", scarce)
    cold = ColdTier.open(tmp_path / "store", 100 * MIB)
    assert len(asked) > 1 and asked[-1] <= 20 * MIB and cold.info()["map_bytes"] == asked[-1]
    assert 0 < cold.budget_bytes < 20 * MIB
    cold.close()
    monkeypatch.setattr(lmdb_map, "_open", lambda path, size: scarce(path, size + 20 * MIB))
    with pytest.raises(ColdUnavailable, match="address space"):
        ColdTier.open(tmp_path / "store", 100 * MIB)


def test_the_names_of_a_new_store_are_on_the_disk_before_anything_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB synchronises its file. That the file is found after a power loss is up to the folders."""
    synced: list[tuple[Path, set[str]]] = []
    real = folder.sync

    def noting(path: Path) -> None:
        synced.append((path, {item.name for item in path.iterdir()}))
        real(path)

    monkeypatch.setattr(folder, "sync", noting)
    path = tmp_path / "new" / "store"
    ColdTier.open(path, 16 * MIB).close()
    assert [item for item, _ in synced] == [path.parent, tmp_path, path]
    assert {"data.mdb", "store.lock"} <= synced[-1][1]
