"""Machines that look for a shortest history after which store or index differ from the naive twin.

`StoreMachine` has budgets so small that everything is evicted all the time; there the twin never
forgets, so it is an upper bound for lengths and the truth about numbers: a hit may be shorter than
the twin's, never longer, and its rows and states are the twin's bit for bit. `IndexMachine` and
`MirrorMachine` drop records one by one and tell the twin, so that every answer must be equal. All
check every invariant after every step.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from warmkv.kvstore.needs import Provides
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check, check_index
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, NaiveStore, assert_contents, model_rows, naive, random_identity
from warmkv.kvstore.testing.indexed import IndexTwin
from warmkv.kvstore.testing.mirrored import StoreTwin
from warmkv.kvstore.testing.naive import ExpectedLayer
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FULL,
    NYSTROM,
    OPAQUE,
    RECURRENT,
    RING,
    Prompt,
    chunked,
    hybrid,
    mixed_identity,
    model_logits,
    model_states,
    records_at,
    shared,
    sink_window,
    sliding,
)
from warmkv.schema.errors import Busy, ColdFull, OfferAgain, TooLarge
from warmkv.schema.identity import Identity, LayerSpec
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment, Lineage

IDENTITIES = (
    random_identity(1, 1, 4, seed=0), random_identity(1, 1, 4, seed=1), mixed_identity(FULL, sliding(3), RECURRENT),
    mixed_identity(OPAQUE, ENCODER, chunked(3)),
)  # fmt: skip
KIB = 1024

Query = tuple[int, tuple[int, ...], tuple[Attachment, ...], Lineage]


@st.composite
def queries(draw: st.DrawFn) -> Query:
    """Few tokens, repeated trunks, now and then an image: everything shares prefixes."""
    trunk = draw(st.sampled_from([(), (1, 1, 1, 1, 1, 1), (1, 2, 1, 2, 1, 2, 1, 2, 1, 2), (2,) * 16]))
    tail = tuple(draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=8)))
    tokens = trunk + tail
    attachments: tuple[Attachment, ...] = ()
    if len(tokens) > 4 and draw(st.integers(0, 3)) == 0:
        start = draw(st.integers(0, 3))
        attachments = (Attachment(start, draw(st.integers(1, len(tokens) - start)), draw(st.sampled_from([IMAGE, OTHER_IMAGE]))),)
    return draw(st.sampled_from([0, 0, 2, 3, 1])), tokens, attachments, draw(st.sampled_from([CLEAN, CLEAN, CLEAN, FOLDED]))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twin = NaiveStore()
        self.leases: list[tuple[Restored, list[ExpectedLayer]]] = []
        self.directory = Path(tempfile.mkdtemp(prefix="warmkv-"))
        self.options = StoreOptions()

    @initialize(cold=st.sampled_from([0, 40 * KIB, 400 * KIB]), warm=st.sampled_from([30 * KIB, 60 * KIB, 200 * KIB]))
    def begin(self, cold: int, warm: int) -> None:
        path = self.directory / "store" if cold else None
        self.options = StoreOptions(path, warm, cold, busy_timeout_s=0.05)
        self.store = Store(Engine.open(self.options))

    @rule(query=queries(), disk=st.booleans(), anchored=st.booleans())
    def save(self, query: Query, disk: bool, anchored: bool) -> None:
        model, tokens, attachments, lineage = query
        records = records_at(IDENTITIES[model], tokens, attachments, lineage)
        logits = model_logits(IDENTITIES[model], tokens, attachments, lineage) if anchored else None
        self.twin.save(IDENTITIES[model], tokens, records, attachments, lineage, logits)
        anchors = [Anchor(len(tokens))] if anchored else []
        try:
            saved = self.store.save(
                IDENTITIES[model], tokens, records, ack="disk" if disk else "memory", anchors=anchors,
                attachments=attachments, lineage=lineage, logits=logits,
            )  # fmt: skip
        except (Busy, TooLarge, OfferAgain, ColdFull):
            return
        assert saved.stored and saved.held >= len(tokens)
        if not saved.duplicate:  # what was held before may be in the cold tier only, and be evicted there meanwhile
            match = self.store.match(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)
            assert match.matched == len(tokens)

    @rule(query=queries(), anchored=st.booleans(), verify=st.booleans(), keep=st.booleans(), logits=st.booleans())
    def restore(self, query: Query, anchored: bool, verify: bool, keep: bool, logits: bool) -> None:
        model, tokens, attachments, lineage = query
        expected = self.twin.find(IDENTITIES[model], tokens, attachments, lineage, logits=logits)
        restored = self.store.restore(
            IDENTITIES[model], tokens, attachments=attachments, lineage=lineage, verify=verify, logits=logits,
            at="anchor" if anchored else "longest",
        )  # fmt: skip
        assert restored.usable <= expected.usable and restored.matched <= expected.matched
        if restored:
            contents = list(self.twin.contents(IDENTITIES[model], tokens, restored.usable, attachments, lineage))
            assert_contents(restored, contents)
            parked = restored.usable == len(tokens)
            kept = self.twin.logits(IDENTITIES[model], tokens, attachments, lineage) if parked else None
            assert (restored.logits.tobytes() if restored.logits is not None else None) == kept
            if keep and len(self.leases) < 3:
                self.leases.append((restored, contents))
                return
        restored.close()

    @rule(query=queries())
    def match_and_offer_agree_with_the_twin(self, query: Query) -> None:
        model, tokens, attachments, lineage = query
        expected = self.twin.find(IDENTITIES[model], tokens, attachments, lineage)
        match = self.store.match(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)
        offer = self.store.offer(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)
        assert match.usable <= match.matched <= expected.matched
        assert match.usable <= expected.usable and offer.held <= expected.matched
        assert match.usable <= offer.held

    @rule()
    def end_a_lease(self) -> None:
        if self.leases:
            restored, contents = self.leases.pop(0)
            assert_contents(restored, contents)
            restored.close()

    @rule(query=queries())
    def forget(self, query: Query) -> None:
        model, tokens, attachments, lineage = query
        self.store.forget(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)

    @rule(query=queries(), pinned=st.booleans())
    def pin(self, query: Query, pinned: bool) -> None:
        model, tokens, attachments, lineage = query
        if pinned:
            self.store.pin(IDENTITIES[model], tokens, 0.01, attachments=attachments, lineage=lineage)
        else:
            self.store.unpin(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)

    @rule(model=st.sampled_from([0, 1, 2, 3, None]))
    def clear(self, model: int | None) -> None:
        identity = None if model is None else IDENTITIES[model]
        self.store.clear(identity)
        for which in range(4) if model is None else (model,):
            assert self.store.match(IDENTITIES[which], (1, 2)).matched == 0
        if model is None:
            self.twin.forget_everything()

    @rule()
    def reopen(self) -> None:
        self.store.flush()
        self.store.close()
        stored = {record.id for record in self.store.engine.index.records.values() if record.cold == Cold.STORED}
        self.store = Store(Engine.open(self.options))
        assert set(self.store.engine.index.records) == stored
        assert self.store.engine.swept == 0

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        if hasattr(self, "store"):
            problems = check(self.store.engine)
            assert not problems, problems

    def teardown(self) -> None:
        for restored, contents in self.leases:
            assert_contents(restored, contents)
        if hasattr(self, "store"):
            self.store.close()
            assert self.store.engine.warm.ledger.used_bytes == self.store.engine.warm.ledger.leased_bytes
        for restored, _ in self.leases:
            restored.close()
        shutil.rmtree(self.directory)


MIXTURES: tuple[tuple[LayerSpec, ...], ...] = (
    (FULL,), (sliding(3),), (chunked(3),), (sink_window(1, 3),), (sink_window(2, 2), sink_window(0, 4)), (RECURRENT,), (OPAQUE,),
    (ENCODER, FULL), (hybrid(),), (hybrid(3), FULL), (FULL, sliding(2), CONV), (OPAQUE, FULL), (OPAQUE, RING, ENCODER),
    (sliding(4), OPAQUE, NYSTROM), (sliding(1), shared(0)), (chunked(2), chunked(5), RECURRENT),
)  # fmt: skip


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Short, of three ids, with up to two images."""
    tokens = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=12)))
    images, at = [], 0
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        start = at + draw(st.integers(0, 3))
        length = draw(st.integers(1, 4))
        if start + length > len(tokens):
            break
        images.append(Attachment(start, length, draw(st.sampled_from([IMAGE, OTHER_IMAGE]))))
        at = start + length
    return tokens, tuple(images)


