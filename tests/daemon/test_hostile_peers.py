"""A real daemon among peers of bad will, each with its own way to block, crash, starve or bloat it.

Whatever one of them does costs that peer its request or its connection. A witness is served all the
while; afterwards the daemon holds what it held before, and what was stored comes back bit for bit.
What needs no process of its own is in test_server.py and tests/kvstore/store/test_hostile_*.py.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, eventually
from warmkv.kvstore import memfd
from warmkv.kvstore.client.client import Client
from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.testing import TOKENS, check_restore, model_rows, random_identity, save
from warmkv.schema import errors, frame, segment
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, ROOT, NamespaceKey, as_tokens

MIB = 1 << 20
WARM_BYTES = 16 * MIB
CONNECTIONS = 24
#: Not in the fcntl module of Python 3.11.
F_SEAL_FUTURE_WRITE = 0x10
QUERY = as_tokens([*TOKENS, 1])
FRESH = [71, 72, 73, 74, 75, 76]
#: Growth that a process's own housekeeping explains.
NOISE_KIB = 8 << 10


@dataclass
class Scene:
    """A daemon that holds one prompt, and a connection that must be served whatever happens."""

    daemon: DaemonProcess
    identity: Identity
    key: NamespaceKey
    witness: Any

    @property
    def socket(self) -> Path:
        return self.daemon.socket

    def stats(self) -> dict[str, Any]:
        document = self.witness.ask(m.Report("stats"))
        assert isinstance(document, m.Document), document
        found: dict[str, Any] = json.loads(document.json)
        return found

    def accounts(self) -> dict[str, object]:
        """What the store counts."""
        told = self.stats()
        names = ("bytes", "entries", "reserved_bytes", "promoting_bytes", "leased_bytes", "lent_bytes")
        return {
            **{f"warm {name}": told["warm"][name] for name in names},
            **{name: told[name] for name in ("entries", "leases", "flights", "namespaces", "anchors")},
        }

    def figures(self) -> dict[str, object]:
        """All that a peer could make grow. The descriptors of a request are closed after its answer:
        right behind one they may still be there."""
        threads = len(os.listdir(f"/proc/{self.daemon.pid}/task"))
        return {**self.accounts(), "descriptors": self.daemon.descriptors, "threads": threads}

    def resident_kib(self) -> int:
        with open(f"/proc/{self.daemon.pid}/status") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    def serves(self) -> None:
        """The witness gets a right answer, now."""
        matched = self.witness.ask(m.Match(self.key, CLEAN, QUERY))
        assert (matched.matched, matched.usable) == (len(TOKENS), len(TOKENS))

    def container(self, tokens: list[int] = FRESH) -> bytes:
        """What an honest client would send of these tokens."""
        made = write_segment(
            self.key, CLEAN, ROOT, 0, as_tokens(tokens), (),
            [PlaneSource(r.layer, p.rows.shape[1:], 0, p) for r in model_rows(self.identity, tokens) for p in r.planes],
        )  # fmt: skip
        try:
            return memfd.read(made.fd, made.total_bytes, 0)
        finally:
            made.close()

    def commit(self, peer: Any, fd: int) -> m.Message:
        """The answer to a commit of ``fd``, None where the connection ended without one."""
        peer.say(m.Commit(self.key, peer.epoch, 0), (fd,))
        heard = peer.hear()
        return None if heard is None else heard[1]  # type: ignore[return-value]

    def opened(self, peers: type) -> Any:
        """A greeted peer of this daemon that has opened the model."""
        peer = peers(self.socket)
        welcome = peer.ask(m.Hello(2, 2, "raw", os.getpid()))
        assert isinstance(welcome, m.Welcome)
        peer.epoch = welcome.epoch
        assert peer.ask(m.Open(self.identity.canonical())).namespace == self.key
        return peer


@dataclass
class Running:
    """A daemon, the model of what it holds, and its figures while nobody but a witness is there."""

    daemon: DaemonProcess
    identity: Identity
    quiet: dict[str, object] | None = None


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    identity = random_identity()
    arguments = ("--cold-bytes", "0", "--warm-bytes", str(WARM_BYTES), "--max-connections", str(CONNECTIONS))
    with DaemonProcess(tmp_path_factory.mktemp("hostile"), *arguments, "--busy-timeout-s", "0.05") as daemon:
        with connect(daemon.socket, strict=True) as client:
            assert save(client, identity, TOKENS).stored
        yield Running(daemon, identity)


@pytest.fixture
def scene(running: Running, peers: type) -> Iterator[Scene]:
    """The scene, which after the test is what it was before."""
    daemon, identity = running.daemon, running.identity
    witness = peers(daemon.socket).greet()
    made = Scene(daemon, identity, witness.ask(m.Open(identity.canonical())).namespace, witness)
    if running.quiet is None:  # connections of who was here first may still be ending
        assert eventually(lambda: len({str(made.figures()) for _ in range(20)}) == 1)
        running.quiet = made.figures()
    before = running.quiet
    assert eventually(lambda: made.figures() == before), (before, made.figures())
    yield made
    assert eventually(lambda: made.figures() == before), (before, made.figures())
    made.serves()
    with client_of(made) as client:
        check_restore(client, identity, [*TOKENS, 1], len(TOKENS), verify=True)


def answers_to(peer: Any, questions: Sequence[m.Message]) -> list[m.Message]:
    """The answers to many questions, asked a few at a time without waiting between them."""
    answers = []
    for at in range(0, len(questions), 50):
        some = questions[at : at + 50]
        peer.send(b"".join(frame.frame(m.encode(item, 7)) for item in some))
        answers += [peer.hear()[1] for _ in some]
    return answers


def client_of(scene: Scene) -> Client:
    return connect(scene.socket, strict=True)


def filled(data: bytes, seals: int = memfd.SEALS) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(data))
    memfd.write(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


# -- descriptors ---------------------------------------------------------------------------


def in_shared_memory(data: bytes) -> int:
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    memfd.write(fd, data, 0)
    return fd


def unsealable(data: bytes) -> int:
    fd = os.memfd_create("hostile", 0)
    memfd.write(fd, data, 0)
    return fd


def pipe_with(data: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, data[:4096])
    os.close(writing)
    return reading


def huge(data: bytes) -> int:
    """A sealed memfd of huge pages, which the machine may not even have: it must not be believed."""
    try:
        fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError:
        pytest.skip("no huge pages here")
    os.ftruncate(fd, 4 * MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memfd.SEALS)
    return fd


def holed(data: bytes) -> int:
    """The whole head, and behind it nothing but a hole."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, len(data) + 4 * MIB)
    memfd.write(fd, data[:4096], 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memfd.SEALS)
    return fd


