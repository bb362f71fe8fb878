"""Whole daemons: started, stopped, killed, started twice."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, child_environ, eventually
from warmkv.daemon.testing_manager import ServiceManager
from warmkv.kvstore import memfd
from warmkv.kvstore.rows import LayerRows
from warmkv.schema import errors
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
#: Ids nobody else writes, to look for in logs.
TOKENS = [1234567891, 1987654321, 1122334455, 1555666777] * 8


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, "--log-level", "debug", "--warm-bytes", "64MiB", "--cold-bytes", "64MiB") as running:
        yield running


def test_sigterm_writes_out_what_was_acknowledged_from_memory(daemon: DaemonProcess, identity: Identity, rows: Rows) -> None:
    with connect(daemon.socket, strict=True) as client:
        saved = client.save(identity, TOKENS, rows(len(TOKENS)), ack="memory")
        assert saved.stored
    assert daemon.stop() == 0
    assert not daemon.socket.exists()
    daemon.start()
    with connect(daemon.socket, strict=True) as client, client.restore(identity, [*TOKENS, 1], verify=True) as restored:
        assert (restored.usable, restored.tier) == (len(TOKENS), "cold")
        np.testing.assert_array_equal(restored.layers[1].keys, rows(len(TOKENS))[1].planes[0].rows)


def test_a_killed_daemon_leaves_a_socket_the_next_one_replaces(daemon: DaemonProcess, identity: Identity, rows: Rows) -> None:
    with connect(daemon.socket, strict=True) as client:
        assert client.save(identity, TOKENS, rows(len(TOKENS)), ack="disk").durable
        daemon.kill()
        assert daemon.socket.is_socket()
        daemon.start()
        assert client.match(identity, [*TOKENS, 1]).usable == len(TOKENS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_either_signal_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with DaemonProcess(tmp_path, "--warm-bytes", "1MiB", "--cold-bytes", "0") as daemon:
        assert daemon.stop(number) == 0
        assert "store closed" in daemon.log


STUCK = """
import sys, threading
from warmkv.daemon.cli import main
from warmkv.kvstore.store.engine import Engine
def flush(self, timeout_s=None):
    print("flushing", flush=True)
    threading.Event().wait()
