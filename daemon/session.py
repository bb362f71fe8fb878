"""One connection, served: frames in, messages checked, answered by the engine, frames out."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warmkv.daemon import logs
from warmkv.daemon.peer import Peer
from warmkv.kvstore.channel import Channel, Deadline, Frame, close_all
from warmkv.kvstore.session import Session
from warmkv.schema import messages as m
from warmkv.schema import protocol
from warmkv.schema.errors import (
    DescriptorLimit,
    FormatError,
    InternalError,
    ProtocolError,
    WarmKVError,
)

log = logging.getLogger("warmkv.daemon.session")
SERVER_NAME = "warmkv python"
#: A greeting is small; before it nobody has earned a larger buffer.
HELLO_MAX_BYTES = 4096
MAX_FAULT_TEXT = 2000


@dataclass(frozen=True, slots=True)
class Limits:
    """Time a peer has to finish a frame it began (or to greet), and to take in a reply."""

    frame_timeout_s: float
    send_timeout_s: float


class PeerSession:
    """Serves one greeted or still silent connection until either side ends it.

    ``local`` is this connection's own session of the engine: it knows the namespaces opened
    here and refuses those of others, and closing it ends leases and reservations.

    **Threading:** `run` on its own thread; `drain` and `abort` from any other."""

    def __init__(self, channel: Channel, peer: Peer, local: Session, epoch: int, limits: Limits) -> None:
        self.peer = peer
        self._channel = channel
        self._local = local
        self._epoch = epoch
        self._limits = limits
        self._conversation = protocol.ServerConversation()
        self._greeted = False
        self._leases: dict[int, Callable[[], None]] = {}
        self._simple: dict[type[object], Callable[[Any], m.Message]] = {
            m.Match: local.match,
            m.Prefetch: local.prefetch,
            m.Offer: local.offer,
            m.Annotate: local.annotate,
            m.Pin: local.pin,
            m.Forget: local.forget,
            m.Clear: local.clear,
            m.Open: self._open,
            m.Hello: self._welcome,
        }

    def run(self) -> None:
        """Serve until the peer leaves, breaks the protocol or stalls, or the daemon drains.

        Closes the connection and ends its leases and reservations; never raises."""
        try:
            while self._serve_one():
                pass
        except (OSError, TimeoutError) as exc:
            log.debug("%s: connection ended: %s", self.peer, exc)
        except Exception as exc:  # noqa: BLE001 - one connection's defect stays its own
            logs.defect(log, f"{self.peer}: connection", exc)
        finally:
            self._leases.clear()
            self._channel.close()
            self._local.close()

    def drain(self) -> None:
        """Take no further request: the one being served is still answered."""
        self._channel.shutdown(socket.SHUT_RD)

    def abort(self) -> None:
        """Give up on the peer in the middle of whatever it does."""
        self._channel.shutdown(socket.SHUT_RDWR)

    # -- one request -----------------------------------------------------------------------

    def _serve_one(self) -> bool:
        frame_s = self._limits.frame_timeout_s
        try:
            if self._greeted:
                frame = self._channel.receive(None, frame_s)
            else:
                frame = self._channel.receive(Deadline(frame_s), frame_s, HELLO_MAX_BYTES)
        except ProtocolError as exc:
            return self._refuse(protocol.CONNECTION, exc)
        if frame is None:
            return False
        try:
            return self._answer(frame)
        finally:
            frame.close()

    def _answer(self, frame: Frame) -> bool:
        """Answer one frame; whether the connection goes on."""
        try:
            request_id, message = m.decode(frame.body)
        except FormatError as exc:
            return self._refuse(protocol.CONNECTION, exc)
        fds: tuple[int, ...] = ()
        try:
            reply, fds = self._reply(message, frame)
        except ProtocolError as exc:
            return self._refuse(request_id, exc)
        except WarmKVError as exc:
            log.debug("%s: %s -> %s", self.peer, _summary(message), type(exc).__name__)
            reply = _fault(exc)
        except Exception as exc:  # noqa: BLE001 - answered, logged, and the connection lives on
            logs.defect(log, f"{self.peer}: {type(message).__name__}", exc)
            reply = _fault(InternalError("the daemon failed inside; its log has the traceback"))
        try:
            if reply is not None:
                self._send(request_id, reply, fds)
        finally:
            close_all(fds)
        return True

    def _reply(self, message: m.Message, frame: Frame) -> tuple[m.Message | None, tuple[int, ...]]:
        """The reply to a message, with descriptors for the caller to send and close."""
        if frame.truncated:
            raise DescriptorLimit(f"no descriptor left in the daemon for {type(message).__name__}")
        self._conversation.receive(message, len(frame.fds))
        fds: tuple[int, ...] = ()
        if isinstance(message, m.Release):
            self._release(message)
            return None, fds
        if isinstance(message, m.Acquire):
            grant = self._local.acquire(message)
            reply: m.Message = grant.reply
            fds = grant.fds
            for lease, release in ((grant.reply.lease, grant.release), (grant.reply.flight, grant.release_flight)):
                if lease:
                    self._leases[lease] = release
        elif isinstance(message, m.Commit):
            reply = self._local.commit(message, frame.fds[0])
        elif isinstance(message, m.Report):
            reply = self._local.report(message, frame.fds[0] if frame.fds else -1)
        else:
            reply = self._simple[type(message)](message)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s -> %s with %d descriptors", self.peer, _summary(message), type(reply).__name__, len(fds))
        return reply, fds

    def _release(self, message: m.Release) -> None:
        for lease in message.leases.tolist():
            release = self._leases.pop(lease, None)
            if release is not None:
                release()

    def _welcome(self, hello: m.Hello) -> m.Welcome:
        version = protocol.choose_version(hello.version_min, hello.version_max)
        self._greeted = True
        return m.Welcome(version, self._epoch, SERVER_NAME, m.MAX_BODY_BYTES, self.peer.uid)

    def _open(self, message: m.Open) -> m.Opened:
        return m.Opened(self._local.open(message.identity, message.share))

    # -- replies ---------------------------------------------------------------------------

    def _send(self, request_id: int, reply: m.Message, fds: tuple[int, ...] = ()) -> None:
        self._channel.send(m.encode(reply, request_id), fds, Deadline(self._limits.send_timeout_s))

    def _refuse(self, request_id: int, exc: WarmKVError) -> bool:
        """Say why and end the connection."""
        log.info("%s: refused: %s", self.peer, exc)
        self._send(request_id, _fault(exc))
        return False


def refuse(channel: Channel, exc: WarmKVError) -> None:
    """Turn away a connection before anything is read from it, without waiting, and close it."""
    try:
        channel.send_now(m.encode(_fault(exc), protocol.CONNECTION))
    except OSError:
        pass
    finally:
        channel.close()


def _fault(exc: WarmKVError) -> m.Fault:
    text = str(exc)[:MAX_FAULT_TEXT].encode("utf-8", "replace").decode("utf-8")
    return m.Fault(exc.code, text, exc.retryable)


def _summary(message: m.Message) -> str:
    """A request in a few words, without anything that was said in it."""
    words = [type(message).__name__]
    namespace = getattr(message, "namespace", b"")
    if namespace:
        words.append(f"namespace {namespace[:4].hex()}")
    tokens = getattr(message, "tokens", None)
    if tokens is not None:
        words.append(f"{len(tokens)} tokens")
    return " ".join(words)
