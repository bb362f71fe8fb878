"""Descriptors a service manager hands over at start: a listening socket, and what it kept for us.

They come as numbers from 3 on, meant for one process, with names. What is not for this process
is not touched. What is gets close-on-exec at once, and everything nobody has a use for is closed.

**Source:** sd_listen_fds(3).
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from warmkv.schema.errors import SocketPathError

log = logging.getLogger("warmkv.daemon")
FIRST = 3
#: More than any manager keeps; a number beyond it is nonsense, not a promise of descriptors.
MAX_DESCRIPTORS = 1 << 20


@dataclass(frozen=True, slots=True)
class Inherited:
    """A descriptor that was passed, and the name it was passed under ("" for none)."""

    fd: int
    name: str


def inherited(listen_fds: str, listen_pid: str, listen_names: str, pid: int) -> tuple[Inherited, ...]:
    """What the variables of a manager promise process ``pid``; nothing where they are for another
    process, or make no sense."""
    if listen_pid != str(pid) or not listen_fds.isdecimal() or not 0 < int(listen_fds) <= MAX_DESCRIPTORS:
        return ()
    count = int(listen_fds)
    names = listen_names.split(":") if listen_names else []
    if len(names) != count:
        names = [""] * count
    return tuple(Inherited(FIRST + at, name) for at, name in enumerate(names))


def claim(promised: Iterable[Inherited]) -> list[Inherited]:
    """Those of the promised descriptors that are open, closed on exec from now on: ours."""
    found = []
    for item in promised:
        try:
            os.set_inheritable(item.fd, False)
        except OSError:
            log.warning("the service manager promised descriptor %d (%s), which is not open", item.fd, item.name or "no name")
            continue
        found.append(item)
    return found


def take_socket(passed: list[Inherited], wanted: Path) -> socket.socket | None:
    """The listening UNIX stream socket among ``passed``, taken out of the list and owned by the
    caller; of several the one bound to ``wanted``. None where no socket was passed.

    Raises SocketPathError where sockets were passed and none can be served; they stay in the list."""
    sockets = [item for item in passed if stat.S_ISSOCK(os.fstat(item.fd).st_mode)]
    if not sockets:
        return None
    usable = [(item, path) for item in sockets if (path := _listens_at(item.fd)) is not None]
    chosen = [item for item, path in usable if path == wanted] or [item for item, _ in usable]
    if len(chosen) != 1:
        raise SocketPathError(
            f"{len(sockets)} sockets were passed, {len(usable)} of them listening UNIX stream sockets with a path; "
            f"expected one, or one that is bound to {wanted}"
        )
    passed.remove(chosen[0])
    return socket.socket(fileno=chosen[0].fd)


def path_of(sock: socket.socket) -> Path | None:
    """Where a UNIX socket is bound in the file system."""
    name = sock.getsockname()
    return Path(os.fsdecode(name)) if name and name[0] not in ("\0", 0) else None


def _listens_at(fd: int) -> Path | None:
    """Path of a listening UNIX stream socket, None for any other descriptor."""
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_STREAM:
            return None
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        return path_of(sock)
