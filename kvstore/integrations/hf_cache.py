"""Caches of a model: made, measured, cut short, read.

The library renamed the argument that carries a cache and changed the meaning of `crop` between
versions; both are settled here by looking at signatures, not at version numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from warmkv.kvstore.integrations import hf_layers
from warmkv.kvstore.integrations.hf_counted import CountedCache
from warmkv.kvstore.integrations.hf_formats import FORMATS, as_numpy
from warmkv.kvstore.rows import LayerRows, PlaneRows
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import PlaneRole

#: Names a cache has had as an argument, newest first.
_NAMES = ("cache", "past_key_values", "cache_params")


def forward_argument(model: torch.nn.Module) -> str:
    """Name of the argument of the model's forward that takes a cache."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in _NAMES if name in accepted), _NAMES[1])


def generate_argument(model: torch.nn.Module) -> str:
    """Name of the argument of `generate` that takes a cache: "cache" from 5.24 on, before that
    what the model's forward calls it."""
    return "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else forward_argument(model)


def new_cache(model: torch.nn.Module) -> DynamicCache:
    """An empty cache for ``model``; one that counts its tokens where no layer has rows. Raises
    UnsupportedError, naming the layer, for layers of a kind that is not served."""
    config = cast(PreTrainedConfig, model.config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("encoder-decoder models cannot be served until a later version")
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is not None and not cast(Callable[[], bool], supports)():
        raise UnsupportedError(
            f"{type(model).__name__} keeps its state in a cache of its own, which cannot be served until a later version"
        )
    cache = DynamicCache(config=config)
    kept = [hf_layers.keeps(index, layer) for index, layer in enumerate(cache.layers)]
    return CountedCache(config=config) if kept and not any(item.rows for item in kept) else cache


def cache_length(cache: DynamicCache) -> int:
    """Tokens whose state ``cache`` holds, those included whose rows a window has dropped.

    Raises RecordError if its layers disagree, if it holds more than one sequence, or if it has no
    rows and does not count; UnsupportedError for layers of a kind that is not served."""
    lengths: set[int] = {cache.tokens} if isinstance(cache, CountedCache) else set()
    for index, layer in enumerate(cache.layers):
        lengths |= hf_layers.covered(index, layer)
    if len(lengths) > 1:
        raise RecordError(f"layers of the cache disagree about its length: {sorted(lengths)}")
    if cache.layers and not lengths:
        raise RecordError("a cache without rows does not tell how many tokens it holds; use one that `load` made")
    length = lengths.pop() if lengths else 0
    for index, layer in enumerate(cache.layers):
        if hf_layers.keeps(index, layer).state and hf_layers.has_state(layer) != (length > 0):
            raise RecordError(f"the cache holds {length} tokens, layer {index} has {'' if length == 0 else 'no '}state")
    return length


def shorten(cache: DynamicCache, length: int) -> None:
    """Drop rows from the end until ``length`` tokens are left. Old rows are not written to. Only
    for caches whose layers all keep all their rows: others lose state they would need.

    A negative count of tokens to remove is what every version of `crop` agrees about."""
    surplus = cache_length(cache) - length
    if surplus < 0:
        raise RecordError(f"cache holds {length + surplus} tokens, {length} were asked for")
    if surplus:
        cache.crop(-surplus)


def to_rows(cache: DynamicCache) -> list[LayerRows]:
    """The rows of every layer that has any, as (rows, heads, head size) arrays, bf16 as uint16
    bits; of windowed layers those they kept.

    Tensors in host memory are viewed, not copied; the arrays keep them alive. The cache may grow
    meanwhile: growing and cropping make new tensors and leave these alone."""
    records = []
    for index, layer in enumerate(cache.layers):
        tensors = hf_layers.row_tensors(index, layer)
        if not tensors:
            if hf_layers.keeps(index, layer).rows:
                raise RecordError(f"layer {index} of the cache holds no rows")
            continue
        planes = tuple(_plane(role, tensor) for role, tensor in tensors.items())
        seen = hf_layers.covered(index, layer).pop()
        records.append(LayerRows(index, planes, seen - len(planes[0].rows)))
    return records


def _plane(role: PlaneRole, tensor: torch.Tensor) -> PlaneRows:
    return PlaneRows(role, FORMATS[tensor.dtype], as_numpy(hf_layers.token_major(role, tensor)))