def write_only(data: bytes) -> int:
    fd = filled(data)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    except PermissionError:
        pytest.skip("a sealed memfd cannot be opened for writing here")
    finally:
        os.close(fd)


DESCRIPTORS: dict[str, Callable[[bytes], int]] = {
    "sealed against future writing only": lambda data: filled(data, memfd.SEALS & ~fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE),
    "sealed against nothing": lambda data: filled(data, 0),
    "free to shrink": lambda data: filled(data, memfd.SEALS & ~fcntl.F_SEAL_SHRINK),
    "free to grow": lambda data: filled(data, memfd.SEALS & ~fcntl.F_SEAL_GROW),
    "never sealable": unsealable,
    "a file in shared memory": in_shared_memory,
    "huge pages": huge,
    "a hole": holed,
    "open for writing only": write_only,
    "a pipe": pipe_with,
    "a directory": lambda data: os.open("/", os.O_RDONLY | os.O_DIRECTORY),
    "a socket": lambda data: socket.socket(socket.AF_UNIX).detach(),
    "an event": lambda data: os.eventfd(1),
    "a path": lambda data: os.open("/", os.O_PATH),
    "itself, cut": lambda data: filled(data[:-1]),
    "itself and a byte": lambda data: filled(data + b"\0"),
}


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_what_can_still_change_or_is_no_container_is_refused(scene: Scene, peers: type, kind: str) -> None:
    fd = DESCRIPTORS[kind](scene.container())
    with scene.opened(peers) as peer:
        answer = scene.commit(peer, fd)
        assert isinstance(answer, m.Fault), answer
        known = (errors.RemoteProtocolError, errors.FormatError, errors.StoreError)
        assert issubclass(errors.BY_CODE[answer.code], known), answer
        scene.serves()
    os.close(fd)


