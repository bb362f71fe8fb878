"""Power cuts: whatever was acknowledged as durable rests on writes that were synced before.

A recorder notes every write, every sync and every word a daemon says. A daemon must have synced what
it acknowledges, and a store that is rebuilt from synced writes alone must hold all of it.
"""

from __future__ import annotations

import random
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_nursery import Nursery
from fault_script import AMPLE, Promises
from fault_writes import Disk, Event, Kind, build_recorder, environ, events

from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore.client import connect
from warmkv.kvstore.testing import random_identity, save
from warmkv.schema import frame
from warmkv.schema import messages as m
from warmkv.schema.errors import WarmKVError

IDENTITY = random_identity(layers=1, heads=1, dim=64)
Say = Callable[[str], None]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    made = build_recorder(tmp_path)
    if made is None:
        pytest.skip("no C compiler to build the recorder with")
    return made


def heard(said: bytes) -> m.Message | None:
    """The message that was sent whole in one call."""
    try:
        return m.decode(said[frame.LENGTH.size : frame.LENGTH.size + frame.LENGTH.unpack_from(said)[0]])[1]
    except (WarmKVError, ValueError, IndexError, struct.error):
        return None


def broken_promises(recorded: Sequence[Event], store: Path) -> tuple[int, list[str]]:
    """How many acknowledgements left a daemon, and those whose record was not on disk by then: its
    id in a write that a later sync covers, and after that the page that makes it count."""
    promised, broken = 0, []
    data = next(event.file for event in recorded if event.kind == Kind.NAME and Path(event.names[0]) == store / "data.mdb")
    written: list[bytes] = []
    covered: list[int] = []
    synced: list[bytes] = []
    counts: list[bytes] = []
    for event in recorded:
        if event.file == data and event.kind == Kind.WRITE:
            written.append(event.data)
        elif event.file == data and event.kind == Kind.SYNC_BEGIN:
            covered.append(len(written))
        elif event.file == data and event.kind == Kind.SYNC_END:
            done = covered.pop(0)
            synced += written[:done]
            del written[:done]
            covered = [max(0, count - done) for count in covered]
        elif event.file == data and event.kind == Kind.DSYNC_WRITE:
            counts += synced
            synced = []
        elif event.kind == Kind.SEND:
            reply = heard(event.data)
            if isinstance(reply, m.Committed) and reply.durable:
                promised += 1
                if not any(page.find(reply.id) >= 0 for page in counts):
                    broken.append(reply.id.hex())
    return promised, broken


def test_a_sync_comes_before_every_durable_acknowledgement(tmp_path: Path, library: Path) -> None:
    log = tmp_path / "writes.log"
    folder = tmp_path / "daemon"
    folder.mkdir()
    daemon = DaemonProcess(folder, "--warm-bytes", "16MiB", "--cold-bytes", "64MiB", environ=environ(library, log, folder))
    with daemon.start(), ThreadPoolExecutor(4) as pool:

        def talk(number: int) -> int:
            with connect(daemon.socket, strict=True, timeout_s=60) as client:
                for turn in range(1, 13):
                    ids = [1000 + number, *range(2000, 2000 + 3 * turn)]
                    assert save(client, IDENTITY, ids, ack="disk" if turn % 3 else "memory").stored
            return turn

        assert list(pool.map(talk, range(4))) == [12] * 4
        assert daemon.stop() == 0
    recorded = events(log)
    promised, broken = broken_promises(recorded, daemon.store)
    assert broken == [] and promised >= 32
    # The same words without the syncs are noticed: the proof is not that nothing was looked at.
    unsynced = [event for event in recorded if event.kind not in (Kind.SYNC_END, Kind.DSYNC_WRITE)]
    assert len(broken_promises(unsynced, daemon.store)[1]) == promised


def record(library: Path, folder: Path, seed: int, **about: object) -> tuple[Path, list[Event]]:
    """One life of a store, written down; each acknowledgement is a line in the file ``told``."""
    log, under = folder / f"writes-{seed}.log", folder / f"life-{seed}"
    under.mkdir()
    nursery = Nursery(**environ(library, log, under))
    try:
        told = str(under / "told")
        status, lines = nursery.do("run", store=str(under / "store"), tier="ample", seed=seed, told=told, **about)
    finally:
        nursery.close()
    assert status == 0, lines[-1]
    return under, events(log)


def power_cuts(
    nursery: Nursery, folder: Path, under: Path, recorded: list[Event], seed: int, wanted: int, say: Say
) -> Counter[str]:
    """Rebuild the store at points of its life, with and without pages nobody synced, and look for
    all that was acknowledged until then."""
    rng, begun = random.Random(seed), time.monotonic()
    told = next(event.file for event in recorded if event.kind == Kind.NAME and event.names[0] == str(under / "told"))
    changes = [at for at, event in enumerate(recorded) if event.kind not in (Kind.SEND, Kind.NAME)]
    points = set(rng.sample(changes, min(wanted, len(changes))))
    disk, lines, found = Disk(), "", Counter[str]()
    for at, event in enumerate(recorded):
        if event.file == told and event.kind == Kind.WRITE:
            lines += event.data.decode()
        elif event.kind != Kind.SEND:
            disk.apply(event)
        if at not in points:
            continue
        promises = Promises(AMPLE)
        promises.hear(seed, [line for line in lines.split("\n") if line])
        for chance in (None, random.Random(at)):
            if chance is not None and not disk.pending():
                continue
            where = folder / "rebuilt"
            where.mkdir()
            disk.rebuild(where, under / "store", ["data.mdb"], chance)
            about = {"tier": "ample", "required": sorted(promises.required), "seeds": [seed]}
            status, said = nursery.do("examine", store=str(where), **about)
            kinds = {line.split(" ")[0] for line in said if not line.startswith("left ")}
            found["stores"] += 1
            found["saves"] += len(promises.required)
            found.update(kinds | ({"failed"} if status else set()))
            for line in said:
                if not line.startswith("left "):
                    print(f"at {at} of {len(recorded)}: {line}")
            shutil.rmtree(where)
        say(f"{time.monotonic() - begun:6.1f} s  {dict(found)}")
    return found


def test_a_sample_of_power_cuts(nursery: Nursery, fast_folder: Path, library: Path, say: Say) -> None:
    under, recorded = record(library, fast_folder, 21)
    found = power_cuts(nursery, fast_folder, under, recorded, 21, 12, say)
    assert set(found) == {"stores", "saves"} and found["saves"] > 0


@pytest.mark.faults
def test_hundreds_of_power_cuts(nursery: Nursery, fast_folder: Path, library: Path, say: Say) -> None:
    whole = Counter[str]()
    for seed in range(30, 34):
        under, recorded = record(library, fast_folder, seed)
        whole += power_cuts(nursery, fast_folder, under, recorded, seed, 60, say)
    assert set(whole) == {"stores", "saves"} and whole["stores"] >= 300


def test_a_store_that_does_not_sync_is_found_out(nursery: Nursery, fast_folder: Path, library: Path, say: Say) -> None:
    """The proof itself: the same life with syncs switched off keeps nothing."""
    under, recorded = record(library, fast_folder, 22, unsynced=True)
    assert power_cuts(nursery, fast_folder, under, recorded, 22, 12, say)["lost"] > 0
