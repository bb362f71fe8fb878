from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.daemon import notify
from warmkv.daemon.notify import Notifier
from warmkv.daemon.testing_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    address = tmp_path / "notify" if request.param == "path" else f"@warmkv-test-{uuid.uuid4().hex}"
    with ServiceManager(address) as listening:
        yield listening


def test_each_state_is_one_datagram(manager: ServiceManager) -> None:
    notifier = Notifier(manager.address)
    assert notifier
    notifier.ready("serving")
    notifier.status("12 records")
    assert notifier.alive()
    notifier.stopping()
    assert manager.hears("STOPPING")
    assert manager.messages == [
        {"READY": "1", "STATUS": "serving"}, {"STATUS": "12 records"}, {"WATCHDOG": "1"}, {"STOPPING": "1", "STATUS": "stopping"},
    ]  # fmt: skip


def test_a_reload_begins_with_the_clock_and_ends_ready_even_where_it_fails(manager: ServiceManager) -> None:
    notifier = Notifier(manager.address)
    before = time.monotonic_ns() // 1000
    with pytest.raises(KeyError), notifier.reloading():
        raise KeyError
    assert manager.hears("READY")
    assert [list(message) for message in manager.messages] == [["RELOADING", "MONOTONIC_USEC"], ["READY"]]
    assert before <= int(manager.told("MONOTONIC_USEC")[0]) <= time.monotonic_ns() // 1000


def test_more_time_is_asked_for_as_long_as_it_takes(manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "EXTEND_EVERY_S", 0.01)
    with Notifier(manager.address).extending("opening", at_most_s=1000):
        assert manager.hears("EXTEND_TIMEOUT_USEC", 3)
    told = len(manager.messages)
    assert manager.told("STATUS")[0] == "opening"
    assert {int(value) for value in manager.told("EXTEND_TIMEOUT_USEC")} == {int(notify.EXTEND_BY_S * 1e6)}
    Notifier(manager.address).status("after")
    assert manager.hears("STATUS", told + 1) and len(manager.messages) == told + 1, "nothing is asked for afterwards"


def test_what_never_ends_gets_no_more_time(manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    notifier = Notifier(manager.address)
    notifier._extend("stuck", 35.0, lambda seconds: bool(waits.append(seconds)))
    assert waits == [notify.EXTEND_EVERY_S] * 4
    assert manager.hears("EXTEND_TIMEOUT_USEC", 4) and len(manager.messages) == 4


def test_status_is_one_line_of_bounded_length(manager: ServiceManager) -> None:
    Notifier(manager.address).status("a\nREADY=1\n" + "b" * 5000)
    assert manager.hears("STATUS")
    (message,) = manager.messages
    assert list(message) == ["STATUS"] and len(message["STATUS"]) <= 400


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "relative", "@" + "x" * 200, "/nowhere/at/all", "/" + "x" * 200])
def test_whom_nobody_can_reach_stops_nobody(address: str, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier(address)
    notifier.ready("x")
    with notifier.extending("x", 5), notifier.reloading():
        notifier.stopping()
    assert notifier.alive() is False


def test_a_manager_that_is_slow_to_read_still_hears_of_readiness(tmp_path: Path) -> None:
    address = str(tmp_path / "slow")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as slow, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as noise:
        slow.bind(address)
        noise.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):
            while True:
                noise.sendto(b"noise", address)
                sent += 1
        thread = threading.Thread(target=Notifier(address).ready, args=("late",))
        thread.start()
        heard = [slow.recv(100) for _ in range(sent + 1)]
        thread.join()
        assert heard[-1] == b"READY=1\nSTATUS=late"


def test_no_descriptor_stays(manager: ServiceManager) -> None:
    before = len(os.listdir("/proc/self/fd"))
    notifier = Notifier(manager.address)
    for _ in range(5):
        notifier.status("x")
    assert len(os.listdir("/proc/self/fd")) == before
