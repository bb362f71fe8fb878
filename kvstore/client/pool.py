"""Idle connections, and the leases that end while nobody owns theirs."""

from __future__ import annotations

import os
import threading
import weakref

from warmkv.kvstore.client.connection import Connection

#: Idle connections kept. Those with live leases or a reservation are kept beyond it, since
#: closing a connection ends them.
KEEP = 8
#: Connections that wait for an upload. Of those whose upload never comes the oldest are given up, else
#: they would add up for a minute each; a save that lost its reservation goes on without one.
KEEP_RESERVED = 16


class IdlePool:
    """Connections between two calls, last used first out.

    Notes: `end_lease` runs in finalizers, hence at any moment of any thread, one that holds
    the lock included. It only appends to deques and tries the lock; whoever holds the lock looks
    for ended leases again after letting go of it, so none is left behind. No I/O under the lock.
    A reservation is bound to its connection: between offer and commit nobody else gets that one,
    not even to send its ended leases, which go out with the upload."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._any_ended = False
        self._closed = False

    @property
    def inherited(self) -> bool:
        """Whether this pool belongs to the process this one was forked from."""
        return self._pid != os.getpid()

    def add(self, connection: Connection) -> None:
        """Know of a connection that is in use."""
        with self._lock:
            self._all.add(connection)
        self._sweep()

    def take(self, reservation: int = 0) -> Connection | None:
        """An idle connection, which the caller gives back: the one that holds ``reservation`` if
        it is among them, else one that waits for no upload."""
        with self._lock:
            fits = [item for item in self._idle if reservation and item.reservation == reservation]
            fits = fits or [item for item in self._idle if not item.reserved]
            taken = fits[-1] if fits else None
            if taken is not None:
                self._idle.remove(taken)
        self._sweep()
        return taken

    def give(self, connection: Connection) -> None:
        """Return a connection after a call; it is closed if it is of no more use."""
        connection.end_leases()
        surplus: list[Connection] = []
        with self._lock:
            if self._closed or not connection.usable:
                surplus.append(connection)
                self._all.discard(connection)
            else:
                self._idle.append(connection)
                # Ended since it was looked at above, or on one whose upload never came.
                self._any_ended |= any(item.ended for item in self._idle)
                surplus.extend(self._beyond_limit())
        _close(surplus)
        self._sweep()

    def end_lease(self, connection: Connection, lease: int) -> None:
        """Note that ``lease`` ended and tell the daemon as soon as its connection is idle.

        Never waits; may be called from finalizers and after a fork (then it does nothing)."""
        if self.inherited:
            return
        connection.ended.append(lease)
        self._any_ended = True
        self._sweep()

    def drop_idle(self) -> None:
        """Close every idle connection: what ended one by surprise has ended them all."""
        with self._lock:
            dropped, self._idle = self._idle, []
            self._all.difference_update(dropped)
        _close(dropped)

    def close(self) -> None:
        """Close idle connections now and those in use when they are given back."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def abandon(self) -> None:
        """In a forked child: drop this process's copies of the parent's sockets."""
        _close(list(self._all))

    def _beyond_limit(self) -> list[Connection]:
        free = [item for item in self._idle if not item.leases and not item.reserved]
        surplus = free[: max(0, len(self._idle) - KEEP)]
        waiting = [item for item in self._idle if item.reserved and not item.leases]
        surplus += waiting[: max(0, len(waiting) - KEEP_RESERVED)]
        for item in surplus:
            self._idle.remove(item)
            self._all.discard(item)
        return surplus

    def _sweep(self) -> None:
        """Send the ended leases of idle connections, unless the lock is taken (see Notes)."""
        while self._any_ended and self._lock.acquire(blocking=False):
            try:
                self._any_ended = False
                ready = [item for item in self._idle if item.ended and not item.reserved]
                self._idle = [item for item in self._idle if item not in ready]
            finally:
                self._lock.release()
            for item in ready:
                self.give(item)


def _close(connections: list[Connection]) -> None:
    for item in connections:
        item.close()
