"""Random walks of a cache over two ranks, with rings small enough to be left behind often, and with devices that fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranked import HYBRID, ROWS, Faults, Twin

from warmkv.kvstore.live import rings
from warmkv.kvstore.live.plan import ModelPlan


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "PRIME_ROWS", 24)
    monkeypatch.setattr(rings, "REWIND_SLACK_ROWS", 16)


def step_of(twin: Twin) -> Callable[[], str]:
    """One of all that may be done now, or is to be refused."""
    rng = twin.rng
    chance, count = rng.random(), int(rng.integers(1, 25 if rng.random() < 0.4 else 6))
    if twin.due and chance < 0.6:
        return twin.replay
    if twin.active is None and twin.committed > 400 and rng.random() < 0.3:
        return twin.clear
    if chance < 0.28:
        return twin.begin
    if chance < 0.62:
        upto = int(rng.integers(0, len(twin.of_rows))) if rng.random() < 0.05 else None
        return lambda: twin.stage(count, upto)
    if chance < 0.80:
        drafted = twin.staged - twin.committed
        accepted = None if rng.random() < 0.4 else int(rng.integers(0, drafted + 1))
        return lambda: twin.commit(accepted)
    if chance < 0.86:
        return twin.rollback
    if chance < 0.95:
        return lambda: twin.rewind(max(0, twin.staged - int(rng.integers(-1, 60))))
    if chance < 0.96:
        return lambda: twin.grow(twin.capacity + int(rng.integers(-2, 60)))
    if chance < 0.965 and twin.active is None:
        return twin.clear
    return lambda: twin.hydrate(int(rng.integers(0, twin.capacity + 1)), int(rng.integers(0, 30)))


def renewed(twin: Twin) -> None:
    """Caches of the first size again, for growth is for good."""
    twin.cache.free()
    twin.capacity, twin.began = 160, 0
    twin.stale.clear()
    Twin.__post_init__(twin)


def walk(plan: ModelPlan, steps: int, seed: int, *, fault_every: float = 0.0) -> Twin:
    twin = Twin(plan, np.random.default_rng(seed), faults=Faults())
    for step in range(steps):
        if twin.capacity > 700:
            renewed(twin)
        if twin.rng.random() < fault_every:
            twin.faults.arm(int(twin.rng.integers(0, 24)), late=bool(twin.rng.integers(2)), more=int(twin.rng.integers(2)))
        twin.attempt(step_of(twin))
        twin.faults.disarm()
        if twin.did_something or step % 5 == 0:
            twin.check(newest=40 if step % 20 else None)
    return twin


def test_a_walk_never_shows_what_was_not_committed_or_staged() -> None:
    seen = walk(ROWS, 10_000, 1).seen
    for what in (
        "begin", "begin refused", "stage", "stage refused", "no room", "half a round", "commit", "commit a part", "rollback",
        "stale", "rewind", "no rewind: a ring", "no rewind forward", "grow", "grow refused", "clear", "hydrate",
        "hydrate refused",
    ):  # fmt: skip
        assert seen[what] > 10, (what, seen)
    assert not seen["fault"]


@pytest.mark.parametrize("plan, steps", [(ROWS, 2000), (HYBRID, 2000)])
def test_a_walk_over_devices_that_fail_goes_on_from_the_committed_length(plan: ModelPlan, steps: int) -> None:
    seen = walk(plan, steps, 2, fault_every=0.5).seen
    assert seen["fault"] > 100, seen
    if plan is HYBRID:
        assert seen["replay"] > 10 and seen["no rewind: a state"] > 10, seen
