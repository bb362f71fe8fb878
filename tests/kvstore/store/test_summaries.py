"""Summaries: what a restart reads of a record instead of its head, and never believes on its own.

The oracle is the same store without its summaries: whatever is in them, the index that comes of it is
the one that comes of the heads.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import TOKENS, check_restore, random_identity, save
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity, sliding
from warmkv.schema import summary
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, Attachment, Lineage, NamespaceKey, RecordId
from warmkv.schema.summary import Summary

OpenStore = Callable[..., Store]
MIB = 1 << 20
SAMPLE = Summary(
    bytes(range(16, 32)), NamespaceKey(b"n" * 16), Lineage(b"l" * 16), RecordId(b"p" * 16), 3, 9, 2**40, 2**39, 77, "x", 0, 812
)  # fmt: skip


@contextmanager
def summaries(path: Path) -> Iterator[tuple[lmdb.Transaction, object]]:
    """A write transaction of the closed store, and its table of summaries."""
    with lmdb.open(str(path), max_dbs=16, map_size=512 * MIB) as env:
        db = env.open_db(b"summaries")
        with env.begin(write=True) as txn:
            yield txn, db


def rows_of(path: Path) -> dict[bytes, bytes]:
    with summaries(path) as (txn, db):
        return dict(txn.cursor(db))


def put(path: Path, rows: dict[bytes, bytes]) -> None:
    with summaries(path) as (txn, db):
        for key, value in rows.items():
            txn.put(key, value, db=db)


def picture(store: Store) -> dict[RecordId, tuple[object, ...]]:
    """All that an index says about each record, and where it lies in its tree."""
    found: dict[RecordId, tuple[object, ...]] = {}
    for record in store.engine.index.records.values():
        node, nodes = record.node, []
        while node is not None and node.parent is not None:
            nodes.append((node.start, node.end, node.key, node.attachment, sorted(item.id for item in node.records)))
            node = node.parent
        found[record.id] = (
            record.namespace.key, record.lineage, record.start, record.end, record.complete, record.extents, record.fields,
            record.provides, record.parent.id if record.parent else None, sorted(child.id for child in record.children),
            record.total_bytes, record.payload_bytes, record.created_ns, record.writer, record.last_used, record.hits,
            record.pinned_until_ns, sorted(record.anchors), record.cold, record.cold_children, nodes,
        )  # fmt: skip
    return found


IMAGE = (Attachment(2, 3, bytes(range(32))),)
MODELS = (mixed_identity(FULL, FULL), mixed_identity(FULL, sliding(3), RECURRENT))


def filled(open_store_with: OpenStore) -> Path:
    """Chains, branches inside and at the end of segments, states, anchors, images, two models."""
    store, rng = open_store_with(True), random.Random(7)
    for identity in MODELS:
        save(store, identity, TOKENS[:4], anchors=[Anchor(2), Anchor(4)])
        for length in (6, 9):
            save(store, identity, TOKENS[:length])
        for _ in range(12):
            kept = rng.randrange(1, 9)
            save(store, identity, [*TOKENS[:kept], *(rng.randrange(100, 200) for _ in range(rng.randrange(1, 5)))])
    for tail in (70, 80, 90):
        save(store, MODELS[0], [1, 2, 5, 5, 5, tail], attachments=IMAGE)
    store.pin(MODELS[0], TOKENS, 3600)
    store.close()
    assert store.engine.options.path is not None
    return store.engine.options.path


@pytest.fixture
def expected(open_store_with: OpenStore) -> tuple[Path, dict[RecordId, tuple[object, ...]]]:
    """A store without summaries, as format 2.0 has it, and what its heads alone say."""
    path = filled(open_store_with)
    before = rows_of(path)
    with summaries(path) as (txn, db):
        txn.drop(db)
    store = open_store_with(True)
    seen = picture(store)
    assert store.engine.swept == 0 and check(store.engine) == [] and len(seen) > 40
    store.close()
    assert rows_of(path) == before, "what is made of a head is what was written with it"
    return path, seen


def reopened(open_store_with: OpenStore) -> dict[RecordId, tuple[object, ...]]:
    store = open_store_with(True)
    seen = picture(store)
    assert store.engine.swept == 0 and check(store.engine) == []
    check_restore(store, MODELS[0], [*TOKENS, 1], 9, verify=True)
    store.close()
    return {key: tuple(strip(value)) for key, value in seen.items()}


def strip(values: tuple[object, ...]) -> list[object]:
    """Without what a use changes."""
    return [value for at, value in enumerate(values) if at not in (14, 15)]


def same(seen: dict[RecordId, tuple[object, ...]], expected: dict[RecordId, tuple[object, ...]]) -> bool:
    return seen == {key: tuple(strip(value)) for key, value in expected.items()}


Expected = tuple[Path, dict[RecordId, tuple[object, ...]]]


def test_an_index_from_summaries_is_the_one_from_heads(open_store_with: OpenStore, expected: Expected) -> None:
    assert same(reopened(open_store_with), expected[1])


def test_damaged_rows_are_made_anew_from_the_heads(open_store_with: OpenStore, expected: Expected) -> None:
    """Each row in another way: a byte flipped at another place, cut, garbage, empty, another's."""
    path, seen = expected
    whole, rng = rows_of(path), random.Random(3)
    others = list(whole.values())
    longest = max(map(len, others))
    for at in range(0, longest, 3):
        damaged = {}
        for number, (key, row) in enumerate(whole.items()):
            changed = bytearray(row)
            changed[(at + number) % len(row)] ^= 1 << rng.randrange(8)
            damaged[key] = [bytes(changed), row[: at % len(row)], os.urandom(len(row)), others[number - 1]][number % 4]
        put(path, damaged)
        assert same(reopened(open_store_with), seen)
        assert rows_of(path) == whole


