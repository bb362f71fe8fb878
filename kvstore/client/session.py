"""The session over a socket: what the verbs ask, answered by the daemon.

Any number of threads may call; each call owns a connection for its duration. Namespaces are
announced again on every connection that needs them, so callers never notice which one they
get, or that the daemon was restarted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from warmkv.kvstore.channel import Deadline, close_all
from warmkv.kvstore.client.backoff import Backoff
from warmkv.kvstore.client.connection import Connection
from warmkv.kvstore.client.pool import IdlePool
from warmkv.kvstore.session import Grant
from warmkv.schema import messages as m
from warmkv.schema.errors import (
    Busy,
    ClosedError,
    DaemonTimeout,
    DaemonUnavailable,
    DescriptorLimit,
    UnknownNamespace,
    WarmKVError,
)
from warmkv.schema.records import NamespaceKey

R = TypeVar("R")
#: Identities kept for announcing them again; more than the verbs keep keys for.
KEEP_IDENTITIES = 256
#: Calls that nobody's answer waits for may take this many times the time-out.
PATIENCE = 12
_PATIENT = (m.Clear, m.Forget, m.Report, m.Prefetch)


class RemoteSession:
    """Implements `kvstore.session.Session` against the daemon at ``path``.

    ``timeout_s`` bounds a whole call, connecting included; saves acknowledged from disk,
    prefetches and administrative calls have 12 times that. With ``backoff`` a failure to reach
    the daemon is remembered for a short while and repeated without trying.

    **Threading:** every method from any thread. After a fork the child starts with no
    connections of its own and leaves the parent's alone."""

    def __init__(self, path: Path, *, timeout_s: float = 5.0, backoff: bool = True) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._backoff = Backoff(enabled=backoff)
        self._pool = IdlePool()
        self._lock = threading.Lock()
        self._identities: OrderedDict[NamespaceKey, tuple[bytes, str]] = OrderedDict()
        self._closed = False

    # -- the seam --------------------------------------------------------------------------

    def open(self, identity: bytes, share: str) -> NamespaceKey:
        reply, connection = self._ask(m.Open(identity, share), m.Opened)
        connection.opened.add(reply.namespace)
        with self._lock:
            self._identities[reply.namespace] = (identity, share)
            self._identities.move_to_end(reply.namespace)
            while len(self._identities) > KEEP_IDENTITIES:
                self._identities.popitem(last=False)
        return reply.namespace

    def match(self, request: m.Match) -> m.Matched:
        return self._ask(request, m.Matched)[0]

    def acquire(self, request: m.Acquire) -> Grant:
        reply, fds, connection = self._call(request)
        if not isinstance(reply, m.Acquired):
            close_all(fds)
            raise TypeError(f"{type(reply).__name__} in answer to Acquire")
        ends = [partial(self._pool.end_lease, connection, lease) if lease else _nothing for lease in (reply.lease, reply.flight)]
        return Grant(reply, fds, *ends)

    def prefetch(self, request: m.Prefetch) -> m.Matched:
        return self._ask(request, m.Matched)[0]

    def offer(self, request: m.Offer) -> m.Offered:
        return self._ask(request, m.Offered)[0]

    def commit(self, request: m.Commit, fd: int) -> m.Committed:
        """Never repeated by itself: whether a lost commit arrived is unknown, and the next
        offer will tell. Raises DaemonUnavailable in that case."""
        return self._ask(request, m.Committed, (fd,))[0]

    def annotate(self, request: m.Annotate) -> m.Committed:
        return self._ask(request, m.Committed)[0]

    def pin(self, request: m.Pin) -> m.Pinned:
        return self._ask(request, m.Pinned)[0]

    def forget(self, request: m.Forget) -> m.Forgotten:
        return self._ask(request, m.Forgotten)[0]

    def clear(self, request: m.Clear) -> m.Forgotten:
        return self._ask(request, m.Forgotten)[0]

    def report(self, request: m.Report, fd: int = -1) -> m.Document:
        return self._ask(request, m.Document, (fd,) if fd >= 0 else ())[0]

    def close(self) -> None:
        """Close the connections, which ends their leases; those in use close when they are done."""
        self._closed = True
        self._pool.close()

    # -- beyond the seam -------------------------------------------------------------------

    def greet(self) -> int:
        """Reach the daemon now and keep the connection; the daemon's epoch.

        Raises what connecting raises."""
        connection = self._connect(Deadline(self._timeout_s))
        epoch = connection.epoch
        self._pool.give(connection)
        return epoch

    def after_fork(self) -> None:
        """Start over in a child process. Idempotent."""
        if self._pool.inherited:
            self._pool.abandon()
            self._pool = IdlePool()
            self._lock = threading.Lock()

    # -- one call --------------------------------------------------------------------------

    def _ask(self, request: m.Message, expected: type[R], fds: tuple[int, ...] = ()) -> tuple[R, Connection]:
        """The reply to a request whose reply carries no descriptors."""
        reply, _, connection = self._call(request, fds)
        return cast(R, reply), connection  # the conversation has checked its kind

    def _call(self, request: m.Message, fds: tuple[int, ...] = ()) -> tuple[m.Message, tuple[int, ...], Connection]:
        self.after_fork()
        if self._closed:
            raise ClosedError("session is closed")
        self._backoff.check()
        wait_s = request.wait_ms / 1000 if isinstance(request, m.Acquire) else 0.0
        deadline = Deadline(self._timeout_s * (PATIENCE if _patient(request) else 1) + wait_s)
        connection = self._pool.take(_reservation(request))
        if connection is not None:
            try:
                return self._on(connection, request, fds, deadline)
            except DaemonUnavailable:
                self._pool.drop_idle()
                if connection.answered or isinstance(request, m.Commit):
                    raise
        return self._on(self._connect(deadline), request, fds, deadline)

    def _on(
        self, connection: Connection, request: m.Message, fds: tuple[int, ...], deadline: Deadline
    ) -> tuple[m.Message, tuple[int, ...], Connection]:
        """Ask on a connection owned by this call, then give it back."""
        try:
            connection.end_leases()
            if isinstance(request, m.Commit | m.Annotate) and request.reservation != connection.reservation:
                request = replace(request, reservation=0)  # made on a connection that is lost
            self._announce(connection, request, deadline)
            try:
                reply, received = connection.request(request, fds, deadline)
            except UnknownNamespace:
                if not self._announce(connection, request, deadline, again=True):
                    raise
                reply, received = connection.request(request, fds, deadline)
            except WarmKVError:
                if isinstance(request, m.Commit | m.Annotate):
                    connection.reserve(0)  # the daemon has given it back
                raise
            if isinstance(reply, m.Acquired):
                connection.leases.update(lease for lease in (reply.lease, reply.flight) if lease)
            if isinstance(request, m.Offer | m.Annotate) or (isinstance(request, m.Commit) and not request.more):
                connection.reserve(reply.reservation if isinstance(reply, m.Offered) else 0)
        except DaemonTimeout as exc:
            self._backoff.failed(exc)
            raise
        finally:
            self._pool.give(connection)
        self._backoff.succeeded()
        return reply, received, connection

    def _announce(self, connection: Connection, request: m.Message, deadline: Deadline, *, again: bool = False) -> bool:
        """Open the request's namespace on this connection if that is still to be done and its
        identity is known; whether it was done now."""
        key = NamespaceKey(getattr(request, "namespace", b""))
        known = self._identities.get(key)
        if known is None or (key in connection.opened and not again):
            return False
        connection.request(m.Open(*known), (), deadline)
        connection.opened.add(key)
        return True

    def _connect(self, deadline: Deadline) -> Connection:
        self.after_fork()
        try:
            connection = Connection(self.path, deadline)
        except (DescriptorLimit, Busy):
            raise
        except WarmKVError as exc:
            self._backoff.failed(exc)
            raise
        self._pool.add(connection)
        return connection


def _reservation(request: m.Message) -> int:
    return request.reservation if isinstance(request, m.Commit | m.Annotate) else 0


def _patient(request: m.Message) -> bool:
    return isinstance(request, _PATIENT) or getattr(request, "ack", m.ACK_MEMORY) == m.ACK_DISK


def _nothing() -> None:
    """Release of a grant that leased nothing."""
