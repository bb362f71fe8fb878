"""A cache over ranks: the numbers of its source, answers as of one cache, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from devices_at_hand import KINDS, at_hand
from ranked import DELTA, F16, F32, HYBRID, Q5, Q8, WORLD, Twin, homes, numbers, whole

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live import rings
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.recurrent import RecurrentState
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, TurboQuantPlan
from warmkv.kvstore.live.rank_parts import RankRows, bytes_by_rank
from warmkv.kvstore.live.ranks import RankedCache
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.transaction import Transaction
from warmkv.schema.errors import (
    CannotRewind,
    CapacityExceeded,
    RecordError,
    ReplayDue,
    TransactionError,
    UnsupportedError,
    WarmKVError,
)
from warmkv.schema.identity import LayerKind

#: Of two ranks each has 128 channels of keys and of values, as one of eight has of a Step-like model.
STEP = LayerPlan(LayerKind.FULL, 4, 2, 128, 128, Q8, Q5, importance=False)
STEP_RING = replace(STEP, kind=LayerKind.SLIDING, window=32)


class Copies(HostDevice):
    """Notes how many bytes are copied at once."""

    def __init__(self, **about: Any) -> None:
        self.copied: list[int] = []
        super().__init__(**about)

    def copy_into(self, out: Any, offset: int, source: Any, start: int, count: int) -> None:
        self.copied.append(count * out.itemsize)
        super().copy_into(out, offset, source, start, count)


def rows(rng: np.random.Generator, plan: LayerPlan, count: int) -> tuple[np.ndarray, np.ndarray]:
    return numbers(rng, count, plan.kv_heads, plan.key_size), numbers(rng, count, plan.kv_heads, plan.value_size)


def fed(cache: RankedCache, *counts: int, seed: int = 0) -> None:
    """Transactions of so many rows, all of which stay."""
    rng = np.random.default_rng(seed)
    for count in counts:
        opened = cache.begin()
        for index in sorted(layer.index for layer in cache.caches[0].own if isinstance(layer, ResidentLayer)):
            cache.stage(opened, index, *rows(rng, cache.plan.layers[index], count))
        cache.commit(opened)


def layer_of(cache: RankedCache, rank: int = 0, index: int = 0) -> ResidentLayer:
    layer = cache.caches[rank].layers[index]
    assert isinstance(layer, ResidentLayer)
    return layer


def ring_cache(capacity: int = 10_000) -> RankedCache:
    places = [Residence((Copies(name=f"rank {rank}"),), capacity, rings=True) for rank in range(WORLD)]
    return RankedCache(ModelPlan((STEP_RING,)), places)


def test_a_staged_rebase_is_that_of_the_source_and_can_be_rolled_back() -> None:
    cache = ring_cache()
    fed(cache, 4127, 4635)
    assert cache.committed == 8762
    assert layer_of(cache).ring == rings.Ring(4671, 32, 4096)
    seen = [layer_of(cache, rank).keys.packed(4666 - 22).tobytes() for rank in range(WORLD)]
    opened = cache.begin()
    cache.stage(opened, 0, *rows(np.random.default_rng(1), STEP_RING, 10))
    for rank in range(WORLD):
        layer = layer_of(cache, rank)
        assert layer.ring == rings.Ring(4671, 32, 8704) and layer.mirrors() == (8772, 8704)
        plane = layer.keys.plane.data[36 * 136 : 68 * 136].tobytes()
        assert plane[: 22 * 136] == seen[rank] and plane == layer.keys.packed(36).tobytes()
    cache.commit(opened, 0)
    assert (cache.committed, cache.staged) == (8762, 8762)
    assert not cache.can_rewind_to(8200)
    with pytest.raises(CannotRewind):
        cache.rewind(8200)
    assert [layer_of(cache, rank).keys.packed(36).tobytes() for rank in range(WORLD)] == seen


def test_growth_copies_the_live_window_and_goes_on_counting() -> None:
    cache = ring_cache()
    fed(cache, 4127, 4123)
    assert layer_of(cache).ring == rings.Ring(4671, 32, 4096) and cache.generation == 2
    before, held = cache.caches, [layer_of(cache, rank).keys.packed(4096).tobytes() for rank in range(WORLD)]
    devices = [part.device for own in before for part in own.parts]
    for device in devices:
        device.copied.clear()
    cache.grow(20_000)
    assert [device.copied for device in devices] == [[58 * 136, 58 * 96]] * WORLD
    assert layer_of(cache).ring == rings.Ring(4671, 32, 8192) and cache.committed == cache.staged == 8250
    assert [layer_of(cache, rank).keys.packed().tobytes() for rank in range(WORLD)] == held
    assert cache.begin() == Transaction(3, 8250) and cache.capacity == 20_000
    assert [device.allocated_bytes for device in devices] == list(
        bytes_by_rank(cache.plan, [own.residence for own in cache.caches])
    )
    assert not set(cache.caches) & set(before)


def test_eight_ranks_of_a_step_like_model_take_the_bytes_of_its_source() -> None:
    wide = LayerPlan(LayerKind.FULL, 64, 8, 128, 128, Q8, Q5, importance=False)
    plan = ModelPlan((wide, replace(wide, kind=LayerKind.SLIDING, window=512)))
    places = [Residence((HostDevice(name=str(rank)),), 6000, rings=True) for rank in range(8)]
    cache = RankedCache(plan, places)
    for own in cache.caches:
        flat, ring = own.parts[0].layers
        assert (flat.allocated_bytes, ring.allocated_bytes) == (232 * 6000 + 20, 232 * 5151 + 20)
    assert [place.devices[0].allocated_bytes for place in places] == list(bytes_by_rank(plan, places))
    cache.free()
    assert not any(place.devices[0].allocated_bytes for place in places)
    for ask in (cache.begin, cache.clear, lambda: cache.hydrate(0, [])):
        with pytest.raises(RecordError, match="given back"):
            ask()


def test_bytes_of_a_hybrid_are_told_before() -> None:
    places = homes(50)
    cache = RankedCache(HYBRID, places, backend="reference")
    told = list(bytes_by_rank(HYBRID, places))
    assert [place.devices[0].allocated_bytes for place in places] == told
    cache.grow(90)
    bigger = [replace(place, capacity=90) for place in places]
    assert [place.devices[0].allocated_bytes for place in places] == list(bytes_by_rank(HYBRID, bigger))


SHARED_OUT = {
    "q8_0": whole(Q8, Q5), "fp8": whole(RowFormat.FP8, RowFormat.Q4_0), "f16": whole(F16, F32),
    "window": whole(Q8, F16, window=9), "capped": replace(whole(F32, F16), softcap=3.0),
    "turboquant": replace(whole(RowFormat.TQ_KEY, RowFormat.TQ_VALUE), turboquant=TurboQuantPlan(7)),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("name", SHARED_OUT)
def test_ranks_side_by_side_answer_as_one_cache(name: str, backend: Any) -> None:
    plan = ModelPlan((SHARED_OUT[name], LayerPlan(LayerKind.SHARED, shared_with=0)))
    layer, rng = plan.layers[0], np.random.default_rng(3)
    cache = RankedCache(plan, [Residence((HostDevice(),), 80, rings=True) for _ in range(WORLD)], backend=backend)
    alone = ModelCache(plan, backend=backend, residence=Residence((HostDevice(),), 80, rings=True))
    one = alone.layers[0]
    assert isinstance(one, ResidentLayer)
    for count, accepted in ((1, 1), (33, 30), (20, 20), (4, 0)):
        opened = cache.begin()
        k, v = rows(rng, layer, count)
        cache.stage(opened, 0, k, v)
        one.append(k, v)
        for _ in range(2):
            q = numbers(rng, count, layer.heads, layer.key_size)
            found = np.concatenate(cache.attend_chunk(0, q), axis=1)
            assert np.array_equal(found, one.attend_chunk(q))
        cache.commit(opened, accepted)
        one.truncate_last(count - accepted)
        q = numbers(rng, layer.heads, layer.key_size)
        for index in (0, 1):
            parts = np.split(q, WORLD) if index else q
            assert np.array_equal(np.concatenate(cache.attend(index, parts)), alone.layers[index].attend(q))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_on_devices_of_every_kind_hold_what_those_of_the_host_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "PRIME_ROWS", 24)
    monkeypatch.setattr(rings, "REWIND_SLACK_ROWS", 16)
    device = at_hand(kind, monkeypatch)
    plan = ModelPlan((whole(), DELTA, whole(F16, RowFormat.FP8, window=6)))
    cache = RankedCache(plan, [Residence((device,), 200, rings=True)] * WORLD, backend="reference")
    twin = RankedCache(plan, homes(200), backend="reference")
    rng = np.random.default_rng(8)
    for step, (count, accepted) in enumerate([(40, 40), (24, 11), (24, 24), (20, 0), (3, 2)]):
        given = {index: rows(rng, plan.layers[index], count) for index in (0, 2)}
        state, conv = numbers(rng, 6), numbers(rng, 2, 4)
        for each in (cache, twin):
            opened = each.begin()
            for index, pair in given.items():
                each.stage(opened, index, *pair)
            each.update(1, state, count, convs=conv)
            each.commit(opened, accepted)
            if each.replay_due:
                each.update(1, state, len(each.replay_due), convs=conv)
            if step == 3:
                each.grow(260)
        for own, other in zip(cache.caches, twin.caches, strict=True):
            for index in (0, 2):
                mine, his = own.layers[index], other.layers[index]
                assert isinstance(mine, ResidentLayer) and isinstance(his, ResidentLayer)
                assert mine.mirrors() == mine.expected_mirrors == his.mirrors()
                for plane in ("keys", "values"):
                    assert getattr(mine, plane).packed().tobytes() == getattr(his, plane).packed().tobytes()
            assert np.array_equal(own.layers[1].taken().state, other.layers[1].taken().state)


def test_transactions_ask_for_no_memory() -> None:
    twin = Twin(HYBRID, np.random.default_rng(4))
    twin.hydrate(30, 5)
    devices = [part.device for own in twin.cache.caches for part in own.parts]
    before = [(device.allocations, device.allocated_bytes) for device in devices]
    for _ in range(5):
        for step in (
            twin.begin, lambda: twin.stage(3), lambda: twin.stage(1), lambda: twin.commit(2), twin.replay, twin.begin,
            lambda: twin.stage(2), twin.rollback, twin.begin, lambda: twin.stage(4),
            lambda: twin.rewind(twin.committed), twin.check,
        ):  # fmt: skip
            step()
    assert [(device.allocations, device.allocated_bytes) for device in devices] == before


def test_a_rank_may_be_a_pipeline() -> None:
    places = [Residence((HostDevice(name="a"), HostDevice(name="b")), 60, cuts=(1,), rings=True) for _ in range(WORLD)]
    plan = ModelPlan((whole(), whole(F16, F16, window=6)))
    cache, plain = RankedCache(plan, places, backend="reference"), RankedCache(plan, homes(60), backend="reference")
    for each in (cache, plain):
        fed(each, 9, 4)
        each.rewind(11)
    assert cache.caches[0].parts[1].layers[0].index == 1
    for rank in range(WORLD):
        for index in range(2):
            assert layer_of(cache, rank, index).keys.packed().tobytes() == layer_of(plain, rank, index).keys.packed().tobytes()


def test_what_was_noted_of_rows_outlasts_growth() -> None:
    cache = RankedCache(ModelPlan((whole(),)), homes(20), backend="reference")
    fed(cache, 9)
    sinks = np.arange(4, dtype=np.float32)
    for own in cache.caches:
        own.lineage, own.shift_offset = b"x" * 16, 3
        own.park_logits(np.arange(5, dtype=np.float32))
        layer_of(cache, cache.caches.index(own)).sinks = sinks
    cache.grow(40)
    for rank, own in enumerate(cache.caches):
        assert (own.lineage, own.shift_offset) == (b"x" * 16, 3)
        assert np.array_equal(own.parked_logits, np.arange(5)) and np.array_equal(layer_of(cache, rank).sinks, sinks)
    fed(cache, 1)
    cache.rewind(9)
    assert [own.lineage for own in cache.caches] == [b"x" * 16] * WORLD


def test_a_transaction_of_before_a_clear_is_over_for_good() -> None:
    cache = RankedCache(ModelPlan((whole(),)), homes(20), backend="reference")
    opened = cache.begin()
    cache.clear()
    for ask in (cache.commit, cache.rollback):
        with pytest.raises(TransactionError):
            ask(opened)
    again = cache.begin()
    assert again == Transaction(2, 0) and again.base == opened.base
    with pytest.raises(TransactionError):
        cache.stage(opened, 0, *rows(np.random.default_rng(0), whole(), 1))
    cache.rollback(again)
    cache.grow(30)
    assert cache.begin().generation == 3


def test_states_that_were_not_updated_are_told_of_before_a_commit() -> None:
    cache, rng = RankedCache(HYBRID, homes(30), backend="reference"), np.random.default_rng(0)
    opened = cache.begin()
    for index in (1, 2):
        cache.stage(opened, index, *rows(rng, HYBRID.layers[index], 2))
    cache.update(0, numbers(rng, 6), 2, convs=numbers(rng, 2, 4))
    with pytest.raises(TransactionError, match=r"layer 3 \(RECURRENT\) of rank 0"):
        cache.commit(opened)
    cache.update(3, np.split(numbers(rng, 4), 2), 2)
    cache.commit(opened, 1)
    assert cache.replay_due == range(0, 1)
    for ask in (cache.begin, lambda: cache.grow(40)):
        with pytest.raises(ReplayDue):
            ask()
    with pytest.raises(TransactionError):
        cache.update(3, numbers(rng, 4), 2)
    assert cache.caches[0].layers[3].position == 0
    cache.rewind(0)
    assert not cache.replay_due and cache.begin().base == 0


FIELD = replace(whole(RowFormat.Q8_2F, F16))


@pytest.mark.parametrize(
    "plan, places, error",
    [
        ((whole(),), (), RecordError),
        ((whole(),), homes(20, world=3), RecordError),
        ((replace(STEP, kv_heads=1, heads=2),), homes(20), RecordError),
        ((whole(),), (*homes(20, world=1), *homes(21, world=1)), RecordError),
        ((whole(window=6),), (*homes(20, world=1), *homes(20, world=1, rings=False)), RecordError),
        ((whole(), LayerPlan(LayerKind.RECURRENT, state_size=5)), homes(20), RecordError),
        ((DELTA,), homes(20), UnsupportedError),
        ((FIELD,), homes(20), UnsupportedError),
        ((replace(whole(), importance=True),), homes(20), UnsupportedError),
        ((LayerPlan(LayerKind.CONV, conv=DELTA.conv),), homes(20), UnsupportedError),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_memory_is_taken(
    plan: tuple[LayerPlan, ...], places: tuple[Residence, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        RankedCache(ModelPlan(plan), places)
    assert not any(place.devices[0].allocations for place in places)


def test_bad_rows_of_one_rank_change_nothing_on_any() -> None:
    plan = ModelPlan((whole(), whole(F16, F16, window=6), LayerPlan(LayerKind.SHARED, shared_with=0), DELTA))
    twin = Twin(plan, np.random.default_rng(0))
    twin.hydrate(9, 2)
    twin.begin()
    twin.stage(3)
    cache, opened = twin.cache, twin.active
    assert opened is not None
    k, v = twin.new(2)
    broken = k.copy()
    broken[1, 3, 5] = np.nan
    halves = np.split(k, 2, axis=1), np.split(v, 2, axis=1)
    state, conv = numbers(twin.rng, 6), numbers(twin.rng, 2, 4)
    bad: list[Callable[[], object]] = [
        lambda: cache.stage(opened, 0, broken, v), lambda: cache.stage(opened, 0, k[:, :3], v),
        lambda: cache.stage(opened, 0, k, v[:1]), lambda: cache.stage(opened, 0, k[:0], v[:0]),
        lambda: cache.stage(opened, 0, halves[0], halves[1][:1]),
        lambda: cache.stage(opened, 0, [halves[0][0], halves[0][1][:1]], [halves[1][0], halves[1][1][:1]]),
        lambda: cache.stage(opened, 0, k.astype(np.float64), v), lambda: cache.stage(opened, 0, 5, v),  # type: ignore[arg-type]
        lambda: cache.stage(opened, 0, [5, 6], [7, 8]), lambda: cache.stage(opened, 2, k, v),  # type: ignore[list-item]
        lambda: cache.stage(opened, 3, k, v), lambda: cache.stage(opened, 9, k, v), lambda: cache.update(0, state),
        lambda: cache.update(3, state), lambda: cache.update(3, state[:5], convs=conv),
        lambda: cache.update(3, state, -1, convs=conv), lambda: cache.update(3, state, 0, convs=conv),
        lambda: cache.update(9, state, convs=conv), lambda: cache.update(3, state, convs=conv[:1]),
        lambda: cache.stage(replace(opened, base=0), 0, k, v), lambda: cache.stage(replace(opened, generation=7), 0, k, v),
        lambda: cache.commit(opened, 4), lambda: cache.commit(opened, -1), lambda: cache.rollback(replace(opened, base=3)),
        lambda: cache.rewind(13), lambda: cache.rewind(-1), lambda: cache.grow(200), lambda: cache.hydrate(3, []),
        lambda: cache.attend(3, k), lambda: cache.attend(0, k[0]), lambda: cache.refill(0, []),
    ]  # fmt: skip
    for ask in bad:
        with pytest.raises(WarmKVError):
            ask()
        twin.check()
    assert cache.active == opened
    twin.stage(2)
    twin.commit(4)
    twin.check()


def without_first(part: RankRows) -> RankRows:
    """Less the first row of each of its two parts."""
    keys, values = ([rows[1:] for rows in side] for side in (part.keys, part.values))
    return RankRows(keys, values, part.start + 2)


def test_states_to_be_filled_in_that_do_not_fit_leave_the_cache_empty_and_usable() -> None:
    plan = ModelPlan((whole(F32, F32), whole(F32, F32, window=6), DELTA))
    twin = Twin(plan, np.random.default_rng(0))
    twin.cache.clear()
    good = {(rank, at): type(oracle)(oracle.plan) for (rank, at), oracle in twin.rows.items()}
    for at in twin.of_rows:
        for rank, (k, v) in enumerate(zip(*(np.split(part, 2, axis=1) for part in twin.new(20)), strict=True)):
            good[rank, at].append(k, v)
    states = {2: twin.made_state(2, 20)}

    def made(rank: int) -> list[Any]:
        return twin.records(rank, good, states, 20, 0)

    ranks = [made(0), made(1)]
    flat, ring, state = ranks[1]
    wrong: list[tuple[list[Any], int, type[Exception]]] = [
        ([made(0)], 20, RecordError), ([made(0), made(1)[:2]], 20, RecordError),
        ([made(0), [ring, flat, state]], 20, RecordError),
        ([made(0), [flat, state, ring]], 20, RecordError), ([made(0), made(1)], 21, RecordError),
        ([made(0), [RankRows([], [], 20), ring, state]], 20, RecordError),
        ([[without_first(part[0]), *part[1:]] for part in ranks], 20, CannotRewind),
        ([[part[0], without_first(part[1]), part[2]] for part in ranks], 20, CannotRewind),
        ([made(0), [flat, without_first(ring), state]], 20, RecordError),
        ([made(0), [flat, replace(ring, keys=ring.keys[:1]), state]], 20, RecordError),
        ([made(0), [flat, ring, RecurrentState(state.state[:2], state.conv)]], 20, RecordError),
        ([made(0), [flat, ring, RecurrentState(state.state)]], 20, RecordError),
    ]  # fmt: skip
    for parts, length, error in wrong:
        with pytest.raises(error):
            twin.cache.hydrate(length, parts)
        twin.check()
    small = RankedCache(plan, homes(19), backend="reference")
    with pytest.raises(CapacityExceeded):
        small.hydrate(20, ranks)
    twin.cache.hydrate(20, ranks)
    twin.rows, twin.states, twin.committed, twin.staged = good, states, 20, 20
    twin.check()
    with pytest.raises(TransactionError):
        twin.cache.hydrate(20, ranks)
    twin.check()
