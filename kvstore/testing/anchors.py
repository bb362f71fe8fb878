"""Named positions: stored, returned, resumed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warmkv.kvstore.testing.comparison import assert_rows
from warmkv.kvstore.testing.opened import Opened, save
from warmkv.kvstore.testing.samples import (
    FOLDED,
    TOKENS,
    model_rows,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind


class AnchorContract(Opened):
    def test_anchors_are_stored_and_returned(self, opened: Verbs, identity: Identity) -> None:
        system = Anchor(3, AnchorKind.SYSTEM_PROMPT, depth=1, semantic_hash=2**64 - 1, shift_offset=-5)
        turn = Anchor(6, AnchorKind.TURN)
        save(opened, identity, TOKENS[:5], anchors=[system], lineage=FOLDED)
        save(opened, identity, TOKENS, anchors=[turn, replace(turn, kind=AnchorKind.THINKING)], lineage=FOLDED)
        anchors = opened.match(identity, TOKENS + [1], lineage=FOLDED).anchors
        assert anchors == (system, turn, replace(turn, kind=AnchorKind.THINKING))
        assert opened.match(identity, TOKENS[:5] + [99, 98], lineage=FOLDED).anchors == (system,)

    def test_shifted_rows_are_never_those_of_unshifted_tokens(self, opened: Verbs, identity: Identity) -> None:
        for offset in (-1, 7):
            shifted = Anchor(5, AnchorKind.TURN, shift_offset=offset)
            for anchors in ([shifted], [Anchor(5), shifted]):
                with pytest.raises(RecordError, match=f"anchor at 5: its rows were shifted by {offset}"):
                    save(opened, identity, TOKENS[:5], anchors=anchors)
        assert opened.match(identity, TOKENS).matched == 0
        save(opened, identity, TOKENS[:5], anchors=[shifted], lineage=FOLDED)
        for at in ("longest", "anchor"):
            assert opened.match(identity, TOKENS, at=at).usable == 0
            assert opened.match(identity, TOKENS, at=at, lineage=FOLDED).usable == 5
        save(opened, identity, TOKENS[:5], anchors=[Anchor(5)])
        assert opened.match(identity, TOKENS).anchors == (Anchor(5),)
        assert opened.match(identity, TOKENS, lineage=FOLDED).anchors == (shifted,)

    def test_restore_at_an_anchor(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS, anchors=[Anchor(3, AnchorKind.SYSTEM_PROMPT), Anchor(6, AnchorKind.TURN)])
        for ids, usable in ((TOKENS + [1], 6), (TOKENS[:6], 3), (TOKENS[:4] + [99, 98], 3)):
            assert opened.match(identity, ids, at="anchor").usable == usable
            with opened.restore(identity, ids, at="anchor") as restored:
                assert restored.usable == usable
                assert restored.anchor is not None and restored.anchor.position == usable
                assert_rows(restored, model_rows(identity, ids))

    def test_without_an_anchor_the_longest_is_given(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS, anchors=[Anchor(9)])
        with opened.restore(identity, TOKENS[:6], at="anchor") as restored:
            assert restored.usable == 5 and restored.anchor is None

    def test_anchors_can_be_added_to_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert save(opened, identity, TOKENS[:6], anchors=[Anchor(6, AnchorKind.TURN)]).sent_bytes == 0
        assert opened.match(identity, TOKENS, at="anchor").usable == 6

    def test_anchors_stay_on_their_own_branch(self, opened: Verbs, identity: Identity) -> None:
        branch = TOKENS[:4] + [50, 51, 52, 53]
        save(opened, identity, TOKENS)
        save(opened, identity, branch, anchors=[Anchor(6, AnchorKind.TURN), Anchor(2, AnchorKind.SYSTEM_PROMPT)])
        assert [anchor.position for anchor in opened.match(identity, branch).anchors] == [2, 6]
        assert [anchor.position for anchor in opened.match(identity, TOKENS).anchors] == [2]
