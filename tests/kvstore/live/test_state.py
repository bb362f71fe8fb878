"""The inference state of a config: sizes, the ways back, and what a snapshot brings back, byte for byte.

Numbers of the source's own tests: 4 query heads over 2 KV heads of 4 channels, 64 positions, convolutions
of 3 taps over 16 channels, attention and convolution in turns.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from dumps import dump, dump_all

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack, view
from warmkv.kernels.rope.reference import Pairs, Rope
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.live import snapshot as snapshots
from warmkv.kvstore.live.compression import Compression
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, RingPlan, modes
from warmkv.kvstore.live.sizing import model_bytes
from warmkv.kvstore.live.state import BlockType, InferenceState, ModelConfig
from warmkv.kvstore.testing.allocated import arrays_of
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

F32 = npt.NDArray[np.float32]
ATTENTION, CONV = BlockType.ATTENTION, BlockType.CONV
HALF = Compression(RowFormat.F16, RowFormat.F16)


def config(layers: int = 4, hidden: int = 16, *, dense: bool = False, **more: object) -> ModelConfig:
    blocks = tuple(CONV if index % 2 and not dense else ATTENTION for index in range(layers))
    size = int(more.get("head_size", hidden // 4))  # type: ignore[call-overload]
    values: dict[str, object] = {
        "blocks": blocks, "heads": 4, "kv_heads": tuple(2 * (block is ATTENTION) for block in blocks), "head_size": size,
        "hidden_size": hidden, "max_tokens": 64, "rope": Rope(size, 1e6, Pairs.NEOX), "conv_kernel": 3,
    }  # fmt: skip
    return ModelConfig(**{**values, **more})  # type: ignore[arg-type]


def state_of(made: ModelConfig, compression: Compression | None = None, **more: object) -> InferenceState:
    return InferenceState(made, compression or Compression(), backend="reference", **more)  # type: ignore[arg-type]


def attention(state: ModelCache, index: int = 0) -> AttentionLayer:
    layer = state.layers[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def conv(state: ModelCache, index: int = 1) -> ConvLayer:
    layer = state.layers[index]
    assert isinstance(layer, ConvLayer)
    return layer


def append(layer: AttentionLayer, keys: list[list[float]], values: list[list[float]]) -> None:
    """Rows as the source has them: token-major, all KV heads of a token in one list."""
    shape = (len(keys), layer.plan.kv_heads, layer.plan.key_size)
    layer.append(np.array(keys, np.float32).reshape(shape), np.array(values, np.float32).reshape(shape))


def flat(layer: AttentionLayer, *, keys: bool = True) -> list[list[float]]:
    plane = layer.keys if keys else layer.values
    heads = [np.concatenate([block.codes for block in plane.blocks(head)]) for head in range(plane.heads)]
    return np.stack(heads, axis=1).astype(np.float64).reshape(len(plane), plane.heads * plane.size).tolist()


def feed(state: ModelCache, tokens: int, salt: int = 0) -> None:
    """So many tokens more for every layer, which depend on their position and ``salt``."""
    for layer in state.own:
        numbers = np.random.default_rng((salt, layer.index, layer.position))
        if isinstance(layer, ConvLayer):
            layer.append(numbers.standard_normal((tokens, layer.state.shape[1])).astype(np.float32))
        else:
            assert isinstance(layer, AttentionLayer)
            shape = (tokens, layer.plan.kv_heads, layer.plan.key_size)
            layer.append(numbers.standard_normal(shape).astype(np.float32), numbers.standard_normal(shape).astype(np.float32))


def capacity(layer: AttentionLayer) -> int:
    return sum(array.shape[1] for array in arrays_of(layer.keys) if array.ndim == 3)


# Sizes


def test_for_prefill_caps_the_capacity() -> None:
    state = InferenceState.for_prefill(config(), 5, backend="reference")
    layer = attention(state)
    assert 5 <= layer.keys.allocated_bytes / (8 * 4) < 64 and 5 <= layer.values.allocated_bytes / (8 * 4) < 64
    big = InferenceState.for_prefill(config(), 164, backend="reference")
    assert attention(big).keys.allocated_bytes == 64 * 8 * 4 and big.capacity == 64
    assert InferenceState.for_prefill(config(), 0, backend="reference").capacity == 1


@pytest.mark.parametrize("name", [name for name, *_ in modes(rotated=True)])
def test_the_whole_context_fits_without_another_allocation(name: str) -> None:
    refusing = [False]

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        assert not (refusing[0] and shape[1:2] and 0 < shape[1] <= 64 and len(shape) == 3), "rows were given new memory"
        return np.empty(shape, dtype)

    state = state_of(config(2, 64), Compression.named(name), allocate=allocate)
    refusing[0] = "q8" not in name
    for _ in range(64):
        feed(state, 1)
    assert state.position == 64 and state.memory().attention >= state.memory().stored


def test_what_is_reserved_is_what_the_plan_says() -> None:
    for name in ("f32", "f16", "bf16", "turboquant", "tqk", "tqv", "tq3", "tq3k"):
        state = state_of(config(4, 64), Compression.named(name))
        assert state.memory().total == model_bytes(state.plan, 64)


@pytest.mark.parametrize(
    ("changes", "requested"),
    [({"max_tokens": 1 << 62}, 1 << 68), ({"max_tokens": 1 << 58}, 1 << 64), ({"max_tokens": 10**40}, 64 * 10**40)],
)
def test_contexts_beyond_any_address_are_refused_with_their_bytes(changes: dict[str, int], requested: int) -> None:
    with pytest.raises(OutOfMemory) as refused:
        state_of(config(**changes), allocate=never)
    assert refused.value.requested_bytes == requested


def test_a_context_no_memory_holds_is_refused_with_the_bytes_of_its_first_plane() -> None:
    """Addressable in 64 bits, but beyond what any machine maps: 2^45 rows of 2 heads of 4 channels."""
    with pytest.raises(OutOfMemory) as refused:
        state_of(config(max_tokens=1 << 45))
    assert refused.value.requested_bytes == 1 << 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 1 << 40}, "heads is 1099511627776"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 3}, "3 query heads over 2 KV heads"),
        ({"kv_heads": (1 << 63, 0, 2, 0)}, "layer 0 .FULL.: kv_heads is 9223372036854775808"),
        ({"kv_heads": (2, 0, 0, 0)}, "layer 2 .FULL.: kv_heads is 0"),
        ({"kv_heads": (2, 0)}, "KV heads of 2 layers, the config has 4"),
        ({"head_size": 1 << 30, "rope": None}, "key_size is 1073741824"),
        ({"head_size": 0, "rope": None}, "key_size is 0"),
        ({"hidden_size": 1 << 40}, "layer 1 .CONV.: conv channels is 1099511627776"),
        ({"hidden_size": -1}, "layer 1 .CONV.: conv channels is -1"),
        ({"conv_kernel": 1}, "a convolution of 1 taps, expected at least 2"),
        ({"conv_kernel": 1 << 40}, "layer 1 .CONV.: conv taps is 1099511627775"),
        ({"max_tokens": 0}, "a context of 0 tokens"),
        ({"max_tokens": -5}, "a context of -5 tokens"),
        ({"max_tokens": 64.0}, "max_tokens is 64.0, expected a whole number"),
        ({"conv_kernel": "3"}, "conv_kernel is '3', expected a whole number"),
        ({"blocks": (ATTENTION, "conv", ATTENTION, CONV)}, "a layer that is 'conv', expected a BlockType"),
        ({"blocks": (), "kv_heads": ()}, "a plan without layers"),
        ({"rope": Rope(6, 1e4, Pairs.NORM)}, "a rope of 6 channels for heads of 4"),
    ],
)
def test_sizes_no_model_has_are_refused_before_any_memory(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        state_of(replace(config(), **changes), allocate=never)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, -1, 65])
def test_a_capacity_beyond_the_context_is_refused(rows: int) -> None:
    with pytest.raises(RecordError, match=f"room for {rows} rows, expected 1 to 64"):
        state_of(config(), capacity=rows, allocate=never)


def never(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    raise AssertionError(f"{shape} of {dtype} was asked for")


# The mode that came of it


def test_the_mode_is_the_resolved_one() -> None:
    assert state_of(config(2, 16), Compression.turboquant(42)).compression == Compression()
    state = state_of(config(2, 64), Compression.turboquant(42))
    assert state.compression == Compression.turboquant(42) and state.compression.tag == "tq3kv-s42-unbiased:"
    assert state.plan == Compression.turboquant(42).applied(config(2, 64).plan())


def test_half_precision_stores_halves() -> None:
    state = state_of(config(), HALF)
    layer = attention(state)
    assert layer.keys.allocated_bytes == 64 * 8 * 2 and state.compression.tag == "f16:"
    k, v = [0.1 * i - 0.3 for i in range(8)], [-0.05 * i + 0.2 for i in range(8)]
    append(layer, [k], [v])
    assert flat(layer) == [np.array(k, np.float32).astype(np.float16).tolist()]
    assert np.abs(np.array(flat(layer)[0]) - k).max() < 2.5e-4
    assert np.abs(np.array(flat(layer, keys=False)[0]) - v).max() < 1.3e-4


# Back to an earlier position


@pytest.mark.parametrize("compression", [Compression(), HALF], ids=["f32", "f16"])
def test_truncate_to_cuts_to_the_prefix(compression: Compression) -> None:
    state = state_of(config(2, dense=True), compression)
    for layer in state.own:
        keys = [[100.0 * t + d for d in range(8)] for t in range(6)]
        assert isinstance(layer, AttentionLayer)
        append(layer, keys, [[-(10.0 * t + d) for d in range(8)] for t in range(6)])
    assert state.truncate_to(4) == state.position == 4
    for index in (0, 1):
        assert flat(attention(state, index)) == [[100.0 * t + d for d in range(8)] for t in range(4)]
        assert flat(attention(state, index), keys=False) == [[-(10.0 * t + d) for d in range(8)] for t in range(4)]
        assert flat(attention(state, index))[3][7] == 307.0
    before = dump_all(state)
    assert state.truncate_to(4) == 4 and dump_all(state) == before


def test_a_convolution_goes_back_with_the_rows() -> None:
    state = state_of(config())
    feed(state, 70)
    assert state.truncate_to(60) == 60
    twin = state_of(config())
    feed(twin, 70)
    twin.truncate_last(10)
    assert [layer.position for layer in state.own] == [60] * 4
    assert conv(state).state.tobytes() == conv(twin).state.tobytes() and conv(state).history.positions == tuple(range(7, 61))


def test_a_convolution_without_that_position_forces_a_full_clear(caplog: pytest.LogCaptureFixture) -> None:
    state = state_of(config())
    feed(state, 70)
    with caplog.at_level(logging.WARNING):
        assert state.truncate_to(5) == 0
    assert "layer 1 (CONV) has forgotten its state at position 5" in caplog.text
    assert [layer.position for layer in state.own] == [0] * 4 and not conv(state).state.any()
    assert attention(state).rows == 0 and conv(state).history.positions == ()


@pytest.mark.parametrize("length", [1, 7, 8])
def test_after_a_restore_only_its_own_position_is_known(length: int) -> None:
    state, fresh = state_of(config()), state_of(config())
    feed(state, 8)
    fresh.restore(state.snapshot())
    assert conv(fresh).history.positions == (8,)
    feed(fresh, 3)
    assert fresh.truncate_to(length) == (length if length == 8 else 0)


def test_layers_a_pass_left_half_way_are_taken_back() -> None:
    state = state_of(config())
    feed(state, 6)
    before = [flat(attention(state)), conv(state).state.tobytes()]
    append(attention(state), [[1.0] * 8] * 2, [[1.0] * 8] * 2)
    conv(state).append(np.ones((1, 16), np.float32))
    assert state.truncate_to(6) == 6
    assert {layer.position for layer in state.own} == {6} and [flat(attention(state)), conv(state).state.tobytes()] == before


def test_lengths_a_layer_has_not_reached_are_refused_unchanged() -> None:
    state = state_of(config())
    feed(state, 6)
    before = dump_all(state)
    for length in (7, -1):
        with pytest.raises(RecordError, match=f"layer 0 .FULL.: {length} tokens to keep of 6"):
            state.truncate_to(length)
        assert dump_all(state) == before
    conv(state).truncate_last(1)
    with pytest.raises(RecordError, match="layer 1 .CONV.: 6 tokens to keep of 5"):
        state.truncate_to(6)


def test_evicted_rows_cannot_come_back_but_all_can_go() -> None:
    state = state_of(config(2, dense=True))
    feed(state, 20)
    assert state.evict(5) == 30 and state.lineage != CLEAN
    before = dump_all(state)
    with pytest.raises(CannotRewind):
        state.truncate_to(3)
    assert dump_all(state) == before
    assert state.truncate_to(0) == 0 and state.lineage == CLEAN and state.position == 0


@pytest.mark.parametrize("name", [name for name, *_ in modes(rotated=True)])
def test_truncate_to_and_append_again_equals_never_having_gone_astray(name: str) -> None:
    state, straight = (state_of(config(4, 64), Compression.named(name)) for _ in range(2))
    for one in (state, straight):
        feed(one, 20)
    feed(state, 9, salt=1)
    assert state.truncate_to(20) == 20
    for one in (state, straight):
        feed(one, 3, salt=2)
    for index in (0, 1, 2, 3):
        assert dump(state.own[index])[2:4] == dump(straight.own[index])[2:4]
        assert contents(state, index) == contents(straight, index)


def contents(state: ModelCache, index: int) -> object:
    """What a layer holds, without what tells one object from another."""
    layer = state.own[index]
    found = dump(layer)
    if isinstance(layer, ConvLayer):
        return (layer.position, found[2])
    return (layer.position, found[-1])


def test_going_back_behind_a_change_of_rows_is_another_lineage() -> None:
    for change in (lambda state: state.shift(2, 3, gone=[5, 6, 7]), lambda state: state.evict(12)):
        state, other = (state_of(config(2, dense=True)) for _ in range(2))
        for one in (state, other):
            feed(one, 20)
            change(one)
            feed(one, 4)
        told, at = state.lineage, state.position - 4
        assert told == other.lineage and state.truncate_to(at) == at and state.lineage == told
        state.truncate_to(at - 1)
        assert state.lineage not in (told, CLEAN)
        state.restore(other.snapshot())
        assert state.lineage == told


def test_one_layer_that_cannot_go_back_keeps_the_others_from_it() -> None:
    state = state_of(config(4))
    feed(state, 20)
    attention(state, 2).keep([0, 1, 18, 19])
    before = dump_all(state)
    with pytest.raises(CannotRewind, match="layer 2 .FULL."):
        state.truncate_to(15)
    assert dump_all(state) == before
    assert state.truncate_to(18) == 18


# The same memory again


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "turboquant", "tqk", "tqv", "tq3"])
def test_clear_for_reuse_keeps_every_array(name: str) -> None:
    state = state_of(config(4, 64), Compression.named(name), capacity=8)
    feed(state, 8)
    arrays = {array.__array_interface__["data"][0]: array.nbytes for array in arrays_of(state)}
    total = state.memory().total
    state.clear_for_reuse()
    assert state.position == 0 and attention(state).rows == 0 and not conv(state).state.any()
    assert conv(state).history.positions == () and state.memory().total == total
    feed(state, 8, salt=1)
    assert {array.__array_interface__["data"][0]: array.nbytes for array in arrays_of(state)} == arrays


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("change", ["shift", "evict"])
def test_the_room_of_a_state_outlasts_what_takes_rows_out(change: str, again: bool) -> None:
    asked: list[tuple[int, ...]] = []

    def counted(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        asked.append(shape)
        return np.empty(shape, dtype)

    state = state_of(config(4, 64), allocate=counted)
    feed(state, 20)
    if change == "shift":
        state.shift(3, 9)
    else:
        state.evict(7)
    if again:
        state.clear_for_reuse()
    before = len(asked)
    feed(state, 64 - attention(state).rows, salt=1)
    assert attention(state).rows == 64 and len(asked) == before


def test_clear_for_reuse_forgets_what_was_done_to_the_rows() -> None:
    state = state_of(config())
    feed(state, 12)
    state.shift(2, 3)
    assert state.lineage != CLEAN and state.shift_offset == 3
    state.clear_for_reuse()
    assert state.lineage == CLEAN and state.shift_offset == 0


# Snapshots


def test_a_snapshot_brings_back_attention_and_convolution() -> None:
    state = state_of(config())
    rows = [[0.5 * (8 * t + d) for d in range(8)] for t in range(2)]
    for index in (0, 2):
        append(attention(state, index), rows, [[-0.25 * (8 * t + d) for d in range(8)] for t in range(2)])
        conv(state, index + 1).update(np.full((2, 16), 0.7, np.float32), 2)
    taken, fresh = state.snapshot(), state_of(config())
    fresh.restore(taken)
    assert fresh.position == 2 and [contents(fresh, index) for index in range(4)] == [
        contents(state, index) for index in range(4)
    ]
    assert flat(attention(fresh)) == rows and (conv(fresh).state == np.float32(0.7)).all()
    assert taken.nbytes == 2 * (2 * 2 * 8 * 4) + 2 * (2 * 16 * 4)


def test_an_empty_state_goes_there_and_back() -> None:
    taken, fresh = state_of(config(2, 8)).snapshot(), state_of(config(2, 8))
    feed(fresh, 3)
    fresh.restore(taken)
    assert fresh.position == 0 and attention(fresh).rows == 0 and not conv(fresh).state.any() and taken.nbytes == 2 * 8 * 4


@pytest.mark.parametrize("rows", [0, 1, 64, 65, 90])
@pytest.mark.parametrize("name", [name for name, *_ in modes(rotated=True)])
def test_every_mode_goes_there_and_back_byte_for_byte(name: str, rows: int) -> None:
    """One-sided TurboQuant too: each side is a plane of its own."""
    mode, made = Compression.named(name, 7), config(4, 64, max_tokens=100)
    state, fresh = state_of(made, mode), state_of(made, mode)
    feed(state, rows)
    feed(fresh, 3, salt=9)
    taken = state.snapshot()
    for _ in range(2):
        fresh.restore(taken)
        assert fresh.position == rows
        assert [contents(fresh, index) for index in (0, 2)] == [contents(state, index) for index in (0, 2)]
        assert conv(fresh).state.tobytes() == conv(state).state.tobytes()
        q = np.random.default_rng(1).standard_normal((4, 16)).astype(np.float32)
        assert attention(fresh).attend(q).tobytes() == attention(state).attend(q).tobytes()
        feed(fresh, 5, salt=4)


def test_compressed_rows_come_back_whatever_their_bytes() -> None:
    """The source's token: codes AB CD, signs 55, norms 1234 and 5678 (hex) of keys, EF 01 and 9ABC of values."""
    sent = (b"\xab\xcd\x55\x34\x12\x78\x56", b"\xef\x01\xbc\x9a")
    mode = Compression.turboquant(42)
    state, fresh = state_of(config(2, 32), mode), state_of(config(2, 32), mode)
    layer = attention(state)
    planes = []
    for row, empty in zip(sent, layer.empty_planes(), strict=True):
        packed = np.frombuffer(row * 2, np.uint8)[None]
        blocks = view(packed, empty.format, 2, 8, keys=empty.keys, turn=empty.turn)
        planes.append(empty.copied([(block,) for block in blocks]))
    layer.adopt(planes[0], planes[1], position=1, base=0, importance=None, gapless=True)
    conv(state).update(np.ones((2, 32), np.float32))
    fresh.restore(state.snapshot())
    for plane, row in zip((attention(fresh).keys, attention(fresh).values), sent, strict=True):
        packed = pack([plane.blocks(head) for head in range(2)], plane.format, 8, keys=plane.keys)
        assert packed.tobytes() == row * 2


