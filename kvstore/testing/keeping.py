"""Forgetting, pinning, counting, and the end of it all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from warmkv.kvstore.testing.comparison import assert_rows
from warmkv.kvstore.testing.opened import Opened, check_restore, entries, save
from warmkv.kvstore.testing.samples import (
    FOLDED,
    TOKENS,
    model_rows,
    random_identity,
    random_rows,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import ClosedError
from warmkv.schema.identity import Identity


class KeepingContract(Opened):
    def test_forget_drops_what_nothing_else_needs(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:4])
        save(opened, identity, TOKENS)
        save(opened, identity, TOKENS[:4] + [50, 51])
        assert opened.forget(identity, TOKENS).records == 1
        check_restore(opened, identity, TOKENS, 4)
        check_restore(opened, identity, TOKENS[:4] + [50, 51, 1], 6)
        assert opened.forget(identity, TOKENS[:4] + [50, 51]).records == 2
        assert entries(opened) == 0
        assert opened.forget(identity, TOKENS).records == 0

    def test_forget_keeps_longer_entries(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        assert opened.forget(identity, TOKENS[:5]).records == 0
        check_restore(opened, identity, TOKENS, 8)

    def test_what_was_forgotten_can_be_saved_again(self, opened: Verbs, identity: Identity) -> None:
        ack = "disk" if self.cold else "memory"
        for _ in range(5):
            assert not save(opened, identity, TOKENS, ack=ack).duplicate
            check_restore(opened, identity, TOKENS, 8, verify=True)
            dropped = opened.forget(identity, TOKENS)
            assert dropped.records == 1 and dropped.total_bytes > 0
            check_restore(opened, identity, TOKENS, 0)

    def test_restored_state_survives_forget(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        with opened.restore(identity, TOKENS) as restored:
            opened.forget(identity, TOKENS)
            save(opened, identity, list(range(50)))
            assert_rows(restored, model_rows(identity, TOKENS))

    def test_clear_of_one_identity_leaves_the_others(self, opened: Verbs, identity: Identity) -> None:
        other = random_identity(seed=1)
        save(opened, identity, TOKENS)
        save(opened, identity, TOKENS, lineage=FOLDED)
        save(opened, other, TOKENS)
        assert opened.clear(identity).records == 2
        check_restore(opened, identity, TOKENS, 0)
        check_restore(opened, other, TOKENS, 8)
        assert opened.clear().records == 1
        assert entries(opened) == 0
        assert save(opened, identity, TOKENS).stored

    def test_pin_counts_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        assert opened.pin(identity, TOKENS, 60) == 0
        save(opened, identity, TOKENS[:6])
        assert opened.pin(identity, TOKENS, 60) == 6
        assert opened.unpin(identity, TOKENS) == 6

    def test_stats_count(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        opened.restore(identity, TOKENS).close()
        opened.restore(identity, [99]).close()
        stats = opened.stats()
        assert (stats["entries"], stats["hits"], stats["misses"], stats["saves"], stats["leases"]) == (1, 1, 1, 1, 0)

    def test_no_verb_works_after_close(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS)
        opened.close()
        opened.close()
        rows = random_rows(identity, 9)
        calls: list[Callable[[], object]] = [
            lambda: opened.match(identity, TOKENS), lambda: opened.restore(identity, TOKENS), lambda: opened.stats(),
            lambda: opened.prefetch(identity, TOKENS), lambda: opened.offer(identity, TOKENS), lambda: opened.clear(),
            lambda: opened.save(identity, TOKENS, rows), lambda: opened.save_async(identity, TOKENS, rows),
            lambda: opened.pin(identity, TOKENS, 1), lambda: opened.forget(identity, TOKENS),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ClosedError):
                call()
