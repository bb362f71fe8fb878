"""Which device a layer lives on: pipeline stages, MTP blocks, layers that share; and what cannot live on any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import MAX_LENGTH
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=32, value_size=32, importance=False)
WINDOW = replace(FULL, kind=LayerKind.SLIDING, window=8)
DELTA = LayerPlan(LayerKind.RECURRENT, state_size=12, conv=ConvPlan(5, taps=3, history=0))
A, B, C = (HostDevice(name=name) for name in "abc")


def shared(layer: int) -> LayerPlan:
    return LayerPlan(LayerKind.SHARED, shared_with=layer)


@pytest.mark.parametrize(
    ("cuts", "mtp", "expected"),
    [
        ((1, 2), 0, [0, 1, 2, 2, 2]),
        ((2, 4), 0, [0, 0, 1, 1, 2]),
        ((1, 2), 2, [0, 1, 2, 2, 2]),
        ((2,), 0, [0, 0, 1, 1, 1]),
        ((2,), 2, [0, 0, 1, 1, 1]),
        ((1,), 3, [0, 1, 1, 1, 1]),
        ((), 0, [0, 0, 0, 0, 0]),
        ((), 4, [0, 0, 0, 0, 0]),
    ],
)
def test_layers_live_in_the_stage_that_runs_them(cuts: tuple[int, ...], mtp: int, expected: list[int]) -> None:
    plan = ModelPlan((FULL, WINDOW, DELTA, FULL, FULL), mtp=mtp)
    devices = (A, B, C)[: len(cuts) + 1]
    residence = Residence(devices, 64, cuts)
    residence.check(plan)
    assert [residence.stage_of(index, plan) for index in range(5)] == expected
    assert [residence.device_of(index, plan) for index in range(5)] == [devices[stage] for stage in expected]


def test_rings_are_off_unless_asked_for() -> None:
    assert Residence((A,), 64).rings is False


@pytest.mark.parametrize(
    "about",
    [
        {"devices": ()}, {"devices": [A]}, {"devices": ("cpu",)}, {"capacity": 0}, {"capacity": -1},
        {"capacity": MAX_LENGTH + 1}, {"capacity": 4.0}, {"capacity": True},
        {"cuts": (1,)}, {"devices": (A, B)}, {"devices": (A, B), "cuts": (0,)},
        {"devices": (A, B), "cuts": (1, 2)}, {"devices": (A, B, C), "cuts": (2, 2)}, {"devices": (A, B, C), "cuts": (3, 2)},
        {"devices": (A, B), "cuts": (-1,)}, {"devices": (A, B), "cuts": [1]}, {"devices": (A, B), "cuts": (1.5,)}, {"rings": 1},
    ],
)  # fmt: skip
def test_stages_that_are_none_are_refused(about: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="expected"):
        Residence(**{"devices": (A,), "capacity": 64, **about})


@pytest.mark.parametrize("index", [-1, 2])
def test_layers_the_plan_has_not_are_nowhere(index: int) -> None:
    with pytest.raises(RecordError, match=f"layer {index}, the plan has 2"):
        Residence((A,), 64).device_of(index, ModelPlan((FULL, FULL)))


@pytest.mark.parametrize(("cut", "mtp"), [(3, 0), (2, 1), (5, 0)])
def test_every_stage_has_a_layer_of_the_trunk(cut: int, mtp: int) -> None:
    with pytest.raises(RecordError, match="the trunk has"):
        Residence((A, B), 64, (cut,)).check(ModelPlan((FULL,) * 3, mtp=mtp))


def test_rows_are_shared_within_a_device() -> None:
    plan = ModelPlan((FULL, FULL, shared(0), shared(1)))
    Residence((A,), 64).check(plan)
    with pytest.raises(RecordError, match=r"layer 2 .SHARED. runs in stage 1, the rows of layer 0 are in stage 0"):
        Residence((A, B), 64, (2,)).check(plan)
    Residence((A, A), 64, (2,)).check(plan)
    Residence((A, B), 64, (1,)).check(ModelPlan((FULL, FULL, shared(1))))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (replace(FULL, kind=LayerKind.NYSTROM, nystrom=NystromPlan()), "NYSTROM.: on a device there are FULL"),
        (replace(FULL, kind=LayerKind.RING, ring=RingPlan(4)), "RING.: on a device"),
        (LayerPlan(LayerKind.CONV, conv=ConvPlan(4)), "CONV.: on a device"),
        (replace(FULL, importance=True), "FULL.: attention mass is not counted"),
        (replace(WINDOW, importance=True), "SLIDING.: attention mass is not counted"),
    ],
)
def test_what_no_device_keeps_is_refused(layer: LayerPlan, message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer 1 .{message}"):
        Residence((A,), 64).check(ModelPlan((FULL, layer)))
