"""Caches on devices and in host memory, and plans for both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import records_of
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, TurboQuantPlan, modes
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.testing.live import contents, fill
from warmkv.schema.identity import LayerKind

MODES = {name: (keys, values) for name, keys, values in modes(rotated=True, blocked=True)}
#: No multiple of 32, so that what is restored begins within an alignment.
WINDOW = 40
CAPACITY = 160


def rows(mode: str, *, window: int = 0, **changes: Any) -> LayerPlan:
    """A layer with rows in a storage mode, keys wider than values."""
    keys, values = MODES[mode]
    rotation = TurboQuantPlan(5) if keys.rotated or values.rotated else None
    plan = LayerPlan(
        LayerKind.SLIDING if window else LayerKind.FULL, heads=4, kv_heads=2, key_size=64, value_size=32, key_format=keys,
        value_format=values, window=window, importance=False, turboquant=rotation,
    )  # fmt: skip
    return replace(plan, **changes)


def pair(mode: str, window: int = WINDOW) -> ModelPlan:
    """A window and a layer of full attention."""
    return ModelPlan((rows(mode, window=window), rows(mode)))


def shared(layer: int) -> LayerPlan:
    return LayerPlan(LayerKind.SHARED, shared_with=layer)


#: Two windows to one global layer, of which the last ones share with the last that have rows.
GEMMA = ModelPlan((rows("q8_0/q5_1", window=WINDOW), rows("q8_0/q5_1", window=9), rows("fp8"), shared(1), shared(2)))
#: Attention and recurrence with and without convolution, and a block that drafts.
HYBRID = ModelPlan(
    (
        LayerPlan(LayerKind.RECURRENT, state_size=21, conv=ConvPlan(5, taps=3, history=0)), rows("f16"),
        rows("q8_0/q4_0", window=WINDOW), LayerPlan(LayerKind.RECURRENT, state_size=9), rows("q8_0"),
    ),
    mtp=1,
)  # fmt: skip


def host(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def on(plan: ModelPlan, *devices: Device, cut: int = 1, rings: bool = False, capacity: int = CAPACITY) -> ModelCache:
    """On one device, or on two with a stage each."""
    cuts = (cut,) if len(devices) > 1 else ()
    return ModelCache(plan, backend="reference", residence=Residence(devices or (HostDevice(),), capacity, cuts, rings))


def grow(cache: ModelCache, count: int, seed: int = 0) -> None:
    """`fill`, a few tokens at a time, as rings that are hardly larger than their window take them."""
    for at in range(0, count, 7):
        fill(cache, min(7, count - at), seed)


def mirrors(cache: ModelCache) -> list[tuple[int, int]]:
    return [layer.mirrors() for layer in cache.own if isinstance(layer, ResidentLayer)]


def in_step(cache: ModelCache) -> bool:
    """Whether what devices count is what the host knows."""
    return all(layer.mirrors() == layer.expected_mirrors for layer in cache.own if isinstance(layer, ResidentLayer))


def state(cache: ModelCache) -> tuple[object, ...]:
    return cache.position, cache.lineage, cache.shift_offset, contents(cache), mirrors(cache)


def records(cache: ModelCache, length: int, held: int = 0) -> list[tuple[object, ...]]:
    """Records as plain values and bytes."""
    return [
        (
            record.layer, getattr(record, "start", None), getattr(record, "position", None),
            [(plane.role, plane.format, plane.rows.shape, plane.rows.tobytes(), plane.field) for plane in record.planes],
        )
        for record in records_of(cache, length, held=held)
    ]  # fmt: skip


def opens_late(plan: ModelPlan, length: int) -> bool:
    """Whether a window gave up rows that its open field is still to be fixed from: such a cache is never restored."""
    return any(RowFormat.Q8_2F in (at.key_format, at.value_format) and 0 < at.window <= length <= 64 for at in plan.layers)