LINEAGES = st.sampled_from([CLEAN, CLEAN, CLEAN, FOLDED])


class IndexMachine(RuleBasedStateMachine):
    """Made-up records in an index: any extents, any states, dropped in any order."""

    @initialize(layers=st.sampled_from(MIXTURES))
    def begin(self, layers: tuple[LayerSpec, ...]) -> None:
        self.twin = IndexTwin(mixed_identity(*layers))

    @rule(prompt=prompts(), lineage=LINEAGES, whole=st.booleans(), warm=st.booleans(), data=st.data())
    def segment(self, prompt: Prompt, lineage: Lineage, whole: bool, warm: bool, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(self.twin.starts(prompt, lineage)), "start")
        bounds = st.integers(0, len(prompt[0]))
        count = sum(not group.whole for group in self.twin.namespace.needs.groups)
        windows = data.draw(st.lists(st.tuples(bounds, bounds), min_size=count, max_size=count), "windows")
        self.twin.add_segment(prompt, lineage, start, windows, whole=whole, warm=warm)

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data(), flags=st.sampled_from([15, 15, 1, 2, 4, 8]), warm=st.booleans())
    def state(self, data: st.DataObject, flags: int, warm: bool) -> None:
        segments = [record for record in self.twin.held if not record.is_state]
        segment = data.draw(st.sampled_from(sorted(segments, key=lambda record: record.id)), "segment")
        position = data.draw(st.sampled_from(self.twin.positions(segment)), "position")
        provides = self.twin.provided(segment, position) & Provides(flags)
        if provides:
            self.twin.add_state(segment, position, provides, warm=warm)

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.twin.drop(data.draw(st.sampled_from(sorted(self.twin.leaves(), key=lambda record: record.id)), "leaf"))

    @rule(prompt=prompts(), lineage=LINEAGES, logits=st.booleans())
    def ask(self, prompt: Prompt, lineage: Lineage, logits: bool) -> None:
        self.twin.ask(prompt, lineage, logits=logits)

    @precondition(lambda self: self.twin.held)
    @rule(data=st.data(), more=st.booleans(), logits=st.booleans())
    def ask_for_what_is_stored(self, data: st.DataObject, more: bool, logits: bool) -> None:
        record = data.draw(st.sampled_from(sorted(self.twin.held, key=lambda record: record.id)), "record")
        (ids, images), _ = self.twin.held[record]
        self.twin.ask(((*ids, 1) if more else ids, images), record.lineage, logits=logits)

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        if hasattr(self, "twin"):
            problems = check_index(self.twin.index)
            assert not problems, problems


