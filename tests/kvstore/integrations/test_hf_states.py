"""States of a layer to planes and back: several of them, of any dtype, copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from warmkv.kvstore.integrations.hf_states import state_filler, state_parts, state_planes, state_specs
from warmkv.kvstore.restored import RestoredPlane
from warmkv.kvstore.rows import PlaneRows
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import PlaneFormat, PlaneRole

CPU = torch.device("cpu")
C, R = PlaneRole.CONV, PlaneRole.RECURRENT
#: Of each layer: convolution states and recurrent states by number.
LAYERS = {
    "one of each": ([torch.float32], [torch.float32]),
    "convolution only": ([torch.bfloat16], []),
    "precise recurrence": ([torch.bfloat16], [torch.float32]),
    "four convolutions": ([torch.float32] * 4, []),
    "mixed dtypes": ([torch.bfloat16, torch.float32], [torch.float32]),
    "no format of ours": ([torch.float64], [torch.int8]),
    "recurrence of the second only": ([torch.float32] * 2, [None, torch.float32]),
}


def layer_of(conv: list[torch.dtype], recurrent: list[torch.dtype | None]) -> LinearAttentionLayer:
    generator = torch.Generator().manual_seed(3)
    layer = LinearAttentionLayer(number_of_states=max(len(conv), len(recurrent)))
    for number, dtype in enumerate(conv):
        layer.update_conv_state((torch.randn(1, 3 + number, 4, generator=generator) * 40).to(dtype), number)
    for number, kind in enumerate(recurrent):
        if kind is not None:
            layer.update_recurrent_state((torch.randn(1, 2, 5, 3 + number, generator=generator) * 40).to(kind), number)
    return layer


def restored(planes: tuple[PlaneRows, ...]) -> dict[PlaneRole, RestoredPlane]:
    return {p.role: RestoredPlane(p.role, p.format, p.rows.shape[1:], (np.array(p.rows),), (0,)) for p in planes}


@pytest.mark.parametrize("name", LAYERS)
def test_states_come_back_bit_for_bit(name: str) -> None:
    layer = layer_of(*LAYERS[name])
    parts = state_parts(0, layer)
    planes = state_planes(0, layer, parts)
    assert [(plane.role, plane.format, plane.rows.shape) for plane in planes] == [
        (spec.role, spec.format, (1, *spec.row_shape)) for spec in state_specs(parts)
    ]
    back = LinearAttentionLayer(number_of_states=layer.number_of_states)
    state_filler(0, parts, restored(planes), CPU)(back)
    for attribute in ("conv_states", "recurrent_states"):
        for number, tensor in getattr(layer, attribute).items():
            ours = getattr(back, attribute)[number]
            assert (ours is None) == (tensor is None)
            assert tensor is None or (ours.dtype == tensor.dtype and torch.equal(ours, tensor))
    for flag in ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size"):
        assert getattr(back, flag) == getattr(layer, flag)
    assert (back.dtype, back.device) == (layer.dtype, layer.device)


def test_one_state_keeps_its_shape_and_several_are_spelled() -> None:
    (conv, recurrent) = state_specs(state_parts(0, layer_of([torch.float32], [torch.float16])))
    assert (conv.format, conv.row_shape, conv.parameters) == (PlaneFormat.F32, (3, 4), "none")
    assert (recurrent.format, recurrent.row_shape) == (PlaneFormat.F16, (2, 5, 3))
    (packed,) = state_specs(state_parts(0, layer_of([torch.bfloat16, torch.float32], [])))
    assert (packed.format, packed.row_shape) == (PlaneFormat.RAW, (2 * 12 + 4 * 16,))
    assert packed.parameters == "0 bfloat16 3x4; 1 float32 4x4"


def test_a_copy_does_not_follow_the_layer() -> None:
    for name, kinds in LAYERS.items():
        layer = layer_of(*kinds)
        planes = state_planes(0, layer, state_parts(0, layer))
        before = [plane.rows.copy() for plane in planes]
        for tensor in (*layer.conv_states.values(), *layer.recurrent_states.values()):
            if tensor is not None:
                tensor.zero_()
        assert all((plane.rows == copy).all() for plane, copy in zip(planes, before, strict=True)), name


def test_a_restored_layer_does_not_write_into_the_plane() -> None:
    layer = layer_of([torch.float32], [torch.float32])
    parts = state_parts(0, layer)
    planes = restored(state_planes(0, layer, parts))
    back = LinearAttentionLayer()
    state_filler(0, parts, planes, CPU)(back)
    back.conv_states[0].zero_()
    back.recurrent_states[0].zero_()
    assert all(plane.blocks[0].any() for plane in planes.values())


def test_other_states_than_observed_are_an_error() -> None:
    layer = layer_of([torch.float32], [torch.float32])
    parts = state_parts(0, layer)
    with pytest.raises(RecordError, match="layer 5: CONV states are none, expected 0 \\(1, 3, 4\\)"):
        state_planes(5, LinearAttentionLayer(), parts)
    layer.record_past = True
    layer.update_conv_state(torch.zeros(1, 3, 2))
    with pytest.raises(RecordError, match="layer 5: CONV states are 0 \\(1, 3, 6\\)"):
        state_planes(5, layer, parts)
    with pytest.raises(RecordError, match="RECURRENT states are .*float64"):
        wide = layer_of([torch.float32], [torch.float64])
        state_planes(5, wide, parts)


def test_planes_that_do_not_fit_are_an_error_before_anything_is_touched() -> None:
    layer = layer_of([torch.float32], [torch.float32])
    parts = state_parts(0, layer)
    good = restored(state_planes(0, layer, parts))
    for role in (C, R):
        with pytest.raises(RecordError, match=f"layer 5: no {role.name} state"):
            state_filler(5, parts, {other: plane for other, plane in good.items() if other is not role}, CPU)
        narrow = RestoredPlane(role, good[role].format, (1,), (np.zeros((1, 1), np.float32),), (0,))
        with pytest.raises(RecordError, match=f"layer 5: no {role.name} state of shape"):
            state_filler(5, parts, {**good, role: narrow}, CPU)
