"""Long work: something moves on the terminal while it lasts, on standard error and only there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from warmkv.schema.errors import WarmKVError

TELL_INTERVAL_S = 0.5


@contextmanager
def waiting(what: str, tell: Callable[[], str] | None = None, *, quiet: bool = False) -> Iterator[None]:
    """Show that ``what`` is under way until the block ends, and how far it is where ``tell`` says
    so. Silent with ``quiet`` and where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    done = threading.Event()
    with Console(file=sys.stderr).status(Text(what)) as line:

        def follow() -> None:
            while tell is not None and not done.wait(TELL_INTERVAL_S):
                try:
                    line.update(Text(f"{what}, {tell()}"))
                except (OSError, WarmKVError):
                    return  # how far it is matters less than the work itself

        thread = threading.Thread(target=follow, name="warmkv-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
