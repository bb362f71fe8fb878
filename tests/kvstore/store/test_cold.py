"""The cold tier through the store's verbs, with LMDB itself as the side door.

What was changed, cut or left behind on disk is a miss or a typed refusal, never a wrong answer.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

import warmkv
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.cold import ColdTier, WriteItem
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.testing import TOKENS, assert_rows, check_restore, model_rows, random_identity, random_rows, save
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity, sliding
from warmkv.schema import lmdb_records
from warmkv.schema.errors import StoreError, StoreInUse, StoreTooNew
from warmkv.schema.identity import Identity, PlaneFormat
from warmkv.schema.records import Anchor, AnchorKind, Lineage, RecordId
from warmkv.schema.segment import CHUNK_BYTES

OpenStore = Callable[..., Store]
KIB = 1024
MIB = 1 << 20


def ids(seed: int, length: int = 100) -> list[int]:
    return [seed * 1000 + at for at in range(length)]


def where(store: Store) -> Path:
    assert store.engine.options.path is not None
    return store.engine.options.path


@contextmanager
def side_door(path: Path) -> Iterator[lmdb.Environment]:
    """The closed store's environment, opened raw."""
    env = lmdb.open(str(path), max_dbs=16, map_size=512 * MIB)
    try:
        yield env
    finally:
        env.close()


def table(env: lmdb.Environment, name: bytes) -> dict[bytes, bytes]:
    with env.begin() as txn:
        return {bytes(key): bytes(value) for key, value in txn.cursor(env.open_db(name, txn))}


def let_go(store: Store) -> None:
    """Drop every warm copy, so that the next restore reads the disk."""
    assert store.flush(60)
    with store.engine.index.changed:
        for record in list(store.engine.index.warm_order):
            assert record.packed or record.cold == Cold.STORED
            store.engine.warm.evict(record)
    store.engine.warm.reap()


def test_everything_comes_back_after_a_restart(open_store_with: OpenStore) -> None:
    identities = [random_identity(2, 3, 5, format_, seed=format_) for format_ in (PlaneFormat.F32, PlaneFormat.BF16)]
    shifted = Lineage(b"shifted by three")
    store = open_store_with(True)
    for identity in identities:
        save(store, identity, ids(1, 40), anchors=[Anchor(10, AnchorKind.SYSTEM_PROMPT, 2, 2**64 - 1, -3)], lineage=shifted)
        save(store, identity, ids(1, 80), lineage=shifted)
        save(store, identity, [*ids(1, 60), 5, 6, 7], lineage=shifted)
    store.pin(identities[0], ids(1, 80), 3600, lineage=shifted)
    store.close()
    again = open_store_with(True)
    assert again.engine.swept == 0 and check(again.engine) == []
    assert sum(record.pinned_until_ns > 0 for record in again.engine.index.records.values()) == 2
    for identity in identities:
        match = again.match(identity, [*ids(1, 80), 9], lineage=shifted)
        assert match.tier == "cold"
        assert match.anchors == (Anchor(10, AnchorKind.SYSTEM_PROMPT, 2, 2**64 - 1, -3),)
        check_restore(again, identity, [*ids(1, 80), 9], 80, verify=True, lineage=shifted)
        check_restore(again, identity, [*ids(1, 60), 5, 6, 7, 9], 63, verify=True, lineage=shifted)


