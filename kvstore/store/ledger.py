"""The warm budget as a ledger: who holds how many bytes of shared memory right now.

Budget = resident + reserved uploads + promotions and copies under way + evicted under a living
lease. It is checked before anything is allocated, for all together and for each user's share.
What is evicted after its lease ran out and may still be mapped by a client is a gauge beside it
(``lent``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Seconds for which a ceiling set under memory pressure stays where it is, and in which it then
#: rises to the whole budget.
CEILING_HOLD_S = 30.0
CEILING_RISE_S = 300.0
#: Reservations that may be open at once: each costs bookkeeping, even one of few bytes.
MAX_RESERVATIONS = 1 << 16


@dataclass(slots=True)
class Ledger:
    """``uid_share`` is the part of bytes, entries and reservations that one user may hold.
    Shared memory comes in pages of ``page_bytes``: a container counts as the pages it takes.

    **Threading:** the caller holds the index lock."""

    budget_bytes: int
    budget_entries: int
    uid_share: float = 1.0
    page_bytes: int = 1
    resident_bytes: int = 0
    resident_entries: int = 0
    reserved_bytes: int = 0
    promoting_bytes: int = 0
    promoting_entries: int = 0
    leased_bytes: int = 0
    lent_bytes: int = 0
    #: Evicted and not free yet: who keeps a duplicate outside this process is still to be told.
    parting_bytes: int = 0
    peak_bytes: int = 0
    #: What was in use when the budget was made smaller, until it is in use no more.
    settling_bytes: int = 0
    user_bytes: Counter[int] = field(default_factory=Counter)
    user_entries: Counter[int] = field(default_factory=Counter)
    user_reservations: Counter[int] = field(default_factory=Counter)
    _ceiling: tuple[int, float] | None = None
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _reservations: dict[int, tuple[int, float, int]] = field(default_factory=dict)

    def paged(self, total_bytes: int) -> int:
        """The memory a container of so many bytes takes."""
        return -(-total_bytes // self.page_bytes) * self.page_bytes

    @property
    def used_bytes(self) -> int:
        return self.resident_bytes + self.reserved_bytes + self.promoting_bytes + self.leased_bytes

    @property
    def limit_bytes(self) -> int:
        """What may be in use now: the budget, or less for a while under memory pressure."""
        return self.budget_bytes if self._ceiling is None else min(self.budget_bytes, self._ceiling[0])

    def share_bytes(self) -> int:
        """What one user may hold."""
        return int(self.limit_bytes * self.uid_share)

    def share_entries(self) -> int:
        return max(1, int(self.budget_entries * self.uid_share)) if self.budget_entries else 0

    def excess_bytes(self, wanted_bytes: int) -> int:
        """How far ``wanted_bytes`` more would go over what may be in use; 0 when they fit."""
        return max(0, self.used_bytes + wanted_bytes - self.limit_bytes)

    def excess_of(self, uid: int, wanted_bytes: int) -> int:
        """How far ``wanted_bytes`` and one entry more would go over a user's share; 0 when they fit."""
        full = self.user_entries[uid] >= self.share_entries()
        return max(0, self.user_bytes[uid] + wanted_bytes - self.share_bytes(), int(full))

    @property
    def full_of_entries(self) -> bool:
        return self.resident_entries + self.promoting_entries >= self.budget_entries

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    # -- who holds what ------------------------------------------------------------------

    def hold(self, uid: int, total_bytes: int) -> None:
        """A record became resident; with negative bytes, it is no longer."""
        step = 1 if total_bytes >= 0 else -1
        held_bytes = step * self.paged(abs(total_bytes))
        self.resident_bytes += held_bytes
        self.resident_entries += step
        self._charge(uid, held_bytes, step)
        self.note_peak()

    def promote(self, uid: int, total_bytes: int) -> None:
        """A copy of a record is being made; with negative bytes, no longer."""
        step = 1 if total_bytes >= 0 else -1
        held_bytes = step * self.paged(abs(total_bytes))
        self.promoting_bytes += held_bytes
        self.promoting_entries += step
        self._charge(uid, held_bytes, step)
        self.note_peak()

    def lease(self, uid: int, total_bytes: int) -> None:
        """Bytes were evicted under a lease; with negative ones, the lease ended."""
        self.leased_bytes += total_bytes
        self._charge(uid, total_bytes, 0)

    def _charge(self, uid: int, total_bytes: int, entries: int) -> None:
        self.user_bytes[uid] += total_bytes
        self.user_entries[uid] += entries

    # -- reservations --------------------------------------------------------------------

    def may_reserve(self, uid: int) -> bool:
        """Whether a user may have one reservation more."""
        if len(self._reservations) >= MAX_RESERVATIONS:
            return False
        return self.user_reservations[uid] < max(1, int(MAX_RESERVATIONS * self.uid_share))

    def reserve(self, wanted_bytes: int, deadline: float, uid: int = 0) -> int:
        """Set room that was made aside until ``deadline``; the reservation's number."""
        reservation = next(self._ids)
        self._reservations[reservation] = (wanted_bytes, deadline, uid)
        self.reserved_bytes += wanted_bytes
        self.user_reservations[uid] += 1
        self._charge(uid, wanted_bytes, 0)
        self.note_peak()
        return reservation

    def give_back(self, reservation: int) -> None:
        """End a reservation; an unknown one is ignored."""
        if reservation in self._reservations:
            left, _, uid = self._reservations.pop(reservation)
            self.reserved_bytes -= left
            self.user_reservations[uid] -= 1
            self._charge(uid, -left, 0)

    def use(self, reservation: int, used_bytes: int) -> None:
        """Take from a reservation what arrived of it; an unknown one is ignored."""
        if reservation in self._reservations:
            left, deadline, uid = self._reservations[reservation]
            used = min(left, used_bytes)
            self._reservations[reservation] = (left - used, deadline, uid)
            self.reserved_bytes -= used
            self._charge(uid, -used, 0)

    def living(self, reservations: set[int]) -> set[int]:
        """Those of ``reservations`` that are still held."""
        return reservations & self._reservations.keys()

    @property
    def reservations(self) -> int:
        return len(self._reservations)

    def expire(self, now: float) -> None:
        """End reservations whose deadline passed; let a ceiling rise."""
        for reservation in [key for key, (_, deadline, _) in self._reservations.items() if deadline <= now]:
            self.give_back(reservation)
        self._rise(now)
        if self.settling_bytes:
            self.settle()

    # -- changing the budget -------------------------------------------------------------

    def resize(self, budget_bytes: int) -> None:
        """Set another budget. What is over it is not evicted here; until that is done, no more may
        be in use than is now."""
        self.budget_bytes = budget_bytes
        self.settle()

    def settle(self) -> None:
        """Note how far what is in use has come down to the budget."""
        self.settling_bytes = self.used_bytes if self.used_bytes > self.budget_bytes else 0
        self.peak_bytes = self.used_bytes

    def cap(self, ceiling_bytes: int, now: float) -> None:
        """Use no more than this for a while, though the budget allows it."""
        self._ceiling = (max(0, ceiling_bytes), now + CEILING_HOLD_S)

    def _rise(self, now: float) -> None:
        if self._ceiling is None or now <= self._ceiling[1]:
            return
        ceiling, since = self._ceiling
        # Asked often, it rises by nothing each time: then it is still counted from before.
        if risen := int(self.budget_bytes * (now - since) / CEILING_RISE_S):
            self._ceiling = (ceiling + risen, now) if ceiling + risen < self.budget_bytes else None
