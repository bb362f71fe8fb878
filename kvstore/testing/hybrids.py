"""Layers that keep less than all rows, or a state: where they resume, and what comes back."""

from __future__ import annotations

import numpy as np
import pytest

from warmkv.kvstore.testing.comparison import positions
from warmkv.kvstore.testing.opened import Opened, check_restore, entries, save
from warmkv.kvstore.testing.samples import (
    CONV,
    ENCODER,
    FOLDED,
    FULL,
    IMAGE,
    NYSTROM,
    OPAQUE,
    OTHER_IMAGE,
    RECURRENT,
    RING,
    SPARSE,
    TOKENS,
    chunked,
    hybrid,
    mixed_identity,
    model_logits,
    records_at,
    shared,
    sink_window,
    sliding,
    weighed,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import LayerSpec, PlaneRole
from warmkv.schema.records import Anchor, AnchorKind, Attachment

#: Models whose last state can be resumed at one position only.
EXACT = {
    "ring": (RING,), "conv": (CONV,), "recurrent": (RECURRENT,), "nystroem": (NYSTROM,), "hybrid": (hybrid(),),
    "windowed hybrid": (hybrid(4),), "importance": (weighed(),), "window and importance": (FULL, weighed(3)),
    "rows with gaps": (SPARSE,), "conv and attention": (CONV, FULL, CONV), "windows and states": (sliding(3), RECURRENT),
    "everything": (FULL, sliding(3), chunked(4), sink_window(2, 3), RING, RECURRENT, NYSTROM, OPAQUE, hybrid(), shared(0)),
}  # fmt: skip
WINDOWED = {
    "sliding": (sliding(4),), "chunked": (chunked(4),), "sinks": (sink_window(2, 3),), "no sinks": (sink_window(0, 3),),
    "window of one": (sliding(1),), "sliding and attention": (FULL, sliding(3), FULL), "two windows": (sliding(2), sliding(7)),
    "two kinds of sinks": (sink_window(1, 4), sink_window(3, 2)), "shared window": (sliding(4), shared(0)),
}  # fmt: skip
ANYWHERE = {"attention": (FULL,), "blob": (OPAQUE,), "blob and attention": (OPAQUE, FULL)}
KINDS = {**EXACT, **WINDOWED, **ANYWHERE}

by_kind = pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS.keys())
by_exact_kind = pytest.mark.parametrize("layers", EXACT.values(), ids=EXACT.keys())
LONG = list(range(100, 140))


