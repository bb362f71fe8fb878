"""Peers of every kind of bad will: each gets an error or the door, nobody else notices."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.daemon.testing import PATIENCE_S, ServedEngine, eventually
from warmkv.kvstore import memfd
from warmkv.kvstore.session import Session
from warmkv.kvstore.store.engine import Engine
from warmkv.schema import errors, frame
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity

KEY = bytes(16)
TOKENS = np.arange(4, dtype="<u4")
HELLO = m.Hello(2, 2, "raw", 1)


@pytest.fixture
def quiet(served: ServedEngine, peers: type, descriptors: Callable[[], int]) -> Iterator[None]:
    """After the test and its peers, the daemon serves and holds exactly as before it."""
    before = descriptors()
    yield
    with peers(served.socket) as peer:
        peer.greet()
    assert eventually(lambda: served.server.connections == 0)
    assert descriptors() <= before


# -- greeting ------------------------------------------------------------------------------


def test_a_greeting_tells_version_epoch_and_uid(served: ServedEngine, engine: Engine, peers: type) -> None:
    welcome = peers(served.socket).ask(HELLO)
    assert welcome == m.Welcome(2, engine.epoch, welcome.server, m.MAX_BODY_BYTES, os.geteuid())


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1, 1), (3, 9), (2, 1), (1, 0), (65535, 65535)])
def test_no_common_version_is_said_and_ends_the_connection(served: ServedEngine, peers: type, low: int, high: int) -> None:
    peer = peers(served.socket)
    peer.say(m.Hello(low, high, "raw", 1))
    assert peer.hears_fault_and_end() == errors.VersionMismatch.code


def test_a_newer_client_that_also_speaks_ours_is_welcome(served: ServedEngine, peers: type) -> None:
    assert peers(served.socket).ask(m.Hello(1, 9, "future", 1)).version == 2


def test_a_peer_that_never_greets_is_let_go(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine, frame_timeout_s=0.05):
        assert peers(socket_path).hear() is None


def test_a_greeted_peer_may_be_idle_for_longer_than_a_frame_may_take(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine, frame_timeout_s=0.05):
        idle = peers(socket_path).greet()
        assert peers(socket_path).hear() is None  # by now the time of a frame has passed for the other one
        assert isinstance(idle.ask(m.Report("status")), m.Document)


# -- frames --------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("length", [0, 1, 15, 2**31 - 1, 2**31, 2**32 - 1, m.MAX_BODY_BYTES + 1])
def test_lengths_outside_the_caps(served: ServedEngine, peers: type, length: int) -> None:
    with peers(served.socket).greet() as peer:
        peer.send(struct.pack("<I", length))
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code


@pytest.mark.usefixtures("quiet")
def test_before_the_greeting_only_a_greeting_fits(served: ServedEngine, peers: type) -> None:
    with peers(served.socket) as peer:
        peer.send(struct.pack("<I", 5000))
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 30])
def test_half_a_frame_and_then_the_end(served: ServedEngine, peers: type, cut: int) -> None:
    with peers(served.socket).greet() as peer:
        peer.send(frame.frame(m.encode(m.Report("status"), 1))[:cut])
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.hear() is None


@pytest.mark.parametrize("cut", [1, 4, 30])
def test_half_a_frame_and_then_nothing(socket_path: Path, engine: Engine, peers: type, cut: int) -> None:
    with ServedEngine(socket_path, engine, frame_timeout_s=0.05):
        peer = peers(socket_path).greet()
        peer.send(frame.frame(m.encode(m.Report("status"), 1))[:cut])
        assert peer.hear() is None


def test_a_frame_that_comes_byte_by_byte_is_a_frame(served: ServedEngine, peers: type) -> None:
    peer = peers(served.socket).greet()
    for byte in frame.frame(m.encode(m.Report("status"), 7)):
        peer.send(bytes([byte]))
    assert isinstance(peer.hear()[1], m.Document)


def test_an_announced_length_takes_no_memory_before_the_bytes_come(served: ServedEngine, peers: type) -> None:
    def resident_kib() -> int:
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

    before = resident_kib()
    waiting = [peers(served.socket).greet() for _ in range(20)]
    for peer in waiting:
        peer.send(struct.pack("<I", m.MAX_BODY_BYTES))
    assert isinstance(peers(served.socket).greet().ask(m.Report("status")), m.Document)
    assert resident_kib() - before < 64 << 10


@settings(max_examples=200, deadline=None)
@given(body=st.binary(min_size=16, max_size=300))
def test_random_bodies(any_peer: Callable[[], Any], body: bytes) -> None:
    """No crash, and whatever is not a request ends the connection with a fault."""
    with any_peer() as peer:
        peer.greet()
        peer.send(frame.frame(body))
        heard = peer.hear()
        assert heard is None or isinstance(heard[1], m.Fault)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_requests_with_flipped_bytes(any_peer: Callable[[], Any], data: st.DataObject) -> None:
    message = data.draw(st.sampled_from([HELLO, m.Open(b"x" * 40), m.Match(KEY, KEY, TOKENS), m.Report("status"), m.Clear(KEY)]))
    body = bytearray(m.encode(message, 7))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), min_size=1, max_size=8)):
        body[at] = data.draw(st.integers(0, 255))
    with any_peer() as peer:
        peer.greet()
        peer.send(frame.frame(bytes(body)))
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.hear() is not None:
            pass


# -- order ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("quiet")
def test_a_question_before_the_greeting(served: ServedEngine, peers: type) -> None:
    with peers(served.socket) as peer:
        peer.say(m.Report("status"))
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code


@pytest.mark.usefixtures("quiet")
def test_a_second_greeting(served: ServedEngine, peers: type) -> None:
    with peers(served.socket).greet() as peer:
        peer.say(HELLO)
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "reply",
    [
        m.Welcome(2, 1, "x", 1, 0),
        m.Opened(KEY),
        m.Matched(),
        m.Acquired(),
        m.Offered(0, KEY, 0, 0, 0),
        m.Committed(KEY, 0, 0, False, False),
        m.Pinned(0),
        m.Forgotten(0, 0),
        m.Document(b"{}"),
        m.Fault(1, "x", False),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_replies_are_no_requests(served: ServedEngine, peers: type, reply: m.Message) -> None:
    with peers(served.socket).greet() as peer:
        peer.say(reply)
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code


@pytest.mark.usefixtures("quiet")
def test_errors_of_a_request_leave_the_connection_open(served: ServedEngine, peers: type) -> None:
    with peers(served.socket).greet() as peer:
        for message, code in (
            (m.Report("nonsense"), errors.RecordError.code),
            (m.Match(KEY, KEY, TOKENS), errors.UnknownNamespace.code),
            (m.Clear(KEY), errors.UnknownNamespace.code),
            (m.Open(b"not canonical"), errors.FormatError.code),
            (m.Offer(KEY, KEY, TOKENS), errors.UnknownNamespace.code),
        ):
            fault = peer.ask(message)
            assert isinstance(fault, m.Fault) and fault.code == code, (message, fault)
        peer.say(m.Release(np.array([1, 2**64 - 1], np.uint64)))
        assert isinstance(peer.ask(m.Report("status")), m.Document)


@pytest.mark.usefixtures("quiet")
def test_namespaces_of_one_connection_are_unknown_on_another(served: ServedEngine, peers: type, identity: Identity) -> None:
    with peers(served.socket).greet() as one, peers(served.socket).greet() as other:
        key = one.ask(m.Open(identity.canonical())).namespace
        assert isinstance(one.ask(m.Match(key, KEY, TOKENS)), m.Matched)
        assert other.ask(m.Match(key, KEY, TOKENS)).code == errors.UnknownNamespace.code


@pytest.mark.usefixtures("quiet")
def test_pipelined_requests_are_answered_in_order(served: ServedEngine, peers: type) -> None:
    with peers(served.socket).greet() as peer:
        peer.send(b"".join(frame.frame(m.encode(m.Report("status"), number)) for number in range(1, 20)))
        assert [peer.hear()[0] for _ in range(1, 20)] == list(range(1, 20))


# -- descriptors ---------------------------------------------------------------------------


def container(size: int, *, seal: bool = True, fill: bool = True) -> int:
    fd = memfd.create("test", size)
    if fill:
        memfd.write(fd, bytes(size), 0)
    if seal:
        memfd.seal(fd)
    return fd


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("count", [0, 2, 16, 253])
def test_a_commit_with_another_number_of_descriptors_than_one(served: ServedEngine, peers: type, count: int) -> None:
    fd = container(4096)
    with peers(served.socket).greet() as peer:
        peer.say(m.Commit(KEY, 0, 0), (fd,) * count)
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code
    os.close(fd)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("message", [HELLO, m.Report("status"), m.Match(KEY, KEY, TOKENS), m.Release(np.zeros(0, np.uint64))])
@pytest.mark.parametrize("count", [1, 253])
def test_descriptors_where_none_belong(served: ServedEngine, peers: type, message: m.Message, count: int) -> None:
    fd = container(4096)
    with peers(served.socket) as peer:
        if message is not HELLO:
            peer.greet()
        peer.say(message, (fd,) * count)
        assert peer.hears_fault_and_end() == errors.RemoteProtocolError.code
    os.close(fd)


@pytest.mark.usefixtures("quiet")
def test_descriptors_in_the_middle_of_a_frame_are_never_opened(served: ServedEngine, peers: type) -> None:
    fd = container(4096)
    data = frame.frame(m.encode(m.Report("status"), 7))
    with peers(served.socket).greet() as peer:
        peer.send(data[:10])
        peer.send(data[10:20], (fd,) * 3)
        peer.send(data[20:])
        assert isinstance(peer.hear()[1], m.Document)
    os.close(fd)


def a_file(tmp_path: Path) -> int:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    return os.open(path, os.O_RDWR)


def a_pipe(tmp_path: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def a_socket(tmp_path: Path) -> int:
    return socket.socket(socket.AF_UNIX).detach()


KINDS: dict[str, Callable[[Path], int]] = {
    "file": a_file,
    "directory": lambda path: os.open(path, os.O_RDONLY | os.O_DIRECTORY),
    "pipe": a_pipe,
    "socket": a_socket,
    "device": lambda path: os.open("/dev/zero", os.O_RDONLY),
    "unsealed": lambda path: container(4096, seal=False),
    "sparse": lambda path: container(1 << 40, fill=False),
    "empty": lambda path: container(0),
    "rubbish": lambda path: container(8192),
    "short": lambda path: container(10),
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_sealed_container(served: ServedEngine, peers: type, identity: Identity, tmp_path: Path, kind: str) -> None:
    fd = KINDS[kind](tmp_path)
    with peers(served.socket).greet() as peer:
        key = peer.ask(m.Open(identity.canonical())).namespace
        offered = peer.ask(m.Offer(key, KEY, TOKENS, row_bytes=256, fixed_bytes=8192))
        fault = peer.ask(m.Commit(key, offered.epoch, offered.reservation), (fd,))
        assert isinstance(fault, m.Fault)
        assert fault.code in (errors.RemoteProtocolError.code, errors.FormatError.code), fault
    os.close(fd)


# -- who and how many ----------------------------------------------------------------------


def test_one_connection_too_many_is_told_and_room_comes_back(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine, max_connections=2) as running:
        one, two = peers(socket_path).greet(), peers(socket_path).greet()
        third = peers(socket_path)
        assert third.hears_fault_and_end() == errors.Busy.code
        assert isinstance(two.ask(m.Report("status")), m.Document)
        one.close()
        assert eventually(lambda: running.server.connections == 1)
        peers(socket_path).greet()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_refused_before_a_byte_is_read(engine: Engine) -> None:
    with tempfile.TemporaryDirectory(prefix="warmkv-test-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        path = directory / "s"
        with ServedEngine(path, engine) as running:
            path.chmod(0o666)  # the mode alone would already keep them out
            assert _fault_as_nobody(path) == errors.PeerRefused.code
            assert running.server.connections == 0
        with ServedEngine(path, engine, uids=frozenset({65534})):
            path.chmod(0o666)
            assert _fault_as_nobody(path) == 0


def _fault_as_nobody(path: Path) -> int:
    """Code of the fault another user gets for a greeting, 0 for a welcome."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect(str(path))
                try:
                    sock.sendall(frame.frame(m.encode(HELLO, 1)))
                except OSError:
                    pass
                head = sock.recv(4, socket.MSG_WAITALL)
                _, message = m.decode(sock.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL))
            os.write(writing, b"%d" % (message.code if isinstance(message, m.Fault) else 0))
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as answer:
        return int(answer.read() or b"-1")


