"""Full and failing disks under a served store: what an agent sees is misses and saves that say no.

Nothing raises, nothing hangs, nothing that is found is wrong. Once there is room again everything
works without a restart, and what was acknowledged as durable meanwhile is on disk.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import lmdb
import pytest
from fault_looking import look
from fault_script import IDENTITIES, Prompt

from warmkv.daemon.testing import ServedEngine, eventually
from warmkv.kvstore.client import Client, connect
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.faults import NO_FAULTS, POINTS, Faults
from warmkv.kvstore.testing import assert_rows, model_rows, records_at
from warmkv.schema.errors import StoreError

KIB, MIB = 1 << 10, 1 << 20
#: What the system says; and what LMDB says, where it is asked at that point.
ERRORS: dict[str, Callable[[], Exception]] = {
    "full": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "failing": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "map full": lambda: lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached"),
}
#: Points that stand before a write, a sync, or a copy into memory. (``commit.split`` wants records
#: of 64 MB; it is met by the killed ones, whose transactions are small.)
BEFORE_WRITES = (
    "commit.begin", "commit.chunk", "commit.metadata", "commit.sync", "usage.sync", "delete.metadata",
    "delete.chunks", "compact.copied", "compact.renamed", "backup.copied",
)  # fmt: skip
BEFORE_MEMORY = ("save.received", "promote.reserved", "pack.reserved")


class Refusing(Faults):
    """Raises at chosen points while it is told to, each time or every so many times."""

    def __init__(self) -> None:
        self.raised = 0
        self._points: tuple[str, ...] = ()
        self._make: Callable[[], Exception] = ERRORS["full"]
        self._every = 1
        self._times = 0

    def refuse(self, points: tuple[str, ...], make: Callable[[], Exception], every: int = 1) -> None:
        self._points, self._make, self._every = points, make, every

    def reached(self, point: str) -> None:
        assert point in POINTS
        if point in self._points:
            self._times += 1
            if self._times % self._every == 0:
                self.raised += 1
                raise self._make()


class Agent:
    """Saves and restores as agents do, through a client that must never raise."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.refused = self.misses = self.hits = 0
        self.durable: set[Prompt] = set()
        self._numbers = count(1)

    def turn(self) -> int:
        """A conversation of three saves, each read back, and old ones that may lie on disk by now; the
        oldest is dropped. How many of the saves are durable."""
        number = next(self._numbers)
        model, ids = IDENTITIES[number % 2], [3000 + number, *range(5000, 5060)]
        for length, ack in ((20, "disk"), (40, "memory"), (61, "disk")):
            prompt = Prompt(number % 2, tuple(ids[:length]))
            self._save(prompt, ack)
            self._restore(prompt)
        self.client.match(model, ids)
        self.client.prefetch(model, ids)
        assert self.client.offer(model, [*ids, 9]).held >= 0
        self.client.pin(model, ids, 0.05)
        for prompt in sorted(self.durable, key=lambda item: item.ids)[:2]:
            self._restore(prompt)
        if len(self.durable) > 12:
            first = min(prompt.ids[0] for prompt in self.durable)
            old = [prompt for prompt in self.durable if prompt.ids[0] == first]
            self.durable.difference_update(old)
            self.client.forget(old[0].identity, max((prompt.ids for prompt in old), key=len))
        return sum(prompt.ids[0] == ids[0] for prompt in self.durable)

    def _save(self, prompt: Prompt, ack: str) -> None:
        saved = self.client.save(prompt.identity, prompt.ids, records_at(prompt.identity, prompt.ids), ack=ack)  # type: ignore[arg-type]
        assert saved.stored or saved.reason
        if saved.durable:
            self.durable.add(prompt)
        self.refused += not saved.stored

    def _restore(self, prompt: Prompt) -> None:
        with self.client.restore(prompt.identity, [*prompt.ids, 7]) as restored:
            if restored:
                assert_rows(restored, model_rows(prompt.identity, prompt.ids))
                self.hits += 1
            else:
                assert restored.reason
                self.misses += 1


@contextmanager
def served(where: Path, faults: Faults = NO_FAULTS, **budgets: int) -> Iterator[tuple[Engine, Agent]]:
    """A store, served, and an agent's client of it. At the end everything durable is looked for in
    the store opened again."""
    sizes = {"warm_bytes": 1 * MIB, "cold_bytes": 6 * MIB, **budgets}
    options = StoreOptions(where / "store", **sizes, usage_interval_s=0.02, busy_timeout_s=0.2, faults=faults)  # type: ignore[arg-type]
    engine = Engine.open(options)
    try:
        with ServedEngine(where / "run" / "s", engine), connect(where / "run" / "s", strict=False, timeout_s=20) as client:
            agent = Agent(client)
            yield engine, agent
            assert check(engine) == []
    finally:
        engine.close()
    again = Store(Engine.open(StoreOptions(where / "store", **{**sizes, "warm_bytes": 16 * MIB})))  # type: ignore[arg-type]
    try:
        lost = [prompt for prompt in agent.durable if not look(again, prompt, verify=True)]
        assert [told(again, prompt) for prompt in lost] == []
        assert check(again.engine) == []
    finally:
        again.close()


def told(store: Store, prompt: Prompt) -> str:
    """What a store says of a prompt that it does not hold whole, asked a second time."""
    match, again = store.match(prompt.identity, [*prompt.ids, 7]), look(store, prompt)
    return f"{prompt.model} {prompt.ids[0]}: {match.usable} of {len(prompt.ids)}, {match.reason}; then {again}"


