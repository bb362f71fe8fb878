"""Modes as asked for, as resolved, and the tags that tell their namespaces apart."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kvstore.live.compression import Compression, compression_of
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan, TurboQuantPlan, modes
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

F32, F16 = RowFormat.F32, RowFormat.F16
SEEDS = (0, 1, 7, 42, 2**64 - 1)


def full(size: int, value_size: int = 0) -> LayerPlan:
    return LayerPlan(LayerKind.FULL, 4, 2, size, value_size or size)


CONV = LayerPlan(LayerKind.CONV, conv=ConvPlan(16))
MODEL = ModelPlan((full(32), CONV, replace(full(32), kind=LayerKind.SLIDING, window=8)))


def every_mode() -> list[Compression]:
    """All formats of either side, with every seed and estimator, whether it decides anything or not."""
    found = []
    for keys, values, seed in product(RowFormat, RowFormat, SEEDS):
        if keys.stores(keys=True) and values.stores(keys=False):
            found += [Compression(keys, values, seed, estimator) for estimator in Estimator]
    return found


def written(plan: ModelPlan) -> tuple[object, ...]:
    """What decides a cache's rows: formats of every layer, what they are rotated by, how signs count."""
    parts = []
    for layer in plan.layers:
        seed = layer.turboquant.seed if layer.turboquant is not None else None
        signs = layer.turboquant.estimator if layer.turboquant is not None and layer.key_format is RowFormat.TQ_KEY else None
        parts.append((layer.key_format, layer.value_format, seed, signs))
    return tuple(parts)


def test_the_source_s_modes_have_the_source_s_tags() -> None:
    def cera(seed: int, **sides: bool) -> str:
        return Compression.turboquant(seed, estimator=Estimator.CERA_COMPAT, **sides).tag

    tags = [Compression().tag, Compression(F16, F16).tag]
    tags += [cera(42), cera(42, values=False), cera(42, keys=False), cera(7), cera(2**64 - 1)]
    assert tags == ["", "f16:", "tq3kv-s42:", "tq3k-s42:", "tq3v-s42:", "tq3kv-s7:", "tq3kv-s18446744073709551615:"]


def test_rows_of_the_source_are_not_those_of_a_better_estimator() -> None:
    """Layers above the first keep what was computed from keys as they were read."""
    tags = [Compression.turboquant(42, estimator=estimator).tag for estimator in Estimator]
    assert sorted(tags) == ["tq3kv-s42-minimum_mse:", "tq3kv-s42-unbiased:", "tq3kv-s42:"]
    keyless = {Compression.turboquant(42, keys=False, estimator=estimator) for estimator in Estimator}
    assert keyless == {Compression(F32, RowFormat.TQ_VALUE, 42)}


def test_turboquant_of_no_side_is_f32_and_shares_its_namespace() -> None:
    none = Compression.turboquant(42, keys=False, values=False)
    assert none == Compression() and none.tag == "" and none.seed == 0


@pytest.mark.parametrize(
    "plan", [MODEL, ModelPlan((full(12),)), ModelPlan((full(16, 12),)), ModelPlan((full(64, 40),)), ModelPlan((CONV,))]
)
def test_all_pairs_share_a_tag_just_where_their_rows_are_written_alike(plan: ModelPlan) -> None:
    asked = every_mode()
    assert len({mode.tag for mode in asked}) >= len(RowFormat)
    found = {(mode.resolved(plan).tag, written(mode.applied(plan))) for mode in asked}
    for (tag, rows), (other_tag, other_rows) in combinations(found, 2):
        assert tag != other_tag and rows != other_rows


def test_tags_end_so_that_none_runs_into_the_name_behind_it() -> None:
    tags = {mode.tag for mode in every_mode()} - {""}
    assert all(tag.endswith(":") and tag.count(":") == 1 for tag in tags)
    assert not any(one != other and other.startswith(one) for one in tags for other in tags)


@pytest.mark.parametrize(
    ("size", "stored"), [(8, True), (24, True), (80, True), (128, True), (4, False), (36, False), (100, False)]
)
def test_the_mode_that_counts_is_the_one_the_rows_are_written_in(size: int, stored: bool) -> None:
    asked = Compression.turboquant(42)
    plan = ModelPlan((CONV, full(size)))
    assert asked.resolved(plan) == (asked if stored else Compression())
    assert compression_of(asked.applied(plan)) == asked.resolved(plan)


