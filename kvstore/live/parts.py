"""What a resident cache has on each of its devices: layers, the table of their bases, the room they compute in.

The estimate before (`bytes_by_device`) and the report afterwards (`DevicePart.allocated_bytes`) count the
same things, the one from the plan and the other from the arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Union

import numpy as np

from warmkv.kernels.dispatch import Kernels
from warmkv.kvstore.live.admission import Beside, stage_spans
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.devices.workspace import Workspace
from warmkv.kvstore.live.geometry import ModelGeometry, layer_geometry
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.live.rings import Ring, ring_rows
from warmkv.schema.errors import OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

ResidentLayers = Union[ResidentLayer, ResidentRecurrentLayer]
_I32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePart:
    """One device of a cache, whatever stages run on it. ``bases`` (ringed layers,) int32 are the mirrors of what
    the physical rows 0 of rings stand for, None where there are no rings."""

    device: Device
    layers: tuple[ResidentLayers, ...]
    workspace: Workspace
    bases: DeviceArray | None

    @property
    def allocated_bytes(self) -> int:
        """What the cache has asked this device for: `bytes_by_device`, but for parked logits and checkpoints."""
        layers = sum(layer.allocated_bytes for layer in self.layers)
        return layers + self.workspace.allocated_bytes + (0 if self.bases is None else int(self.bases.nbytes))

    def free(self) -> None:
        """Take all of it off the device's books; the cache is not to be used any more."""
        for layer in self.layers:
            layer.free()
        self.workspace.release()
        if self.bases is not None:
            self.device.free(self.bases)


def bytes_by_device(plan: ModelPlan, residence: Residence) -> tuple[tuple[Device, int], ...]:
    """What a cache of ``plan`` will ask each device for, in the order of stages. Raises RecordError and
    UnsupportedError where it cannot live there, OutOfMemory beyond 64 bits."""
    residence.check(plan)
    found = []
    for device, indices in _by_device(plan, residence):
        layers = [plan.layers[index] for index in indices]
        own = ModelGeometry(tuple(layer_geometry(layer, residence.capacity, rings=residence.rings) for layer in layers))
        found.append((device, own.allocated_bytes + Workspace.bytes_of(device, layers, residence.capacity)))
    return tuple(found)


def working_bytes(plan: ModelPlan, devices: Sequence[Device], cuts: Sequence[int] = ()) -> Beside:
    """The ``beside`` of `admission.admit`: what kernels work in on the ``devices`` of its stages. A device of several
    stages has one workspace and is counted in each. Raises RecordError as `stage_spans`, or for as many devices
    as there are no stages."""
    spans = stage_spans(plan, cuts)
    if len(devices) != len(spans):
        raise RecordError(f"{len(devices)} devices, expected one for each of {len(spans)} stages")
    parts = [plan.layers[first:last] for first, last in spans]
    return lambda stage, tokens: Workspace.bytes_of(devices[stage], parts[stage], tokens)


def make_parts(plan: ModelPlan, residence: Residence, kernels: Kernels) -> tuple[DevicePart, ...]:
    """The layers of ``plan`` on their devices. Raises as `bytes_by_device` before anything is allocated, and
    OutOfMemory with nothing left allocated on any device."""
    estimate = bytes_by_device(plan, residence)
    try:
        with ExitStack() as undo:
            parts = tuple(
                _part(plan, residence, device, indices, kernels, undo) for device, indices in _by_device(plan, residence)
            )
            undo.pop_all()
    except OutOfMemory as exc:
        told = ", ".join(f"{count} bytes of {device.name}" for device, count in estimate)
        raise OutOfMemory(f"{exc}; a cache of {residence.capacity} rows takes {told}", exc.requested_bytes) from exc
    return parts


def _part(
    plan: ModelPlan, residence: Residence, device: Device, indices: Sequence[int], kernels: Kernels, undo: ExitStack
) -> DevicePart:  # fmt: skip
    plans = [plan.layers[index] for index in indices]
    workspace = Workspace.of(device, plans, residence.capacity)
    undo.callback(workspace.release)
    ringed = [index for index in indices if _ringed(plan.layers[index], residence)]
    bases = None
    if ringed:
        bases = device.zeros((len(ringed),), _I32)
        undo.callback(device.free, bases)
    layers: list[ResidentLayers] = []
    for index in indices:
        layer = plan.layers[index]
        if layer.kind is LayerKind.RECURRENT:
            layers.append(ResidentRecurrentLayer(layer, index=index, device=device))
        else:
            at = ringed.index(index) if index in ringed else 0
            base = bases[at : at + 1] if bases is not None and index in ringed else None
            layers.append(_rows(layer, index, device, workspace, residence, kernels, base))
        undo.callback(layers[-1].free)
    return DevicePart(device, tuple(layers), workspace, bases)


def _rows(
    plan: LayerPlan, index: int, device: Device, workspace: Workspace, residence: Residence, kernels: Kernels,
    base: DeviceArray | None,
) -> ResidentLayer:  # fmt: skip
    ring = None if base is None else Ring(ring_rows(plan.window, residence.capacity), plan.window)
    return ResidentLayer(
        plan, index=index, device=device, workspace=workspace, capacity=residence.capacity, ring=ring, base=base, kernels=kernels
    )


def _ringed(plan: LayerPlan, residence: Residence) -> bool:
    return residence.rings and plan.kind is LayerKind.SLIDING


def _by_device(plan: ModelPlan, residence: Residence) -> list[tuple[Device, list[int]]]:
    """By device the layers of the plan that have something of their own there; a device of several stages once."""
    found: list[tuple[Device, list[int]]] = []
    for device in residence.devices:
        if not any(known is device for known, _ in found):
            found.append((device, []))
    for index, layer in enumerate(plan.layers):
        if layer.kind is not LayerKind.SHARED:
            mine = residence.device_of(index, plan)
            next(indices for device, indices in found if device is mine).append(index)
    return found
