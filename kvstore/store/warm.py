"""The warm tier: sealed memfds within a budget.

Room is made before anything is accepted. A dirty record (not yet on disk, on its way there)
is waited for, a bounded time; what cannot be waited for is `Busy`.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Protocol

from warmkv.kvstore.store.faults import NO_FAULTS, Faults
from warmkv.kvstore.store.index import DIRTY, Cold, Index, Namespace, Record
from warmkv.kvstore.store.ledger import Ledger
from warmkv.kvstore.store.policy import Candidate, plan_above_floors
from warmkv.schema.errors import Busy, ClosedError, TooLarge


class WarmListener(Protocol):
    """Told of every container that enters or leaves the tier while the store is open. Called under
    the index lock: it notes, and works elsewhere."""

    def admitted(self, record: Record) -> None: ...

    def evicted(self, record: Record) -> None:
        """``record.fd`` is still that of the container, and is closed soon."""


class WarmTier:
    """**Threading:** every method but `reap` wants the index lock held; `reap` wants it free,
    since closing the last descriptor of a memfd gives its pages back and takes milliseconds."""

    def __init__(
        self, index: Index, budget_bytes: int, budget_entries: int, busy_timeout_s: float, *,
        clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns,
        uid_share: float = 1.0, floor_bytes: int = 0, faults: Faults = NO_FAULTS,
    ) -> None:  # fmt: skip
        self.ledger = Ledger(budget_bytes, budget_entries, uid_share, mmap.PAGESIZE)
        self.listeners: list[WarmListener] = []
        self.evictions = 0
        self._floor_bytes = floor_bytes
        self._faults = faults
        self._index = index
        self._busy_timeout_s = busy_timeout_s
        self.clock = clock
        self._wall_ns = wall_ns
        #: Once set, nothing is taken in any more: no save, no promotion.
        self.closing = False
        self._doomed: list[int] = []
        #: Bytes evicted under a lease: within the budget while the lease lives, then only lent.
        self._leased: dict[Record, int] = {}
        self._lent: dict[Record, int] = {}

    def make_room(
        self, wanted_bytes: int, builds_on: Record | None = None, *, wait: bool = True, uid: int | None = None
    ) -> None:  # fmt: skip
        """Evict until ``wanted_bytes`` and one entry more fit. Raises TooLarge, Busy or, once
        the store is being closed, ClosedError; then nothing was evicted that would not have been
        enough.

        What user ``uid`` has too much for its share is taken from its own records. The chain that
        the newcomer ``builds_on`` is not evicted where it would be lost: room for rows without what
        they continue is of no use. May ``wait``, with the lock given up."""
        ledger = self.ledger
        wanted_bytes = ledger.paged(wanted_bytes)
        deadline = self.clock() + self._busy_timeout_s
        while True:
            if self.closing:
                raise ClosedError("the store is being closed")
            self.expire()
            self._require_possible(wanted_bytes, uid)
            own = ledger.excess_of(uid, wanted_bytes) if uid is not None and ledger.uid_share < 1 else 0
            excess = own or max(ledger.excess_bytes(wanted_bytes), int(ledger.full_of_entries))
            parting = 0 if excess else ledger.excess_bytes(wanted_bytes + ledger.parting_bytes)
            if not excess and not parting:
                return
            victims = self._plan(excess, builds_on, uid if own else None) if excess else None
            if victims is not None:
                self.evict_all(victims)
                continue
            remaining = deadline - self.clock()
            if parting and (not wait or remaining <= 0):
                raise Busy(f"{parting} bytes more are wanted than are free: what was evicted is still kept elsewhere")
            if not parting and (not wait or remaining <= 0 or not self._waiting_helps()):
                whose = f" of user {uid}" if own else ""
                why = "the rest is leased, pinned or being written"
                raise Busy(f"{excess} bytes more{whose} than can be evicted now are wanted: {why}")
            self._index.changed.wait(min(remaining, 0.5))

    def _require_possible(self, wanted_bytes: int, uid: int | None) -> None:
        ledger = self.ledger
        if wanted_bytes > ledger.budget_bytes or ledger.budget_entries < 1:
            raise TooLarge(f"{wanted_bytes} bytes do not fit the warm budget of {ledger.budget_bytes} bytes")
        if uid is not None and wanted_bytes > int(ledger.budget_bytes * ledger.uid_share):
            raise TooLarge(f"{wanted_bytes} bytes are more than one user may hold of {ledger.budget_bytes}")
        if wanted_bytes > ledger.limit_bytes:
            raise Busy(f"{wanted_bytes} bytes are more than the {ledger.limit_bytes} of the warm tier while memory is scarce")

    def trim(self, excess_bytes: int, *, dry_run: bool = False) -> list[Record]:
        """Let the worst go until ``excess_bytes`` are free, or all that can; what went, or would."""
        victims = self._plan(excess_bytes, None, None, partly=True) or []
        if not dry_run:
            self.evict_all(victims)
        return victims

    def evict_all(self, victims: Sequence[Record]) -> None:
        """Let the victims of a plan go."""
        for record in victims:
            self._index.warm_order.age(record)
            self.evict(record)
            self._faults.reached("evict.warm")

    def admit(self, record: Record, fd: int) -> None:
        """Take ownership of ``fd`` as the record's container. Room was made before."""
        self._index.set_warm(record, fd)
        self.ledger.hold(record.namespace.owner_uid, record.total_bytes)
        for listener in self.listeners:
            listener.admitted(record)

    def evict(self, record: Record) -> None:
        """Let the record go from this tier; from the index too where no other copy is. Its
        descriptor is closed by the next `reap`."""
        for listener in () if self.closing else self.listeners:
            listener.evicted(record)
        self._doomed.append(record.fd)
        self._index.set_warm(record, -1)
        uid = record.namespace.owner_uid
        self.ledger.hold(uid, -record.total_bytes)
        self.evictions += 1
        # A lease may end between two lines (see `leased`): what is no longer leased is never counted.
        held_bytes = self.ledger.paged(record.total_bytes)
        if self.leased(record) and record.leases:
            self._leased[record] = self._leased.get(record, 0) + held_bytes
            self.ledger.lease(uid, held_bytes)
        elif record.leases:
            self._lend(record, held_bytes)
        if record.cold == Cold.ABSENT and not record.gone:
            self._index.drop(record)

    def keep_anchors(self, namespace: Namespace, limit: int, newest: Sequence[Record] = ()) -> None:
        """Let states at named positions go until ``limit`` of a namespace are left; 0 is no limit. The
        least recently used go first, those where prompts part after all others. What is leased,
        pinned, on its way to disk, or ``newest``, stays."""
        if not limit:
            return
        now_ns = self._wall_ns()
        named = [record for record in namespace.records if record.warm and record.is_state and _named(record)]
        named.sort(key=lambda record: (self._index.branches(record), record.last_used))
        surplus = len(named) - limit
        for record in named:
            dirty = record.cold in DIRTY
            if surplus > 0 and not (record in newest or dirty or record.pinned_until_ns > now_ns or self.leased(record)):
                self.evict(record)
                surplus -= 1

    def unlend(self, record: Record) -> None:
        """The last lease of a record ended: what was leased or lent of it is no more."""
        # Taken first: the garbage collector may end another lease inside the call.
        leased, lent = self._leased.pop(record, 0), self._lent.pop(record, 0)
        self.ledger.lease(record.namespace.owner_uid, -leased)
        self.ledger.lent_bytes -= lent

    def _lend(self, record: Record, total_bytes: int) -> None:
        self._lent[record] = self._lent.get(record, 0) + total_bytes
        self.ledger.lent_bytes += total_bytes

    def expire(self) -> None:
        """Stop counting reservations and evicted bytes whose time is over."""
        self.ledger.expire(self.clock())
        # A copy, and pop with a default: the garbage collector may end leases in between.
        for record in list(self._leased):
            if not self.leased(record):
                total_bytes = self._leased.pop(record, 0)
                self.ledger.lease(record.namespace.owner_uid, -total_bytes)
                if record.leases:
                    self._lend(record, total_bytes)

    def reap(self) -> None:
        """Close the descriptors of evicted containers. The index lock must not be held."""
        while self._doomed:
            try:
                fd = self._doomed.pop()
            except IndexError:
                return
            os.close(fd)

    def leased(self, record: Record) -> bool:
        now = self.clock()
        # A copy: the garbage collector may end a lease in the middle of this loop.
        return any(deadline > now for deadline in list(record.leases.values()))

    def _plan(
        self, excess_bytes: int, builds_on: Record | None, uid: int | None, *, partly: bool = False
    ) -> list[Record] | None:  # fmt: skip
        spare: dict[Hashable, int] | None = None
        if self._floor_bytes:
            spare = {item: item.warm_bytes - self._floor_bytes for item in self._index.namespaces.values()}
        return plan_above_floors(partial(self._candidates, builds_on, uid), excess_bytes, spare, partial=partly)

    def _candidates(self, builds_on: Record | None, uid: int | None) -> Iterator[Candidate[Record]]:
        """What may go, worst first; with ``uid``, of that user."""
        now_ns = self._wall_ns()
        needed = set(self._index.chain_of(builds_on)) if builds_on is not None else set()
        for record in self._index.warm_order.worst_first():
            lost = record.cold == Cold.ABSENT and record in needed
            other = uid is not None and record.namespace.owner_uid != uid
            keep = other or record.cold in DIRTY or lost or record.pinned_until_ns > now_ns or self.leased(record)
            children = record.warm_children if record.cold == Cold.STORED else len(record.children)
            yield Candidate(record, record.parent, self.ledger.paged(record.total_bytes), children, keep, record.namespace)

    def _waiting_helps(self) -> bool:
        ledger = self.ledger
        return bool(self._index.dirty_bytes or ledger.promoting_bytes or ledger.reserved_bytes)


def _named(state: Record) -> bool:
    """Whether an anchor names the position of a state."""
    parent = state.parent
    return parent is not None and any(position == state.end for position, _ in parent.anchors)
