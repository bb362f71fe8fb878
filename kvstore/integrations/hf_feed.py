"""Feeding tokens to a model on top of a cache, by itself and through its `generate`.

`generate` finds out by lengths which tokens of a prompt a cache already holds. A cache without
rows has no length, so models of convolution and recurrence only would be fed their whole prompt
again on top of it, silently. They get the embeddings of the new tokens instead, beside the ids
of the whole prompt, which processors and criteria look at.
"""

from __future__ import annotations

import copy
import inspect
from typing import cast

import torch
from transformers import DynamicCache, GenerationConfig

from warmkv.kvstore.integrations.hf_cache import forward_argument, generate_argument
from warmkv.kvstore.integrations.hf_counted import CountedCache
from warmkv.kvstore.integrations.hf_request import Options, require_absent, setting

#: Options that read what `generate` is fed as if it were the whole prompt, or feed it their way.
_NOT_BESIDE_EMBEDDINGS = ("prefill_chunk_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "guidance_scale")


def feed(model: torch.nn.Module, cache: DynamicCache, ids: torch.Tensor, start: int, *, logits: int = 1) -> object:
    """Run ``ids`` [1, tokens] on top of ``cache``, which holds ``start`` tokens, as `generate`
    would: positions are spelled out, because not every model counts them on from the cache.

    The model's output, with logits of the last ``logits`` positions (of all, if it knows no
    better)."""
    end = start + int(ids.shape[1])
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, object] = {"input_ids": ids, "use_cache": True, forward_argument(model): cache}
    if "position_ids" in accepted:
        options["position_ids"] = torch.arange(start, end, device=ids.device).unsqueeze(0)
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = logits
    if not isinstance(cache, CountedCache):  # models without attention multiply their input by the mask as it is
        options["attention_mask"] = torch.ones((1, end), dtype=torch.long, device=ids.device)
    return cast(object, model(**options))


def feed_singly(model: torch.nn.Module, cache: DynamicCache, ids: torch.Tensor, start: int) -> None:
    """`feed`, one token after the other."""
    for at in range(int(ids.shape[1])):
        feed(model, cache, ids[:, at : at + 1], start + at)


def generate_arguments(
    model: torch.nn.Module,
    cache: DynamicCache,
    ids: torch.Tensor,
    start: int,
    options: Options,
    defaults: GenerationConfig | None,
) -> dict[str, object]:
    """Arguments for `generate` to go on after the first ``start`` of ``ids`` [1, tokens], which are
    what ``cache`` holds; at least one token is left."""
    arguments: dict[str, object] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
    arguments[generate_argument(model)] = cache
    if isinstance(cache, CountedCache) and start:
        embed = cast(torch.nn.Module, model.get_input_embeddings())
        with torch.no_grad():
            arguments["inputs_embeds"] = embed(ids[:, start:])
        arguments["attention_mask"] = torch.ones_like(ids[:, start:])
        arguments |= _lengths(options, defaults, int(ids.shape[1]))
    return arguments


def require_id_free(options: Options, defaults: GenerationConfig | None) -> None:
    """UnsupportedError for options that models without rows cannot be served with."""
    require_absent(_NOT_BESIDE_EMBEDDINGS, options, defaults, "models without attention are fed embeddings")


def _lengths(options: Options, defaults: GenerationConfig | None, prompt_tokens: int) -> dict[str, object]:
    """Limits on the whole sequence as limits on new tokens: the library would take the length of
    the embeddings off the former."""
    found: dict[str, object] = {}
    for whole, new in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        limit = setting(whole, options, defaults)
        if isinstance(limit, int) and limit and setting(new, options, defaults) is None:
            found |= {whole: None, new: limit - prompt_tokens if whole == "max_length" else max(0, limit - prompt_tokens)}
    given = options.get("generation_config")
    if not found or given is None:
        return found
    given = copy.deepcopy(given)
    for name, value in found.items():
        setattr(given, name, value)
    return {"generation_config": given}
