"""Bytes of resident layers: the numbers of their source, and models added up by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.geometry import LayerGeometry, RankGeometry, layer_geometry, model_geometry, rank_geometry
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan, TurboQuantPlan, modes
from warmkv.kvstore.live.rings import MAX_LENGTH, ring_rows
from warmkv.kvstore.live.sharding import shard, shard_model
from warmkv.schema.errors import CapacityExceeded, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

Q8_0, Q5_1, Q4_0, FP8, F16 = RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0, RowFormat.FP8, RowFormat.F16
CONTEXT = 262_144
FULL = LayerPlan(LayerKind.FULL, 32, 8, 128, 128, Q8_0, Q5_1, importance=False)
NEAR = replace(FULL, kind=LayerKind.SLIDING, window=512)
#: Bytes of 32 channels, from the layouts: an f16 scale and 32 bytes; f16 scale and minimum and 32 times 5 bits; ...
BLOCKS = {Q8_0: 2 + 32, Q5_1: 2 + 2 + 4 + 16, Q4_0: 2 + 16, FP8: 32, F16: 64, RowFormat.F32: 128, RowFormat.BF16: 64}


def test_a_rank_of_eight_has_the_numbers_of_the_source() -> None:
    rank = rank_geometry(8 * 128, 8 * 128, 8, Q8_0, Q5_1)
    assert rank == RankGeometry(128, 128, 136, 96, 20)
    assert rank.token_bytes == 232
    assert rank.layer(CONTEXT).allocated_bytes == 232 * 262_144 + 20
    assert rank.layer(CONTEXT, window=512).allocated_bytes == 232 * 5151 + 20
    assert rank.layer(4096, window=512) == LayerGeometry(136, 96, 4096, 20, ringed=True)


@pytest.mark.parametrize(
    "key_dim, value_dim, ranks",
    [
        (1024, 1024, 3), (1024, 1024, 64), (0, 1024, 8), (1024, 0, 8), (1024, 1024, 0), (1024, 1000, 8), (1024, 544, 32),
        (-1024, 1024, 8),
    ],
)  # fmt: skip
def test_ranks_that_cannot_share_equally_in_blocks_are_refused(key_dim: int, value_dim: int, ranks: int) -> None:
    with pytest.raises(RecordError):
        rank_geometry(key_dim, value_dim, ranks, Q8_0, Q5_1)


@pytest.mark.parametrize("format_", [RowFormat.Q8_2F, RowFormat.TQ_KEY, RowFormat.TQ_VALUE, RowFormat.TQ3])
def test_formats_that_keep_something_per_head_are_no_matter_of_channels(format_: RowFormat) -> None:
    for keys, values in ((format_, Q5_1), (Q8_0, format_)):
        with pytest.raises(UnsupportedError):
            rank_geometry(1024, 1024, 8, keys, values)


@given(
    blocks=st.integers(1, 1 << 20),
    ranks=st.integers(1, 64),
    keys=st.sampled_from(list(BLOCKS)),
    values=st.sampled_from(list(BLOCKS)),
)
@settings(deadline=None)
def test_a_rank_takes_the_blocks_of_its_channels(blocks: int, ranks: int, keys: RowFormat, values: RowFormat) -> None:
    rank = rank_geometry(32 * blocks * ranks, 64 * blocks * ranks, ranks, keys, values)
    assert (rank.key_bytes, rank.value_bytes) == (blocks * BLOCKS[keys], 2 * blocks * BLOCKS[values])


def test_sizes_beyond_64_bits_are_refused_with_the_bytes_they_would_be() -> None:
    with pytest.raises(OutOfMemory) as refused:
        rank_geometry(1 << 63, 32, 1, Q8_0, Q5_1)
    assert refused.value.requested_bytes == (1 << 58) * 34
    huge = LayerPlan(LayerKind.FULL, 1 << 12, 1 << 12, 1 << 20, 1 << 20, importance=False)
    with pytest.raises(OutOfMemory) as refused:
        layer_geometry(huge, MAX_LENGTH)
    assert refused.value.requested_bytes == MAX_LENGTH * (1 << 35)
    wide = replace(huge, **{name: np.int64(getattr(huge, name)) for name in ("heads", "kv_heads", "key_size", "value_size")})
    with pytest.raises(OutOfMemory):
        layer_geometry(wide, MAX_LENGTH)
    many = model_geometry(ModelPlan.uniform(1 << 10, replace(huge, heads=1, kv_heads=1)), MAX_LENGTH)
    with pytest.raises(OutOfMemory):
        _ = many.allocated_bytes


def test_planes_have_a_tail_pad_each_and_the_layer_a_mirror() -> None:
    plan = replace(FULL, key_format=Q8_0, value_format=Q8_0)
    layer = layer_geometry(replace(plan, kind=LayerKind.SLIDING, window=512), CONTEXT, rings=True)
    assert layer.key_plane_bytes == layer.value_plane_bytes == 5151 * 1088 + 8
    assert layer.allocated_bytes == layer.key_plane_bytes + layer.value_plane_bytes + 4
    assert layer_geometry(plan, CONTEXT).key_plane_bytes == 262_144 * 1088 + 8


@pytest.mark.parametrize("window", [1, 512, 4096])
@pytest.mark.parametrize("capacity", [1, 511, 512, 513, 5150, 5151, 5152, 40_000])
def test_rings_only_where_they_are_armed(window: int, capacity: int) -> None:
    plan = replace(NEAR, window=window)
    assert layer_geometry(plan, capacity) == LayerGeometry(1088, 768, capacity, 20)
    assert layer_geometry(plan, capacity, rings=True) == LayerGeometry(1088, 768, ring_rows(window, capacity), 20, ringed=True)
    assert layer_geometry(FULL, capacity, rings=True) == LayerGeometry(1088, 768, capacity, 20)


@pytest.mark.parametrize("name, keys, values", modes(rotated=True, blocked=True))
def test_a_layer_takes_the_bytes_of_its_formats(name: str, keys: RowFormat, values: RowFormat) -> None:
    turned = TurboQuantPlan() if keys.rotated or values.rotated else None
    plan = replace(FULL, key_format=keys, value_format=values, turboquant=turned)
    layer = layer_geometry(plan, 100)
    assert layer.key_bytes == 8 * keys.row_bytes(128, keys=True)
    assert layer.value_bytes == 8 * values.row_bytes(128, keys=False)
    fields = 4 * 8 * 128 * ((keys is RowFormat.Q8_2F) + (values is RowFormat.Q8_2F))
    assert layer.allocated_bytes == 100 * (layer.key_bytes + layer.value_bytes) + 20 + fields, name


def test_dead_heads_store_nothing() -> None:
    alive = replace(FULL, alive=(True, False) * 4)
    assert layer_geometry(alive, 10).token_bytes * 2 == layer_geometry(FULL, 10).token_bytes


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(LayerKind.CONV, conv=ConvPlan(8)),
        LayerPlan(LayerKind.RING, 4, 2, 16, 16, ring=RingPlan(8)),
        LayerPlan(LayerKind.NYSTROM, 4, 2, 16, 16, nystrom=NystromPlan()),
    ],
    ids=lambda plan: plan.kind.name,
)
def test_kinds_no_device_keeps_are_refused(plan: LayerPlan) -> None:
    with pytest.raises(UnsupportedError):
        layer_geometry(plan, 10)
    with pytest.raises(UnsupportedError):
        shard_model(ModelPlan((FULL, plan)), 0, 2)


@pytest.mark.parametrize(
    "capacity, error", [(0, RecordError), (-1, RecordError), (1.5, RecordError), (1 << 31, CapacityExceeded)]
)
def test_capacities_a_mirror_cannot_count_are_refused(capacity: int, error: type[Exception]) -> None:
    for ask in (lambda: layer_geometry(FULL, capacity), lambda: rank_geometry(1024, 1024, 8, Q8_0, Q5_1).layer(capacity)):
        with pytest.raises(error):
            ask()


@pytest.mark.parametrize("size", [1, 31, 33, 80])
def test_heads_that_are_no_whole_blocks_are_refused(size: int) -> None:
    for plan in (replace(FULL, key_size=size), replace(FULL, value_size=size)):
        with pytest.raises(RecordError):
            layer_geometry(plan, 10)


def test_llama_8b() -> None:
    model = model_geometry(ModelPlan.uniform(32, FULL), 131_072, rings=True)
    assert model.token_bytes == 32 * 1024 // 32 * (34 + 24) == 59_392
    assert (model.ring_token_bytes, model.ring_row_cap, model.table_bytes) == (0, 0, 0)
    assert model.fixed_bytes == 32 * 20
    assert model.allocated_bytes == 59_392 * 131_072 + 640


def gemma() -> ModelPlan:
    """24 layers: every sixth sees everything with heads of 512 in fp8, others a window of 1024 with heads of
    256; the last 8 share what the last of their kind before them keeps."""
    near = LayerPlan(LayerKind.SLIDING, 8, 2, 256, 256, Q8_0, Q5_1, window=1024, importance=False)
    far = LayerPlan(LayerKind.FULL, 8, 2, 512, 512, FP8, FP8, importance=False)
    own = [far if index % 6 == 5 else near for index in range(16)]
    shared = [LayerPlan(LayerKind.SHARED, shared_with=11 if index % 6 == 5 else 15) for index in range(16, 24)]
    return ModelPlan((*own, *shared))


@pytest.mark.parametrize("rings", [False, True])
def test_gemma_with_windows_and_shared_layers(rings: bool) -> None:
    near, far, context = 2 * 256 // 32 * (34 + 24), 2 * 512 * 2, 32_768
    model = model_geometry(gemma(), context, rings=rings)
    assert model.token_bytes == 14 * near + 2 * far
    assert model.part(16, 24).allocated_bytes == 0
    rows = 1024 + 4096 + 512 + 31 if rings else context
    assert model.allocated_bytes == 14 * (near * rows + 20) + 2 * (far * context + 20) + (14 * 4 if rings else 0)
    assert model.ring_token_bytes == (14 * near if rings else 0)
    assert model.ring_row_cap == (5663 if rings else 0)
    assert model.part(0, 6).allocated_bytes == 5 * (near * rows + 20) + far * context + 20 + (20 if rings else 0)


def test_qwen_hybrid_keeps_rows_in_every_fourth_layer_and_states_in_the_others() -> None:
    conv = ConvPlan(8192, taps=3, history=0)
    linear = LayerPlan(LayerKind.RECURRENT, state_size=32 * 128 * 128, conv=conv)
    full = LayerPlan(LayerKind.FULL, 16, 2, 256, 256, Q8_0, Q5_1, importance=False)
    block = replace(full, kv_heads=2)
    plan = ModelPlan(tuple(full if index % 4 == 3 else linear for index in range(48)) + (block,), mtp=1)
    model = model_geometry(plan, CONTEXT)
    row = 512 // 32 * (34 + 24)
    state = 4 * (2 * 32 * 128 * 128 + 3 * 8192)
    assert model.token_bytes == 13 * row
    assert model.fixed_bytes == 36 * state + 13 * 20
    assert model.allocated_bytes == 13 * row * CONTEXT + 36 * state + 13 * 20
    assert model.part(36, 49).token_bytes == 4 * row
    assert [model.layers[index].rows for index in (0, 3, 48)] == [0, CONTEXT, CONTEXT]


def step() -> ModelPlan:
    """A window of 512 in three of four layers, 8 KV heads of 128."""
    wide = replace(FULL, heads=64)
    near = replace(wide, kind=LayerKind.SLIDING, window=512)
    return ModelPlan(tuple(wide if index % 4 == 0 else near for index in range(45)))


@pytest.mark.parametrize("rings", [False, True])
def test_step_over_eight_ranks(rings: bool) -> None:
    geometries = {model_geometry(shard_model(step(), rank, 8), CONTEXT, rings=rings) for rank in range(8)}
    assert len(geometries) == 1
    model = geometries.pop()
    rows = 5151 if rings else CONTEXT
    assert {layer.allocated_bytes for layer in model.layers} == {232 * 262_144 + 20, 232 * rows + 20}
    assert model.allocated_bytes == 12 * (232 * 262_144 + 20) + 33 * (232 * rows + 20) + (33 * 4 if rings else 0)
    assert model.layers[0] == rank_geometry(1024, 1024, 8, Q8_0, Q5_1).layer(CONTEXT)
    assert model.layers[1] == rank_geometry(1024, 1024, 8, Q8_0, Q5_1).layer(CONTEXT, 512 if rings else 0)


def test_parts_of_a_model_add_up_and_nothing_lies_outside() -> None:
    model = model_geometry(gemma(), 9000, rings=True)
    for cut in range(25):
        assert model.part(0, cut).allocated_bytes + model.part(cut, 24).allocated_bytes == model.allocated_bytes
    for span in ((-1, 3), (0, 25), (4, 3)):
        with pytest.raises(RecordError):
            model.part(*span)


@given(context=st.integers(1, MAX_LENGTH), windows=st.lists(st.integers(0, 9000), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_context_costs_its_flat_part_and_the_rings_up_to_their_rows(context: int, windows: list[int]) -> None:
    layers = tuple(replace(NEAR, window=window) if window else FULL for window in windows)
    model = model_geometry(ModelPlan(layers), context, rings=True)
    rings = sum(1856 * min(context, window + 4639) for window in windows if window)
    assert model.allocated_bytes == 1856 * context * windows.count(0) + rings + 20 * len(windows) + model.table_bytes
    bound = (model.token_bytes - model.ring_token_bytes) * context + model.ring_token_bytes * min(context, model.ring_row_cap)
    assert model.allocated_bytes <= bound + model.fixed_bytes + model.table_bytes
    if len({window for window in windows if window}) <= 1:
        assert model.allocated_bytes == bound + model.fixed_bytes + model.table_bytes


def test_ranks_share_heads_states_and_channels_equally() -> None:
    plan = replace(FULL, alive=(True, False, True, True, False, False, False, True))
    parts = [shard(plan, rank, 4) for rank in range(4) if rank != 2]
    assert [(part.heads, part.kv_heads, part.alive) for part in parts] == [
        (8, 2, (True, False)), (8, 2, (True, True)), (8, 2, (False, True)),
    ]  # fmt: skip
    with pytest.raises(RecordError):
        shard(plan, 2, 4)
    linear = LayerPlan(LayerKind.RECURRENT, state_size=96, conv=ConvPlan(12, history=0))
    assert shard(linear, 1, 4) == replace(linear, state_size=24, conv=ConvPlan(3, history=0))
    shared = LayerPlan(LayerKind.SHARED, shared_with=0)
    assert shard_model(ModelPlan((FULL, shared)), 1, 2).layers == (replace(FULL, heads=16, kv_heads=4), shared)
    assert shard(FULL, 0, 1) == FULL


@pytest.mark.parametrize(
    "plan, rank, world",
    [
        (FULL, 0, 3), (FULL, 0, 16), (FULL, 0, 0), (FULL, 2, 2), (FULL, -1, 2), (replace(FULL, heads=24), 0, 16),
        (LayerPlan(LayerKind.RECURRENT, state_size=97), 0, 2),
        (LayerPlan(LayerKind.RECURRENT, state_size=8, conv=ConvPlan(3, history=0)), 0, 2),
    ],
)  # fmt: skip
def test_shares_that_are_not_equal_are_refused(plan: LayerPlan, rank: int, world: int) -> None:
    with pytest.raises(RecordError):
        shard(plan, rank, world)


def test_a_layer_that_cannot_be_shared_is_named() -> None:
    with pytest.raises(RecordError, match="layer 1: "):
        shard_model(ModelPlan((replace(FULL, kv_heads=16), FULL)), 0, 16)
