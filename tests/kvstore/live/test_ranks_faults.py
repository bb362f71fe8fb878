"""One device of a cache over ranks fails, at every operation there is: all ranks are where they were."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranked import DELTA, F16, HYBRID, Q8, Faults, Twin, whole

from warmkv.kvstore.live import rings
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.ranks import RankedCache
from warmkv.kvstore.live.transaction import Transaction
from warmkv.schema.errors import DeviceFault, OutOfMemory, TransactionError

FLAT_AND_RINGS = ModelPlan((whole(Q8, F16), whole(F16, F16, window=6), whole(F16, F16, window=6)))
EACH_KIND = ModelPlan((whole(F16, F16), whole(F16, F16, window=6), DELTA))


@pytest.fixture(autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "PRIME_ROWS", 24)
    monkeypatch.setattr(rings, "REWIND_SLACK_ROWS", 16)


def session(twin: Twin) -> list[Callable[[], str]]:
    """The third stage moves the rings."""
    return [
        lambda: twin.hydrate(62, 5), twin.begin, lambda: twin.stage(24), twin.commit, twin.begin, lambda: twin.stage(10),
        lambda: twin.stage(15), lambda: twin.commit(12), twin.replay,
        twin.begin, lambda: twin.stage(3, 1), twin.begin, lambda: twin.stage(2), lambda: twin.rewind(twin.committed + 1),
        twin.replay, lambda: twin.grow(twin.capacity + 30), twin.begin, lambda: twin.stage(1), twin.commit,
        lambda: twin.rewind(max(0, twin.committed - 1)), twin.clear,
    ]  # fmt: skip


def goes_on(twin: Twin) -> None:
    """As if nothing had happened."""
    while twin.due:
        twin.replay()
    for step in (twin.rollback, twin.begin, lambda: twin.stage(4), twin.commit):
        step()
    twin.check()
    assert twin.committed >= 4


@pytest.mark.parametrize("late, every", [(False, 1), (True, 3)])
def test_a_fault_at_any_operation_leaves_all_ranks_as_they_were(late: bool, every: int) -> None:
    seen: set[str] = set()
    for at in range(0, 10_000, every):
        twin = Twin(EACH_KIND, np.random.default_rng(5), capacity=160, faults=Faults())
        twin.faults.arm(at, late=late)
        for step in session(twin):
            twin.attempt(step)
        twin.check()
        seen |= twin.seen.keys()
        if not twin.faults.fired:
            break
        goes_on(twin)
    assert at > 150 and {"fault", "stage", "commit", "commit a part", "half a round", "replay", "rewind", "grow"} <= seen


@pytest.mark.parametrize("ending", ["commit a part", "rollback", "rewind"])
def test_a_device_that_fails_again_on_the_way_back_is_asked_once_more(ending: str) -> None:
    twin = Twin(EACH_KIND, np.random.default_rng(8), capacity=400, faults=Faults())
    twin.hydrate(40, 5)
    ends = {"commit a part": lambda: twin.commit(1), "rollback": twin.rollback, "rewind": lambda: twin.rewind(twin.committed + 1)}
    for at in range(100):
        while twin.due:
            twin.replay()
        twin.begin()
        twin.stage(2)
        twin.faults.arm(at, more=1)
        done = twin.attempt(ends[ending])
        twin.faults.disarm()
        twin.check()
        if done:
            break
    assert at > 5
    goes_on(twin)


def everything(cache: RankedCache, opened: Transaction, rows: tuple[np.ndarray, np.ndarray]) -> list[Callable[[], object]]:
    """All that may be asked of a cache that can be believed."""
    return [
        lambda: cache.committed, lambda: cache.staged, lambda: cache.active, lambda: cache.replay_due, cache.begin,
        lambda: cache.commit(opened), lambda: cache.rollback(opened), lambda: cache.rewind(0), lambda: cache.grow(200),
        lambda: cache.can_rewind_to(0), lambda: cache.attend(0, np.zeros((8, 32), np.float32)), lambda: cache.refill(0, ()),
        lambda: cache.stage(opened, 0, *rows),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["set_one", "copy_into"])
def test_ranks_that_cannot_go_back_say_so_until_they_are_emptied(kind: str) -> None:
    twin = Twin(FLAT_AND_RINGS, np.random.default_rng(6), capacity=160, faults=Faults())
    for again in ("clear", "hydrate"):
        for step in session(twin)[:6]:
            step()
        opened = twin.active
        assert opened is not None
        twin.faults.arm(0, kind, lasting=True)
        with pytest.raises(DeviceFault, match="was told to"):
            twin.cache.stage(opened, 1, *twin.new(15))
            twin.cache.rollback(opened)
        twin.faults.disarm()
        for ask in everything(twin.cache, opened, twin.new(1)):
            with pytest.raises(DeviceFault, match="clear or hydrate"):
                ask()
        twin.forget()
        if again == "clear":
            twin.clear()
        twin.hydrate(30, 3)
        twin.check()
        with pytest.raises(TransactionError):
            twin.cache.commit(opened)
        goes_on(twin)
        twin.clear()


def test_memory_that_is_not_to_be_had_leaves_nothing_on_the_books() -> None:
    made = 0
    for at in range(1000):
        faults = Faults()
        faults.arm(at)
        try:
            Twin(HYBRID, np.random.default_rng(0), faults=faults)
        except (OutOfMemory, DeviceFault):
            continue
        made = at
        break
    assert made > 20


def test_growth_that_fails_leaves_the_caches_that_were_there() -> None:
    twin = Twin(HYBRID, np.random.default_rng(7), capacity=160, faults=Faults())
    twin.hydrate(62, 5)
    before = twin.cache.caches
    for at in range(1000):
        twin.faults.arm(at)
        if twin.attempt(lambda: twin.grow(200)):
            break
        assert twin.cache.caches is before
    assert at > 40 and twin.cache.caches is not before
    twin.faults.disarm()
    twin.check()
    goes_on(twin)
