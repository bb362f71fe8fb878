"""Rotary regimes: served where a row depends on its position alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from warmkv.kvstore.integrations.hf_rope import rope_regime
from warmkv.schema.errors import UnsupportedError

MakeModel = Callable[..., LlamaForCausalLM]
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip


def test_default_regime_is_described(model: LlamaForCausalLM) -> None:
    regime = rope_regime(model)
    assert (regime.kind, regime.base, regime.rotary_dim, regime.original_max_tokens) == ("default", 10000.0, 16, 512)
    assert len(regime.frequencies) == 16


@pytest.mark.parametrize("parameters", [LINEAR, LLAMA3, YARN], ids=lambda item: item["rope_type"])
def test_length_independent_kinds_are_served_and_distinct(make_model: MakeModel, parameters: dict[str, object]) -> None:
    regime = rope_regime(make_model(rope_parameters=dict(parameters)))
    assert regime.kind == parameters["rope_type"]
    plain = rope_regime(make_model())
    assert regime.frequencies != plain.frequencies
    changed = rope_regime(make_model(rope_parameters={**parameters, "factor": 3.0}))
    assert regime.frequencies != changed.frequencies


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=lambda item: item["rope_type"])
def test_length_dependent_kinds_are_refused(make_model: MakeModel, parameters: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="how the sequence reached its length"):
        rope_regime(make_model(rope_parameters=dict(parameters)))


def test_unknown_kinds_are_refused_wherever_they_are_declared(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.rope_type = "spiral"
    with pytest.raises(UnsupportedError, match="'spiral' is unknown"):
        rope_regime(model)
    model.model.rotary_emb.rope_type = "default"
    model.config.rope_parameters = {"rope_type": "helix", "rope_theta": 1.0}
    with pytest.raises(UnsupportedError, match="'helix' is unknown"):
        rope_regime(model)


def test_sections_for_images_are_refused(model: LlamaForCausalLM) -> None:
    model.config.rope_parameters["mrope_section"] = [2, 3, 3]
    with pytest.raises(UnsupportedError, match="images"):
        rope_regime(model)


def test_models_without_rotary_embedding_have_none() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=32))
    assert rope_regime(model).kind == "none"


# -- regimes that differ by layer type ---------------------------------------------------

GLOBAL = {"rope_type": "default", "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}


def by_layer(full: dict[str, object], sliding: dict[str, object]) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, sliding_window=8, layer_types=["full_attention", "sliding_attention"], max_position_embeddings=512,
        rope_parameters={"full_attention": dict(full), "sliding_attention": dict(sliding)},
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def test_full_attention_speaks_for_regimes_that_differ() -> None:
    regime = rope_regime(by_layer({**GLOBAL, "rope_type": "linear", "factor": 8.0}, LOCAL))
    assert (regime.kind, regime.base, regime.rotary_dim, regime.original_max_tokens) == ("linear", 1e6, 16, 512)
    assert regime.attention_scaling == 1.0


def test_scaling_is_that_of_the_type_that_speaks() -> None:
    yarn = {**YARN, "rope_theta": 1e6}
    assert rope_regime(by_layer(yarn, LOCAL)).attention_scaling > 1.0
    assert rope_regime(by_layer(GLOBAL, yarn)).attention_scaling == 1.0


def test_every_parameter_of_every_type_counts() -> None:
    regimes = [
        rope_regime(by_layer(*pair))
        for pair in (
            (GLOBAL, LOCAL), (GLOBAL, {**LOCAL, "rope_theta": 2e4}), ({**GLOBAL, "rope_theta": 2e6}, LOCAL), (LOCAL, GLOBAL),
            (GLOBAL, {**LOCAL, "rope_type": "linear", "factor": 2.0}), (GLOBAL, {**LOCAL, "note": "kept"}), (LOCAL, LOCAL),
        )
    ]  # fmt: skip
    assert len({regime.frequencies for regime in regimes}) == len(regimes)
    assert rope_regime(by_layer(GLOBAL, LOCAL)) == regimes[0]


def test_frequencies_changed_in_memory_count() -> None:
    model = by_layer(GLOBAL, LOCAL)
    before = rope_regime(model)
    model.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)
    assert rope_regime(model).frequencies != before.frequencies
    model = by_layer(GLOBAL, LOCAL)
    model.model.rotary_emb.sliding_attention_attention_scaling = 1.5
    assert rope_regime(model).frequencies != before.frequencies


@pytest.mark.parametrize("parameters", [DYNAMIC, LONGROPE], ids=lambda item: item["rope_type"])
def test_a_length_dependent_kind_in_any_layer_is_refused(parameters: dict[str, object]) -> None:
    model = by_layer(GLOBAL, LOCAL)
    model.config.rope_parameters["sliding_attention"] = dict(parameters)
    with pytest.raises(UnsupportedError, match="how the sequence reached its length"):
        rope_regime(model)
    model = by_layer(GLOBAL, LOCAL)
    model.model.rotary_emb.rope_type["sliding_attention"] = parameters["rope_type"]
    with pytest.raises(UnsupportedError, match="how the sequence reached its length"):
        rope_regime(model)


def test_sections_for_images_in_any_layer_are_refused() -> None:
    model = by_layer(GLOBAL, LOCAL)
    model.config.rope_parameters["sliding_attention"]["mrope_section"] = [2, 3, 3]
    with pytest.raises(UnsupportedError, match="images"):
        rope_regime(model)


def test_one_set_of_parameters_has_one_kind(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.rope_type = "linear"
    with pytest.raises(UnsupportedError, match="default, linear"):
        rope_regime(model)
