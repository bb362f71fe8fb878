"""What a model's cache looks like, as observed; what is refused names the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from warmkv.kvstore.integrations import hf_geometry
from warmkv.kvstore.integrations.hf_cache import new_cache
from warmkv.kvstore.integrations.hf_geometry import observe, read
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import LayerKind, PlaneFormat, PlaneRole

MakeTiny = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")
K, V, C, R, I = PlaneRole.KEY, PlaneRole.VALUE, PlaneRole.CONV, PlaneRole.RECURRENT, PlaneRole.INDEXER_KEY  # noqa: E741
FULL, SLIDING, HYBRID = LayerKind.FULL, LayerKind.SLIDING, LayerKind.HYBRID

#: Of each layer: kind, window or chunk, the layer it shares with, roles of its planes.
EXPECTED: dict[str, list[tuple[LayerKind, int, int, tuple[PlaneRole, ...]]]] = {
    "llama": [(FULL, 0, -1, (K, V))] * 3,
    "deepseek_v32": [(FULL, 0, -1, (K, V, I))] * 2,
    "gemma3": [(SLIDING, 16, -1, (K, V)), (FULL, 0, -1, (K, V)), (SLIDING, 16, -1, (K, V))],
    "gemma3n": [
        *[(SLIDING, 16, -1, (K, V)), (FULL, 0, -1, (K, V))] * 2, (LayerKind.SHARED, 0, 2, ()), (LayerKind.SHARED, 0, 3, ()),
    ],
    "llama4": [*[(LayerKind.CHUNKED, 16, -1, (K, V))] * 2, (FULL, 0, -1, (K, V))],
    "lfm2": [(LayerKind.CONV, 0, -1, (C,)), (FULL, 0, -1, (K, V)), (LayerKind.CONV, 0, -1, (C,))],
    "mamba": [(LayerKind.RECURRENT, 0, -1, (C, R))] * 2,
    "mamba2": [(LayerKind.RECURRENT, 0, -1, (C, R))] * 2,
    "qwen3_next": [*[(LayerKind.RECURRENT, 0, -1, (C, R))] * 2, (FULL, 0, -1, (K, V))],
    "bamba": [(LayerKind.RECURRENT, 0, -1, (C, R)), (FULL, 0, -1, (K, V))],
    "jamba": [(LayerKind.RECURRENT, 0, -1, (C, R)), (FULL, 0, -1, (K, V))],
    "nemotron_h": [
        (LayerKind.RECURRENT, 0, -1, (C, R)), (FULL, 0, -1, (K, V)), (LayerKind.SHARED, 0, 0, ()),
        (LayerKind.RECURRENT, 0, -1, (C, R)),
    ],
    "falcon_h1": [(HYBRID, 0, -1, (K, V, C, R))] * 2,
    "inkling": [(HYBRID, 16, -1, (K, V, C)), (HYBRID, 0, -1, (K, V, C)), (HYBRID, 16, -1, (K, V, C))],
}  # fmt: skip


def test_every_kind_is_what_its_layers_are(kind: str, tiny: PreTrainedModel) -> None:
    found = [
        (layer.kind, layer.window or layer.chunk, layer.shared_with, tuple(plane.role for plane in layer.planes))
        for layer in observe(tiny, CPU).layers
    ]
    assert found == EXPECTED[kind]


def test_where_a_model_resumes_follows_from_its_layers(kind: str, tiny: PreTrainedModel) -> None:
    geometry = observe(tiny, CPU)
    assert geometry.resumes_anywhere == (kind in ("llama", "deepseek_v32"))
    assert geometry.delicate == (kind not in ("llama", "gemma3", "gemma3n", "llama4"))
    assert geometry.rowless == (kind in ("mamba", "mamba2"))


def test_formats_and_shapes_are_those_of_the_tensors(make_tiny: MakeTiny) -> None:
    layers = observe(make_tiny("qwen3_next").to(torch.bfloat16), CPU).layers
    assert [(plane.format, plane.row_shape) for plane in layers[2].planes] == [(PlaneFormat.BF16, (2, 8))] * 2
    conv, recurrent = layers[0].planes
    assert (conv.format, conv.row_shape) == (PlaneFormat.BF16, (64, 4))
    assert recurrent.row_shape == (4, 8, 8)


def test_several_states_of_a_layer_are_one_plane_that_spells_them(make_tiny: MakeTiny) -> None:
    conv = observe(make_tiny("inkling"), CPU).layers[0].planes[2]
    assert (conv.format, conv.row_shape) == (PlaneFormat.RAW, (4 * (16 + 16 + 32 + 32) * 4,))
    assert conv.parameters == "0 float32 16x4; 1 float32 16x4; 2 float32 32x4; 3 float32 32x4"


def test_full_attention_is_observed_with_one_token(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = []
    feed = hf_geometry.feed
    monkeypatch.setattr(hf_geometry, "feed", lambda m, c, ids, start: fed.append(ids.shape[1]) or feed(m, c, ids, start))
    observe(model, CPU)
    assert fed == [1]


def test_observing_leaves_generation_alone(tiny: PreTrainedModel) -> None:
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    observe(tiny, CPU)
    assert torch.equal(torch.rand(1), before)


# -- refusals ----------------------------------------------------------------------------


def fed(model: PreTrainedModel, tokens: int = 3) -> DynamicCache:
    cache = new_cache(model)
    with torch.no_grad():
        model(input_ids=torch.ones((1, tokens), dtype=torch.long), use_cache=True, cache=cache)
    return cache


class OwnLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a model's own, which may keep anything."""


