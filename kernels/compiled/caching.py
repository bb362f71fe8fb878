"""Functions that are compiled, and kept on disk where there is a place for them.

The compiler's own cache asks how old the file is that a function stands in. Ours are made of words from
other files as well, and run on machines that are switched off in the midst of writing and on disks that are
full or read-only. So what is kept is named after all it is made of, and what cannot be kept or read is
compiled again: a cache is never a reason not to compute.
"""

# mypy: disable-error-code="misc, no-untyped-call"
from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.registry import cpu_target

_HERE = sorted(Path(__file__).parent.glob("*.py"))


def compiled(*signature: Any, fastmath: bool | set[str] = False) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function that is compiled at once for ``signature``, or without one when it is first
    called; it runs without the interpreter lock."""

    def decorated(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, fastmath=fastmath, error_model="numpy")(function)
        try:
            dispatcher._cache = _Kept(function)
        except (OSError, RuntimeError):  # no folder can be written
            pass
        for types in signature:
            dispatcher.compile(types)
        if signature:
            dispatcher.disable_compile()
        return dispatcher

    return decorated


class _Kept(FunctionCache):
    """Machine code of one function. Raises RuntimeError where there is no place for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path, filename_base=f"{self._impl.filename_base}.{_made_of(function)}",
            source_stamp=self._impl.locator.get_source_stamp(),
        )  # fmt: skip

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # half a file: whatever its reader trips over
            self._forget()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError:
            pass

    def _forget(self) -> None:
        try:
            self._cache_file.flush()
        except OSError:
            pass


def _made_of(function: Callable[..., Any]) -> str:
    """A digest of the function's file, of those in this folder, and of the machine compiled for."""
    digest = hashlib.blake2b(repr(cpu_target.target_context.codegen().magic_tuple()).encode(), digest_size=8)
    for source in (Path(inspect.getfile(function)), *_HERE):
        digest.update(source.read_bytes())
    return digest.hexdigest()
