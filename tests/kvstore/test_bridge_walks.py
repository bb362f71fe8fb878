"""Caches that are fed, evicted, taken back, saved and restored at random: those that say they are alike are.

The stand-in model's rows depend on all that was attended before them, so that whatever a cache mixes up
shows in what it stores next.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.formats import F32, RowFormat
from warmkv.kernels.quant.reference import decode
from warmkv.kvstore.bridge import field_digests, has_gaps, on_prefix, records_of, restore_into
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import contents, identity_of
from warmkv.schema.errors import CannotRewind, RecordError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN, Lineage

SIZE, WINDOW, STEPS, WALKS = 8, 7, 30, 10
FULL = LayerPlan(LayerKind.FULL, heads=2, kv_heads=1, key_size=SIZE, value_size=SIZE, importance=False)
SLIDING = replace(FULL, kind=LayerKind.SLIDING, window=WINDOW)
MASS = replace(FULL, importance=True)
PLANS = {
    "f32": (ModelPlan((FULL, SLIDING, FULL)), 1e-4),
    "mass": (ModelPlan((MASS, MASS)), 1e-4),
    "q8": (
        ModelPlan(
            tuple(replace(layer, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F) for layer in (FULL, SLIDING, FULL))
        ),
        0.15,
    ),
}
TABLE = np.random.default_rng(0).standard_normal((2, SIZE), dtype=np.float32)
Known = dict[tuple[object, ...], list[F32]]


class Walker:
    """A cache and the tokens it was fed."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan, self.ids = plan, list[int]()
        self.cache = ModelCache(plan, backend="reference", policy=Mass(2) if plan.layers[0].importance else Recent())

    def feed(self, tokens: list[int]) -> None:
        for token in tokens:
            hidden: F32 = np.stack([TABLE[token]] * 2)
            for layer in self.layers:
                layer.append(hidden[:1][None], hidden[1:][None])
                hidden = layer.attend(hidden) + hidden
        self.ids += tokens

    def rewind(self, count: int) -> None:
        self.cache.truncate_last(count)
        del self.ids[len(self.ids) - count :]

    def save(self, store: Store) -> Lineage:
        identity, records = identity_of(self.plan, gaps=has_gaps(self.cache)), records_of(self.cache, len(self.ids))
        store.save(identity, self.ids, records, lineage=self.cache.lineage, fields=field_digests(self.cache))
        return self.cache.lineage

    def restore(self, store: Store, ids: list[int], lineage: Lineage, *, mapped: bool) -> bool:
        for gaps in (False, True):
            before = contents(self.cache), self.cache.lineage
            with store.restore(identity_of(self.plan, gaps=gaps), ids, lineage=lineage) as restored:
                taken = (on_prefix if mapped else restore_into)(self.cache, restored)
            if taken:
                self.ids = ids[:taken]
                return True
            assert (contents(self.cache), self.cache.lineage) == before
        return False

    @property
    def layers(self) -> list[AttentionLayer]:
        return [layer for layer in self.cache.own if isinstance(layer, AttentionLayer)]

    @property
    def said(self) -> tuple[object, ...]:
        """What the cache says it is."""
        return self.cache.lineage, tuple(self.ids), field_digests(self.cache), has_gaps(self.cache)

    @property
    def rows(self) -> list[F32]:
        """What it is: rows as numbers, of windows those that the next query sees."""
        found = []
        for layer in self.layers:
            for plane in (layer.keys, layer.values):
                rows = np.concatenate([np.empty((0, SIZE), np.float32), *map(decode, plane.blocks(0))])
                found.append(rows[-(WINDOW - 1) :] if layer.plan.window else rows)
        return found


@pytest.mark.parametrize("name", PLANS)
def test_caches_that_say_they_are_alike_hold_alike(name: str) -> None:
    plan, tolerance = PLANS[name]
    known: Known = {}
    met = hits = 0
    for seed in range(WALKS):
        rng, store = np.random.default_rng(seed), warmkv.open_store()
        walkers, lineages = [Walker(plan), Walker(plan)], {CLEAN}
        for _ in range(STEPS):
            turn = int(rng.integers(2))
            hits += step(walkers[turn], walkers[1 - turn], rng, store, lineages)
            mine, said = walkers[turn].rows, walkers[turn].said
            met += said in known
            for rows, other in zip(mine, known.setdefault(said, mine), strict=True):
                np.testing.assert_allclose(rows, other, rtol=0, atol=tolerance)
        store.close()
    assert hits > 5 and met > 20, (hits, met)


def step(walker: Walker, other: Walker, rng: np.random.Generator, store: Store, lineages: set[Lineage]) -> bool:
    """One random act; whether it was a restore that hit."""
    act = int(rng.integers(10))
    try:
        if act < 4:
            count = int(rng.choice([5, 20]))
            walker.feed([0] * count if rng.random() < 0.7 else [1] * count)
        elif act == 4:
            walker.cache.evict(10)
        elif act == 5:
            walker.rewind(5)
        elif act < 8 and walker.ids:
            lineages.add(walker.save(store))
        elif act >= 8:
            lineage = sorted(lineages)[int(rng.integers(len(lineages)))]
            return walker.restore(store, [*other.ids, 1], lineage, mapped=bool(rng.random() < 0.5))
    except (CannotRewind, RecordError):
        pass  # beyond the start, into rows that are gone, or mass that is not counted: nothing has changed
    return False
