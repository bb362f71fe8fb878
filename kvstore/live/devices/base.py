"""The seam between resident state and the memory it lives in.

All that layers know of a device is here; numpy and cupy implement it. Work is in order on the device's own
stream: what is enqueued first happens first, and only `Device.download` and `Device.synchronize` wait.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

from warmkv.kernels.resident.operations import RowOperations
from warmkv.schema.errors import RecordError

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
        """Take memory of `alloc`, `zeros` or `copy` off the books now; it leaves them by itself once nobody
        refers to it."""
        ...

    def upload(self, host: HostArray, out: DeviceArray, offset: int = 0) -> None:
        """Copy a host array, mapped segments included, into elements of ``out`` from ``offset`` on, of the same
        dtype; through pinned staging where that is what copies fast. ``host`` may be reused on return. Raises
        RecordError for what does not fit, having copied nothing."""
        ...

    def download(self, array: DeviceArray, out: HostArray | None = None) -> HostArray:
        """A host copy; waits for all that was enqueued before."""
        ...

    def copy(self, array: DeviceArray) -> DeviceArray:
        """A real copy in memory of its own. Raises OutOfMemory."""
        ...

    def copy_into(self, out: DeviceArray, offset: int, source: DeviceArray, start: int, count: int) -> None:
        """Copy ``count`` elements of one flat array into another; within one array ranges may overlap: the
        result is as if the source had been copied aside first. Allocates nothing. Raises RecordError for
        elements that are not there, having copied nothing."""
        ...

    def copy_rows(self, out: DeviceArray, row: int, column: int, source: DeviceArray) -> None:
        """Copy ``source`` (n, width) into rows [row, row + n) and columns [column, column + width) of ``out``
        (rows, columns) of the same dtype, two arrays that do not overlap. Allocates nothing."""
        ...

    def set_one(self, counter: DeviceArray, value: int) -> None:
        """Write an int32 (1,) where it lies, in order with all else. Allocates nothing."""
        ...

    def owns(self, array: object) -> bool:
        """Whether this is an array of this device."""
        ...

    def synchronize(self) -> None:
        """Wait for all that was enqueued. Raises DeviceFault."""
        ...


def check_span(what: str, first: int, count: int, array: DeviceArray) -> None:
    """Raises RecordError unless ``array`` has elements [first, first + count)."""
    if first < 0 or count < 0 or first + count > array.size:
        raise RecordError(f"{what}: elements [{first}, {first + count}) of an array of {array.size}")


def check_same_dtype(what: str, found: DeviceArray, expected: DeviceArray) -> None:
    """Raises RecordError unless both hold the same kind of numbers."""
    if found.dtype != expected.dtype:
        raise RecordError(f"{what}: {found.dtype} into an array of {expected.dtype}")


def check_plain(what: str, array: DeviceArray) -> None:
    """Raises RecordError for an array with gaps."""
    if not array.flags.c_contiguous:
        raise RecordError(f"{what}: an array of {array.shape} with gaps, expected a contiguous one")


def check_block(out: DeviceArray, row: int, column: int, source: DeviceArray) -> None:
    """Raises RecordError unless ``source`` fits into ``out`` as `Device.copy_rows` copies it."""
    check_same_dtype("copy of rows", source, out)
    flat = source.ndim != 2 or out.ndim != 2
    if flat or min(row, column) < 0 or row + source.shape[0] > out.shape[0] or column + source.shape[1] > out.shape[1]:
        raise RecordError(f"copy of rows: {source.shape} at ({row}, {column}) of {out.shape}")
