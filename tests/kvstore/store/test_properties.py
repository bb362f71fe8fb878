"""Random models, prompts, saves and evictions: rule, index and store against the naive twin.

Few token ids and short prompts, so that prefixes meet in every way. Most cases run on indexes of
made-up records, thousands a second; the rest goes through the public verbs, bit for bit. Every
case has a seed of its own: a failure names it, and tells what was done before.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.testing.indexed import IndexTwin
from warmkv.kvstore.testing.mirrored import StoreTwin
from warmkv.kvstore.testing.naive import Expected
from warmkv.kvstore.testing.samples import (
    FOLDED,
    Prompt,
    mixed_identity,
    model_logits,
    random_mixture,
    random_prompt,
    records_at,
)
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Lineage

MIB = 1 << 20


class Case:
    """One random history: its generator, its model, the prompts so far, and what was done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rng = random.Random(name)
        self.identity: Identity = mixed_identity(*random_mixture(self.rng, self.rng.choice((1, 1, 2, 2, 3, 5))))
        self.prompts: list[Prompt] = []
        self.done: list[str] = []
        self.answers: Counter[str] = Counter()

    def prompt(self) -> Prompt:
        """A new prompt, remembered."""
        self.prompts.append(random_prompt(self.rng, self.prompts, vocabulary=self.rng.randint(2, 4)))
        return self.prompts[-1]

    def query(self) -> Prompt:
        rng = self.rng
        known = self.prompts and rng.random() < 0.3
        ids, images = rng.choice(self.prompts) if known else random_prompt(rng, self.prompts, vocabulary=4)
        return ((*ids, 1) if rng.random() < 0.5 else ids), images

    def lineage(self) -> Lineage:
        return FOLDED if self.rng.random() < 0.1 else CLEAN

    def did(self, what: str, *about: object) -> None:
        self.done.append(" ".join(map(str, (what, *about))))

    def count(self, expected: Expected) -> None:
        kind = "miss" if not expected.usable else "all" if expected.usable == expected.matched else "less"
        self.answers[kind] += 1


@contextmanager
def told(case: Case) -> Iterator[None]:
    """What fails names the case and its history."""
    try:
        yield
    except Exception as exc:
        layers = [(layer.kind.name, layer.window, layer.chunk, layer.sinks, layer.shared_with) for layer in case.identity.layers]
        exc.add_note("\n".join([f"case {case.name}, layers {layers}", *case.done]))
        raise


def grow_index(case: Case, twin: IndexTwin) -> None:
    """One more segment or state, or one record less."""
    rng, segments = case.rng, [record for record in twin.held if not record.is_state]
    choice = rng.random()
    if choice < 0.45 or not segments:
        prompt, lineage = case.prompt(), case.lineage()
        length, start = len(prompt[0]), rng.choice(twin.starts(prompt, lineage))
        windows = [_window(rng, length) for group in twin.namespace.needs.groups if not group.whole]
        whole = rng.random() < 0.85
        case.did("segment", prompt, lineage == CLEAN, start, windows, whole)
        twin.add_segment(prompt, lineage, start, windows, whole=whole, warm=rng.random() < 0.7)
    elif choice < 0.85:
        segment = rng.choice(segments)
        at = twin.positions(segment)
        position = rng.choice(at) if rng.random() < 0.6 else at[-1]
        provides = twin.provided(segment, position) & (Provides(rng.randint(1, 15)) if rng.random() < 0.3 else ~Provides.NOTHING)
        if provides:
            case.did("state", twin.held[segment][0], position, provides)
            twin.add_state(segment, position, provides, warm=rng.random() < 0.7)
    else:
        record = rng.choice(twin.leaves())
        case.did("drop", record.start, record.end, record.provides, twin.held[record][0])
        twin.drop(record)


def _window(rng: random.Random, length: int) -> tuple[int, int]:
    first = rng.randint(0, length) if rng.random() < 0.7 else 0
    return first, length if rng.random() < 0.8 else rng.randint(first, length)


@pytest.mark.parametrize("seed", range(4))
def test_index_answers_as_the_twin_does(seed: int) -> None:
    cases, answers = 0, Counter[str]()
    for number in range(250):
        case = Case(f"index {seed} {number}")
        twin = IndexTwin(case.identity)
        with told(case):
            for _ in range(case.rng.randint(3, 25)):
                grow_index(case, twin)
                for _ in range(2):
                    query, lineage, logits = case.query(), case.lineage(), case.rng.random() < 0.3
                    case.did("ask", query, lineage == CLEAN, logits)
                    case.count(twin.ask(query, lineage, logits=logits))
                    case.done.pop()
                    cases += 1
        answers += case.answers
    assert cases > 5000 and min(answers[kind] for kind in ("miss", "all", "less")) > 250


