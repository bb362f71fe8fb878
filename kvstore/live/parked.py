"""The logits of the last token, parked where they were computed until somebody saves.

A loop that samples on the device never needs them on the host, and who resumes at a whole prompt needs
just these. So the row is copied aside on the device, and comes down once, for the record that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.rows.allocation import refusals
from warmkv.schema.errors import RecordError

_F32 = np.dtype(np.float32)


class ParkedLogits:
    """One row of float32 logits in memory taken when the first is parked; of ``device``, or the host's.

    **Threading:** that of its cache."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self._row: DeviceArray | None = None
        self._position: int | None = None
        #: The newest copy, parked or not.
        self._copied: object = None

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._row is None else int(self._row.nbytes)

    def park(self, row: DeviceArray, position: int) -> None:
        """Copy ``row`` (vocabulary,) float32, of the device or of the host, which are those after ``position``
        tokens. Raises RecordError for another shape or dtype than the first had, OutOfMemory, nothing changed;
        after a DeviceFault nothing is parked."""
        self.prepare(row)(position)

    def prepare(self, row: DeviceArray) -> Callable[[int], None]:
        """Everything of `park` that may fail, the copy too: until what is returned is told a position, nothing is
        parked, and nothing is where another row was copied since."""
        shape = getattr(row, "shape", None)
        expected = shape if self._row is None else self._row.shape
        if shape is None or len(shape) != 1 or not shape[0] or shape != expected or row.dtype != _F32:
            found = type(row).__name__ if shape is None else f"{row.dtype} {shape}"
            raise RecordError(f"logits are {found}, expected float32 {'(vocabulary,)' if self._row is None else expected}")
        on_device = self.device is not None and self.device.owns(row)
        if not on_device and not isinstance(row, np.ndarray):
            raise RecordError(f"logits are a {type(row).__name__} that is neither the device's nor the host's")
        if self._row is None:
            self._row = self._made(shape)
        self.forget()
        mine = self._copied = object()
        if self.device is None:
            self._row[:] = row
        elif on_device:
            self.device.copy_into(self._row, 0, row, 0, row.size)
        else:
            self.device.upload(np.ascontiguousarray(row), self._row)

        def at(position: int) -> None:
            if self._copied is mine:
                self._position = position

        return at

    def at(self, position: int) -> F32 | None:
        """The row as a host copy, where it is the one after ``position`` tokens; None otherwise."""
        if self._row is None or self._position != position:
            return None
        return np.array(self._row if self.device is None else self.device.download(self._row), np.float32)

    def passed(self, position: int) -> None:
        """Tokens back to ``position`` were forgotten."""
        if self._position is not None and self._position > position:
            self.forget()

    def forget(self) -> None:
        """Nothing is parked; memory stays."""
        self._position = None

    def free(self) -> None:
        """Give the memory back; the next row that is parked takes it again."""
        if self.device is not None and self._row is not None:
            self.device.free(self._row)
        self._row = self._position = None

    def _made(self, shape: tuple[int, ...]) -> DeviceArray:
        if self.device is not None:
            return self.device.alloc(shape, _F32)
        with refusals(4 * shape[0], "parked logits"):
            return np.empty(shape, _F32)
