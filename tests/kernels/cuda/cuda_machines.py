"""Machines that CUDA programs run on: the host harness, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cuda_harness import HostLauncher, aligned

from warmkv.kernels.cuda.launch import Launcher


@dataclass(frozen=True)
class Machine:
    """``put`` makes a device array of a numpy array, ``get`` a numpy array of what is on the device."""

    name: str
    launcher: Launcher
    put: Callable[[Any], Any]
    get: Callable[[Any], Any]


def host(order: str = "shuffled") -> Machine:
    return Machine("host", HostLauncher(order), aligned, np.array)


def gpu() -> Machine:
    """Skips where there is no GPU."""
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU here")
    from warmkv.kernels.cuda.cupy_launch import CupyLauncher

    stream = cupy.cuda.Stream(non_blocking=True)

    def put(array: Any) -> Any:
        placed = cupy.ndarray(array.shape, array.dtype)
        placed.set(np.ascontiguousarray(array), stream=stream)
        stream.synchronize()
        return placed

    return Machine("cupy", CupyLauncher(stream), put, lambda array: array.get(stream=stream))
