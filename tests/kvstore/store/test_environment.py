"""Stores of other formats: an older one is taken over whole, a newer one is left alone."""

from __future__ import annotations

import lzma
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.testing import TOKENS, check_restore, save
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity, sliding
from warmkv.schema.errors import StoreTooNew
from warmkv.schema.identity import (
    SINGLE,
    Identity,
    LayerKind,
    LayerSpec,
    PlaneFormat,
    PlaneRole,
    PlaneSpec,
    RopeRegime,
)
from warmkv.schema.ids import lineage_after
from warmkv.schema.lmdb_records import TABLES
from warmkv.schema.records import CLEAN, Anchor, AnchorKind, Attachment

OpenStore = Callable[..., Store]
GOLDEN = Path(__file__).resolve().parents[2] / "golden"
MIB = 1 << 20


@contextmanager
def tables(path: Path) -> Iterator[tuple[lmdb.Environment, dict[bytes, Any]]]:
    """The closed store's environment, opened raw."""
    env = lmdb.open(str(path), max_dbs=16, map_size=512 * MIB)
    try:
        yield env, {name: env.open_db(name) for name in TABLES}
    finally:
        env.close()


def format_of(path: Path) -> bytes | None:
    with tables(path) as (env, db), env.begin(db=db[b"meta"]) as txn:
        found: bytes | None = txn.get(b"format")
        return found


def write_format(path: Path, value: bytes) -> None:
    with tables(path) as (env, db), env.begin(write=True, db=db[b"meta"]) as txn:
        txn.put(b"format", value)


def filled(open_store_with: OpenStore) -> tuple[Path, Identity]:
    """A closed store of one model of full attention, which both formats know."""
    store, identity = open_store_with(True), mixed_identity(FULL, FULL)
    for length in (3, 6, 9):
        save(store, identity, TOKENS[:length], anchors=[Anchor(length)])
    save(store, identity, [*TOKENS[:4], 50, 51])
    store.close()
    assert store.engine.options.path is not None
    return store.engine.options.path, identity


def test_a_store_of_format_1_is_migrated_when_it_is_opened(open_store_with: OpenStore) -> None:
    path, identity = filled(open_store_with)
    write_format(path, (GOLDEN / "lmdb_format_1.bin").read_bytes())
    for _ in range(2):
        store = open_store_with(True)
        assert store.engine.swept == 0 and check(store.engine) == []
        assert list(path.glob("*.corrupt-*")) == []
        check_restore(store, identity, [*TOKENS, 1], 9, verify=True)
        check_restore(store, identity, [*TOKENS[:4], 50, 51, 1], 6, verify=True)
        assert [anchor.position for anchor in store.match(identity, TOKENS).anchors] == [3, 6, 9]
        store.close()
        assert format_of(path) == (GOLDEN / "lmdb_format.bin").read_bytes()


def test_what_format_1_does_not_know_can_be_saved_after_the_migration(open_store_with: OpenStore) -> None:
    path, identity = filled(open_store_with)
    write_format(path, (GOLDEN / "lmdb_format_1.bin").read_bytes())
    store, hybrid = open_store_with(True), mixed_identity(FULL, sliding(3), RECURRENT)
    save(store, identity, [*TOKENS, 1, 2, 3], ack="disk")
    save(store, hybrid, TOKENS, ack="disk")
    store.close()
    again = open_store_with(True)
    assert again.engine.swept == 0
    check_restore(again, identity, [*TOKENS, 1, 2, 3, 4], 12, verify=True)
    check_restore(again, hybrid, [*TOKENS, 1], 9, verify=True)


@pytest.mark.parametrize("value", [b"\x03\x00\x00\x00", b"\x03\x00\x07\x00", b"\xff\xff\x00\x00"])
def test_a_store_of_a_newer_format_is_refused_untouched(open_store_with: OpenStore, value: bytes) -> None:
    path, identity = filled(open_store_with)
    write_format(path, value)
    before = (path / "data.mdb").read_bytes()
    for _ in range(2):
        with pytest.raises(StoreTooNew, match=f"format {value[0] + 256 * value[1]}"):
            open_store_with(True)
    assert (path / "data.mdb").read_bytes() == before
    assert list(path.glob("*.corrupt-*")) == []
    write_format(path, (GOLDEN / "lmdb_format.bin").read_bytes())
    check_restore(open_store_with(True), identity, [*TOKENS, 1], 9, verify=True)