Engine.flush = flush
sys.exit(main(["serve", "--json", "--socket", sys.argv[1], "--store", sys.argv[2], "--cold-bytes", "0"]))
"""


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STUCK, str(tmp_path / "run" / "s"), str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environ()) as daemon:
        assert daemon.stdout is not None
        assert "socket" in daemon.stdout.readline()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.stdout.readline() == "flushing\n"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == 1


def test_no_token_is_logged_at_debug_level(daemon: DaemonProcess, identity: Identity, rows: Rows) -> None:
    with connect(daemon.socket) as client:
        client.save(identity, TOKENS, rows(len(TOKENS)), ack="disk")
        client.match(identity, [*TOKENS[:-1], 42])
        with client.restore(identity, [*TOKENS, 1]) as restored:
            assert restored
        client.offer(identity, [*TOKENS, 7])
        client.pin(identity, TOKENS, 5)
        client.forget(identity, TOKENS)
        client.stats()
        client.report("ls")
    daemon.stop()
    assert "Match" in daemon.log and "Commit" in daemon.log
    assert not [str(token) for token in TOKENS if str(token) in daemon.log or f"{token:x}" in daemon.log]


def test_the_daemon_loads_no_compiler_and_no_framework() -> None:
    code = (
        "import sys, warmkv.daemon.lifecycle, warmkv.daemon.logs, warmkv.daemon.cli.serve\n"
        "print([name for name in ('numba', 'torch', 'cupy', 'transformers', 'rich', 'asyncio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(), check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_readiness_is_told_to_a_service_manager(tmp_path: Path, kind: str) -> None:
    """Ready is said when connections are taken, not before; then a line of status, signs of life, the end."""
    address = tmp_path / "notify" if kind == "path" else f"@warmkv-test-{uuid.uuid4().hex}"
    with ServiceManager(address) as manager:
        environ = {**manager.environ, "WATCHDOG_USEC": "200000"}
        with DaemonProcess(tmp_path, "--cold-bytes", "0", environ=environ) as daemon:
            assert manager.hears("READY") and accepts(daemon.socket)
            told = [next(iter(message)) for message in manager.messages]
            assert told[0] == "STATUS" and manager.messages[0]["STATUS"] == "opening the store"
            assert int(manager.messages[0]["EXTEND_TIMEOUT_USEC"]) > 0
            assert manager.told("STATUS")[-1] == f"serving at {daemon.socket}"
            assert manager.hears("WATCHDOG", 5)
            assert daemon.stop() == 0
            assert manager.hears("STOPPING")
        names = [name for message in manager.messages for name in message]
        assert names.index("READY") < names.index("STOPPING") and names.count("READY") == 1
        assert "EXTEND_TIMEOUT_USEC" in names[names.index("STOPPING") :]


def test_without_a_service_manager_nothing_is_told_and_a_hangup_ends_nothing(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, "--cold-bytes", "0", "--warm-bytes", "1MiB") as daemon:
        for _ in range(3):
            os.kill(daemon.pid, signal.SIGHUP)
            assert accepts(daemon.socket)
        assert daemon.stop() == 0


def test_a_hangup_reads_the_settings_again_and_the_manager_sees_it(tmp_path: Path) -> None:
    """A group of ours is let in by the new settings; settings that are wrong leave the old ones in force."""
    config = tmp_path / "config.toml"
    config.write_text("max_connections = 1\n")
    with ServiceManager(tmp_path / "notify") as manager:
        arguments = ("--cold-bytes", "0", "--warm-bytes", "1MiB", "--config", str(config))
        with DaemonProcess(tmp_path, *arguments, environ=manager.environ) as daemon, connect(daemon.socket, strict=True) as first:
            assert first.report("status")
            with pytest.raises(errors.Busy), connect(daemon.socket, strict=True) as second:
                second.report("status")
            config.write_text("max_connections = 2\n")
            os.kill(daemon.pid, signal.SIGHUP)
            assert manager.hears("RELOADING") and manager.hears("READY", 2)
            assert int(manager.told("MONOTONIC_USEC")[0]) > 0
            with connect(daemon.socket, strict=True) as second:
                assert second.report("status")
                config.write_text("max_connections = -1\n")
                os.kill(daemon.pid, signal.SIGHUP)
                assert manager.hears("READY", 3)
                assert second.report("status")
            assert daemon.stop() == 0


def test_a_stop_that_comes_while_the_store_is_opened_is_not_lost(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SLOW_START, str(tmp_path / "run" / "s"), str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environ()) as daemon:
        assert daemon.stdout is not None and daemon.stdout.readline() == "opening\n"
        daemon.send_signal(signal.SIGHUP)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE_S) == 0


SLOW_START = """
import signal, sys, time
from warmkv.daemon.cli import main
from warmkv.kvstore.store.engine import Engine
opened = Engine.open
def slowly(options):
    print("opening", flush=True)
    signal.sigtimedwait([], 0.5)
    return opened(options)
Engine.open = slowly
sys.exit(main(["serve", "--socket", sys.argv[1], "--store", sys.argv[2], "--cold-bytes", "0"]))
"""


STARTERS = """
import os, sys
from warmkv.daemon.cli import main
from warmkv.daemon import lifecycle, logs
from warmkv.kvstore.store import engine
path, store = sys.argv[1:3]
for line in sys.stdin:                      # one round a line
    gate_read, gate_write = os.pipe()
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            os.close(gate_write)
            os.read(gate_read, 1)           # both go at once when the parent closes its end
            os._exit(main(["serve", "--socket", path, "--store", store, "--cold-bytes", "8MiB"]))
        print(pid, flush=True)
    os.close(gate_read), os.close(gate_write)
    for _ in range(2):
        ended, status = os.wait()
        print(ended, os.waitstatus_to_exitcode(status), flush=True)
