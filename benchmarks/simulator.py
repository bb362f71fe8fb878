"""Caches of a block each, and of a segment each, that a trace of prompts is replayed through.

A prompt is a list of block numbers; equal numbers are equal prefixes. A cache answers how many of
its first blocks it has, then takes all of them. `Ranked` and `Segments` run the code that evicts
in the product; the others are baselines, written to be read.
"""

from __future__ import annotations

import heapq
import os
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.store.policy import Candidate, plan_eviction, ranking
from warmkv.kvstore.testing.samples import random_identity
from warmkv.schema.records import CLEAN, NamespaceKey, RecordId

Prompt = Sequence[int]
KEY = NamespaceKey(b"benchmark/traces")


class Cache(ABC):
    """Room for ``capacity`` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def ask(self, prompt: Prompt) -> int:
        """How many of the first blocks are held; then all of the prompt is."""


def replay(cache: Cache, prompts: Sequence[Prompt]) -> float:
    """Blocks found of all asked for."""
    return sum(cache.ask(prompt) for prompt in prompts) / max(1, sum(map(len, prompts)))


class Ranked(Cache):
    """Blocks as records of a tier, with the product's rankings and plans: leaves first. A block costs
    what another does."""

    def __init__(self, capacity: int, policy: str) -> None:
        super().__init__(capacity)
        self.uses: dict[int, int] = {}
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}
        self._order = ranking(policy, lambda block: float(self.uses[block]))

    def ask(self, prompt: Prompt) -> int:
        held = 0
        while held < len(prompt) and prompt[held] in self._order:
            held += 1
        fresh = [block for block in prompt[held:] if block not in self._order]
        for block in reversed(prompt[:held]):
            self.uses[block] += 1
            self._order.use(block)
        victims = plan_eviction(self._candidates(set(prompt)), len(self._order) + len(fresh) - self.capacity, partial=True)
        for block in victims or ():
            self._order.age(block)
            self._leave(block)
        for at in range(len(prompt) - 1, held - 1, -1):
            if len(self._order) < self.capacity or prompt[at] in self._order:
                self._enter(prompt[at], prompt[at - 1] if at else None)
        return held

    def _enter(self, block: int, parent: int | None) -> None:
        if block not in self._order:
            self.uses[block] = 1
            self._parent[block] = parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
        self._order.use(block)

    def _leave(self, block: int) -> None:
        self._order.leave(block)
        parent = self._parent.pop(block)
        if parent is not None:
            self._children[parent] -= 1

    def _candidates(self, prompt: set[int]) -> Iterator[Candidate[int]]:
        for block in self._order.worst_first():
            yield Candidate(block, self._parent[block], 1, self._children.get(block, 0), block in prompt)


class Segments(Cache):
    """What the store does: what is new of a prompt becomes one segment in the product's index, which
    ranks it by the policy; segments go whole. Nobody says what prefill costs: a token costs what
    another does."""

    def __init__(self, capacity: int, policy: str) -> None:
        super().__init__(capacity)
        self.index = Index(policy=policy)
        self.used = 0
        self._number = 0
        self._namespace = Namespace(KEY, os.getuid(), "", random_identity(), 0)

    def ask(self, prompt: Prompt) -> int:
        tokens, index = np.array(prompt, "<u4").tobytes(), self.index
        path = index.path(KEY, CLEAN, tokens, ())
        held = path.held() if path is not None else 0
        parent = path.covering(held) if path is not None and held else None
        if parent is not None:
            index.touch([parent], hit=True)
        wanted = len(prompt) - held
        chain = set(index.chain_of(parent)) if parent is not None else set()
        victims = plan_eviction(self._candidates(chain), self.used + wanted - self.capacity)
        if not wanted or victims is None:
            return held
        for record in victims:
            index.cold_order.age(record)
            index.set_cold(record, Cold.ABSENT)
            index.drop(record)
            self.used -= record.total_bytes
        self._number += 1
        id_ = RecordId(self._number.to_bytes(16, "little"))
        coverage = Coverage(((held, len(prompt)),))
        record = Record(id_, self._namespace, CLEAN, held, len(prompt), wanted, wanted, 0, "benchmark", coverage=coverage)
        index.add(record, parent, tokens, ())
        index.set_cold(record, Cold.STORED)
        index.touch([record])
        self.used += wanted
        return held

    def _candidates(self, chain: set[Record]) -> Iterator[Candidate[Record]]:
        for record in self.index.cold_order.worst_first():
            yield Candidate(record, record.parent, record.total_bytes, len(record.children), record in chain)


class Blocks(Cache):
    """A baseline that takes a block at a time, deepest last, and knows nothing of prefixes."""

    def ask(self, prompt: Prompt) -> int:
        held = 0
        while held < len(prompt) and self.has(prompt[held]):
            held += 1
        for block in prompt:
            (self.hit if self.has(block) else self.miss)(block)
        return held

    @abstractmethod
    def has(self, block: int) -> bool: ...

    @abstractmethod
    def hit(self, block: int) -> None: ...

    @abstractmethod
    def miss(self, block: int) -> None: ...


class Fifo(Blocks):
    """First in, first out."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return block in self._held

    def hit(self, block: int) -> None:
        pass

    def miss(self, block: int) -> None:
        if len(self._held) >= self.capacity:
            self._held.popitem(last=False)
        self._held[block] = None