@pytest.mark.parametrize("sides", [(RowFormat.Q8_0, RowFormat.Q5_1), (RowFormat.FP8, RowFormat.Q4_0), (RowFormat.Q8_0, F32)])
@pytest.mark.parametrize(
    "size, stored", [(32, True), (96, True), (192, True), (320, True), (40, False), (80, False), (112, False)]
)
def test_blocks_are_asked_for_and_told_like_others(
    sides: tuple[RowFormat, RowFormat], size: int, stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked, plan = Compression(*sides), ModelPlan((CONV, full(64), full(size)))
    with caplog.at_level(logging.WARNING):
        mode = asked.resolved(plan)
    assert mode == (asked if stored else Compression()) and compression_of(asked.applied(plan)) == mode
    assert mode.tag == (f"k-{sides[0].value},v-{sides[1].value}:" if stored else "")
    assert stored or f"heads of {size} channels: not a multiple of 32" in caplog.text


def test_one_layer_that_cannot_resolves_all_of_them(caplog: pytest.LogCaptureFixture) -> None:
    plan = ModelPlan((full(16), full(12)))
    with caplog.at_level(logging.WARNING):
        assert Compression.turboquant(1).applied(plan) == plan
    assert "12 channels" in caplog.text
    assert Compression.turboquant(1, values=False).resolved(ModelPlan((full(16, 12),))) == Compression.turboquant(1, values=False)
    assert Compression.turboquant(1, values=False).resolved(ModelPlan((full(12, 16),))) == Compression()


def test_rows_of_rings_and_collected_rows_stay_as_they_are() -> None:
    ring = replace(full(16), kind=LayerKind.RING, ring=RingPlan(8))
    nystrom = replace(full(16), kind=LayerKind.NYSTROM, nystrom=NystromPlan(4, 8, 2))
    plan = Compression.turboquant(3).applied(ModelPlan((ring, nystrom, full(16))))
    assert plan.layers[:2] == (ring, nystrom) and plan.layers[2].turboquant == TurboQuantPlan(3)
    assert compression_of(plan) == Compression.turboquant(3)


def test_a_model_without_rows_has_one_mode() -> None:
    plan = ModelPlan((CONV, LayerPlan(LayerKind.RECURRENT, state_size=4)))
    assert {mode.resolved(plan) for mode in every_mode()} == {Compression()}
    assert compression_of(plan) == Compression()


def test_applying_replaces_what_was_there() -> None:
    once = Compression.turboquant(3, estimator=Estimator.MINIMUM_MSE).applied(MODEL)
    assert once.layers[0].turboquant == TurboQuantPlan(3, Estimator.MINIMUM_MSE)
    assert Compression(F16, F16).applied(once) == Compression(F16, F16).applied(MODEL)
    assert Compression().applied(once) == MODEL


def test_every_named_mode_is_one() -> None:
    for name, keys, values in modes(rotated=True, blocked=True):
        mode = Compression.named(name, 5)
        assert (mode.keys, mode.values, mode.seed) == (keys, values, 5 if keys.rotated or values.rotated else 0)
        assert compression_of(mode.applied(MODEL)) == mode
    assert Compression.named("turboquant") == Compression.turboquant()
    with pytest.raises(RecordError, match="storage mode 'q9', expected one of f32, f16"):
        Compression.named("q9")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_beyond_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(RecordError, match=f"seed {seed}"):
        Compression.turboquant(seed)


@pytest.mark.parametrize("seed", [1.0, 1.5, "42", True, None])
def test_seeds_that_are_no_whole_numbers_are_refused(seed: object) -> None:
    with pytest.raises(RecordError, match=f"seed {seed!r}"):
        Compression.turboquant(seed)  # type: ignore[arg-type]
    rotated = Compression.turboquant().applied(MODEL).layers[0]
    with pytest.raises(RecordError, match=f"seed {seed!r}"):
        ModelPlan((replace(rotated, turboquant=TurboQuantPlan(seed)),))  # type: ignore[arg-type]


def test_a_seed_of_numpy_is_the_seed_it_counts() -> None:
    mode = Compression.turboquant(np.int64(42))  # type: ignore[arg-type]
    assert mode == Compression.turboquant(42) and type(mode.seed) is int and mode.tag == Compression.turboquant(42).tag
    assert Rotation.of(np.int64(42), 1, 16) == Rotation.of(42, 1, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("sides", [(RowFormat.TQ_VALUE, F32), (F32, RowFormat.TQ_KEY), (F32, RowFormat.TQ3)])
def test_formats_of_the_other_side_are_refused(sides: tuple[RowFormat, RowFormat]) -> None:
    with pytest.raises(RecordError, match=f"keys as {sides[0].value} and values as {sides[1].value}"):
        Compression(*sides)


def test_layers_written_in_different_ways_have_no_one_mode() -> None:
    plan = ModelPlan((full(16), Compression(F16, F16).applied(MODEL).layers[0]))
    with pytest.raises(RecordError, match="layers written in 2 ways, expected one: f16:, f32"):
        compression_of(plan)
