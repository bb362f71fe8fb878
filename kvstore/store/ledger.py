"""The warm budget as a ledger: who holds how many bytes of shared memory right now.

Budget = resident + reserved uploads + promotions under way. It is checked before anything is
allocated. Bytes evicted while a client still mapped them are a gauge beside it (``lent``).
"""

from __future__ import annotations

from dataclasses import dataclass


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
    lent_bytes: int = 0
    peak_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.resident_bytes + self.reserved_bytes + self.promoting_bytes

    def excess_bytes(self, wanted_bytes: int) -> int:
        """How far ``wanted_bytes`` more would go over the budget; 0 when they fit."""
        return max(0, self.used_bytes + wanted_bytes - self.budget_bytes)

    @property
    def full_of_entries(self) -> bool:
        return self.resident_entries + self.promoting_entries >= self.budget_entries

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
