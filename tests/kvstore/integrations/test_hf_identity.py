"""Identity of a live model: stable while nothing changes, different as soon as anything does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import warmkv
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import Identity, LayerKind, PlaneFormat, first_difference

MakeModel = Callable[..., LlamaForCausalLM]
MakeTokenizer = Callable[..., PreTrainedTokenizerFast]
Change = Callable[[LlamaForCausalLM], object]


def test_fields_describe_the_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    identity = ModelIdentity(model, tokenizer).now()
    assert len(identity.layers) == 3
    for layer in identity.layers:
        assert layer.kind is LayerKind.FULL
        assert [(plane.format, plane.row_shape) for plane in layer.planes] == [(PlaneFormat.F32, (2, 16))] * 2
    assert (identity.compute_dtype, identity.attention, identity.rope.kind) == ("float32", "sdpa", "default")
    assert identity.tenant == b"none" and identity.adapters == ()


def test_identity_is_equal_for_equal_models(make_model: MakeModel, make_tokenizer: MakeTokenizer) -> None:
    one = ModelIdentity(make_model(), make_tokenizer()).now()
    other = ModelIdentity(make_model(), make_tokenizer(), weights="version").now()
    assert first_difference(one, other) is None


def _last_weight(model: LlamaForCausalLM) -> torch.Tensor:
    return model.lm_head.weight


def _in_place(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        _last_weight(model)[3, 3] += 1e-3


def _through_data(model: LlamaForCausalLM) -> None:
    _last_weight(model).data[3, 3] += 1e-3


def _through_numpy(model: LlamaForCausalLM) -> None:
    _last_weight(model).detach().numpy()[3, 3] += 1e-3


def _buffer(model: LlamaForCausalLM) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def _replaced(model: LlamaForCausalLM) -> None:
    model.lm_head.weight = torch.nn.Parameter(_last_weight(model) * 2)


def _untied(model: LlamaForCausalLM) -> None:
    model.lm_head = torch.nn.Linear(48, 96, bias=True)


CHANGES: list[tuple[Change, str]] = [
    (_in_place, "parameters"),
    (_through_data, "parameters"),
    (_through_numpy, "parameters"),
    (_buffer, "parameters"),
    (_replaced, "parameters"),
    (_untied, "parameters"),
    (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0), "settings"),
    (lambda model: setattr(model.config, "attention_bias", True), "settings"),
    (lambda model: model.set_attn_implementation("eager"), "attention"),
    (lambda model: model.to(torch.bfloat16), "layers"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_any_change_between_two_calls_is_another_identity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, change: Change, field: str
) -> None:
    source = ModelIdentity(model, tokenizer)
    before = source.now()
    change(model)
    after = source.now()
    assert before.fields()[field] != after.fields()[field]
    assert before.canonical() != after.canonical()


def test_dtype_changes_formats_and_compute_dtype(make_model: MakeModel, tokenizer: PreTrainedTokenizerFast) -> None:
    found = {
        dtype: ModelIdentity(make_model(dtype=dtype), tokenizer).now() for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    assert [identity.layers[0].planes[0].format for identity in found.values()] == [
        PlaneFormat.F32,
        PlaneFormat.F16,
        PlaneFormat.BF16,
    ]
    assert len({identity.compute_dtype for identity in found.values()}) == 3


def test_head_size_is_the_one_seen_not_the_one_guessed(make_model: MakeModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(hidden_size=48, num_attention_heads=4, num_key_value_heads=1, head_dim=20)
    assert ModelIdentity(model, tokenizer).now().layers[0].planes[0].row_shape == (1, 20)


def test_salt_separates_tenants(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    tenants = {ModelIdentity(model, tokenizer, salt=salt).now().tenant for salt in (None, "", "a", "b")}
    assert len(tenants) == 4
    assert ModelIdentity(model, tokenizer, salt="a").now() == ModelIdentity(model, tokenizer, salt=b"a").now()


def test_tokenizer_changes_are_noticed(model: LlamaForCausalLM, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    source = ModelIdentity(model, tokenizer)
    found = [source.now().tokenizer]
    tokenizer.chat_template = tokenizer.chat_template + " "
    found.append(source.now().tokenizer)
    tokenizer.add_tokens(["new"])
    found.append(source.now().tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)]
    )
    found.append(source.now().tokenizer)
    assert len(set(found)) == len(found)


def test_tokenizing_with_padding_or_truncation_changes_nothing(model: LlamaForCausalLM, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(pad_token="w0")
    before = ModelIdentity(model, tokenizer).now().tokenizer
    tokenizer(["w1", "w1 w2 w3"], padding=True, truncation=True, max_length=2)
    assert ModelIdentity(model, tokenizer).now().tokenizer == before


def test_generating_changes_nothing(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    source = ModelIdentity(model, tokenizer)
    before = source.now()
    ids = torch.tensor([[3, 4, 5]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True)
    assert source.now() == before and source.now(trust_version=True) == before


SCRIPT = """
import sys, torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
torch.manual_seed(3)
sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
model.model.layers[0].words = {"b", "a", "c"}
words = {f"w{index}": index for index in range(16)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
source = ModelIdentity(model, tokenizer)
first = source.now()
model.generate(torch.tensor([[1, 2, 3]]), attention_mask=torch.ones(1, 3), max_new_tokens=2)
assert source.now() == first
print(first.canonical().hex())
"""


def test_identity_is_the_same_in_another_process() -> None:
    def run(seed: str) -> str:
        home = str(Path(warmkv.__file__).parents[1])
        environment = {"PYTHONPATH": home, "PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.split()[-1]

    assert run("1") == run("2")


def test_autocast_is_refused(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    source = ModelIdentity(model, tokenizer)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="autocast"):
        source.now()


def test_models_on_several_devices_are_refused(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match="2 devices"):
        ModelIdentity(model, tokenizer).now()


def test_every_kind_of_model_has_an_identity(
    kind: str, make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    one, other = (ModelIdentity(make_tiny(kind), tokenizer).now() for _ in range(2))
    assert first_difference(one, other) is None
    assert Identity.from_canonical(one.canonical()) == one
    assert ModelIdentity(make_tiny(kind, seed=1), tokenizer).now() != one


def test_generating_changes_no_kind_of_model(tiny: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    source = ModelIdentity(tiny, tokenizer)
    before = source.now()
    ids = torch.tensor([[3, 4, 5]])
    tiny.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert source.now() == before and source.now(trust_version=True) == before


def test_another_window_is_another_identity(
    make_tiny: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> None:
    model = make_tiny("gemma3")
    before = ModelIdentity(model, tokenizer).now()
    model.config.sliding_window = 17
    after = ModelIdentity(model, tokenizer).now()
    assert before.layers[0].window == 16 and after.layers[0].window == 17


def test_layers_of_a_models_own_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnLayer(DynamicLayer):  # type: ignore[misc]
        pass

    monkeypatch.setitem(DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OwnLayer)
    with pytest.raises(UnsupportedError, match="layer 0 keeps its state as OwnLayer"):
        ModelIdentity(model, tokenizer).now()


def test_encoder_decoder_models_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    model = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=96)).eval()
    with pytest.raises(UnsupportedError, match="encoder-decoder"):
        ModelIdentity(model, tokenizer).now()
