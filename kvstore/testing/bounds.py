"""A bound on a test: one that hangs fails instead."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the main thread when the block takes longer than ``seconds``."""

    def expire(*_: object) -> None:
        raise TimeoutError("test took too long")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
