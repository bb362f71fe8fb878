"""The session of a switched-off cache: every question fails, none is ever sent."""

from __future__ import annotations

from typing import NoReturn

from warmkv.schema import messages as m
from warmkv.schema.errors import DaemonUnavailable

REASON = "switched off by WARMKV_DISABLE"


class DisabledSession:
    """Implements `kvstore.session.Session` by raising DaemonUnavailable."""

    def open(self, identity: bytes, share: str) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def match(self, request: m.Match) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def acquire(self, request: m.Acquire) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def prefetch(self, request: m.Prefetch) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def offer(self, request: m.Offer) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def commit(self, request: m.Commit, fd: int) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def annotate(self, request: m.Annotate) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def pin(self, request: m.Pin) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def forget(self, request: m.Forget) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def clear(self, request: m.Clear) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def report(self, request: m.Report, fd: int = -1) -> NoReturn:
        raise DaemonUnavailable(REASON)

    def close(self) -> None:
        """There is nothing to close."""
