from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmkv.daemon.listener import Listener
from warmkv.schema.errors import AlreadyRunning, SocketPathError


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def stale(path: Path) -> None:
    """A socket file nobody listens behind."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        return peer.connect_ex(str(path)) == 0


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a" / "b" / "s"
    listener = Listener(path)
    listener.listen()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [stat.S_IMODE(item.stat().st_mode) for item in (path.parent, path.parent.parent)] == [0o700, 0o700]
    assert not stat.S_IMODE(path.with_name("s.lock").stat().st_mode) & 0o077
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_group_may_open_the_socket_and_nothing_else(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a" / "b" / "s"
    listener = Listener(path, gid=65534)
    assert not path.exists()
    listener.listen()
    found = [path.stat(), path.parent.stat(), path.parent.parent.stat()]
    assert [(stat.S_IMODE(item.st_mode), item.st_uid, item.st_gid) for item in found] == [
        (0o660, 0, 65534), (0o750, 0, 65534), (0o750, 0, 65534),
    ]  # fmt: skip
    assert stat.S_IMODE(path.with_name("s.lock").stat().st_mode) & 0o077 == 0
    listener.close()


@pytest.mark.parametrize(
    ("mode", "gid", "let_in"),
    [
        (0o700, 65534, False),
        (0o750, 0, False),
        (0o740, 65534, False),
        (0o750, 65534, True),
        (0o755, 0, True),
        (0o710, 65534, True),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_directory_that_keeps_the_group_out_is_refused(socket_path: Path, mode: int, gid: int, let_in: bool) -> None:
    socket_path.parent.mkdir()
    os.chown(socket_path.parent, -1, gid)
    socket_path.parent.chmod(mode)
    if let_in:
        Listener(socket_path, gid=65534).close()
    else:
        with pytest.raises(SocketPathError, match="keeps group 65534 out"):
            Listener(socket_path, gid=65534)


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777])
def test_for_a_group_as_well_nobody_else_may_write_the_directory(socket_path: Path, mode: int) -> None:
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    with pytest.raises(SocketPathError, match="writable by others"):
        Listener(socket_path, gid=os.getegid())


def test_a_socket_that_cannot_listen_leaves_nothing(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Listener(socket_path, gid=os.getegid())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("warmkv.daemon.listener.os.chmod", refuse)
    with pytest.raises(SocketPathError, match="cannot listen"):
        listener.listen()
    assert not socket_path.exists()
    listener.close()


def test_nothing_listens_before_listen(socket_path: Path) -> None:
    listener = Listener(socket_path)
    assert not socket_path.exists()
    listener.listen()
    assert connects(socket_path)
    listener.close()
    assert not socket_path.exists()


def test_a_stale_socket_is_replaced(socket_path: Path) -> None:
    stale(socket_path)
    listener = Listener(socket_path)
    listener.listen()
    assert connects(socket_path)
    listener.close()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "fifo"])
def test_what_is_no_socket_is_left_alone(socket_path: Path, kind: str) -> None:
    socket_path.parent.mkdir(mode=0o700)
    if kind == "file":
        socket_path.write_text("precious")
    elif kind == "directory":
        socket_path.mkdir()
    elif kind == "symlink":
        socket_path.symlink_to("nowhere")
    else:
        os.mkfifo(socket_path)
    before = os.lstat(socket_path)
    with pytest.raises(SocketPathError, match="is no socket"):
        Listener(socket_path)
    assert os.lstat(socket_path).st_ino == before.st_ino


def test_a_second_daemon_is_told_who_holds_the_socket(socket_path: Path) -> None:
    first = Listener(socket_path)
    with pytest.raises(AlreadyRunning, match=str(os.getpid())):
        Listener(socket_path)
    first.listen()
    with pytest.raises(AlreadyRunning):
        Listener(socket_path)
    assert connects(socket_path)
    first.close()
    Listener(socket_path).close()


def test_a_live_daemon_without_the_lock_is_not_replaced(socket_path: Path) -> None:
    socket_path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(socket_path))
        other.listen()
        with pytest.raises(AlreadyRunning):
            Listener(socket_path)
        assert connects(socket_path)


def test_a_full_backlog_is_not_taken_for_a_dead_daemon(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmkv.daemon.listener.PROBE_TIMEOUT_S", 0.05)
    socket_path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(socket_path))
        other.listen(0)
        waiting.connect(str(socket_path))
        with pytest.raises(AlreadyRunning):
            Listener(socket_path)
    assert socket_path.is_socket()


def test_paths_the_kernel_cannot_name_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    for length in (107 - len(os.fsencode(directory)) - 1, 108 - len(os.fsencode(directory)) - 1):
        path = directory / ("x" * length)
        if len(os.fsencode(path)) <= 107:
            listener = Listener(path)
            listener.listen()
            listener.close()
        else:
            with pytest.raises(SocketPathError, match="108 bytes"):
                Listener(path)
    with pytest.raises(SocketPathError, match="zero byte"):
        Listener(tmp_path / "a\0b")


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_a_directory_others_may_write_is_refused(socket_path: Path, mode: int) -> None:
    socket_path.parent.mkdir()
    socket_path.parent.chmod(mode)
    with pytest.raises(SocketPathError, match="writable by others"):
        Listener(socket_path)


def test_a_directory_above_that_others_may_swap_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    with pytest.raises(SocketPathError, match="not sticky"):
        Listener(above / "mine" / "s")
    above.chmod(0o1777)
    Listener(above / "mine" / "s").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_a_directory_of_somebody_else_is_refused(socket_path: Path) -> None:
    socket_path.parent.mkdir(mode=0o755)
    os.chown(socket_path.parent, 65534, 65534)
    with pytest.raises(SocketPathError, match="belongs to uid 65534"):
        Listener(socket_path)


def test_a_lock_that_is_a_symlink_is_not_followed(socket_path: Path, tmp_path: Path) -> None:
    socket_path.parent.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_text("precious")
    socket_path.with_name("s.lock").symlink_to(target)
    with pytest.raises(SocketPathError):
        Listener(socket_path)
    assert target.read_text() == "precious"


def test_a_socket_somebody_put_in_place_of_ours_is_not_removed(socket_path: Path) -> None:
    listener = Listener(socket_path)
    listener.listen()
    socket_path.unlink()
    stale(socket_path)
    listener.close()
    assert socket_path.is_socket()


def test_the_lock_file_stays_and_descriptors_do_not(socket_path: Path, descriptors: Callable[[], int]) -> None:
    before = descriptors()
    for _ in range(3):
        listener = Listener(socket_path)
        listener.listen()
        with pytest.raises(AlreadyRunning):
            Listener(socket_path)
        listener.close()
        listener.close()
    assert socket_path.with_name("s.lock").exists()
    assert descriptors() == before