@pytest.mark.parametrize("half", [2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1])
def test_payloads_around_the_edges_of_chunks(open_store_with: OpenStore, half: int) -> None:
    """Two planes of ``half`` bytes: 4 MiB and 8 MiB of payload, a byte less and a little more."""
    identity = random_identity(1, 1, half, PlaneFormat.RAW)
    rows = random_rows(identity, 1, seed=half)
    store = open_store_with(True)
    store.save(identity, [5], rows, ack="disk")
    store.close()
    with side_door(where(store)) as env:
        sizes = [len(value) for _, value in sorted(table(env, b"chunks").items())]
    payload = -(-half // 64) * 64 + half
    assert sum(sizes) == payload and set(sizes[:-1]) <= {CHUNK_BYTES} and 0 < sizes[-1] <= CHUNK_BYTES
    with open_store_with(True).restore(identity, [5, 6], verify=True) as restored:
        assert_rows(restored, rows)


@pytest.mark.parametrize("name", [b"segments", b"chunks"])
def test_a_flipped_byte_is_a_miss_and_a_quarantine(open_store_with: OpenStore, name: bytes) -> None:
    """Every 5th byte of head and payload of a small record, and all of its preamble. The record
    before it in the chain is still handed out, and the rows can be saved anew."""
    identity = random_identity(1, 1, 4)
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    whole = [*TOKENS, 50, 51, 52]
    wanted, quarantines = 0, 0
    at = 0
    while True:
        saved = save(store, identity, whole, ack="disk")
        assert saved.id is not None and not (saved.duplicate and at)
        let_go(store)
        size = flip(store, name, saved.id, at)
        if at >= size:
            break
        assert store.match(identity, [*whole, 1]).usable == 12
        with store.restore(identity, [*whole, 1]) as restored:
            assert restored.usable == 9, f"byte {at} of {name.decode()}"
            assert_rows(restored, model_rows(identity, whole))
        quarantines += 1
        assert store.match(identity, [*whole, 1]).usable == 9
        assert store.stats()["quarantines"] == quarantines
        at += 1 if at < 64 and name == b"segments" else 5
        wanted += 1
    assert wanted > 20
    check_restore(store, identity, [*whole, 1], 12, verify=True)
    assert check(store.engine) == []


def flip(store: Store, name: bytes, id_: RecordId, at: int) -> int:
    """Flip one bit of byte ``at`` in the value of a record; the value's size."""
    assert store.engine.cold is not None
    env = store.engine.cold._env
    key = lmdb_records.chunk_key(id_, 0) if name == b"chunks" else id_
    with env.begin(write=True) as txn:
        value = bytearray(txn.get(key, db=env.db[name]) or b"")
        assert value
        if at < len(value):
            value[at] ^= 1 << (at % 8)
            txn.put(key, bytes(value), db=env.db[name])
    return len(value)


def test_any_byte_flipped_while_the_store_was_closed_is_a_miss(open_store_with: OpenStore) -> None:
    """One record for every byte of a head and of a chunk, that byte flipped in its own; records
    between them stay whole. What was lost can be saved again, and is then there to stay."""
    identity = random_identity(1, 1, 4)
    store = open_store_with(True)
    saved = [save(store, identity, ids(0, 9), ack="disk")]
    path = where(store)
    store.close()
    with side_door(path) as env:
        sizes = [(name, len(next(iter(table(env, name).values())))) for name in (b"segments", b"chunks")]
    flips = [(name, at) for name, size in sizes for at in range(size)]
    store = open_store_with(True)
    saved += [save(store, identity, ids(seed, 9)) for seed in range(1, len(flips) + 100)]
    store.close()
    with side_door(path) as env:
        db = {name: env.open_db(name) for name in (b"segments", b"chunks")}
        with env.begin(write=True) as txn:
            for seed, (name, at) in enumerate(flips):
                id_ = saved[seed].id
                assert id_ is not None
                key = id_ if name == b"segments" else lmdb_records.chunk_key(id_, 0)
                value = bytearray(txn.get(key, db=db[name]) or b"")
                value[at] ^= 1 << (at % 8)
                txn.put(key, bytes(value), db=db[name])
    again = open_store_with(True)
    for seed in range(len(saved)):
        with again.restore(identity, [*ids(seed, 9), 7]) as restored:
            assert restored.usable == (0 if seed < len(flips) else 9), flips[seed : seed + 1]
            if restored:
                assert_rows(restored, model_rows(identity, ids(seed, 9)))
    assert again.engine.swept == dict(sizes)[b"segments"]
    assert again.stats()["quarantines"] == dict(sizes)[b"chunks"]
    for seed in range(len(flips)):
        assert not save(again, identity, ids(seed, 9)).duplicate
    again.close()
    last = open_store_with(True)
    assert last.engine.swept == 0 and last.report("verify")["bad"] == []
    for seed in range(len(saved)):
        check_restore(last, identity, [*ids(seed, 9), 7], 9, verify=True)


def test_a_namespace_whose_owner_or_identity_changed_is_not_believed(open_store_with: OpenStore, identity: Identity) -> None:
    """Its value has no digest of its own, but its key is one: another owner would be let in."""
    store = open_store_with(True)
    save(store, identity, TOKENS, ack="disk")
    path = where(store)
    store.close()
    with side_door(path) as env:
        key, whole = next(iter(table(env, b"namespaces").items()))
    about = lmdb_records.decode_namespace(whole)
    others = [
        lmdb_records.encode_namespace(replace(about, owner_uid=about.owner_uid + 1)),
        lmdb_records.encode_namespace(replace(about, share="everybody")),
        lmdb_records.encode_namespace(replace(about, identity=random_identity(seed=1))),
        whole[:-1],
        b"",
    ]
    for value in others:
        with side_door(path) as env:
            namespaces = env.open_db(b"namespaces")
            with env.begin(write=True) as txn:
                txn.put(key, value, db=namespaces)
        store = open_store_with(True)
        assert store.engine.swept == 1
        check_restore(store, identity, TOKENS, 0)
        assert save(store, identity, TOKENS, ack="disk").durable
        store.close()
        with side_door(path) as env:
            found = lmdb_records.decode_namespace(table(env, b"namespaces")[key])
            assert replace(found, created_ns=0) == replace(about, created_ns=0)


def test_what_builds_on_a_bad_record_goes_with_it(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    first = save(store, identity, ids(1, 20), ack="disk")
    save(store, identity, ids(1, 40), ack="disk")
    save(store, identity, [*ids(1, 30), 5], ack="disk")
    save(store, identity, ids(2, 20), ack="disk")
    let_go(store)
    assert first.id is not None
    flip(store, b"chunks", first.id, 17)
    miss = store.restore(identity, ids(1, 40))
    assert not miss and "digest" in miss.reason
    assert store.stats()["entries"] == 1
    check_restore(store, identity, ids(2, 20), 19)
    path = where(store)
    store.close()
    with side_door(path) as env:
        assert len(table(env, b"segments")) == 1
        assert list(table(env, b"quarantine")) == [first.id]
    assert open_store_with(True).engine.swept == 0


def test_verify_finds_what_nobody_asked_for(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    bad = save(store, identity, ids(1, 20), ack="disk")
    save(store, identity, ids(2, 20), ack="disk")
    assert store.report("verify")["bad"] == []
    assert bad.id is not None
    flip(store, b"chunks", bad.id, 3)
    found = store.report("verify")
    assert (found["checked"], found["problems"]) == (2, [])
    assert [item["id"] for item in found["bad"]] == [bad.id.hex()]  # type: ignore[attr-defined]
    assert store.stats()["entries"] == 1


# -- files that are not what they were -------------------------------------------------------


def fill(open_store_with: OpenStore, identity: Identity) -> Path:
    store = open_store_with(True)
    for seed in range(20):
        save(store, identity, ids(seed, 30))
    store.close()
    return where(store)


@pytest.mark.parametrize("damage", ["half", "an eighth", "garbage", "a few bytes", "zeros"])
def test_an_unreadable_file_is_moved_aside_with_a_message(
    open_store_with: OpenStore, identity: Identity, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = fill(open_store_with, identity) / "data.mdb"
    size = data.stat().st_size
    if damage == "half":
        os.truncate(data, size // 2)
    elif damage == "an eighth":
        os.truncate(data, size // 8)
    elif damage == "garbage":
        data.write_bytes(os.urandom(size))
    elif damage == "a few bytes":
        os.truncate(data, 100)
    else:
        data.write_bytes(bytes(size))
    with caplog.at_level(logging.ERROR):
        store = open_store_with(True)
    assert [record for record in caplog.records if "moved to data.mdb.corrupt-" in record.getMessage()]
    assert len(list(data.parent.glob("data.mdb.corrupt-*"))) == 1
    for seed in range(20):
        check_restore(store, identity, ids(seed, 30), 0)
    assert save(store, identity, ids(1, 30), ack="disk").durable
    store.close()
    check_restore(open_store_with(True), identity, ids(1, 30), 29, verify=True)


def test_a_file_whose_last_pages_were_never_written_is_sound(open_store_with: OpenStore, identity: Identity) -> None:
    """LMDB does not write a page that one transaction takes and gives back: such a file is
    shorter than its pages, and whole."""
    path = fill(open_store_with, identity)
    with side_door(path) as env:
        chunks = env.open_db(b"chunks")
        with env.begin(write=True) as txn:
            txn.put(b"\xff" * 20, bytes(3 * MIB), db=chunks)
            txn.delete(b"\xff" * 20, db=chunks)
            txn.put(b"format", lmdb_records.encode_format(), db=env.open_db(b"meta", txn))
        needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    assert (path / "data.mdb").stat().st_size < needed
    store = open_store_with(True)
    assert list(path.glob("*.corrupt-*")) == []
    for seed in range(20):
        check_restore(store, identity, ids(seed, 30), 29, verify=True)


def test_a_newer_format_is_refused_and_left_alone(open_store_with: OpenStore, identity: Identity) -> None:
    """Not one byte is changed, though a table of ours is missing and one is not ours."""
    path = fill(open_store_with, identity)
    with side_door(path) as env:
        states = env.open_db(b"states")
        with env.begin(write=True) as txn:
            txn.drop(states)
            txn.put(b"format", b"\x03\x00\x00\x00", db=env.open_db(b"meta", txn))
            txn.put(b"key", b"value", db=env.open_db(b"of the future", txn))
    before = (path / "data.mdb").read_bytes()
    for _ in range(2):
        with pytest.raises(StoreTooNew, match="format 3.0"):
            open_store_with(True)
    assert list(path.glob("*.corrupt-*")) == []
    assert (path / "data.mdb").read_bytes() == before


def test_left_over_pieces_are_swept(open_store_with: OpenStore, identity: Identity) -> None:
    """Chunks without metadata, metadata without chunks, children without parents, heads and
    usage that are not readable: all but the last are swept, and the rest is served."""
    store = open_store_with(True)
    parent = save(store, identity, ids(1, 20), ack="disk")
    save(store, identity, ids(1, 40), ack="disk")
    cut = save(store, identity, ids(2, 20), ack="disk")
    unread = save(store, identity, ids(3, 20), ack="disk")
    good = save(store, identity, ids(4, 20), ack="disk", anchors=[Anchor(5)])
    store.close()
    assert None not in (parent.id, cut.id, unread.id, good.id)
    with side_door(where(store)) as env:
        db = {name: env.open_db(name) for name in lmdb_records.TABLES}
        with env.begin(write=True) as txn:
            assert parent.id and cut.id and unread.id and good.id
            txn.put(lmdb_records.chunk_key(RecordId(b"o" * 16), 3), b"orphan", db=db[b"chunks"])
            txn.delete(parent.id, db=db[b"segments"])
            txn.delete(lmdb_records.chunk_key(cut.id, 0), db=db[b"chunks"])
            txn.put(unread.id, b"not a head", db=db[b"segments"])
            txn.put(good.id, b"not usage", db=db[b"usage"])
            txn.put(good.id + bytes(9), b"not an anchor", db=db[b"anchors"])
    again = open_store_with(True)
    assert again.engine.swept == 5
    assert again.stats()["entries"] == 1 and check(again.engine) == []
    check_restore(again, identity, ids(4, 20), 19, verify=True)
    assert [anchor.position for anchor in again.match(identity, ids(4, 20)).anchors] == [5]
    for seed in (1, 2, 3):
        check_restore(again, identity, ids(seed, 40), 0)
        assert save(again, identity, ids(seed, 40), ack="disk").durable
    again.close()
    with side_door(where(store)) as env:
        assert len(table(env, b"chunks")) == 4


STATEFUL = mixed_identity(FULL, sliding(4), RECURRENT)


def ids_of(store: Store, tokens: list[int]) -> tuple[RecordId, RecordId]:
    """The deepest segment along these tokens, and the state at their end."""
    saved = save(store, STATEFUL, tokens, ack="disk")
    with store.engine.index.changed:
        (state,) = [r for r in store.engine.index.records.values() if r.is_state and r.parent and r.parent.id == saved.id]
        assert saved.id is not None and state.end == len(tokens)
        return saved.id, state.id


def test_states_that_are_not_whole_are_swept_and_their_rows_stay(open_store_with: OpenStore) -> None:
    """Without its segment, without its chunk, in the wrong table, or unreadable: the state goes,
    what it was a state of is still there to be built on."""
    store = open_store_with(True)
    orphan, cut, moved, unread, _ = (ids_of(store, ids(seed, 20)) for seed in range(5))
    path = where(store)
    store.close()
    with side_door(path) as env:
        db = {name: env.open_db(name) for name in lmdb_records.TABLES}
        with env.begin(write=True) as txn:
            txn.delete(orphan[0], db=db[b"segments"])
            txn.delete(lmdb_records.chunk_key(cut[1], 0), db=db[b"chunks"])
            txn.put(moved[1], bytes(txn.get(moved[1], db=db[b"states"]) or b""), db=db[b"segments"])
            txn.delete(moved[1], db=db[b"states"])
            txn.put(unread[1], b"not a head", db=db[b"states"])
    again = open_store_with(True)
    assert again.engine.swept == 5 and check(again.engine) == []
    assert [again.match(STATEFUL, [*ids(seed, 20), 7]).matched for seed in range(5)] == [0, 20, 20, 20, 20]
    for seed in range(5):
        check_restore(again, STATEFUL, [*ids(seed, 20), 7], 20 if seed == 4 else 0, verify=True)
    for seed in range(5):
        save(again, STATEFUL, ids(seed, 20), ack="disk")
    again.close()
    last = open_store_with(True)
    assert last.engine.swept == 0
    for seed in range(5):
        check_restore(last, STATEFUL, [*ids(seed, 20), 7], 20, verify=True)
    last.close()
    with side_door(path) as env:
        assert {len(table(env, b"states")), len(table(env, b"segments"))} == {5}


@pytest.mark.parametrize("name", [b"states", b"chunks"])
def test_a_flipped_byte_of_a_state_costs_that_state_only(open_store_with: OpenStore, name: bytes) -> None:
    """The one before it is given instead, and the rows of both stay."""
    store = open_store_with(True)
    ids_of(store, ids(1, 12))
    quarantines, at = 0, 0
    while True:
        _, state = ids_of(store, ids(1, 20))
        let_go(store)
        size = flip(store, name, state, at)
        if at >= size:
            break
        assert store.match(STATEFUL, [*ids(1, 20), 7]).usable == 20
        with store.restore(STATEFUL, [*ids(1, 20), 7]) as restored:
            assert (restored.matched, restored.usable) == (20, 12), f"byte {at} of {name.decode()}"
        quarantines += 1
        assert store.stats()["quarantines"] == quarantines
        check_restore(store, STATEFUL, [*ids(1, 20), 7], 12, verify=True)
        at += 37
    assert quarantines >= 3
    check_restore(store, STATEFUL, [*ids(1, 20), 7], 20, verify=True)
    assert check(store.engine) == []


@pytest.mark.parametrize("layers", [1, 3])
def test_parents_are_committed_before_their_children(
    open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Segments before those that continue them, and before their states."""
    store, identity = open_store_with(True), mixed_identity(*STATEFUL.layers[:layers])
    known: list[RecordId] = []
    parents: list[tuple[RecordId, RecordId | None]] = []
    write = ColdTier.write

    def watch(tier: ColdTier, items: Sequence[WriteItem], counter: int) -> None:
        for item in items:
            parent = store.engine.index.records[item.id].parent
            parents.append((item.id, parent.id if parent else None))
            assert parent is None or parent.id in known
            known.append(item.id)
        write(tier, items, counter)

    monkeypatch.setattr(ColdTier, "write", watch)
    for length in range(5, 60, 5):
        save(store, identity, ids(1, length))
        save(store, identity, [*ids(1, length), 7])
    assert store.flush(60)
    assert len(known) == len(store.engine.index.records) == (22 if layers == 1 else 44)


# -- one owner at a time ---------------------------------------------------------------------


def test_a_store_is_opened_once(open_store_with: OpenStore, identity: Identity, tmp_path: Path) -> None:
    store = open_store_with(True)
    link = tmp_path / "link"
    link.symlink_to(where(store))
    relative = os.path.relpath(where(store))
    for path in (where(store), link, Path(relative)):
        with pytest.raises(StoreInUse):
            open_store_with(path)
    assert save(store, identity, TOKENS, ack="disk").durable
    store.close()
    check_restore(open_store_with(link), identity, TOKENS, 8)


def test_another_process_is_told_that_the_store_is_in_use(open_store_with: OpenStore) -> None:
    store = open_store_with(True)
    program = (
        "import sys; from warmkv.kvstore.store import open_store; from warmkv.schema.errors import StoreInUse\n"
        "try: open_store(sys.argv[1])\n"
        "except StoreInUse: print('in use')"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(warmkv.__file__).absolute().parent.parent)}
    command = [sys.executable, "-c", program, str(where(store))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "in use"


def test_a_path_that_cannot_be_a_store_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError):
            open_store(path, warm_bytes=MIB, cold_bytes=MIB)


def test_files_are_private(open_store_with: OpenStore, identity: Identity) -> None:
    path = fill(open_store_with, identity)
    assert path.stat().st_mode & 0o777 == 0o700
    assert {item.stat().st_mode & 0o077 for item in path.iterdir()} == {0}
