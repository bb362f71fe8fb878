"""What fits, against the bytes a geometry has one token further on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.admission import admit, stage_spans
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.geometry import model_geometry
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.parts import working_bytes
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import MAX_LENGTH
from warmkv.kvstore.live.sharding import shard_model
from warmkv.schema.errors import CapacityExceeded, OutOfMemory, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

FULL = LayerPlan(LayerKind.FULL, 32, 8, 128, 128, RowFormat.Q8_0, RowFormat.Q5_1, importance=False)
NEAR = replace(FULL, kind=LayerKind.SLIDING, window=512)
LINEAR = LayerPlan(LayerKind.RECURRENT, state_size=1000, conv=ConvPlan(10, taps=3, history=0))
SHARED = LayerPlan(LayerKind.SHARED, shared_with=0)
LLAMA = ModelPlan.uniform(32, FULL)
MIXED = ModelPlan((FULL, NEAR, LINEAR, NEAR, SHARED, FULL, NEAR), mtp=2)
TOKEN = 8 * 128 // 32 * (34 + 24)


def test_llama_8b_fits_to_the_last_byte() -> None:
    exact = 32 * (131_072 * TOKEN + 20)
    for free, most, fits in ((exact, 131_072, True), (exact - 1, 131_071, False), (exact + 32 * TOKEN, 131_073, True)):
        found = admit(LLAMA, [free], 131_072)
        assert (found.max_tokens, found.fits) == (most, fits)
        assert found.stages[0].needed_bytes == exact


def test_blocks_beyond_the_trunk_live_with_the_last_stage() -> None:
    assert stage_spans(MIXED, ()) == ((0, 7),)
    assert stage_spans(MIXED, (1, 4)) == ((0, 1), (1, 4), (4, 7))
    found = admit(MIXED, [1 << 40] * 3, 9000, cuts=(1, 4), rings=True)
    assert [stage.needed_bytes for stage in found.stages] == [
        9000 * TOKEN + 20,
        2 * (5151 * TOKEN + 20 + 4) + 4 * (2 * 1000 + 30),
        9000 * TOKEN + 20 + 5151 * TOKEN + 20 + 4,
    ]


@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (1, 2, 3, 4)])
def test_stages_are_those_of_a_residence(cuts: tuple[int, ...]) -> None:
    device = HostDevice(HostOperations(REFERENCE))
    residence = Residence((device,) * (len(cuts) + 1), 100, cuts)
    found = [number for number, (first, last) in enumerate(stage_spans(MIXED, cuts)) for _ in range(first, last)]
    assert found == [residence.stage_of(index, MIXED) for index in range(len(MIXED.layers))]


def test_the_least_roomy_stage_decides_and_is_named() -> None:
    found = admit(LLAMA, [1 << 40, 16 * (1000 * TOKEN + 20), 1 << 30], 2000, cuts=(8, 24))
    assert [stage.fits for stage in found.stages] == [True, False, True]
    assert found.max_tokens == found.stages[1].max_tokens == 1000
    with pytest.raises(OutOfMemory, match=r"stage 1 \(layers \[8, 24\)\)") as refused:
        found.check()
    assert refused.value.requested_bytes == 16 * (2000 * TOKEN + 20)
    admit(LLAMA, [1 << 40] * 3, 2000, cuts=(8, 24)).check()


def test_no_token_fits_where_states_alone_do_not() -> None:
    plan = ModelPlan((LINEAR,))
    assert admit(plan, [8119], 1).max_tokens == 0
    assert admit(plan, [8120], 1).max_tokens == MAX_LENGTH
    assert admit(LLAMA, [0], 1).max_tokens == 0


def test_rings_that_are_full_leave_the_context_to_flat_layers() -> None:
    plan, free = ModelPlan((NEAR, NEAR)), 2 * (5151 * TOKEN + 20) + 8
    assert admit(plan, [free], 262_144, rings=True).max_tokens == MAX_LENGTH
    assert admit(plan, [free - 1], 262_144, rings=True).max_tokens == 5150
    assert not admit(plan, [free], 262_144).fits


def test_what_kernels_work_in_is_counted() -> None:
    asked: list[tuple[int, int]] = []

    def beside(stage: int, tokens: int) -> int:
        asked.append((stage, tokens))
        return 1000 + tokens * stage

    found = admit(ModelPlan((FULL, FULL)), [TOKEN * 50 + 20 + 1000, (TOKEN + 1) * 50 + 20 + 1000], 50, cuts=(1,), beside=beside)
    assert found.fits and [stage.max_tokens for stage in found.stages] == [50, 50]
    assert {stage for stage, _ in asked} == {0, 1}


@pytest.mark.parametrize("cuts", [(), (2,)])
def test_what_was_admitted_beside_the_working_memory_is_what_a_cache_takes(cuts: tuple[int, ...]) -> None:
    plan = ModelPlan((FULL, NEAR, LINEAR, NEAR, FULL), mtp=1)
    devices = tuple(HostDevice() for _ in range(len(cuts) + 1))
    beside = working_bytes(plan, devices, cuts)
    found = admit(plan, [1 << 30] * len(devices), 6000, cuts=cuts, rings=True, beside=beside)
    cache = ModelCache(plan, residence=Residence(devices, 6000, cuts, rings=True))
    assert [stage.needed_bytes for stage in found.stages] == [part.allocated_bytes for part in cache.parts]
    assert [part.allocated_bytes for part in cache.parts] == [device.allocated_bytes for device in devices]
    with pytest.raises(RecordError, match="expected one for each of"):
        working_bytes(plan, devices[1:], cuts)


def test_eight_ranks_of_step_fit_their_exact_bytes() -> None:
    wide = replace(FULL, heads=64)
    plan = shard_model(ModelPlan(tuple(wide if index % 4 == 0 else replace(NEAR, heads=64) for index in range(45))), 3, 8)
    exact = 12 * (232 * 262_144 + 20) + 33 * (232 * 5151 + 20 + 4)
    assert admit(plan, [exact], 262_144, rings=True).max_tokens == 262_144
    assert admit(plan, [exact - 1], 262_144, rings=True).max_tokens == 262_143
    assert not admit(plan, [exact], 262_144).fits


def test_sizes_beyond_64_bits_never_fit() -> None:
    huge = replace(FULL, heads=1 << 12, kv_heads=1 << 12, key_size=1 << 20, value_size=1 << 20)
    assert admit(ModelPlan((huge,)), [(1 << 63) - 1], 1).max_tokens == ((1 << 63) - 1 - 20) // (2**27 * 58)
    with pytest.raises(OutOfMemory):
        admit(ModelPlan((huge,)), [1 << 40], MAX_LENGTH)


@given(free=st.integers(0, 1 << 33), cut=st.integers(1, 4), rings=st.booleans())
@settings(deadline=None, max_examples=40)
def test_one_token_more_than_the_most_does_not_fit(free: int, cut: int, rings: bool) -> None:
    for number, stage in enumerate(admit(MIXED, [free, free], 100, cuts=(cut,), rings=rings).stages):
        first, last = ((0, cut), (cut, 7))[number]

        def needed(tokens: int, first: int = first, last: int = last) -> int:
            return model_geometry(MIXED, tokens, rings=rings).part(first, last).allocated_bytes

        assert stage.needed_bytes == needed(100)
        assert stage.max_tokens == 0 or needed(stage.max_tokens) <= free
        assert stage.max_tokens == MAX_LENGTH or needed(stage.max_tokens + 1) > free


@pytest.mark.parametrize(
    "free, tokens, cuts, error",
    [
        ([1], 1, (4,), RecordError),
        ([1, 1], 1, (), RecordError),
        ([-1], 1, (), RecordError),
        ([], 1, (), RecordError),
        ([1, 1], 1, (0,), RecordError),
        ([1, 1], 1, (5,), RecordError),
        ([1, 1, 1], 1, (3, 3), RecordError),
        ([1, 1, 1], 1, (3, 2), RecordError),
        ([1], 0, (), RecordError),
        ([1], MAX_LENGTH + 1, (), CapacityExceeded),
    ],
)
def test_impossible_questions_are_refused(free: list[int], tokens: int, cuts: tuple[int, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        admit(MIXED, free, tokens, cuts=cuts)


def test_layers_no_device_keeps_are_refused() -> None:
    with pytest.raises(UnsupportedError):
        admit(ModelPlan((FULL, LayerPlan(LayerKind.CONV, conv=ConvPlan(8)))), [1 << 30], 10)
