"""Rankings: in which order a tier would let its records go, kept up to date and read lazily.

A ranking answers "worst first" without sorting what it holds: only as far as a plan reads is
anything looked at. `Recency` is LRU. `Worth` is GDSF (greedy dual size frequency): a key ranks
at ``clock`` + worth, its worth being frequency x cost / size; the clock rises to what the victim
ranked at, so that what nobody asks for ages however dear it once was.

**Source:** L. Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency
caching policy", HP Labs, 1998.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Ranking(ABC, Generic[K]):
    """What a tier holds, in the order of a policy. Of keys that rank alike the one used longest
    ago goes first.

    **Threading:** the caller holds one lock around every call, and around reading `worst_first`."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[K]:
        """Every key, in no order that means anything."""

    @abstractmethod
    def use(self, key: K, least: float = 0.0) -> float:
        """The key is entered, or was used; what it is worth is asked for anew. Where it ranks, which
        is at ``least`` there: no key goes before one that builds on it."""

    @abstractmethod
    def leave(self, key: K) -> None:
        """The key is held no more; one that is not held is ignored."""

    @abstractmethod
    def age(self, victim: K) -> None:
        """The key is about to leave because of its rank."""

    @abstractmethod
    def worst_first(self) -> Iterator[K]:
        """Keys, the first to go first. The ranking must not change before the last one is read."""

    def restore(self, keys: Iterable[K]) -> None:
        """Rank these, all there are, as after a life in which they were used in this order."""
        for key in keys:
            self.use(key)


class Recency(Ranking[K]):
    """Least recently used first."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[K]:
        return iter(self._order)

    def use(self, key: K, least: float = 0.0) -> float:
        self._order[key] = None
        self._order.move_to_end(key)
        return least

    def leave(self, key: K) -> None:
        self._order.pop(key, None)

    def age(self, victim: K) -> None:
        pass

    def worst_first(self) -> Iterator[K]:
        return iter(self._order)


class _Entry(Generic[K]):
    """A key where it ranks now. ``least`` is the rank under which it lies in the heap, lower where it
    was used since."""

    __slots__ = ("key", "rank", "turn", "least", "held")

    def __init__(self, key: K, rank: float, turn: int) -> None:
        self.key = key
        self.rank = self.least = rank
        self.turn = turn
        self.held = True


class Worth(Ranking[K]):
    """GDSF. ``worth`` tells what a key's frequency x cost / size is now.

    The heap is lazy: using a key notes where it ranks from now on, in constant time; a plan that
    comes upon its old place puts it where it belongs. A rank only falls where a key becomes worth
    less; then it gets a new place at once."""

    def __init__(self, worth: Callable[[K], float]) -> None:
        self.clock = 0.0
        self._worth = worth
        self._turn = 0
        self._entries: dict[K, _Entry[K]] = {}
        #: By rank, then turn, which no two share.
        self._heap: list[tuple[float, int, _Entry[K]]] = []
        #: Taken off the heap by the plan that reads, or read last; they go back before the next one.
        self._read: list[tuple[float, int, _Entry[K]]] = []

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def use(self, key: K, least: float = 0.0) -> float:
        self._turn += 1
        rank, entry = max(least, self.clock + self._worth(key)), self._entries.get(key)
        if entry is not None and rank >= entry.least:
            entry.rank, entry.turn = rank, self._turn
            return rank
        if entry is not None:
            entry.held = False
        self._entries[key] = entry = _Entry(key, rank, self._turn)
        heapq.heappush(self._heap, (rank, self._turn, entry))
        return rank

    def leave(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.held = False
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._heap = [item for item in self._heap if item[2].held]
                heapq.heapify(self._heap)

    def age(self, victim: K) -> None:
        self.clock = max(self.clock, self._entries[victim].rank)

    def worst_first(self) -> Iterator[K]:
        for item in self._read:
            heapq.heappush(self._heap, item)
        self._read = []
        while self._heap:
            _, turn, entry = self._heap[0]
            if not entry.held:
                heapq.heappop(self._heap)
            elif turn != entry.turn:
                entry.least = entry.rank
                heapq.heapreplace(self._heap, (entry.rank, entry.turn, entry))
            else:
                self._read.append(heapq.heappop(self._heap))
                yield entry.key

    def restore(self, keys: Iterable[K]) -> None:
        """What a key ranked at is not kept from one life to the next, when it was used is. A cache
        that is full turns over once while the clock rises by what its keys are worth on average: so
        the first of them is ranked as used at clock 0, the last as used when it had risen by that."""
        ordered = list(keys)
        worths = [self._worth(key) for key in ordered]
        risen = sum(worths) / max(1, len(worths))
        self._entries, self._heap, self._read = {}, [], []
        for number, (key, worth) in enumerate(zip(ordered, worths, strict=True), 1):
            self._turn += 1
            self._entries[key] = entry = _Entry(key, self.clock + risen * number / len(ordered) + worth, self._turn)
            self._heap.append((entry.rank, entry.turn, entry))
        heapq.heapify(self._heap)
        self.clock += risen
