"""The attention function of live caches, as transformers calls it: ``attn_implementation="warmkv"``.

Keys and values were handed to the live cache a moment before; what the model passes on is its own
tensors with a mark that names the live layer. So nothing is joined or copied on the way, and no mask
is built: rows of one sequence that is not padded are causal by their places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol

import torch
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from warmkv.schema.errors import UnsupportedError

#: What models are told to attend with.
NAME = "warmkv"
_MARK = "_warmkv_live_layer"


#: What models hand on to every attention and none of ours need: it says nothing about the answer.
_HARMLESS = frozenset(
    "cache_position output_attentions output_hidden_states output_router_logits return_dict use_cache".split()
)  # fmt: skip


class Attending(Protocol):
    """What keys are handed to, and queries then (`hf_live_layers.LiveLayer`)."""

    index: int

    def require(
        self, scaling: float | None, softcap: float | None, window: int | None, sinks: torch.Tensor | None
    ) -> None: ...  # fmt: skip

    def require_call(
        self, module: torch.nn.Module, value: torch.Tensor, position_ids: torch.Tensor | None
    ) -> None: ...  # fmt: skip

    def attend(self, query: torch.Tensor) -> torch.Tensor: ...


def register() -> None:
    """Make the name known to transformers. Importing `hf_live` does it."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, no_mask)


def attend_with_live(model: torch.nn.Module) -> torch.nn.Module:
    """Switch ``model``, in place, to the attention of live caches, and return it. Raises
    UnsupportedError where its code does not let the attention be chosen."""
    model.set_attn_implementation(NAME)
    if chosen(model) != NAME:
        raise UnsupportedError(f"{type(model).__name__} does not let its attention be chosen")
    return model


def chosen(model: torch.nn.Module) -> str:
    """The attention the text part of a model uses."""
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def mark(tensor: torch.Tensor, layer: Attending) -> None:
    """Note on the keys of one call which live layer they were handed to."""
    setattr(tensor, _MARK, layer)


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None, position_ids: torch.Tensor | None = None, is_causal: bool | None = None, **more: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend ``query`` [1, heads, tokens, size] over everything the live layer holds and the keys and
    values of this call. Returns [1, tokens, heads, value size] of the query's dtype, and no weights.

    Raises UnsupportedError for a mask, for dropout, without a live cache, and for what a model asks of
    attention that is not known here (biases, choices of rows, looking ahead); RecordError where the call
    does not fit the layer's plan, or its rows are not the next ones of the sequence."""
    live: Attending | None = getattr(key, _MARK, None)
    if live is None:
        raise UnsupportedError(
            f"attention {NAME!r} works on a live cache: pass cache=LiveCache(model), or choose another attn_implementation"
        )
    if attention_mask is not None:
        raise UnsupportedError(f"layer {live.index}: a mask of shape {tuple(attention_mask.shape)}; live caches are causal only")
    if dropout and module.training:
        raise UnsupportedError(f"layer {live.index}: dropout {dropout}; live caches are for inference, call model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(f"layer {live.index}: attention that looks ahead; live caches are causal only")
    for name in sorted(set(more) - _HARMLESS):
        if more[name] is not None and more[name] is not False:
            raise UnsupportedError(f"layer {live.index}: attention with {name}, which live caches do not know")
    live.require(scaling, softcap, sliding_window, s_aux)
    live.require_call(module, value, position_ids)
    return live.attend(query), None


def no_mask(
    batch_size: int, q_length: int, kv_length: int, *_: object, attention_mask: torch.Tensor | None = None,
    mask_function: Callable[..., object] = causal_mask_function, use_vmap: bool = False, **__: object,
) -> None:  # fmt: skip
    """In place of building a mask: refuse those that would say anything. Raises UnsupportedError for
    batches, padding and masks of a model's own: all but the library's causal one and windows of it."""
    if batch_size != 1:
        raise UnsupportedError(f"a batch of {batch_size}; a live cache holds one sequence")
    if use_vmap or not _causal(mask_function):
        raise UnsupportedError("the model adds a mask of its own (images, prefixes seen both ways); live caches are causal only")
    if attention_mask is not None and not bool(attention_mask.all()):
        hidden = int((~attention_mask.bool()).sum())
        raise UnsupportedError(f"{hidden} of {attention_mask.shape[-1]} tokens are padding; a live cache holds one sequence")


def _causal(mask_function: Callable[..., object]) -> bool:
    """Whether this is the library's causal mask, or one that a window is laid over."""
    if mask_function is causal_mask_function:
        return True
    window, both = sliding_window_causal_mask_function(1), inspect.getclosurevars(mask_function).nonlocals
    parts = both.get("mask_functions", ())
    if mask_function.__code__ is not window.__code__ or not isinstance(parts, tuple) or len(parts) != 2:
        return False
    overlay, causal = parts
    return causal is causal_mask_function and overlay.__code__ is sliding_window_overlay(1).__code__
