"""Settings: whatever can change a model's numbers without being a tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from warmkv.kvstore.integrations.hf_settings import observe_settings
from warmkv.schema.errors import UnsupportedError

Change = Callable[[LlamaForCausalLM], None]


def _set(path: str, value: object) -> Change:
    def change(model: LlamaForCausalLM) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    change.__name__ = path
    return change


@dataclass
class Options:
    scale: float


ATTENTION = "model.layers.1.self_attn"
CHANGES = [
    _set(f"{ATTENTION}.scaling", 0.5),
    _set(f"{ATTENTION}.steer", True),
    _set(f"{ATTENTION}._steer", 1),
    _set("model.norm.variance_epsilon", 1e-5),
    _set("model.rotary_emb.attention_scaling", 1.5),
    _set("model.layers.0.table", {"a": [1, (2.0, float("inf"))], "b": {3}}),
    _set("model.layers.0.options", Options(2.0)),
    _set("model.layers.0.options", SimpleNamespace(scale=2.0)),
    _set("model.layers.0.function", torch.nn.functional.relu),
    _set("model.layers.0.function", functools.partial(torch.clamp, max=3)),
    _set("model.layers.0.dtype_of_norm", torch.float64),
    _set("model.layers.0.mlp.act_fn", nn.ReLU()),
    _set("model.layers.0.extra", [nn.Linear(2, 2)]),
    lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    _set("model.layers.0._compiled_call_impl", len),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_switch_changes_the_settings(model: LlamaForCausalLM, change: Change) -> None:
    before = observe_settings(model).settings
    change(model)
    assert observe_settings(model).settings != before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Options(1.0), Options(2.0)),
        (SimpleNamespace(scale=1), SimpleNamespace(scale=2)),
        (functools.partial(torch.clamp, max=1), functools.partial(torch.clamp, max=2)),
        (lambda x: x + 1, lambda x: x + 2),
        (nn.ReLU(), nn.GELU()),
        ([nn.Dropout(0.1)], [nn.Dropout(0.2)]),
        (True, 1),
        (1, 1.0),
        ("1", 1),
        (float("nan"), float("inf")),
        (None, False),
    ],
)
def test_values_that_work_differently_differ(model: LlamaForCausalLM, one: object, other: object) -> None:
    found = set()
    for value in (one, other):
        model.model.layers[0].knob = value
        if isinstance(value, nn.Module):
            value.eval()
        if isinstance(value, list):
            value[0].eval()
        found.add(observe_settings(model).settings)
        del model.model.layers[0].knob
    assert len(found) == 2


def test_tensors_nobody_registered_are_found(model: LlamaForCausalLM) -> None:
    model.model.layers[0].vectors = [torch.zeros(2), {"deep": torch.ones(2)}]
    model.model.layers[0].hidden = [nn.Linear(2, 2, bias=False)]
    names = {name for name, _ in observe_settings(model).tensors}
    assert {".model.layers.0.vectors.0", ".model.layers.0.vectors.1.deep", ".model.layers.0.hidden.0.weight"} <= names


def test_parameters_and_buffers_are_all_there(make_model: Callable[..., LlamaForCausalLM]) -> None:
    model = make_model(tie_word_embeddings=True)
    names = {name.removeprefix(".") for name, _ in observe_settings(model).tensors}
    assert names == {n for n, _ in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}


def test_running_the_model_leaves_the_settings_alone(model: LlamaForCausalLM) -> None:
    before = observe_settings(model).settings
    ids = torch.tensor([[3, 4, 5]])
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=True)
    model(ids, output_hidden_states=True, output_attentions=True)
    assert observe_settings(model).settings == before


def test_saving_and_loading_leaves_the_settings_alone(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    loaded = LlamaForCausalLM.from_pretrained(folder).eval()
    assert observe_settings(loaded).settings == observe_settings(model).settings


def test_process_wide_switches_count(model: LlamaForCausalLM) -> None:
    before, precision = observe_settings(model).settings, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert observe_settings(model).settings != before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_a_patched_class_counts(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = observe_settings(model).settings
    kind = type(model.model.norm)
    original = kind.forward

    @functools.wraps(original)
    def patched(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return original(self, hidden) * 2

    monkeypatch.setattr(kind, "forward", patched)
    assert observe_settings(model).settings != before


def _training(model: LlamaForCausalLM) -> None:
    model.config.attention_dropout = 0.1
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()


def _dropout_module(model: LlamaForCausalLM) -> None:
    model.model.layers[0].drop = nn.Dropout(0.1).train()


REFUSED: list[tuple[Change, str]] = [
    (lambda model: model.model.layers[0].register_forward_hook(lambda *_: None) and None, "forward hooks"),
    (lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None) and None, "forward hooks"),
    (lambda model: setattr(model.model.norm, "forward", lambda x: x), "forward replaced"),
    (lambda model: setattr(model.model.layers[2].self_attn, "is_causal", False), "later tokens"),
    (_training, "training mode"),
    (_dropout_module, "training mode"),
]


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_cannot_be_noted_is_refused(model: LlamaForCausalLM, change: Change, sentence: str) -> None:
    change(model)
    with pytest.raises(UnsupportedError, match=sentence):
        observe_settings(model)


def test_training_mode_without_dropout_is_served(model: LlamaForCausalLM) -> None:
    before = observe_settings(model).settings
    assert observe_settings(model.train()).settings == before