def test_a_row_made_of_another_head_is_not_believed(open_store_with: OpenStore, expected: Expected) -> None:
    """Its digest is right, and it is a lie: as a program that knows no summaries leaves one behind
    which deletes a record and stores another under the same id."""
    path, seen = expected
    whole = rows_of(path)
    for change in ({"head_digest": b"x" * 16}, {"head_digest": b"x" * 16, "start": 1, "parent": RecordId(b"y" * 16)}):
        lies = {RecordId(key): summary.decode(RecordId(key), row)._replace(**change) for key, row in whole.items()}
        put(path, {id_: summary.encode(id_, about) for id_, about in lies.items()})
        assert same(reopened(open_store_with), seen)
        assert rows_of(path) == whole


def test_rows_of_records_that_are_gone_are_removed(open_store_with: OpenStore, expected: Expected) -> None:
    path, seen = expected
    whole = rows_of(path)
    put(path, {key: summary.encode(RecordId(key), SAMPLE) for key in (bytes(16), b"m" * 16, b"\xff" * 16)} | {b"odd": b""})
    assert same(reopened(open_store_with), seen)
    assert rows_of(path) == whole


def test_what_a_deletion_removes_has_no_row_left(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    save(store, identity, TOKENS[:5], ack="disk")
    save(store, identity, TOKENS, ack="disk")
    path = store.engine.options.path
    assert path is not None and store.clear().records == 2
    store.close()
    assert rows_of(path) == {}


def test_a_store_whose_rows_cannot_be_written_serves_all_the_same(
    open_store_with: OpenStore, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = expected
    with summaries(path) as (txn, db):
        txn.drop(db, delete=False)
    monkeypatch.setattr("warmkv.kvstore.store.cold_writes.ColdWrites.write_summaries", refuse)
    assert same(reopened(open_store_with), seen)
    assert rows_of(path) == {}
    monkeypatch.undo()
    assert same(reopened(open_store_with), seen) and len(rows_of(path)) == len(seen)


def refuse(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_record_without_a_row_is_stored_and_found(open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever keeps a summary from being made costs time at the next start, nothing else."""
    identity = random_identity()

    def odd(raw: bytes, identity: Identity) -> Summary:
        raise FormatError("odd")

    store = open_store_with(True)
    monkeypatch.setattr("warmkv.kvstore.store.cold_writes.summarize", odd)
    assert save(store, identity, TOKENS, ack="disk").durable
    store.close()
    monkeypatch.undo()
    path = store.engine.options.path
    assert path is not None and rows_of(path) == {}
    again = open_store_with(True)
    check_restore(again, identity, [*TOKENS, 1], 9, verify=True)
    again.close()
    assert len(rows_of(path)) == 1
