"""Adoption: containers that outlived the process which held them, under a service manager.

Nothing is believed of them: a container is taken as if it had just arrived, after the same checks.
"""

from __future__ import annotations

from collections.abc import Callable

from warmkv.kvstore import memfd
from warmkv.kvstore.rows import require_served
from warmkv.kvstore.store import arrivals
from warmkv.kvstore.store.arrivals import Arrival, Owner
from warmkv.kvstore.store.index import Index, Record
from warmkv.kvstore.store.warm import WarmTier
from warmkv.schema import ids
from warmkv.schema.errors import FormatError, OfferAgain, WarmKVError
from warmkv.schema.records import Anchor, NamespaceKey

#: Of a reservation, a checked container, its owner and anchors: the record, and whether it was there.
Take = Callable[[int, Arrival, Owner, tuple[Anchor, ...]], tuple[Record, bool]]


class Adoption:
    """**Threading:** `adopt` wants the index lock free."""

    def __init__(self, index: Index, warm: WarmTier, take: Take) -> None:
        self._index = index
        self._warm = warm
        self._take = take

    def adopt(self, fd: int, owner: Owner | int) -> str | None:
        """Take a container that outlived the process which held it, after the same checks as any
        other; ``fd`` stays the caller's. ``owner`` tells whose it is, and of what model where the store
        does not know. What it builds on was adopted before. Returns why it was refused, or None."""
        try:
            total_bytes = memfd.check_sealed(fd, self._warm.ledger.budget_bytes or 1)
            key = arrivals.read_head(fd, total_bytes).header.namespace
            whose = self._owner(key, owner)
            require_served(whose.identity)
            arrival = arrivals.check(fd, total_bytes, key, whose.identity)
            with self._index.changed:
                if self._rewarm(arrival):
                    return None
            duplicate = self._take(0, arrival, whose, ())[1]
        except WarmKVError as exc:
            return str(exc) or type(exc).__name__
        except OSError as exc:
            return f"descriptor cannot be read: {exc}"
        finally:
            self._warm.reap()
        return "all that it holds is held already" if duplicate else None

    def _owner(self, key: NamespaceKey, owner: Owner | int) -> Owner:
        if isinstance(owner, int):
            with self._index.changed:
                namespace = self._index.namespaces.get(key)
            if namespace is None or namespace.owner_uid != owner:
                raise OfferAgain("the container belongs to a namespace that is not known here")
            return Owner(owner, namespace.share, namespace.identity)
        if ids.namespace_key(owner.uid, owner.share, ids.fingerprint(owner.identity)) != key:
            raise FormatError("the container belongs to another namespace than it was kept for")
        return owner

    def _rewarm(self, arrival: Arrival) -> bool:
        """Whether the record was on disk only and has its container back; lock held."""
        record = self._index.records.get(arrival.header.id)
        if record is None or record.packed or record.warm or record.promotion is not None:
            return False
        if record.total_bytes != arrival.total_bytes:
            raise FormatError(f"container has {arrival.total_bytes} bytes, the record on disk {record.total_bytes}")
        self._warm.make_room(arrival.total_bytes, wait=False, uid=record.namespace.owner_uid)
        if record.gone:
            return False
        self._warm.admit(record, arrivals.duplicate(arrival.fd))
        self._index.changed.notify_all()
        return True
