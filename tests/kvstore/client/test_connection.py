"""One connection against daemons of every kind: typed errors, and nothing left open."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmkv.kvstore.channel import Deadline
from warmkv.kvstore.client.connection import Connection
from warmkv.schema import errors, frame
from warmkv.schema import messages as m

KEY = bytes(16)
MATCH = m.Match(KEY, KEY, np.arange(4, dtype="<u4"))
Scripted = Callable[[Callable[[Any], None]], Any]


def ask(path: Path, message: m.Message = MATCH, *, timeout_s: float = 60.0) -> m.Message:
    """Connect, ask one thing, close; descriptors of the reply are closed."""
    deadline = Deadline(timeout_s)
    connection = Connection(path, deadline)
    try:
        reply, fds = connection.request(message, (), deadline)
        for fd in fds:
            os.close(fd)
        assert connection.usable
        return reply
    except errors.WarmKVError:
        if not connection.usable:
            with pytest.raises(OSError):
                connection._channel.socket.getpeername()  # closed, not merely forgotten
        raise
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def flat(descriptors: Callable[[], int]) -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() == before


# -- where there is no daemon --------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(errors.DaemonUnavailable, match="No such file"):
        ask(tmp_path / "s")


@pytest.mark.parametrize("kind", ["file", "directory", "refusing"])
def test_something_else_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("")
    elif kind == "directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    with pytest.raises(errors.DaemonUnavailable):
        ask(path)


def test_a_path_too_long(tmp_path: Path) -> None:
    with pytest.raises(errors.SocketPathError, match="at most 107"):
        ask(tmp_path / ("x" * 100) / "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_socket_file_of_somebody_else_is_not_trusted(scripted: Scripted, socket_path: Path) -> None:
    with scripted(lambda line: None) as daemon:
        os.chown(socket_path, 65534, 65534)
        with pytest.raises(errors.SocketPathError, match="belongs to uid 65534"):
            ask(socket_path)
        assert daemon.connections == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_a_socket_somebody_else_listens_behind_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(path))
        os.seteuid(65534)
        try:
            theirs.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(errors.SocketPathError, match="served by uid 65534"):
            ask(path)


def test_a_daemon_that_accepts_nobody(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(errors.DaemonTimeout, match="accepted no connection"):
            ask(path, timeout_s=0.05)


# -- what a daemon may say or not say ------------------------------------------------------


@pytest.mark.parametrize("said", ["nothing", "half a length", "half a frame"])
def test_silence_is_a_timeout(scripted: Scripted, socket_path: Path, said: str) -> None:
    def script(line: Any) -> None:
        line.greet()
        assert isinstance(line.hear(), m.Match)
        data = frame.frame(m.encode(m.Matched(), line.asked))
        line.channel.socket.sendall({"nothing": b"", "half a length": data[:2], "half a frame": data[:20]}[said])
        assert line.hear() is None

    with scripted(script), pytest.raises(errors.DaemonTimeout, match="did not answer Match"):
        ask(socket_path, timeout_s=0.2)


@pytest.mark.parametrize("said", [0, 2, 20])
def test_hanging_up_is_a_loss(scripted: Scripted, socket_path: Path, said: int) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.channel.socket.sendall(frame.frame(m.encode(m.Matched(), line.asked))[:said])

    with scripted(script), pytest.raises(errors.DaemonUnavailable):
        ask(socket_path)


def test_hanging_up_on_the_greeting_is_a_loss(scripted: Scripted, socket_path: Path) -> None:
    with scripted(lambda line: None), pytest.raises(errors.DaemonUnavailable):
        ask(socket_path)


def test_what_was_said_before_hanging_up_is_heard(scripted: Scripted, socket_path: Path) -> None:
    def script(line: Any) -> None:
        line.say(m.Fault(errors.Busy.code, "full house", True), answering=0)

    with scripted(script), pytest.raises(errors.Busy, match="full house"):
        ask(socket_path)


def test_a_fault_of_the_request_keeps_the_connection(scripted: Scripted, socket_path: Path) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.say(m.Fault(errors.TooLarge.code, "too large", False))
        line.hear()
        line.say(m.Matched(usable=2))

    with scripted(script):
        deadline = Deadline(60.0)
        connection = Connection(socket_path, deadline)
        with pytest.raises(errors.TooLarge):
            connection.request(MATCH, (), deadline)
        assert connection.request(MATCH, (), deadline)[0].usable == 2  # type: ignore[union-attr]
        connection.close()


def test_an_error_of_a_newer_daemon_keeps_its_number(scripted: Scripted, socket_path: Path) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.say(m.Fault(77777, "new trouble", False))

    with scripted(script), pytest.raises(errors.WarmKVError, match="error 77777"):
        ask(socket_path)


@pytest.mark.parametrize("version", [0, 1, 3, 65535])
def test_a_version_we_did_not_offer(scripted: Scripted, socket_path: Path, version: int) -> None:
    def script(line: Any) -> None:
        line.hear()
        line.say(m.Welcome(version, 1, "other", 100, 0))

    with scripted(script), pytest.raises(errors.VersionMismatch):
        ask(socket_path)


BAD_REPLIES: dict[str, Callable[[Any, int], None]] = {
    "another id": lambda line, fd: line.say(m.Matched(), answering=line.asked + 1),
    "another kind": lambda line, fd: line.say(m.Pinned(3)),
    "a request": lambda line, fd: line.say(MATCH),
    "a descriptor too many": lambda line, fd: line.say(m.Matched(), fds=(fd,)),
    "many descriptors too many": lambda line, fd: line.say(m.Matched(), fds=(fd,) * 253),
    "a fault with descriptors": lambda line, fd: line.say(m.Fault(1, "x", False), fds=(fd, fd)),
    "a giant": lambda line, fd: line.channel.socket.sendall(b"\xff\xff\xff\xff"),
    "an empty frame": lambda line, fd: line.channel.socket.sendall(bytes(4)),
    "rubbish": lambda line, fd: line.channel.socket.sendall(frame.frame(b"\xaa" * 64)),
}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_replies_that_break_the_protocol(scripted: Scripted, socket_path: Path, name: str) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()
        with open(os.devnull, "rb") as file:
            BAD_REPLIES[name](line, file.fileno())
        assert line.hear() is None  # the client hangs up

    with scripted(script), pytest.raises((errors.RemoteProtocolError, errors.FormatError)):
        ask(socket_path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(min_size=16, max_size=200))
def test_random_replies(scripted: Scripted, socket_path: Path, body: bytes) -> None:
    def script(line: Any) -> None:
        line.greet()
        line.hear()
        line.channel.socket.sendall(frame.frame(body))

    with scripted(script), pytest.raises(errors.WarmKVError):
        ask(socket_path)
