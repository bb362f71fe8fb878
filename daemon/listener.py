"""The listening socket, and the lock that makes this daemon the only one behind it.

The lock file beside the socket is locked for the daemon's life and never removed (removing it
would let two starters hold locks on different files of one name). Under the lock a leftover
socket that refuses connections is a dead daemon's and may go; nothing else is ever removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

from warmkv.kvstore.paths import check_socket_path
from warmkv.schema.errors import AlreadyRunning, SocketPathError

BACKLOG = 128
SOCKET_MODE = 0o600
PROBE_TIMEOUT_S = 2.0


class Listener:
    """Claims ``path`` when made, listens from `listen` on, lets go with `close`.

    Made first, so that of two daemons started at once the later one has touched nothing when
    it learns of the other."""

    def __init__(self, path: Path) -> None:
        """Raises AlreadyRunning, or SocketPathError for a path that cannot be served safely."""
        self.path = path
        self._address = check_socket_path(path)
        self._socket: socket.socket | None = None
        self._bound: tuple[int, int] | None = None
        _private_directory(path.parent)
        self._lock_fd = _locked(path.with_name(path.name + ".lock"))
        try:
            _clear_stale(path, self._address)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def listen(self) -> socket.socket:
        """Bind and listen; the socket stays the listener's. Its mode is 0600 under any umask
        before the first connection can be made."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), SOCKET_MODE)
            sock.bind(self._address)
            os.chmod(self.path, SOCKET_MODE)
            found = os.lstat(self.path)
            self._bound = (found.st_dev, found.st_ino)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as exc:
            sock.close()
            raise SocketPathError(f"cannot listen at {self.path}: {exc.strerror}") from exc
        self._socket = sock
        return sock

    def stop(self) -> None:
        """Stop listening and remove the socket file if it is still the one bound here; the lock
        stays. Idempotent."""
        sock, self._socket = self._socket, None
        if sock is None:
            return
        try:
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._bound:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
        sock.close()

    def close(self) -> None:
        """`stop`, then give the lock up. Idempotent."""
        self.stop()
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _locked(path: Path) -> int:
    """A descriptor that holds the exclusive lock on ``path``; its content names the holder."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise SocketPathError(f"cannot open lock file {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as exc:
        holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise AlreadyRunning(f"another daemon (process {holder or 'unknown'}) holds {path}") from exc
    except OSError as exc:
        os.close(fd)
        raise SocketPathError(f"cannot lock {path}: {exc.strerror}") from exc
    return fd


def _clear_stale(path: Path, address: bytes) -> None:
    """Remove a socket at ``path`` that refuses connections. Needs the lock."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SocketPathError(f"{path} exists and is no socket ({stat.filemode(found.st_mode)}); it is left alone")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except FileNotFoundError:
            return
        except OSError as exc:
            raise AlreadyRunning(f"something at {path} neither accepts nor refuses connections: {exc}") from exc
    raise AlreadyRunning(f"a daemon without our lock accepts connections at {path}")


def _private_directory(path: Path) -> None:
    """Create ``path`` for us alone, or check that it is; nobody else may replace what is in it
    or any directory above it."""
    try:
        missing = [item for item in (path, *path.parents) if not os.path.lexists(item)]
        for item in reversed(missing):
            try:
                os.mkdir(item, 0o700)
                os.chmod(item, 0o700)
            except FileExistsError:
                pass  # another starter was faster; checked below like any other
        found = os.stat(path)
    except OSError as exc:
        raise SocketPathError(f"cannot create directory {path}: {exc.strerror}") from exc
    if not stat.S_ISDIR(found.st_mode):
        raise SocketPathError(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise SocketPathError(f"directory {path} belongs to uid {found.st_uid}, expected {os.geteuid()}")
    if found.st_mode & 0o022:
        raise SocketPathError(f"directory {path} is writable by others (mode {stat.S_IMODE(found.st_mode):04o}), expected 0700")
    for parent in path.resolve().parents:
        above = os.stat(parent)
        if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
            raise SocketPathError(f"directory {parent} above the socket is writable by others and not sticky")
