"""The buffer of a convolution and its ring of earlier states, against lists that forget nothing."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest
from dumps import dump

from warmkv.kvstore.live import wire
from warmkv.kvstore.live.layers.conv import ConvHistory, ConvLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import CONV_HISTORY, MAX_SIZE, ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.sizing import layer_bytes, row_bytes, state_bytes, token_bytes
from warmkv.kvstore.testing.allocated import allocated_bytes, arrays_of
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
TAPS, CHANNELS = 2, 5


def plan(taps: int = TAPS, channels: int = CHANNELS, history: int = CONV_HISTORY) -> LayerPlan:
    return LayerPlan(LayerKind.CONV, conv=ConvPlan(channels, taps, history))


def filled(number: float, size: int) -> F32:
    return np.full((size,), number, np.float32)


def inputs(seed: int, count: int, channels: int = CHANNELS) -> F32:
    return np.random.default_rng(seed).standard_normal((count, channels)).astype(np.float32)


def history_to(last: int, size: int) -> ConvHistory:
    """What was recorded at positions 1 to ``last``, each filled with its position."""
    history = ConvHistory(64, (size,))
    for position in range(1, last + 1):
        history.push(position, filled(position, size))
    return history


def test_the_history_holds_64_steps() -> None:
    assert CONV_HISTORY == 64 and ConvLayer(plan()).history.capacity == 64


def test_rollback_finds_the_state_of_its_position() -> None:
    history, state = history_to(10, 16), filled(0, 16)
    assert history.rollback_to(5, state) and state.tolist() == [5.0] * 16
    assert history.rollback_to(0, state) and state.tolist() == [0.0] * 16
    assert not history.rollback_to(99, state) and state.tolist() == [0.0] * 16


def test_the_ring_wraps_around_and_forgets_the_oldest() -> None:
    history, state = history_to(100, 8), filled(0, 8)
    assert history.positions == tuple(range(37, 101))
    assert history.rollback_to(100, state) and state.tolist() == [100.0] * 8
    assert history.rollback_to(50, state) and state.tolist() == [50.0] * 8
    assert not history.rollback_to(10, state) and state.tolist() == [50.0] * 8


def test_positions_out_of_the_ring_are_not_claimed() -> None:
    history, state = ConvHistory(64, (4,)), filled(0, 4)
    history.push(10, np.array([1.0, 2.0, 3.0, 4.0], np.float32))
    assert history.has_pos(10) and not history.has_pos(5) and history.has_pos(0) and not history.has_pos(-1)
    assert history.rollback_to(10, state) and state.tolist() == [1.0, 2.0, 3.0, 4.0]
    history.clear()
    assert not history.has_pos(10) and history.positions == ()
    for position in range(1, 71):
        history.push(position, filled(position, 4))
    assert not history.has_pos(5) and not history.has_pos(6) and history.has_pos(7) and history.has_pos(70)


def test_a_rollback_forgets_what_came_later() -> None:
    history, state = history_to(20, 3), filled(0, 3)
    assert history.rollback_to(12, state)
    assert not history.has_pos(13) and history.positions == tuple(range(1, 13))
    history.push(13, filled(-13, 3))
    history.push(14, filled(-14, 3))
    assert history.rollback_to(13, state) and state.tolist() == [-13.0] * 3
    assert history.rollback_to(12, state) and state.tolist() == [12.0] * 3


def test_recording_an_earlier_position_forgets_the_continuation_it_replaces() -> None:
    history, state = history_to(20, 3), filled(0, 3)
    history.push(18, filled(-1, 3))
    assert history.positions == tuple(range(1, 19))
    assert history.rollback_to(18, state) and state.tolist() == [-1.0] * 3


def test_what_is_recorded_is_a_copy() -> None:
    history, state = ConvHistory(3, (2,)), filled(1, 2)
    history.push(1, state)
    state.fill(9)
    assert history.rollback_to(1, state) and state.tolist() == [1.0, 1.0]


def test_no_history_goes_back_to_the_start_only() -> None:
    layer = ConvLayer(plan(history=0))
    layer.append(inputs(1, 3))
    assert layer.history.positions == ()
    with pytest.raises(CannotRewind, match="layer 0 .CONV.: the state at position 2 is not among the 0 recorded"):
        layer.truncate_last(1)
    layer.truncate_last(3)
    assert layer.position == 0 and not layer.state.any()


@pytest.mark.parametrize("taps", [1, 2, 3, 7])
@pytest.mark.parametrize("cuts", [[1] * 9, [9], [0, 4, 0, 5], [2, 7], [100], [70, 30, 1]])
def test_however_calls_are_cut_the_states_are_the_same(taps: int, cuts: list[int]) -> None:
    whole, layer = inputs(3, sum(cuts)), ConvLayer(plan(taps))
    at = 0
    for count in cuts:
        layer.append(whole[at : at + count])
        at += count
    padded = np.concatenate([np.zeros((taps, CHANNELS), np.float32), whole])
    assert layer.position == at and layer.state.tobytes() == padded[at : at + taps].tobytes()
    assert layer.history.positions == tuple(range(max(1, at - 63), at + 1))
    for back in range(min(at, 63)):
        layer.truncate_last(min(1, back))
        position = at - back
        assert layer.position == position and layer.state.tobytes() == padded[position : position + taps].tobytes()


def test_update_records_the_last_position_only() -> None:
    layer = ConvLayer(plan())
    layer.update(inputs(1, TAPS), 7)
    layer.update(inputs(2, TAPS), 2)
    assert layer.position == 9 and layer.history.positions == (7, 9)
    with pytest.raises(CannotRewind, match="the state at position 8 is not among the 2 recorded, from position 7 to 9"):
        layer.truncate_last(1)
    layer.truncate_last(2)
    assert layer.position == 7 and layer.state.tobytes() == inputs(1, TAPS).tobytes()


def test_a_restore_clears_the_history_and_seeds_its_position() -> None:
    layer = ConvLayer(plan())
    layer.append(inputs(1, 30))
    generation, state = layer.generation, inputs(2, TAPS)
    layer.adopt(state, 21)
    state.fill(7)
    assert layer.position == 21 and layer.history.positions == (21,) and layer.generation > generation
    assert layer.state.tobytes() == inputs(2, TAPS).tobytes()
    with pytest.raises(CannotRewind):
        layer.truncate_last(1)
    layer.append(inputs(3, 4))
    layer.truncate_last(4)
    assert layer.position == 21 and layer.state.tobytes() == inputs(2, TAPS).tobytes()


def test_refused_truncation_changes_nothing() -> None:
    layer = ConvLayer(plan(history=3))
    layer.append(inputs(1, 10))
    before = dump(layer)
    for count, error in ((3, CannotRewind), (9, CannotRewind), (11, RecordError), (-1, RecordError)):
        with pytest.raises(error, match="layer 0 .CONV."):
            layer.truncate_last(count)
        assert dump(layer) == before
    layer.truncate_last(0)
    assert dump(layer) == before


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((3, CHANNELS + 1), np.float32),
        np.zeros((3, CHANNELS)),
        np.zeros(CHANNELS, np.float32),
        [[0.0] * CHANNELS] * TAPS,
    ],
    ids=["wide", "float64", "vector", "list"],
)
def test_numbers_that_do_not_fit_are_refused_unchanged(bad: F32) -> None:
    layer = ConvLayer(plan(), index=3)
    layer.append(inputs(1, 4))
    before = dump(layer)
    for attempt in (layer.append, layer.update, lambda state: layer.adopt(state, 1)):
        with pytest.raises(RecordError, match="layer 3 .CONV.: .*expected"):
            attempt(bad)
        assert dump(layer) == before


def test_negative_positions_are_refused_unchanged() -> None:
    layer = ConvLayer(plan())
    for attempt in (layer.update, layer.adopt):
        with pytest.raises(RecordError, match="-1 positions"):
            attempt(inputs(1, TAPS), -1)
    assert layer.position == 0 and not layer.state.any()


def test_clear_forgets_all_but_memory() -> None:
    layer = ConvLayer(plan())
    layer.append(inputs(1, 80))
    arrays = {id(array) for array in arrays_of(layer)}
    layer.clear()
    assert layer.position == 0 and not layer.state.any() and layer.history.positions == ()
    assert {id(array) for array in arrays_of(layer)} == arrays


def test_nan_is_kept_as_it_comes() -> None:
    layer, row = ConvLayer(plan()), inputs(1, 3)
    row[1, 2], row[2, 0] = np.nan, np.inf
    layer.append(row)
    assert layer.state.tobytes() == row[1:].tobytes()


def test_the_state_handed_out_cannot_be_written() -> None:
    layer = ConvLayer(plan())
    with pytest.raises(ValueError):
        layer.state[0, 0] = 1


def test_memory_is_what_the_plan_says() -> None:
    layer = ConvLayer(plan())
    expected = 4 * TAPS * CHANNELS * 65 + 8 * 64
    assert layer.memory().conv == layer.memory().total == allocated_bytes(layer) == expected
    layer.append(inputs(1, 100))
    assert layer.memory().total == allocated_bytes(layer) == state_bytes(layer.plan) == layer_bytes(layer.plan, 10**9) == expected
    assert row_bytes(layer.plan) == token_bytes(layer.plan) == 0


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_refused_memory_says_how_much(granted: int) -> None:
    left = [granted]

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfMemory("refused", int(np.prod(shape)) * dtype.itemsize)
        return np.full(shape, 77, dtype)

    with pytest.raises(OutOfMemory) as refused:
        ConvLayer(plan(), allocate=allocate)
    assert refused.value.requested_bytes == [4 * TAPS * CHANNELS, 64 * 4 * TAPS * CHANNELS, 8 * 64][granted]
    left[0] = 3
    layer = ConvLayer(plan(), allocate=allocate)
    assert not layer.state.any() and layer.history.positions == ()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ConvPlan(0), "conv channels is 0"),
        (ConvPlan(MAX_SIZE + 1), "conv channels is 1048577"),
        (ConvPlan(4, 0), "conv taps is 0"),
        (ConvPlan(4, 1025), "conv taps is 1025, expected 1 to 1024"),
        (ConvPlan(4, 2, -1), "a history of -1 steps"),
        (ConvPlan(4, 2, MAX_SIZE + 1), "a history of 1048577 steps"),
        (None, "conv plan None"),
    ],
)
def test_plans_no_convolution_has_are_refused(bad: ConvPlan | None, message: str) -> None:
    with pytest.raises(RecordError, match=f"layer 2 .CONV.: {message}"):
        ConvLayer(LayerPlan(LayerKind.CONV, conv=bad), index=2)


def test_other_kinds_have_no_conv_plan() -> None:
    with pytest.raises(RecordError, match="layer 0 .FULL.: conv plan"):
        LayerPlan(LayerKind.FULL, 1, 1, 4, 4, conv=ConvPlan(3)).validate(0)
    with pytest.raises(RecordError, match="layer 1 .FULL.: the plan has no convolution"):
        ConvLayer(LayerPlan(LayerKind.FULL, 1, 1, 4, 4), index=1)


def test_the_layer_wire_refuses_convolutions_by_name() -> None:
    cache = ModelCache(ModelPlan((plan(),)), backend="reference")
    with pytest.raises(UnsupportedError, match="layer 0 .CONV."):
        cache.export_layers()
    with pytest.raises(UnsupportedError, match="layer 0 .CONV."):
        wire.import_layer(cache.own[0], b"")


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_equals_a_list_of_inputs(seed: int) -> None:
    """The twin keeps every input, and the positions whose state may be gone back to."""
    rng = random.Random(seed)
    taps, history = rng.choice([1, 2, 5]), rng.choice([1, 4, 64])
    layer = ConvLayer(plan(taps, history=history))
    seen: list[F32] = []
    known: list[int] = []
    for turn in range(150):
        match rng.randrange(5):
            case 0 | 1:
                fresh = inputs(1000 * seed + turn, rng.choice([0, 1, 1, 2, 3, 70]))
                layer.append(fresh)
                known += range(len(seen) + 1, len(seen) + len(fresh) + 1)
                seen += list(fresh)
            case 2:
                count = rng.randrange(8)
                target = len(seen) - count
                if target < 0:
                    with pytest.raises(RecordError):
                        layer.truncate_last(count)
                elif count and target and target not in known:
                    with pytest.raises(CannotRewind):
                        layer.truncate_last(count)
                else:
                    layer.truncate_last(count)
                    del seen[target:]
                    known = [position for position in known if position <= target]
            case 3 if rng.random() < 0.2:
                layer.adopt(layer.state.copy(), len(seen))
                known = [len(seen)] if seen else []
            case 4 if rng.random() < 0.1:
                layer.clear()
                seen, known = [], []
        known = known[-history:]
        padded = [np.zeros(CHANNELS, np.float32)] * taps + seen
        assert layer.state.tobytes() == np.stack(padded[len(seen) : len(seen) + taps]).tobytes()
        assert layer.position == len(seen) and [p for p in layer.history.positions if p] == known
