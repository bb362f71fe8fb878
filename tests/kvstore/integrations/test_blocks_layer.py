"""A layer over several restored blocks behaves like a plain layer over their concatenation."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from warmkv.kvstore.integrations.hf_blocks import BlocksLayer
from warmkv.kvstore.integrations.hf_cache import cache_length, shorten

HEADS, SIZE = 2, 4


def pieces(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(1, length, HEADS, SIZE).permute(0, 2, 1, 3) for length in lengths]


def pair(*lengths: int) -> tuple[DynamicCache, DynamicCache]:
    """Caches of two layers with the same rows: in blocks, and joined."""
    torch.manual_seed(sum(lengths))
    blocks, plain = DynamicCache(), DynamicCache()
    for index in range(2):
        keys, values = pieces(*lengths), pieces(*lengths)
        plain.update(torch.cat(keys, dim=-2), torch.cat(values, dim=-2), index)
        layer = DynamicLayer()
        layer.lazy_initialization(keys[0], values[0])
        BlocksLayer.attach(layer, keys, values)
        blocks.layers.append(layer)
    return blocks, plain


def assert_equal(ours: DynamicCache, theirs: DynamicCache) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for mine, expected in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is DynamicLayer
        assert torch.equal(mine.keys, expected.keys) and torch.equal(mine.values, expected.values)


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1, 5), (1, 2, 3, 4, 5)])
@pytest.mark.parametrize("new", [1, 7])
def test_update_joins_blocks_and_new_rows(lengths: tuple[int, ...], new: int) -> None:
    blocks, plain = pair(*lengths)
    assert blocks.get_seq_length() == cache_length(copy.deepcopy(blocks)) == sum(lengths)
    for index in range(2):
        keys, values = pieces(new)[0], pieces(new)[0]
        returned = blocks.update(keys, values, index)
        expected = plain.update(keys, values, index)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(returned, expected, strict=True))
    assert_equal(blocks, plain)


def test_length_is_known_before_anything_is_joined() -> None:
    blocks, _ = pair(2, 3)
    assert blocks.get_seq_length() == 5
    assert blocks.layers[0].get_mask_sizes(4)[0] == 9
    assert all(type(layer) is BlocksLayer for layer in blocks.layers)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_shortening_before_the_first_update(left: int) -> None:
    blocks, plain = pair(2, 3)
    shorten(blocks, left)
    shorten(plain, left)
    assert_equal(blocks, plain)


def test_copies_do_not_share_rows() -> None:
    blocks, plain = pair(2, 3)
    other = copy.deepcopy(blocks)
    for layer in other.layers:
        layer.keys.zero_()
    for layer in blocks.layers:
        assert layer.keys.abs().sum() > 0
    assert_equal(blocks, plain)


def test_reset_empties_it() -> None:
    blocks, _ = pair(2, 3)
    for layer in blocks.layers:
        layer.reset()
    assert blocks.get_seq_length() == 0
