"""kill -9 everywhere: at every named point of a store's life, at any other moment, and of whole
daemons under load. What was acknowledged as durable is there afterwards bit for bit, nothing that
is found is wrong, and every start succeeds."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fault_nursery import Nursery
from fault_script import AMPLE, WEIGHTS, Promises

from warmkv.kvstore.store.faults import POINTS

#: Files a store consists of after a clean stop; of those set aside, any number.
STORE_FILES = {"data.mdb", "lock.mdb", "store.lock", "store.reserve"}
KILLED = -9
ANY_TIME = "any time"
#: Blows a store takes before the next one begins.
ROUNDS = 5
TIERS = ("ample", "ample", "ample", "tight", "tight", "damaged")


@dataclass
class Tally:
    """What became of all the blows."""

    blows: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    compared: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = Counter(item.split(" ")[0] for item in self.faults)
        found = ", ".join(
            f"{kinds[kind]} {word}" for kind, word in (("lost", "lost"), ("corrupt", "corrupt"), ("failed", "failed"))
        )
        return (
            f"{self.blows.total()} blows at {len(self.blows)} points ({self.missed.total()} not reached), {self.starts} starts, "
            f"{self.compared} durable saves compared: {found}, {len(self.faults)} faults in all"
        )


class Campaign:
    """Stores that are hit again and again, each until its rounds are over."""

    def __init__(self, nursery: Nursery, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._nursery, self._folder = nursery, folder
        self._rng = random.Random(seed)
        self._seeds = count(seed * 100_000)

    def survey(self, tier: str, seed: int) -> Counter[str]:
        """How often each point is reached in a life that nothing ends."""
        store = self._folder / f"survey-{tier}-{seed}"
        status, lines = self._nursery.do("run", store=str(store), tier=tier, seed=seed)
        assert status == 0, "\n".join(lines)[-3000:]
        self._remove(store)
        return Counter(json.loads(lines[-1].partition(" ")[2]))

    def blows(self, tier: str, wanted: list[tuple[str, dict[str, Any]]]) -> None:
        """One store, one blow after the other, each looked at before the next."""
        store = self._folder / f"store-{next(self._seeds)}"
        store.mkdir(mode=0o700)  # some blows come before there is one
        promises = Promises(WEIGHTS[tier])
        seeds: list[int] = []
        for number, (name, about) in enumerate(wanted):
            seeds.append(next(self._seeds))
            status, lines = self._nursery.do("run", store=str(store), tier=tier, seed=seeds[-1], **about)
            promises.hear(seeds[-1], lines)
            if status == KILLED and not any(line.startswith("failed") for line in lines):
                self.tally.blows[name] += 1
            elif status == 0:
                self.tally.missed[name] += 1
            else:
                self.tally.faults.append(f"failed at {name} {about}: {lines[-1:]}")
            # A copy is looked at, mostly: the store itself is never healed by that start.
            copied = number < len(wanted) - 1 and self._rng.random() < 0.7
            self._examine(store, tier, sorted(promises.required) if tier == "ample" else [], seeds, f"{name} {about}", copied)
        for backup, required in promises.backups.items():
            self._examine(Path(backup), tier, required if tier == "ample" else [], seeds, "a backup")
        self._remove(store)

    def _examine(
        self, store: Path, tier: str, required: list[tuple[int, int]], seeds: list[int], after: str, copied: bool = False
    ) -> None:
        about = {"tier": tier, "required": required, "seeds": seeds, "copied": copied}
        status, lines = self._nursery.do("examine", store=str(store), **about)
        self.tally.starts += 1
        self.tally.compared += len(required)
        left = {line.partition(" ")[2] for line in lines if line.startswith("left ")}
        lines = [line for line in lines if not line.startswith("left ")]
        if status:
            lines.append(f"failed with status {status}")
        lines += [f"litter {name}" for name in left - STORE_FILES if not (tier == "damaged" and "corrupt" in name)]
        self.tally.faults += [f"{line} (after {after}, {tier})" for line in lines]

    def _remove(self, store: Path) -> None:
        for path in (store, *self._folder.glob(f"{store.name}.*")):
            shutil.rmtree(path, ignore_errors=path == store)


def at_points(campaign: Campaign, wanted: int, say: Callable[[str], None]) -> None:
    """Blows spread over every point, and over its occasions in the life of a store."""
    rng = random.Random(wanted)
    occasions = {tier: sum((campaign.survey(tier, seed) for seed in range(4)), Counter()) for tier in sorted(set(TIERS))}
    missing = [point for point in POINTS if not any(found[point] for found in occasions.values())]
    assert missing == [], "points that no script reaches"
    turns = count()
    begun = time.monotonic()
    while campaign.tally.blows.total() < wanted:
        assert campaign.tally.missed.total() <= 2 * wanted, campaign.tally
        tier = TIERS[next(turns) % len(TIERS)]
        points = [point for point in POINTS if occasions[tier][point]]
        # Points that were hit least come first, those that only this script meets before others.
        points.sort(key=lambda point: (campaign.tally.blows[point] + campaign.tally.missed[point] / 4, rng.random()))
        blows: list[tuple[str, dict[str, Any]]] = []
        for point in points[:ROUNDS]:
            blows.append((point, {"point": point, "nth": rng.randint(1, max(1, occasions[tier][point] // 6))}))
        rng.shuffle(blows)
        campaign.blows(tier, blows)
        assert campaign.tally.faults == [], campaign.tally
        say(f"{time.monotonic() - begun:6.1f} s  {campaign.tally}")


def at_any_time(campaign: Campaign, wanted: int, say: Callable[[str], None]) -> None:
    rng = random.Random(wanted)
    begun = time.monotonic()
    while campaign.tally.blows.total() < wanted:
        tier = rng.choice(TIERS)
        blows = [{"after_lines": rng.randint(0, 30), "after_s": rng.uniform(0, 0.03)} for _ in range(ROUNDS)]
        campaign.blows(tier, [(ANY_TIME, about) for about in blows])
        assert campaign.tally.faults == [], campaign.tally
        say(f"{time.monotonic() - begun:6.1f} s  {campaign.tally}")


@pytest.fixture
def campaign(nursery: Nursery, fast_folder: Path) -> Campaign:
    return Campaign(nursery, fast_folder, 1)


def test_a_sample_of_blows_at_named_points(campaign: Campaign, say: Callable[[str], None]) -> None:
    at_points(campaign, 16, say)


def test_a_sample_of_blows_at_any_time(campaign: Campaign, say: Callable[[str], None]) -> None:
    at_any_time(campaign, 15, say)


@pytest.mark.faults
def test_a_thousand_blows_at_named_points(campaign: Campaign, say: Callable[[str], None]) -> None:
    """Thirty of each point, at random occasions of it: first and last chunk, shallow and deep."""
    at_points(campaign, 1200, say)
    assert all(campaign.tally.blows[point] >= 10 for point in POINTS), campaign.tally.blows


@pytest.mark.faults
def test_hundreds_of_blows_at_any_time(campaign: Campaign, say: Callable[[str], None]) -> None:
    at_any_time(campaign, 300, say)


def test_promises_follow_what_was_reported() -> None:
    """The judge itself: what is acknowledged is required, what is dropped or lay in memory is not."""
    promises = Promises(AMPLE)
    promises.hear(5, ["durable 0", "memory 1", "durabl"])
    assert promises.required == {(5, 0)}
    promises.hear(5, ["memory 1", "written", "backup there", "memory 2", "forgetting 1"])
    assert (5, 1) not in promises.required and (5, 2) not in promises.required
    assert (5, 1) in promises.backups["there"]


@pytest.mark.parametrize("harm", ["lost", "corrupt"])
def test_the_judge_sees_what_is_lost_and_what_is_wrong(nursery: Nursery, fast_folder: Path, harm: str) -> None:
    """A store that keeps its word too little, and one whose prompts are answered with others' rows."""
    store, seed = fast_folder / "store", 3
    status, lines = nursery.do("run", store=str(store), tier="ample", seed=seed, point="stop.closed", nth=99)
    assert status == 0
    promises = Promises(AMPLE)
    promises.hear(seed, lines)
    held = sorted(promises.required)
    if harm == "lost":
        shutil.rmtree(store)
    about = {"tier": "ample", "required": held, "seeds": [seed], "swapped": harm == "corrupt"}
    status, lines = nursery.do("examine", store=str(store), **about)
    assert status == 0
    assert {line.split(" ")[0] for line in lines} - {"left"} == {harm}
