"""Where the layers of a cache live: on which devices, with how many rows, flat or in rings.

A pipeline of n stages has n devices and n - 1 cuts: layers before the first cut live on the first device,
and so on. MTP blocks come after the trunk and run with its end, so they live on the last device whatever
the cuts. A layer that shares another's rows has nothing of its own, and reads them where they are.

**Source:** memra `Cache::new_ppn`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.rings import MAX_LENGTH
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

#: Kinds that can live on a device.
RESIDENT = frozenset({LayerKind.FULL, LayerKind.SLIDING, LayerKind.RECURRENT, LayerKind.SHARED})


@dataclass(frozen=True, slots=True)
class Residence:
    """``devices`` by pipeline stage; one may appear twice. ``capacity`` is how many rows a flat layer has room
    for. ``rings``: whether layers with a window are rings, which takes kernels that do not address rows
    from 0; off unless the model's family is known to have them.

    Raises RecordError for stages that are none."""

    devices: tuple[Device, ...]
    capacity: int
    cuts: tuple[int, ...] = ()
    rings: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.devices, tuple) or not self.devices:
            raise RecordError(f"devices are {self.devices!r}, expected a tuple of at least one")
        if any(isinstance(device, str) for device in self.devices):
            raise RecordError(f"devices are {self.devices!r}, expected what `open_device` makes of such names")
        if not _whole(self.capacity) or not 1 <= self.capacity <= MAX_LENGTH:
            raise RecordError(f"room for {self.capacity!r} rows, expected 1 to {MAX_LENGTH}")
        if not isinstance(self.cuts, tuple) or len(self.cuts) != len(self.devices) - 1:
            raise RecordError(f"cuts {self.cuts!r} between {len(self.devices)} devices, expected {len(self.devices) - 1}")
        ascending = all(before < after for before, after in zip((0, *self.cuts), self.cuts, strict=False))
        if not all(map(_whole, self.cuts)) or not ascending:
            raise RecordError(f"cuts {self.cuts}, expected layers from 1 on that ascend: every stage has one")
        if not isinstance(self.rings, bool):
            raise RecordError(f"rings are {self.rings!r}, expected True or False")

    def stage_of(self, index: int, plan: ModelPlan) -> int:
        """The stage that layer ``index`` of ``plan`` runs in, and has its state. Raises RecordError for a layer the
        plan has not."""
        if not 0 <= index < len(plan.layers):
            raise RecordError(f"layer {index}, the plan has {len(plan.layers)}")
        return bisect_right(self.cuts, index) if index < plan.trunk else len(self.devices) - 1

    def device_of(self, index: int, plan: ModelPlan) -> Device:
        """The device of that stage."""
        return self.devices[self.stage_of(index, plan)]

    def check(self, plan: ModelPlan) -> None:
        """Whether a cache of ``plan`` can live here. Raises RecordError for cuts beyond the trunk and for rows
        shared across devices, UnsupportedError for layers that no device has; each names the layer."""
        if self.cuts and self.cuts[-1] >= plan.trunk:
            raise RecordError(f"cuts {self.cuts}, the trunk has {plan.trunk} layers: every stage has one")
        for index, layer in enumerate(plan.layers):
            name = where(layer, index)
            if layer.kind not in RESIDENT:
                kinds = ", ".join(sorted(kind.name for kind in RESIDENT))
                raise UnsupportedError(f"{name}: on a device there are {kinds}")
            if layer.kind is LayerKind.SHARED:
                if self.device_of(index, plan) is not self.device_of(layer.shared_with, plan):
                    raise RecordError(
                        f"{name} runs in stage {self.stage_of(index, plan)}, the rows of layer {layer.shared_with} are in stage "
                        f"{self.stage_of(layer.shared_with, plan)}: rows are shared within a device"
                    )
            elif layer.kind is not LayerKind.RECURRENT:
                if layer.importance:
                    raise UnsupportedError(f"{name}: attention mass is not counted on a device; plan with importance=False")
                if len(layer.alive_heads) < layer.kv_heads:
                    raise UnsupportedError(
                        f"{name}: KV heads {layer.alive_heads} of {layer.kv_heads} are alive, on a device all are"
                    )


def _whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
