"""Bytes that changed on disk: each one of a small record in turn, and of any page of the file.

A store that finds one answers with a miss, or with the right bytes where the changed one is not
among those asked for. It never answers with wrong ones, and takes the record again when it is saved.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_nursery import Nursery
from fault_script import AMPLE, Promises

from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.testing import assert_rows, model_rows, random_identity, save
from warmkv.schema import segment as container

MIB = 1 << 20
IDENTITY = random_identity(layers=2, heads=1, dim=8)
IDS = [401, 402, 403, 404, 405]
#: What lines about a damaged store are called here: losing what was damaged is how it should be.
WORDS = {"lost": "miss", "corrupt": "wrong bytes", "failed": "no start", "problem": "broken index", "bad": "not swept"}
Say = Callable[[str], None]


@dataclass
class Victim:
    """A store with one record, saved anew whenever it was found to be bad."""

    store: Store
    data: Path

    def fresh(self) -> bytes:
        """The container of the record, which afterwards lies on disk only."""
        assert save(self.store, IDENTITY, IDS, ack="disk").durable
        with self.store.engine.index.changed:
            (record,) = self.store.engine.index.warm_order
            bits = os.pread(record.fd, record.total_bytes, 0)
            self.store.engine.warm.evict(record)
        self.store.engine.warm.reap()
        return bits

    def flipped(self, piece: bytes, at: int, bit: int) -> int:
        """Flip a bit in each place of the file where ``piece`` lies: old copies may be among them.
        How many there are. The store reads the file through a mapping, and sees it at once."""
        file = self.data.read_bytes()
        places = list(_places(file, piece))
        with open(self.data, "r+b", buffering=0) as out:
            for place in places:
                os.pwrite(out.fileno(), bytes([file[place + at] ^ 1 << bit]), place + at)
        return len(places)

    def answers(self) -> str:
        """ "right" or "miss"; AssertionError for wrong bytes."""
        with self.store.restore(IDENTITY, [*IDS, 7]) as restored:
            if restored:
                assert restored.usable == len(IDS)
                assert_rows(restored, model_rows(IDENTITY, IDS))
            return "right" if restored else "miss"


def _places(data: bytes, piece: bytes) -> Iterator[int]:
    at = data.find(piece)
    while at >= 0:
        yield at
        at = data.find(piece, at + 1)


@pytest.fixture
def victim(fast_folder: Path) -> Iterator[Victim]:
    options = StoreOptions(fast_folder / "store", 16 * MIB, 16 * MIB)
    store = Store(Engine.open(options))
    yield Victim(store, fast_folder / "store" / "data.mdb")
    assert check(store.engine) == []
    store.close()


def split(bits: bytes) -> tuple[bytes, bytes]:
    """What is stored of a container: its head, and the payload behind it."""
    head = container.decode_head(memoryview(bits), len(bits))
    return bits[: head.head_bytes], bits[head.payload_offset :]


def flip_in_turn(victim: Victim, positions: Callable[[int], Iterable[int]], say: Say) -> Counter[str]:
    """Flip bytes of head and payload, one at a time, and ask for the record each time."""
    found: Counter[str] = Counter()
    head, payload = split(victim.fresh())
    rng, begun = random.Random(1), time.monotonic()
    assert victim.answers() == "right"
    for part in ("head", "payload"):
        for at in positions(len(head if part == "head" else payload)):
            # The head says when it was made: every one differs a little from the last.
            head, payload = split(victim.fresh())
            assert victim.flipped(head if part == "head" else payload, at, rng.randrange(8)) > 0
            found[f"{part}: {victim.answers()}"] += 1
            say(f"{time.monotonic() - begun:6.1f} s  {dict(found)} of {len(head)} + {len(payload)} bytes")
    assert victim.fresh() and victim.answers() == "right"
    return found


def test_a_sample_of_bytes_of_a_stored_segment(victim: Victim, say: Say) -> None:
    assert set(flip_in_turn(victim, lambda size: range(0, size, 29), say)) == {"head: miss", "payload: miss"}


@pytest.mark.faults
def test_every_byte_of_a_stored_segment(victim: Victim, say: Say) -> None:
    found = flip_in_turn(victim, range, say)
    assert set(found) == {"head: miss", "payload: miss"} and found.total() > 1000


def flip_pages(nursery: Nursery, folder: Path, wanted: int, say: Say) -> Counter[str]:
    """Flip a byte anywhere in the file of a store that is closed, then start it and ask for all it
    held. Bytes of pages that hold nothing may change nothing."""
    store, rng, seed = folder / "store", random.Random(wanted), 11
    status, lines = nursery.do("run", store=str(store), tier="ample", seed=seed)
    assert status == 0, lines[-1]
    promises = Promises(AMPLE)
    promises.hear(seed, lines)
    pristine = (store / "data.mdb").read_bytes()
    used = [at for at in range(0, len(pristine), 512) if any(pristine[at : at + 512])]
    found: Counter[str] = Counter()
    begun = time.monotonic()
    for _ in range(wanted):
        damaged = folder / "damaged"
        shutil.copytree(store, damaged)
        at = rng.choice(used) + rng.randrange(512)
        with open(damaged / "data.mdb", "r+b") as file:
            file.seek(at)
            file.write(bytes([pristine[at] ^ 1 << rng.randrange(8)]))
        status, lines = nursery.do("examine", store=str(damaged), tier="ample", required=sorted(promises.required), seeds=[seed])
        shutil.rmtree(damaged)
        kinds = {WORDS[line.split(" ")[0]] for line in lines if not line.startswith("left ")}
        if status:
            kinds.add(f"ended with {status}")
        for kind in kinds or {"right"}:
            found[kind] += 1
        say(f"{time.monotonic() - begun:6.1f} s  {dict(found)}")
    return found


def test_a_sample_of_bytes_of_any_page(nursery: Nursery, fast_folder: Path, say: Say) -> None:
    found = flip_pages(nursery, fast_folder, 40, say)
    assert set(found) == {"right", "miss"}


@pytest.mark.faults
def test_bytes_of_any_page(nursery: Nursery, fast_folder: Path, say: Say) -> None:
    found = flip_pages(nursery, fast_folder, 2000, say)
    assert set(found) == {"right", "miss"}
