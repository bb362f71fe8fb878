"""What drafters look at: the residual stream behind chosen layers, collected on the device of one forward pass.

A row has a slot for each tapped layer side by side, which is what a drafter's first projection reads.

**Source:** memra `DflashTapSink`.
"""

from __future__ import annotations

import numpy as np

from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.schema.errors import CapacityExceeded, RecordError

_F32 = np.dtype(np.float32)


class TapSink:
    """Room for ``rows`` rows of ``hidden`` numbers behind each of ``layers``, numbers of layers of the plan:
    ``buffer`` (rows, layers * hidden) float32 of ``device``, unspecified where nothing was written.

    ``base`` is the row that the first row of a write goes to: who walks through a prompt in chunks sets it
    before each. Memory is taken here, and never by a write.

    **Threading:** one caller at a time."""

    def __init__(self, device: Device, layers: tuple[int, ...], *, rows: int, hidden: int) -> None:
        """Raises RecordError for no layers, layers twice or sizes that are none, OutOfMemory."""
        if not layers or len(set(layers)) != len(layers) or min(layers) < 0:
            raise RecordError(f"taps behind layers {layers}, expected different ones from 0 on")
        if min(rows, hidden) < 1:
            raise RecordError(f"taps of {rows} rows of {hidden} numbers, expected at least 1 of each")
        self.device, self.layers, self.rows, self.hidden = device, tuple(layers), rows, hidden
        self.base = 0
        self.buffer: DeviceArray = device.alloc((rows, len(layers) * hidden), _F32)

    def write(self, layer: int, rows: DeviceArray) -> None:
        """Copy ``rows`` (n, hidden) float32 of the device, the residual stream behind ``layer``, into its slot of
        rows [base, base + n). Raises RecordError for a layer that is not tapped and for other arrays,
        CapacityExceeded where rows do not fit; nothing changed."""
        if layer not in self.layers:
            raise RecordError(f"layer {layer} is not tapped, those are {', '.join(map(str, self.layers))}")
        if not self.device.owns(rows):
            raise RecordError(f"layer {layer}: taps are {type(rows).__name__}, expected an array of {self.device.name}")
        if rows.ndim != 2 or rows.shape[1] != self.hidden or rows.dtype != _F32:
            raise RecordError(f"layer {layer}: taps are {rows.dtype} {rows.shape}, expected float32 (n, {self.hidden})")
        if not 0 <= self.base <= self.rows - len(rows):
            end = self.base + len(rows)
            raise CapacityExceeded(f"layer {layer}: taps of rows [{self.base}, {end}), there is room for {self.rows}")
        if len(rows):
            self.device.copy_rows(self.buffer, self.base, self.layers.index(layer) * self.hidden, rows)

    def free(self) -> None:
        """Take the memory off the device's books; the sink is not to be used any more."""
        self.device.free(self.buffer)