class Lfu(Blocks):
    """Least frequently used, of those the one used longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0
        self._rank: dict[int, tuple[int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def has(self, block: int) -> bool:
        return block in self._rank

    def hit(self, block: int) -> None:
        self._place(block, self._rank[block][0] + 1)

    def miss(self, block: int) -> None:
        while len(self._rank) >= self.capacity:
            uses, turn, victim = heapq.heappop(self._heap)
            if self._rank.get(victim) == (uses, turn):
                del self._rank[victim]
        self._place(block, 1)

    def _place(self, block: int, uses: int) -> None:
        self._now += 1
        self._rank[block] = (uses, self._now)
        heapq.heappush(self._heap, (uses, self._now, block))


class Sieve(Blocks):
    """FIFO with a visited bit and a hand that spares what was visited, once.

    **Source:** Zhang et al., "SIEVE is simpler than LRU", NSDI 2024."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._visited: OrderedDict[int, bool] = OrderedDict()
        self._newer: dict[int, int] = {}
        self._last = self._hand = -1

    def has(self, block: int) -> bool:
        return block in self._visited

    def hit(self, block: int) -> None:
        self._visited[block] = True

    def miss(self, block: int) -> None:
        if len(self._visited) >= self.capacity:
            self._evict()
        self._visited[block] = False
        self._newer[self._last] = block
        self._last = block

    def _evict(self) -> None:
        """``_newer`` links each block ever entered to the next one; those gone are skipped."""
        while True:
            before, block = self._hand, self._newer.get(self._hand)
            if block is None:
                self._hand = -1
                continue
            self._hand = block
            if block not in self._visited:
                continue
            if not self._visited[block]:
                del self._visited[block]
                self._newer[before] = self._newer.get(block, self._newer.get(before, block))
                self._hand = before
                if self._last == block:
                    self._last = before
                    self._newer.pop(before, None)
                return
            self._visited[block] = False


class S3Fifo(Blocks):
    """A small queue for what is new, a main one for what came again, and a list of what went.

    **Source:** Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_size = max(1, capacity // 10)
        self._uses: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return block in self._uses

    def hit(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)

    def miss(self, block: int) -> None:
        while len(self._uses) >= self.capacity:
            (self._shrink_small if len(self._small) >= self._small_size or not self._main else self._shrink_main)()
        known = self._ghost.pop(block, 0) is None
        (self._main if known else self._small).append(block)
        self._uses[block] = 0

    def _shrink_small(self) -> None:
        block = self._small.popleft()
        if self._uses[block] > 1:
            self._uses[block] = 0
            self._main.append(block)
            return
        del self._uses[block]
        self._ghost[block] = None
        if len(self._ghost) > self.capacity - self._small_size:
            self._ghost.popitem(last=False)

    def _shrink_main(self) -> None:
        block = self._main.popleft()
        if self._uses[block]:
            self._uses[block] -= 1
            self._main.append(block)
        else:
            del self._uses[block]


class Belady(Cache):
    """Keeps the blocks asked for again soonest, which only a replay can know: the bound."""

    def __init__(self, capacity: int, prompts: Sequence[Prompt]) -> None:
        super().__init__(capacity)
        self._next: list[list[int]] = []
        later: dict[int, int] = {}
        for number in range(len(prompts) - 1, -1, -1):
            self._next.append([later.get(block, len(prompts)) for block in prompts[number]])
            later.update(dict.fromkeys(prompts[number], number))
        self._due: dict[int, int] = {}
        self._heap: list[tuple[int, int]] = []
        self._last = len(prompts)

    def ask(self, prompt: Prompt) -> int:
        held = 0
        while held < len(prompt) and prompt[held] in self._due:
            held += 1
        for block, due in zip(prompt, self._next.pop(), strict=True):
            self._due[block] = due
            heapq.heappush(self._heap, (-due, block))
        while len(self._due) > self.capacity:
            due, block = heapq.heappop(self._heap)
            if self._due.get(block) == -due:
                del self._due[block]
        return held
