"""Rows of q8_2f across the point at which their field is fixed: what a child goes on from is what one
sequence would have, or a miss; never rows of two fields, nor rows whose field was fixed from others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import field_digests, fields, on_prefix, restore_into
from warmkv.kvstore.bridge.specs import sides_of
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import NO_FIELD

Q8, F32 = RowFormat.Q8_2F, RowFormat.F32
LAYER = LayerPlan(
    LayerKind.FULL, heads=2, kv_heads=1, key_size=8, value_size=5, key_format=Q8, value_format=Q8, importance=False
)  # fmt: skip
PLANS = {
    "q8": ModelPlan((LAYER, LAYER)),
    "q8k": ModelPlan((replace(LAYER, value_format=F32),)),
    "q8v": ModelPlan((replace(LAYER, key_format=F32), replace(LAYER, key_format=F32, value_format=F32))),
    "window": ModelPlan((replace(LAYER, kind=LayerKind.SLIDING, window=70), LAYER)),
    "importance": ModelPlan((replace(LAYER, importance=True),)),
}
by_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def restored_at(store: Store, plan: ModelPlan, position: int) -> tuple[int, ModelCache]:
    """What a fresh client takes of the prompt's first ``position`` tokens and one that nobody had."""
    cache = made(plan)
    with store.restore(identity_of(plan), [*prompt(position).tolist(), 60_000], lineage=cache.lineage) as restored:
        return restore_into(cache, restored), cache


def alone(plan: ModelPlan, length: int) -> ModelCache:
    """One client that does it all."""
    cache = made(plan)
    fill(cache, length)
    return cache


@by_plan
@pytest.mark.parametrize("parent", [60, 63, 64, 65, 66, 100])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "with the parent going on"])
def test_a_child_goes_on_as_one_client_would(store: Store, plan: ModelPlan, parent: int, twice: bool) -> None:
    identity, ids = identity_of(plan), prompt(131)
    first = alone(plan, parent)
    save(store, identity, ids[:parent], first)
    taken, child = restored_at(store, plan, parent)
    assert taken == parent and contents(child) == contents(first)
    if twice:  # rows of an open field, and the same rows with theirs fixed, now lie side by side
        fill(first, 90 if parent < 90 else 10)
        save(store, identity, prompt(first.position), first)
    twin = alone(plan, parent)
    assert feed(child, 130 - parent) == feed(twin, 130 - parent)
    assert contents(child) == contents(twin)
    saved = save(store, identity, ids[:130], child)
    assert saved.held == 130
    taken, grandchild = restored_at(store, plan, 130)
    assert taken == 130 and contents(grandchild) == contents(child)
    assert feed(grandchild, 4) == feed(twin, 4)


@by_plan
def test_positions_between_are_exact_or_a_miss(store: Store, plan: ModelPlan) -> None:
    """Rows cut out of a longer sequence have a field that was fixed from rows which are not theirs."""
    save(store, identity_of(plan), prompt(130), alone(plan, 130))
    for position in (1, 33, 59, 63, 64, 65, 66, 90, 129):
        taken, cache = restored_at(store, plan, position)
        stateful = any(layer.importance for layer in plan.layers)
        windowed = any(layer.window for layer in plan.layers) and 130 - 69 > max(0, position - 69)
        assert taken == (0 if position < 64 or stateful or windowed else position)
        if taken:
            fill(cache, 7, seed=3)
            twin = alone(plan, position)
            fill(twin, 7, seed=3)
            assert contents(cache) == contents(twin)
        else:
            assert contents(cache) == contents(made(plan))


def test_the_rows_of_one_writer_come_from_one_field(store: Store) -> None:
    """Two writers whose rows differ, so their fields do: neither continues the other's chain."""
    plan = PLANS["q8"]
    identity = identity_of(plan)
    ours, theirs = made(plan), made(plan)
    for cache, seed in ((ours, 1), (theirs, 2)):
        fill(cache, 64, seed=seed)
        fill(cache, 36)
        save(store, identity, prompt(100), cache)
    assert not set(field_digests(ours)) & set(field_digests(theirs))
    for cache, length in ((theirs, 130), (ours, 150), (theirs, 170)):
        fill(cache, length - cache.position)
        assert save(store, identity, prompt(length), cache).start == (130 if length == 170 else 100)
    for length, cache in ((150, ours), (170, theirs)):
        taken, found = restored_at(store, plan, length)
        assert taken == length and contents(found) == contents(cache)
    taken, found = restored_at(store, plan, 140)
    assert taken == 140 and set(field_digests(found)) in (set(field_digests(ours)), set(field_digests(theirs)))


