"""Lengths of a cache whose newest rows may still be taken back: what is committed, what is staged beyond it.

One transaction is open at a time. Rows are staged behind the committed length, and committing keeps a
prefix of them: a draft of which so many tokens were accepted. These are values: every change comes back
as another one, so that it can be decided first and made true once every rank has done its part
(`ledger.Ledger`).

**Source:** the transactions of the memra engine over tensor-parallel ranks. Unlike there a rewind never goes
forward: what was not staged was never written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warmkv.kvstore.live.rings import check_count
from warmkv.schema.errors import CapacityExceeded, TransactionError

#: Generations are counted in 64 bits; this one is never given to a transaction.
LAST_GENERATION = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Transaction:
    """What names an open transaction: its number, which no other of the cache has, and the committed length
    it began at."""

    generation: int
    base: int


@dataclass(frozen=True, slots=True)
class TransactionState:
    """``committed`` rows are there for good, ``staged`` (never fewer) are written. ``active`` is the open
    transaction, None between two: then both lengths are equal."""

    committed: int = 0
    staged: int = 0
    next_generation: int = 1
    active: Transaction | None = None

    @property
    def quiescent(self) -> bool:
        """Whether nothing is open and nothing is left half done."""
        return self.active is None and self.staged == self.committed

    def begun(self) -> TransactionState:
        """With a transaction open at the committed length. Raises TransactionError where one is open, where
        rows are staged by none, or where generations are used up."""
        if self.active is not None:
            raise TransactionError(f"{_named(self.active)} is still open")
        if self.staged != self.committed:
            raise TransactionError(f"{self.staged} rows staged by no transaction, {self.committed} committed")
        if not 1 <= self.next_generation < LAST_GENERATION:
            raise TransactionError(f"generation {self.next_generation}, expected 1 to {LAST_GENERATION - 1}")
        opened = Transaction(self.next_generation, self.committed)
        return replace(self, next_generation=self.next_generation + 1, active=opened)

    def check(self, transaction: Transaction) -> None:
        """Raises TransactionError unless ``transaction`` is the open one, begun at the committed length."""
        if self.active is None or self.active != transaction:
            found = "none is open" if self.active is None else f"{_named(self.active)} is open"
            raise TransactionError(f"{_named(transaction)}: {found}")
        if transaction.base != self.committed:
            raise TransactionError(f"{_named(transaction)}: the committed length is {self.committed}")

    def append_target(self, transaction: Transaction, count: int, capacity: int) -> int:
        """The staged length after ``count`` (at least 1) more rows. Raises TransactionError where the
        transaction is not the open one, RecordError for the count, CapacityExceeded."""
        self.check(transaction)
        check_count("rows to append", count, least=1)
        if self.staged + count > capacity:
            raise CapacityExceeded(f"{self.staged} rows and {count} new ones, expected at most {capacity}")
        return self.staged + count

    def appended(self, transaction: Transaction, target: int) -> TransactionState:
        """With rows staged up to ``target``. Raises TransactionError."""
        self.check(transaction)
        if target <= self.staged:
            raise TransactionError(f"{_named(transaction)}: rows up to {target}, {self.staged} are staged already")
        return replace(self, staged=target)

    def commit_target(self, transaction: Transaction, accepted: int) -> int:
        """The committed length if the first ``accepted`` rows of the transaction stay: 0 is a rollback.
        Raises TransactionError."""
        self.check(transaction)
        check_count("accepted rows", accepted)
        if accepted > self.staged - transaction.base:
            raise TransactionError(
                f"{_named(transaction)}: {accepted} rows accepted, {self.staged - transaction.base} are staged"
            )
        return transaction.base + accepted

    def finished(self, transaction: Transaction, target: int) -> TransactionState:
        """With the transaction closed at ``target``. Raises TransactionError where that is before its base
        or beyond what is staged."""
        self.check(transaction)
        if not transaction.base <= target <= self.staged:
            raise TransactionError(f"{_named(transaction)}: an end at {target}, expected {transaction.base} to {self.staged}")
        return replace(self, committed=target, staged=target, active=None)

    def rewound(self, target: int) -> TransactionState:
        """With ``target`` rows committed and no transaction: an open one is over. Raises TransactionError
        beyond what is staged."""
        check_count("length", target)
        if target > self.staged:
            raise TransactionError(f"a rewind to {target}, {self.staged} rows are there")
        return replace(self, committed=target, staged=target, active=None)

    def hydrated(self, length: int) -> TransactionState:
        """With ``length`` rows that came from elsewhere. Raises TransactionError unless nothing was ever done."""
        check_count("length", length)
        self.check_fresh()
        return replace(self, committed=length, staged=length)

    def check_fresh(self) -> None:
        """Raises TransactionError unless nothing was ever done."""
        if self != TransactionState():
            raise TransactionError(
                f"{self.committed} rows committed, {self.staged} staged, generation {self.next_generation} next; "
                "expected a fresh cache"
            )


def _named(transaction: Transaction) -> str:
    return f"transaction {transaction.generation} from {transaction.base} rows on"
