"""Who may come in: users, groups with real processes behind them, and how many of each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.daemon import peer
from warmkv.daemon.peer import Admission, Peer
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, ServedEngine, child_environ, eventually
from warmkv.kvstore.store.engine import Engine
from warmkv.schema import errors
from warmkv.schema import messages as m

root = pytest.mark.skipif(os.geteuid() != 0, reason="switching users needs root")
STRANGER, MAIN, ALLOWED = 54321, 54322, 54323


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A folder other users can pass through; those of pytest are closed to them."""
    with tempfile.TemporaryDirectory(prefix="warmkv-peer-") as path:
        os.chmod(path, 0o711)
        yield Path(path)


# -- who it is ---------------------------------------------------------------------------------


def test_a_peer_is_known_by_process_user_and_all_its_groups() -> None:
    near, far = socket.socketpair()
    with near, far:
        found = Admission(frozenset(), 1).identify(near)
    assert (found.pid, found.uid) == (os.getpid(), os.geteuid())
    assert found.gids == frozenset({os.getegid(), *os.getgroups()})
    assert not found.foreign, "nobody asked whose memory it uses"


def test_our_own_memory_is_not_foreign_and_that_of_another_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()
    with near, far:
        admission = Admission(frozenset(), 1, copy_foreign=True)
        assert not admission.identify(near).foreign
        monkeypatch.setattr(peer, "same_memory_cgroup", lambda pid: pid != os.getpid())
        assert admission.identify(near).foreign


# -- who may ------------------------------------------------------------------------------------


def test_admission_is_by_user_or_by_any_group() -> None:
    admission = Admission(frozenset({1}), 8, frozenset({50}))
    for welcome in (Peer(9, 1), Peer(9, 2, frozenset({50})), Peer(9, 2, frozenset({7, 50, 8}))):
        admission.require(welcome, 0, 0)
    for refused in (Peer(9, 2), Peer(9, 2, frozenset({1})), Peer(9, 50, frozenset({51}))):
        with pytest.raises(errors.PeerRefused):
            admission.require(refused, 0, 0)


@pytest.mark.parametrize(("share", "at_most"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.01, 1)])
def test_one_user_has_its_share_of_the_connections_and_at_least_one(share: float, at_most: int) -> None:
    admission = Admission(frozenset({1}), 8, uid_share=share)
    admission.require(Peer(9, 1), 7, at_most - 1)
    with pytest.raises(errors.Busy):
        admission.require(Peer(9, 1), min(7, at_most), at_most)
    with pytest.raises(errors.Busy):
        admission.require(Peer(9, 1), 8, 0)


def test_connections_of_one_user_are_counted_while_they_last(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine) as served:
        served.server.admission = Admission(frozenset({os.geteuid()}), 4, uid_share=0.5)
        first, second = (peers(served.socket).greet() for _ in range(2))
        assert peers(served.socket).hears_fault_and_end() == errors.Busy.code
        first.close()
        second.ask(m.Report("status"))
        assert eventually(lambda: served.server.connections == 1)
        peers(served.socket).greet()


def test_who_may_connect_no_longer_is_cut_off_and_others_stay(socket_path: Path, engine: Engine, peers: type) -> None:
    with ServedEngine(socket_path, engine) as served:
        peer = peers(served.socket).greet()
        served.server.admission = Admission(frozenset({os.geteuid()}), 1)
        assert isinstance(peer.ask(m.Report("status")), m.Document)
        served.server.admission = Admission(frozenset(), 8, frozenset({os.getegid()}))
        assert isinstance(peer.ask(m.Report("status")), m.Document)
        served.server.admission = Admission(frozenset({os.geteuid() + 1}), 8)
        assert eventually(lambda: served.server.connections == 0)
        assert peers(served.socket).hears_fault_and_end() == errors.PeerRefused.code


def test_what_is_known_of_a_peer_reaches_its_session(socket_path: Path, engine: Engine, peers: type) -> None:
    seen: list[tuple[int, bool, frozenset[int]]] = []
    original = engine.session

    def session(uid: int, foreign: bool = False, gids: frozenset[int] = frozenset()) -> object:
        seen.append((uid, foreign, gids))
        return original(uid, foreign=foreign, gids=gids)

    engine.session = session  # type: ignore[method-assign,assignment]
    with ServedEngine(socket_path, engine) as served:
        peers(served.socket).greet()
    assert seen == [(os.geteuid(), False, frozenset({os.getegid(), *os.getgroups()}))]


# -- real users ---------------------------------------------------------------------------------


TRY = """
import json, os, sys
path, uid, gid, groups = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
from warmkv import connect
os.setgroups(groups); os.setresgid(gid, gid, gid); os.setresuid(uid, uid, uid)
try:
    with connect(path, strict=True) as client:
        client.report("status")
    print("served")
except Exception as exc:
    print(type(exc).__name__)
"""


def attempt(path: Path, uid: int, gid: int, *groups: int) -> str:
    command = [sys.executable, "-c", TRY, str(path), str(uid), str(gid), str(list(groups))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(), check=True)
    return done.stdout.strip()


@root
def test_a_group_lets_its_members_in_and_keeps_others_out(open_directory: Path) -> None:
    """Members by their main group and by a supplementary one; the file system keeps the rest from connecting."""
    arguments = ("--cold-bytes", "0", "--warm-bytes", "1MiB", "--allow-gids", str(ALLOWED), "--socket-gid", str(ALLOWED))
    with DaemonProcess(open_directory, *arguments) as daemon:
        assert attempt(daemon.socket, STRANGER, ALLOWED) == "served"
        assert attempt(daemon.socket, STRANGER, MAIN, 7, ALLOWED, 8) == "served"
        assert attempt(daemon.socket, STRANGER, MAIN, *range(60000, 60200), ALLOWED) == "served"
        assert attempt(daemon.socket, STRANGER, MAIN, 7) == "DaemonUnavailable"
        assert attempt(daemon.socket, 0, 0) == "served"
        assert "turned away" not in daemon.log


@root
def test_who_can_open_the_socket_is_still_asked_who_it_is(open_directory: Path) -> None:
    """The group of the socket may connect, but nobody put it on the list."""
    arguments = ("--cold-bytes", "0", "--warm-bytes", "1MiB", "--socket-gid", str(ALLOWED), "--allow-uids", str(STRANGER))
    with DaemonProcess(open_directory, *arguments) as daemon:
        assert attempt(daemon.socket, STRANGER, MAIN, ALLOWED) == "served"
        assert attempt(daemon.socket, STRANGER + 7, MAIN, ALLOWED) == "PeerRefused"
        assert attempt(daemon.socket, STRANGER, MAIN) == "DaemonUnavailable"
