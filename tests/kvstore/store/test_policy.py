"""Eviction plans over random forests: leaves first, enough, no more than needed, in order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from warmkv.kvstore.store.policy import Candidate, overfull, plan_above_floors, plan_eviction


def forest(rng: random.Random, count: int) -> list[Candidate[int]]:
    """Records of random sizes, in random order of use, some kept, each under an earlier one or none."""
    parents = [rng.choice([None, *range(at)]) if rng.random() < 0.7 else None for at in range(count)]
    children = [parents.count(at) for at in range(count)]
    found = [
        Candidate(at, parents[at], rng.randint(1, 9), children[at], rng.random() < 0.15) for at in range(count)
    ]  # fmt: skip
    rng.shuffle(found)
    return found


def evictable(candidates: list[Candidate[int]]) -> set[int]:
    """All that could go at most: not kept, and nothing kept builds on it."""
    gone: set[int] = set()
    for item in sorted(candidates, key=lambda item: -item.key):
        below = {other.key for other in candidates if other.parent == item.key}
        if not item.keep and below <= gone:
            gone.add(item.key)
    return gone


@pytest.mark.parametrize("seed", range(5))
def test_plan_is_sound_and_complete(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        candidates = forest(rng, rng.randint(0, 12))
        by_key = {item.key: item for item in candidates}
        possible = sum(by_key[key].total_bytes for key in evictable(candidates))
        needed = rng.randint(-2, 45)
        victims = plan_eviction(iter(candidates), needed)
        if victims is None:
            assert possible < needed
            continue
        assert possible >= needed
        gone: set[int] = set()
        for key in victims:
            assert not by_key[key].keep
            assert {item.key for item in candidates if item.parent == key} <= gone, "a parent went before its child"
            gone.add(key)
        assert len(gone) == len(victims)
        freed = sum(by_key[key].total_bytes for key in victims)
        assert freed >= needed
        assert not victims or freed - by_key[victims[-1]].total_bytes < needed, "one victim more than needed"


def test_worst_first_among_leaves() -> None:
    order = [Candidate(name, None, 1, 0, False) for name in "abc"]
    assert plan_eviction(order, 2) == ["a", "b"]


def test_parent_waits_for_its_children() -> None:
    order = [Candidate("p", None, 5, 2, False), Candidate("x", "p", 1, 0, False), Candidate("y", "p", 1, 0, False)]
    assert plan_eviction(order, 1) == ["x"]
    assert plan_eviction(order, 3) == ["x", "y", "p"]
    assert plan_eviction([*order[:2], Candidate("y", "p", 1, 0, True)], 2) is None


def test_order_is_read_no_further_than_needed() -> None:
    def order() -> Iterator[Candidate[str]]:
        yield Candidate("a", None, 5, 0, False)
        raise AssertionError("read too far")

    assert plan_eviction(order(), 5) == ["a"]
    assert plan_eviction(order(), 0) == []


@pytest.mark.parametrize("seed", range(3))
def test_partial_plan_is_all_that_can_go(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        candidates = forest(rng, rng.randint(0, 12))
        assert set(plan_eviction(iter(candidates), 10**9, partial=True) or ()) == evictable(candidates)


@pytest.mark.parametrize("seed", range(3))
def test_plan_takes_the_worst_that_has_nothing_below_it(seed: int) -> None:
    """Brute force: as long as too little is free, of all leaves that may go the first in the order goes."""
    rng = random.Random(seed)
    for _ in range(300):
        candidates = forest(rng, rng.randint(1, 12))
        needed = rng.randint(1, 30)
        left, freed, expected, front = list(candidates), 0, [], 0
        while freed < needed:
            # Among what the plan has read so far; it reads on only where nothing of that can go.
            ready = [
                at for at, item in enumerate(left[:front]) if not item.keep and not any(o.parent == item.key for o in left)
            ]  # fmt: skip
            if not ready:
                if front >= len(left):
                    break
                front += 1
                continue
            victim = left.pop(ready[0])
            front -= 1
            expected.append(victim.key)
            freed += victim.total_bytes
        assert plan_eviction(iter(candidates), needed, partial=True) == expected


def test_nobody_is_brought_below_its_floor_while_others_have_more() -> None:
    order = [Candidate(name, None, 4, 0, False, name[0]) for name in ("a1", "a2", "a3", "b1", "b2")]
    assert plan_above_floors(lambda: order, 8, {"a": 4, "b": 8}) == ["a1", "b1"]
    assert plan_above_floors(lambda: order, 12, {"a": 4, "b": 8}) == ["a1", "b1", "b2"]
    # All are at their floors: then the order alone decides.
    assert plan_above_floors(lambda: order, 8, {"a": 0, "b": 0}) == ["a1", "a2"]
    assert plan_above_floors(lambda: order, 8, None) == ["a1", "a2"]


def test_watermarks_have_hysteresis() -> None:
    used, seen = 0, []
    for _ in range(30):
        used += 7
        freed = overfull(used, 100, 0.9, 0.6)
        used -= freed
        seen.append(freed)
    assert used <= 90
    for freed in seen:
        assert freed == 0 or freed > 30, "between the marks nothing goes, above the high one all down to the low one"
    assert overfull(90, 100, 0.9, 0.6) == 0 and overfull(91, 100, 0.9, 0.6) == 31
    assert overfull(5, 0, 0.9, 0.6) == 5