@pytest.mark.parametrize("change", ["cut", "grown", "rewritten"])
def test_memory_that_changes_while_it_is_looked_at_is_never_taken(scene: Scene, peers: type, change: str) -> None:
    """Not sealed, it passes for a moment as anything; only seals count."""
    data, over = scene.container(), threading.Event()
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    memfd.write(fd, data, 0)

    def spoil() -> None:
        while not over.is_set():
            if change == "rewritten":
                os.pwrite(fd, bytes(64), 4096)
                os.pwrite(fd, data[4096:4160], 4096)
            else:
                os.ftruncate(fd, 0 if change == "cut" else len(data) + MIB)
                os.ftruncate(fd, len(data))

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        for _ in range(100):
            with scene.opened(peers) as peer:
                answer = scene.commit(peer, fd)
                assert isinstance(answer, m.Fault) and answer.code == errors.RemoteProtocolError.code, answer
        scene.serves()
    finally:
        over.set()
        thread.join(PATIENCE_S)
        os.close(fd)


def test_what_was_taken_cannot_be_changed_by_who_sent_it(scene: Scene, peers: type) -> None:
    fd = filled(scene.container())
    with scene.opened(peers) as peer:
        assert isinstance(scene.commit(peer, fd), m.Committed)
        changes: list[Callable[[], object]] = [
            lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, MIB), lambda: os.pwrite(fd, b"x", 0),
            lambda: os.posix_fallocate(fd, 0, MIB), lambda: mmap.mmap(fd, 4096),
        ]  # fmt: skip
        for change in changes:
            with pytest.raises(OSError):
                change()
        with client_of(scene) as client:
            check_restore(client, scene.identity, [*FRESH, 1], len(FRESH), verify=True)
        assert peer.ask(m.Forget(scene.key, CLEAN, as_tokens(FRESH))).records == 1
    os.close(fd)


def test_one_memory_handed_over_twice_is_counted_once(scene: Scene, peers: type) -> None:
    fd = filled(scene.container())
    other = os.dup(fd)
    with scene.opened(peers) as peer:
        first = scene.commit(peer, fd)
        held = scene.accounts()
        again = [scene.commit(peer, same) for same in (fd, other, fd)]
        assert isinstance(first, m.Committed) and not first.duplicate
        assert all(isinstance(item, m.Committed) and item.duplicate and item.id == first.id for item in again)
        assert scene.accounts() == held
        assert peer.ask(m.Forget(scene.key, CLEAN, as_tokens(FRESH))).records == 1
    os.close(fd)
    os.close(other)


def test_an_upload_larger_than_the_budget_fails_that_request_only(scene: Scene, peers: type) -> None:
    fd = filled(bytes(WARM_BYTES + 4096))
    with scene.opened(peers) as peer:
        answer = scene.commit(peer, fd)
        assert isinstance(answer, m.Fault) and answer.code == errors.TooLarge.code, answer
        assert isinstance(peer.ask(m.Match(scene.key, CLEAN, QUERY)), m.Matched)
    os.close(fd)


#: Files of a report that a daemon must neither read from nor write to.
FILES: dict[str, Callable[[Path], int]] = {
    "a pipe nobody writes to": lambda path: pipe_with(b""),
    "an open pipe": lambda path: os.open(fifo(path), os.O_RDWR),
    "a directory": lambda path: os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY),
    "a terminal's kind": lambda path: os.open("/dev/zero", os.O_RDWR),
    "a full device": lambda path: os.open("/dev/full", os.O_RDWR),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).detach(),
    "a path": lambda path: os.open(path, os.O_PATH),
    "an event": lambda path: os.eventfd(1),
    "a process's memory": lambda path: os.open("/proc/self/mem", os.O_RDWR),
    "sealed memory": lambda path: filled(b"x" * 4096),
    "an empty file": lambda path: os.open(path, os.O_RDONLY),
    "a sparse file of 1 TiB": lambda path: sparse_file(path),
}


