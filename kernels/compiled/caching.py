"""Compiled functions that are kept on disk, and when they are too old."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def _words() -> str:
    """A digest of the sources in this folder."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources), digest_size=16).hexdigest()


_WORDS = _words()


def compiled(function: Callable[..., Any]) -> Any:
    """A function that is compiled when first called and kept on disk. The compiler's own cache looks at
    the file a function stands in only; what it is made of counts here too: other words, other code."""
    dispatcher: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    try:
        index = dispatcher._cache._cache_file
        index._source_stamp = (*index._source_stamp, _WORDS)
    except (AttributeError, TypeError):  # a numba that keeps it elsewhere: compile anew rather than run old code
        return njit(nogil=True, error_model="numpy")(function)
    return dispatcher
