"""A host device that fails when told to, the way devices fail: in the middle of several that do not."""

from __future__ import annotations

from typing import Any

from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.schema.errors import DeviceFault, OutOfMemory

#: What raises, and as what.
FAULTS: dict[str, type[Exception]] = {
    "alloc": OutOfMemory, "copy": OutOfMemory, "upload": DeviceFault, "copy_into": DeviceFault, "set_one": DeviceFault,
}  # fmt: skip


class FailingDevice(HostDevice):
    """``fail`` names a method of `FAULTS`, which raises on its call number ``after`` from then on, and does
    nothing but that."""

    def __init__(self, **about: Any) -> None:
        self.failing, self.left = "", 0
        super().__init__(**about)

    def fail(self, method: str, after: int = 0) -> None:
        """Until `heal`."""
        self.failing, self.left = method, after

    def heal(self) -> None:
        self.failing = ""

    def alloc(self, *args: Any) -> Any:
        self._count("alloc")
        return super().alloc(*args)

    def copy(self, *args: Any) -> Any:
        self._count("copy")
        return super().copy(*args)

    def upload(self, *args: Any) -> None:
        self._count("upload")
        super().upload(*args)

    def copy_into(self, *args: Any) -> None:
        self._count("copy_into")
        super().copy_into(*args)

    def set_one(self, *args: Any) -> None:
        self._count("set_one")
        super().set_one(*args)

    def _count(self, method: str) -> None:
        if method == self.failing:
            self.left -= 1
            if self.left < 0:
                raise FAULTS[method](f"{self.name}: {method} fails because it was told to")
