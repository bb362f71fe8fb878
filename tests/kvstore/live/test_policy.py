"""Formats by class of layer: who decides, in which order, and what comes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge.specs import layer_specs
from warmkv.kvstore.client import environment
from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.compression import Compression, compression_of
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, modes
from warmkv.kvstore.live.policy import KEY_FORMATS, VALUE_FORMATS, Choice, FormatPolicy, LayerClass, Serving, classes_of
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

FULL = LayerPlan(LayerKind.FULL, 8, 2, 64, 64, importance=False)
NEAR = replace(FULL, kind=LayerKind.SLIDING, window=512)
SHARED = LayerPlan(LayerKind.SHARED, shared_with=0)
LINEAR = LayerPlan(LayerKind.RECURRENT, state_size=8, conv=ConvPlan(4, history=0))
GEMMA = ModelPlan((NEAR, FULL, NEAR, SHARED))
PLAIN = ModelPlan((FULL, FULL, LINEAR))

BASE = Compression(RowFormat.Q8_0, RowFormat.Q5_1)
FP8 = Compression(RowFormat.FP8, RowFormat.FP8)
F16 = Compression(RowFormat.F16, RowFormat.F16)
CLASSES = tuple(LayerClass)


def written(plan: ModelPlan) -> list[tuple[RowFormat, RowFormat]]:
    return [(layer.key_format, layer.value_format) for layer in plan.layers if layer.kind in (LayerKind.FULL, LayerKind.SLIDING)]


def test_formats_take_the_bytes_of_the_source_per_32_channels() -> None:
    block = LayerPlan(LayerKind.FULL, 1, 1, 32, 32, importance=False)
    keys = {name: sizing.key_bytes(replace(block, key_format=format_)) for name, format_ in KEY_FORMATS.items()}
    values = {name: sizing.value_bytes(replace(block, value_format=format_)) for name, format_ in VALUE_FORMATS.items()}
    assert keys == {"q8_0": 34, "fp8": 32}
    assert values == {"q5_1": 24, "q4_0": 18, "fp8": 32}


def test_classes_follow_from_the_plan() -> None:
    ordinary, wide, near = LayerClass.ORDINARY, LayerClass.GLOBAL, LayerClass.WINDOWED
    assert classes_of(GEMMA) == (near, wide, near, ordinary)
    assert classes_of(PLAIN) == (ordinary,) * 3
    assert classes_of(ModelPlan((NEAR, NEAR))) == (ordinary, ordinary)


@pytest.mark.parametrize("serving, near", [(Serving.PLAIN, FP8), (Serving.SPECULATIVE, BASE)])
def test_serving_keeps_global_rows_in_fp8_and_windowed_ones_where_nothing_is_drafted(serving: Serving, near: Compression) -> None:
    policy = FormatPolicy(serving=serving)
    assert [policy.compression(layer_class) for layer_class in CLASSES] == [BASE, FP8, near]
    sides = near.keys, near.values
    assert written(policy.applied(GEMMA)) == [sides, (RowFormat.FP8, RowFormat.FP8), sides]
    assert written(policy.applied(PLAIN)) == [(RowFormat.Q8_0, RowFormat.Q5_1)] * 2


@pytest.mark.parametrize("layer_class, serving", list(product(CLASSES, Serving)))
def test_an_explicit_choice_wins_over_the_model_and_the_model_over_serving(layer_class: LayerClass, serving: Serving) -> None:
    field = {LayerClass.ORDINARY: "ordinary", LayerClass.GLOBAL: "global_", LayerClass.WINDOWED: "windowed"}[layer_class]
    tq = Compression.turboquant()
    others = [other for other in CLASSES if other is not layer_class]
    nobody = FormatPolicy(serving=serving)
    model = replace(nobody, model=Choice(**{field: F16}))
    explicit = replace(model, explicit=Choice(**{field: tq}))
    assert model.compression(layer_class) == F16
    assert explicit.compression(layer_class) == tq
    assert replace(model, explicit=Choice(**{field: BASE})).compression(layer_class) == BASE
    for policy in (model, explicit):
        assert [policy.compression(other) for other in others] == [nobody.compression(other) for other in others]


@pytest.mark.parametrize("keys, values", list(product(["", *KEY_FORMATS], ["", *VALUE_FORMATS])))
def test_names_make_the_base(keys: str, values: str) -> None:
    policy = FormatPolicy.named(keys=keys, values=values)
    expected = KEY_FORMATS[keys or "q8_0"], VALUE_FORMATS[values or "q5_1"]
    assert (policy.base.keys, policy.base.values) == expected
    assert written(policy.applied(PLAIN)) == [expected] * 2
    assert policy.compression(LayerClass.GLOBAL) == FP8


@pytest.mark.parametrize("name, keys, values", modes(rotated=True, blocked=True))
def test_a_class_is_named_by_any_mode(name: str, keys: RowFormat, values: RowFormat) -> None:
    policy = FormatPolicy.named(ordinary=name, global_="base", windowed=name, values="q4_0")
    assert written(policy.applied(GEMMA))[0] == written(policy.applied(PLAIN))[0] == (keys, values)
    assert policy.compression(LayerClass.GLOBAL) == Compression(RowFormat.Q8_0, RowFormat.Q4_0)


@pytest.mark.parametrize(
    "names, known",
    [
        ({"keys": "q5_1"}, "q8_0, fp8"),
        ({"keys": "f32"}, "q8_0, fp8"),
        ({"values": "q8_0"}, "q5_1, q4_0, fp8"),
        ({"global_": "yes"}, "global layers.*q8_0/q5_1.*base"),
        ({"windowed": "1"}, "windowed layers.*fp8.*base"),
        ({"ordinary": "FP8"}, "ordinary layers.*fp8.*base"),
    ],
)
def test_unknown_names_are_refused_with_those_that_are_known(names: dict[str, str], known: str) -> None:
    with pytest.raises(RecordError, match=known):
        FormatPolicy.named(**names)


def test_classes_that_are_given_count_instead() -> None:
    policy = FormatPolicy()
    found = policy.applied(GEMMA, [LayerClass.ORDINARY] * 4)
    assert compression_of(found) == BASE
    with pytest.raises(RecordError):
        policy.applied(GEMMA, [LayerClass.ORDINARY] * 3)


def test_a_policy_of_one_format_is_that_compression() -> None:
    for mode in (BASE, FP8, F16, Compression.turboquant(7)):
        policy = FormatPolicy(base=mode, model=Choice(mode, mode, mode))
        for plan in (GEMMA, PLAIN):
            assert policy.applied(plan) == mode.applied(plan)
            assert compression_of(policy.applied(plan)) == mode


def test_layers_written_in_several_ways_differ_in_identity_and_have_no_one_tag() -> None:
    plain, drafting = (FormatPolicy(serving=serving).applied(GEMMA) for serving in Serving)
    assert layer_specs(plain) != layer_specs(drafting)
    assert layer_specs(FormatPolicy(explicit=Choice(global_=FP8, windowed=BASE)).applied(GEMMA)) == layer_specs(drafting)
    with pytest.raises(RecordError):
        compression_of(drafting)


def test_heads_a_format_cannot_store_are_refused_by_layer() -> None:
    odd = replace(FULL, key_size=80)
    with pytest.raises(RecordError, match="layer 1 "):
        FormatPolicy().applied(ModelPlan((FULL, odd)))


def test_the_environment_is_read_in_one_place_and_handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEYS", "VALUES", "ORDINARY", "GLOBAL", "WINDOWED"):
        monkeypatch.delenv(f"WARMKV_KV_{name}", raising=False)
    assert FormatPolicy.named(**environment.row_formats()) == FormatPolicy()
    monkeypatch.setenv("WARMKV_KV_KEYS", "fp8")
    monkeypatch.setenv("WARMKV_KV_VALUES", " Q4_0 ")
    monkeypatch.setenv("WARMKV_KV_GLOBAL", "base")
    monkeypatch.setenv("WARMKV_KV_WINDOWED", "q8_0/q5_1")
    policy = FormatPolicy.named(**environment.row_formats(), serving=Serving.SPECULATIVE)
    base = Compression(RowFormat.FP8, RowFormat.Q4_0)
    assert policy == FormatPolicy(base, Choice(None, base, BASE), serving=Serving.SPECULATIVE)
