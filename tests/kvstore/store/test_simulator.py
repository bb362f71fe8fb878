"""The replay of traces against models that are slow and plain: lists, searched from end to end."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import simulator  # noqa: E402

Prompt = Sequence[int]
TRACE = [[1, 2, 3], [1, 2, 4], [5, 6], [1, 2, 3], [5, 6, 7], [8], [1, 2, 4], [5, 9], [1, 2, 3, 10], [8], [5, 6, 7]]


def trace(rng: random.Random, prompts: int) -> list[Prompt]:
    """Prompts that go on from earlier ones; a block number names its whole prefix."""
    names: dict[tuple[int, ...], int] = {}
    found: list[Prompt] = []
    for _ in range(prompts):
        words = [rng.randint(0, 2) for _ in range(rng.randint(1, 4))]
        found.append([names.setdefault(tuple(words[: at + 1]), len(names)) for at in range(len(words))])
    return found


def brute_lru(prompts: Sequence[Prompt], capacity: int) -> int:
    """Blocks found: a list, newest last, the deepest block of a prompt before the others. No prompt is
    longer than ``capacity``."""
    order: list[int] = []
    hits = 0
    for prompt in prompts:
        held = 0
        while held < len(prompt) and prompt[held] in order:
            held += 1
        hits += held
        order = [*(block for block in order if block not in prompt), *reversed(prompt)][-capacity:]
    return hits


def brute_gdsf(prompts: Sequence[Prompt], capacity: int) -> int:
    """Blocks found: rank = clock + uses, the lowest goes, of equals the one used longest ago, and
    none on which another is built."""
    held: dict[int, tuple[float, int, int | None]] = {}
    uses: dict[int, int] = {}
    clock, turn, hits = 0.0, 0, 0
    for prompt in prompts:
        found = 0
        while found < len(prompt) and prompt[found] in held:
            found += 1
        hits += found
        for at in range(found - 1, -1, -1):
            turn += 1
            uses[prompt[at]] += 1
            held[prompt[at]] = (clock + uses[prompt[at]], turn, held[prompt[at]][2])
        while len(held) + len(prompt) - found > capacity:
            parents = {parent for _, _, parent in held.values()}
            leaves = [block for block in held if block not in parents and block not in prompt]
            if not leaves:
                break
            victim = min(leaves, key=lambda block: held[block][:2])
            clock = max(clock, held[victim][0])
            del held[victim]
        for at in range(len(prompt) - 1, found - 1, -1):
            turn += 1
            uses[prompt[at]] = 1
            held[prompt[at]] = (clock + 1, turn, prompt[at - 1] if at else None)
    return hits


def replayed(cache: simulator.Cache, prompts: Sequence[Prompt]) -> int:
    return round(simulator.replay(cache, prompts) * sum(map(len, prompts)))


@pytest.mark.parametrize("seed", range(40))
def test_lru_and_gdsf_are_those_of_plain_lists(seed: int) -> None:
    prompts = trace(random.Random(seed), 40)
    for capacity in (4, 6, 9, 15, 1000):
        assert replayed(simulator.Ranked(capacity, "lru"), prompts) == brute_lru(prompts, capacity)
        # Where no leaf outranks what it is built on the two agree whatever a plan reads first.
        assert replayed(simulator.Ranked(capacity, "gdsf"), prompts) == brute_gdsf(prompts, capacity)


def test_belady_is_the_best_of_all_choices() -> None:
    """Every set of blocks that could be kept after every prompt, tried."""
    for capacity in (2, 3, 4):
        best: dict[frozenset[int], int] = {frozenset(): 0}
        for prompt in TRACE:
            after: dict[frozenset[int], int] = {}
            for held, hits in best.items():
                found = 0
                while found < len(prompt) and prompt[found] in held:
                    found += 1
                room = held | set(prompt)
                for kept in combinations(sorted(room), min(capacity, len(room))):
                    key = frozenset(kept)
                    after[key] = max(after.get(key, 0), hits + found)
            best = after
        top = max(best.values())
        mine = replayed(simulator.Belady(capacity, TRACE), TRACE)
        # It does not know that a block is of use only with all before it.
        assert top - 3 <= mine <= top


@pytest.mark.parametrize("make", [simulator.Fifo, simulator.Lfu, simulator.Sieve, simulator.S3Fifo])
def test_every_cache_finds_all_that_came_before_when_nothing_must_go(make: type[simulator.Cache]) -> None:
    prompts = trace(random.Random(3), 60)
    seen: set[int] = set()
    expected = 0
    for prompt in prompts:
        expected += sum(block in seen for block in prompt)
        seen.update(prompt)
    caches = [make(10_000), simulator.Ranked(10_000, "gdsf"), simulator.Belady(10_000, prompts)]
    caches += [simulator.Segments(10_000, policy) for policy in ("lru", "gdsf")]
    for cache in caches:
        assert replayed(cache, prompts) == expected


def test_no_cache_holds_more_than_its_capacity() -> None:
    prompts = trace(random.Random(5), 200)
    for capacity in (1, 3, 7):
        segments = simulator.Segments(capacity, "gdsf")
        ranked = simulator.Ranked(capacity, "gdsf")
        for prompt in prompts:
            segments.ask(prompt)
            ranked.ask(prompt)
            assert segments.used <= capacity and len(ranked._order) <= capacity
