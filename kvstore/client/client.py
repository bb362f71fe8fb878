"""The client an agent holds: the verbs, over a daemon that may not be there.

Nothing here may make an agent worse off than without a cache: a daemon that is absent, slow
or broken turns into misses and one line in the log.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path

from warmkv.kvstore.client import environment
from warmkv.kvstore.client.disabled import DisabledSession
from warmkv.kvstore.client.session import RemoteSession
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.errors import StoreError, WarmKVError

log = logging.getLogger("warmkv.client")
_warned: set[tuple[int, str]] = set()
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def connect(
    path: str | os.PathLike[str] | None = None, *, timeout_s: float = 5.0, strict: bool = False, share: str = ""
) -> Client:
    """A client of the daemon at ``path`` (default: ``$WARMKV_SOCKET``, else the user's runtime
    directory).

    ``timeout_s`` is the longest a call on the agent's path may take; saves acknowledged from
    disk, prefetches and administrative calls have 12 times that. An absent, slow or failing
    daemon is a miss with a reason, one warning in the log per process and socket, and is asked
    again about a second later. With ``strict`` it is an exception instead, here as in every
    verb, and every call tries. ``WARMKV_DISABLE=1`` makes every call a silent miss."""
    if environment.disabled():
        return Client(DisabledSession(), Path(), strict=False, share=share)
    where = environment.socket_path() if path is None else Path(path)
    session = RemoteSession(where, timeout_s=timeout_s, backoff=not strict)
    client = Client(session, where, strict=strict, share=share)
    try:
        session.greet()
    except WarmKVError as exc:
        client._failed(exc)
    return client


class Client(Verbs):
    """See `connect`. **Threading:** one client serves any number of threads, and forked children."""

    def __init__(self, session: RemoteSession | DisabledSession, path: Path, *, strict: bool, share: str = "") -> None:
        super().__init__(session, share=share)
        self.path = path
        self._strict = strict
        self._remote = session if isinstance(session, RemoteSession) else None
        _clients.add(self)

    @property
    def enabled(self) -> bool:
        """False when ``WARMKV_DISABLE`` switched caching off."""
        return self._remote is not None

    def _failed(self, exc: WarmKVError) -> str:
        if self._strict:
            raise exc
        reason = f"{type(exc).__name__}: {exc}"
        if self._remote is None or isinstance(exc, StoreError):
            log.debug("no cache for this call: %s", reason)
        else:
            _warn_once(self.path, reason)
        return reason

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._remote is not None:
            self._remote.after_fork()


def _warn_once(path: Path, reason: str) -> None:
    """The one warning a process gets about a socket. The log never raises, warnings might."""
    key = (os.getpid(), str(path))
    if key not in _warned:
        _warned.add(key)
        log.warning("continuing without the prefix cache: %s", reason)


def _drop_inherited() -> None:
    for client in list(_clients):
        client._after_fork()


os.register_at_fork(after_in_child=_drop_inherited)
