"""What the layers of one device share while they compute: scratch memory, answers, and where host rows wait.

Made once, so that a step asks for no memory, and shared, because layers compute one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from warmkv.kernels.formats import F32
from warmkv.kernels.resident.checks import address
from warmkv.kvstore.live.devices.base import Device, DeviceArray
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import CapacityExceeded, RecordError

#: Queries and rows that are handed over at once, at most, before memory is asked for.
CHUNK = 512
_FLOAT = np.dtype(np.float32)
_COUNTER = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class Needs:
    """float32 numbers: ``scratch`` of attention, its ``answers``, and what waits on its way to a device that
    cannot read the host's memory: ``queries``, ``keys`` and ``values``."""

    scratch: int = 0
    answers: int = 0
    queries: int = 0
    keys: int = 0
    values: int = 0

    @classmethod
    def of(cls, device: Device, plans: Sequence[LayerPlan], capacity: int, chunk: int = CHUNK) -> Needs:
        """Of the attention layers among ``plans`` with up to ``capacity`` rows, for up to ``chunk`` queries or
        rows at once. Raises RecordError for counts below 1."""
        if capacity < 1 or chunk < 1:
            raise RecordError(f"a workspace for {capacity} rows, {chunk} at once; expected at least 1")
        waiting = 0 if device.owns(np.empty(0, _FLOAT)) else chunk
        needs = cls()
        for plan in (plan for plan in plans if plan.kv_heads):
            mine = cls(
                device.operations.scratch_floats(plan.heads, plan.value_size, capacity), chunk * plan.heads * plan.value_size,
                waiting * plan.heads * plan.key_size, waiting * plan.kv_heads * plan.key_size,
                waiting * plan.kv_heads * plan.value_size,
            )  # fmt: skip
            needs = cls(*(max(getattr(needs, item.name), getattr(mine, item.name)) for item in fields(cls)))
        return needs

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace for these needs."""
        numbers = self.scratch + self.answers + self.queries + self.keys + self.values
        return _COUNTER.itemsize + _FLOAT.itemsize * numbers


class Workspace:
    """Memory of ``device`` for ``needs``. Raises OutOfMemory.

    ``zero`` is an int32 (1,) that nobody writes: the base of layers whose row 0 is the first they have.

    **Threading:** one caller at a time."""

    def __init__(self, device: Device, needs: Needs) -> None:
        self.device, self.needs = device, needs
        self._arrays: list[DeviceArray] = []
        try:
            self.zero: DeviceArray = self._kept(device.zeros((1,), _COUNTER))
            self.scratch: DeviceArray = self._kept(device.alloc((needs.scratch,), _FLOAT))
            self._answers: DeviceArray = self._kept(device.alloc((needs.answers,), _FLOAT))
            sizes = {"queries": needs.queries, "keys": needs.keys, "values": needs.values}
            self._waiting = {what: self._kept(device.alloc((size,), _FLOAT)) for what, size in sizes.items()}
        except BaseException:
            self.release()
            raise

    @classmethod
    def of(cls, device: Device, plans: Sequence[LayerPlan], capacity: int, *, chunk: int = CHUNK) -> Workspace:
        """For the attention layers among ``plans``, see `Needs.of`."""
        return cls(device, Needs.of(device, plans, capacity, chunk))

    @staticmethod
    def bytes_of(device: Device, plans: Sequence[LayerPlan], capacity: int, *, chunk: int = CHUNK) -> int:
        """What `of` allocates."""
        return Needs.of(device, plans, capacity, chunk).nbytes

    @property
    def allocated_bytes(self) -> int:
        return self.needs.nbytes

    def answers(self, *shape: int) -> DeviceArray:
        """Memory for float32 answers of a shape, contents unspecified: the same addresses every time. Raises
        CapacityExceeded for more than was planned."""
        count = int(np.prod(shape))
        if count > self.needs.answers:
            most = self.needs.answers // max(1, int(np.prod(shape[1:])))
            raise CapacityExceeded(f"answers of {shape}: the workspace has room for {most} queries at once; ask for fewer")
        return self._answers[:count].reshape(shape)

    def brought(self, rows: F32 | DeviceArray, what: str) -> DeviceArray:
        """``rows`` as an array of the device: themselves where they are that, else copied to where ``what``
        ("queries", "keys" or "values") wait, until the next that are brought there. More than was planned
        gets memory of its own. Host rows may have gaps, others not. Raises OutOfMemory, DeviceFault, and RecordError
        for queries that lie in the memory of answers, which are written while they are read."""
        device = self.device
        if device.owns(rows):
            found = np.ascontiguousarray(rows) if isinstance(rows, np.ndarray) else rows
            apart = address(found) - address(self._answers)
            if what == "queries" and rows.size and -int(found.nbytes) < apart < int(self._answers.nbytes):
                raise RecordError(f"{what} {found.shape} that lie among the answers of this workspace; copy them first")
            return found
        room = self._waiting[what]
        if rows.size > room.size:
            room = device.alloc((rows.size,), _FLOAT)
        device.upload(rows, room)
        return room[: rows.size].reshape(rows.shape)

    def release(self) -> None:
        """Take its memory off the device's books; not to be used any more."""
        while self._arrays:
            self.device.free(self._arrays.pop())

    def _kept(self, array: DeviceArray) -> DeviceArray:
        self._arrays.append(array)
        return array
