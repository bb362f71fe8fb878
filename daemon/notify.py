"""Readiness for a service manager: one datagram, or nothing where nobody asked."""

from __future__ import annotations

import logging
import socket

log = logging.getLogger("warmkv.daemon")


def notify(address: str, state: str) -> None:
    """Send ``state`` (such as ``READY=1``) to the notification socket; never fails, never waits."""
    if not address:
        return
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(0)
            sock.sendto(state.encode(), target)
    except OSError as exc:
        log.warning("service manager could not be told %s: %s", state.split("=")[0], exc)
