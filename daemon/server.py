"""Accepting connections: a thread for each, up to a number, for permitted users only."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import threading
from typing import Protocol

from warmkv.daemon import logs
from warmkv.daemon.peer import Admission, Peer
from warmkv.daemon.session import Limits, PeerSession, refuse
from warmkv.kvstore.channel import Channel, Deadline
from warmkv.kvstore.session import Session
from warmkv.schema.errors import Busy, DescriptorLimit, WarmKVError

log = logging.getLogger("warmkv.daemon.server")
OUT_OF_DESCRIPTORS_PAUSE_MS = 50


class Engine(Protocol):
    """What the server needs of `kvstore.store.engine.Engine`."""

    @property
    def epoch(self) -> int: ...

    def session(self, uid: int, foreign: bool = ..., gids: frozenset[int] = ...) -> Session: ...

    def interrupt(self) -> None: ...


class Server:
    """Serves ``listening`` (non-blocking, borrowed) until `stop`.

    **Threading:** `serve` on one thread; `stop` from any thread or signal handler."""

    def __init__(self, listening: socket.socket, engine: Engine, admission: Admission, limits: Limits) -> None:
        self._listening = listening
        self._engine = engine
        self._admission = admission
        #: Who can reach the socket may be turned away as often as they like.
        self._turned_away = logs.Seldom(log)
        #: For connections from now on.
        self.limits = limits
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, PeerSession] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        #: Written by `knock`, read by the accept loop, which counts.
        self._door = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.answers = 0
        #: Given up for a moment when no descriptor is left, so that a peer can be told so.
        self._spare = _spare_descriptor()

    @property
    def admission(self) -> Admission:
        """Who may connect. With another one, who is being served stays as it is, but for those who may
        connect no longer: they are cut off."""
        return self._admission

    @admission.setter
    def admission(self, admission: Admission) -> None:
        self._admission = admission
        for session in self._sessions():
            self._cut_off_unless_permitted(session)

    def _cut_off_unless_permitted(self, session: PeerSession) -> None:
        if not self._admission.permits(session.peer):
            log.warning("%s may use this daemon no longer", session.peer)
            session.abort()

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._serving)

    def serve(self, signals: int = -1) -> None:
        """Accept until `stop` was called. ``signals`` is the descriptor on which signals show, see
        `signal.set_wakeup_fd`, -1: none."""
        poll = select.poll()
        for fd in (self._listening.fileno(), self._wake, self._door, signals):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if signals in ready:
                os.read(signals, 512)  # their handlers have run by now
            if self._wake in ready:
                return
            if self._door in ready:
                os.eventfd_read(self._door)
                self.answers += 1
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                continue  # the peer was gone again
            except OSError as exc:
                self._accept_failed(exc)
                continue
            self._admit(Channel(sock))

    def stop(self) -> None:
        """Make `serve` return. Idempotent."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def knock(self) -> None:
        """Have the accept loop count one up in ``answers``: proof that it is not stuck."""
        if self._door >= 0:
            os.eventfd_write(self._door, 1)

    def close(self, timeout_s: float) -> bool:
        """End all connections: requests being served are answered if they are done in
        ``timeout_s``, then their peers are cut off. Whether every thread ended."""
        deadline = Deadline(timeout_s)
        for session in self._sessions():
            session.drain()
        self._engine.interrupt()
        self._join(deadline)
        for session in self._sessions():
            session.abort()
        done = self._join(Deadline(1.0))
        if not done:
            log.warning("%d connections did not end in time", self.connections)
        for fd in (self._wake, self._door, self._spare):
            if fd >= 0:
                os.close(fd)
        self._wake = self._door = self._spare = -1
        return done

    # -- admission -------------------------------------------------------------------------

    def _admit(self, channel: Channel) -> None:
        """Check the peer before a byte of it is read, then serve it on its own thread, or tell
        it why not."""
        peer = None
        try:
            admission = self.admission
            peer = admission.identify(channel.socket)
            sessions = self._sessions()  # only this thread adds any
            admission.require(peer, len(sessions), sum(item.peer.uid == peer.uid for item in sessions))
            self._start(channel, peer)
        except WarmKVError as exc:
            self._turned_away.warning("%s: turned away: %s", peer, exc)
            refuse(channel, exc)
        except Exception as exc:  # noqa: BLE001 - a peer that cannot be served must not end the others
            logs.defect(log, f"admitting {peer}", exc)
            refuse(channel, Busy("the daemon could not serve this connection"))

    def _start(self, channel: Channel, peer: Peer) -> None:
        local = self._engine.session(peer.uid, foreign=peer.foreign, gids=peer.gids)
        session = PeerSession(channel, peer, local, self._engine.epoch, self.limits)
        thread = threading.Thread(target=self._run, args=(session,), name=f"warmkv-peer-{peer.pid}", daemon=True)
        with self._lock:
            self._serving[thread] = session
        try:
            thread.start()
        except RuntimeError as exc:
            with self._lock:
                del self._serving[thread]
            raise Busy("the daemon could start no thread") from exc
        self._cut_off_unless_permitted(session)  # in case that changed meanwhile

    def _run(self, session: PeerSession) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                self._serving.pop(threading.current_thread(), None)

    def _accept_failed(self, exc: OSError) -> None:
        """Out of descriptors, a waiting peer would be polled for without end: use the spare one
        to tell it. Anything else concerned only the peer."""
        if exc.errno not in (errno.EMFILE, errno.ENFILE):
            log.info("a connection was lost while being accepted: %s", exc)
            return
        log.warning("a connection was turned away: no descriptor left")
        if self._spare >= 0:
            os.close(self._spare)
            try:
                refuse(Channel(self._listening.accept()[0]), DescriptorLimit("the daemon has no descriptor left"))
            except OSError:
                pass  # the peer was gone again, or another thread was faster to the spare descriptor
        else:
            pause = select.poll()
            pause.register(self._wake, select.POLLIN)
            pause.poll(OUT_OF_DESCRIPTORS_PAUSE_MS)
        self._spare = _spare_descriptor()

    def _sessions(self) -> list[PeerSession]:
        with self._lock:
            return list(self._serving.values())

    def _join(self, deadline: Deadline) -> bool:
        with self._lock:
            threads = list(self._serving)
        for thread in threads:
            try:
                thread.join(deadline.remaining_s())
            except TimeoutError:
                break
        return not self.connections


def _spare_descriptor() -> int:
    """A descriptor that is open for nothing, or -1 while there is none to have."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
