"""What a service manager is told: readiness, reloads, a line of status, signs of life.

One datagram each to the socket it named, or nothing where nobody asked. The protocol is plain:
``NAME=value`` lines, descriptors as ancillary data (see `fdstore`).

**Source:** sd_notify(3).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("warmkv.daemon")
#: A manager that is busy reads late; readiness must not be lost to that.
SEND_TIMEOUT_S = 5.0
#: While something takes long, more time is asked for so often, and so much of it.
EXTEND_EVERY_S = 10.0
EXTEND_BY_S = 45.0
MAX_STATUS_CHARACTERS = 400
US = 1_000_000


def target(address: str) -> str:
    """``address`` as a socket takes it; "" for none, and for kinds this cannot reach."""
    if address.startswith("@"):
        return "\0" + address[1:]
    return address if address.startswith("/") else ""


class Notifier:
    """Tells ``address`` (a path, ``@abstract`` or "": nobody). Never fails: a manager that does not
    hear is logged.

    **Threading:** any thread; a call may wait up to `SEND_TIMEOUT_S` for the manager to read."""

    def __init__(self, address: str, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.address = target(address)
        self._monotonic_ns = monotonic_ns
        if address and not self.address:
            log.warning("the service manager's socket %r is of a kind this daemon cannot reach", address)

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self.address)

    def tell(self, *lines: str) -> bool:
        """Send ``NAME=value`` lines as one datagram; whether it went out."""
        if not self.address:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.sendto("\n".join(lines).encode("utf-8", "replace"), self.address)
        except OSError as exc:
            log.warning("service manager could not be told %s: %s", lines[0].split("=")[0], exc)
            return False
        return True

    def ready(self, status: str) -> None:
        self.tell("READY=1", _status(status))

    def status(self, text: str) -> None:
        """One line for people, in ``systemctl status``."""
        self.tell(_status(text))

    def alive(self) -> bool:
        return self.tell("WATCHDOG=1")

    def stopping(self) -> None:
        self.tell("STOPPING=1", _status("stopping"))

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Between these the manager shows the service as reloading."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={self._monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.tell("READY=1")

    @contextmanager
    def extending(self, doing: str, at_most_s: float) -> Iterator[None]:
        """Keep the manager from losing patience while something takes long, but not for ever: what
        takes longer than ``at_most_s`` is taken for stuck and left to the manager's own time-out."""
        if not self.address:
            yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._extend, args=(doing, at_most_s, done.wait), name="warmkv-extend", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _extend(self, doing: str, at_most_s: float, wait: Callable[[float], bool]) -> None:
        spent_s = 0.0
        self.tell(_status(doing), f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * US)}")
        while not wait(EXTEND_EVERY_S):
            spent_s += EXTEND_EVERY_S
            if spent_s >= at_most_s:
                log.warning("%s takes longer than %.0f s; the service manager gets no more signs of it", doing, at_most_s)
                return
            self.tell(_status(f"{doing}, {spent_s:.0f} s so far"), f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * US)}")


def _status(text: str) -> str:
    """One line, whatever was in ``text``."""
    return f"STATUS={' '.join(text.split())[:MAX_STATUS_CHARACTERS]}"
