"""The warm tier: sealed memfds within a budget.

Room is made before anything is accepted. A dirty record (not yet on disk, on its way there)
is waited for, a bounded time; what cannot be waited for is `Busy`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.store.ledger import Ledger
from warmkv.kvstore.store.policy import Candidate, plan_eviction
from warmkv.schema.errors import Busy, ClosedError, TooLarge


class WarmTier:
    """**Threading:** every method but `reap` wants the index lock held; `reap` wants it free,
    since closing the last descriptor of a memfd gives its pages back and takes milliseconds."""

    def __init__(
        self, index: Index, budget_bytes: int, budget_entries: int, busy_timeout_s: float, *,
        clock: Callable[[], float] = time.monotonic, wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self.ledger = Ledger(budget_bytes, budget_entries)
        self.evictions = 0
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

    def make_room(self, wanted_bytes: int, builds_on: Record | None = None, *, wait: bool = True) -> None:
        """Evict until ``wanted_bytes`` and one entry more fit. Raises TooLarge, Busy or, once
        the store is being closed, ClosedError; then nothing was evicted that would not have been
        enough.

        The chain that the newcomer ``builds_on`` is not evicted where it would be lost: room
        for rows without what they continue is of no use. May ``wait``, with the lock given up."""
        ledger = self.ledger
        if wanted_bytes > ledger.budget_bytes or ledger.budget_entries < 1:
            raise TooLarge(f"{wanted_bytes} bytes do not fit the warm budget of {ledger.budget_bytes} bytes")
        deadline = self.clock() + self._busy_timeout_s
        while True:
            if self.closing:
                raise ClosedError("the store is being closed")
            self._expire()
            excess = max(ledger.excess_bytes(wanted_bytes), int(ledger.full_of_entries))
            if not excess:
                return
            victims = plan_eviction(self._candidates(builds_on), excess)
            if victims is not None:
                for record in victims:
                    self.evict(record)
                continue
            remaining = deadline - self.clock()
            if not wait or remaining <= 0 or not self._waiting_helps():
                raise Busy(f"{excess} bytes more than can be evicted now are wanted: the rest is leased, pinned or being written")
            self._index.changed.wait(min(remaining, 0.5))

    def admit(self, record: Record, fd: int) -> None:
        """Take ownership of ``fd`` as the record's container. Room was made before."""
        self._index.set_warm(record, fd)
        self.ledger.resident_bytes += record.total_bytes
        self.ledger.resident_entries += 1
        self.ledger.note_peak()

    def evict(self, record: Record) -> None:
        """Let the record go from this tier; from the index too where no other copy is. Its
        descriptor is closed by the next `reap`."""
        self._doomed.append(record.fd)
        self._index.set_warm(record, -1)
        self.ledger.resident_bytes -= record.total_bytes
        self.ledger.resident_entries -= 1
        self.evictions += 1
        # A lease may end between two lines (see `leased`): what is no longer leased is never counted.
        if self.leased(record) and record.leases:
            self._leased[record] = self._leased.get(record, 0) + record.total_bytes
            self.ledger.leased_bytes += record.total_bytes
        elif record.leases:
            self._lend(record, record.total_bytes)
        if record.cold == Cold.ABSENT and not record.gone:
            self._index.drop(record)

    def keep_anchors(self, namespace: Namespace, limit: int, newest: Sequence[Record] = ()) -> None:
        """Let the least recently used states at named positions go until ``limit`` of a namespace
        are left; 0 is no limit. What is leased, pinned, on its way to disk, or ``newest``, stays."""
        if not limit:
            return
        now_ns = self._wall_ns()
        named = [record for record in namespace.records if record.warm and record.is_state and _named(record)]
        named.sort(key=lambda record: record.last_used)
        surplus = len(named) - limit
        for record in named:
            dirty = record.cold in (Cold.QUEUED, Cold.WRITING)
            if surplus > 0 and not (record in newest or dirty or record.pinned_until_ns > now_ns or self.leased(record)):
                self.evict(record)
                surplus -= 1

    def unlend(self, record: Record) -> None:
        """The last lease of a record ended: what was leased or lent of it is no more."""
        # Taken first: the garbage collector may end another lease inside the call.
        leased, lent = self._leased.pop(record, 0), self._lent.pop(record, 0)
        self.ledger.leased_bytes -= leased
        self.ledger.lent_bytes -= lent

    def _lend(self, record: Record, total_bytes: int) -> None:
        self._lent[record] = self._lent.get(record, 0) + total_bytes
        self.ledger.lent_bytes += total_bytes

    def _expire(self) -> None:
        """Stop counting reservations and evicted bytes whose time is over."""
        self.ledger.expire(self.clock())
        # A copy, and pop with a default: the garbage collector may end leases in between.
        for record in list(self._leased):
            if not self.leased(record):
                total_bytes = self._leased.pop(record, 0)
                self.ledger.leased_bytes -= total_bytes
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

    def _candidates(self, builds_on: Record | None) -> Iterator[Candidate[Record]]:
        now_ns = self._wall_ns()
        needed = set(self._index.chain_of(builds_on)) if builds_on is not None else set()
        for record in self._index.warm_order:
            dirty = record.cold in (Cold.QUEUED, Cold.WRITING)
            lost = record.cold == Cold.ABSENT and record in needed
            keep = dirty or lost or record.pinned_until_ns > now_ns or self.leased(record)
            children = record.warm_children if record.cold == Cold.STORED else len(record.children)
            yield Candidate(record, record.parent, record.total_bytes, children, keep)

    def _waiting_helps(self) -> bool:
        return any(record.cold in (Cold.QUEUED, Cold.WRITING) for record in self._index.warm_order) or bool(
            self.ledger.promoting_bytes or self.ledger.reserved_bytes
        )


def _named(state: Record) -> bool:
    """Whether an anchor names the position of a state."""
    parent = state.parent
    return parent is not None and any(position == state.end for position, _ in parent.anchors)