def test_a_snapshot_of_halves_holds_what_was_appended() -> None:
    state, fresh = state_of(config(), HALF), state_of(config(), HALF)
    sent = {layer: [[layer + 0.1 * t + 0.01 * i for i in range(8)] for t in range(2)] for layer in (0, 2)}
    for layer, rows in sent.items():
        append(attention(state, layer), rows, [[-number for number in row] for row in rows])
        conv(state, layer + 1).append(np.ones((2, 16), np.float32))
    fresh.restore(state.snapshot())
    for layer, rows in sent.items():
        halves = np.array(rows, np.float32).astype(np.float16)
        assert flat(attention(fresh, layer)) == halves.tolist()
        assert flat(attention(fresh, layer), keys=False) == (-halves).tolist()


@pytest.mark.parametrize("name", ["f32", "f16", "turboquant", "tqv"])
@pytest.mark.parametrize("rows", [0, 5, 12])
def test_a_restore_leaves_the_room_there_was(name: str, rows: int) -> None:
    mode = Compression.named(name)
    state, source = state_of(config(2, 64), mode, capacity=10), state_of(config(2, 64), mode)
    total = state.memory().total
    feed(source, rows)
    state.restore(source.snapshot())
    more = max(0, rows - 10) * (state.memory().stored // max(1, rows))
    assert state.memory().total == total + more


def test_a_snapshot_is_not_changed_by_what_comes_after() -> None:
    state = state_of(config())
    feed(state, 5)
    expected = [contents(state, index) for index in (0, 2)]
    taken = state.snapshot()
    state.truncate_to(2)
    feed(state, 20, salt=1)
    state.restore(taken)
    assert [contents(state, index) for index in (0, 2)] == expected


def test_lineage_and_shift_offset_travel_with_it() -> None:
    state, fresh = state_of(config()), state_of(config())
    feed(state, 20)
    state.shift(2, 5)
    fresh.restore(state.snapshot())
    assert (fresh.lineage, fresh.shift_offset, fresh.position) == (state.lineage, 5, 15)
    fresh.restore(state_of(config()).snapshot())
    assert (fresh.lineage, fresh.shift_offset) == (CLEAN, 0)


MODES = [Compression.named(name, seed) for name, *_ in modes(rotated=True) for seed in (1, 2)]


@pytest.mark.parametrize("own", MODES, ids=lambda mode: mode.tag or "f32:")
def test_a_snapshot_of_any_other_mode_is_refused_unchanged(own: Compression) -> None:
    state = state_of(config(2, 64), own)
    feed(state, 3)
    before = dump_all(state)
    for other in MODES:
        source = state_of(config(2, 64), other)
        feed(source, 2, salt=1)
        if other == own:
            continue
        with pytest.raises(RecordError, match="layer 0 .FULL.: a snapshot whose rows are stored as .*, this cache stores"):
            state.restore(source.snapshot())
        assert dump_all(state) == before


def test_rows_computed_with_another_estimator_are_another_mode_s() -> None:
    one, other = (state_of(config(2, 64), Compression.turboquant(3, estimator=estimator)) for estimator in list(Estimator)[:2])
    feed(one, 9)
    with pytest.raises(RecordError, match="stored as tq_key, tq_value, seed 3, unbiased, this cache stores .*minimum_mse"):
        other.restore(one.snapshot())
    assert other.position == 0


@pytest.mark.parametrize("made", [config(6), config(4, 32), config(dense=True), config(conv_kernel=4)])
def test_a_snapshot_of_another_geometry_is_refused_unchanged(made: ModelConfig) -> None:
    state, source = state_of(config()), state_of(made)
    for one in (state, source):
        feed(one, 3)
    before = dump_all(state)
    with pytest.raises(RecordError):
        state.restore(source.snapshot())
    assert dump_all(state) == before


def test_layers_at_different_positions_are_not_taken() -> None:
    state = state_of(config())
    feed(state, 3)
    append(attention(state), [[1.0] * 8], [[1.0] * 8])
    with pytest.raises(RecordError, match="layer 1 .CONV. is at position 3, others at 4"):
        state.snapshot()


def test_rings_and_collected_rows_are_not_taken() -> None:
    full = LayerPlan(LayerKind.FULL, 2, 1, 4, 4)
    for plan in (
        replace(full, kind=LayerKind.RING, ring=RingPlan(4)),
        replace(full, kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 8, 2)),
    ):
        with pytest.raises(UnsupportedError, match=f"layer 1 .{plan.kind.name}. cannot be copied aside"):
            snapshots.take(ModelCache(ModelPlan((full, plan)), backend="reference"))