# -- slow peers, defects, stopping ---------------------------------------------------------


def test_a_peer_that_reads_nothing_is_let_go(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine, send_timeout_s=0.05) as running:
        peer = peers(socket_path).greet()
        peer.socket.setblocking(False)
        question = frame.frame(m.encode(m.Report("stats"), 7))
        poll = select.poll()
        poll.register(peer.socket, select.POLLOUT)
        while True:
            assert poll.poll(PATIENCE_S * 1000)
            try:
                peer.socket.send(question, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            except OSError as exc:
                assert exc.errno in (errno.EPIPE, errno.ECONNRESET)
                break
        assert eventually(lambda: running.server.connections == 0)


class Scripted:
    """An engine whose sessions do what a test says."""

    epoch = 5

    def __init__(self, match: Callable[[m.Match], m.Matched]) -> None:
        self._match = match
        self.closed = threading.Event()

    def session(self, uid: int, foreign: bool = False, gids: frozenset[int] = frozenset()) -> Session:
        return self  # type: ignore[return-value]

    def match(self, request: m.Match) -> m.Matched:
        return self._match(request)

    def close(self) -> None:
        self.closed.set()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def test_a_defect_is_answered_and_logged_without_what_it_quotes(
    socket_path: Path, peers: type, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("warmkv"), "propagate", True)

    def fail(request: m.Match) -> m.Matched:
        raise KeyError(f"token {request.tokens.tolist()}")

    with ServedEngine(socket_path, Scripted(fail)), caplog.at_level(logging.DEBUG, "warmkv"):
        peer = peers(socket_path).greet()
        secret = np.array([987654321], "<u4")
        for _ in range(2):
            fault = peer.ask(m.Match(KEY, KEY, secret))
            assert fault.code == errors.InternalError.code and "987654321" not in fault.message
    assert "KeyError" in caplog.text and "in fail" in caplog.text
    assert "987654321" not in caplog.text


def test_an_oserror_inside_is_a_fault_too(socket_path: Path, peers: type) -> None:
    def fail(request: m.Match) -> m.Matched:
        raise OSError(errno.EIO, "disk")

    with ServedEngine(socket_path, Scripted(fail)):
        peer = peers(socket_path).greet()
        assert peer.ask(m.Match(KEY, KEY, TOKENS)).code == errors.InternalError.code
        assert peer.ask(m.Match(KEY, KEY, TOKENS)).code == errors.InternalError.code


def test_a_fault_text_of_any_kind_arrives(socket_path: Path, peers: type) -> None:
    def fail(request: m.Match) -> m.Matched:
        raise errors.StoreError("\udcff" + "x" * 100_000)

    with ServedEngine(socket_path, Scripted(fail)):
        fault = peers(socket_path).greet().ask(m.Match(KEY, KEY, TOKENS))
        assert fault.code == errors.StoreError.code and len(fault.message) <= 2000


def test_stopping_answers_what_is_being_served(socket_path: Path, peers: type) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(request: m.Match) -> m.Matched:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return m.Matched(usable=3)

    engine = Scripted(wait)
    with ServedEngine(socket_path, engine) as running:
        peer, idle = peers(socket_path).greet(), peers(socket_path).greet()
        peer.say(m.Match(KEY, KEY, TOKENS))
        assert entered.wait(PATIENCE_S)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        assert idle.hear() is None  # idle ones go at once
        assert eventually(lambda: not socket_path.exists())
        go_on.set()
        assert peer.hear()[1].usable == 3
        assert peer.hear() is None
        stopping.join(PATIENCE_S)
    assert engine.closed.is_set()


def test_stopping_cuts_off_what_does_not_finish(socket_path: Path, peers: type) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(request: m.Match) -> m.Matched:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        return m.Matched()

    with ServedEngine(socket_path, Scripted(wait)) as running:
        peer = peers(socket_path).greet()
        peer.say(m.Match(KEY, KEY, TOKENS))
        assert entered.wait(PATIENCE_S)
        stopping = threading.Thread(target=running.stop, args=(0.05,))
        stopping.start()
        assert peer.hear() is None
        go_on.set()
        stopping.join(PATIENCE_S)


def test_a_thousand_connections_leave_nothing_behind(served: ServedEngine, peers: type, descriptors: Callable[[], int]) -> None:
    before, threads = descriptors(), threading.active_count()
    for number in range(1000):
        with peers(served.socket) as peer:
            if number % 3:
                peer.greet()
            if number % 3 == 2:
                peer.send(b"\1\2")
    assert eventually(lambda: served.server.connections == 0)
    assert eventually(lambda: (descriptors(), threading.active_count()) == (before, threads))


def test_leases_and_reservations_end_with_their_connection(
    served: ServedEngine, engine: Engine, peers: type, identity: Identity
) -> None:
    with peers(served.socket).greet() as peer:
        key = peer.ask(m.Open(identity.canonical())).namespace
        assert peer.ask(m.Offer(key, KEY, TOKENS, row_bytes=256, fixed_bytes=8192)).reservation
        assert engine.warm.ledger.reserved_bytes > 0
    assert eventually(lambda: engine.warm.ledger.reserved_bytes == 0)


def test_accepting_goes_on_when_even_the_spare_descriptor_is_taken(
    served: ServedEngine, peers: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors again and again, with none to spare: no end of the accept loop, no busy loop."""
    real, failures = served.server._listening, iter(range(3))
    refused = threading.Event()

    class Exhausted:
        def fileno(self) -> int:
            return real.fileno()

        def accept(self) -> tuple[socket.socket, object]:
            if next(failures, None) is None:
                return real.accept()
            refused.set()
            raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr("warmkv.daemon.server._spare_descriptor", lambda: -1)
    os.close(served.server._spare)
    served.server._spare = -1
    monkeypatch.setattr(served.server, "_listening", Exhausted())
    peers(served.socket).greet()
    assert refused.is_set()
