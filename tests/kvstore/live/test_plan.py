"""What a plan accepts and what it refuses of recurrent layers with convolutions, and of MTP blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warmkv.kvstore.bridge import layer_specs
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind, PlaneRole

FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=8, value_size=8, importance=False)
DELTA = LayerPlan(LayerKind.RECURRENT, state_size=12, conv=ConvPlan(5, taps=3, history=0))


def test_a_convolution_beside_a_recurrent_state_is_stored_with_it() -> None:
    (spec,) = layer_specs(ModelPlan((DELTA,)))
    assert spec.kind is LayerKind.RECURRENT
    assert [(plane.role, plane.row_shape) for plane in spec.planes] == [(PlaneRole.RECURRENT, (12,)), (PlaneRole.CONV, (3, 5))]


def test_without_one_a_recurrent_layer_is_what_it_was() -> None:
    (spec,) = layer_specs(ModelPlan((replace(DELTA, conv=None),)))
    assert [plane.role for plane in spec.planes] == [PlaneRole.RECURRENT]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (replace(DELTA, conv=ConvPlan(5, taps=3)), "history of 64 steps, expected 0 to 0"),
        (replace(DELTA, conv=ConvPlan(0, history=0)), "conv channels is 0"),
        (replace(DELTA, conv=ConvPlan(5, taps=0, history=0)), "conv taps is 0"),
        (replace(DELTA, conv=ConvPlan(5, taps=1 << 11, history=0)), "conv taps is 2048"),
        (replace(DELTA, state_size=0), "state_size is 0"),
        (replace(FULL, conv=ConvPlan(5)), "conv plan"),
        (LayerPlan(LayerKind.CONV), "conv plan None"),
    ],
)
def test_convolutions_that_are_none_are_refused(layer: LayerPlan, message: str) -> None:
    with pytest.raises(RecordError, match=f"layer 1 .{layer.kind.name}.: .*{message}"):
        ModelPlan((FULL, layer))


def test_mtp_blocks_are_layers_behind_the_trunk() -> None:
    plan = ModelPlan((FULL, DELTA, FULL), mtp=1)
    assert plan.trunk == 2 and ModelPlan(plan.layers).trunk == 3
    assert layer_specs(plan) == layer_specs(ModelPlan(plan.layers)), "what is stored does not depend on who predicts what"
    assert plan != ModelPlan(plan.layers)


@pytest.mark.parametrize("mtp", [-1, 3, 4, "1", None])
def test_other_counts_of_mtp_blocks_are_refused(mtp: int) -> None:
    with pytest.raises(RecordError, match="of 3 layers are MTP blocks, expected 0 to 2"):
        ModelPlan((FULL, DELTA, FULL), mtp=mtp)
