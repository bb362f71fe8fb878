"""What an acknowledgement is worth: kill -9, full disks, full maps.

A child saves and says so; it is killed somewhere; whatever it had said must be there, bit for bit.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import warmkv
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import check_restore, save
from warmkv.kvstore.testing.samples import FULL, OPAQUE, RECURRENT, mixed_identity, sliding
from warmkv.schema.errors import ColdFull
from warmkv.schema.identity import Identity

OpenStore = Callable[..., Store]
KIB, MIB = 1024, 1 << 20
ROUNDS = 16

CHILD = """
import sys
from warmkv.kvstore.store import open_store
from warmkv.kvstore.testing import random_identity, save
path, first, warm_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
identity = random_identity(layers=1, heads=1, dim=256)
store = open_store(path, warm_bytes=warm_bytes, cold_bytes=512 << 20)
print("ready", flush=True)
for seed in range(first, first + 1000):
    # Grows chains of three, so that parents and children are acknowledged apart; the third is
    # saved without waiting and becomes durable with the next.
    for length, ack in ((40, "disk"), (90, "disk"), (95, "memory"), (120, "disk")):
        save(store, identity, [seed * 1000 + at for at in range(length)], ack=ack)
        if ack == "disk":
            print(seed, length, flush=True)
"""


#: A save of a model with windows and states is several containers, acknowledged together.
STATEFUL_CHILD = """
import sys
from warmkv.kvstore.store import open_store
from warmkv.kvstore.testing import save
from warmkv.kvstore.testing.samples import FULL, OPAQUE, RECURRENT, mixed_identity, sliding
path, first, warm_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
identity = mixed_identity(FULL, sliding(4), RECURRENT, OPAQUE)
store = open_store(path, warm_bytes=warm_bytes, cold_bytes=512 << 20)
print("ready", flush=True)
for seed in range(first, first + 1000):
    # The third adds a window and a state to rows that are held.
    for length, ack in ((40, "disk"), (90, "memory"), (60, "disk"), (120, "disk")):
        save(store, identity, [seed * 1000 + at for at in range(length)], ack=ack)
        if ack == "disk":
            print(seed, length, flush=True)
"""


def ids(seed: int, length: int) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def killed_child(program: str, path: Path, first: int, warm_bytes: int, rng: random.Random) -> dict[int, list[int]]:
    """Run the child, kill it after some acknowledgements, at a random moment of the next save;
    the lengths it acknowledged, by seed."""
    environ = {**os.environ, "PYTHONPATH": str(Path(warmkv.__file__).absolute().parent.parent)}
    command = [sys.executable, "-c", program, str(path), str(first), str(warm_bytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        lines = [child.stdout.readline() for _ in range(rng.randint(1, 12))]
        # Not a wait for anything: it moves the blow to another point of the save under way.
        select.select([], [], [], rng.random() * 0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        child.stdout.close()
        child.wait()
    acknowledged: dict[int, list[int]] = {}
    for line in lines:
        if line.endswith(b"\n"):
            seed, length = map(int, line.split())
            acknowledged.setdefault(seed, []).append(length)
    return acknowledged


@pytest.mark.parametrize("warm_bytes", [64 * MIB, 500 * KIB])
def test_acknowledged_saves_survive_sigkill(open_store_with: OpenStore, wide: Identity, tmp_path: Path, warm_bytes: int) -> None:
    """With a warm tier that holds everything, and with one that has to let go with every save."""
    rng = random.Random(20)
    acknowledged: dict[int, int] = {}
    path = tmp_path / "store"
    for round_ in range(ROUNDS):
        fresh = {seed: max(found) for seed, found in killed_child(CHILD, path, round_ * 1000, warm_bytes, rng).items()}
        assert fresh
        acknowledged |= fresh
        store = open_store_with(path, cold_bytes=512 * MIB)
        assert check(store.engine) == []
        for seed, length in fresh.items():
            check_restore(store, wide, [*ids(seed, length), 7], length, verify=True)
        store.close()
    store = open_store_with(path, cold_bytes=512 * MIB)
    for seed, length in acknowledged.items():
        assert store.match(wide, [*ids(seed, length), 7]).usable == length
    assert store.report("verify")["bad"] == []


@pytest.mark.parametrize("warm_bytes", [64 * MIB, 200 * KIB])
def test_acknowledged_states_and_windows_survive_sigkill(open_store_with: OpenStore, tmp_path: Path, warm_bytes: int) -> None:
    """Every position that was acknowledged can be resumed at, not the last one only."""
    identity = mixed_identity(FULL, sliding(4), RECURRENT, OPAQUE)
    rng, path = random.Random(21), tmp_path / "store"
    for round_ in range(ROUNDS // 2):
        fresh = killed_child(STATEFUL_CHILD, path, round_ * 1000, warm_bytes, rng)
        assert fresh
        store = open_store_with(path, cold_bytes=512 * MIB)
        assert check(store.engine) == []
        for seed, lengths in fresh.items():
            for length in lengths:
                check_restore(store, identity, [*ids(seed, length), 7], length, verify=True)
        assert store.report("verify")["bad"] == []
        store.close()


def test_close_writes_what_was_only_in_memory(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True)
    for seed in range(10):
        save(store, wide, ids(seed, 50))
    store.close()
    again = open_store_with(True)
    for seed in range(10):
        check_restore(again, wide, [*ids(seed, 50), 7], 50, verify=True)


# -- no room ---------------------------------------------------------------------------------


def crowd(disk: Path, leave_bytes: int) -> Path:
    """Fill the disk with somebody else's file but for ``leave_bytes``."""
    filler = disk / "filler"
    stat = os.statvfs(disk)
    with open(filler, "ab") as file:
        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, stat.f_bavail * stat.f_frsize - leave_bytes)
    return filler


