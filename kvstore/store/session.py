"""One user's view of an engine: owns its leases, reservations and opened identities.

Namespaces are looked up by keys this user opened, or owns in the store: a key of somebody
else is unknown, whatever is stored under it.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from warmkv.kvstore.channel import close_all
from warmkv.kvstore.session import Grant
from warmkv.kvstore.store import reports
from warmkv.kvstore.store.intake import Owner
from warmkv.schema import ids
from warmkv.schema import messages as m
from warmkv.schema.errors import Busy, ClosedError, OfferAgain, RecordError, UnknownNamespace
from warmkv.schema.identity import Identity
from warmkv.schema.records import NamespaceKey

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

A = TypeVar("A", bound=m.Matched)
MAX_OPEN_IDENTITIES = 256
MAX_RESERVATIONS = 256


class LocalSession:
    """Implements `kvstore.session.Session` over an engine in this process.

    **Threading:** every method may be called from any thread."""

    def __init__(self, engine: Engine, uid: int) -> None:
        self.uid = uid
        self._engine = engine
        self._lock = threading.Lock()
        self._owners: dict[NamespaceKey, Owner] = {}
        self._leases: set[int] = set()
        self._reservations: set[int] = set()
        self._closed = False

    def open(self, identity: bytes, share: str) -> NamespaceKey:
        """Announce an identity (canonical bytes). Raises FormatError, IdentityError, RecordError."""
        self._require_open()
        if share:
            raise RecordError("shared namespaces are not declared anywhere yet; leave share empty")
        parsed = Identity.from_canonical(identity)
        key = ids.namespace_key(self.uid, share, ids.fingerprint(parsed))
        with self._lock:
            # Opened again, an identity becomes the newest: callers keep fewer keys than this.
            self._owners.pop(key, None)
            if len(self._owners) >= MAX_OPEN_IDENTITIES:
                self._owners.pop(next(iter(self._owners)))
            self._owners[key] = Owner(self.uid, share, parsed)
        return key

    def owns(self, key: NamespaceKey) -> bool:
        """Whether a namespace with this key exists in the store and belongs to this user."""
        with self._engine.index.changed:
            namespace = self._engine.index.namespaces.get(key)
            return namespace is not None and not namespace.share and namespace.owner_uid == self.uid

    def match(self, request: m.Match) -> m.Matched:
        self._may_read(request.namespace)
        return self._explained(request.namespace, self._engine.acquisition.match(request))

    def acquire(self, request: m.Acquire) -> Grant:
        self._may_read(request.namespace)
        reply, fds = self._engine.acquisition.acquire(request)
        self._leases.update(lease for lease in (reply.lease, reply.flight) if lease)
        if self._closed:  # meanwhile, and `close` may not have seen this lease
            close_all(fds)
            self.release([reply.lease, reply.flight])
            raise ClosedError("session was closed while it acquired")
        reply = self._explained(request.namespace, reply)
        return Grant(reply, fds, lambda: self.release([reply.lease]), lambda: self.release([reply.flight]))

    def release(self, leases: list[int]) -> None:
        """End leases of this session; others are ignored.

        The garbage collector may call this at any point of any thread, in a forked child too:
        it takes no lock that this thread may hold already and cannot take again."""
        if not self._engine.serving:
            return
        ours = [lease for lease in leases if lease in self._leases]
        self._leases.difference_update(ours)
        if ours:
            self._engine.acquisition.release(ours)

    def prefetch(self, request: m.Prefetch) -> m.Matched:
        self._may_read(request.namespace)
        return self._engine.acquisition.prefetch(request)

    def offer(self, request: m.Offer) -> m.Offered:
        """As `Intake.offer`. Raises Busy as well, where this session announced so many uploads
        already that bookkeeping alone would slow everybody down."""
        owner = self._owner(request.namespace)
        self._limit_reservations()
        reply = self._engine.intake.offer(request, owner)
        if reply.reservation:
            with self._lock:
                closed = self._closed
                if not closed:
                    self._reservations.add(reply.reservation)
            if closed:
                self._engine.intake.give_back(reply.reservation)
                raise ClosedError("session was closed while it offered")
        return reply

    def commit(self, request: m.Commit, fd: int) -> m.Committed:
        owner = self._owner(request.namespace)
        self._claim(request.reservation, more=request.more)
        return self._engine.intake.commit(request, fd, owner)

    def annotate(self, request: m.Annotate) -> m.Committed:
        self._owner(request.namespace)
        self._claim(request.reservation)
        return self._engine.intake.annotate(request)

    def pin(self, request: m.Pin) -> m.Pinned:
        self._may_read(request.namespace)
        return self._engine.removal.pin(request)

    def forget(self, request: m.Forget) -> m.Forgotten:
        self._may_read(request.namespace)
        return self._engine.removal.forget(request)

    def clear(self, request: m.Clear) -> m.Forgotten:
        """One namespace, or with ``everything`` all that belong to this user."""
        self._require_open()
        if request.everything:
            with self._engine.index.changed:
                keys = [key for key, item in self._engine.index.namespaces.items() if item.owner_uid == self.uid]
        else:
            key = NamespaceKey(request.namespace)
            self._may_read(key)
            keys = [key]
        return self._engine.removal.clear(keys)

    def report(self, request: m.Report) -> m.Document:
        self._require_open()
        return m.Document(reports.report(self._engine, self.uid, request.verb, request.arguments))

    def close(self) -> None:
        """End leases and reservations. Idempotent."""
        with self._lock:
            self._closed = True
            reservations, self._reservations = self._reservations, set()
        self.release(list(self._leases))
        for reservation in reservations:
            self._engine.intake.give_back(reservation)

    def _explained(self, key: NamespaceKey, reply: A) -> A:
        """The reply; where nothing is stored for the model, with the fields in which the nearest
        one this user may read differs."""
        if reply.matched or reply.usable:
            return reply
        with self._lock:
            owner = self._owners.get(key)
        if owner is None:
            return reply
        fields, said = self._engine.nearest_difference(key, owner)
        if not fields:
            return reply
        reason = f"nothing is stored for this model; the nearest one stored differs in {said}"
        return replace(reply, reason=reason, identity_difference=",".join(fields))

    def _limit_reservations(self) -> None:
        with self._lock:
            if len(self._reservations) >= MAX_RESERVATIONS:
                self._reservations = self._engine.intake.living(self._reservations)
            if len(self._reservations) >= MAX_RESERVATIONS:
                raise Busy(f"{MAX_RESERVATIONS} uploads are announced on this session already")

    def _claim(self, reservation: int, *, more: bool = False) -> None:
        """A reservation is used by the session that got it, once, or several times with ``more``
        until the last."""
        if not reservation:
            return
        with self._lock:
            if reservation not in self._reservations:
                raise OfferAgain(f"reservation {reservation} was not made on this session, or was used already")
            if not more:
                self._reservations.discard(reservation)

    def _owner(self, key: NamespaceKey) -> Owner:
        self._require_open()
        with self._lock:
            owner = self._owners.get(key)
        if owner is None:
            raise UnknownNamespace(f"namespace {key.hex()} was not opened on this session")
        return owner

    def _may_read(self, key: NamespaceKey) -> None:
        self._require_open()
        with self._lock:
            known = key in self._owners
        if not known and not self.owns(key):
            raise UnknownNamespace(f"namespace {key.hex()} was not opened on this session")

    def _require_open(self) -> None:
        if self._closed or not self._engine.serving:
            raise ClosedError("session is closed")
