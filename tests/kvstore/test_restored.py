"""Layers that are made when they are looked at behave as a tuple of them would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from warmkv import Restored, open_store
from warmkv.kvstore.restored import Layers, RestoredLayer
from warmkv.kvstore.testing.samples import FULL, mixed_identity, model_rows, shared, sliding


def counted(count: int) -> tuple[Layers, list[int]]:
    """So many layers, and which of them were made, in order."""
    made: list[int] = []

    def make(index: int) -> RestoredLayer:
        made.append(index)
        return RestoredLayer(index, {})

    return Layers(count, make), made


def test_a_layer_is_made_once_and_only_when_looked_at() -> None:
    layers, made = counted(4)
    assert len(layers) == 4 and bool(layers) and made == []
    assert layers[2] is layers[2] and layers[-2] is layers[2]
    assert made == [2]


def test_layers_iterate_in_order_and_slice_to_tuples() -> None:
    layers, made = counted(4)
    assert [layer.layer for layer in layers] == [0, 1, 2, 3]
    assert [layer.layer for layer in layers[1:]] == [1, 2, 3] and isinstance(layers[:2], tuple)
    assert [layer.layer for layer in reversed(layers)] == [3, 2, 1, 0] and made == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [4, -5])
def test_there_are_no_others(index: int) -> None:
    layers, made = counted(4)
    with pytest.raises(IndexError):
        layers[index]
    assert made == []


def test_no_layers_are_false() -> None:
    assert not counted(0)[0] and not Restored.__dataclass_fields__["layers"].default


def test_layers_taken_before_close_are_made_after_it_too() -> None:
    """They keep the mapping, as views do."""
    identity: Any = mixed_identity(FULL, sliding(3), shared(0))
    tokens = list(range(1, 9))
    records = model_rows(identity, tokens)
    with open_store(None, warm_bytes=1 << 20) as store:
        store.save(identity, tokens, records)
        restored = store.restore(identity, [*tokens, 9])
        layers = restored.layers
        restored.close()
        assert len(restored.layers) == 0 and len(layers) == 3
        store.forget(identity, tokens)
    for index in (0, 1):
        expected = records[index].planes[0].rows[layers[index].first :]
        np.testing.assert_array_equal(layers[index].keys, expected)
    assert layers[2].layer == 2 and np.shares_memory(layers[2].keys, layers[0].keys)
