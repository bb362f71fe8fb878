"""The devices that the same tests are run on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import stand_in

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.resident.host import HostOperations
from warmkv.kvstore.live.devices import cupy_device
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.cupy_device import CupyDevice
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.schema.errors import DeviceMissing

#: "harness": memory of numpy, operations of the CUDA sources, run on the host. "stand-in": all that `CupyDevice`
#: does, on a stand-in for cupy. "cuda": a GPU, where there is one.
KINDS = ("host", "stand-in", "harness", "cuda")
HARNESS = Path(__file__).resolve().parents[2] / "kernels" / "cuda"


def at_hand(kind: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A fresh device, or the test is skipped."""
    if kind == "host":
        return HostDevice(HostOperations(REFERENCE))
    if kind == "stand-in":
        monkeypatch.setitem(sys.modules, "cupy", stand_in.cupy())
        monkeypatch.setattr(cupy_device, "STAGE_BYTES", 256)
        monkeypatch.setattr(cupy_device, "ASIDE_BYTES", 192)
        monkeypatch.setattr(cupy_device, "COUNTER_BYTES", 16)
        return CupyDevice(operations=stand_in.Lazily(HostOperations(REFERENCE)))
    if kind == "harness":
        return harness_device()
    try:
        return CupyDevice()
    except DeviceMissing as exc:
        pytest.skip(str(exc))


def harness_device() -> HostDevice:
    """Memory of numpy under the CUDA sources. Skipped without a compiler."""
    if str(HARNESS) not in sys.path:
        sys.path.append(str(HARNESS))
    from cuda_harness import HostLauncher, compiler_missing

    from warmkv.kernels.resident.cuda import CudaOperations

    missing = compiler_missing()
    if missing:
        pytest.skip(str(missing))
    return HostDevice(CudaOperations(HostLauncher()), name="harness")


def brought(device: Device, host: np.ndarray) -> object:
    """A copy on the device."""
    array = device.alloc(host.shape, host.dtype)
    device.upload(host, array)
    return array