def test_a_layer_class_nobody_knows_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("llama")
    cache = fed(model)
    cache.layers[1].__class__ = OwnLayer
    with pytest.raises(UnsupportedError, match="layer 1 keeps its state as OwnLayer"):
        read(model.config, cache)


def test_a_class_that_has_the_name_only_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("llama")
    cache = fed(model)
    cache.layers[1].__class__ = type("DynamicLayer", (OwnLayer,), {})
    with pytest.raises(UnsupportedError, match="layer 1 keeps its state as DynamicLayer"):
        read(model.config, cache)


def test_states_that_are_not_numbered_are_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("lfm2")
    cache = fed(model)
    cache.layers[2].conv_states = cache.layers[2].conv_states[0]
    with pytest.raises(UnsupportedError, match="layer 2: .* does not keep the states of LinearAttentionLayer by number"):
        read(model.config, cache)


def test_a_window_of_a_type_nobody_knows_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("gemma3")
    cache = fed(model)
    model.config.layer_types = ["sliding_attention", "full_attention", "dilated_attention"]
    with pytest.raises(UnsupportedError, match="layer 2 is windowed and of type 'dilated_attention'"):
        read(model.config, cache)


def test_a_window_of_one_token_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("gemma3")
    cache = fed(model)
    cache.layers[0].sliding_window = 1
    with pytest.raises(UnsupportedError, match="layer 0 has a window of 1 tokens"):
        read(model.config, cache)


def test_a_window_without_layer_types_follows_the_sizes_in_the_configuration(make_tiny: MakeTiny) -> None:
    model = make_tiny("llama4")
    cache = fed(model)
    model.config.layer_types = None
    assert [layer.kind for layer in read(model.config, cache).layers] == [LayerKind.CHUNKED, LayerKind.CHUNKED, FULL]
    model.config.attention_chunk_size = 8
    with pytest.raises(UnsupportedError, match="layer 0 is windowed and of type 'unknown'"):
        read(model.config, cache)
    model.config.sliding_window = 16
    assert [layer.kind for layer in read(model.config, cache).layers] == [SLIDING, SLIDING, FULL]


def test_a_layer_that_keeps_nothing_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("llama")
    cache = fed(model)
    cache.layers[2] = DynamicLayer()
    with pytest.raises(UnsupportedError, match="layer 2 \\(DynamicLayer\\) kept nothing"):
        read(model.config, cache)


def test_recurrence_without_a_convolution_is_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("qwen3_next")
    cache = fed(model)
    cache.layers[0] = LinearAttentionLayer()
    cache.layers[0].update_recurrent_state(torch.zeros(1, 4, 8, 8))
    with pytest.raises(UnsupportedError, match="layer 0 has states \\[0\\], of which the library marks \\[\\] as there"):
        read(model.config, cache)


def test_positions_beside_indexer_keys_are_refused(make_tiny: MakeTiny) -> None:
    model = make_tiny("deepseek_v32")
    cache = fed(model)
    cache.layers[1].indexer_position_ids = torch.zeros((1, 1, 3), dtype=torch.long)
    with pytest.raises(UnsupportedError, match="layer 1 keeps positions"):
        read(model.config, cache)


def test_a_model_that_keeps_another_number_of_rows_is_refused(make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = hf_geometry.feed
    monkeypatch.setattr(hf_geometry, "feed", lambda m, c, ids, start: feed(m, c, torch.cat([ids, ids], 1), start))
    with pytest.raises(UnsupportedError, match="kept 2 rows of 1 tokens"):
        observe(make_tiny("gemma3"), CPU)


@pytest.mark.parametrize("kind", ["mamba2"])
def test_a_model_whose_tokens_cannot_be_counted_is_refused(
    make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    feed = hf_geometry.feed

    def padding(model: torch.nn.Module, cache: DynamicCache, ids: torch.Tensor, start: int) -> None:
        feed(model, cache, torch.cat([ids] * 4, 1), start)

    monkeypatch.setattr(hf_geometry, "feed", padding)
    with pytest.raises(UnsupportedError, match="kept 4 rows of 1 tokens"):
        observe(make_tiny(kind), CPU)


def test_a_state_that_changes_its_shape_is_refused(make_tiny: MakeTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = hf_geometry.feed

    def growing(model: torch.nn.Module, cache: DynamicCache, ids: torch.Tensor, start: int) -> None:
        feed(model, cache, ids, start)
        cache.layers[0].conv_states[0] = torch.zeros(1, 32, 3 + start)

    monkeypatch.setattr(hf_geometry, "feed", growing)
    with pytest.raises(UnsupportedError, match="layer 0 keeps another state after 2 tokens"):
        observe(make_tiny("lfm2"), CPU)
