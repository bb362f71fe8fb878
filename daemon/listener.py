"""The listening socket, and the lock that makes this daemon the only one behind it.

The lock file beside the socket is locked for the daemon's life and never removed (removing it
would let two starters hold locks on different files of one name). Under the lock a leftover
socket that refuses connections is a dead daemon's and may go; nothing else is ever removed. A
socket that a service manager bound is served under the same lock, and left where it is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
from pathlib import Path

from warmkv.daemon import activation
from warmkv.daemon.directory import require_private
from warmkv.kvstore.paths import check_socket_path
from warmkv.schema.errors import AlreadyRunning, SocketPathError

log = logging.getLogger("warmkv.daemon")
BACKLOG = 128
SOCKET_MODE, GROUP_SOCKET_MODE = 0o600, 0o660
PROBE_TIMEOUT_S = 2.0


class Listener:
    """Claims ``path`` when made, listens from `listen` on, lets go with `close`.

    Made first, so that of two daemons started at once the later one has touched nothing when
    it learns of the other. Members of group ``gid`` may open the socket too, -1: nobody else.
    ``inherited`` is a listening socket that somebody else bound: it is owned from here on, served
    where it is bound, and its file is never removed."""

    def __init__(self, path: Path, *, gid: int = -1, inherited: socket.socket | None = None) -> None:
        """Raises AlreadyRunning, or SocketPathError for a path that cannot be served safely; then
        ``inherited`` is closed."""
        self._inherited = inherited
        self._gid = gid
        self._socket: socket.socket | None = None
        self._bound: tuple[int, int] | None = None
        self._lock_fd = -1
        try:
            self.path = path if inherited is None else activation.path_of(inherited) or path
            self._address = check_socket_path(self.path)
            require_private(self.path.parent, gid)
            self._lock_fd = _locked(self.path.with_name(self.path.name + ".lock"))
            if inherited is None:
                _clear_stale(self.path, self._address)
        except BaseException:
            self.close()
            raise

    def listen(self) -> socket.socket:
        """Bind and listen; the socket stays the listener's. Whatever the umask, its group and mode
        (0600, or 0660 for a group) are in place before the first connection can be made."""
        if self._inherited is not None:
            if os.stat(self.path).st_mode & 0o002:
                log.warning("anybody can connect to %s, which was passed to us; only who is on a list is served", self.path)
            self._socket, self._inherited = self._inherited, None
            self._socket.setblocking(False)
            return self._socket
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(sock.fileno(), SOCKET_MODE)
            sock.bind(self._address)
            found = os.lstat(self.path)
            self._bound = (found.st_dev, found.st_ino)
            if self._gid >= 0 and found.st_gid != self._gid:
                os.chown(self.path, -1, self._gid, follow_symlinks=False)
            os.chmod(self.path, SOCKET_MODE if self._gid < 0 else GROUP_SOCKET_MODE)
            sock.listen(BACKLOG)
            sock.setblocking(False)
        except OSError as exc:
            self._unlink_bound()
            sock.close()
            raise SocketPathError(f"cannot listen at {self.path}: {exc.strerror}") from exc
        self._socket = sock
        return sock

    def stop(self) -> None:
        """Stop listening and remove the socket file if it is one bound here; the lock stays.
        Idempotent."""
        sock, self._socket = self._socket, None
        if sock is not None:
            self._unlink_bound()
            sock.close()

    def close(self) -> None:
        """`stop`, then give the lock up. Idempotent."""
        self.stop()
        if self._inherited is not None:
            self._inherited.close()
            self._inherited = None
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _unlink_bound(self) -> None:
        """Remove the socket file where it is still the one bound here."""
        bound, self._bound = self._bound, None
        try:
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == bound:
                os.unlink(self.path)
        except FileNotFoundError:
            pass


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
