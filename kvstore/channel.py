"""Frames over a connected stream socket, descriptors included; both ends of the wire use it.

A frame is read in two steps: its 4 length bytes together with whatever descriptors came with
them, then exactly its body by plain recv. Reading no further keeps the next frame's
descriptors with the next frame, and descriptors attached to anything but the first byte are
dropped by the kernel without ever being installed here.
"""

from __future__ import annotations

import array
import os
import socket
import time
from dataclasses import dataclass

from warmkv.schema import frame
from warmkv.schema.messages import MAX_BODY_BYTES

#: The kernel passes at most 253 descriptors a message. Room for all of them means that
#: MSG_CTRUNC can only mean one thing: this process may not open any more.
KERNEL_MAX_FDS = 253
_CONTROL_BYTES = socket.CMSG_SPACE(KERNEL_MAX_FDS * array.array("i").itemsize)
#: Memory follows the bytes that arrived, not the length a peer announced.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """A received body. ``fds`` belong to the receiver, who closes each; ``truncated`` says that
    some could not be opened for want of descriptors."""

    body: bytes
    fds: tuple[int, ...] = ()
    truncated: bool = False

    def close(self) -> None:
        close_all(self.fds)


class Deadline:
    """A point in time all steps of one exchange share."""

    __slots__ = ("_at",)

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, more than 0. Raises TimeoutError once there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return left


class Channel:
    """One connected socket, owned: `close` closes it.

    ``touched`` is set with the first byte of every frame received and may be cleared by the
    owner. **Threading:** one sender and one receiver at a time; `shutdown` from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.touched = False

    def send(self, body: bytes, fds: tuple[int, ...], deadline: Deadline) -> None:
        """Send one frame, ``fds`` with its first byte; they stay the caller's.

        Raises TimeoutError, OSError, LocalProtocolError."""
        data = memoryview(frame.frame(body))
        if fds:
            self.socket.settimeout(deadline.remaining_s())
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            data = data[self.socket.sendmsg([data], control, socket.MSG_NOSIGNAL) :]
        while len(data):
            self.socket.settimeout(deadline.remaining_s())
            data = data[self.socket.send(data, socket.MSG_NOSIGNAL) :]

    def send_now(self, body: bytes) -> bool:
        """Send one small frame if that is possible without waiting, else False. A frame that
        went out in part would spoil the stream: that is an OSError."""
        data = frame.frame(body)
        self.socket.settimeout(0)
        try:
            done = self.socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        if done != len(data):
            raise ConnectionError(f"{done} of {len(data)} bytes could be sent")
        return True

    def receive(self, deadline: Deadline | None, frame_timeout_s: float, max_body_bytes: int = MAX_BODY_BYTES) -> Frame | None:
        """The next frame, or None at an orderly end between frames.

        ``deadline`` bounds the whole; without one the first byte is awaited for ever and the
        rest of the frame for ``frame_timeout_s``. Raises TimeoutError, OSError,
        RemoteProtocolError; then no descriptor stays open."""
        self.touched = False
        self.socket.settimeout(None if deadline is None else deadline.remaining_s())
        fds: list[int] = []
        try:
            head, truncated = self._first(fds)
            if not head:
                return None
            self.touched = True
            deadline = deadline or Deadline(frame_timeout_s)
            if len(head) < frame.LENGTH.size:
                head += self._exactly(frame.LENGTH.size - len(head), deadline)
            body = self._exactly(frame.body_length(head, max_body_bytes), deadline)
            got, fds = tuple(fds), []
            return Frame(body, got, truncated)
        finally:
            close_all(fds)

    def shutdown(self, how: int) -> None:
        try:
            self.socket.shutdown(how)
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self.socket.close()

    def _first(self, fds: list[int]) -> tuple[bytes, bool]:
        """Up to 4 bytes; descriptors that came along are appended to ``fds``."""
        head, ancillary, flags, _ = self.socket.recvmsg(frame.LENGTH.size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                fds.extend(numbers)
        return head, bool(flags & socket.MSG_CTRUNC)

    def _exactly(self, count: int, deadline: Deadline) -> bytes:
        parts = []
        while count:
            self.socket.settimeout(deadline.remaining_s())
            part = self.socket.recv(min(count, _PIECE_BYTES))
            if not part:
                raise ConnectionResetError(f"peer left in the middle of a frame, {count} bytes before its end")
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group id of the peer as the kernel noted them (for a client: of whoever
    called listen)."""
    size = 3 * array.array("i").itemsize
    pid, uid, gid = array.array("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF


def close_all(fds: tuple[int, ...] | list[int]) -> None:
    """Close each descriptor, whatever the others do."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass
