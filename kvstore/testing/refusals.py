"""Bad input raises before anything is sent or stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.testing.opened import Opened, entries
from warmkv.kvstore.testing.samples import (
    IMAGE,
    TOKENS,
    random_rows,
)
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity, PlaneFormat, PlaneRole
from warmkv.schema.records import Anchor, Attachment, Lineage


class RefusalContract(Opened):
    def test_bad_ids_are_refused(self, opened: Verbs, identity: Identity) -> None:
        rows = random_rows(identity, 3)
        bad: list[Any] = [
            [], [[1, 2, 3]], [-1, 2, 3], [1, 2, 2**32], [1.0, 2.0, 3.0], [True, False, True], ["1", "2", "3"], [[1, 2], [3]],
            np.zeros((1, 3), np.uint32), np.zeros(0, np.uint32), np.uint32(3), [1, 2, 2**70], [None, 1, 2],
        ]  # fmt: skip
        for ids in bad:
            for call in (opened.match, opened.restore, opened.prefetch, opened.offer, opened.forget, opened.unpin):
                with pytest.raises(RecordError):
                    call(identity, ids)
            with pytest.raises(RecordError):
                opened.save(identity, ids, rows)
        assert entries(opened) == 0

    def test_bad_records_are_refused_and_nothing_is_stored(self, opened: Verbs, identity: Identity) -> None:
        ids = TOKENS[:4]
        good = random_rows(identity, 4)
        key, value = good[0].planes
        first = replace

        def with_key(rows: Any, **changes: Any) -> list[LayerRows]:
            return [first(good[0], planes=(replace(key, rows=rows, **changes), value)), good[1]]

        bad: dict[str, list[LayerRows]] = {
            "a layer missing": good[:1],
            "a layer twice": [good[0], good[0]],
            "an unknown layer": [*good, replace(good[1], layer=2)],
            "a negative layer": [good[0], replace(good[1], layer=-1)],
            "no planes": [replace(good[0], planes=()), good[1]],
            "a plane missing": [replace(good[0], planes=(key,)), good[1]],
            "a plane twice": [replace(good[0], planes=(key, key)), good[1]],
            "an unknown plane": [replace(good[0], planes=(key, replace(value, role=PlaneRole.LATENT))), good[1]],
            "too few rows": with_key(key.rows[:3]),
            "too many rows": with_key(np.concatenate([key.rows, key.rows[:1]])),
            "no rows": with_key(key.rows[:0]),
            "another dtype": with_key(key.rows.astype(np.float64)),
            "another byte order": with_key(key.rows.astype(">f4")),
            "another format": with_key(key.rows, format=PlaneFormat.F16),
            "another head size": with_key(key.rows[:, :, :-1]),
            "another rank": with_key(key.rows[:, 0]),
            "heads last": with_key(key.rows.transpose(0, 2, 1)),
            "a list": with_key([1, 2, 3, 4]),
            "a scalar": with_key(np.float32(1)),
            "a negative first row": [replace(item, first=-1) for item in good],
            "a wrong first row": [replace(item, first=1) for item in good],
        }
        for name, records in bad.items():
            for call in (opened.save, opened.save_async):
                with pytest.raises(RecordError):
                    call(identity, ids, records)
                    pytest.fail(f"{name} was accepted")
        assert entries(opened) == 0
        assert opened.match(identity, ids).matched == 0

    def test_bad_attachments_are_refused(self, opened: Verbs, identity: Identity) -> None:
        bad = [
            [Attachment(0, 0, IMAGE)],
            [Attachment(-1, 2, IMAGE)],
            [Attachment(8, 2, IMAGE)],
            [Attachment(9, 1, IMAGE)],
            [Attachment(2, 3, IMAGE), Attachment(4, 2, IMAGE)],
            [Attachment(2, 3, IMAGE), Attachment(2, 3, IMAGE)],
            [Attachment(2, 3, IMAGE[:16])],
            [Attachment(2, 3, b"")],
        ]
        for attachments in bad:
            with pytest.raises(RecordError):
                opened.match(identity, TOKENS, attachments=attachments)
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, random_rows(identity, 9), attachments=attachments)
        assert entries(opened) == 0

    def test_bad_anchors_are_refused(self, opened: Verbs, identity: Identity) -> None:
        rows, image = random_rows(identity, 9), [Attachment(3, 4, IMAGE)]
        bad = [Anchor(0), Anchor(-1), Anchor(10), Anchor(4), Anchor(6), Anchor(2, depth=-1), Anchor(2, semantic_hash=2**64)]
        for anchor in bad:
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, rows, anchors=[anchor], attachments=image)
        assert entries(opened) == 0
        assert opened.save(identity, TOKENS, rows, anchors=[Anchor(3), Anchor(7), Anchor(9)], attachments=image).stored

    def test_bad_arguments_are_refused(self, opened: Verbs, identity: Identity) -> None:
        wrong: Any = "eventually"
        rows = random_rows(identity, 9)
        with pytest.raises(RecordError):
            opened.save(identity, TOKENS, rows, ack=wrong)
        with pytest.raises(RecordError):
            opened.match(identity, TOKENS, at=wrong)
        with pytest.raises(RecordError):
            opened.restore(identity, TOKENS, at=wrong)
        for lineage in (b"", b"short", bytes(17)):
            with pytest.raises(RecordError):
                opened.save(identity, TOKENS, rows, lineage=Lineage(lineage))
        for ttl in (0, -1, float("nan"), 2.0**50):
            with pytest.raises(RecordError):
                opened.pin(identity, TOKENS, ttl)
        with pytest.raises(RecordError):
            opened.offer(identity, TOKENS, fields=[b"short"])
        assert entries(opened) == 0
