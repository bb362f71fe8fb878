"""Rotary regimes: served where a row depends on its position alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

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
