"""Pings prove progress: slow disks cost none, a stuck daemon costs all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmkv import connect
from warmkv.daemon.notify import Notifier
from warmkv.daemon.testing import ServedEngine, eventually
from warmkv.daemon.testing_manager import ServiceManager
from warmkv.daemon.watchdog import Knocks, Watchdog, interval_s, proofs, sound, takes
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.faults import Faults
from warmkv.kvstore.store.health import Health
from warmkv.kvstore.store.options import StoreOptions
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
MIB = 1 << 20


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path / "notify") as listening:
        yield listening


@pytest.mark.parametrize(
    ("usec", "pid", "expected"),
    [
        ("60000000", "", 60.0),
        ("60000000", "7", 60.0),
        ("60000000", "8", 0.0),
        ("60000000", "x", 0.0),
        ("0", "7", 0.0),
        ("-1", "7", 0.0),
        ("", "7", 0.0),
        ("1e6", "7", 0.0),
        ("²", "7", 0.0),
    ],
)
def test_patience_is_read_for_this_process_only(usec: str, pid: str, expected: float) -> None:
    assert interval_s(usec, pid, 7) == expected


def steps(watchdog: Watchdog, count: int) -> list[bool]:
    return [watchdog.step() for _ in range(count)]


def test_a_loop_that_stops_answering_stops_the_pings_and_they_come_back_with_it(manager: ServiceManager) -> None:
    answers, deaf = 0, False

    def knock() -> None:
        nonlocal answers
        answers += not deaf

    watchdog = Watchdog(Notifier(manager.address), 60.0, [Knocks(knock, lambda: answers)])
    assert steps(watchdog, 3) == [True] * 3
    deaf = True
    assert steps(watchdog, 4) == [True, False, False, False], "the knock of the last time was still answered"
    answers, deaf = answers + 1, False
    assert steps(watchdog, 2) == [True, True]
    assert manager.hears("WATCHDOG", 6) and len(manager.messages) == 6


def test_pings_come_several_times_within_the_patience(manager: ServiceManager) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 5

    watchdog = Watchdog(Notifier(manager.address), 60.0, [], wait)
    watchdog.start()
    watchdog.stop()
    assert waits == [15.0] * 5 and watchdog.pings == 5


def test_a_dead_thread_stops_the_pings_and_a_full_disk_does_not(manager: ServiceManager) -> None:
    health, said = Health(), {"disk": "", "observer": ""}
    health.watch("disk", lambda: said["disk"])
    health.watch("observer", lambda: said["observer"], vital=True)
    watchdog = Watchdog(Notifier(manager.address), 60.0, [sound(health)])
    assert watchdog.step()
    said["disk"] = "the disk is full"
    assert watchdog.step()
    said["observer"] = "the observer is dead"
    assert not watchdog.step()
    health.watch("observer", lambda: 1 / 0 and "", vital=True)
    assert not watchdog.step(), "a check that fails proves nothing"
    health.forget("observer")
    assert watchdog.step()


def test_a_proof_that_fails_is_no_proof(manager: ServiceManager) -> None:
    def broken() -> str:
        raise ZeroDivisionError

    watchdog = Watchdog(Notifier(manager.address), 60.0, [broken])
    assert not watchdog.step() and watchdog.pings == 0


def test_a_lock_that_is_never_free_stops_the_pings() -> None:
    lock = threading.Condition()
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            free.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    proof = takes(lock, 0.01)
    assert "index lock" in proof()
    free.set()
    thread.join()
    assert proof() == ""


def test_a_writer_that_died_costs_all_pings(manager: ServiceManager, tmp_path: Path) -> None:
    """Nothing would be written any more, and nothing but a new process begins to again."""

    engine = Engine.open(StoreOptions(path=tmp_path / "store", warm_bytes=MIB, cold_bytes=64 * MIB))
    try:
        assert engine.writer is not None
        watchdog = Watchdog(Notifier(manager.address), 60.0, [sound(engine.health)])
        assert watchdog.step()
        living, engine.writer._thread = engine.writer._thread, dead_thread()
        assert not watchdog.step()
        engine.writer._thread = living
        assert watchdog.step()
    finally:
        engine.close()


def dead_thread() -> threading.Thread:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return thread


class SlowDisk(Faults):
    """Stands in the middle of a commit, as an fsync of a minute does, until it is let go on."""

    def __init__(self) -> None:
        self.reaching, self.go_on = threading.Event(), threading.Event()

    def reached(self, point: str) -> None:
        if point == "commit.metadata":
            self.reaching.set()
            self.go_on.wait()


def test_a_disk_that_takes_a_minute_costs_no_ping(
    manager: ServiceManager, tmp_path: Path, socket_path: Path, identity: Identity, rows: Rows
) -> None:
    disk = SlowDisk()
    engine = Engine.open(StoreOptions(path=tmp_path / "store", warm_bytes=64 * MIB, cold_bytes=64 * MIB, faults=disk))
    try:
        with ServedEngine(socket_path, engine) as served, connect(socket_path, strict=True) as client:
            watchdog = Watchdog(Notifier(manager.address), 60.0, proofs(served.server, engine, 60.0))
            saving = threading.Thread(target=client.save, args=(identity, [1, 2, 3, 4], rows(4)), kwargs={"ack": "disk"})
            saving.start()
            assert disk.reaching.wait(20)
            for number in range(8):
                assert watchdog.step(), number
                assert eventually(lambda: served.server.answers > number)  # noqa: B023 - asked before it changes
            disk.go_on.set()
            saving.join()
    finally:
        disk.go_on.set()
        engine.close()
    assert manager.hears("WATCHDOG", 8)


def test_a_stuck_accept_loop_costs_all_pings(
    manager: ServiceManager, socket_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, let_go = threading.Event(), threading.Event()

    def session(uid: int, **_: object) -> object:
        stuck.set()
        let_go.wait()
        raise OSError("over")

    with ServedEngine(socket_path, engine) as served:
        watchdog = Watchdog(Notifier(manager.address), 60.0, proofs(served.server, engine, 60.0))
        assert watchdog.step() and eventually(lambda: served.server.answers == 1) and watchdog.step()
        assert eventually(lambda: served.server.answers == 2)
        monkeypatch.setattr(engine, "session", session)
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(socket_path))
            try:
                assert stuck.wait(20)
                assert [watchdog.step() for _ in range(3)] == [True, False, False]
            finally:
                let_go.set()
        assert eventually(lambda: served.server.answers == 3) and watchdog.step()


def test_a_held_index_lock_costs_all_pings(manager: ServiceManager, socket_path: Path, engine: Engine) -> None:
    with ServedEngine(socket_path, engine) as served:
        watchdog = Watchdog(Notifier(manager.address), 0.04, proofs(served.server, engine, 0.04))
        held, free = threading.Event(), threading.Event()

        def hold() -> None:
            with engine.index.changed:
                held.set()
                free.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        assert not watchdog.step() and watchdog.pings == 0
        free.set()
        thread.join()
        assert eventually(watchdog.step)


def test_threads_and_descriptors_are_given_back(manager: ServiceManager, engine: Engine, socket_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with ServedEngine(socket_path, engine) as served:
        watchdog = Watchdog(Notifier(manager.address), 0.04, proofs(served.server, engine, 10.0))
        watchdog.start()
        assert manager.hears("WATCHDOG", 3)
        watchdog.stop()
        watchdog.stop()
    Watchdog(Notifier(manager.address), 1.0, []).stop()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