def test_a_newer_minor_format_is_read_and_kept(open_store_with: OpenStore) -> None:
    path, identity = filled(open_store_with)
    write_format(path, b"\x02\x00\x05\x00")
    store = open_store_with(True)
    check_restore(store, identity, [*TOKENS, 1], 9, verify=True)
    store.close()
    assert format_of(path) == b"\x02\x00\x05\x00"


# -- a store that a program of format 1 wrote ------------------------------------------------

#: Whose store it is.
OLD_UID = 1000
_PLANES = tuple(PlaneSpec(role, PlaneFormat.F32, (1, 4)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
OLD_IDENTITY = Identity(
    architecture="old", parameters=bytes(range(32)), settings=b"none", adapters=(),
    layers=(LayerSpec(LayerKind.FULL, _PLANES),) * 2, compute_dtype="float32", attention="eager", layout="token-major",
    rope=RopeRegime("default", 1e4, 1.0, 4, 4096, b"none"), tokenizer=b"none", runtime="test", runtime_state_version="1",
    topology=SINGLE, tenant=b"none",
)  # fmt: skip


def old_rows(salts: list[float]) -> list[LayerRows]:
    """The rows it was filled with: four numbers that say layer, position and branch."""
    at = np.arange(4 * len(salts), dtype="<f4").reshape(-1, 1, 4) + np.array(salts, "<f4")[:, None, None]
    return [LayerRows.kv(layer, at + 1000 * layer, -at - 1000 * layer) for layer in range(2)]


@pytest.fixture
def old_store(tmp_path: Path, open_store_with: OpenStore, monkeypatch: pytest.MonkeyPatch) -> Store:
    """``store_format_1.mdb.xz`` holds [1, 2 .. 5] with an anchor, three more tokens, [1, 2, 3 .. 6]
    with an image behind the third and fourth, and [7, 7, 7] of another lineage. No program at hand
    can write it again."""
    path = tmp_path / "old"
    path.mkdir(mode=0o700)
    (path / "data.mdb").write_bytes(lzma.decompress((GOLDEN / "store_format_1.mdb.xz").read_bytes()))
    assert format_of(path) == (GOLDEN / "lmdb_format_1.bin").read_bytes()
    monkeypatch.setattr(os, "getuid", lambda: OLD_UID)
    return open_store_with(path)


def test_everything_in_a_store_of_format_1_is_served(old_store: Store) -> None:
    folded, image = lineage_after(CLEAN, "evict", 3), [Attachment(2, 2, bytes(range(32)))]
    cases: list[tuple[list[int], list[float], dict[str, object]]] = [
        ([*range(1, 9), 99], [0.0] * 8, {}),
        ([*range(1, 6), 99], [0.0] * 5, {}),
        ([*range(1, 7), 99], [0.0] * 2 + [0.5] * 4, {"attachments": image}),
        ([7, 7, 7, 99], [0.25] * 3, {"lineage": folded}),
    ]
    assert old_store.engine.swept == 0 and check(old_store.engine) == []
    for ids, salts, about in cases:
        with old_store.restore(OLD_IDENTITY, ids, verify=True, **about) as restored:  # type: ignore[arg-type]
            assert restored.usable == len(salts)
            for layer, expected in zip(restored.layers, old_rows(salts), strict=True):
                assert layer.keys.tobytes() == expected.planes[0].rows.tobytes()
                assert layer.values.tobytes() == expected.planes[1].rows.tobytes()
    assert old_store.match(OLD_IDENTITY, range(1, 9)).anchors == (Anchor(3, AnchorKind.SYSTEM_PROMPT, 1),)


def test_a_store_of_format_1_is_grown_and_opened_again(old_store: Store, open_store_with: OpenStore) -> None:
    path = old_store.engine.options.path
    assert path is not None
    assert old_store.save(OLD_IDENTITY, list(range(1, 11)), old_rows([0.0] * 10), ack="disk").start == 8
    old_store.close()
    again = open_store_with(path)
    assert again.engine.swept == 0 and again.stats()["entries"] == 5
    with again.restore(OLD_IDENTITY, [*range(1, 11), 99], verify=True) as restored:
        assert restored.usable == 10
        assert restored.layers[1].keys.tobytes() == old_rows([0.0] * 10)[1].planes[0].rows.tobytes()
