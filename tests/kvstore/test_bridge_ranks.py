"""A cache over ranks is saved and comes back: all ranks at one length, or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import records_of, restore_into
from warmkv.kvstore.bridge.ranks import rank_identities, rank_identity, restore_ranks, save_ranks, usable_over_ranks
from warmkv.kvstore.live import lineage as lineages
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.ranks import RankedCache
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing.live import contents, identity_of, prompt
from warmkv.schema.errors import CapacityExceeded, DeviceFault, RecordError, TransactionError
from warmkv.schema.identity import LayerKind, Topology
from warmkv.schema.records import CLEAN

WORLD = 2
FULL = LayerPlan(
    LayerKind.FULL, heads=4, kv_heads=2, key_size=32, value_size=32, key_format=RowFormat.Q8_0, value_format=RowFormat.Q5_1,
    importance=False,
)  # fmt: skip
WINDOW = replace(FULL, kind=LayerKind.SLIDING, window=9, key_format=RowFormat.F16, value_format=RowFormat.F32)
DELTA = LayerPlan(LayerKind.RECURRENT, state_size=6, conv=ConvPlan(4, taps=2, history=0))
PLANS = {
    "rows": ModelPlan((FULL, WINDOW)),
    "states": ModelPlan((FULL, DELTA, WINDOW, LayerPlan(LayerKind.SHARED, shared_with=0))),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        yield opened


def cache_of(plan: ModelPlan, *, rings: bool = True, device: type[HostDevice] = HostDevice, capacity: int = 200) -> RankedCache:
    homes = [Residence((device(name=f"rank {rank}"),), capacity, rings=rings) for rank in range(WORLD)]
    return RankedCache(plan, homes, backend="reference")


def run(cache: RankedCache, ids: np.ndarray) -> None:
    """Go on up to all of ``ids``: what is fed depends on tokens and their positions alone."""
    first, opened = cache.committed, cache.begin()
    seeds = [(int(token), position) for position, token in enumerate(ids)]
    for layer in cache.caches[0].own:
        whole = cache.plan.layers[layer.index]
        if isinstance(layer, ResidentLayer):
            rows = [np.random.default_rng((*seed, layer.index)).standard_normal((4, 32), np.float32) for seed in seeds[first:]]
            cache.stage(opened, layer.index, np.stack(rows)[:, :2], np.stack(rows)[:, 2:])
        elif isinstance(layer, ResidentRecurrentLayer):
            assert whole.conv is not None
            rng = np.random.default_rng((*seeds[-1], layer.index))
            conv = rng.standard_normal((whole.conv.taps, whole.conv.channels), np.float32)
            cache.update(layer.index, rng.standard_normal(whole.state_size, np.float32), len(ids) - first, convs=conv)
    cache.commit(opened)


def held(cache: RankedCache) -> list[object]:
    return [contents(own) for own in cache.caches]


def test_rank_and_world_size_are_identity() -> None:
    plan = PLANS["states"]
    whole = identity_of(plan)
    assert rank_identity(whole, plan, 0, 1) == whole
    first, second = (rank_identity(whole, plan, rank, 2) for rank in range(2))
    assert first.topology == Topology(0, 2, 0, 1) and second.topology == Topology(1, 2, 0, 1)
    assert len({identity.canonical() for identity in (whole, first, second)}) == 3
    assert [plane.row_shape for plane in first.layers[0].planes] == [(1, 32), (1, 32)]
    assert [plane.row_shape for plane in first.layers[1].planes] == [(3,), (2, 2)]
    with pytest.raises(RecordError):
        rank_identity(whole, plan, 0, 4)


@pytest.mark.parametrize("rings", [True, False])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("length", [1, 8, 9, 33, 70])
def test_all_ranks_come_back_at_one_length_and_go_on_alike(name: str, length: int, rings: bool, store: Store) -> None:
    plan, ids = PLANS[name], prompt(length + 40)
    source = cache_of(plan, rings=rings)
    run(source, ids[:length])
    saved = save_ranks(source, store, identity_of(plan), ids[:length])
    assert [done.stored for done in saved] == [True] * WORLD
    again = cache_of(plan, rings=rings)
    assert usable_over_ranks(store, rank_identities(identity_of(plan), again), ids) == length
    assert restore_ranks(again, store, identity_of(plan), ids) == length
    assert again.committed == again.staged == length and held(again) == held(source)
    run(source, ids)
    run(again, ids)
    assert held(again) == held(source)
    save_ranks(again, store, identity_of(plan), ids)
    assert restore_ranks(source, store, identity_of(plan), np.append(ids, 1)) == len(ids)
    assert held(again) == held(source)


def save_rank(cache: RankedCache, store: Store, rank: int, ids: np.ndarray) -> None:
    identity = rank_identities(identity_of(cache.plan), cache)[rank]
    assert store.save(identity, ids, records_of(cache.caches[rank], len(ids))).stored


def test_what_one_rank_lacks_none_has(store: Store) -> None:
    plan, ids = PLANS["rows"], prompt(61)
    source, shorter = cache_of(plan), cache_of(plan)
    run(shorter, ids[:40])
    for rank in range(WORLD):
        save_rank(shorter, store, rank, ids[:40])
    run(source, ids[:60])
    assert restore_ranks(cache_of(plan), store, identity_of(plan), ids) == 40
    save_rank(source, store, 1, ids[:60])
    again = cache_of(plan)
    assert restore_ranks(again, store, identity_of(plan), ids) == 40
    assert held(again) == held(shorter)
    run(again, ids[:60])
    assert held(again) == held(source)


def test_ranks_agree_on_a_place_where_every_state_is(store: Store) -> None:
    """Rank 0 has states at 20 and 50, rank 1 at 20, 40 and 60: what rank 0 has at 50 and rank 1 at 60 comes down to
    40, which rank 0 has not, and so to 20."""
    plan, ids = PLANS["states"], prompt(70)
    at: dict[int, RankedCache] = {}
    for length in (20, 40, 50, 60):
        at[length] = cache_of(plan)
        run(at[length], ids[:length])
    for rank, lengths in enumerate([(20, 50), (20, 40, 60)]):
        for length in lengths:
            save_rank(at[length], store, rank, ids[:length])
    identities = rank_identities(identity_of(plan), at[20])
    assert [store.match(identity, ids).usable for identity in identities] == [50, 60]
    assert usable_over_ranks(store, identities, ids) == 20
    again = cache_of(plan)
    assert restore_ranks(again, store, identity_of(plan), ids) == 20
    assert held(again) == held(at[20]) and again.committed == 20
    assert usable_over_ranks(store, identities, ids[:20]) == 0
    before = held(again)
    assert restore_ranks(again, store, identity_of(plan), ids[:20]) == 0
    assert held(again) == before and again.committed == 20


def test_a_rank_that_has_nothing_is_a_miss_for_all(store: Store) -> None:
    plan, ids = PLANS["rows"], prompt(30)
    source = cache_of(plan)
    run(source, ids[:20])
    save_rank(source, store, 0, ids[:20])
    again = cache_of(plan)
    assert usable_over_ranks(store, rank_identities(identity_of(plan), again), ids) == 0
    assert restore_ranks(again, store, identity_of(plan), ids) == 0 and again.committed == 0


class Brittle(HostDevice):
    """Fails at one upload or copy on the second rank."""

    left = -1

    def _fails(self) -> None:
        if self.name == "rank 1" and Brittle.left >= 0:
            Brittle.left -= 1
            if Brittle.left < 0:
                raise DeviceFault(f"{self.name} fails because it was told to")

    def upload(self, *args: Any) -> None:
        self._fails()
        super().upload(*args)

    def copy_into(self, *args: Any) -> None:
        self._fails()
        super().copy_into(*args)

    def set_one(self, *args: Any) -> None:
        self._fails()
        super().set_one(*args)


def test_a_device_that_fails_leaves_all_ranks_as_they_were_or_empty(store: Store) -> None:
    plan, ids = PLANS["states"], prompt(50)
    source = cache_of(plan)
    run(source, ids[:45])
    save_ranks(source, store, identity_of(plan), ids[:45])
    again = cache_of(plan, device=Brittle)
    outcomes = set()
    for at in range(1000):
        Brittle.left = -1
        again.clear()
        run(again, ids[:7])
        before = held(again)
        Brittle.left = at
        try:
            found = restore_ranks(again, store, identity_of(plan), ids)
        except DeviceFault:
            assert again.committed in (0, 7)
            assert again.committed == 0 or held(again) == before
            assert all(layer.position == again.committed for own in again.caches for layer in own.own)
            outcomes.add(again.committed)
        else:
            break
        finally:
            Brittle.left = -1
    assert found == 45 and held(again) == held(source) and outcomes == {0, 7}


def test_refusals_leave_the_cache_alone(store: Store) -> None:
    plan, ids = PLANS["rows"], prompt(50)
    source = cache_of(plan)
    run(source, ids[:45])
    save_ranks(source, store, identity_of(plan), ids[:45])
    with pytest.raises(RecordError):
        save_ranks(source, store, identity_of(plan), ids[:44])
    small = cache_of(plan, capacity=40)
    run(small, ids[:7])
    before = held(small)
    with pytest.raises(CapacityExceeded):
        restore_ranks(small, store, identity_of(plan), ids)
    assert held(small) == before and small.committed == 7
    small.begin()
    with pytest.raises(TransactionError):
        restore_ranks(small, store, identity_of(plan), ids)
    with pytest.raises(TransactionError):
        save_ranks(small, store, identity_of(plan), ids[:7])


def f16(plan: ModelPlan) -> ModelPlan:
    formats = {"key_format": RowFormat.F16, "value_format": RowFormat.F16}
    return replace(plan, layers=tuple(replace(layer, **formats) if layer.kv_heads else layer for layer in plan.layers))


@pytest.mark.parametrize("name", PLANS)
def test_rows_that_ranks_saved_in_other_formats_are_written_anew(name: str, store: Store) -> None:
    plan, ids = PLANS[name], prompt(60)
    other = f16(plan)
    source = cache_of(other)
    run(source, ids[:40])
    save_ranks(source, store, identity_of(other), ids[:40])
    again = cache_of(plan)
    assert restore_ranks(again, store, identity_of(plan), ids) == 0
    assert restore_ranks(again, store, identity_of(plan), ids, saved_as=other) == 40 == again.committed
    assert len({own.lineage for own in again.caches} - {CLEAN}) == 1
    assert restore_ranks(source, store, identity_of(other), ids, saved_as=other) == 40
    assert {own.lineage for own in source.caches} == {CLEAN}
    for rank, own in enumerate(again.caches):
        alone = ModelCache(own.plan, backend="reference")
        with store.restore(rank_identity(identity_of(other), other, rank, WORLD), ids) as restored:
            assert restore_into(alone, restored, convert=True) == 40
        assert contents(own) == contents(alone) and own.lineage == alone.lineage
    run(again, ids)
    lineage = again.caches[0].lineage
    save_ranks(again, store, identity_of(plan), ids)
    assert restore_ranks(source, store, identity_of(other), np.append(ids, 1), lineage=lineage) == 0
    fresh = cache_of(plan)
    assert restore_ranks(fresh, store, identity_of(plan), np.append(ids, 1), lineage=lineage) == 60
    assert held(fresh) == held(again) and {own.lineage for own in fresh.caches} == {lineage}


def test_ranks_go_on_under_one_lineage_though_only_one_had_more(store: Store) -> None:
    """Else what that rank had would be found beside what the others computed otherwise."""
    plan, ids = ModelPlan((FULL, FULL)), prompt(60)
    other = f16(plan)
    source, whole = cache_of(other), cache_of(plan)
    run(source, ids[:50])
    save_ranks(source, store, identity_of(other), ids[:50])
    assert restore_ranks(whole, store, identity_of(plan), ids, saved_as=other) == 50
    lineage = whole.caches[0].lineage
    shorter = cache_of(plan)
    run(shorter, ids[:30])
    for rank, length in enumerate((50, 30)):
        own, name = (whole if length == 50 else shorter).caches[rank], rank_identity(identity_of(plan), plan, rank, WORLD)
        assert store.save(name, ids[:length], records_of(own, length), lineage=lineage).stored
    again = cache_of(plan)
    assert restore_ranks(again, store, identity_of(plan), ids, lineage=lineage) == 30
    assert {own.lineage for own in again.caches} == {lineages.rewound(lineage, 30)}
    run(again, ids)
    save_ranks(again, store, identity_of(plan), ids)
    assert restore_ranks(cache_of(plan), store, identity_of(plan), ids, lineage=lineage) == 30