class MirrorMachine(RuleBasedStateMachine):
    """A store with room for everything; single records are dropped, and the twin is told."""

    @initialize(layers=st.sampled_from(MIXTURES), cold=st.booleans())
    def begin(self, layers: tuple[LayerSpec, ...], cold: bool) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="warmkv-"))
        self.options = StoreOptions(self.directory / "store" if cold else None, 1 << 26, 1 << 28)
        self.identity: Identity = mixed_identity(*layers)
        self.twin = StoreTwin(Store(Engine.open(self.options)))

    @rule(prompt=prompts(), lineage=LINEAGES, spare=st.integers(0, 3), logits=st.booleans(), anchored=st.booleans())
    def save(self, prompt: Prompt, lineage: Lineage, spare: int, logits: bool, anchored: bool) -> None:
        self.twin.save(
            self.identity, prompt, records_at(self.identity, *prompt, lineage, spare=spare), lineage,
            logits=model_logits(self.identity, *prompt, lineage) if logits else None,
            anchors=[Anchor(len(prompt[0]), AnchorKind.TURN)] if anchored else [],
        )  # fmt: skip

    @rule(prompt=prompts(), lineage=LINEAGES)
    def forget(self, prompt: Prompt, lineage: Lineage) -> None:
        self.twin.forget(self.identity, prompt, lineage)

    @precondition(lambda self: self.twin.records())
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        leaves = sorted((record for record in self.twin.records() if not record.children), key=lambda record: record.id)
        self.twin.evict(data.draw(st.sampled_from(leaves), "leaf"))

    @precondition(lambda self: self.options.path is not None)
    @rule()
    def demote(self) -> None:
        self.twin.store.flush()
        for record in self.twin.records():
            if record.warm and record.cold == Cold.STORED:
                self.twin.demote(record)

    @precondition(lambda self: self.options.path is not None)
    @rule()
    def reopen(self) -> None:
        self.twin.store.close()
        self.twin.reopened(Store(Engine.open(self.options)))

    @rule(prompt=prompts(), lineage=LINEAGES, logits=st.booleans(), anchored=st.booleans())
    def ask(self, prompt: Prompt, lineage: Lineage, logits: bool, anchored: bool) -> None:
        self.twin.ask(self.identity, prompt, lineage, logits=logits, anchored=anchored)

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.twin.store.close()
            shutil.rmtree(self.directory)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestMirror = MirrorMachine.TestCase
