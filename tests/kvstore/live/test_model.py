"""What must hold of all layers at once: built from a plan, evicted, taken back and imported together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from dumps import dump, dump_all
from naive_cache import start_on_prefix

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live import lineage
from warmkv.kvstore.live.checkpoint import checkpoint, rollback
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import ModelCache, make_layer
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, RingPlan
from warmkv.schema.errors import CannotRewind, FormatError, OutOfMemory, RecordError, WarmKVError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

F32 = npt.NDArray[np.float32]
FULL = LayerPlan(LayerKind.FULL, heads=2, kv_heads=1, key_size=4, value_size=4)
SLIDING = replace(FULL, kind=LayerKind.SLIDING, window=8)
RING = replace(FULL, kind=LayerKind.RING, ring=RingPlan(window=6, undo_rows=3))
LINEAR = LayerPlan(LayerKind.RECURRENT, state_size=8)
NYSTROM = replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 8, 2, boundary=19))
Q8 = replace(FULL, key_format=RowFormat.Q8_2F, value_format=RowFormat.Q8_2F)


def source_row(position: int, count: int, salt: int) -> F32:
    """The source's deterministic rows in [-1, 1)."""
    numbers = [(position * 7919 + i * 104_729 + salt * 1_299_709) % 2003 / 1001.5 - 1.0 for i in range(count)]
    return np.asarray(numbers, np.float32)


def cache_of(*layers: LayerPlan, max_rows: int = 0, policy: Policy | None = None, **more: object) -> ModelCache:
    plan = ModelPlan(layers, max_rows)
    return ModelCache(plan, backend="reference", policy=policy or Mass(), **more)  # type: ignore[arg-type]


def feed(cache: ModelCache, count: int) -> None:
    """``count`` tokens through every layer."""
    for _ in range(count):
        for layer in cache.own:
            at = layer.position
            if isinstance(layer, RecurrentLayer):
                layer.update(source_row(at, 8, 1))
                continue
            shape = (layer.plan.kv_heads, layer.plan.key_size)
            q = source_row(at, layer.plan.heads * shape[1], 3).reshape(-1, shape[1])
            k, v = (source_row(at, shape[0] * shape[1], salt).reshape(shape) for salt in (1, 2))
            if isinstance(layer, BoundedLayer) or (isinstance(layer, NystromLayer) and layer.sealed):
                layer.step(q, k, v)
            else:
                layer.append(k[None], v[None])
                layer.attend(q)


