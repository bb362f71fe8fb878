"""A recurrent state goes forward, has at most one tentative successor, and never goes back."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan
from warmkv.kvstore.testing.allocated import allocated_bytes
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
SIZE = 6


def plan(size: int = SIZE) -> LayerPlan:
    return LayerPlan(LayerKind.RECURRENT, state_size=size)


def vector(seed: int, size: int = SIZE) -> F32:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def everything(layer: RecurrentLayer) -> tuple[bytes, bytes | None, int, int]:
    scratch = layer.scratch
    return layer.state.tobytes(), None if scratch is None else scratch.tobytes(), layer.position, layer.generation


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_starts_with_zeros_and_keeps_what_it_is_given_bit_for_bit(size: int) -> None:
    layer = RecurrentLayer(plan(size))
    assert layer.position == 0 and layer.state.shape == (size,) and not layer.state.any() and layer.scratch is None
    given = vector(1, size)
    given[0], given[-1] = np.nan, -0.0
    layer.update(given, 5)
    assert layer.state.tobytes() == given.tobytes() and layer.position == 5
    given[:] = 9
    assert not (layer.state == 9).any()


def test_state_cannot_be_written_from_outside() -> None:
    layer = RecurrentLayer(plan())
    layer.speculate(vector(1))
    assert layer.scratch is not None
    for view in (layer.state, layer.scratch):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1


def test_committed_scratch_is_the_state_and_a_discarded_one_never_was() -> None:
    layer = RecurrentLayer(plan())
    layer.update(vector(1), 3)
    before = everything(layer)
    layer.speculate(vector(2), 2)
    assert layer.position == 3 and layer.state.tobytes() == vector(1).tobytes()
    layer.discard()
    assert everything(layer) == before
    layer.speculate(vector(2), 2)
    layer.speculate(vector(3), 4)
    layer.commit()
    assert layer.state.tobytes() == vector(3).tobytes() and layer.position == 7 and layer.scratch is None
    with pytest.raises(RecordError, match="layer 0 .RECURRENT.: nothing speculative"):
        layer.commit()


def test_update_drops_a_scratch_made_beside_the_old_state() -> None:
    layer = RecurrentLayer(plan())
    layer.speculate(vector(2), 2)
    layer.update(vector(1))
    assert layer.scratch is None and layer.position == 1
    with pytest.raises(RecordError):
        layer.commit()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_going_back_is_refused_and_changes_nothing(count: int) -> None:
    layer = RecurrentLayer(plan(), index=4)
    layer.update(vector(1), 3)
    layer.speculate(vector(2))
    before = everything(layer)
    for attempt in (layer.check_truncate, layer.truncate_last):
        with pytest.raises(CannotRewind, match=f"layer 4 .RECURRENT.: .* {count} positions"):
            attempt(count)
    assert everything(layer) == before


@pytest.mark.parametrize("count", [-1, 4, 1 << 70])
def test_past_the_start_is_a_mistake_and_not_a_rewind(count: int) -> None:
    layer = RecurrentLayer(plan())
    layer.update(vector(1), 3)
    before = everything(layer)
    with pytest.raises(RecordError, match="expected 0 to 3"):
        layer.truncate_last(count)
    assert everything(layer) == before


def test_scratch_is_dropped_on_rollback_import_and_clear() -> None:
    layer = RecurrentLayer(plan())
    layer.update(vector(1), 3)
    layer.speculate(vector(2))
    layer.truncate_last(0)
    assert layer.scratch is None and layer.position == 3 and layer.state.tobytes() == vector(1).tobytes()
    layer.speculate(vector(2))
    generation = layer.generation
    layer.adopt(vector(5), 11)
    assert layer.scratch is None and layer.position == 11 and layer.state.tobytes() == vector(5).tobytes()
    assert layer.generation > generation
    layer.speculate(vector(2))
    generation = layer.generation
    layer.clear()
    assert layer.scratch is None and layer.position == 0 and not layer.state.any() and layer.generation > generation


def test_updates_and_speculation_leave_the_generation() -> None:
    layer = RecurrentLayer(plan())
    generation = layer.generation
    layer.update(vector(1))
    layer.speculate(vector(2))
    layer.commit()
    layer.truncate_last(0)
    assert layer.generation == generation
    assert RecurrentLayer(plan()).generation > generation


@pytest.mark.parametrize(
    "bad",
    [vector(1, 5), vector(1, 7), vector(1)[None], vector(1).astype(np.float64), [0.0] * SIZE],
    ids=["short", "long", "matrix", "float64", "list"],
)
def test_numbers_that_do_not_fit_are_refused_unchanged(bad: F32) -> None:
    layer = RecurrentLayer(plan(), index=2)
    layer.update(vector(1), 3)
    layer.speculate(vector(2))
    before = everything(layer)
    for attempt in (layer.update, layer.speculate, lambda state: layer.adopt(state, 1)):
        with pytest.raises(RecordError, match="layer 2 .RECURRENT.: state: .*expected"):
            attempt(bad)
    assert everything(layer) == before


def test_negative_positions_are_refused_unchanged() -> None:
    layer = RecurrentLayer(plan())
    before = everything(layer)
    for attempt in (layer.update, layer.speculate, layer.adopt):
        with pytest.raises(RecordError, match="-1 positions"):
            attempt(vector(1), -1)
    assert everything(layer) == before


def test_other_plans_are_refused() -> None:
    with pytest.raises(RecordError, match="layer 1 .FULL.: the plan has no state"):
        RecurrentLayer(LayerPlan(LayerKind.FULL, 1, 1, 4, 4), index=1)
    with pytest.raises(RecordError, match="state_size is 0"):
        RecurrentLayer(plan(0))


def test_memory_counts_state_and_scratch_as_long_as_there_is_one() -> None:
    layer = RecurrentLayer(plan())
    assert layer.memory().recurrent == layer.memory().total == allocated_bytes(layer) == 4 * SIZE
    layer.speculate(vector(2))
    assert layer.memory().recurrent == layer.memory().total == allocated_bytes(layer) == 8 * SIZE
    layer.commit()
    assert layer.memory().recurrent == allocated_bytes(layer) == 4 * SIZE


def test_refused_memory_leaves_the_state_as_it_was() -> None:
    granted = 1

    def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
        nonlocal granted
        if not granted:
            raise OutOfMemory("refused", int(np.prod(shape)) * dtype.itemsize)
        granted -= 1
        return np.full(shape, 77, dtype)

    layer = RecurrentLayer(plan(), allocate=allocate)
    assert not layer.state.any()
    before = everything(layer)
    with pytest.raises(OutOfMemory) as refused:
        layer.speculate(vector(1))
    assert refused.value.requested_bytes == 4 * SIZE and everything(layer) == before
    with pytest.raises(OutOfMemory):
        RecurrentLayer(plan(), allocate=allocate)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_equals_a_twin_of_two_values(seed: int) -> None:
    rng = random.Random(seed)
    layer = RecurrentLayer(plan())
    state, position, ahead = np.zeros(SIZE, np.float32), 0, None
    for turn in range(200):
        count, fresh = rng.randrange(4), vector(1000 * seed + turn)
        match rng.randrange(7):
            case 0:
                layer.update(fresh, count)
                state, position, ahead = fresh, position + count, None
            case 1 | 2:
                layer.speculate(fresh, count)
                ahead = (fresh, count)
            case 3 if ahead is not None:
                layer.commit()
                state, position, ahead = ahead[0], position + ahead[1], None
            case 4:
                layer.discard()
                ahead = None
            case 5:
                if 0 < count <= position:
                    with pytest.raises(CannotRewind):
                        layer.truncate_last(count)
                elif count == 0:
                    layer.truncate_last(0)
                    ahead = None
            case 6 if rng.random() < 0.2:
                layer.clear()
                state, position, ahead = np.zeros(SIZE, np.float32), 0, None
        assert layer.state.tobytes() == state.tobytes() and layer.position == position
        assert (layer.scratch is None) == (ahead is None)
        if ahead is not None and layer.scratch is not None:
            assert layer.scratch.tobytes() == ahead[0].tobytes()


def test_a_convolution_goes_with_its_state() -> None:
    layer = RecurrentLayer(LayerPlan(LayerKind.RECURRENT, state_size=SIZE, conv=ConvPlan(4, taps=2, history=0)))
    first, second = (np.random.default_rng(seed).standard_normal((2, 4)).astype(np.float32) for seed in (5, 6))
    assert layer.conv is not None and not layer.conv.any()
    layer.update(vector(1), 3, conv=first)
    layer.speculate(vector(2), 2, conv=second)
    assert layer.conv.tobytes() == first.tobytes()
    assert layer.memory().conv == 2 * 32 and layer.memory().total == allocated_bytes(layer) == 2 * (4 * SIZE + 32)
    layer.discard()
    assert layer.conv.tobytes() == first.tobytes() and layer.memory().total == allocated_bytes(layer)
    layer.speculate(vector(2), 2, conv=second)
    layer.commit()
    assert layer.conv.tobytes() == second.tobytes() and layer.position == 5
    with pytest.raises(ValueError, match="read-only"):
        layer.conv[0] = 1
    second[:] = 9
    assert not (layer.conv == 9).any()
    layer.clear()
    assert not layer.conv.any()


def test_a_convolution_is_given_just_where_there_is_one() -> None:
    conv = np.zeros((2, 4), np.float32)
    beside = RecurrentLayer(LayerPlan(LayerKind.RECURRENT, state_size=SIZE, conv=ConvPlan(4, taps=2, history=0)))
    for layer, given in ((beside, None), (RecurrentLayer(plan()), conv), (beside, conv[:1]), (beside, conv.astype(np.float64))):
        before = everything(layer)
        for attempt in (layer.update, layer.speculate, layer.adopt):
            with pytest.raises(RecordError, match="layer 0 .RECURRENT.: "):
                attempt(vector(1), 1, conv=given)
        assert everything(layer) == before
