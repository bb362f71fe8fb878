"""The daemon's log: standard error, one line an event, never a token.

What may be logged about a request is its kind, counts, sizes and the first digits of ids.
Exceptions of ours carry messages written with that in mind; of any other exception only the
type and the stack are logged, because its text may quote data.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback

FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"


def configure(level: str) -> None:
    """Send warmkv's records of at least ``level`` to standard error, times in UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("warmkv")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def defect(log: logging.Logger, what: str, exc: BaseException) -> None:
    """Log an exception that should not have happened: its type and stack, not its text."""
    frames = "".join(traceback.format_tb(exc.__traceback__))
    log.error("%s failed with %s\n%s", what, type(exc).__qualname__, frames.rstrip())
