"""Tiny random models of the families a live cache serves, with weights large enough that attention decides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as t

VOCABULARY = 96
WINDOW = 16
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def _llama() -> t.PreTrainedModel:
    return t.LlamaForCausalLM(t.LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}))


def _qwen3() -> t.PreTrainedModel:
    return t.Qwen3ForCausalLM(t.Qwen3Config(**{**_SIZES, "num_key_value_heads": 1}))


def _gemma2() -> t.PreTrainedModel:
    own = {"sliding_window": WINDOW, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 9, "layer_types": _TYPES}
    return t.Gemma2ForCausalLM(t.Gemma2Config(**_SIZES, **own))


def _gemma3() -> t.PreTrainedModel:
    """Its soft cap is a setting that the library does not apply."""
    own = {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 9, "layer_types": _TYPES}
    return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_SIZES, **own))


def _gpt_oss() -> t.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    own = {
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": _TYPES,
        "rope_parameters": rope,
    }
    return t.GptOssForCausalLM(t.GptOssConfig(**_SIZES, **own))


MODELS: dict[str, Callable[[], t.PreTrainedModel]] = {
    "llama": _llama, "qwen3": _qwen3, "gemma2": _gemma2, "gemma3": _gemma3, "gpt_oss": _gpt_oss
}  # fmt: skip


def make(kind: str, seed: int = 0) -> t.PreTrainedModel:
    """A model of one kind, the same one for the same seed in any process."""
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=2.0)
            elif any(part in name for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
                parameter.mul_(14.0)
    return model
