"""Copies set aside of any cache that can be copied: windows, gaps, attention mass and recurrent state included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dumps import Dump, dump, dump_all

from warmkv.kvstore.live import snapshot
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import CLEAN

FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=6, value_size=5)
PLAN = ModelPlan(
    (
        FULL,
        replace(FULL, kind=LayerKind.SLIDING, window=4),
        LayerPlan(LayerKind.RECURRENT, state_size=7),
        LayerPlan(LayerKind.SHARED, shared_with=0),
        LayerPlan(LayerKind.CONV, conv=ConvPlan(3)),
        replace(FULL, alive=(False, True)),
    )
)


def fed(tokens: int, salt: int = 0, plan: ModelPlan = PLAN) -> ModelCache:
    """A cache after ``tokens`` tokens whose attention was observed, its window trimmed."""
    cache = ModelCache(plan, backend="reference")
    numbers = np.random.default_rng(salt)
    for _ in range(tokens):
        for layer in cache.own:
            if isinstance(layer, ConvLayer):
                layer.append(numbers.standard_normal((1, 3)).astype(np.float32))
            elif isinstance(layer, RecurrentLayer):
                layer.update(numbers.standard_normal(layer.plan.state_size).astype(np.float32))
            else:
                assert isinstance(layer, AttentionLayer)
                layer.append(*(numbers.standard_normal((1, 2, size)).astype(np.float32) for size in (6, 5)))
                layer.attend(numbers.standard_normal((4, 6)).astype(np.float32))
                layer.trim_window()
    return cache


def contents(cache: ModelCache) -> list[Dump]:
    """All that layers hold; of a convolution its state, of no layer what tells one object from another."""
    found = []
    for layer in cache.own:
        parts = dump(layer)
        if isinstance(layer, AttentionLayer):
            found.append((*parts[:4], *parts[5:]))
        else:
            found.append((parts[0], parts[2]))
    return found


@pytest.mark.parametrize("tokens", [0, 1, 4, 30])
def test_every_layer_comes_back(tokens: int) -> None:
    cache, other = fed(tokens), fed(11, salt=5)
    taken = snapshot.take(cache)
    expected = contents(cache)
    for _ in range(2):
        snapshot.prepare(other, taken)()
        assert contents(other) == expected and (other.position, other.lineage) == (tokens, CLEAN)
        for layer in other.own:
            if isinstance(layer, AttentionLayer):
                layer.append(np.ones((2, 2, 6), np.float32), np.ones((2, 2, 5), np.float32))
                layer.observe_queries(np.ones((1, 4, 6), np.float32))
    assert contents(cache) == expected


def test_rows_with_gaps_come_back_with_them() -> None:
    cache, other = fed(30), fed(3)
    assert cache.evict(12) > 0
    snapshot.prepare(other, snapshot.take(cache))()
    assert contents(other) == contents(cache) and other.lineage == cache.lineage != CLEAN
    first = other.own[0]
    assert isinstance(first, AttentionLayer) and not first.gapless and first.rows == 12 and first.position == 30


def test_what_is_prepared_and_not_called_changes_nothing() -> None:
    cache, other = fed(9), fed(4)
    before = dump_all(other)
    snapshot.prepare(other, snapshot.take(cache))
    assert dump_all(other) == before


def test_attention_mass_set_aside_does_not_grow_any_more() -> None:
    cache = fed(9)
    taken, expected = snapshot.take(cache), contents(cache)
    first = cache.own[0]
    assert isinstance(first, AttentionLayer)
    first.observe_queries(np.ones((3, 4, 6), np.float32))
    assert contents(cache) != expected
    snapshot.prepare(cache, taken)()
    assert contents(cache) == expected


@pytest.mark.parametrize(
    ("index", "changed"),
    [
        (0, replace(FULL, importance=False)),
        (1, replace(FULL, kind=LayerKind.SLIDING, window=5)),
        (2, LayerPlan(LayerKind.RECURRENT, state_size=8)),
        (4, LayerPlan(LayerKind.CONV, conv=ConvPlan(3, taps=3))),
        (5, FULL),
        (5, LayerPlan(LayerKind.RECURRENT, state_size=7)),
    ],
)
def test_layers_of_another_plan_are_refused_unchanged(index: int, changed: LayerPlan) -> None:
    layers = list(PLAN.layers)
    layers[index] = changed
    cache, other = fed(9), fed(4, plan=ModelPlan(tuple(layers)))
    before = dump_all(other)
    with pytest.raises(RecordError, match=f"layer {index} "):
        snapshot.prepare(other, snapshot.take(cache))
    assert dump_all(other) == before


def test_bytes_are_those_of_rows_mass_and_states() -> None:
    rows = [9 * (2 * 11 * 4 + 4), 9 * (11 * 4 + 4)]
    held = fed(9).own[1]
    assert isinstance(held, AttentionLayer)
    window = held.rows * (2 * 11 * 4 + 4)
    assert snapshot.take(fed(9)).nbytes == sum(rows) + window + 4 * 7 + 4 * 2 * 3