# A context that is full


def test_half_precision_is_shifted_like_fresh() -> None:
    rope = Rope(16, 10_000.0, Pairs.NEOX)
    state = state_of(config(2, 64, head_size=16, rope=rope), HALF)
    rows = np.array([0.1 * head + 0.01 * channel for head in range(2) for channel in range(16)])

    def placed(position: int) -> list[float]:
        pairs = rows.reshape(2, 2, 8)
        moved = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * position * 10_000.0 ** (-np.arange(8) / 8))
        return np.concatenate([moved.real, moved.imag], axis=1).reshape(-1).tolist()  # type: ignore[no-any-return]

    for position in range(12):
        append(attention(state), [placed(position)], [rows.tolist()])
        conv(state).append(np.full((1, 64), position, np.float32))
    state.shift(3, 4)
    assert state.position == 8 and state.shift_offset == 4 and conv(state).state[:, 0].tolist() == [10.0, 11.0]
    assert np.abs(np.array(flat(attention(state))) - [placed(position) for position in range(8)]).max() < 2e-3
    assert np.abs(np.array(flat(attention(state), keys=False)) - rows).max() < 1e-3


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (Rope(4, 1e6, Pairs.NORM), "pairs: Pairs.NEOX here, Pairs.NORM there"),
        (Rope(4, 1e4, Pairs.NEOX), "base: 1000000.0 here, 10000.0 there"),
        (Rope(4, 1e6, Pairs.NEOX, factors=(1.0, 8.0)), "divisors: .1.0, 1.0. here, .1.0, 8.0. there"),
        (Rope(4, 1e6, Pairs.NEOX, rotary=2), "turned: 4 here, 2 there"),
    ],
)
def test_a_rope_that_is_not_the_model_s_is_refused_unchanged(rope: Rope, message: str) -> None:
    state = state_of(config())
    feed(state, 12)
    before = dump_all(state)
    with pytest.raises(RecordError, match=message):
        state.shift(3, 4, rope)
    assert dump_all(state) == before
    state.shift(3, 4, Rope(4, 1e6, Pairs.NEOX, factors=(1.0, 1.0)))
    assert state.position == 8