@pytest.mark.parametrize("fill_in", [restore_into, on_prefix])
def test_rows_of_two_fields_are_a_miss(store: Store, fill_in: Callable[..., int]) -> None:
    plan = PLANS["q8"]
    cache = alone(plan, 90)
    save(store, identity_of(plan), prompt(90), cache)
    used, twin = alone(plan, 20), alone(plan, 20)
    with store.restore(identity_of(plan), prompt(91)) as restored:
        layers = list(restored.layers)
        for other in (NO_FIELD, b"another field..."):
            planes = {
                role: replace(
                    plane, blocks=(plane.array()[:70], plane.array()[70:]), starts=(0, 70), fields=(plane.fields[0], other)
                )
                for role, plane in layers[1].planes.items()
            }  # fmt: skip
            mixed = replace(layers[1], planes=planes, fields={**layers[1].fields, other: next(iter(layers[1].fields.values()))})
            assert fill_in(used, replace(restored, layers=[layers[0], mixed], _release=None)) == 0
            assert contents(used) == contents(twin)
        assert fill_in(used, restored) == 90


@dataclass
class Writer:
    """A cache and, of the rows its field is fixed from, whose numbers they are."""

    cache: ModelCache
    whose: list[int] = field(default_factory=list)

    def go_on(self, length: int, seed: int) -> None:
        """Rows that fix fields are of ``seed``, later ones everybody's."""
        while self.cache.position < length:
            early = self.cache.position < 64
            self.whose += [seed] if early else []
            fill(self.cache, 1, seed=seed if early else 0)


def rows_of(cache: ModelCache) -> list[bytes]:
    """The first layer's key rows."""
    layer = cache.own[0]
    assert isinstance(layer, AttentionLayer)
    (block,) = layer.keys.blocks(0)
    assert block.scales is not None
    return [codes.tobytes() + scales.tobytes() for codes, scales in zip(block.codes, block.scales, strict=True)]


def twin_of(plan: ModelPlan, whose: list[int], length: int) -> ModelCache:
    cache = made(plan)
    for seed in whose[:length]:
        fill(cache, 1, seed=seed)
    fill(cache, length - cache.position)
    return cache


@pytest.mark.parametrize("seed", range(12))
def test_many_writers_and_readers_never_see_a_mix(store: Store, seed: int) -> None:
    """Caches that go on from what others saved, and save: whatever comes back is one of the sequences
    that were fed, row for row, or nothing."""
    rng = random.Random(seed)
    plan = PLANS["q8k"]
    identity = identity_of(plan)
    early = {writer: rows_of(twin_of(plan, [writer] * 64, 64)) for writer in (1, 2, 3)}
    saved: list[list[int]] = []
    hits = 0
    for _ in range(14):
        position = rng.choice((20, 50, 60, 63, 64, 65, 66, 80, 100, 120))
        taken, cache = restored_at(store, plan, position)
        writer = Writer(cache)
        if taken and not field_digests(cache):
            assert taken <= 64
            for at, row in enumerate(rows_of(cache)):
                (owner,) = [whose for whose, rows in early.items() if rows[at] == row]
                writer.whose.append(owner)
        elif taken:
            fill(cache, 1)
            matching = [whose for whose in saved if contents(twin_of(plan, whose, taken + 1)) == contents(cache)]
            assert taken >= 64 and matching, f"{taken} rows of nobody"
            writer.whose = list(matching[0])
        hits += bool(taken)
        writer.go_on(max(cache.position, rng.choice((10, 55, 60, 63, 64, 65, 70, 101, 130))), rng.choice((1, 2, 3)))
        save(store, identity, prompt(cache.position), cache)
        if len(writer.whose) == 64 and writer.whose not in saved:
            saved.append(writer.whose)
    assert hits > 2


def test_fields_that_are_none_are_refused() -> None:
    sides = sides_of(LAYER)
    good = np.arange(1, 14, dtype=np.float32)
    keys, values = fields.split(good, sides, "here")
    assert keys is not None and values is not None
    assert keys.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]] and values.tolist() == [[9, 10, 11, 12, 13]]
    for bad in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(FormatError, match="here"):
            fields.split(np.where(np.arange(13) == 12, np.float32(bad), good), sides, "here")
    with pytest.raises(FormatError, match="14 numbers, expected 13"):
        fields.split(np.ones(14, np.float32), sides, "here")
