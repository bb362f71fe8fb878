"""Rankings against models that sort everything: the same order, read lazily and in any mixture."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.kvstore.store.policy import ranking
from warmkv.kvstore.store.ranking import Worth


class Model:
    """The definition of a policy over a plain dict: (rank, turn) of every key, sorted each time."""

    def __init__(self, policy: str, worth: dict[int, float]) -> None:
        self.gdsf = policy == "gdsf"
        self.worth = worth
        self.clock = 0.0
        self.turns = itertools.count()
        self.held: dict[int, tuple[float, int]] = {}

    def use(self, key: int, least: float) -> None:
        self.held[key] = (max(least, self.clock + self.worth[key]) if self.gdsf else 0.0, next(self.turns))

    def leave(self, key: int) -> None:
        self.held.pop(key, None)

    def age(self, key: int) -> None:
        self.clock = max(self.clock, self.held[key][0])

    def order(self) -> list[int]:
        return sorted(self.held, key=self.held.__getitem__)


STEP = st.tuples(st.sampled_from(["use", "use", "use", "leave", "evict", "read", "worth"]), st.integers(0, 7), st.integers(0, 20))


@pytest.mark.parametrize("policy", ["lru", "gdsf"])
@given(steps=st.lists(STEP, max_size=80))
def test_ranking_is_that_of_its_definition(policy: str, steps: list[tuple[str, int, int]]) -> None:
    worth = {key: float(key % 3) for key in range(8)}
    tested, model = ranking(policy, lambda key: worth[key]), Model(policy, worth)
    for verb, key, number in steps:
        if verb == "use":
            least = float(number) if number > 15 else 0.0
            assert tested.use(key, least) >= least
            model.use(key, least)
        elif verb == "leave":
            tested.leave(key)
            model.leave(key)
        elif verb == "worth":
            worth[key] = float(number)
        elif verb == "read":
            # A plan that stops early leaves the order as it was.
            assert list(itertools.islice(tested.worst_first(), number)) == model.order()[:number]
        else:
            for victim in list(itertools.islice(tested.worst_first(), 1 + key % 3)):
                tested.age(victim)
                tested.leave(victim)
            for victim in model.order()[: 1 + key % 3]:
                model.age(victim)
                model.leave(victim)
        assert set(tested) == set(model.held) and len(tested) == len(model.held)
        assert all((at in tested) == (at in model.held) for at in range(8))
    assert list(tested.worst_first()) == model.order()


def test_clock_rises_to_the_victim_and_what_was_dear_once_goes_at_last() -> None:
    worth = {"dear": 10.0, **{f"cheap {at}": 1.0 for at in range(20)}}
    order: Worth[str] = Worth(lambda key: worth[key])
    order.use("dear")
    gone = []
    for at in range(20):
        order.use(f"cheap {at}")
        victim = next(order.worst_first())
        order.age(victim)
        order.leave(victim)
        gone.append(victim)
    # Each cheap one that goes lifts the clock by one: the tenth ranks where the dear one does, which
    # was used before it.
    assert gone.index("dear") == 9
    assert order.clock > 10


def test_an_order_is_not_sorted_to_be_read() -> None:
    compared = 0

    class Key(int):
        pass

    keys = [Key(at) for at in range(4096)]
    random.Random(1).shuffle(keys)

    def worth(key: Key) -> float:
        nonlocal compared
        compared += 1
        return float(key)

    order: Worth[Key] = Worth(worth)
    for key in keys:
        order.use(key)
    for key in keys[:2048]:
        order.use(key)
    asked = compared
    assert list(itertools.islice(order.worst_first(), 3)) == [0, 1, 2]
    assert compared == asked, "reading asked what keys are worth"
    assert len(order._read) == 3, "more was taken off the heap than was read"


def test_restored_order_keeps_recency_and_frequency() -> None:
    worth = {"old, used often": 9.0, "old": 1.0, "middle": 1.0, "new": 1.0}
    order: Worth[str] = Worth(lambda key: worth[key])
    order.restore(["old", "old, used often", "middle", "new"])
    assert list(order.worst_first()) == ["old", "middle", "new", "old, used often"]
    order.use("old")
    assert next(order.worst_first()) == "middle", "what is used now ranks before what was used in another life"


def test_the_heap_does_not_grow_with_what_left() -> None:
    order: Worth[int] = Worth(lambda key: 1.0)
    for key in range(10_000):
        order.use(key)
        order.leave(key - 10)
    assert len(order) == 10 and len(order._heap) < 200
