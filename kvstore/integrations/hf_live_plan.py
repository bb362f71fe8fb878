"""The plan of a transformers model: which live layers its attention needs, in which storage mode.

Layer kinds and windows come from the cache the library itself would make, heads and sizes from the
configuration, scales from the attention modules. What a plan gets wrong is found when the layer meets
its first rows, and refused there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import torch
from transformers import PreTrainedConfig

from warmkv.kernels.formats import F32
from warmkv.kvstore.integrations import hf_layers
from warmkv.kvstore.integrations.hf_cache import new_cache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, NystromPlan, TurboQuantPlan, modes
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

#: Families whose attention passes its soft cap on; others have the setting and ignore it.
_SOFTCAPPED = frozenset({"gemma2"})


def plan_of(
    model: torch.nn.Module, mode: str = "f32", *, importance: bool = False, nystrom: NystromPlan | None = None, max_rows: int = 0,
    turboquant: TurboQuantPlan | None = None,
) -> ModelPlan:  # fmt: skip
    """What a live cache of ``model`` keeps: all layers in storage ``mode`` (see `plan.modes`), full
    layers in constant memory where ``nystrom`` is given. ``importance`` keeps the attention mass of
    every row, which eviction by mass needs; ``max_rows`` is where eviction begins. ``turboquant`` is for
    modes of rotated rows, which have their defaults otherwise.

    Raises RecordError for a mode nobody knows, UnsupportedError, naming the layer, for layers that are
    no attention over keys and values of their own."""
    formats = {name: (keys, values) for name, keys, values in modes(rotated=True, blocked=True)}
    if mode not in formats:
        raise RecordError(f"storage mode {mode!r}; expected one of {', '.join(formats)}")
    keys, values = formats[mode]
    turned = (turboquant or TurboQuantPlan()) if keys.rotated or values.rotated else None
    config = cast(PreTrainedConfig, model.config)
    text = config.get_text_config(decoder=True)
    softcap = float(getattr(text, "attn_logit_softcapping", None) or 0.0) if text.model_type in _SOFTCAPPED else 0.0
    scales = {int(module.layer_idx): float(module.scaling) for module in _attentions(model)}
    layers = []
    for index, (kind, window) in enumerate(_kinds(model, config)):
        constant = nystrom if kind is LayerKind.FULL else None
        heads, kv_heads, size = _heads(text, index)
        layers.append(
            LayerPlan(
                kind=LayerKind.NYSTROM if constant else kind, heads=heads, kv_heads=kv_heads, key_size=size, value_size=size,
                key_format=keys, value_format=values, window=window, scale=scales.get(index, 0.0), softcap=softcap,
                importance=importance and kind is LayerKind.FULL and constant is None, nystrom=constant,
                turboquant=turned,
            )
        )  # fmt: skip
    return ModelPlan(tuple(layers), max_rows=max_rows)


def sinks_of(model: torch.nn.Module) -> dict[int, F32]:
    """Learned sink logits (heads,) of the layers that have them, by layer."""
    found = {}
    for module in _attentions(model):
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, torch.Tensor):
            found[int(module.layer_idx)] = as_f32(sinks)
    return found


def as_f32(tensor: torch.Tensor) -> F32:
    """A float32 array of the tensor's numbers: a view where they are float32 in host memory."""
    plain = tensor.detach()
    array: F32 = (plain if plain.dtype == torch.float32 else plain.float()).cpu().numpy()
    return np.asarray(array, np.float32)


def _attentions(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that attend, as the library marks them."""
    for module in model.modules():
        if isinstance(getattr(module, "layer_idx", None), int) and isinstance(getattr(module, "scaling", None), float):
            yield module


def _heads(text: PreTrainedConfig, index: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a layer, which in some models has its own."""
    layers = getattr(text, "per_layer_config", None)
    own = text if layers is None else layers[index]
    heads = int(own.num_attention_heads)
    kv_heads = int(getattr(own, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(own, "head_dim", None) or own.hidden_size // heads)


def _kinds(model: torch.nn.Module, config: PreTrainedConfig) -> Iterator[tuple[LayerKind, int]]:
    layers = new_cache(model).layers
    for index, (layer, kind) in enumerate(zip(layers, hf_layers.windows(config, layers), strict=True)):
        known = hf_layers.keeps(index, layer)
        if known.state or known.indexed or not known.rows or kind[0] is LayerKind.CHUNKED:
            raise UnsupportedError(
                f"layer {index} ({type(layer).__name__}, {kind[0].name}): live caches hold full and sliding attention "
                "with keys and values of its own"
            )
        yield kind
