"""Sockets that a service manager bound: served, never bound again, never removed."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmkv import connect
from warmkv.daemon import activation, config
from warmkv.daemon.activation import Inherited
from warmkv.daemon.listener import Listener
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, child_environ, eventually
from warmkv.daemon.testing_manager import ServiceManager, listening
from warmkv.schema.errors import AlreadyRunning, SocketPathError

SMALL = ("--cold-bytes", "0", "--warm-bytes", "8MiB")


@pytest.fixture
def passed(tmp_path: Path) -> Iterator[Callable[..., socket.socket]]:
    """Makes listening sockets as a socket unit does; they are closed after the test."""
    made: list[socket.socket] = []

    def make(path: Path = tmp_path / "run" / "warmkv.sock", mode: int = 0o600) -> socket.socket:
        made.append(listening(path, mode))
        return made[-1]

    yield make
    for sock in made:
        sock.close()


def answers(path: Path) -> bool:
    with connect(path, strict=True) as client:
        return "records" in client.report("status")


# -- variables ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "pid", "names", "expected"),
    [
        ("2", "7", "warmkv:warmkv-ab", ((3, "warmkv"), (4, "warmkv-ab"))),
        ("1", "7", "", ((3, ""),)),
        ("2", "7", "one", ((3, ""), (4, ""))),
        ("1", "8", "warmkv", ()),
        ("1", "", "warmkv", ()),
        ("0", "7", "", ()),
        ("-1", "7", "", ()),
        ("x", "7", "", ()),
        ("²", "7", "", ()),
        ("99999999999", "7", "", ()),
        ("", "7", "", ()),
    ],
)
def test_descriptors_are_for_the_process_that_is_named(count: str, pid: str, names: str, expected: tuple[object, ...]) -> None:
    assert activation.inherited(count, pid, names, 7) == tuple(Inherited(*item) for item in expected)


def test_what_a_manager_said_is_read_once_and_no_child_sees_it() -> None:
    pid = str(os.getpid())
    env = {
        "NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": pid, "LISTEN_FDS": "1", "LISTEN_PID": pid,
        "LISTEN_FDNAMES": "warmkv", "FDSTORE": "7", "PATH": "/bin",
    }  # fmt: skip
    loaded = config.load({}, None, env)
    assert (loaded.notify_socket, loaded.watchdog_s, loaded.fd_store_max) == ("/run/n", 1.0, 7)
    assert loaded.inherited == (Inherited(3, "warmkv"),)
    config.forget_manager(env)
    assert env == {"PATH": "/bin"}
    again = config.load({}, None, env)
    assert (again.notify_socket, again.watchdog_s, again.inherited) == ("", 0.0, ())
    assert config.load({}, None, {"FDSTORE": "x"}).fd_store_max == config.FD_STORE_MAX


def test_claimed_descriptors_are_closed_on_exec_and_missing_ones_left_out() -> None:
    read, write = os.pipe()
    os.set_inheritable(read, True)
    try:
        closed = os.dup(write)
        os.close(closed)
        assert activation.claim([Inherited(read, "a"), Inherited(closed, "b")]) == [Inherited(read, "a")]
        assert not os.get_inheritable(read)
    finally:
        os.close(read), os.close(write)


# -- which socket ------------------------------------------------------------------------------


def test_of_several_sockets_the_one_at_our_path_is_taken(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    one, two = tmp_path / "run" / "one", tmp_path / "run" / "two"
    items = [Inherited(os.dup(passed(one).fileno()), "a"), Inherited(os.dup(passed(two).fileno()), "b")]
    rest = list(items)
    taken = activation.take_socket(rest, two)
    assert taken is not None and activation.path_of(taken) == two
    assert rest == items[:1]
    rest.append(Inherited(taken.fileno(), "b"))
    with pytest.raises(SocketPathError, match="2 sockets were passed, 2 of them"):
        activation.take_socket(rest, tmp_path / "three")
    assert len(rest) == 2
    taken.close()
    os.close(items[0].fd)


@pytest.mark.parametrize("kind", ["inet", "datagram", "abstract", "not listening", "connected"])
def test_sockets_that_cannot_be_served_are_refused_and_stay(tmp_path: Path, kind: str) -> None:
    family = socket.AF_INET if kind == "inet" else socket.AF_UNIX
    with socket.socket(family, socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM) as sock:
        if kind == "inet":
            sock.bind(("127.0.0.1", 0))
        elif kind != "connected":
            sock.bind("\0warmkv-test-" + str(os.getpid()) if kind == "abstract" else str(tmp_path / "s"))
        if kind in ("inet", "abstract"):
            sock.listen()
        items = [Inherited(sock.fileno(), "warmkv")]
        with pytest.raises(SocketPathError, match="expected one"):
            activation.take_socket(items, tmp_path / "s")
        assert len(items) == 1 and sock.getsockname() is not None


def test_without_sockets_there_is_none_to_take(tmp_path: Path) -> None:
    with open(os.devnull) as nothing:
        items = [Inherited(nothing.fileno(), "warmkv-ab")]
        assert activation.take_socket(items, tmp_path / "s") is None and len(items) == 1


# -- the listener ------------------------------------------------------------------------------


def test_an_inherited_socket_is_served_under_the_lock_and_left_in_place(
    socket_path: Path, passed: Callable[..., socket.socket], descriptors: Callable[[], int]
) -> None:
    kept = passed(socket_path)
    before, inode = descriptors(), socket_path.stat().st_ino
    listener = Listener(Path("/elsewhere/ignored"), inherited=kept.dup())
    assert listener.path == socket_path
    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        Listener(Path("/elsewhere/ignored"), inherited=kept.dup())
    with pytest.raises(AlreadyRunning):
        Listener(socket_path)
    sock = listener.listen()
    assert sock.getblocking() is False
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(socket_path))
        sock.accept()[0].close()
    listener.close()
    listener.close()
    assert socket_path.stat().st_ino == inode and descriptors() == before


def test_an_inherited_socket_in_a_directory_of_others_is_refused(
    socket_path: Path, passed: Callable[..., socket.socket], descriptors: Callable[[], int]
) -> None:
    kept = passed(socket_path)
    before = descriptors()
    socket_path.parent.chmod(0o777)
    with pytest.raises(SocketPathError, match="writable by others"):
        Listener(socket_path, inherited=kept.dup())
    assert descriptors() == before and socket_path.is_socket()


# -- whole daemons -----------------------------------------------------------------------------


def test_a_daemon_serves_the_socket_it_was_given_and_leaves_it_for_the_next(
    tmp_path: Path, passed: Callable[..., socket.socket]
) -> None:
    """While none runs, the manager holds the socket: a client that connects is served by the next."""
    daemon = DaemonProcess(tmp_path, *SMALL)
    kept = passed(daemon.socket)
    inode = daemon.socket.stat().st_ino
    with daemon.start(passed=[("warmkv", kept.fileno())]):
        assert answers(daemon.socket)
        assert daemon.stop() == 0
        assert daemon.socket.stat().st_ino == inode
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(str(daemon.socket))
            daemon.start(passed=[("warmkv", kept.fileno())])
            assert answers(daemon.socket)
        daemon.kill()
        daemon.start(passed=[("warmkv", kept.fileno())])
        assert answers(daemon.socket) and daemon.socket.stat().st_ino == inode


def test_what_is_passed_to_another_process_is_not_touched(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    """With the wrong LISTEN_PID the daemon binds its own path; the descriptor it was given by mistake stays open."""
    other = passed(tmp_path / "other" / "s")
    with DaemonProcess(tmp_path, *SMALL, environ={"LISTEN_PID": "1"}) as daemon:
        daemon.stop()
        daemon.start(passed=[("warmkv", other.fileno())])
        assert answers(daemon.socket)
        assert os.readlink(f"/proc/{daemon.pid}/fd/3").startswith("socket:")


def test_a_child_would_inherit_nothing(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    with ServiceManager(tmp_path / "notify") as manager:
        daemon = DaemonProcess(tmp_path, *SMALL, environ={**manager.environ, "WATCHDOG_USEC": "60000000"})
        with daemon.start(passed=[("warmkv", passed(daemon.socket).fileno())]):
            assert manager.hears("WATCHDOG")
            flags = Path(f"/proc/{daemon.pid}/fdinfo/3").read_text().split("flags:")[1].split()[0]
            assert int(flags, 8) & os.O_CLOEXEC


def test_two_instances_each_serve_their_own(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    first, second = DaemonProcess(tmp_path / "a", *SMALL), DaemonProcess(tmp_path / "b", *SMALL)
    for daemon in (first, second):
        daemon.socket.parent.mkdir(mode=0o700, parents=True)
        daemon.start(passed=[("warmkv", passed(daemon.socket).fileno())])
    with first, second:
        assert answers(first.socket) and answers(second.socket)
        assert first.stop() == 0
        assert answers(second.socket) and first.socket.is_socket()


def test_two_daemons_on_one_inherited_socket_are_one_too_many(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    first = DaemonProcess(tmp_path, *SMALL)
    kept = passed(first.socket)
    second = DaemonProcess(tmp_path, *SMALL, store=tmp_path / "other")
    second.log_path = tmp_path / "second.log"
    with first.start(passed=[("warmkv", kept.fileno())]):
        with pytest.raises(RuntimeError, match="AlreadyRunning"):
            second.start(passed=[("warmkv", kept.fileno())])
        assert answers(first.socket) and not (tmp_path / "other").exists()


def test_a_socket_as_standard_input_is_left_alone(tmp_path: Path, passed: Callable[..., socket.socket]) -> None:
    other = passed(tmp_path / "other" / "s")
    path = tmp_path / "run" / "s"
    command = [sys.executable, "-m", "warmkv.daemon.cli", "serve", "--socket", str(path), "--store", str(tmp_path / "st"), *SMALL]
    with open(tmp_path / "log", "wb") as log:
        daemon = subprocess.Popen(command, stdin=other.fileno(), stdout=log, stderr=log, env=child_environ())
    try:
        assert eventually(path.is_socket), (tmp_path / "log").read_text()
        assert answers(path)
        assert os.readlink(f"/proc/{daemon.pid}/fd/0").startswith("socket:")
    finally:
        daemon.terminate()
        assert daemon.wait(PATIENCE_S) == 0
    assert (tmp_path / "other" / "s").is_socket()


@pytest.mark.skipif(shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed")
def test_systemd_starts_it_on_the_first_connection(tmp_path: Path) -> None:
    path = tmp_path / "run" / "s"
    path.parent.mkdir(mode=0o700)
    with ServiceManager(tmp_path / "notify") as manager:
        environ = child_environ(**manager.environ)
        command = ["systemd-socket-activate", "-l", str(path), "--fdname=warmkv"]
        for name in ("PYTHONPATH", "NOTIFY_SOCKET", "PATH"):
            command += ["-E", f"{name}={environ[name]}"]
        command += [
            sys.executable,
            "-m",
            "warmkv.daemon.cli",
            "serve",
            "--socket",
            str(path),
            "--store",
            str(tmp_path / "st"),
            *SMALL,
        ]
        with open(tmp_path / "log", "wb") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        try:
            assert eventually(path.is_socket) and not manager.messages
            assert stat.S_ISSOCK(path.stat().st_mode)
            with connect(path, strict=True, timeout_s=PATIENCE_S) as client:
                assert "records" in client.report("status")
            assert manager.hears("READY")
        finally:
            daemon.terminate()
            assert daemon.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        assert manager.hears("STOPPING") and path.is_socket()
