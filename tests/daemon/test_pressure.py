"""Memory pressure, told by files, pipes and sockets of the tests' own."""

from __future__ import annotations

import base64
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmkv.daemon import pressure
from warmkv.daemon.pressure import FRACTION, TRIGGER, PressureWatch, Source, source
from warmkv.daemon.testing import eventually
from warmkv.kvstore.store import Store, StoreOptions, cgroup
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import TOKENS, random_identity, save
from warmkv.kvstore.testing.bounds import bounded

MIB = 1 << 20


class FakeTime:
    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


class Shrinks:
    """Counts what was asked to be given back."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.error: Exception | None = None

    def __call__(self, fraction: float) -> int:
        self.asked.append(fraction)
        if self.error is not None:
            raise self.error
        return 100


@pytest.fixture(autouse=True)
def flat() -> Iterator[None]:
    """Threads and descriptors are as before when a test is over."""
    held: Callable[[], tuple[int, int]] = lambda: (threading.active_count(), len(os.listdir("/proc/self/fd")))  # noqa: E731
    before = held()
    with bounded(100):
        yield
    assert eventually(lambda: held() == before, 5), (before, held())


@pytest.fixture
def shrinks() -> Shrinks:
    return Shrinks()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


# -- what is watched -----------------------------------------------------------------------------


def test_a_service_manager_may_say_what_to_watch_or_that_nothing_is() -> None:
    assert source("/sys/fs/cgroup/x/memory.pressure", encoded(b"some 1 2\0")) == Source(
        Path("/sys/fs/cgroup/x/memory.pressure"), b"some 1 2\0"
    )
    assert source("/run/x/fifo", "") == Source(Path("/run/x/fifo"), b"")
    assert source("/dev/null", encoded(b"x")) is None


@pytest.mark.parametrize("text", ["not base64!", "ü", "YQ", "=" * 5])
def test_what_is_no_base64_is_not_written(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert source("/run/x/fifo", text) == Source(Path("/run/x/fifo"), b"")
    assert "base64" in caplog.text


def test_otherwise_the_own_group_is_watched_or_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine"
    monkeypatch.setattr(cgroup, "find", lambda: None)
    assert source("", "", machine) is None
    machine.write_bytes(b"")
    assert source("", "", machine) == Source(machine, TRIGGER)
    group = cgroup.MemoryCgroup(2, tmp_path, tmp_path)
    monkeypatch.setattr(cgroup, "find", lambda: group)
    assert source("", "", machine) == Source(machine, TRIGGER)
    (tmp_path / "memory.pressure").write_bytes(b"")
    assert source("", "", machine) == Source(tmp_path / "memory.pressure", TRIGGER)
    monkeypatch.setattr(os, "access", lambda path, mode: path == machine and mode == os.W_OK)
    assert source("", "", machine) == Source(machine, TRIGGER)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert source("", "", machine) is None


def test_the_trigger_is_one_the_kernel_takes_from_anybody() -> None:
    kind, stall_us, window_us = TRIGGER.rstrip(b"\0").split()
    assert kind == b"some" and 0 < int(stall_us) < int(window_us)
    assert int(window_us) % 2_000_000 == 0 and int(window_us) <= 10_000_000


def test_a_file_of_the_kernel_is_written_to_and_waited_on_for_priority_data(tmp_path: Path) -> None:
    path = tmp_path / "memory.pressure"
    path.write_bytes(b"")
    fd, wanted = Source(path, TRIGGER).open()
    os.close(fd)
    assert path.read_bytes() == TRIGGER and wanted == select.POLLPRI


@pytest.mark.skipif(not os.access(pressure.MACHINE_FILE, os.W_OK), reason="this kernel tells no memory pressure")
def test_this_kernel_takes_the_trigger(shrinks: Shrinks) -> None:
    watch = PressureWatch(Source(pressure.MACHINE_FILE, TRIGGER), shrinks)
    watch.start()
    try:
        assert eventually(lambda: watch.figures()["watching"] == str(pressure.MACHINE_FILE))
        assert watch.problem() == ""
    finally:
        watch.stop()


# -- events --------------------------------------------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def tell(pipe: Path, data: bytes = b"pressure") -> None:
    """Write into a pipe somebody reads, as a service manager does."""
    with open(pipe, "wb", buffering=0) as writer:
        writer.write(data)


def test_each_message_of_a_pipe_is_pressure_also_from_a_second_writer(pipe: Path, shrinks: Shrinks) -> None:
    watch = PressureWatch(Source(pipe, b""), shrinks, hold_off_s=0.0)
    watch.start()
    try:
        for count in (1, 2, 3):
            tell(pipe, b"x" * 5000)
            assert eventually(lambda count=count: len(shrinks.asked) >= count)  # type: ignore[misc]
        assert set(shrinks.asked) == {FRACTION}
        assert watch.figures() == {"watching": str(pipe), "events": watch.events, "freed_bytes": 100 * len(shrinks.asked)}
    finally:
        watch.stop()


def test_events_within_the_hold_off_are_counted_and_change_nothing(shrinks: Shrinks) -> None:
    now = FakeTime()
    watch = PressureWatch(None, shrinks, hold_off_s=2.0, monotonic=now)
    for _ in range(5):
        watch.event()
    assert (len(shrinks.asked), watch.events) == (1, 5)
    now.now += 1.9
    watch.event()
    assert len(shrinks.asked) == 1
    now.now += 0.1
    watch.event()
    assert len(shrinks.asked) == 2


def test_the_hold_off_begins_when_what_was_asked_for_is_done() -> None:
    now = FakeTime()
    asked = []

    def slow(fraction: float) -> int:
        asked.append(fraction)
        now.now += 60.0
        return 0

    watch = PressureWatch(None, slow, hold_off_s=2.0, monotonic=now)
    watch.event()
    watch.event()
    assert len(asked) == 1


def test_a_shrink_that_fails_does_not_end_the_watch(pipe: Path, shrinks: Shrinks) -> None:
    watch = PressureWatch(Source(pipe, b""), shrinks, hold_off_s=0.0)
    shrinks.error = RuntimeError("secret")
    watch.start()
    try:
        tell(pipe)
        assert eventually(lambda: len(shrinks.asked) == 1)
        tell(pipe)
        assert eventually(lambda: len(shrinks.asked) == 2)
        assert watch.problem() == ""
    finally:
        watch.stop()


def test_a_socket_is_greeted_and_its_end_is_noticed(tmp_path: Path, shrinks: Shrinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "REOPEN_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        server.settimeout(60)
        watch = PressureWatch(Source(tmp_path / "socket", b"hello"), shrinks, hold_off_s=0.0)
        watch.start()
        try:
            for count in (1, 2):
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(60)
                    assert peer.recv(100) == b"hello"
                    peer.sendall(b"!")
                    assert eventually(lambda count=count: len(shrinks.asked) == count)  # type: ignore[misc]
        finally:
            watch.stop()


def test_a_source_that_appears_later_is_found(tmp_path: Path, shrinks: Shrinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "REOPEN_S", 0.01)
    pipe = tmp_path / "pipe"
    watch = PressureWatch(Source(pipe, b""), shrinks, hold_off_s=0.0)
    watch.start()
    try:
        assert eventually(lambda: watch.figures()["watching"] is None)
        os.mkfifo(pipe)
        tell(pipe)
        assert eventually(lambda: len(shrinks.asked) == 1)
    finally:
        watch.stop()


def test_it_starts_and_stops_as_often_as_wanted(pipe: Path, shrinks: Shrinks) -> None:
    watch = PressureWatch(Source(pipe, b""), shrinks, hold_off_s=0.0)
    watch.stop()
    for _ in range(3):
        watch.start()
        watch.start()
        watch.stop()
        watch.stop()
    nothing = PressureWatch(None, shrinks)
    nothing.start()
    assert (nothing.problem(), nothing.figures()["watching"]) == ("", None)
    nothing.stop()


# -- what it does to a store ---------------------------------------------------------------------


def test_pressure_shrinks_the_warm_tier_and_loses_nothing_that_is_on_disk(tmp_path: Path, pipe: Path) -> None:
    store = Store(Engine.open(StoreOptions(tmp_path / "store", warm_bytes=64 * MIB, cold_bytes=64 * MIB)))
    try:
        identities = [random_identity(seed=seed) for seed in range(8)]
        for identity in identities:
            save(store, identity, TOKENS, ack="disk")
        before = store.engine.warm.ledger.resident_bytes
        watch = PressureWatch(Source(pipe, b""), store.engine.eviction.shrink, hold_off_s=0.0)
        watch.start()
        try:
            tell(pipe)
            assert eventually(lambda: 0 < watch.freed_bytes)
        finally:
            watch.stop()
        assert store.engine.warm.ledger.resident_bytes <= before * (1 - FRACTION)
        assert store.engine.warm.ledger.resident_bytes == before - watch.freed_bytes
        assert [store.match(identity, TOKENS).matched for identity in identities] == [len(TOKENS)] * 8
    finally:
        store.close()
