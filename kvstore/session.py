"""The seam between the verbs and whatever answers them: a store in this process or a daemon.

One protocol, spoken in wire messages, with two implementations: `store.session.LocalSession`
and `client.session.RemoteSession`. The verbs above it and the contract suite are written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from warmkv.schema import messages as m
from warmkv.schema.records import NamespaceKey


@dataclass(frozen=True, slots=True)
class Grant:
    """Descriptors of a chain, owned by the receiver, who closes each; ``release`` ends the
    lease, ``release_flight`` the promise to compute what is missing. Both may be called from any
    thread, once."""

    reply: m.Acquired
    fds: tuple[int, ...]
    release: Callable[[], None]
    release_flight: Callable[[], None] = lambda: None


class Session(Protocol):
    """Requests of one user. **Threading:** every method may be called from any thread.

    Errors are WarmKVError subclasses; see each message's docstring for its meaning."""

    def open(self, identity: bytes, share: str) -> NamespaceKey: ...

    def match(self, request: m.Match) -> m.Matched: ...

    def acquire(self, request: m.Acquire) -> Grant: ...

    def prefetch(self, request: m.Prefetch) -> m.Matched: ...

    def offer(self, request: m.Offer) -> m.Offered: ...

    def commit(self, request: m.Commit, fd: int) -> m.Committed:
        """``fd`` is borrowed: the session never closes it."""
        ...

    def annotate(self, request: m.Annotate) -> m.Committed: ...

    def pin(self, request: m.Pin) -> m.Pinned: ...

    def forget(self, request: m.Forget) -> m.Forgotten: ...

    def clear(self, request: m.Clear) -> m.Forgotten: ...

    def report(self, request: m.Report, fd: int = -1) -> m.Document:
        """``fd`` is the open file of a report that reads or writes one, borrowed."""
        ...

    def close(self) -> None: ...
