"""One user's view of an engine: owns its leases, reservations and opened identities.

Namespaces are looked up by keys this user opened, or may read in the store: a key of somebody
else is unknown, whatever is stored under it. What a share permits is asked for every request.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from warmkv.kvstore.channel import close_all
from warmkv.kvstore.session import Grant
from warmkv.kvstore.store import reports
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.index import Namespace
from warmkv.kvstore.store.intake import Owner
from warmkv.schema import ids
from warmkv.schema import messages as m
from warmkv.schema.errors import Busy, ClosedError, OfferAgain, UnknownNamespace
from warmkv.schema.identity import Identity
from warmkv.schema.records import NamespaceKey

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

A = TypeVar("A", bound=m.Matched)
MAX_OPEN_IDENTITIES = 256
MAX_RESERVATIONS = 256
#: Each costs bookkeeping on every record it holds, for as long as the session lasts.
MAX_LEASES = 4096


class LocalSession:
    """Implements `kvstore.session.Session` over an engine in this process.

    ``foreign`` uploads are charged to somebody else's memory and copied. ``every_share``: see
    `Access`. **Threading:** every method may be called from any thread."""

    def __init__(
        self, engine: Engine, uid: int, *, foreign: bool = False, gids: frozenset[int] = frozenset(), every_share: bool = False
    ) -> None:
        self.uid = uid
        self.gids = gids
        self.access = Access(uid, lambda: engine.options.shares, every_share=every_share)
        self._foreign = foreign
        self._engine = engine
        self._lock = threading.Lock()
        self._owners: dict[NamespaceKey, Owner] = {}
        self._leases: set[int] = set()
        self._reservations: set[int] = set()
        self._closed = False

    def open(self, identity: bytes, share: str) -> NamespaceKey:
        """Announce an identity (canonical bytes). Raises FormatError, IdentityError, and
        AccessRefused for a share that is not declared or not for this user."""
        self._require_open()
        self.access.require_readable_share(share)
        parsed = Identity.from_canonical(identity)
        key = ids.namespace_key(self.uid, share, ids.fingerprint(parsed))
        with self._lock:
            # Opened again, an identity becomes the newest: callers keep fewer keys than this.
            self._owners.pop(key, None)
            if len(self._owners) >= MAX_OPEN_IDENTITIES:
                self._owners.pop(next(iter(self._owners)))
            self._owners[key] = Owner(self.uid, share, parsed)
        return key

    def may_read(self, key: NamespaceKey) -> bool:
        """Whether a namespace with this key is stored and this user may read it."""
        namespace = self._stored(key)
        return namespace is not None and self.access.reads(namespace)

    def match(self, request: m.Match) -> m.Matched:
        self._require_readable(request.namespace)
        return self._explained(request.namespace, self._engine.acquisition.match(request))

    def acquire(self, request: m.Acquire) -> Grant:
        """As `Acquisition.acquire`. Raises Busy as well, for a session that holds too many leases."""
        self._require_readable(request.namespace)
        if len(self._leases) >= MAX_LEASES:
            raise Busy(f"{MAX_LEASES} leases are held on this session already; release some")
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
        self._require_readable(request.namespace)
        return self._engine.acquisition.prefetch(request)

    def offer(self, request: m.Offer) -> m.Offered:
        """As `Intake.offer`. Raises Busy as well, where this session announced so many uploads
        already that bookkeeping alone would slow everybody down."""
        owner = self._writing(request.namespace)
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
        owner = self._writing(request.namespace)
        self._claim(request.reservation, more=request.more)
        return self._engine.intake.commit(request, fd, owner, copy=self._foreign)

    def annotate(self, request: m.Annotate) -> m.Committed:
        self._writing(request.namespace)
        self._claim(request.reservation)
        return self._engine.intake.annotate(request)

    def pin(self, request: m.Pin) -> m.Pinned:
        self._require_writable(request.namespace)
        return self._engine.removal.pin(request)

    def forget(self, request: m.Forget) -> m.Forgotten:
        self._require_writable(request.namespace)
        return self._engine.removal.forget(request)

    def clear(self, request: m.Clear) -> m.Forgotten:
        """One namespace, or with ``everything`` all that belong to this user alone: what is
        shared is dropped by name only."""
        self._require_open()
        if request.everything:
            with self._engine.index.changed:
                stored = list(self._engine.index.namespaces.values())
            keys = [item.key for item in stored if not item.share and item.owner_uid == self.uid]
        else:
            key = NamespaceKey(request.namespace)
            self._require_writable(key)
            keys = [key]
        return self._engine.removal.clear(keys)

    def report(self, request: m.Report, fd: int = -1) -> m.Document:
        self._require_open()
        return m.Document(reports.report(self._engine, self.access, request.verb, request.arguments, fd))

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
        fields, said = self._engine.nearest_difference(key, owner, self.access)
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

    def _writing(self, key: NamespaceKey) -> Owner:
        """The owner to enter for what is saved. Raises UnknownNamespace, AccessRefused."""
        self._require_open()
        with self._lock:
            owner = self._owners.get(key)
        if owner is None:
            raise UnknownNamespace(f"namespace {key.hex()} was not opened on this session")
        self.access.require_writable_share(owner.share)
        return owner

    def _require_readable(self, key: NamespaceKey) -> None:
        """Raises UnknownNamespace; AccessRefused where a share was taken from this user meanwhile."""
        self._require_open()
        with self._lock:
            owner = self._owners.get(key)
        if owner is not None:
            self.access.require_readable_share(owner.share)
        elif not self.may_read(key):
            raise UnknownNamespace(f"namespace {key.hex()} was not opened on this session")

    def _require_writable(self, key: NamespaceKey) -> None:
        self._require_readable(key)
        with self._lock:
            owner = self._owners.get(key)
        found = owner if owner is not None else self._stored(key)
        if found is not None:
            self.access.require_writable_share(found.share)

    def _stored(self, key: NamespaceKey) -> Namespace | None:
        with self._engine.index.changed:
            return self._engine.index.namespaces.get(key)

    def _require_open(self) -> None:
        if self._closed or not self._engine.serving:
            raise ClosedError("session is closed")
