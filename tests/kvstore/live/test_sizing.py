"""The formulas of a plan against what layers hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan, modes
from warmkv.schema.errors import OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

MODES = [pytest.param(keys, values, id=name) for name, keys, values in modes()]
FULL = LayerPlan(LayerKind.FULL, 32, 8, 128, 128)
NYSTROM = LayerPlan(LayerKind.NYSTROM, 4, 2, 16, 8, nystrom=NystromPlan(landmarks=8, window=16, sinks=4, boundary=40))


def rows(plan: LayerPlan, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    shape = count, plan.kv_heads
    return tuple(rng.standard_normal((*shape, size)).astype(np.float32) for size in (plan.key_size, plan.value_size))


@pytest.mark.parametrize(
    "keys, values, expected",
    [
        (RowFormat.F32, RowFormat.F32, 1024),
        (RowFormat.F16, RowFormat.F16, 512),
        (RowFormat.BF16, RowFormat.BF16, 512),
        (RowFormat.Q8_2F, RowFormat.Q8_2F, 144 + 132),
        (RowFormat.Q8_2F, RowFormat.F32, 144 + 512),
        (RowFormat.F32, RowFormat.Q8_2F, 512 + 132),
    ],
)
def test_bytes_of_a_token_of_one_head_of_128(keys: RowFormat, values: RowFormat, expected: int) -> None:
    plan = replace(FULL, key_format=keys, value_format=values)
    assert sizing.row_bytes(plan) == 8 * expected
    assert sizing.token_bytes(plan) == 8 * expected + 4
    assert sizing.token_bytes(replace(plan, importance=False)) == 8 * expected


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 66, 200])
@pytest.mark.parametrize("alive", [(), (True, False, True)])
def test_stored_rows_take_what_the_formula_says(keys: RowFormat, values: RowFormat, count: int, alive: tuple[bool, ...]) -> None:
    plan = LayerPlan(LayerKind.FULL, 6, 3, 33, 7, keys, values, alive=alive)
    found = AttentionLayer(plan, kernels=REFERENCE)
    found.append(*rows(plan, count))
    assert found.memory().stored == sizing.stored_bytes(plan, count)
    found.truncate_last(count // 2)
    left, frozen = count - count // 2, plan.quantised and count > 64
    assert found.memory().stored == sizing.stored_bytes(plan, left, frozen=frozen)
    assert found.memory().attention >= found.memory().stored


@pytest.mark.parametrize("format_", [RowFormat.F32, RowFormat.Q8_2F])
@pytest.mark.parametrize(
    "window, slack, align", [(1, 0, 1), (6, 2, 4), (31, 0, 1), (33, 0, 1), (37, 5, 16), (64, 64, 64), (5, 40, 1)]
)
def test_a_window_never_stores_more_rows_than_said(format_: RowFormat, window: int, slack: int, align: int) -> None:
    plan = LayerPlan(LayerKind.SLIDING, 1, 1, 4, 4, format_, format_, window=window)
    found, most = AttentionLayer(plan, kernels=REFERENCE), 0
    for tokens in range(1, 400):
        found.append(*rows(plan, 1))
        most = max(most, found.rows)
        assert most == sizing.rows_at(plan, tokens, slack=slack, align=align), tokens
        found.trim_window(slack, align)


def test_states_take_what_the_formula_says() -> None:
    ring = LayerPlan(LayerKind.RING, 4, 2, 8, 6, ring=RingPlan(window=12, undo_rows=5))
    assert BoundedLayer(ring, kernels=REFERENCE).memory().total == sizing.state_bytes(ring) == sizing.layer_bytes(ring, 1000)
    recurrent = LayerPlan(LayerKind.RECURRENT, state_size=77)
    assert RecurrentLayer(recurrent).memory().total == sizing.state_bytes(recurrent) == 308
    beside = replace(recurrent, conv=ConvPlan(10, taps=3, history=0))
    assert RecurrentLayer(beside).memory().total == sizing.state_bytes(beside) == 308 + 4 * 30
    assert sizing.row_bytes(ring) == sizing.field_bytes(recurrent) == sizing.rows_at(recurrent, 9) == 0


@pytest.mark.parametrize("count", [40, 64, 200])
def test_sealed_states_take_what_the_formula_says(count: int) -> None:
    plan = replace(NYSTROM, nystrom=replace(NYSTROM.nystrom, boundary=count))
    found = NystromLayer(plan, kernels=REFERENCE)
    found.append(*rows(plan, count))
    found.push_queries(np.random.default_rng(1).standard_normal((count, 4, 16)).astype(np.float32))
    collected = found.memory().stored + 4 * count + found.trace.nbytes
    assert found.seal()
    assert found.memory().total == sizing.sealed_bytes(plan, count)
    assert sizing.layer_bytes(plan, 10_000) == max(collected, sizing.sealed_bytes(plan, count))
    assert sizing.layer_bytes(plan, count - 1) < sizing.layer_bytes(plan, count)


def test_source_figures_of_the_sealed_state() -> None:
    plan = LayerPlan(LayerKind.NYSTROM, 8, 1, 128, 128, nystrom=NystromPlan())
    assert sizing.sealed_bytes(plan, 1000) == 151_552 + 8 * 37_120


def test_model_is_the_sum_of_its_layers() -> None:
    window = LayerPlan(LayerKind.SLIDING, 32, 8, 128, 128, window=100)
    shared = LayerPlan(LayerKind.SHARED, shared_with=0)
    plan = ModelPlan((FULL, window, shared, NYSTROM))
    parts = [sizing.layer_bytes(layer, 5000) for layer in plan.layers]
    assert parts[:3] == [5000 * (8 * 1024 + 4), 201 * (8 * 1024 + 4), 0]
    assert sizing.model_bytes(plan, 5000) == sum(parts)
    bounded = ModelPlan(plan.layers, max_rows=1000)
    assert sizing.model_bytes(bounded, 5000) == sum(parts) - 4000 * (8 * 1024 + 4)
    assert sizing.model_bytes(bounded, 900) == sizing.model_bytes(plan, 900)


def test_sizes_beyond_addresses_are_refused_with_their_bytes() -> None:
    with pytest.raises(OutOfMemory) as caught:
        sizing.layer_bytes(FULL, 1 << 60)
    assert caught.value.requested_bytes == (1 << 60) * 8 * 1024
    halves = ModelPlan((FULL, FULL))
    tokens = (1 << 63) // (8 * 1024 + 4) - 1
    assert sizing.layer_bytes(FULL, tokens) < 1 << 63
    with pytest.raises(OutOfMemory):
        sizing.model_bytes(halves, tokens)


@pytest.mark.parametrize("call", [sizing.stored_bytes, sizing.rows_at, sizing.sealed_bytes, sizing.layer_bytes])
def test_negative_counts_are_refused(call) -> None:
    with pytest.raises(RecordError, match="-1"):
        call(FULL, -1)
