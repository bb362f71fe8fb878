"""What a query is told: how much is known, from where to resume, where it differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from warmkv.kvstore.testing.comparison import assert_rows
from warmkv.kvstore.testing.opened import Opened, check_restore, entries, save
from warmkv.kvstore.testing.samples import (
    FOLDED,
    TOKENS,
    model_rows,
    random_identity,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import Identity, PlaneFormat


class MatchingContract(Opened):
    def test_empty_store_is_a_miss_with_a_reason(self, opened: Verbs, identity: Identity) -> None:
        match = opened.match(identity, TOKENS)
        assert (match.matched, match.usable, match.tier, bool(match)) == (0, 0, None, False)
        assert match.reason
        check_restore(opened, identity, TOKENS, 0)

    @pytest.mark.parametrize(
        ("length", "matched", "usable"), [(1, 1, 0), (2, 2, 1), (8, 8, 7), (9, 9, 8), (10, 9, 9), (12, 9, 9)]
    )
    def test_one_token_is_left_to_feed(self, opened: Verbs, identity: Identity, length: int, matched: int, usable: int) -> None:
        save(opened, identity, TOKENS)
        ids = (TOKENS + [70, 71, 72])[:length]
        match = opened.match(identity, ids)
        assert (match.matched, match.usable) == (matched, usable)
        assert match.tier == ("warm" if usable else None)
        check_restore(opened, identity, ids, usable)

    def test_one_stored_token(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, [5])
        check_restore(opened, identity, [5], 0)
        check_restore(opened, identity, [5, 6], 1)

    def test_longer_entry_serves_shorter_request_by_its_first_rows(self, opened: Verbs, identity: Identity) -> None:
        long = list(range(100, 300))
        save(opened, identity, long)
        for length in (2, 63, 64, 65, 199, 200):
            check_restore(opened, identity, long[:length], length - 1)

    def test_full_length_entry_does_not_shadow_shorter(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:5])
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 8)
        check_restore(opened, identity, TOKENS[:5] + [99], 5)
        check_restore(opened, identity, TOKENS[:6] + [99], 6)

    def test_shorter_entry_saved_after_longer_is_a_duplicate(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        shorter = save(opened, identity, TOKENS[:4])
        assert (shorter.duplicate, shorter.sent_bytes, shorter.held) == (True, 0, 4)
        assert entries(opened) == 1

    def test_branches_split_inside_segments(self, opened: Verbs, identity: Identity) -> None:
        left, right = TOKENS, TOKENS[:4] + [50, 51, 52]
        save(opened, identity, left)
        saved = save(opened, identity, right)
        assert saved.start == 4
        third = right[:6] + [60, 61]
        assert save(opened, identity, third).start == 6
        for ids in (left, right, third):
            check_restore(opened, identity, ids + [1], len(ids))
        check_restore(opened, identity, right[:5] + [9], 5)

    def test_first_difference_names_both_ids(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        difference = opened.match(identity, TOKENS[:3] + [99, 15]).first_difference
        assert difference is not None
        assert (difference.position, difference.query, difference.stored) == (3, 99, 14)
        assert opened.match(identity, TOKENS + [1]).first_difference is None

    def test_ids_of_any_integer_type_are_the_same_ids(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, [1, 2, 2**32 - 1, 4])
        for kind in (np.int64, np.uint32, np.uint64, ">u8"):
            assert opened.match(identity, np.array([1, 2, 2**32 - 1, 4, 5], kind)).usable == 4
        assert opened.match(identity, (1, 2, 2**32 - 1, 4, 5)).usable == 4
        assert opened.match(identity, np.array([1, 0, 2, 0, 2**32 - 1, 0, 4, 0, 5], np.uint32)[::2]).usable == 4

    def test_other_identity_is_a_miss(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        kin = [
            random_identity(seed=1),
            random_identity(format=PlaneFormat.F16),
            replace(identity, tenant=b"t" * 16),
            replace(identity, attention="sdpa"),
            replace(identity, rope=replace(identity.rope, base=10001.0)),
            replace(identity, runtime_state_version="2"),
        ]
        for other in kin:
            check_restore(opened, other, TOKENS + [1], 0)
        check_restore(opened, identity, TOKENS + [1], 9)

    def test_lineages_never_mix(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        check_restore(opened, identity, TOKENS, 0, lineage=FOLDED)
        save(opened, identity, TOKENS[:5], lineage=FOLDED)
        check_restore(opened, identity, TOKENS, 5, lineage=FOLDED)
        check_restore(opened, identity, TOKENS, 8)

    def test_restore_of_a_match_gives_no_more_than_was_matched(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:5])
        match = opened.match(identity, TOKENS)
        save(opened, identity, TOKENS)
        with opened.restore(match, TOKENS) as restored:
            assert restored.usable == 5
            assert_rows(restored, model_rows(identity, TOKENS))
        miss = opened.match(identity, [98, 99])
        assert not opened.restore(miss, [98, 99])

    def test_prefetch_answers_as_match_does(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert opened.prefetch(identity, TOKENS + [1]).usable == 9
        assert opened.prefetch(identity, [7, 8]).usable == 0
