"""Devices by their names. What was asked for is what is handed out, or an error that says what is missing."""

from __future__ import annotations

import re

from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.host import HostDevice
from warmkv.schema.errors import DeviceMissing

_CUDA = re.compile(r"cuda(?::([0-9]{1,4}))?")


def open_device(name: str) -> Device:
    """The device called ``name``: "cpu", "cuda" (the first GPU) or "cuda:N". Each call makes a device with
    books and a stream of its own.

    Raises DeviceMissing where there is no such name, no library, no driver or no such GPU: never another
    device in its place."""
    if name == "cpu":
        return HostDevice()
    found = _CUDA.fullmatch(name) if isinstance(name, str) else None
    if found is None:
        raise DeviceMissing(f"no device is called {name!r}; expected 'cpu', 'cuda' or 'cuda:N'")
    from warmkv.kvstore.live.devices.cupy_device import CupyDevice

    return CupyDevice(int(found[1] or 0))
