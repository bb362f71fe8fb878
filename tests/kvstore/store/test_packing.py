"""Packing never changes an answer: what is matched, usable and handed over is the same bits, from
one segment instead of many, in whichever tier the originals are, and in whatever order."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.containers import PlaneSource, write_segment
from warmkv.kvstore.rows import LayerRows, PlaneRows
from warmkv.kvstore.store import Store, packing
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing import assert_rows, check_restore, model_rows, random_identity, save
from warmkv.kvstore.testing.mirrored import StoreTwin
from warmkv.kvstore.testing.naive import prefixes
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
    Prompt,
    chunked,
    hybrid,
    mixed_identity,
    model_logits,
    records_at,
    shared,
    sink_window,
    sliding,
)
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import CLEAN, ROOT, Anchor, AnchorKind, Attachment, Lineage, as_tokens, pack_anchors

OpenStore = Callable[..., Store]
Packing = Callable[[int], None]
KIB, MIB = 1024, 1 << 20
TURN = AnchorKind.TURN
MODELS = {
    "attention": (FULL,), "window": (FULL, sliding(4)), "window alone": (sliding(6),), "states": (FULL, RECURRENT),
    "blobs": (OPAQUE, FULL), "blobs and window": (sliding(8), OPAQUE), "sinks": (sink_window(2, 5), FULL),
    "chunks": (chunked(6),), "hybrid": (hybrid(5), FULL, CONV), "encoder": (FULL, ENCODER),
    "many": (FULL, chunked(4), sliding(3), NYSTROM), "shared": (FULL, shared(0), RING),
    "blob alone": (OPAQUE,), "states alone": (RECURRENT,),
}  # fmt: skip


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> Packing:
    """Sets how many segments in memory are not worth packing yet."""
    return lambda count: monkeypatch.setattr(packing, "MAX_SEGMENTS", count)


def segments(store: Store) -> list[Record]:
    """All but states, in order."""
    found = (record for record in store.engine.index.records.values() if not record.is_state)
    return sorted(found, key=lambda record: (record.start, record.end))


def made(store: Store) -> list[Record]:
    return [record for record in segments(store) if record.packed]


def talk(store: Store, identity: Identity, turns: int, step: int = 2, seed: int = 0, **options: Any) -> list[int]:
    """A conversation saved after each of its turns; its ids."""
    ids = [seed * 100_000 + at for at in range(turns * step)]
    for length in range(step, len(ids) + 1, step):
        save(store, identity, ids[:length], **options)
    return ids


def demote(store: Store) -> None:
    """Leave everything on disk alone; what was packed goes."""
    assert store.flush(60)
    with store.engine.index.changed:
        for record in sorted(store.engine.index.warm_order, key=lambda record: -record.start):
            store.engine.warm.evict(record)
    store.engine.warm.reap()
    assert check(store.engine) == []


def drop(store: Store, record: Record) -> None:
    """Take a record out of both tiers, as evictions do."""
    removal: Any = store.engine.removal
    with store.engine.index.changed:
        removal._drop(record)
    removal._finish([record])
    assert check(store.engine) == []


def on_disk(store: Store) -> dict[tuple[bytes, bytes], bytes]:
    """Every record and chunk the cold tier holds."""
    cold: Any = store.engine.cold
    with cold._env.begin() as txn:
        tables = (b"segments", b"states", b"chunks")
        return {(table, bytes(key)): bytes(value) for table in tables for key, value in txn.cursor(cold._env.db[table])}


def blocks(store: Store, identity: Identity, ids: Sequence[int], **options: Any) -> int:
    """In how many pieces the rows of the first layer come."""
    with store.restore(identity, [*ids, 7], verify=True, **options) as restored:
        assert restored.usable == len(ids), restored.reason
        assert_rows(restored, model_rows(identity, ids))
        return len(next(iter(restored.layers[0].planes.values())).blocks)


# -- random histories ---------------------------------------------------------------------------


class History:
    """Conversations that grow by a token or three, part anywhere, and are now and then given up."""

    def __init__(self, name: str) -> None:
        self.rng = random.Random(name)
        self.name = name
        self.identity = mixed_identity(*self.rng.choice([*MODELS.values()]))
        self.prompts: list[Prompt] = [((), ())]
        self.done: list[str] = []

    def grow(self) -> Prompt:
        rng = self.rng
        ids, images = rng.choice(self.prompts) if rng.random() < 0.2 else self.prompts[-1]
        cut = rng.randint(0, len(ids)) if rng.random() < 0.2 else len(ids)
        ids, images = ids[:cut], tuple(item for item in images if item.end <= cut)
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(1, 3) if rng.random() < 0.06 else 0
            if length:
                images = (*images, Attachment(len(ids), length, rng.choice((IMAGE, OTHER_IMAGE))))
            ids = (*ids, *([1] * length or [rng.randint(1, 3)]))
        self.prompts.append((ids, images))
        return ids, images

    def lineage(self) -> Lineage:
        return FOLDED if self.rng.random() < 0.04 else CLEAN

    def change(self, twin: Twin) -> None:
        rng, choice, records = self.rng, self.rng.random(), twin.records()
        if choice < 0.75 or not records:
            prompt, lineage = self.grow(), self.lineage()
            logits = model_logits(self.identity, *prompt, lineage) if rng.random() < 0.2 else None
            anchors = [Anchor(len(prompt[0]), TURN)] if rng.random() < 0.3 else []
            self.done.append(f"save {prompt} {lineage == CLEAN} {anchors} {logits is not None}")
            handed = records_at(self.identity, *prompt, lineage, spare=rng.choice((0, 1, 3)))
            twin.save(self.identity, prompt, handed, lineage, anchors=anchors, logits=logits)
        elif choice < 0.85:
            prompt = rng.choice(self.prompts[1:])
            self.done.append(f"forget {prompt}")
            twin.forget(self.identity, prompt)
        else:
            leaf = rng.choice([record for record in records if not record.children])
            self.done.append(f"evict {leaf.start} {leaf.end} {leaf.extents} {leaf.packed}")
            twin.evict(leaf)

    def ask(self, twin: Twin) -> None:
        rng, (ids, images) = self.rng, self.rng.choice(self.prompts[-6:])
        if rng.random() < 0.3:
            cut = rng.randint(0, len(ids))
            ids, images = ids[:cut], tuple(item for item in images if item.end <= cut)
        prompt: Prompt = (*ids, rng.randint(1, 3)), images
        logits, anchored = rng.random() < 0.2, rng.random() < 0.2
        self.done.append(f"ask {prompt} {logits} {anchored}")
        twin.ask(self.identity, prompt, self.lineage(), logits=logits, anchored=anchored)
        self.done.pop()


class Twin(StoreTwin):
    """What goes from both tiers takes along the packed copies of it that memory has."""

    def evict(self, record: Record) -> None:
        copies = [item for item in made(self.store) if item.cold == Cold.ABSENT and self.store.engine.cold is not None]
        for item in dict.fromkeys([*copies, record]):
            if not item.gone and not item.children:
                prompt, space = self._contents(item)[0], (item.namespace.identity, item.lineage)
                super().evict(item)
                if item.is_state:  # what was saved there is a part of longer prompts only
                    self._ends[space].pop(prefixes(*prompt)[-1], None)


@contextmanager
def told(history: History) -> Any:
    try:
        yield
    except Exception as exc:
        layers = [(layer.kind.name, layer.window, layer.chunk, layer.sinks) for layer in history.identity.layers]
        exc.add_note("\n".join([f"history {history.name}, layers {layers}", *history.done]))
        raise


@pytest.mark.parametrize("seed", range(2))
def test_random_histories_in_memory(open_store_with: OpenStore, crowd: Packing, seed: int) -> None:
    packs = 0
    for number in range(40):
        history = History(f"memory {seed} {number}")
        crowd(history.rng.randint(1, 4))
        with told(history), open_store_with() as store:
            twin = Twin(store)
            for _ in range(history.rng.randint(6, 20)):
                history.change(twin)
                for _ in range(3):
                    history.ask(twin)
            packs += store.engine.promotion.packed
    assert packs > 20


@pytest.mark.parametrize("seed", range(2))
def test_random_histories_over_disk_and_restarts(
    open_store_with: OpenStore, tmp_path: Path, crowd: Packing, seed: int
) -> None:  # fmt: skip
    packs = 0
    for number in range(25):
        history = History(f"disk {seed} {number}")
        crowd(history.rng.randint(1, 4))
        path = tmp_path / str(number)
        store = open_store_with(path)
        twin = Twin(store)
        with told(history):
            for _ in range(history.rng.randint(6, 20)):
                history.change(twin)
                assert store.flush(60)
                choice = history.rng.random()
                if choice < 0.1:
                    packs += store.engine.promotion.packed
                    history.done.append("restart")
                    store.close()
                    store = open_store_with(path)
                    twin.reopened(store)
                elif choice < 0.5:
                    history.done.append("demote")
                    for record in twin.records():
                        if record.warm and record.cold == Cold.STORED and history.rng.random() < 0.8:
                            twin.demote(record)
                for _ in range(3):
                    history.ask(twin)
            packs += store.engine.promotion.packed
        store.close()
    assert packs > 40


# -- long chains --------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [64, 65, 128, 129, 300])
def test_a_chain_from_disk_is_handed_over_whole_and_the_disk_keeps_it_as_it_was(
    open_store_with: OpenStore, identity: Identity, turns: int
) -> None:
    store = open_store_with(True)
    ids = talk(store, identity, turns, 1)
    assert store.flush(60)
    before = on_disk(store)
    store.close()
    for _ in range(2):
        store = open_store_with(True)
        assert store.match(identity, [*ids, 7]).usable == turns
        assert blocks(store, identity, ids) == 1
        assert (store.match(identity, [*ids, 7]).usable, store.match(identity, [*ids, 7]).tier) == (turns, "warm")
        assert len(segments(store)) == turns + 1 and store.engine.warm.ledger.resident_entries == 1
        assert store.flush(60) and on_disk(store) == before
        assert check(store.engine) == []
        store.close()


@pytest.mark.parametrize("turns", [64, 65, 128, 129, 300])
def test_a_chain_in_memory_is_handed_over_whole_and_gives_way(
    open_store_with: OpenStore, identity: Identity, turns: int
) -> None:  # fmt: skip
    store = open_store_with()
    ids = talk(store, identity, turns, 1)
    assert store.match(identity, [*ids, 7]).usable == turns
    assert blocks(store, identity, ids) == (64 if turns == 64 else 1)
    assert len(segments(store)) == (64 if turns == 64 else 1)
    for length in (1, turns // 2, turns):
        check_restore(store, identity, [*ids[:length], 7], length)
    assert store.forget(identity, ids).records == len(segments(store)) or not segments(store)


def test_a_conversation_that_goes_on_stays_short(open_store_with: OpenStore, identity: Identity, crowd: Packing) -> None:
    """Packs crowd in their turn: they are packed again, and no copy is left behind."""
    crowd(6)
    for path in (None, True):
        store = open_store_with(path)
        ids: list[int] = []
        for turn in range(60):
            ids += [turn, 7, turn]
            save(store, identity, ids)
            assert store.flush(60)
            assert blocks(store, identity, ids) <= 7
            assert store.engine.warm.ledger.resident_entries <= 7
        assert store.engine.promotion.packed > 10
        store.close()


def test_a_packed_run_has_no_more_parts_than_may_give_way_at_once(
    open_store_with: OpenStore, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_PARTS", 20)
    store = open_store_with()
    ids = talk(store, identity, 130, 1)
    assert blocks(store, identity, ids) == 7
    assert [record.end for record in segments(store)] == [20, 40, 60, 80, 100, 120, 130]


def test_what_is_larger_than_a_pack_may_be_stays_as_it_is(open_store_with: OpenStore, wide: Identity, crowd: Packing) -> None:
    """A quarter of the budget at most: here four of the small ones."""
    crowd(3)
    store = open_store_with(warm_bytes=400 * KIB)
    ids = talk(store, wide, 8, 10)
    ids += [5] * 60
    save(store, wide, ids)
    assert blocks(store, wide, ids) == 3
    assert [(record.end, record.packed) for record in segments(store)] == [(40, True), (80, True), (140, False)]
    assert store.engine.warm.ledger.peak_bytes <= 400 * KIB


@pytest.mark.parametrize("cold", [False, True])
def test_rows_across_the_pieces_of_a_payload_come_whole(open_store_with: OpenStore, crowd: Packing, cold: bool) -> None:
    """4 MiB are no multiple of a row here, nor does a plane begin where a piece does."""
    crowd(2)
    store, identity = open_store_with(cold or None), random_identity(layers=1, heads=3, dim=171)
    ids = [at % 5000 for at in range(3300)]
    for length in (1500, 1510, 3300):
        save(store, identity, ids[:length])
    if cold:
        demote(store)
    assert blocks(store, identity, ids) == 1
    check_restore(store, identity, [*ids[:1505], 7], 1505, verify=True)


# -- what hangs on the originals ------------------------------------------------------------------


def test_states_anchors_and_branches_go_over_to_the_packed_segment(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(), mixed_identity(FULL, RECURRENT)
    ids: list[int] = []
    for turn in range(66):
        ids += [turn, 7]
        save(store, identity, ids, anchors=[Anchor(len(ids), TURN, depth=turn)])
    anchors = store.match(identity, [*ids, 1]).anchors
    assert blocks(store, identity, ids) == 1 and len(segments(store)) == 1
    assert store.match(identity, [*ids, 1]).anchors == anchors and len(anchors) == 66
    for length in range(2, len(ids) + 1, 2):
        check_restore(store, identity, [*ids[:length], 99], length, at="anchor")
    branch = [*ids[:40], 1, 2, 3]
    save(store, identity, branch)
    save(store, identity, [*ids, 8, 8])
    check_restore(store, identity, [*branch, 99], 43)
    check_restore(store, identity, [*ids, 8, 8, 99], len(ids) + 2)
    store.forget(identity, [*ids, 8, 8])
    check_restore(store, identity, [*branch, 99], 43)
    store.forget(identity, branch)
    store.forget(identity, ids)
    assert segments(store) == [] and check(store.engine) == []


def test_a_prompt_that_parts_is_forgotten_as_if_nothing_were_packed(open_store_with: OpenStore, identity: Identity) -> None:
    """Without a disk a run ends where another prompt parts: its rows must not keep the others."""
    store = open_store_with()
    ids = talk(store, identity, 80)
    branch = [*ids[:40], 1, 2, 3]
    save(store, identity, branch)
    assert blocks(store, identity, ids) == 2 and len(segments(store)) == 3
    store.forget(identity, ids)
    check_restore(store, identity, [*ids, 7], 40)
    check_restore(store, identity, [*branch, 7], 43)


def test_what_is_forgotten_goes_with_its_packed_copy(open_store_with: OpenStore, identity: Identity) -> None:
    """Its rows before the branch are still there, in the originals."""
    store = open_store_with(True)
    ids = talk(store, identity, 8)
    branch = [*ids[:6], 1, 2]
    save(store, identity, branch)
    demote(store)
    assert blocks(store, identity, ids) == 1
    store.forget(identity, ids)
    assert made(store) == []
    check_restore(store, identity, [*ids, 7], 6)
    check_restore(store, identity, [*branch, 7], 8)


def test_pins_keep_what_they_were_given_for_and_no_more(open_store_with: OpenStore, identity: Identity, wide: Identity) -> None:
    for path in (None, True):
        store = open_store_with(path, warm_bytes=3 * MIB, busy_timeout_s=0.05, policy="lru")
        ids = talk(store, identity, 70)
        assert store.pin(identity, ids[:20], 3600) == 20
        if path:
            demote(store)
        assert blocks(store, identity, ids) == 2
        pinned, rest = made(store)
        assert (pinned.end, pinned.pinned_until_ns > 0, rest.pinned_until_ns) == (20, True, 0)
        for seed in range(40):
            save(store, wide, [seed * 1000 + at for at in range(100)])
        assert pinned.warm and not rest.warm
        store.unpin(identity, ids[:20])
        for seed in range(40, 80):
            save(store, wide, [seed * 1000 + at for at in range(100)])
        assert not pinned.warm
        store.close()


# -- what a packed segment does not hold ----------------------------------------------------------


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("name", ["window", "sinks", "many", "hybrid", "window alone", "chunks"])
def test_rows_behind_gaps_can_still_be_resumed_from(open_store_with: OpenStore, crowd: Packing, name: str, cold: bool) -> None:
    """Windows of the turns are no unbroken run; only the last is packed, the originals keep the others."""
    crowd(1)
    step = 2 if name in ("window alone", "chunks") else 9
    store, identity = open_store_with(cold or None), mixed_identity(*MODELS[name])
    ids = talk(store, identity, 8, step)
    usable = [store.match(identity, [*ids[:length], 999]).usable for length in range(len(ids) + 1)]
    assert usable[step::step] == [*range(step, len(ids) + 1, step)]
    for length in (len(ids), *range(len(ids) + 1)):
        if cold:
            demote(store)
        check_restore(store, identity, [*ids[:length], 999], usable[length], verify=True)
        assert check(store.engine) == []
    assert store.engine.promotion.packed


def test_a_segment_that_lies_beside_others_keeps_nobody_from_being_packed(open_store_with: OpenStore) -> None:
    """Rows that widen a window over tokens held already are a segment without the rows all tokens need."""
    store, identity = open_store_with(True), mixed_identity(FULL, sliding(8))
    ids = talk(store, identity, 6, 10)
    branch = [*ids[:25], 1, 2, 3]
    save(store, identity, branch)
    beside = [record for record in segments(store) if not record.extents[0][1]]
    assert len(beside) == 1
    demote(store)
    assert blocks(store, identity, branch) == 1
    assert beside[0].warm
    check_restore(store, identity, [*branch, 5], 28, verify=True)


def test_a_branch_that_begins_inside_a_segment_is_packed_with_the_rows_before_it(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(True), mixed_identity(FULL)
    trunk = talk(store, identity, 4, 10)
    branch = [*trunk[:25], 1, 2, 3]
    for more in range(4):
        save(store, identity, [*branch, *range(more)])
    demote(store)
    assert blocks(store, identity, [*branch, 0, 1, 2]) == 1
    check_restore(store, identity, [*trunk, 7], 40, verify=True)
    check_restore(store, identity, [*trunk[:26], 7], 26, verify=True)
    check_restore(store, identity, [*branch, 7], 28, verify=True)


def test_the_last_part_may_go_on_behind_what_was_asked_for(open_store_with: OpenStore, identity: Identity) -> None:
    store = open_store_with(True)
    ids = talk(store, identity, 4, 10)
    demote(store)
    check_restore(store, identity, [*ids[:25], 7], 25)
    assert [record.end for record in made(store)] == [30]
    check_restore(store, identity, [*ids, 7], 40)


def test_rows_that_depend_on_a_field_are_not_packed(open_store_with: OpenStore, crowd: Packing) -> None:
    crowd(2)
    planes = tuple(PlaneSpec(role, PlaneFormat.Q8_2F, (2, 32)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    layer = LayerSpec(LayerKind.FULL, (*planes, PlaneSpec(PlaneRole.FIELD, PlaneFormat.F32, (5,))))
    store, identity, field = open_store_with(True), mixed_identity(layer), b"f" * 16
    ids = list(range(40))

    def quantised(length: int) -> list[LayerRows]:
        frozen = PlaneRows(PlaneRole.FIELD, PlaneFormat.F32, np.arange(5, dtype=np.float32)[None], field)
        rows = model_rows(identity, ids[:length])[0].planes
        return [LayerRows(0, (*(replace(plane, field=field) for plane in rows if plane.role != PlaneRole.FIELD), frozen))]

    for length in (10, 20, 30, 40):
        store.save(identity, ids[:length], quantised(length), fields=[field])
    demote(store)
    for _ in range(2):
        with store.restore(identity, [*ids, 7], verify=True) as restored:
            assert restored.usable == 40 and list(restored.layers[0].fields) == [field]
            for plane in quantised(40)[0].planes[:2]:
                assert restored.layers[0].plane(plane.role).array().tobytes() == plane.rows.tobytes()
    assert made(store) == []


@pytest.mark.parametrize("layers", [(RECURRENT,), (OPAQUE,), (CONV, RING)])
def test_models_without_rows_have_nothing_to_pack(open_store_with: OpenStore, layers: tuple[LayerSpec, ...]) -> None:
    """Their segments hold tokens only; the state at the end is all that is handed over."""
    store, identity = open_store_with(True), mixed_identity(*layers)
    ids = talk(store, identity, 70, 1)
    demote(store)
    for length in (70, 35, 1):
        check_restore(store, identity, [*ids[:length], 999], length, verify=True)
    assert made(store) == []


def test_lineages_and_images_are_packed_apart(open_store_with: OpenStore, identity: Identity) -> None:
    store, ids = open_store_with(True), list(range(40))
    images = [Attachment(6, 4, IMAGE), Attachment(10, 3, OTHER_IMAGE), Attachment(25, 5, IMAGE)]
    others = [images[0], Attachment(10, 3, IMAGE), images[2]]
    asked = [((), CLEAN), ((), FOLDED), (images, CLEAN), (others, CLEAN)]
    for attachments, lineage in asked:
        for length in (6, 10, 20, 30, 40):
            inside = [item for item in attachments if item.end <= length]
            save(store, identity, ids[:length], attachments=inside, lineage=lineage)
    demote(store)
    for attachments, lineage in (*asked, *asked):
        check_restore(store, identity, [*ids, 7], 40, attachments=attachments, lineage=lineage, verify=True)
    assert len(made(store)) == 4
    check_restore(store, identity, [*ids, 7], 6, attachments=[Attachment(6, 4, OTHER_IMAGE)])


# -- the disk -----------------------------------------------------------------------------------


def test_what_is_saved_behind_a_packed_segment_builds_on_its_originals(
    open_store_with: OpenStore, identity: Identity
) -> None:  # fmt: skip
    store = open_store_with(True)
    ids = talk(store, identity, 6)
    demote(store)
    before = on_disk(store)
    assert blocks(store, identity, ids) == 1
    (packed,) = made(store)
    for length in (2, 4):
        assert save(store, identity, [*ids, *range(length)], ack="disk").durable
    assert packed.cold == Cold.ABSENT and not packed.children
    assert before.items() < on_disk(store).items() and not any(key == packed.id for _, key in on_disk(store))
    store.close()
    store = open_store_with(True)
    assert made(store) == []
    check_restore(store, identity, [*ids, 0, 1, 2, 3, 7], 16, verify=True)


@pytest.mark.parametrize("whole", [True, False])
def test_what_builds_on_a_packed_segment_alone_is_durable_with_it(
    open_store_with: OpenStore, identity: Identity, tmp_path: Path, whole: bool
) -> None:
    """The disk gave the originals up, or the later ones: then the packed one has to be written, before
    its child is."""
    store = open_store_with(tmp_path / "store")
    ids = talk(store, identity, 6)
    if not whole:
        store.pin(identity, ids[:4], 3600)
    demote(store)
    assert blocks(store, identity, ids) == (1 if whole else 2)
    for record in reversed(segments(store)):
        if not record.packed and (whole or record.start >= 4):
            drop(store, record)
    assert len(segments(store)) == (1 if whole else 4)
    assert save(store, identity, [*ids, 5, 6], ack="disk").durable
    assert save(store, identity, [*ids[:5], 9, 9], ack="disk").durable
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    again = open_store_with(tmp_path / "killed")
    check_restore(again, identity, [*ids, 5, 6, 7], 14, verify=True)
    check_restore(again, identity, [*ids[:5], 9, 9, 7], 7, verify=True)
    assert again.report("verify")["bad"] == [] and again.report("verify")["problems"] == []


def test_a_durable_save_of_what_is_held_writes_no_copy(open_store_with: OpenStore) -> None:
    store, identity = open_store_with(True), mixed_identity(sliding(6))
    ids = talk(store, identity, 3, 3)
    demote(store)
    before = on_disk(store)
    check_restore(store, identity, [*ids, 7], 9)
    assert made(store)
    assert save(store, identity, ids, ack="disk").durable
    assert store.flush(60) and on_disk(store) == before


def test_a_twin_that_comes_late_with_the_rows_of_a_packed_segment_adds_nothing(
    open_store_with: OpenStore, identity: Identity
) -> None:  # fmt: skip
    """In one piece they have the very id of the packed copy; what is on disk answers for them."""
    store = open_store_with(True)
    ids = talk(store, identity, 4)
    demote(store)
    before = on_disk(store)
    assert blocks(store, identity, ids) == 1
    session = store.engine.session(os.getuid())
    key = session.open(identity.canonical(), "")
    planes = [(record.layer, plane) for record in model_rows(identity, ids) for plane in record.planes]
    sources = [PlaneSource(layer, plane.rows.shape[1:], 0, plane) for layer, plane in planes]
    twin = write_segment(key, CLEAN, ROOT, 0, as_tokens(ids), (), sources)
    assert [record.id for record in made(store)] == [twin.id]
    anchors = pack_anchors([Anchor(5, TURN)])
    done = session.commit(m.Commit(key, store.engine.epoch, 0, m.ACK_DISK, anchors), twin.fd)
    twin.close()
    assert (done.duplicate, done.durable, done.held) == (True, True, 8)
    assert store.flush(60) and on_disk(store) == before
    store.close()
    store = open_store_with(True)
    assert store.match(identity, [*ids, 7]).anchors == (Anchor(5, TURN),)


def test_originals_of_what_is_asked_for_stay_on_disk(open_store_with: OpenStore, wide: Identity) -> None:
    """Those who ask get the packed copy: its originals must not look unused meanwhile."""
    store = open_store_with(True, cold_bytes=4 * MIB)
    ids = talk(store, wide, 5, 50)
    demote(store)
    for seed in range(1, 30):
        assert blocks(store, wide, ids) == 1
        save(store, wide, [seed * 1000 + at for at in range(100)], ack="disk")
    store.close()
    store = open_store_with(True, cold_bytes=4 * MIB)
    assert store.match(wide, [*ids, 7]).usable == 250 and store.match(wide, [1000, 1001]).usable == 0
