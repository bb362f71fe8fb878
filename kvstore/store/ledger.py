"""The warm budget as a ledger: who holds how many bytes of shared memory right now.

Budget = resident + reserved uploads + promotions under way + evicted under a living lease. It
is checked before anything is allocated. What is evicted after its lease ran out and may still
be mapped by a client is a gauge beside it (``lent``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Ledger:
    """**Threading:** the caller holds the index lock."""

    budget_bytes: int
    budget_entries: int
    resident_bytes: int = 0
    resident_entries: int = 0
    reserved_bytes: int = 0
    promoting_bytes: int = 0
    promoting_entries: int = 0
    leased_bytes: int = 0
    lent_bytes: int = 0
    peak_bytes: int = 0
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _reservations: dict[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def used_bytes(self) -> int:
        return self.resident_bytes + self.reserved_bytes + self.promoting_bytes + self.leased_bytes

    def excess_bytes(self, wanted_bytes: int) -> int:
        """How far ``wanted_bytes`` more would go over the budget; 0 when they fit."""
        return max(0, self.used_bytes + wanted_bytes - self.budget_bytes)

    @property
    def full_of_entries(self) -> bool:
        return self.resident_entries + self.promoting_entries >= self.budget_entries

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def reserve(self, wanted_bytes: int, deadline: float) -> int:
        """Set room that was made aside until ``deadline``; the reservation's number."""
        reservation = next(self._ids)
        self._reservations[reservation] = (wanted_bytes, deadline)
        self.reserved_bytes += wanted_bytes
        self.note_peak()
        return reservation

    def give_back(self, reservation: int) -> None:
        """End a reservation; an unknown one is ignored."""
        self.reserved_bytes -= self._reservations.pop(reservation, (0, 0.0))[0]

    def use(self, reservation: int, used_bytes: int) -> None:
        """Take from a reservation what arrived of it; an unknown one is ignored."""
        if reservation in self._reservations:
            left, deadline = self._reservations[reservation]
            used = min(left, used_bytes)
            self._reservations[reservation] = (left - used, deadline)
            self.reserved_bytes -= used

    def living(self, reservations: set[int]) -> set[int]:
        """Those of ``reservations`` that are still held."""
        return reservations & self._reservations.keys()

    def expire(self, now: float) -> None:
        """End reservations whose deadline passed."""
        for reservation in [key for key, (_, deadline) in self._reservations.items() if deadline <= now]:
            self.give_back(reservation)
