"""Tiny random models, one for each kind of layer a cache can have. Imported by path: by conftest,
and by the processes that tests start."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as t

VOCABULARY = 96
#: Rows a window or a chunk spans, and the kernel of the longest convolution.
WINDOW, KERNEL = 16, 4
_IDS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512,
}  # fmt: skip
_NO_HEAD = {name: size for name, size in _SIZES.items() if name != "head_dim"}
_LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": KERNEL,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def _llama() -> t.PreTrainedModel:
    return t.LlamaForCausalLM(t.LlamaConfig(**_IDS, **_SIZES, num_hidden_layers=3))


def _lfm2() -> t.PreTrainedModel:
    types = ["conv", "full_attention", "conv"]
    return t.Lfm2ForCausalLM(t.Lfm2Config(**_IDS, **_SIZES, num_hidden_layers=3, layer_types=types, conv_L_cache=3))


def _qwen3_next() -> t.PreTrainedModel:
    types = ["linear_attention", "linear_attention", "full_attention"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(**_IDS, **_SIZES, **_LINEAR, **experts, num_hidden_layers=3, layer_types=types)
    )


def _mamba() -> t.PreTrainedModel:
    return t.MambaForCausalLM(t.MambaConfig(**_IDS, hidden_size=32, num_hidden_layers=2, state_size=8, conv_kernel=KERNEL))


def _mamba2() -> t.PreTrainedModel:
    sizes = {"state_size": 16, "num_heads": 8, "head_dim": 8, "n_groups": 1, "conv_kernel": KERNEL, "chunk_size": 8}
    return t.Mamba2ForCausalLM(t.Mamba2Config(**_IDS, **sizes, hidden_size=32, num_hidden_layers=2))


def _falcon_h1() -> t.PreTrainedModel:
    return t.FalconH1ForCausalLM(
        t.FalconH1Config(**_IDS, **_SIZES, **_MAMBA, num_hidden_layers=2, mamba_d_ssm=64, mamba_d_conv=KERNEL)
    )


def _nemotron_h() -> t.PreTrainedModel:
    types = ["mamba", "attention", "moe", "mamba"]
    experts = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
        "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    mamba = {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 1,
        "conv_kernel": KERNEL,
        "chunk_size": 8,
    }
    return t.NemotronHForCausalLM(
        t.NemotronHConfig(**_IDS, **_SIZES, **mamba, **experts, num_hidden_layers=4, layers_block_type=types)
    )


def _bamba() -> t.PreTrainedModel:
    """Does not count positions on from its cache: whoever feeds it has to."""
    return t.BambaForCausalLM(
        t.BambaConfig(**_IDS, **_SIZES, **_MAMBA, num_hidden_layers=2, mamba_d_conv=KERNEL, attn_layer_indices=[1])
    )


def _jamba() -> t.PreTrainedModel:
    kinds = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2}
    return t.JambaForCausalLM(t.JambaConfig(**_IDS, **_NO_HEAD, **kinds, num_hidden_layers=2, mamba_d_state=8, mamba_dt_rank=4))


def _inkling() -> t.PreTrainedModel:
    window = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window": WINDOW}
    experts = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    own = {"conv_kernel_size": KERNEL, "rel_extent": 64, "logits_mup_width_multiplier": 1.0}
    types = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
    return t.InklingForCausalLM(
        t.InklingTextConfig(**_IDS, **_SIZES, **window, **experts, **own, num_hidden_layers=3, layer_types=types)
    )


def _gemma3() -> t.PreTrainedModel:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(**_IDS, **_SIZES, num_hidden_layers=3, sliding_window=WINDOW, layer_types=types)
    )


def _gemma3n() -> t.PreTrainedModel:
    own = {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 8, "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 6, "num_kv_shared_layers": 2,
    }  # fmt: skip
    types = ["sliding_attention", "full_attention"] * 3
    return t.Gemma3nForCausalLM(
        t.Gemma3nTextConfig(**_IDS, **_SIZES, **own, num_hidden_layers=6, sliding_window=WINDOW, layer_types=types)
    )


def _llama4() -> t.PreTrainedModel:
    own = {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [1, 1, 0]}
    return t.Llama4ForCausalLM(t.Llama4TextConfig(**_IDS, **_SIZES, **own, num_hidden_layers=3))


def _deepseek_v32() -> t.PreTrainedModel:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    # Many index heads, so that random weights score no two tokens alike and "the best 8" is well defined.
    index = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8}
    sizes = {**_NO_HEAD, "num_key_value_heads": 4}
    return t.DeepseekV32ForCausalLM(t.DeepseekV32Config(**_IDS, **sizes, **latent, **experts, **index, num_hidden_layers=2))


MODELS: dict[str, Callable[[], t.PreTrainedModel]] = {
    "llama": _llama, "deepseek_v32": _deepseek_v32, "gemma3": _gemma3, "gemma3n": _gemma3n, "llama4": _llama4, "lfm2": _lfm2,
    "mamba": _mamba, "mamba2": _mamba2, "qwen3_next": _qwen3_next, "bamba": _bamba, "jamba": _jamba, "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1, "inkling": _inkling,
}  # fmt: skip
#: Families that start their recurrence anew when they are fed several tokens on a stored state.
SINGLY = frozenset({"mamba", "jamba"})
#: Families all of whose layers keep all their rows.
ANYWHERE = frozenset({"llama", "deepseek_v32"})


def make(kind: str, seed: int = 0) -> t.PreTrainedModel:
    """A model of one kind with random weights, larger than the library's, so that every state has
    a say in the logits; the same ones for the same seed in any process."""
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "A_log" not in name:
                parameter.mul_(1.5)
    return model