def recovers(agent: Agent) -> bool:
    """Whether all is well with the next turn: both saves that want it are durable, none refused."""
    refused = agent.refused
    return agent.turn() >= 2 and agent.refused == refused


def take_the_rest(disk: Path, but_bytes: int) -> Path:
    """Somebody else fills the disk, but for some bytes."""
    filler = disk / "filler"
    with open(filler, "wb") as file:
        if (free := shutil.disk_usage(disk).free - but_bytes) > 0:
            os.posix_fallocate(file.fileno(), 0, free)
    return filler


def fill_and_empty(disk: Path, rounds: int, turns: int) -> Agent:
    with served(disk) as (_, agent):
        agent.turn()
        assert not agent.refused and agent.hits == 5
        for number in range(rounds):
            filler = take_the_rest(disk, (0, 4 * KIB, 60 * KIB, 300 * KIB)[number % 4])
            for _ in range(turns):
                agent.turn()
            filler.unlink()
            assert eventually(lambda: recovers(agent)), number
    assert agent.refused and agent.hits
    return agent


def test_a_disk_that_fills_and_empties(small_disk: Path) -> None:
    fill_and_empty(small_disk, 2, 30)


@pytest.mark.faults
def test_a_disk_that_fills_and_empties_for_long(small_disk: Path, say: Callable[[str], None]) -> None:
    agent = fill_and_empty(small_disk, 24, 40)
    say(f"full disk: {agent.hits} hits, {agent.misses} misses, {agent.refused} saves refused, 0 exceptions")


# -- no room in the map or the budget ---------------------------------------------------------


def test_a_budget_that_is_pinned_full_and_freed(fast_folder: Path) -> None:
    """Where nothing may be evicted saves are refused or held in memory; unpinned, they are stored."""
    with served(fast_folder, cold_bytes=MIB) as (_, agent):
        for _ in range(3):
            pinned = fill_with_pins(agent.client)
            for _ in range(10):
                agent.turn()
            for prompt in pinned:
                agent.client.unpin(prompt.identity, prompt.ids)
                agent.client.forget(prompt.identity, prompt.ids)
            assert eventually(lambda: recovers(agent))
            agent.durable.clear()  # from here on it may be evicted
    assert agent.hits


def fill_with_pins(client: Client) -> list[Prompt]:
    """Pin durable prompts until one is not durable any more."""
    pinned: list[Prompt] = []
    while True:
        prompt = Prompt(0, (9000 + len(pinned), *range(6000, 6059)))
        saved = client.save(prompt.identity, prompt.ids, records_at(prompt.identity, prompt.ids), ack="disk")
        client.pin(prompt.identity, prompt.ids, 3600)
        pinned.append(prompt)
        if not saved.durable:
            return pinned
        assert len(pinned) < 1000


# -- refusals at every point ------------------------------------------------------------------


def refuse_and_recover(where: Path, point: str, make: Callable[[], Exception], every: int, turns: int = 6) -> tuple[int, Agent]:
    """Turns of an agent while a point refuses, and one after it does no more; how often it did."""
    faults = Refusing()
    # Where memory is short records come back from disk; else the first copy answers for ever.
    with served(where, faults, warm_bytes=128 * KIB) as (engine, agent):
        for _ in range(7):  # from then on something is dropped with every turn
            agent.turn()
        faults.refuse((point,), make, every)
        for turn in range(20 * turns):
            if turn >= turns and faults.raised:
                break  # what is dropped is deleted in the background, some turns later
            agent.turn()
            report(engine, where)
        faults.refuse((), make)
        assert eventually(lambda: recovers(agent)), point
        assert agent.client.report("verify")["bad"] == []
    return faults.raised, agent


def report(engine: Engine, where: Path) -> None:
    """Upkeep, which says what is wrong by a typed error, as it does to whoever asks for it."""
    assert engine.cold is not None
    for work in (engine.cold.compact, lambda: engine.cold.backup(where / "backup")):
        try:
            work()
        except StoreError:
            pass
    shutil.rmtree(where / "backup", ignore_errors=True)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("point", ["commit.chunk", "commit.sync", "delete.chunks"])
def test_a_sample_of_refusals(fast_folder: Path, point: str, error: str) -> None:
    raised, _ = refuse_and_recover(fast_folder, point, ERRORS[error], 1)
    assert raised


@pytest.mark.faults
@pytest.mark.parametrize(
    ("point", "error"),
    [
        (point, error)
        for point in BEFORE_WRITES
        for error in ERRORS
        if error != "map full" or not point.startswith(("comp", "back"))
    ],
)
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_refusals_before_every_write(fast_folder: Path, point: str, error: str, every: int, say: Callable[[str], None]) -> None:
    raised, agent = refuse_and_recover(fast_folder, point, ERRORS[error], every, 12)
    say(f"{point}: {raised} refusals, {agent.hits} hits, {agent.misses} misses, {agent.refused} saves refused, 0 exceptions")
    assert raised or every > 1


@pytest.mark.faults
@pytest.mark.parametrize("error", ["full", "failing"])
@pytest.mark.parametrize("point", BEFORE_MEMORY)
@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_refusals_of_memory(fast_folder: Path, point: str, error: str, every: int, say: Callable[[str], None]) -> None:
    raised, agent = refuse_and_recover(fast_folder, point, ERRORS[error], every, 12)
    say(f"{point}: {raised} refusals, {agent.hits} hits, {agent.misses} misses, {agent.refused} saves refused, 0 exceptions")
    assert raised or every > 1