"""


def accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(str(path)) == 0


def test_of_two_starters_exactly_one_wins(tmp_path: Path) -> None:
    """100 rounds; in every other one the winner is killed, so the next pair finds a stale socket."""
    path, alive = tmp_path / "run" / "s", set()
    command = [sys.executable, "-c", STARTERS, str(path), str(tmp_path / "store")]
    with open(tmp_path / "log", "wb") as log:
        starters = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=child_environ()
        )
    assert starters.stdin is not None and starters.stdout is not None
    try:
        for number in range(100):
            starters.stdin.write("go\n")
            starters.stdin.flush()
            alive = {int(starters.stdout.readline()) for _ in range(2)}
            loser, status = (int(word) for word in starters.stdout.readline().split())
            alive.remove(loser)
            (winner,) = alive
            assert status == 6, (tmp_path / "log").read_text()
            assert eventually(lambda: accepts(path))
            with connect(path, strict=True, timeout_s=PATIENCE_S) as client:
                assert client.report("status")["records"] == 0
            os.kill(winner, signal.SIGKILL if number % 2 else signal.SIGTERM)
            ended, status = (int(word) for word in starters.stdout.readline().split())
            alive.remove(ended)
            assert (ended, status) == (winner, -signal.SIGKILL if number % 2 else 0)
        starters.stdin.close()
        assert starters.wait(PATIENCE_S) == 0
    finally:
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        starters.kill()
        starters.wait()
        starters.stdout.close()


def test_the_later_starter_does_not_touch_the_store(daemon: DaemonProcess, tmp_path: Path) -> None:
    other = tmp_path / "other-store"
    command = [sys.executable, "-m", "warmkv.daemon.cli", "serve", "--socket", str(daemon.socket), "--store", str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(), check=False)
    assert done.returncode == 6 and str(daemon.pid) in done.stderr
    assert not other.exists()


def test_two_sockets_cannot_share_a_store(daemon: DaemonProcess, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "warmkv.daemon.cli",
        "serve",
        "--socket",
        str(tmp_path / "run" / "t"),
        "--store",
        str(daemon.store),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(), check=False)
    assert done.returncode == 6 and "in use" in done.stderr
    assert not (tmp_path / "run" / "t").exists()


# -- descriptors ---------------------------------------------------------------------------


def test_descriptors_stay_flat_on_both_sides(
    daemon: DaemonProcess, identity: Identity, rows: Rows, descriptors: Callable[[], int]
) -> None:
    with connect(daemon.socket, strict=True) as client:
        client.save(identity, TOKENS, rows(len(TOKENS)))
        query = [*TOKENS, 1]
        for _ in range(20):
            client.restore(identity, query).close()
        assert eventually(lambda: client.stats()["leases"] == 0)
        before = descriptors(), daemon.descriptors
        for round_ in range(200):
            with client.restore(identity, query, verify=round_ % 2 == 0) as restored:
                assert restored.usable == len(TOKENS)
            assert client.match(identity, [3, *query]).usable == 0
            assert not client.restore(identity, [3, 4])
            client.save(identity, TOKENS, rows(len(TOKENS)))
        assert eventually(lambda: descriptors() <= before[0] and daemon.descriptors <= before[1])


def test_a_daemon_out_of_descriptors_fails_that_request_only(tmp_path: Path, identity: Identity, rows: Rows, peers: type) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    daemon = DaemonProcess(tmp_path, "--cold-bytes", "0", "--warm-bytes", "8MiB").start(few)
    with daemon:
        first = peers(daemon.socket).greet()
        key = first.ask(m.Open(identity.canonical())).namespace
        crowd = []
        while daemon.descriptors < 40:
            crowd.append(peers(daemon.socket).greet())
        late = peers(daemon.socket)
        assert late.hears_fault_and_end() == errors.DescriptorLimit.code
        assert eventually(lambda: daemon.descriptors == 40)  # its spare one is back
        fd = memfd.create("x", 4096)
        memfd.write(fd, bytes(4096), 0)
        memfd.seal(fd)
        fault = first.ask(m.Commit(key, 0, 0), (fd,))
        assert isinstance(fault, m.Fault) and fault.code == errors.DescriptorLimit.code and fault.retryable
        os.close(fd)
        assert isinstance(first.ask(m.Report("status")), m.Document)
        for peer in crowd:
            peer.close()
        assert eventually(lambda: daemon.descriptors < 40)
        with connect(daemon.socket, strict=True) as client:
            assert client.save(identity, TOKENS, rows(len(TOKENS))).stored


def test_a_client_out_of_descriptors_misses_that_request_only(daemon: DaemonProcess, identity: Identity, rows: Rows) -> None:
    with connect(daemon.socket) as client:
        client.save(identity, TOKENS, rows(len(TOKENS)))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(int(name) for name in os.listdir("/proc/self/fd"))
        blockers = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
            while True:
                blockers.append(os.dup(0))
        except OSError:
            restored = client.restore(identity, [*TOKENS, 1])
            assert not restored and "DescriptorLimit" in restored.reason
            again = client.match(identity, [*TOKENS, 1])  # its connection was closed, and its descriptor is free
            assert again.usable == len(TOKENS)
        finally:
            for fd in blockers:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with client.restore(identity, [*TOKENS, 1]) as restored:
            assert restored.usable == len(TOKENS)


def test_a_signal_that_another_thread_gets_stops_the_daemon(daemon: DaemonProcess) -> None:
    """The kernel may give a signal to any thread; the main one sleeps in poll and must notice."""
    threads = [int(name) for name in os.listdir(f"/proc/{daemon.pid}/task") if int(name) != daemon.pid]
    assert threads, "no thread besides the main one"
    assert ctypes.CDLL(None).tgkill(daemon.pid, threads[0], int(signal.SIGTERM)) == 0
    process = daemon._process
    assert process is not None and eventually(lambda: process.poll() is not None, 20)
    assert process.returncode == 0