def test_a_model_that_turns_no_keys_drops_rows_only() -> None:
    state = state_of(config(rope=None))
    feed(state, 12)
    rows = flat(attention(state))
    with pytest.raises(RecordError, match="it turns no keys"):
        state.shift(3, 4, Rope(4, 1e6, Pairs.NEOX))
    state.shift(3, 4)
    assert flat(attention(state)) == rows[:3] + rows[7:]


def test_turboquant_keys_cannot_be_shifted() -> None:
    state = state_of(config(2, 64), Compression.turboquant())
    feed(state, 12)
    before = dump_all(state)
    with pytest.raises(UnsupportedError, match="Store keys as f32 or f16"):
        state.shift(3, 4)
    assert dump_all(state) == before


# Memory that is refused


class Rationed:
    """Memory that runs out after so many arrays."""

    def __init__(self) -> None:
        self.left = 1 << 30

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        self.left -= 1
        if self.left < 0:
            raise OutOfMemory(f"no room for {shape}", int(np.prod(shape)) * dtype.itemsize)
        return np.empty(shape, dtype)


def refusals_of(memory: Rationed, attempt: Callable[[], object], check: Callable[[], bool]) -> int:
    """At how many points ``attempt`` was refused memory before it had enough."""
    for granted in range(200):
        memory.left = granted
        try:
            attempt()
            return granted
        except OutOfMemory as refused:
            assert refused.requested_bytes >= 0 and check()
        finally:
            memory.left = 1 << 30
    raise AssertionError("refused 200 times")