@pytest.mark.parametrize("leave_bytes", [0, 300 * KIB, 2 * MIB])
def test_a_full_disk_costs_no_more_than_the_cold_tier(
    open_store_with: OpenStore, wide: Identity, small_disk: Path, leave_bytes: int
) -> None:
    """Saves are refused or stay in memory, what is held is served, nothing acknowledged is lost,
    and room that is made is used without a restart."""
    store = open_store_with(small_disk / "store", cold_bytes=40 * MIB, warm_bytes=64 * MIB)
    for seed in range(10):
        save(store, wide, ids(seed, 100), ack="disk")
    crowd(small_disk, leave_bytes)
    refused = []
    for seed in range(10, 40):
        try:
            save(store, wide, ids(seed, 100), ack="disk")
        except ColdFull:
            refused.append(seed)
    assert refused
    for seed in range(40):
        check_restore(store, wide, ids(seed, 100), 99)
    assert store.forget(wide, ids(0, 100)).records == 1
    for seed in range(1, 9):
        assert store.forget(wide, ids(seed, 100)).records == 1
    assert save(store, wide, ids(50, 100), ack="disk").durable
    assert check(store.engine) == []
    store.close()
    again = open_store_with(small_disk / "store", cold_bytes=40 * MIB)
    for seed in range(9):
        assert again.match(wide, ids(seed, 100)).matched == 0
    check_restore(again, wide, ids(9, 100), 99, verify=True)
    check_restore(again, wide, ids(50, 100), 99, verify=True)
    again.clear()
    for seed in range(8):
        assert save(again, wide, ids(seed, 100), ack="disk").durable


def test_agents_see_only_misses_when_the_disk_is_full(open_store_with: OpenStore, wide: Identity, small_disk: Path) -> None:
    """What is in neither tier is a miss; a cold hit needs no disk."""
    store = open_store_with(small_disk / "store", cold_bytes=40 * MIB, warm_bytes=900 * KIB)
    for seed in range(10):
        save(store, wide, ids(seed, 100), ack="disk")
    crowd(small_disk, 0)
    for seed in range(10, 30):
        save(store, wide, ids(seed, 100))
    for seed in range(30):
        with store.restore(wide, ids(seed, 100)) as restored:
            assert restored.usable == (99 if seed < 10 else restored.usable)
    assert check(store.engine) == []


def test_a_full_map_is_refused_and_recovers(open_store_with: OpenStore, wide: Identity) -> None:
    store = open_store_with(True, cold_bytes=2 * MIB)
    pinned = []
    with pytest.raises(ColdFull):
        for seed in range(40):
            save(store, wide, ids(seed, 100), ack="disk")
            store.pin(wide, ids(seed, 100), 3600)
            pinned.append(seed)
    assert len(pinned) > 5
    for seed in range(len(pinned) + 1):
        check_restore(store, wide, ids(seed, 100), 99)
    assert store.forget(wide, ids(0, 100)).records == 1
    assert save(store, wide, ids(90, 100), ack="disk").durable
    store.clear()
    for seed in range(100, 130):
        assert save(store, wide, ids(seed, 100), ack="disk").durable
    store.close()
    check_restore(open_store_with(True, cold_bytes=2 * MIB), wide, ids(129, 100), 99, verify=True)
