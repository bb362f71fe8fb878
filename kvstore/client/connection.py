"""One connection to the daemon: checked, greeted, then one request at a time."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time
from collections import deque
from pathlib import Path

import numpy as np

from warmkv.kvstore import paths
from warmkv.kvstore.channel import Channel, Deadline, peer_credentials
from warmkv.schema import messages as m
from warmkv.schema import protocol
from warmkv.schema.errors import (
    DaemonTimeout,
    DaemonUnavailable,
    DescriptorLimit,
    SocketPathError,
    WarmKVError,
    error_from_code,
)
from warmkv.schema.records import NamespaceKey

CLIENT_NAME = "warmkv python"
#: How long a connection waits for the upload that was offered on it, then it is like any other.
RESERVED_S = 60.0


class Connection:
    """A greeted connection and what the daemon associates with it.

    ``opened`` are the namespaces announced here, ``leases`` those granted here and not yet
    given back; ``ended`` collects leases whose holders are done with them. **Threading:** one
    thread at a time owns a connection (see IdlePool); only ``ended`` may be appended to by others."""

    def __init__(self, path: Path, deadline: Deadline) -> None:
        """Connect and shake hands. Raises DaemonUnavailable, DaemonTimeout, SocketPathError,
        DescriptorLimit, VersionMismatch, or what the daemon answered instead of a welcome."""
        self.path = path
        self.opened: set[NamespaceKey] = set()
        self.leases: set[int] = set()
        self.ended: deque[int] = deque()
        self.reservation = 0
        self.answered = False
        self._reserved_until = 0.0
        self._channel = Channel(_connected(path, deadline))
        self._conversation = protocol.ClientConversation()
        self._asking = False
        self._closed = False
        hello = m.Hello(protocol.VERSION_MIN, protocol.VERSION_MAX, CLIENT_NAME, os.getpid())
        try:
            welcome, _ = self.request(hello, (), deadline)
        except BaseException:
            self.close()
            raise
        assert isinstance(welcome, m.Welcome)
        self.epoch = welcome.epoch

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: open, and none is half done."""
        return not self._closed and not self._asking

    @property
    def reserved(self) -> bool:
        """Whether an upload offered here is still to be expected."""
        return bool(self.reservation) and time.monotonic() < self._reserved_until

    def reserve(self, reservation: int) -> None:
        """Keep this connection for the upload of ``reservation``; 0 ends that."""
        self.reservation, self._reserved_until = reservation, time.monotonic() + RESERVED_S

    def request(self, message: m.Message, fds: tuple[int, ...], deadline: Deadline) -> tuple[m.Message, tuple[int, ...]]:
        """Send a request and wait for its reply and the descriptors that come with it, which the
        caller closes. ``fds`` are borrowed.

        Raises the error the daemon answered, DaemonTimeout, DaemonUnavailable, ProtocolError or
        DescriptorLimit. After any but the first the connection is closed and ``answered`` tells
        whether a byte of the reply had come."""
        self.answered = False
        self._asking = True
        try:
            reply, received = self._exchange(message, fds, deadline)
        except BaseException:
            self.close()
            raise
        self._asking = False
        if isinstance(reply, m.Fault):
            raise error_from_code(reply.code, reply.message)
        return reply, received

    def end_leases(self) -> None:
        """Tell the daemon which leases ended, without waiting; a daemon that does not even take
        these few bytes loses the connection, which ends the leases as well."""
        done = []
        while self.ended:
            done.append(self.ended.popleft())
        self.leases.difference_update(done)
        if not done or not self.usable:
            return
        release = m.Release(np.array(done, np.uint64))
        try:
            sent = self._channel.send_now(m.encode(release, self._conversation.send(release)))
        except (OSError, WarmKVError):
            sent = False
        if not sent:
            self.close()

    def close(self) -> None:
        """Let go of the socket. In a forked child this leaves the parent's connection intact."""
        self._closed = True
        self._channel.close()

    def _exchange(self, message: m.Message, fds: tuple[int, ...], deadline: Deadline) -> tuple[m.Message, tuple[int, ...]]:
        name = type(message).__name__
        body = m.encode(message, self._conversation.send(message))
        try:
            try:
                self._channel.send(body, fds, deadline)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the daemon may have said why before it hung up
            frame = self._channel.receive(deadline, 0.0)
        except TimeoutError as exc:
            raise DaemonTimeout(f"daemon at {self.path} did not answer {name} in time") from exc
        except OSError as exc:
            raise DaemonUnavailable(f"daemon at {self.path} was lost during {name}: {exc}") from exc
        finally:
            self.answered = self._channel.touched
        if frame is None:
            raise DaemonUnavailable(f"daemon at {self.path} hung up on {name}")
        try:
            if frame.truncated:
                raise DescriptorLimit(f"reply to {name} carried descriptors this process has no room for")
            request_id, reply = m.decode(frame.body)
            self._conversation.receive(request_id, reply, len(frame.fds))
            if isinstance(reply, m.Fault) and request_id == protocol.CONNECTION:
                raise error_from_code(reply.code, reply.message)
        except BaseException:
            frame.close()
            raise
        return reply, frame.fds


def _connected(path: Path, deadline: Deadline) -> socket.socket:
    """A socket whose other end was opened by us or by root."""
    trusted = {os.geteuid(), 0}
    address = paths.check_socket_path(path)
    try:
        found = os.stat(path)
    except OSError as exc:
        raise DaemonUnavailable(f"no daemon at {path}: {exc.strerror}") from exc
    if not stat.S_ISSOCK(found.st_mode):
        raise DaemonUnavailable(f"no daemon at {path}: not a socket ({stat.filemode(found.st_mode)})")
    if found.st_uid not in trusted:
        raise SocketPathError(f"socket {path} belongs to uid {found.st_uid}, expected one of {sorted(trusted)}")
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as exc:
        raise _no_socket(exc, path) from exc
    try:
        # A full backlog makes a non-blocking connect fail at once, a blocking one wait this long.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline.remaining_s()))
        sock.connect(address)
        uid = peer_credentials(sock)[1]
        if uid not in trusted:
            raise SocketPathError(f"socket {path} is served by uid {uid}, expected one of {sorted(trusted)}")
    except (BlockingIOError, TimeoutError) as exc:
        sock.close()
        raise DaemonTimeout(f"daemon at {path} accepted no connection in time") from exc
    except OSError as exc:
        sock.close()
        raise DaemonUnavailable(f"no daemon at {path}: {exc.strerror or exc}") from exc
    except BaseException:
        sock.close()
        raise
    return sock


def _no_socket(exc: OSError, path: Path) -> WarmKVError:
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return DescriptorLimit(f"no descriptor left to connect to {path}")
    return DaemonUnavailable(f"no socket to connect to {path}: {exc.strerror}")


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, max(1, int((seconds - whole) * 1e6)))