def fifo(path: Path) -> Path:
    os.mkfifo(path.with_name("fifo"))
    return path.with_name("fifo")


def sparse_file(path: Path) -> int:
    fd = os.open(path, os.O_RDWR)
    os.ftruncate(fd, 1 << 40)
    return fd


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_none_is_neither_read_nor_waited_for(scene: Scene, peers: type, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = FILES[kind](path)
    reports = [m.Report("import", b"{}")]
    if kind != "a sparse file of 1 TiB":  # a file to write to like any other
        reports.append(m.Report("export", b'{"namespace": "%s"}' % scene.key.hex().encode()))
    for report in reports:
        with scene.opened(peers) as peer:
            answer = peer.ask(report, (fd,))
            assert isinstance(answer, m.Fault) and answer.code != errors.InternalError.code, answer
    scene.serves()
    os.close(fd)
    assert not path.stat().st_blocks


# -- slow and silent peers -----------------------------------------------------------------


def test_half_frames_hold_up_nobody_and_end(tmp_path: Path, peers: type) -> None:
    """Slow writers, each stuck at another byte of a frame, one of them forever adding a little."""
    body = frame.frame(m.encode(m.Report("status"), 1))
    with DaemonProcess(tmp_path, "--cold-bytes", "0", "--frame-timeout-s", "1") as daemon:
        witness = peers(daemon.socket).greet()
        before = daemon.descriptors, len(os.listdir(f"/proc/{daemon.pid}/task"))
        stuck = [peers(daemon.socket).greet() for _ in range(8)]
        for cut, peer in enumerate(stuck, 1):
            peer.send(body[:cut])
        silent = [peers(daemon.socket) for _ in range(4)]  # never greet
        assert isinstance(witness.ask(m.Report("status")), m.Document)
        dripping = stuck[0]
        pause = threading.Event()
        with suppress(OSError):
            for byte in body[1:]:  # slower than a frame may be, though never still for as long
                pause.wait(0.2)
                dripping.send(bytes([byte]))
        for peer in (*stuck, *silent):
            assert peer.hear() is None
        assert isinstance(witness.ask(m.Report("status")), m.Document)
        assert eventually(lambda: (daemon.descriptors, len(os.listdir(f"/proc/{daemon.pid}/task"))) == before)


def settled(daemon: DaemonProcess) -> int:
    """Descriptors once the number does not change: connections that ended are closed, watchers began."""
    seen: list[int] = []

    def still() -> bool:
        seen.append(daemon.descriptors)
        return len(seen) > 100 and len(set(seen[-100:])) == 1

    assert eventually(still)
    return seen[-1]


def test_a_peer_that_takes_no_reply_in_loses_its_connection_and_its_leases(tmp_path: Path, peers: type) -> None:
    """Its replies carry descriptors, which lie in the socket until somebody takes them."""
    identity = random_identity()
    with DaemonProcess(tmp_path, "--cold-bytes", "0", "--send-timeout-s", "1") as daemon:
        with connect(daemon.socket, strict=True) as client:
            assert save(client, identity, TOKENS).stored
        witness = peers(daemon.socket).greet()
        key = witness.ask(m.Open(identity.canonical())).namespace
        before = settled(daemon)
        deaf = peers(daemon.socket).greet()
        assert isinstance(deaf.ask(m.Open(identity.canonical())), m.Opened)
        question = frame.frame(m.encode(m.Acquire(key, CLEAN, QUERY), 9))
        deaf.socket.settimeout(PATIENCE_S)
        with pytest.raises(OSError):
            while True:
                deaf.socket.send(question, socket.MSG_NOSIGNAL)
                assert witness.ask(m.Match(key, CLEAN, QUERY)).usable == len(TOKENS)
        deaf.close()
        assert eventually(lambda: daemon.descriptors == before)
        assert witness.ask(m.Acquire(key, CLEAN, QUERY)).usable == len(TOKENS)


# -- much of everything --------------------------------------------------------------------


def test_ten_thousand_matches_never_followed_by_a_restore_leave_nothing(scene: Scene, peers: type) -> None:
    with scene.opened(peers) as peer:

        def matches(first: int, last: int) -> None:
            queries = (as_tokens([*TOKENS[: number % 10], 10_000 + number, 3]) for number in range(first, last))
            asked = [m.Match(scene.key, CLEAN, query, at=number % 2) for number, query in enumerate(queries)]
            assert {type(answer) for answer in answers_to(peer, asked)} == {m.Matched}

        matches(0, 1000)
        held, resident = scene.figures(), scene.resident_kib()
        matches(1000, 10_000)
        assert eventually(lambda: scene.figures() == held)
        assert scene.resident_kib() - resident < NOISE_KIB
        scene.serves()


def test_thousands_of_models_opened_on_one_connection_leave_nothing(scene: Scene, peers: type) -> None:
    """Announcing a model stores nothing, and a connection remembers so many only."""
    with scene.opened(peers) as peer:

        def opens(first: int, last: int) -> None:
            asked = [m.Open(random_identity(seed=seed).canonical()) for seed in range(first, last)]
            assert {type(answer) for answer in answers_to(peer, asked)} == {m.Opened}

        opens(1, 500)
        held, resident = scene.figures(), scene.resident_kib()
        opens(500, 3000)
        assert eventually(lambda: scene.figures() == held)
        assert scene.resident_kib() - resident < NOISE_KIB
        assert peer.ask(m.Match(scene.key, CLEAN, QUERY)).usable == len(TOKENS)  # stored, hence still known
        scene.serves()


def test_thousands_of_offers_keep_nobody_else_from_saving(scene: Scene, peers: type) -> None:
    offer = m.Offer(scene.key, CLEAN, as_tokens([5] * 10), row_bytes=100)
    with scene.opened(peers) as peer, client_of(scene) as client:
        answers = answers_to(peer, [offer] * 2000)
        refused = [item for item in answers if isinstance(item, m.Fault)]
        assert refused and {item.code for item in refused} == {errors.Busy.code}
        assert save(client, scene.identity, FRESH).stored
        assert client.forget(scene.identity, FRESH).records == 1
        scene.serves()


def test_thousands_of_leases_end_with_their_connection(scene: Scene, peers: type) -> None:
    with scene.opened(peers) as peer:
        leases = set()
        for _ in range(2000):
            answer = peer.ask(m.Acquire(scene.key, CLEAN, QUERY))
            if isinstance(answer, m.Fault):
                assert answer.code == errors.Busy.code
                break
            leases.add(answer.lease)
        assert len(leases) > 100
        assert scene.stats()["leases"] == len(leases)
        scene.serves()


def test_leases_that_are_not_the_peers_own_cannot_be_ended(scene: Scene, peers: type) -> None:
    with scene.opened(peers) as one, scene.opened(peers) as other:
        lease = one.ask(m.Acquire(scene.key, CLEAN, QUERY)).lease
        other.say(m.Release(np.arange(lease - min(lease, 50), lease + 50, dtype="<u8")))
        assert isinstance(other.ask(m.Report("status")), m.Document)
        assert scene.stats()["leases"] == 1


@pytest.mark.parametrize("greeting", [True, False])
def test_a_flood_of_connections_is_told_to_come_again(scene: Scene, greeting: bool) -> None:
    with ExitStack() as stack:
        crowd = []
        for _ in range(4 * CONNECTIONS):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(PATIENCE_S)
            sock.connect(str(scene.socket))
            if greeting:
                with suppress(OSError):
                    sock.sendall(frame.frame(m.encode(m.Hello(2, 2, "flood", 1), 1)))
            crowd.append(sock)
        assert eventually(lambda: sum(_refused(sock) for sock in crowd) >= 3 * CONNECTIONS)
        scene.serves()


def _refused(sock: socket.socket) -> bool:
    """Whether a fault lies in the socket, unread."""
    sock.setblocking(False)
    try:
        data = sock.recv(65536, socket.MSG_PEEK)
    except OSError:
        return False
    if len(data) < 4 or len(data) < 4 + struct.unpack("<I", data[:4])[0]:
        return False
    message = m.decode(data[4 : 4 + struct.unpack("<I", data[:4])[0]])[1]
    return isinstance(message, m.Fault) and message.code == errors.Busy.code


def test_one_peer_in_a_hurry_does_not_hold_up_another(scene: Scene, peers: type) -> None:
    """Requests without end, none of whose answers is looked at before the next is sent."""
    question, over = frame.frame(m.encode(m.Match(scene.key, CLEAN, QUERY), 3)), threading.Event()
    with scene.opened(peers) as peer:

        def shout() -> None:
            with suppress(OSError):
                while not over.is_set():
                    peer.socket.sendall(question * 8)
                    for _ in range(8):
                        peer.hear()

        thread = threading.Thread(target=shout)
        thread.start()
        for _ in range(200):
            scene.serves()
        over.set()
        thread.join(PATIENCE_S)


# -- numbers and names ---------------------------------------------------------------------

LARGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def test_numbers_of_any_size_are_answered_or_refused_by_name(scene: Scene, peers: type) -> None:
    about = (scene.key, CLEAN, QUERY)
    with scene.opened(peers) as peer:
        for number in LARGE:
            for request in (
                m.Acquire(*about, limit=number), m.Offer(*about, row_bytes=number), m.Offer(*about, fixed_bytes=number),
                m.Offer(*about, window_from=number), m.Pin(*about, ttl_ms=number), m.Pin(*about, ttl_ms=0),
                m.Annotate(*about, reservation=number), m.Match(*about, at=number % 256), m.Annotate(*about, ack=number % 256),
                m.Annotate(*about, provides=number % 256), m.Commit(scene.key, number, 0),
                m.Commit(scene.key, peer.epoch, number),
            ):  # fmt: skip
                fd = filled(b"x" * 4096) if isinstance(request, m.Commit) else -1
                answer = peer.ask(request, (fd,) if fd >= 0 else ())
                assert not isinstance(answer, m.Fault) or answer.code != errors.InternalError.code, (request, answer)
                if fd >= 0:
                    os.close(fd)
        for speed in (float("nan"), float("inf"), -float("inf"), -1.0, 5e-324, 1.7e308):
            for asked in (m.Match(*about, prefill_tps=speed), m.Acquire(*about, prefill_tps=speed)):
                answer = peer.ask(asked)
                assert not isinstance(answer, m.Fault) or answer.code != errors.InternalError.code, (asked, answer)
        scene.serves()


@pytest.mark.parametrize("name", ["\0", "a\0b", "../../etc", "x" * 3000, "‮", "\n"])
def test_names_with_anything_in_them_reach_no_file_and_no_log_line(scene: Scene, peers: type, name: str) -> None:
    with peers(scene.socket) as peer:
        assert isinstance(peer.ask(m.Hello(2, 2, name, 1)), m.Welcome)
        for request in (
            m.Report(name),
            m.Open(scene.identity.canonical(), name),
            m.Report("show", b'{"id": "%s"}' % name.encode()),
        ):
            answer = peer.ask(request)
            assert isinstance(answer, (m.Fault, m.Document))
            assert not isinstance(answer, m.Fault) or answer.code != errors.InternalError.code, answer
    assert "\0" not in scene.daemon.log


def test_a_writer_of_any_name_is_told_as_json(scene: Scene, peers: type) -> None:
    """The name of who wrote a record comes from the peer, and is shown to its owner."""
    data = scene.container()
    head = segment.decode_head(data)
    header = replace(head.header, writer="a\0b\x1b[31m\n")
    packed = segment.encode_head(header, head.payload_bytes)
    fd = filled(packed.ljust(head.payload_offset, b"\0") + data[head.payload_offset :])
    with scene.opened(peers) as peer:
        answer = scene.commit(peer, fd)
        if isinstance(answer, m.Committed):
            told = peer.ask(m.Report("show", b'{"id": "%s"}' % answer.id.hex().encode()))
            assert b"\0" not in told.json and b"\x1b" not in told.json and b"\n" not in told.json
            assert peer.ask(m.Forget(scene.key, CLEAN, as_tokens(FRESH))).records == 1
        else:
            assert isinstance(answer, m.Fault) and answer.code == errors.FormatError.code
    os.close(fd)