@pytest.mark.parametrize("name", ["f32", "f16", "q8", "turboquant", "tqk"])
def test_refused_memory_at_any_point_leaves_the_state_as_it_was(name: str) -> None:
    memory, made, mode = Rationed(), config(4, 64, max_tokens=100), Compression.named(name)
    made_at = refusals_of(memory, lambda: state_of(made, mode, allocate=memory), lambda: True)
    assert made_at >= 2 * 2 + 2 * 3
    source, state = (state_of(made, mode, allocate=memory) for _ in range(2))
    feed(source, 70)
    feed(state, 9)
    before, kept = dump_all(state), dump_all(source)
    refusals_of(memory, source.snapshot, lambda: dump_all(source) == kept)
    taken = source.snapshot()
    assert refusals_of(memory, lambda: state.restore(taken), lambda: dump_all(state) == before) >= 4
    assert [contents(state, index) for index in (0, 2)] == [contents(source, index) for index in (0, 2)]
    if mode.keys in (RowFormat.F32, RowFormat.F16):
        before = dump_all(state)
        assert refusals_of(memory, lambda: state.shift(3, 9), lambda: dump_all(state) == before) >= 4


# Against a twin that is a list


@pytest.mark.parametrize("seed", range(16))
def test_random_walk_equals_a_list_of_tokens(seed: int) -> None:
    """The twin knows every token's rows, the positions a convolution may go back to, and nothing else."""
    rng = random.Random(seed)
    half = rng.random() < 0.5
    state = state_of(config(max_tokens=200), HALF if half else None, capacity=rng.choice([1, 20, 200]))
    tokens: list[int] = []
    known: list[int] = []
    kept: tuple[object, list[int]] | None = None
    made = 0
    for _ in range(80):
        match rng.randrange(6):
            case 0 | 1:
                for _ in range(rng.choice([1, 1, 3, 9, 70])):
                    push(state, made)
                    tokens.append(made)
                    known.append(len(tokens))
                    made += 1
            case 2:
                length = max(0, len(tokens) - rng.choice([0, 1, 2, 5, 70]))
                possible = length == len(tokens) or length in known[-64:]
                left = state.truncate_to(length)
                assert left == (length if possible else 0)
                del tokens[left:]
                known = [position for position in known[-64:] if position <= left] if left else []
            case 3:
                kept = (state.snapshot(), list(tokens))
            case 4 if kept is not None:
                state.restore(kept[0])  # type: ignore[arg-type]
                tokens = list(kept[1])
                known = [len(tokens)]
            case 5 if rng.random() < 0.2:
                state.clear_for_reuse()
                tokens, known = [], []
        check(state, tokens, half)


@cache
def token_row(token: int, layer: int, count: int) -> F32:
    return np.random.default_rng((token, layer)).standard_normal(count).astype(np.float32)


def push(state: ModelCache, token: int) -> None:
    for layer in state.own:
        if isinstance(layer, ConvLayer):
            layer.append(token_row(token, layer.index, 16)[None])
        else:
            row = token_row(token, layer.index, 16).reshape(2, 1, 2, 4)
            attention(state, layer.index).append(row[0], row[1])


def check(state: ModelCache, tokens: list[int], half: bool) -> None:
    assert {layer.position for layer in state.own} == {len(tokens)}
    for index in (0, 2):
        rows = np.array([token_row(token, index, 16) for token in tokens], np.float32).reshape(-1, 2, 8)
        stored = rows.astype(np.float16) if half else rows
        assert flat(attention(state, index)) == stored[:, 0].tolist()
        assert flat(attention(state, index), keys=False) == stored[:, 1].tolist()
    for index in (1, 3):
        last = [np.zeros(16, np.float32)] * 2 + [token_row(token, index, 16) for token in tokens[-2:]]
        assert conv(state, index).state.tobytes() == np.stack(last[-2:]).tobytes()
