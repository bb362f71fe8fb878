"""DynamicCache to rows and back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from warmkv.kvstore.integrations.hf_cache import (
    cache_length,
    forward_argument,
    from_restored,
    new_cache,
    observe,
    shorten,
    to_rows,
)
from warmkv.kvstore.restored import Restored, RestoredLayer, RestoredPlane
from warmkv.kvstore.results import Match
from warmkv.kvstore.rows import LayerRows
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import PlaneRole

MakeModel = Callable[..., LlamaForCausalLM]
Filled = Callable[..., DynamicCache]
CPU = torch.device("cpu")


def as_restored(rows: list[LayerRows], *cuts: int) -> Restored:
    """What a store would hand back for ``rows``, split into blocks at ``cuts``."""
    layers = []
    for record in rows:
        planes = {}
        for plane in record.planes:
            blocks = tuple(np.ascontiguousarray(block) for block in np.split(plane.rows, cuts))
            planes[plane.role] = RestoredPlane(plane.role, plane.format, plane.rows.shape[1:], blocks)
        layers.append(RestoredLayer(record.layer, planes))
    return Restored(Match(identity=None), tuple(layers))  # type: ignore[arg-type]


def assert_same(one: DynamicCache, other: DynamicCache, length: int) -> None:
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys[:, :, :length], theirs.keys[:, :, :length])
        assert torch.equal(ours.values[:, :, :length], theirs.values[:, :, :length])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 6, 11)])
def test_rows_come_back_bit_for_bit(
    make_model: MakeModel, filled: Filled, prompt: list[int], dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    model = make_model(dtype=dtype)
    live, back = filled(model, prompt), new_cache(model)
    from_restored(back, as_restored(to_rows(live), *cuts), len(prompt), CPU)
    assert cache_length(back) == len(prompt)
    assert back.layers[0].keys.dtype == dtype
    assert_same(live, back, len(prompt))


def test_rows_are_views_and_stay_when_the_cache_grows_or_is_cropped(
    model: LlamaForCausalLM, filled: Filled, feed: Callable[..., torch.Tensor], prompt: list[int]
) -> None:
    cache = filled(model, prompt)
    rows = to_rows(cache)
    assert rows[0].planes[0].rows.ctypes.data == cache.layers[0].keys.data_ptr()
    copies = [plane.rows.copy() for record in rows for plane in record.planes]
    shorten(cache, 7)
    feed(model, cache, [3, 4, 5])
    for plane, copy in zip((plane for record in rows for plane in record.planes), copies, strict=True):
        assert np.array_equal(plane.rows, copy)


def test_one_block_is_attached_where_it_lies(model: LlamaForCausalLM, filled: Filled, prompt: list[int]) -> None:
    restored = as_restored(to_rows(filled(model, prompt)))
    cache = new_cache(model)
    from_restored(cache, restored, 20, CPU)
    block = restored.layers[0].plane(PlaneRole.KEY).blocks[0]
    assert cache.layers[0].keys.data_ptr() == block.ctypes.data
    assert cache_length(cache) == 20


def test_growing_a_restored_cache_leaves_the_blocks_alone(
    model: LlamaForCausalLM, filled: Filled, feed: Callable[..., torch.Tensor], prompt: list[int]
) -> None:
    restored = as_restored(to_rows(filled(model, prompt)))
    block = restored.layers[1].plane(PlaneRole.VALUE).blocks[0]
    before = block.copy()
    cache = new_cache(model)
    from_restored(cache, restored, 30, CPU)
    feed(model, cache, [1, 2, 3], [4])
    assert np.array_equal(block, before)


def test_a_failed_restore_leaves_the_cache_empty(model: LlamaForCausalLM, filled: Filled, prompt: list[int]) -> None:
    restored = as_restored(to_rows(filled(model, prompt)))
    cache = new_cache(model)
    with pytest.raises(RecordError, match="40 rows, 41 were promised"):
        from_restored(cache, restored, 41, CPU)
    restored.layers = restored.layers[:2]
    with pytest.raises(RecordError, match="2 layers were restored, the model has 3"):
        from_restored(cache, restored, 10, CPU)
    assert cache_length(cache) == 0


@pytest.mark.parametrize("length", [40, 39, 1, 0])
def test_shorten_leaves_exactly_that_many(model: LlamaForCausalLM, filled: Filled, prompt: list[int], length: int) -> None:
    cache = filled(model, prompt)
    shorten(cache, length)
    assert cache_length(cache) == length


def test_shorten_cannot_lengthen(model: LlamaForCausalLM, filled: Filled, prompt: list[int]) -> None:
    with pytest.raises(RecordError, match="holds 40 tokens, 41"):
        shorten(filled(model, prompt), 41)


def test_layers_that_disagree_and_batches_are_errors(model: LlamaForCausalLM, filled: Filled, prompt: list[int]) -> None:
    cache = filled(model, prompt)
    cache.layers[1].crop(-1)
    with pytest.raises(RecordError, match="disagree"):
        cache_length(cache)
    batch = new_cache(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt, prompt]), use_cache=True, **{forward_argument(model): batch})
    with pytest.raises(RecordError, match="expected \\(1, heads"):
        cache_length(batch)


def test_caches_of_other_kinds_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(UnsupportedError, match="StaticLayer"):
        cache_length(StaticCache(config=model.config, max_cache_len=8))  # type: ignore[arg-type]


def test_observing_leaves_generation_alone(model: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    observe(model, CPU)
    assert torch.equal(torch.rand(1), before)