def rows(cache: ModelCache, index: int = 0) -> AttentionLayer:
    layer = cache.layers[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def choosy(limit: Callable[[tuple[int, ...]], bool]) -> Callable[..., npt.NDArray[np.generic]]:
    """Memory that is refused where ``limit`` says so."""

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        if limit(shape):
            raise OutOfMemory(f"no room for {shape}", int(np.prod(shape)) * dtype.itemsize)
        return np.empty(shape, dtype)

    return allocate


# -- made from a plan -------------------------------------------------------------------------


def test_each_kind_gets_its_class_and_shared_layers_their_source() -> None:
    shared = [LayerPlan(LayerKind.SHARED, shared_with=source) for source in (1, 2)]
    cache = cache_of(shared[0], FULL, SLIDING, shared[1], RING, LINEAR, NYSTROM)
    kinds = (AttentionLayer, AttentionLayer, AttentionLayer, AttentionLayer, BoundedLayer, RecurrentLayer, NystromLayer)
    assert tuple(type(layer) for layer in cache.layers) == kinds
    assert cache.layers[0] is cache.layers[1] and cache.layers[3] is cache.layers[2]
    assert [layer.index for layer in cache.own] == [1, 2, 4, 5, 6]
    with pytest.raises(RecordError, match=r"layer 3 \(SHARED\) has no state of its own"):
        make_layer(shared[0], 3, rows(cache, 1).kernels, 1)


def test_the_position_is_that_of_the_layer_that_is_furthest() -> None:
    cache = cache_of(LINEAR, FULL, LINEAR)
    row = np.ones((3, 1, 4), np.float32)
    rows(cache, 1).append(row, row)
    assert cache.position == 3


def test_shared_rows_are_counted_taken_back_and_cleared_once() -> None:
    cache = cache_of(FULL, LayerPlan(LayerKind.SHARED, shared_with=0))
    feed(cache, 5)
    assert cache.memory() == cache.layers[0].memory()
    cache.truncate_last(2)
    assert cache.position == 3 and rows(cache).rows == 3
    cache.clear()
    assert cache.position == 0


# -- eviction: the source's tests -------------------------------------------------------------


def test_eviction_keeps_the_newest() -> None:
    cache = cache_of(*[replace(FULL, heads=4, kv_heads=4, key_size=8, value_size=8)] * 2, max_rows=10, policy=Recent())
    for layer in range(2):
        rows(cache, layer).append(np.ones((8, 4, 8), np.float32), np.full((8, 4, 8), 2, np.float32))
    assert cache.position == 8 and not cache.needs_eviction
    assert cache.evict(4) == 8
    assert [rows(cache, layer).rows for layer in range(2)] == [4, 4]
    assert cache.position == 8, "the next position is no row count"


def test_eviction_by_mass_keeps_the_row_that_is_attended() -> None:
    cache = cache_of(replace(FULL, heads=1, key_size=2, value_size=2), max_rows=16, policy=Mass(sinks=1))
    layer = rows(cache)
    for position in range(8):
        layer.append(np.full((1, 1, 2), position, np.float32), np.full((1, 1, 2), position + 100, np.float32))
    mass = np.full(8, 0.05, np.float32)
    mass[3] = 5.0
    layer.accumulate(mass)
    cache.evict(4)
    assert layer.keys.blocks(0)[0].codes[:, 0].tolist() == [0.0, 3.0, 6.0, 7.0]
    assert layer.values.blocks(0)[0].codes[:, 0].tolist() == [100.0, 103.0, 106.0, 107.0]
    assert layer.importance is not None and layer.importance.tolist() == mass[[0, 3, 6, 7]].tolist()
    assert (layer.rows, layer.position, layer.gapless) == (4, 8, False)


@pytest.mark.parametrize(("keys", "values"), [(RowFormat.F32, RowFormat.Q8_2F), (RowFormat.Q8_2F, RowFormat.F32)])
def test_eviction_in_mixed_modes_gathers_each_storage(keys: RowFormat, values: RowFormat) -> None:
    cache = cache_of(replace(FULL, heads=1, key_format=keys, value_format=values))
    layer = rows(cache)
    for position in range(80):
        layer.append(np.full((1, 1, 4), position * 0.01, np.float32), np.full((1, 1, 4), position, np.float32))
    layer.accumulate(np.arange(80, dtype=np.float32))
    before = layer.memory()
    cache.evict(20)
    assert (layer.rows, len(layer.keys), len(layer.values)) == (20, 20, 20)
    assert layer.memory().stored < before.stored / 2 and layer.memory().attention < before.attention
    assert layer.attend(np.ones((1, 4), np.float32))[0, 0] > 30.0


def test_quantised_rows_are_evicted_after_a_rollback() -> None:
    cache = cache_of(replace(Q8, heads=2, kv_heads=2, key_size=32, value_size=32), policy=Mass(sinks=2))
    layer = rows(cache)
    layer.append(source_row(0, 100 * 64, 1).reshape(100, 2, 32), source_row(0, 100 * 64, 2).reshape(100, 2, 32))
    cache.truncate_last(30)
    assert layer.rows == 70
    layer.accumulate(np.arange(70, dtype=np.float32))
    cache.evict(20)
    assert layer.rows == 20
    assert np.isfinite(layer.attend(source_row(0, 64, 3).reshape(2, 32))).all()


@pytest.mark.parametrize("policy", [Recent(), Mass(sinks=1)])
def test_a_sliding_tail_neither_triggers_an_eviction_nor_suffers_one(policy: Policy) -> None:
    """Twenty-five rows, then thirty; the depth stays that of the tail."""
    cache = cache_of(SLIDING, FULL, max_rows=30, policy=policy)
    for _ in range(25):
        feed(cache, 1)
        rows(cache, 0).trim_window(2, 4)
    kept, base = rows(cache, 0).rows, rows(cache, 0).base
    assert base > 0 and not cache.needs_eviction
    feed(cache, 5)
    assert cache.needs_eviction
    generation = rows(cache, 0).generation
    assert cache.evict(10) == 20
    assert (rows(cache, 0).rows, rows(cache, 0).base, rows(cache, 0).generation) == (kept + 5, base, generation)
    assert rows(cache, 1).rows == 10 and cache.position == 30
    assert not cache.needs_eviction


@pytest.mark.parametrize("layer", [SLIDING, RING, NYSTROM, LINEAR])
def test_layers_that_bound_themselves_ask_for_no_eviction(layer: LayerPlan) -> None:
    cache = cache_of(layer, max_rows=4)
    feed(cache, 12)
    assert not cache.needs_eviction and cache.evict(2) == 0 and cache.lineage == CLEAN


def test_the_trigger_is_the_plans_row_count_and_rows_are_not_positions() -> None:
    cache = cache_of(FULL, max_rows=6)
    feed(cache, 5)
    assert not cache.needs_eviction
    feed(cache, 1)
    assert cache.needs_eviction
    cache.evict(5)
    assert not cache.needs_eviction and cache.position == 6
    endless = cache_of(FULL)
    feed(endless, 9)
    assert not endless.needs_eviction


@pytest.mark.parametrize("policy", [Recent(), Mass(sinks=2)])
def test_a_collecting_layer_keeps_its_rows_until_the_boundary(policy: Policy) -> None:
    cache = cache_of(NYSTROM, max_rows=6, policy=policy)
    (layer,) = cache.own
    assert isinstance(layer, NystromLayer)
    for position in range(19):
        feed(cache, 1)
        if position < 18:
            assert cache.evict(3) == 0
            assert not layer.seal()
    assert (layer.rows, len(layer.trace)) == (19, 19)
    assert layer.seal() and layer.rows == 0 and cache.position == 19


# -- all layers or none -----------------------------------------------------------------------


@pytest.mark.parametrize("refused", range(2 * 3 * 3))
def test_an_eviction_that_runs_out_of_memory_changes_no_layer(refused: int) -> None:
    """Whichever allocation fails: three layers, two planes and the mass of each, gathered or not."""
    count, armed = 0, False

    def limit(shape: tuple[int, ...]) -> bool:
        nonlocal count
        count += armed
        return armed and count == refused + 1

    cache = cache_of(FULL, LINEAR, Q8, FULL, allocate=choosy(limit))
    mapped = source_row(0, 50 * 4, 7).reshape(50, 1, 4)
    start_on_prefix(rows(cache, 3), mapped, mapped[::-1])
    feed(cache, 70)
    cache.layers[3].truncate_last(50)
    before, generations, armed = dump_all(cache), [layer.generation for layer in cache.own], True
    try:
        gone = cache.evict(9)
    except OutOfMemory as exc:
        assert exc.requested_bytes > 0
        assert dump_all(cache) == before and cache.lineage == CLEAN
        armed = False
        assert cache.evict(9) == 3 * 61
    else:
        assert gone == 3 * 61 and count <= refused, "no allocation was refused"
    assert [rows(cache, index).rows for index in (0, 2, 3)] == [9, 9, 9]
    assert all(layer.generation > old for layer, old in zip(cache.own, generations, strict=True) if layer.index != 1)


def test_memory_refused_in_the_last_of_eight_layers_leaves_the_first_seven() -> None:
    plans = [replace(FULL, heads=index + 1, kv_heads=index + 1) for index in range(8)]
    armed = False
    cache = cache_of(*plans, allocate=choosy(lambda shape: armed and shape[0] == 8))
    feed(cache, 20)
    before, armed = dump_all(cache), True
    with pytest.raises(OutOfMemory):
        cache.evict(6)
    assert dump_all(cache) == before


def test_a_policy_that_cannot_choose_changes_no_layer() -> None:
    cache = cache_of(FULL, replace(FULL, importance=False))
    feed(cache, 9)
    before = dump_all(cache)
    with pytest.raises(RecordError, match="needs importance"):
        cache.evict(4)
    with pytest.raises(RecordError, match="down to -1 rows"):
        cache.evict(-1)
    assert dump_all(cache) == before
    cache.policy = Recent()
    assert cache.evict(4) == 10


@pytest.mark.parametrize(
    ("last", "count", "error"),
    [(LINEAR, 1, CannotRewind), (RING, 4, CannotRewind), (FULL, 10, RecordError), (FULL, -1, RecordError)],
)
def test_layers_are_all_asked_before_one_is_taken_back(last: LayerPlan, count: int, error: type[WarmKVError]) -> None:
    cache = cache_of(FULL, SLIDING, Q8, NYSTROM, last)
    feed(cache, 9)
    before = dump_all(cache)
    with pytest.raises(error, match="layer [04]"):
        cache.truncate_last(count)
    assert dump_all(cache) == before
    cache.truncate_last(0)
    assert cache.position == 9


def test_layers_that_a_failed_step_left_apart_are_not_taken_back_together() -> None:
    cache = cache_of(FULL, SLIDING)
    feed(cache, 9)
    taken = checkpoint(cache)
    full = cache.layers[0]
    assert isinstance(full, AttentionLayer)
    full.append(np.ones((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32))
    with pytest.raises(RecordError, match="of layers at different ones"):
        cache.truncate_last(1)
    assert [layer.position for layer in cache.own] == [10, 9]
    rollback(cache, taken, 0)
    assert [layer.position for layer in cache.own] == [9, 9]


@pytest.mark.parametrize("count", [1.5, 2.0, "1", None])
@pytest.mark.parametrize("layer", [FULL, SLIDING, Q8, NYSTROM, RING, LINEAR])
def test_what_is_no_whole_number_takes_nothing_back(layer: LayerPlan, count: int) -> None:
    cache = cache_of(layer)
    feed(cache, 9)
    before = dump_all(cache)
    with pytest.raises(RecordError, match="expected a whole number"):
        cache.truncate_last(count)
    assert dump_all(cache) == before


def test_numbers_of_numpy_are_whole_numbers_and_no_part_of_a_position() -> None:
    cache = cache_of(FULL, SLIDING, Q8, NYSTROM, RING)
    feed(cache, 9)
    cache.truncate_last(np.int64(3))  # type: ignore[arg-type]
    assert {type(layer.position) for layer in cache.own} == {int} and cache.position == 6
    assert cache.evict(np.int64(4)) == 4  # type: ignore[arg-type]
    assert cache.lineage != CLEAN


@pytest.mark.parametrize("keep", [1.5, 2.0, "2", None])
def test_a_budget_that_is_no_whole_number_evicts_nothing(keep: int) -> None:
    cache = cache_of(FULL)
    feed(cache, 9)
    before = dump_all(cache)
    with pytest.raises(RecordError, match="expected a whole number"):
        cache.evict(keep)
    cache.policy = "mass"  # type: ignore[assignment]
    with pytest.raises(RecordError, match="'mass', expected Recent"):
        cache.evict(4)
    assert dump_all(cache) == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "full"}, "layer 0: kind 'full', expected a LayerKind"),
        ({"key_format": "q8"}, "key_format is 'q8', expected a RowFormat"),
        ({"value_format": None}, "value_format is None, expected a RowFormat"),
        ({"heads": 2.0}, "heads is 2.0, expected 1 to"),
        ({"key_size": "4"}, "key_size is '4', expected 1 to"),
    ],
)
def test_a_plan_of_things_that_are_none_is_refused_when_it_is_made(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        ModelPlan((replace(FULL, **wrong),))  # type: ignore[arg-type]


def test_taking_back_takes_every_layer_back() -> None:
    cache = cache_of(FULL, SLIDING, Q8, NYSTROM, RING)
    feed(cache, 9)
    cache.truncate_last(3)
    assert {layer.position for layer in cache.own} == {6} and cache.lineage == CLEAN
    feed(cache, 3)
    assert {layer.position for layer in cache.own} == {9}


def test_a_sealed_layer_refuses_for_all() -> None:
    cache = cache_of(FULL, NYSTROM)
    feed(cache, 19)
    seal(cache)
    before = dump_all(cache)
    with pytest.raises(CannotRewind):
        cache.truncate_last(1)
    assert dump_all(cache) == before


# -- clear, memory -----------------------------------------------------------------------------


def test_clear_keeps_what_belongs_to_the_model() -> None:
    cache = cache_of(FULL, SLIDING, replace(RING, ring=RingPlan(window=6, sinks=2)), LINEAR, NYSTROM)
    ring = cache.layers[2]
    assert isinstance(ring, BoundedLayer)
    ring.set_sinks(np.ones((1, 2, 4), np.float32), np.ones((1, 2, 4), np.float32))
    rows(cache).sinks = np.asarray([0.5, -0.5], np.float32)
    feed(cache, 19)
    seal(cache)
    cache.evict(4)
    assert cache.lineage != CLEAN
    cache.clear()
    assert cache.position == 0 and cache.lineage == CLEAN
    assert all(layer.position == 0 for layer in cache.own)
    assert rows(cache).sinks is not None and ring.sink_keys is not None
    assert rows(cache, 1).plan.window == 8
    feed(cache, 19)
    assert cache.position == 19


def test_memory_of_attention_and_of_recurrent_state_is_told_apart() -> None:
    """Eight numbers of state, a scratch beside them, one row: the source's test, whose scratch is half as long."""
    cache = cache_of(LINEAR, replace(FULL, heads=1))
    linear = cache.layers[0]
    assert isinstance(linear, RecurrentLayer)
    linear.speculate(np.zeros(8, np.float32))
    rows(cache, 1).append(np.zeros((1, 1, 4), np.float32), np.ones((1, 1, 4), np.float32))
    memory = cache.memory()
    assert memory.recurrent == 16 * 4
    assert memory.stored == 2 * 4 * 4 and memory.attention >= memory.stored
    assert memory.total == memory.recurrent + memory.attention + memory.importance


def test_memory_is_what_was_allocated() -> None:
    held: dict[int, int] = {}

    def counting(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        array = np.empty(shape, dtype)
        held[id(array)] = array.nbytes
        kept.append(array)
        return array

    kept: list[npt.NDArray[np.generic]] = []
    cache = cache_of(RING, LINEAR, allocate=counting)
    assert cache.memory().total == sum(held.values())
    assert cache.memory().bounded == 4 * (2 * 6 * 4 + 2 * 3 * 4) and cache.memory().recurrent == 4 * 8


# -- lineage -----------------------------------------------------------------------------------


def seal(cache: ModelCache) -> None:
    for layer in cache.own:
        if isinstance(layer, NystromLayer):
            assert layer.seal()


@pytest.mark.parametrize("policy", [Recent(), Mass(sinks=1)])
def test_an_eviction_changes_the_lineage_by_what_it_kept(policy: Policy) -> None:
    cache, other = cache_of(FULL, FULL, policy=policy), cache_of(FULL, FULL, policy=policy)
    feed(cache, 9)
    feed(other, 9)
    assert cache.evict(9) == 0 and cache.lineage == CLEAN
    cache.evict(6)
    other.evict(6)
    assert cache.lineage == other.lineage != CLEAN
    first = cache.lineage
    assert cache.evict(6) == 0 and cache.lineage == first
    cache.evict(5)
    assert cache.lineage not in (first, CLEAN)
    other.evict(4)
    assert cache.lineage != other.lineage


def test_a_seal_changes_the_lineage_once() -> None:
    cache, other = cache_of(NYSTROM, NYSTROM), cache_of(NYSTROM, NYSTROM)
    feed(cache, 19)
    feed(other, 20)
    assert cache.lineage == CLEAN
    seal(cache)
    once = cache.lineage
    assert once != CLEAN and cache.lineage == once
    by_hand = CLEAN
    for index in range(2):
        assert NYSTROM.nystrom is not None
        by_hand = lineage.sealed(by_hand, index, NYSTROM.nystrom, 19)
    assert once == by_hand
    feed(cache, 3)
    assert cache.lineage == once
    seal(other)
    assert other.lineage not in (once, CLEAN)
    cache.clear()
    assert cache.lineage == CLEAN
    feed(cache, 19)
    seal(cache)
    assert cache.lineage == once


def test_trims_freezes_and_rollbacks_leave_the_lineage() -> None:
    cache = cache_of(SLIDING, Q8)
    feed(cache, 70)
    assert rows(cache, 0).trim_window(2) > 0 and rows(cache, 1).keys.frozen
    cache.truncate_last(2)
    assert cache.lineage == CLEAN


def test_a_lineage_from_elsewhere_is_taken_over_with_its_seals() -> None:
    cache, other = cache_of(NYSTROM), cache_of(NYSTROM)
    feed(cache, 19)
    seal(cache)
    found = lineage.after(CLEAN, "elsewhere")
    cache.lineage = found
    assert cache.lineage == found
    feed(other, 19)
    other.lineage = found
    seal(other)
    assert other.lineage != found
    for wrong in (b"", bytes(15), bytes(17)):
        with pytest.raises(RecordError, match=f"{len(wrong)} bytes, expected 16"):
            cache.lineage = wrong  # type: ignore[assignment]
    assert cache.lineage == found


# -- the layer wire over all layers --------------------------------------------------------------

WIRED = (FULL, SLIDING, replace(FULL, heads=6, kv_heads=3, alive=(True, False, True)), RING, LINEAR)


def test_all_layers_travel_and_go_on_alike() -> None:
    there, back = cache_of(*WIRED), cache_of(*WIRED)
    feed(there, 20)
    rows(there, 1).trim_window(2, 4)
    feed(back, 7)
    back.import_layers(there.export_layers())
    assert back.position == 20 and back.lineage == CLEAN
    for _ in range(2):
        contents = [[item for item in dump(layer) if not isinstance(item, int)] for layer in (*there.own, *back.own)]
        assert contents[:3] == contents[5:8] and contents[4] == contents[9]
        feed(there, 1)
        feed(back, 1)
    assert there.export_layers() == back.export_layers()


def test_records_are_all_checked_before_one_is_taken() -> None:
    there, back = cache_of(*WIRED), cache_of(*WIRED)
    feed(there, 12)
    feed(back, 5)
    before, records = dump_all(back), there.export_layers()
    for index in range(len(WIRED)):
        broken = list(records)
        broken[index] = broken[index][:-1]
        with pytest.raises(FormatError):
            back.import_layers(broken)
        assert dump_all(back) == before
    with pytest.raises(FormatError, match="4 layer records, expected 5"):
        back.import_layers(records[:4])
    feed(there, 1)
    with pytest.raises(FormatError, match=r"positions \[12, 13\], expected one sequence"):
        back.import_layers([*records[:4], there.export_layers()[4]])
    assert dump_all(back) == before


def test_a_lineage_travels_beside_the_records_and_half_precision_changes_it() -> None:
    there, back = cache_of(*WIRED), cache_of(*WIRED)
    feed(there, 12)
    told = lineage.after(CLEAN, "told")
    back.import_layers(there.export_layers(), lineage=told)
    assert back.lineage == told
    back.import_layers(there.export_layers(f16=True), lineage=told)
    halved = back.lineage
    assert halved not in (told, CLEAN)
    back.import_layers(there.export_layers(f16=True), lineage=told)
    assert back.lineage == halved
    recurrent = cache_of(LINEAR)
    feed(recurrent, 3)
    recurrent.import_layers(recurrent.export_layers(f16=True))
    assert recurrent.lineage == CLEAN, "a recurrent vector is sent whole"


def test_rows_with_gaps_never_come_in_clean() -> None:
    there, back = cache_of(FULL), cache_of(FULL)
    feed(there, 12)
    there.evict(5)
    back.import_layers(there.export_layers())
    assert back.position == 12 and rows(back).rows == 5 and back.lineage != CLEAN
