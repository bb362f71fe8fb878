"""LoRA adapters: content and scale count, names do not, what is off is not there."""

from __future__ import annotations

from collections.abc import Callable

import peft
import pytest
import torch
from transformers import LlamaForCausalLM

from warmkv.kvstore.integrations.hf_adapters import active_adapters
from warmkv.schema.errors import UnsupportedError

MakeModel = Callable[..., LlamaForCausalLM]


def wrap(model: LlamaForCausalLM, seed: int = 1, name: str = "default", **changes: object) -> peft.PeftModel:
    """``model`` with a LoRA adapter of random, non-zero content."""
    torch.manual_seed(seed)
    settings: dict[str, object] = dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, peft.LoraConfig(**{**settings, **changes}), adapter_name=name).eval()


def test_a_model_without_adapters_has_none(model: LlamaForCausalLM) -> None:
    assert active_adapters(model) == ()


def test_content_and_scale_count(make_model: MakeModel) -> None:
    one = active_adapters(wrap(make_model()))
    assert len(one) == 1 and one[0].scale == 2.0
    assert active_adapters(wrap(make_model())) == one
    other = active_adapters(wrap(make_model(), seed=2))
    assert other[0].digest != one[0].digest
    rescaled = active_adapters(wrap(make_model(), lora_alpha=8))
    assert (rescaled[0].digest, rescaled[0].scale) == (one[0].digest, 4.0)


def test_scales_that_differ_by_layer_count(make_model: MakeModel) -> None:
    one = active_adapters(wrap(make_model()))
    mixed = active_adapters(wrap(make_model(), alpha_pattern={"v_proj": 16}))
    assert mixed[0].digest != one[0].digest


def test_the_name_does_not_count(make_model: MakeModel) -> None:
    assert active_adapters(wrap(make_model(), name="blue")) == active_adapters(wrap(make_model(), name="red"))


def test_disabled_and_merged_adapters_are_not_in_force(make_model: MakeModel) -> None:
    model = wrap(make_model())
    with model.disable_adapter():
        assert active_adapters(model) == ()
    assert len(active_adapters(model)) == 1
    model.merge_adapter()
    assert active_adapters(model) == ()
    model.unmerge_adapter()
    assert len(active_adapters(model)) == 1


def test_order_of_several_adapters_is_kept(make_model: MakeModel) -> None:
    model = wrap(make_model(), name="one")
    torch.manual_seed(9)
    model.add_adapter("two", peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["one", "two"])
    forward = active_adapters(model)
    model.base_model.set_adapter(["two", "one"])
    assert len(forward) == 2 and active_adapters(model) == forward[::-1]


def test_adapters_added_without_a_wrapper_are_found(make_model: MakeModel) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, make_model())
    assert len(active_adapters(model.eval())) == 1


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "only LoRA"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "only LoRA"),
        (peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5]), "later tokens"),
    ],
    ids=["ia3", "prefix", "activated"],
)
def test_other_adapters_are_refused(make_model: MakeModel, config: peft.PeftConfig, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        active_adapters(peft.get_peft_model(make_model(), config))
