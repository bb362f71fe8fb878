"""What a save sends, stores and acknowledges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.testing.opened import Opened, check_restore, entries, save
from warmkv.kvstore.testing.samples import (
    FOLDED,
    TOKENS,
    model_rows,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import OfferAgain, RecordError
from warmkv.schema.identity import Identity


class SavingContract(Opened):
    def test_second_save_sends_only_new_rows(self, opened: Verbs, identity: Identity) -> None:
        first = list(range(1000, 1512))
        begun = save(opened, identity, first)
        grown = save(opened, identity, first + [1, 2, 3])
        assert (begun.start, begun.held, begun.duplicate) == (0, 512, False)
        assert (grown.start, grown.held) == (512, 515)
        assert grown.sent_bytes < begun.sent_bytes // 8
        check_restore(opened, identity, first + [1, 2, 3, 4], 515)

    def test_offer_says_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        assert opened.offer(identity, TOKENS).held == 0
        save(opened, identity, TOKENS[:6])
        assert opened.offer(identity, TOKENS[:6]).held == 6
        assert opened.offer(identity, TOKENS).held == 6
        assert opened.offer(identity, TOKENS[:4] + [99]).held == 4
        assert opened.offer(identity, TOKENS, lineage=FOLDED).held == 0

    def test_rows_may_begin_at_what_is_held(self, opened: Verbs, identity: Identity) -> None:
        save(opened, identity, TOKENS[:6])
        tail = [
            LayerRows(r.layer, tuple(replace(p, rows=p.rows[6:]) for p in r.planes), first=6)
            for r in model_rows(identity, TOKENS)
        ]  # fmt: skip
        assert opened.save(identity, TOKENS, tail).start == 6
        check_restore(opened, identity, TOKENS + [1], 9)

    def test_rows_that_begin_behind_what_is_held_are_refused(self, opened: Verbs, identity: Identity) -> None:
        tail = [
            LayerRows(r.layer, tuple(replace(p, rows=p.rows[6:]) for p in r.planes), first=6)
            for r in model_rows(identity, TOKENS)
        ]  # fmt: skip
        with pytest.raises(OfferAgain, match="rows from 0 on"):
            opened.save(identity, TOKENS, tail)
        warm: Any = opened.stats()["warm"]
        assert (entries(opened), warm["reserved_bytes"]) == (0, 0)

    def test_duplicates_are_stored_once(self, opened: Verbs, identity: Identity) -> None:
        first, again = save(opened, identity, TOKENS), save(opened, identity, TOKENS)
        assert (first.duplicate, again.duplicate, again.sent_bytes) == (False, True, 0)
        assert again.id == first.id and entries(opened) == 1

    def test_save_async_is_done_after_flush(self, opened: Verbs, identity: Identity) -> None:
        futures = [
            opened.save_async(identity, TOKENS[:n], model_rows(identity, TOKENS[:n])) for n in (3, 6, 9)
        ]  # fmt: skip
        assert opened.flush(60)
        assert [future.result(0).held for future in futures] == [3, 6, 9]
        check_restore(opened, identity, TOKENS, 8)

    def test_save_async_checks_its_input_at_once(self, opened: Verbs, identity: Identity) -> None:
        with pytest.raises(RecordError):
            opened.save_async(identity, TOKENS, model_rows(identity, TOKENS[:4]))

    def test_disk_acknowledgement(self, opened: Verbs, identity: Identity) -> None:
        if not self.cold:
            pytest.skip("no cold tier")
        assert save(opened, identity, TOKENS[:5]).stored
        assert save(opened, identity, TOKENS, ack="disk").durable
        assert save(opened, identity, TOKENS, ack="disk").durable
        assert save(opened, identity, TOKENS).durable