def change_store(case: Case, twin: StoreTwin) -> None:
    """Save, forget, or evict one record."""
    rng, choice, records = case.rng, case.rng.random(), twin.records()
    if choice < 0.6 or not records:
        prompt, lineage, spare = case.prompt(), case.lineage(), case.rng.choice((0, 0, 1, 3))
        logits = model_logits(case.identity, *prompt, lineage) if rng.random() < 0.3 else None
        anchors = [Anchor(len(prompt[0]), AnchorKind.TURN)] if rng.random() < 0.3 else []
        case.did("save", prompt, lineage == CLEAN, f"spare {spare}", "logits" if logits is not None else "", anchors)
        handed = records_at(case.identity, *prompt, lineage, spare=spare)
        twin.save(case.identity, prompt, handed, lineage, anchors=anchors, logits=logits)
    elif choice < 0.75:
        prompt, lineage = rng.choice(case.prompts), case.lineage()
        case.did("forget", prompt, lineage == CLEAN)
        twin.forget(case.identity, prompt, lineage)
    else:
        leaf = rng.choice([record for record in records if not record.children])
        case.did("evict", leaf.start, leaf.end, leaf.provides, leaf.extents)
        twin.evict(leaf)


def ask_store(case: Case, twin: StoreTwin) -> None:
    rng, query, lineage = case.rng, case.query(), case.lineage()
    logits, anchored, restore = rng.random() < 0.3, rng.random() < 0.2, rng.random() < 0.5
    case.did(
        "ask", query, lineage == CLEAN, "logits" if logits else "", "anchored" if anchored else "", "restore" if restore else ""
    )
    case.count(twin.ask(case.identity, query, lineage, logits=logits, anchored=anchored, restore=restore))
    case.done.pop()


def opened(path: Path | None = None) -> Store:
    return Store(Engine.open(StoreOptions(path, warm_bytes=64 * MIB, cold_bytes=256 * MIB)))


@pytest.mark.parametrize("seed", range(4))
def test_store_answers_as_the_twin_does(seed: int) -> None:
    cases, answers = 0, Counter[str]()
    for number in range(40):
        case = Case(f"store {seed} {number}")
        with told(case), opened() as store:
            twin = StoreTwin(store)
            for _ in range(case.rng.randint(2, 12)):
                change_store(case, twin)
                for _ in range(4):
                    ask_store(case, twin)
                    cases += 1
        answers += case.answers
    assert cases > 800 and min(answers[kind] for kind in ("miss", "all", "less")) > 50


@pytest.mark.parametrize("seed", range(2))
def test_store_answers_the_same_from_disk_and_after_restarts(seed: int, tmp_path: Path) -> None:
    for number in range(6):
        case = Case(f"cold {seed} {number}")
        path = tmp_path / str(number)
        store = opened(path)
        twin = StoreTwin(store)
        with told(case):
            try:
                for _ in range(case.rng.randint(4, 10)):
                    change_store(case, twin)
                    store.flush(30)
                    choice = case.rng.random()
                    if choice < 0.2:
                        case.did("restart")
                        store.close()
                        store = opened(path)
                        twin.reopened(store)
                    elif choice < 0.6:
                        case.did("demote all")
                        _demote(twin)
                    for _ in range(4):
                        ask_store(case, twin)
            finally:
                store.close()


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("seed", range(2))
def test_chains_long_enough_to_be_packed_answer_as_the_twin_does(seed: int, cold: bool, tmp_path: Path) -> None:
    """One token a save, more saves than a restore hands over segments; then asked, evicted, forgotten."""
    case = Case(f"chain {seed}")
    ids = tuple(case.rng.randint(1, case.rng.choice((1, 3))) for _ in range(90))
    with told(case), opened(tmp_path if cold else None) as store:
        twin = StoreTwin(store)
        for length in range(1, len(ids) + 1):
            case.prompts.append((ids[:length], ()))
            anchors = [Anchor(length, AnchorKind.TURN)] if length % 20 == 0 else []
            twin.save(case.identity, case.prompts[-1], records_at(case.identity, ids[:length]), anchors=anchors)
        for _ in range(20):
            if cold:
                store.flush(30)
                _demote(twin)
            for length in (len(ids), case.rng.randint(1, len(ids))):
                twin.ask(case.identity, ((*ids[:length], 9), ()), anchored=case.rng.random() < 0.2)
            change_store(case, twin)
            ask_store(case, twin)


def _demote(twin: StoreTwin) -> None:
    for record in twin.records():
        if record.warm and record.cold == Cold.STORED:
            twin.demote(record)
