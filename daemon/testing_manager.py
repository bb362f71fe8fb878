"""A stand-in for a service manager: hears notifications, keeps descriptors, hands them to processes."""

from __future__ import annotations

import array
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from warmkv.daemon.testing import eventually

HEARS_S = 20.0


class ServiceManager:
    """Listens at ``address`` (a path, or ``@abstract``) while it is entered.

    ``messages`` are what was told, each as a mapping; ``kept`` the descriptors it was asked to keep,
    by name, which it closes at the end."""

    def __init__(self, address: Path | str) -> None:
        self.address = str(address)
        self.messages: list[dict[str, str]] = []
        self.kept: dict[str, int] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self.address[1:] if self.address.startswith("@") else self.address)
        self._thread = threading.Thread(target=self._listen, name="service-manager")

    @property
    def environ(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.address}

    def told(self, name: str) -> list[str]:
        """Values of one variable, in the order they were told."""
        return [message[name] for message in list(self.messages) if name in message]

    def hears(self, name: str, times: int = 1) -> bool:
        """Whether a variable is told so often, after waiting for it."""
        return eventually(lambda: len(self.told(name)) >= times, HEARS_S)

    def keeps(self, names: Callable[[set[str]], bool]) -> bool:
        """Whether the names of what it keeps come to satisfy ``names``."""
        return eventually(lambda: names(set(self.kept)), HEARS_S)

    def __enter__(self) -> ServiceManager:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()
        for fd in self.kept.values():
            os.close(fd)
        self.kept.clear()

    def _listen(self) -> None:
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
            if not data:
                return
            message = dict(line.partition("=")[::2] for line in data.decode().splitlines())
            fds = array.array("i")
            for _, _, packed in ancillary:
                fds.frombytes(packed)
            if message.get("FDSTORE") and len(fds) == 1 and message["FDNAME"] not in self.kept:
                self.kept[message["FDNAME"]] = fds.pop()
            elif message.get("FDSTOREREMOVE"):
                fds.append(self.kept.pop(message["FDNAME"], -1))
            for fd in fds:
                if fd >= 0:
                    os.close(fd)
            self.messages.append(message)


def listening(path: Path, mode: int = 0o600) -> socket.socket:
    """A socket as a socket unit makes it: bound and listening before anybody serves it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    os.chmod(path, mode)
    sock.listen(16)
    return sock
