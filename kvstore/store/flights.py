"""Computations under way: the first of several agents with one prompt computes, the others wait.

A flight is a promise of one session to compute what the store lacks of a prompt. Whoever asks
to wait, and shares more with a flight than the store could give, waits until that much is
there, the flight ends, or its own patience does. A flight ends like a lease: released, with its
session, or when its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmkv.kvstore.store.index import Index
from warmkv.kvstore.store.radix import WIDTH, common_tokens
from warmkv.schema.records import Attachment, Lineage, NamespaceKey

MAX_FLIGHTS = 256
#: Of one model's prompts; a model has one owner.
MAX_NAMESPACE_FLIGHTS = 64
#: Tokens kept of all flights together; beyond that a prompt is computed without telling others.
MAX_FLIGHT_BYTES = 64 << 20
#: Longest anybody is kept waiting, whatever they ask for.
MAX_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class _Flight:
    key: NamespaceKey
    lineage: Lineage
    tokens: bytes
    attachments: tuple[Attachment, ...]
    deadline: float


class Flights:
    """**Threading:** `join` and `end` want the index lock held; `join` waits with it given up."""

    def __init__(self, index: Index, ttl_s: float, clock: Callable[[], float]) -> None:
        self.started = 0
        self.waits = 0
        self.waiting = 0
        self._index = index
        self._ttl_s = ttl_s
        self._clock = clock
        self._flights: dict[int, _Flight] = {}
        self._interruptions = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._flights)

    def join(
        self, flight: int, key: NamespaceKey, lineage: Lineage, tokens: bytes, attachments: Sequence[Attachment],
        wait_s: float, usable: Callable[[], int], limit: int = 0,
    ) -> tuple[bool, float]:  # fmt: skip
        """Wait for twins as long as that promises more than ``usable()`` tokens, up to ``limit`` if
        that is given, and for at most ``wait_s``. Returns whether ``flight`` was entered as the promise to compute the rest, and
        the seconds waited.

        A twin that ended without leaving more is not waited for again, nor is another: what it
        shares with this prompt cannot be resumed from, and agents must not queue up for that."""
        began = self._clock()
        deadline = began + min(wait_s, MAX_WAIT_S)
        mine = tuple(attachments)
        most = len(tokens) // WIDTH - 1
        most = min(most, limit) if limit else most
        have, patient = usable(), True
        interruptions = self._interruptions
        while have < most and self._interruptions == interruptions and not self._closed:
            twin, shared = self._nearest(key, lineage, tokens, mine)
            if twin is None or min(shared, most) <= have or not patient or self._clock() >= deadline:
                return self._enter(
                    flight, _Flight(key, lineage, tokens, mine, self._clock() + self._ttl_s)
                ), self._clock() - began
            before = have
            have = self._await(twin, min(shared, most), deadline, usable)
            patient = have > before
        return False, self._clock() - began

    def end(self, flight: int) -> None:
        """End a flight; an unknown one is ignored. The caller notifies ``Index.changed``."""
        self._flights.pop(flight, None)

    def interrupt(self, *, close: bool = False) -> None:
        """Let everybody who waits now go on; with ``close`` nobody waits from now on."""
        with self._index.changed:
            self._interruptions += 1
            self._closed |= close
            self._index.changed.notify_all()

    def _await(self, twin: int, shared: int, deadline: float, usable: Callable[[], int]) -> int:
        """Until ``shared`` tokens are usable or the twin's flight is over; usable then."""
        self.waits += 1
        self.waiting += 1
        interruptions = self._interruptions
        try:
            while True:
                have = usable()
                now = self._clock()
                flight = self._flights.get(twin)
                if have >= shared or flight is None or now >= deadline or self._interruptions != interruptions:
                    return have
                if now >= flight.deadline:
                    self.end(twin)
                    return have
                self._index.changed.wait(min(deadline, flight.deadline) - now)
        finally:
            self.waiting -= 1

    def _enter(self, flight: int, about: _Flight) -> bool:
        # A copy: the garbage collector may end a flight in the middle of a loop.
        now = self._clock()
        for number, item in list(self._flights.items()):
            if item.deadline <= now:
                self.end(number)
        held = sum(len(item.tokens) for item in list(self._flights.values()))
        ours = sum(item.key == about.key for item in list(self._flights.values()))
        if len(self._flights) >= MAX_FLIGHTS or ours >= MAX_NAMESPACE_FLIGHTS or held + len(about.tokens) > MAX_FLIGHT_BYTES:
            return False
        self._flights[flight] = about
        self.started += 1
        return True

    def _nearest(
        self, key: NamespaceKey, lineage: Lineage, tokens: bytes, attachments: tuple[Attachment, ...]
    ) -> tuple[int | None, int]:
        """The flight that shares most with a prompt, and how many tokens."""
        best, most = None, 0
        for number, item in list(self._flights.items()):
            if item.key == key and item.lineage == lineage:
                shared = common_tokens(tokens, 0, len(tokens), item.tokens)
                shared = _before_difference(shared, attachments, item.attachments)
                if shared > most:
                    best, most = number, shared
        return best, most


def _before_difference(shared: int, ours: tuple[Attachment, ...], theirs: tuple[Attachment, ...]) -> int:
    """``shared`` cut before the first attachment that only one side has."""
    differing = set(ours) ^ set(theirs)
    return min((item.start for item in differing if item.start < shared), default=shared)
