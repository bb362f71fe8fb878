"""The memory report against every array the layers can be found to hold."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kernels.dispatch import kernels
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.memory import LayerMemory, added
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, RingPlan, modes
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.kvstore.testing.allocated import allocated_bytes, arrays_of
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
LENGTHS = [0, 1, 64, 65, 100]


def numbers(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def feed(cache: ModelCache, count: int) -> None:
    """So many more positions for every layer, one by one."""
    for _ in range(count):
        for layer in cache.own:
            seed, plan = layer.position, layer.plan
            if isinstance(layer, RecurrentLayer):
                layer.update(numbers(seed, plan.state_size))
                continue
            q, k = numbers(seed, 1, plan.heads, plan.key_size), numbers(seed + 1, 1, plan.kv_heads, plan.key_size)
            v = numbers(seed + 2, 1, plan.kv_heads, plan.value_size)
            if isinstance(layer, BoundedLayer) or (isinstance(layer, NystromLayer) and layer.sealed):
                layer.step(q[0], k[0], v[0])
                continue
            layer.append(k, v)
            layer.attend(q[0])


def every_kind(key_format: RowFormat = RowFormat.F32, value_format: RowFormat = RowFormat.F32) -> ModelPlan:
    rows = {"heads": 4, "kv_heads": 2, "key_size": 36, "value_size": 20}
    return ModelPlan(
        (
            LayerPlan(LayerKind.FULL, **rows, key_format=key_format, value_format=value_format, alive=(False, True)),
            LayerPlan(LayerKind.SLIDING, **rows, key_format=key_format, value_format=value_format, window=16, importance=False),
            LayerPlan(LayerKind.RING, **rows, ring=RingPlan(8, 0, (1.0, 0.1), undo_rows=5)),
            LayerPlan(LayerKind.NYSTROM, **rows, nystrom=NystromPlan(4, 8, 2)),
            LayerPlan(LayerKind.RECURRENT, state_size=11),
            LayerPlan(LayerKind.SHARED, shared_with=0),
        )
    )


def check(cache: ModelCache) -> LayerMemory:
    """Every sum holds: of each layer, of all of them, and beside the bytes its rows take by formula."""
    for layer in cache.own:
        memory = layer.memory()
        assert memory.total + memory.weights == allocated_bytes(layer)
        assert 0 <= memory.stored <= memory.attention and memory.mapped == 0
    memory = cache.memory()
    assert memory == added(layer.memory() for layer in cache.own)
    assert memory.total == memory.attention + memory.importance + memory.recurrent + memory.bounded + memory.constant
    assert memory.total + memory.weights == allocated_bytes(cache)
    return memory


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("mode", modes(), ids=[name for name, *_ in modes()])
def test_sums_are_what_was_allocated(mode: tuple[str, RowFormat, RowFormat], length: int) -> None:
    cache = ModelCache(every_kind(*mode[1:]), backend="reference")
    check(cache)
    feed(cache, length)
    memory = check(cache)
    field = 4 * sum(heads * (36 * mode[1].quantised + 20 * mode[2].quantised) * (length > 64) for heads in (1, 2))
    row = mode[1].row_bytes(36, keys=True) + mode[2].row_bytes(20, keys=False)
    assert memory.stored == length * (1 + 2) * row + field + length * 2 * (36 + 20) * 4
    assert memory.recurrent == 4 * 11
    assert memory.bounded == (8 + 5) * 2 * (36 + 20) * 4
    assert memory.constant >= length * 4 * 36 * 4
    assert memory.importance >= 4 * 2 * length


def test_report_follows_eviction_truncation_trims_scratch_seal_and_clear() -> None:
    cache = ModelCache(every_kind(RowFormat.Q8_2F, RowFormat.Q8_2F), backend="reference")
    full, sliding, ring, nystrom, recurrent, _ = cache.layers
    assert isinstance(full, AttentionLayer) and isinstance(sliding, AttentionLayer)
    assert isinstance(ring, BoundedLayer) and isinstance(nystrom, NystromLayer) and isinstance(recurrent, RecurrentLayer)
    feed(cache, 100)
    before = check(cache)
    recurrent.speculate(numbers(1, 11))
    assert check(cache).recurrent == before.recurrent + 44
    cache.truncate_last(0)
    assert check(cache).recurrent == before.recurrent
    for layer in (full, sliding, nystrom):
        layer.truncate_last(3)
    after = check(cache)
    row = 36 + 4 * 2 + 20 + 4
    assert before.stored - after.stored == 3 * (1 + 2) * row + 3 * 2 * (36 + 20) * 4
    assert sliding.trim_window() > 0
    assert check(cache).stored < after.stored
    cache.evict(10)
    assert full.memory().stored == 10 * row + (36 + 20) * 4
    held = check(cache)
    rows = nystrom.memory()
    assert nystrom.seal()
    sealed = check(cache)
    assert held.attention - sealed.attention == rows.attention > 0 and nystrom.memory().attention == 0
    assert held.importance - sealed.importance == rows.importance > 0
    group, head = 4 * ((8 + 2) * (36 + 20) + 4 * 36), 4 * (4 * (36 + 20) + 2 * 4 + 4 * 4)
    assert sealed.constant == 2 * group + 4 * head < rows.constant
    recurrent.speculate(numbers(1, 11))
    cache.clear()
    cleared = check(cache)
    assert cleared.stored == cleared.constant == 0
    assert (cleared.recurrent, cleared.bounded, cleared.weights) == (44, held.bounded, held.weights)


@pytest.mark.parametrize("mode", modes(), ids=[name for name, *_ in modes()])
def test_rows_of_somebody_else_are_mapped_and_in_no_sum(mode: tuple[str, RowFormat, RowFormat]) -> None:
    plan = LayerPlan(LayerKind.FULL, 4, 2, 36, 20, key_format=mode[1], value_format=mode[2])
    source = AttentionLayer(plan, kernels=kernels("reference"))
    source.append(numbers(1, 70, 2, 36), numbers(2, 70, 2, 20))
    layer = AttentionLayer(plan, kernels=kernels("reference"))
    planes = [
        PrefixRows([[lent(block) for block in plane.blocks(head)] for head in range(2)], tail)
        for plane, tail in zip((source.keys, source.values), layer.empty_planes(), strict=True)
    ]
    assert source.importance is not None
    layer.adopt(*planes, position=70, base=0, importance=source.importance, gapless=True)
    row = 2 * (mode[1].row_bytes(36, keys=True) + mode[2].row_bytes(20, keys=False))
    field = 4 * 2 * (36 * mode[1].quantised + 20 * mode[2].quantised)
    memory = layer.memory()
    assert (memory.mapped, memory.stored) == (70 * row, field)
    assert memory.total == allocated_bytes(layer) < 70 * row
    layer.append(numbers(3, 5, 2, 36), numbers(4, 5, 2, 20))
    layer.truncate_last(2)
    memory = layer.memory()
    assert (memory.mapped, memory.stored) == (70 * row, 3 * row + field) and memory.total == allocated_bytes(layer)
    layer.truncate_last(13)
    memory = layer.memory()
    assert (memory.mapped, memory.stored) == (60 * row, field) and memory.total == allocated_bytes(layer)
    layer.keep([0, 5, 59])
    memory = layer.memory()
    assert (memory.mapped, memory.stored) == (0, 3 * row + field) and memory.total == allocated_bytes(layer)


def lent(block: Block) -> Block:
    """The same rows in memory that numpy does not own."""
    arrays = [
        None if array is None else np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
        for array in (block.codes, block.scales, block.field)
    ]
    assert arrays[0] is not None
    return Block(block.format, *arrays)


def test_clear_keeps_what_belongs_to_the_model() -> None:
    plan = ModelPlan(
        (
            LayerPlan(LayerKind.RING, 4, 2, 8, 8, ring=RingPlan(8, 3, (1.0, 0.1), undo_rows=5)),
            LayerPlan(LayerKind.NYSTROM, 4, 2, 8, 8, nystrom=NystromPlan(4, 8, 2, boundary=30)),
            LayerPlan(LayerKind.RECURRENT, state_size=11),
        )
    )
    cache, fresh = ModelCache(plan, backend="reference"), ModelCache(plan, backend="reference")
    for each in (cache, fresh):
        ring = each.layers[0]
        assert isinstance(ring, BoundedLayer)
        ring.set_sinks(numbers(7, 2, 3, 8), numbers(8, 2, 3, 8))
    feed(cache, 40)
    nystrom = cache.layers[1]
    assert isinstance(nystrom, NystromLayer) and nystrom.seal()
    feed(cache, 5)
    cache.clear()
    assert cache.position == 0 and [layer.position for layer in cache.own] == [0, 0, 0]
    assert nystrom.pending_boundary == 30 and nystrom.collecting
    q, k, v = numbers(1, 4, 8), numbers(2, 2, 8), numbers(3, 2, 8)
    for one, other in zip(cache.own, fresh.own, strict=True):
        if isinstance(one, BoundedLayer) and isinstance(other, BoundedLayer):
            assert one.sink_keys is not None and one.step(q, k, v).tobytes() == other.step(q, k, v).tobytes()
            assert one.keys.tobytes() == other.keys.tobytes() and one.undo_rows == other.undo_rows == 1
        if isinstance(one, NystromLayer) and isinstance(other, NystromLayer):
            one.append(k[None], v[None])
            other.append(k[None], v[None])
            assert one.attend(q).tobytes() == other.attend(q).tobytes() and one.pending_boundary == other.pending_boundary
        if isinstance(one, RecurrentLayer) and isinstance(other, RecurrentLayer):
            assert one.state.tobytes() == other.state.tobytes() and one.scratch is other.scratch is None


def test_reports_add_up_field_by_field() -> None:
    names = [item.name for item in fields(LayerMemory)]
    one = LayerMemory(**{name: 1 << index for index, name in enumerate(names)})
    other = LayerMemory(**{name: 3 << (2 * index + 10) for index, name in enumerate(names)})
    both = one + other
    assert all(getattr(both, name) == getattr(one, name) + getattr(other, name) for name in names)
    assert added([]) == LayerMemory() and added([one, other]) == both
    assert LayerMemory(1, 10, 100, 1000, 10000, 100000, 7, 7, 7).total == 111111


def test_walk_counts_each_array_once_and_what_it_borrows_not_at_all() -> None:
    owned = np.zeros(10, np.float32)
    borrowed = np.frombuffer(bytes(40), np.float32)
    assert allocated_bytes([owned, owned[2:5], owned[None], {"again": owned}, borrowed]) == 40
    assert [array is owned for array in arrays_of((owned[:1],))] == [True]
