"""The seam between resident state and the memory it lives in.

All that layers know of a device is here; numpy and cupy implement it. Work is in order on the device's own
stream: what is enqueued first happens first, and only `Device.download` and `Device.synchronize` wait.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from warmkv.kernels.resident.operations import RowOperations

#: An array of a device: numpy's or cupy's, C-contiguous.
DeviceArray: TypeAlias = Any
HostArray: TypeAlias = npt.NDArray[Any]


class Device(Protocol):
    """Memory, copies and operations of one device.

    **Threading:** one caller at a time."""

    name: str
    operations: RowOperations

    @property
    def allocations(self) -> int:
        """How often memory was asked for so far: what proves that a decode step asks for none."""
        ...

    @property
    def allocated_bytes(self) -> int:
        """Bytes asked for so far and not given back."""
        ...

    def alloc(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Memory of unspecified contents. Raises OutOfMemory with the bytes asked for."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        """Memory of zeros. Raises OutOfMemory."""
        ...

    def free(self, array: DeviceArray) -> None:
        """Take memory of `alloc`, `zeros` or `copy` off the books; it goes once nobody refers to it."""
        ...

    def upload(self, host: HostArray, out: DeviceArray, offset: int = 0) -> None:
        """Copy a host array, mapped segments included, into elements of ``out`` from ``offset`` on, of the same
        dtype; through pinned staging where that is what copies fast. ``host`` may be reused on return."""
        ...

    def download(self, array: DeviceArray, out: HostArray | None = None) -> HostArray:
        """A host copy; waits for all that was enqueued before."""
        ...

    def copy(self, array: DeviceArray) -> DeviceArray:
        """A real copy in memory of its own. Raises OutOfMemory."""
        ...

    def copy_into(self, out: DeviceArray, offset: int, source: DeviceArray, start: int, count: int) -> None:
        """Copy ``count`` elements of one flat array into another; within one array ranges may overlap: the
        result is as if the source had been copied aside first. Allocates nothing."""
        ...

    def set_one(self, counter: DeviceArray, value: int) -> None:
        """Write an int32 (1,) where it lies."""
        ...

    def owns(self, array: object) -> bool:
        """Whether this is an array of this device."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was enqueued. Raises DeviceFault."""
        ...
