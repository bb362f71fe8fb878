"""Attention over rows of a device, by the device."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32
from warmkv.kernels.resident.checks import require_wide
from warmkv.kvstore.live.devices.base import DeviceArray
from warmkv.kvstore.live.devices.workspace import Workspace
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.device_planes import DevicePlanes, faults
from warmkv.schema.errors import RecordError


class DeviceComputing:
    """As `Computing`, over ``planes``. Queries are arrays of the host or of the device, answers of the
    device, in memory of the workspace: they are read before anything else is answered there. No memory is
    asked for. Nothing is counted: there is no ``mass``.

    **Threading:** one caller at a time."""

    def __init__(self, plan: LayerPlan, planes: DevicePlanes, workspace: Workspace) -> None:
        self._plan, self._planes, self._workspace, self._device = plan, planes, workspace, workspace.device
        self._sinks: DeviceArray | None = None

    def move_to(self, workspace: Workspace) -> None:
        """Compute there from now on."""
        self._workspace = workspace

    def queries(self, q: DeviceArray, shape: tuple[int | None, ...], what: str) -> DeviceArray:
        return given(self._workspace, q, shape, what)

    def weigh(self, sinks: F32 | None) -> None:
        if sinks is None:
            self._sinks = None
            return
        laid = self._device.alloc(sinks.shape, sinks.dtype)
        self._device.upload(sinks, laid)
        self._sinks = laid

    def nothing(self, *shape: int) -> DeviceArray:
        out = self._workspace.answers(*shape)
        self._device.upload(np.zeros(shape, np.float32), out)
        return out

    def one(self, q: DeviceArray, keys: PlaneRows, values: PlaneRows, first: int, last: int, mass: F32 | None) -> DeviceArray:
        plan, planes = self._plan, self._planes
        out = self._workspace.answers(plan.heads, plan.value_size)
        q = self._workspace.brought(q, "queries")
        planes.settle()
        # What is seen ends where the counter says, and all of this happens in order.
        with planes.seen_to(last) if last < len(planes) else nullcontext(), faults(planes.keys.name):
            self._device.operations.attend(
                q, planes.keys.plane, planes.values.plane, planes.counters, out=out, scratch=self._workspace.scratch,
                scale=plan.logit_scale, window=plan.window, softcap=plan.softcap, sinks=self._sinks,
            )  # fmt: skip
        return out

    def chunk(self, q: DeviceArray, keys: PlaneRows, values: PlaneRows, mass: F32 | None) -> DeviceArray:
        plan, planes = self._plan, self._planes
        out = self._workspace.answers(len(q), plan.heads, plan.value_size)
        q = self._workspace.brought(q, "queries")
        planes.settle()
        with faults(planes.keys.name):
            self._device.operations.attend_chunk(
                q, planes.keys.plane, planes.values.plane, planes.counters, out=out, scratch=self._workspace.scratch,
                scale=plan.logit_scale, window=plan.window, softcap=plan.softcap, sinks=self._sinks,
            )  # fmt: skip
        return out


def given(workspace: Workspace, array: F32 | DeviceArray, shape: tuple[int | None, ...], what: str) -> DeviceArray:
    """``array`` where it is float32 of ``shape`` (None: any length), of the host, or of the workspace's device
    and then without gaps, from an address on that its kernels can read. Raises RecordError."""
    if isinstance(array, np.ndarray):
        return checks.floats(array, shape, what)
    if not workspace.device.owns(array):
        raise RecordError(f"{what}: {type(array).__name__}, expected an array of numpy or of {workspace.device.name}")
    # As `checks.floats` says it of numpy's.
    fits = array.ndim == len(shape) and all(size in (None, found) for size, found in zip(shape, array.shape, strict=True))
    if array.dtype != np.float32 or not fits or not array.flags.c_contiguous:
        expected = ", ".join("n" if size is None else str(size) for size in shape)
        raise RecordError(f"{what}: {array.dtype} of shape {array.shape}, expected contiguous float32 ({expected})")
    try:
        require_wide(array, array.shape[-1], what)
    except KernelError as exc:
        raise RecordError(str(exc)) from exc
    return array