class HybridContract(Opened):
    @by_kind
    def test_every_kind_comes_back(self, opened: Verbs, layers: tuple[LayerSpec, ...]) -> None:
        identity = mixed_identity(*layers)
        for length in (1, 2, 3, 4, 5, 9, 40):
            ids = LONG[:length]
            assert save(opened, identity, ids).held == length
            check_restore(opened, identity, [*ids, 7], length, verify=True)
        for length in (1, 2, 3, 4, 5, 9, 40):
            check_restore(opened, identity, [*LONG[:length], 7], length)

    @by_kind
    def test_an_exact_retry_hits_what_was_saved_one_token_before(self, opened: Verbs, layers: tuple[LayerSpec, ...]) -> None:
        identity = mixed_identity(*layers)
        save(opened, identity, TOKENS[:8])
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 8)
        check_restore(opened, identity, [*TOKENS, 1], 9)

    @by_exact_kind
    def test_states_are_given_at_their_own_position_only(self, opened: Verbs, layers: tuple[LayerSpec, ...]) -> None:
        identity = mixed_identity(*layers)
        for length in (12, 24, 35):
            save(opened, identity, LONG[:length])
        for length, usable in ((36, 35), (35, 24), (25, 24), (24, 12), (12, 0), (1, 0)):
            check_restore(opened, identity, LONG[:length], usable)
        check_restore(opened, identity, [*LONG[:30], 1, 2], 24)
        assert opened.match(identity, [*LONG[:30], 1, 2]).matched == 30

    @by_kind
    def test_parked_logits_make_all_of_a_prompt_usable(self, opened: Verbs, layers: tuple[LayerSpec, ...]) -> None:
        identity = mixed_identity(*layers)
        save(opened, identity, TOKENS, logits=model_logits(identity, TOKENS))
        check_restore(opened, identity, TOKENS, 9, logits=True)
        assert opened.match(identity, TOKENS).usable < 9
        assert opened.match(identity, TOKENS[:8], logits=True).usable < 8
        check_restore(opened, identity, [*TOKENS, 1], 9, logits=True)

    def test_logits_can_be_parked_later(self, opened: Verbs) -> None:
        identity = mixed_identity(FULL, RECURRENT)
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 0, logits=True)
        opened.save(identity, TOKENS, [], logits=model_logits(identity, TOKENS))
        check_restore(opened, identity, TOKENS, 9, logits=True)

    @pytest.mark.parametrize("window", [1, 2, 3, 8])
    @pytest.mark.parametrize("layer", [sliding, hybrid, lambda window: sink_window(2, window)], ids=["plain", "hybrid", "sinks"])
    def test_windows_hold_exactly_what_the_next_token_sees(self, opened: Verbs, layer: object, window: int) -> None:
        assert callable(layer)
        identity = mixed_identity(layer(window), FULL)
        for length in sorted({1, max(1, window - 1), window, window + 1, 3 * window, 3 * window + 1}):
            save(opened, identity, LONG[:length], spare=length % 3)
            check_restore(opened, identity, [*LONG[:length], 7], length)
            with opened.restore(identity, [*LONG[:length], 7]) as restored:
                first = max(0, length - (window - 1))
                sinks = min(identity.layers[0].sinks, first)
                wanted = [*range(sinks), *range(first, length)]
                assert positions(restored.layers[0].planes[PlaneRole.KEY]) == wanted

    def test_chunks_begin_at_their_boundary(self, opened: Verbs) -> None:
        identity = mixed_identity(chunked(4))
        for length in (3, 4, 5, 7, 8, 9):
            save(opened, identity, LONG[:length])
            with opened.restore(identity, [*LONG[:length], 7]) as restored:
                assert restored.usable == length
                assert positions(restored.layers[0].planes[PlaneRole.KEY]) == list(range(length // 4 * 4, length))

    @pytest.mark.parametrize("length", [100, 128, 129, 200, 1000])
    def test_rows_are_in_temporal_order_at_their_positions(self, opened: Verbs, length: int) -> None:
        identity = mixed_identity(sliding(128), RING)
        ids = [number % 97 for number in range(length)]
        save(opened, identity, ids, spare=32)
        check_restore(opened, identity, [*ids, 1], length, verify=True)
        with opened.restore(identity, [*ids, 1]) as restored:
            assert restored.layers[0].first == max(0, length - 127)
            assert restored.layers[0].keys.shape[0] == min(length, 127)

    def test_rows_a_window_slid_past_are_a_miss_there(self, opened: Verbs) -> None:
        identity = mixed_identity(FULL, sliding(4))
        save(opened, identity, LONG[:20])
        check_restore(opened, identity, LONG[:15], 0)
        check_restore(opened, identity, LONG[:20], 0)
        save(opened, identity, LONG[:26], spare=2)
        for length, usable in ((27, 26), (26, 25), (25, 24), (24, 20), (21, 20), (20, 0)):
            check_restore(opened, identity, LONG[:length], usable)

    def test_a_save_adds_windows_and_states_to_rows_that_are_held(self, opened: Verbs) -> None:
        identity = mixed_identity(FULL, sliding(4), CONV, OPAQUE)
        save(opened, identity, LONG)
        for length, before in ((7, 0), (20, 7), (39, 20)):
            check_restore(opened, identity, [*LONG[:length], 7], before)
            assert not save(opened, identity, LONG[:length]).duplicate
            assert save(opened, identity, LONG[:length]).duplicate
            check_restore(opened, identity, [*LONG[:length], 7], length)
        check_restore(opened, identity, [*LONG, 7], 40)

    def test_a_blob_is_cut_back_to_what_agrees(self, opened: Verbs) -> None:
        for layers in ((OPAQUE,), (OPAQUE, FULL), (FULL, OPAQUE, OPAQUE)):
            identity = mixed_identity(*layers)
            save(opened, identity, TOKENS)
            for length in range(1, 9):
                check_restore(opened, identity, [*TOKENS[:length], 99], length)
            save(opened, identity, [*TOKENS[:4], 50, 51, 52, 53, 54, 55, 56, 57])
            for length in range(1, 9):
                check_restore(opened, identity, [*TOKENS[:length], 99], length)

    def test_encoder_output_is_needed_for_every_image_before(self, opened: Verbs) -> None:
        identity = mixed_identity(ENCODER, FULL)
        both = [Attachment(1, 2, IMAGE), Attachment(5, 2, OTHER_IMAGE)]
        records = records_at(identity, TOKENS, both)
        opened.save(identity, TOKENS, [item for item in records if getattr(item, "position", 3) == 3], attachments=both)
        check_restore(opened, identity, [*TOKENS, 1], 5, attachments=both)
        save(opened, identity, TOKENS, attachments=both)
        check_restore(opened, identity, [*TOKENS, 1], 9, attachments=both)
        check_restore(opened, identity, [*TOKENS, 1], 5, attachments=[both[0], Attachment(5, 2, IMAGE)])
        save(opened, identity, [1, 2, 3])
        check_restore(opened, identity, [1, 2, 3, 4], 3)

    @by_exact_kind
    def test_states_of_other_images_and_lineages_are_a_miss(self, opened: Verbs, layers: tuple[LayerSpec, ...]) -> None:
        identity, image = mixed_identity(*layers), [Attachment(3, 4, IMAGE)]
        save(opened, identity, TOKENS[:3])
        save(opened, identity, TOKENS, attachments=image)
        longer = [*TOKENS, 1]
        check_restore(opened, identity, longer, 9, attachments=image)
        for attachments in ([], [Attachment(3, 4, OTHER_IMAGE)], [Attachment(3, 5, IMAGE)]):
            check_restore(opened, identity, longer, 3, attachments=attachments)
        check_restore(opened, identity, longer, 0, attachments=image, lineage=FOLDED)
        check_restore(opened, mixed_identity(*layers, seed=1), longer, 0, attachments=image)

    def test_a_shared_system_prompt_is_found_by_every_user(self, opened: Verbs) -> None:
        identity = mixed_identity(FULL, RECURRENT)
        system = [number % 89 for number in range(2048)]
        save(opened, identity, system, anchors=[Anchor(2048, AnchorKind.SYSTEM_PROMPT)])
        before = entries(opened)
        for user in range(20):
            prompt = [*system, *([1000 + user] * (50 + 13 * user))]
            check_restore(opened, identity, prompt, 2048)
            saved = save(opened, identity, prompt)
            assert saved.start == 2048
            check_restore(opened, identity, [*prompt, 5], len(prompt))
        assert isinstance(before, int) and entries(opened) == before + 40

    def test_groups_say_what_each_kind_of_layer_allows(self, opened: Verbs) -> None:
        identity = mixed_identity(FULL, sliding(4), RECURRENT, FULL)
        save(opened, identity, TOKENS)
        assert opened.match(identity, TOKENS[:7]).groups == ()
        groups = {group.layers: group.usable for group in opened.match(identity, TOKENS[:7], detail=True).groups}
        assert groups == {(0, 3): 6, (1,): 0, (2,): 0}
        groups = {group.layers: group.usable for group in opened.match(identity, [*TOKENS, 1], detail=True).groups}
        assert groups == {(0, 3): 9, (1,): 9, (2,): 9}

    def test_an_anchor_that_cannot_be_resumed_from_is_passed_over(self, opened: Verbs) -> None:
        identity = mixed_identity(RECURRENT)
        save(opened, identity, TOKENS[:3], anchors=[Anchor(3, AnchorKind.SYSTEM_PROMPT)])
        save(opened, identity, TOKENS[:5])
        save(opened, identity, TOKENS, anchors=[Anchor(6, AnchorKind.TURN), Anchor(7, AnchorKind.TURN)])
        assert opened.match(identity, [*TOKENS, 1], at="anchor").usable == 3
        assert opened.match(identity, TOKENS[:8]).usable == 5
        with opened.restore(identity, TOKENS[:8], at="anchor") as restored:
            assert restored.usable == 3 and restored.anchor == Anchor(3, AnchorKind.SYSTEM_PROMPT)

    def test_states_are_read_only_views_that_outlive_close(self, opened: Verbs) -> None:
        identity = mixed_identity(RECURRENT)
        save(opened, identity, TOKENS)
        restored = opened.restore(identity, [*TOKENS, 1])
        state = restored.layers[0].states[PlaneRole.RECURRENT].array()
        kept = state.copy()
        restored.close()
        opened.clear()
        assert not state.flags.writeable and np.array_equal(state.view(np.uint32), kept.view(np.uint32))
