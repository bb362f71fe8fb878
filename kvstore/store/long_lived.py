"""The garbage collector, kept away from objects of which a store makes hundreds of thousands at once.

They stay as long as the store does. While they are made, looking for garbage among them takes a third
of the time; later each full collection would stop every thread for a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived(*, freeze: bool = False) -> Iterator[None]:
    """No collection inside; with ``freeze`` none ever of what there is at the end, which is for the
    process to decide, not for a library in it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if freeze:
            gc.freeze()
    finally:
        if enabled:
            gc.enable()
