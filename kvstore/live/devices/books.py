"""What was asked of a device's memory and not given back."""

from __future__ import annotations

import weakref

from warmkv.kvstore.live.devices.base import DeviceArray


class Books:
    """How often memory was asked for, and how many bytes of it are held: by arrays that were entered, until they are
    taken off or nobody refers to them any more.

    **Threading:** that of the device."""

    def __init__(self) -> None:
        self.allocations = 0
        self._held: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def enter(self, array: DeviceArray, count: int) -> None:
        """``array`` took ``count`` bytes."""
        self.allocations += 1
        self._held[id(array)] = count
        weakref.finalize(array, self._held.pop, id(array), None)

    def take_off(self, array: DeviceArray) -> None:
        """Its bytes are not counted any more; nothing for an array that was not entered."""
        self._held.pop(id(array), None)
