"""Caches: how long they are, cut short, of kinds that are not served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, StaticCache

from warmkv.kvstore.integrations.hf_cache import cache_length, forward_argument, new_cache, shorten, to_rows
from warmkv.kvstore.integrations.hf_counted import CountedCache
from warmkv.schema.errors import RecordError, UnsupportedError

Filled = Callable[..., DynamicCache]
LogitsOf = Callable[..., torch.Tensor]
MakeTiny = Callable[..., PreTrainedModel]


@pytest.mark.parametrize("length", [40, 39, 1, 0])
def test_shorten_leaves_exactly_that_many(model: LlamaForCausalLM, filled: Filled, prompt: list[int], length: int) -> None:
    cache = filled(model, prompt)
    shorten(cache, length)
    assert cache_length(cache) == length


def test_shorten_cannot_lengthen(model: LlamaForCausalLM, filled: Filled, prompt: list[int]) -> None:
    with pytest.raises(RecordError, match="holds 40 tokens, 41"):
        shorten(filled(model, prompt), 41)


def test_indexer_keys_are_cut_with_the_rest(make_tiny: MakeTiny, logits_of: LogitsOf, prompt: list[int]) -> None:
    model = make_tiny("deepseek_v32")
    cache = new_cache(model)
    logits_of(model, prompt, cache)
    shorten(cache, 30)
    assert {layer.indexer_keys.shape[1] for layer in cache.layers} == {30}
    cache.layers[1].indexer_keys = cache.layers[1].indexer_keys[:, :29]
    with pytest.raises(RecordError, match="disagree"):
        cache_length(cache)


def test_every_kind_knows_its_length(tiny: PreTrainedModel, logits_of: LogitsOf, prompt: list[int]) -> None:
    cache = new_cache(tiny)
    assert cache_length(cache) == 0
    fed = 0
    for piece in (1, 1, 14, 1, 3, 20):
        logits_of(tiny, prompt[fed : fed + piece], cache, fed)
        fed += piece
        assert cache_length(cache) == fed


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


def test_a_layer_without_state_beside_others_with_rows_is_an_error(
    make_tiny: MakeTiny, logits_of: LogitsOf, prompt: list[int]
) -> None:
    model = make_tiny("lfm2")
    cache = new_cache(model)
    logits_of(model, prompt, cache)
    cache.layers[2].has_previous_state[0] = False
    with pytest.raises(RecordError, match="40 tokens, layer 2 has no state"):
        cache_length(cache)


def test_a_window_that_lost_rows_it_should_have_is_an_error(make_tiny: MakeTiny, logits_of: LogitsOf, prompt: list[int]) -> None:
    model = make_tiny("gemma3")
    cache = new_cache(model)
    logits_of(model, prompt, cache)
    cache.layers[0].keys = cache.layers[0].keys[:, :, 1:]
    with pytest.raises(RecordError, match="layer 0 has seen 40 tokens and holds \\[14, 15\\] rows"):
        cache_length(cache)


def test_a_window_that_records_its_past_hands_out_all_of_it(make_tiny: MakeTiny, logits_of: LogitsOf, prompt: list[int]) -> None:
    model = make_tiny("gemma3")
    cache = new_cache(model)
    cache.activate_past_recording()
    logits_of(model, prompt, cache)
    assert [record.first for record in to_rows(cache)] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_foreign_cache_without_rows_has_no_length(
    make_tiny: MakeTiny, logits_of: LogitsOf, prompt: list[int], kind: str
) -> None:
    model = make_tiny(kind)
    assert isinstance(new_cache(model), CountedCache)
    foreign = DynamicCache(config=model.config)
    logits_of(model, prompt[:1], CountedCache(config=model.config))
    with pytest.raises(RecordError, match="does not tell how many tokens"):
        cache_length(foreign)


def test_caches_of_other_kinds_are_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(UnsupportedError, match="StaticLayer"):
        cache_length(StaticCache(config=model.config, max_cache_len=8))  # type: ignore[arg-type]
