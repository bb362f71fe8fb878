"""The store against a naive twin, with budgets so small that everything is evicted all the time.

The twin never forgets, so it is an upper bound for lengths and the truth about numbers: a hit
may be shorter than the twin's, never longer, and its rows are the twin's bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.testing import FOLDED, IMAGE, OTHER_IMAGE, NaiveStore, assert_rows, model_rows, random_identity
from warmkv.schema.errors import Busy, ColdFull, OfferAgain, TooLarge
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage

IDENTITIES = (random_identity(1, 1, 4, seed=0), random_identity(1, 1, 4, seed=1))
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
    return draw(st.sampled_from([0, 0, 0, 1])), tokens, attachments, draw(st.sampled_from([CLEAN, CLEAN, CLEAN, FOLDED]))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twin = NaiveStore()
        self.leases: list[tuple[Restored, list[LayerRows]]] = []
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
        rows = model_rows(IDENTITIES[model], tokens, attachments, lineage)
        self.twin.save(IDENTITIES[model], tokens, rows, attachments, lineage)
        anchors = [Anchor(len(tokens))] if anchored else []
        try:
            saved = self.store.save(
                IDENTITIES[model], tokens, rows, ack="disk" if disk else "memory", anchors=anchors,
                attachments=attachments, lineage=lineage,
            )  # fmt: skip
        except (Busy, TooLarge, OfferAgain, ColdFull):
            return
        assert saved.stored and saved.held >= len(tokens)
        if not saved.duplicate:  # what was held before may be in the cold tier only, and be evicted there meanwhile
            match = self.store.match(IDENTITIES[model], tokens, attachments=attachments, lineage=lineage)
            assert match.matched == len(tokens)

    @rule(query=queries(), anchored=st.booleans(), verify=st.booleans(), keep=st.booleans())
    def restore(self, query: Query, anchored: bool, verify: bool, keep: bool) -> None:
        model, tokens, attachments, lineage = query
        expected = self.twin.find(IDENTITIES[model], tokens, attachments, lineage)
        restored = self.store.restore(
            IDENTITIES[model], tokens, attachments=attachments, lineage=lineage, verify=verify,
            at="anchor" if anchored else "longest",
        )  # fmt: skip
        assert restored.usable <= expected.usable and restored.matched <= expected.matched
        if restored:
            rows = model_rows(IDENTITIES[model], tokens, attachments, lineage)
            assert_rows(restored, rows)
            assert_rows(restored, expected.records)
            if keep and len(self.leases) < 3:
                self.leases.append((restored, rows))
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
            restored, rows = self.leases.pop(0)
            assert_rows(restored, rows)
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

    @rule(model=st.sampled_from([0, 1, None]))
    def clear(self, model: int | None) -> None:
        identity = None if model is None else IDENTITIES[model]
        self.store.clear(identity)
        for which in (0, 1) if model is None else (model,):
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
        for restored, rows in self.leases:
            assert_rows(restored, rows)
        if hasattr(self, "store"):
            self.store.close()
            assert self.store.engine.warm.ledger.used_bytes == self.store.engine.warm.ledger.leased_bytes
        for restored, _ in self.leases:
            restored.close()
        shutil.rmtree(self.directory)


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