TestMirror.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_twin_itself() -> None:
    twin, identity = NaiveStore(), IDENTITIES[0]
    twin.save(identity, (1, 2, 3), model_rows(identity, (1, 2, 3)))
    assert (twin.find(identity, (1, 2, 3)).matched, twin.find(identity, (1, 2, 3)).usable) == (3, 2)
    assert twin.find(identity, (1, 2, 9, 9)).usable == 2
    assert twin.find(identity, (1, 2, 3), [Attachment(1, 1, IMAGE)]).usable == 1
    assert twin.find(IDENTITIES[1], (1, 2, 3)).usable == 0


def test_model_rows_depend_on_everything_before() -> None:
    identity = IDENTITIES[0]
    rows = model_rows(identity, (1, 2, 3))[0].planes[0].rows
    same = model_rows(identity, (1, 2, 4))[0].planes[0].rows
    assert rows[:2].tobytes() == same[:2].tobytes() and rows[2].tobytes() != same[2].tobytes()
    others = [
        model_rows(identity, (2, 2, 3)), model_rows(IDENTITIES[1], (1, 2, 3)), model_rows(identity, (1, 2, 3), (), FOLDED),
        model_rows(identity, (1, 2, 3), [Attachment(0, 1, IMAGE)]),
    ]  # fmt: skip
    assert len({rows[2].tobytes(), *(other[0].planes[0].rows[2].tobytes() for other in others)}) == 5
    with pytest.raises(AssertionError):
        assert rows[0].tobytes() == rows[1].tobytes()


def test_the_twin_reads_the_table_of_needs() -> None:
    ids, image = (1, 2, 3, 4, 5, 6), Attachment(2, 2, IMAGE)
    for layers in MIXTURES:
        identity, twin = mixed_identity(*layers), NaiveStore()
        twin.save(identity, ids, records_at(identity, ids, [image]), [image], logits=model_logits(identity, ids, [image]))
        assert twin.find(identity, (*ids, 7), [image]).usable == 6
        assert twin.find(identity, ids, [image], logits=True).usable == 6 > twin.find(identity, ids, [image]).usable
        assert twin.find(identity, (*ids, 7)).matched == 2 and twin.find(identity, ids, [image], FOLDED).matched == 0
    twin, identity = NaiveStore(), mixed_identity(OPAQUE, sliding(3))
    twin.save(identity, ids, records_at(identity, ids))
    assert twin.find(identity, (1, 2, 3, 9)).usable == 0  # rows 4 and 5 alone are there
    twin.save(identity, ids[:3], records_at(identity, ids[:3]))
    assert twin.find(identity, (1, 2, 3, 9)).usable == 3
    twin.drop(identity, [item for item in twin.items(identity) if item[0] == "state"])
    assert twin.find(identity, (1, 2, 3, 9)).usable == 0


def test_the_twin_knows_nothing_of_the_rule() -> None:
    imported = [line for line in Path(naive.__file__).read_text().splitlines() if line.startswith(("import", "from"))]
    assert not any(name in line for line in imported for name in ("resume", "needs", "geometry", "kvstore.store"))


def test_states_depend_on_everything_before() -> None:
    identity = mixed_identity(RECURRENT, RING, NYSTROM, hybrid())

    def bits(*about: Any) -> list[bytes]:
        return [plane.rows.tobytes() for record in model_states(*about) for plane in record.planes]

    same, *others = [
        bits(identity, (1, 2, 3)), bits(identity, (2, 2, 3)), bits(identity, (1, 2)), bits(identity, (1, 2, 3), (), FOLDED),
        bits(mixed_identity(RECURRENT, RING, NYSTROM, hybrid(), seed=1), (1, 2, 3)),
        bits(identity, (1, 2, 3), [Attachment(0, 1, IMAGE)]), bits(identity, (1, 2, 3), [Attachment(0, 2, IMAGE)]),
    ]  # fmt: skip
    assert same == bits(identity, (1, 2, 3)) and len(set(same)) == len(same)
    assert all(not set(same) & set(other) for other in others)
    rows = [plane.rows.tobytes() for record in model_rows(identity, (1, 2, 3)) for plane in record.planes]
    assert not set(same) & set(rows)
    (blob,), (longer,) = (model_states(mixed_identity(OPAQUE), ids)[0].planes for ids in ((1, 2, 3), (1, 2, 3, 4)))
    assert longer.rows.tobytes().startswith(blob.rows.tobytes())
