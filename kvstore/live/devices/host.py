"""Host memory as a device: what resident layers run on where there is no GPU, and what tests watch.

It behaves as a GPU's memory does, a fixed size and a book of what was asked for included, so that
refusals and allocations can be rehearsed where there is none.
"""

from __future__ import annotations

import ctypes
from math import prod

import numpy as np
import numpy.typing as npt

from warmkv.kernels.resident.operations import RowOperations
from warmkv.kvstore.live.devices.base import HostArray, check_block, check_plain, check_same_dtype, check_span
from warmkv.kvstore.live.devices.books import Books
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.schema.errors import OutOfMemory


class HostDevice:
    """Memory behind numpy. Its arrays are numpy's, so whatever numpy array is handed over is its own.

    ``operations`` compute (None: `HostOperations` on the best kernels there are); ``limit_bytes`` is how much
    can be had (None: what the machine gives).

    **Threading:** one caller at a time."""

    def __init__(
        self, operations: RowOperations | None = None, *, limit_bytes: int | None = None, name: str = "cpu"
    ) -> None:  # fmt: skip
        if operations is None:
            # Only here: others bring their own, and need not load what these are made of.
            from warmkv.kernels.dispatch import kernels
            from warmkv.kernels.resident.host import HostOperations

            operations = HostOperations(kernels("auto"))
        self.name = name
        self.operations: RowOperations = operations
        self.limit_bytes = limit_bytes
        self._books = Books()

    @property
    def allocations(self) -> int:
        return self._books.allocations

    @property
    def allocated_bytes(self) -> int:
        return self._books.held_bytes

    def alloc(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
        wanted = prod(shape) * np.dtype(dtype).itemsize
        if self.limit_bytes is not None and self.allocated_bytes + wanted > self.limit_bytes:
            held = f"{self.allocated_bytes} of {self.limit_bytes} bytes are taken"
            raise OutOfMemory(f"{self.name}: {wanted} bytes for {shape} of {np.dtype(dtype)}: {held}", wanted)
        array = allocate(shape, np.dtype(dtype))
        self._books.enter(array, wanted)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
        array = self.alloc(shape, dtype)
        array.fill(0)
        return array

    def free(self, array: HostArray) -> None:
        self._books.take_off(array)

    def upload(self, host: HostArray, out: HostArray, offset: int = 0) -> None:
        check_same_dtype("upload", host, out)
        check_span("upload", offset, host.size, out)
        check_plain("upload", out)
        out.reshape(-1)[offset : offset + host.size].reshape(host.shape)[...] = host

    def download(self, array: HostArray, out: HostArray | None = None) -> HostArray:
        if out is None:
            return array.copy()
        check_same_dtype("download", array, out)
        out[...] = array
        return out

    def copy(self, array: HostArray) -> HostArray:
        copied = self.alloc(array.shape, array.dtype)
        copied[...] = array
        return copied

    def copy_into(self, out: HostArray, offset: int, source: HostArray, start: int, count: int) -> None:
        check_same_dtype("copy", source, out)
        check_span("copy to", offset, count, out)
        check_span("copy from", start, count, source)
        check_plain("copy to", out)
        check_plain("copy from", source)
        # numpy copies overlapping rows aside first, which takes memory.
        size = out.itemsize
        ctypes.memmove(out.ctypes.data + offset * size, source.ctypes.data + start * size, count * size)

    def copy_rows(self, out: HostArray, row: int, column: int, source: HostArray) -> None:
        check_block(out, row, column, source)
        out[row : row + source.shape[0], column : column + source.shape[1]] = source

    def set_one(self, counter: HostArray, value: int) -> None:
        counter[0] = value

    def owns(self, array: object) -> bool:
        return isinstance(array, np.ndarray)

    def synchronize(self) -> None:
        """Nothing is ever due: work is done when it is enqueued."""
