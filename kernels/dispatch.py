"""Which code computes: one explicit table of operations by backend.

``reference`` is the numpy specification, ``fast`` its compiled twin (needs numba). Whoever asks for a
backend by name gets it or `BackendMissing`; ``auto`` takes the best there is and says once which.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention import reference as attention
from warmkv.kernels.attention.reference import Attended
from warmkv.kernels.errors import BackendMissing
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.nystrom import reference as nystrom
from warmkv.kernels.nystrom.reference import Group, Rectifier
from warmkv.kernels.quant import reference as quant
from warmkv.kernels.ring import reference as ring
from warmkv.kernels.ring.reference import Rotation
from warmkv.kernels.rope.reference import Rope, shift_in_place
from warmkv.kernels.turboquant import attend as turboquant
from warmkv.kernels.turboquant.attend import Operations

Backend = Literal["auto", "reference", "fast"]
#: Those before compile our words, which have pointers without types, into code that crashes.
OLDEST_NUMBA = (0, 62)
log = logging.getLogger(__name__)


class Attend(Protocol):
    def __call__(
        self, q: F32, keys: Sequence[Block], values: Sequence[Block], *, scale: float, first: int = 0,
        upto: int | None = None, softcap: float = 0.0, sinks: F32 | None = None, importance: F32 | None = None,
    ) -> Attended: ...  # fmt: skip


class AttendHeads(Protocol):
    def __call__(
        self, q: F32, keys: Sequence[Sequence[Block]], values: Sequence[Sequence[Block]], *, scale: float, first: int = 0,
        upto: int | None = None, softcap: float = 0.0, sinks: F32 | None = None, observe: bool = False,
    ) -> tuple[Attended, F32 | None]: ...  # fmt: skip


class AttendChunk(Protocol):
    def __call__(
        self, q: F32, keys: Sequence[Block], values: Sequence[Block], *, scale: float, start: int, window: int = 0,
        softcap: float = 0.0, sinks: F32 | None = None, importance: F32 | None = None,
    ) -> Attended: ...  # fmt: skip


class Encode(Protocol):
    def __call__(self, rows: F32, format_: RowFormat, *, keys: bool, field: F32 | None = None) -> Block: ...


class ShiftInPlace(Protocol):
    def __call__(
        self, keys: npt.NDArray[Any], delta: int | npt.NDArray[np.integer[Any]], rope: Rope
    ) -> None: ...  # fmt: skip


class RingAttend(Protocol):
    def __call__(
        self, q: F32, ring_keys: F32, ring_values: F32, seen: int, rotation: Rotation, *, scale: float,
        sink_keys: F32 | None = None, sink_values: F32 | None = None,
    ) -> F32: ...  # fmt: skip


class NystromPrefill(Protocol):
    def __call__(
        self, q: F32, k: F32, v: F32, *, landmarks: int, window: int, sinks: int,
        rectifier: Rectifier = Rectifier.AGGREGATE, scale: float | None = None,
    ) -> Group: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations of one backend; what each does stands in its reference.

    ``attend`` and ``attend_chunk`` work on the query heads of one KV head; see `attention.layer` for
    all heads of a layer on several threads. ``encode`` is for formats that are not rotated, those are
    encoded by ``turbo``; all others take blocks of any format."""

    name: str
    attend: Attend
    attend_chunk: AttendChunk
    encode: Encode
    decode: Callable[[Block], F32]
    refield: Callable[[Block], Block]
    ring_attend: RingAttend
    nystrom_prefill: NystromPrefill
    nystrom_step: Callable[[Group, F32, F32, F32], F32]
    turbo: Operations = turboquant.REFERENCE
    attend_heads: AttendHeads | None = None  # several KV heads in one call, where that is faster
    merge: Callable[[Sequence[Attended]], Attended] = attention.merge
    shift: ShiftInPlace = shift_in_place


def kernels(backend: Backend = "auto") -> Kernels:
    """The operations of a backend. Raises BackendMissing for one that cannot be had here."""
    if backend == "auto":
        return _best()
    if backend == "reference":
        return REFERENCE
    if backend == "fast":
        return _fast()
    raise BackendMissing(f"no backend is called {backend!r}; expected 'auto', 'reference' or 'fast'")


REFERENCE = Kernels(
    "reference", attention.attend, attention.attend_chunk, quant.encode, quant.decode, quant.refield, ring.attend,
    nystrom.prefill, nystrom.step,
)  # fmt: skip


@lru_cache(maxsize=1)
def _best() -> Kernels:
    try:
        return _fast()
    except BackendMissing as exc:
        log.warning("%s; the numpy reference computes instead", exc)
        return REFERENCE


@lru_cache(maxsize=1)
def _fast() -> Kernels:
    if find_spec("numba") is None:
        raise BackendMissing("backend 'fast' needs numba: pip install 'warmkv[fast]'")
    try:
        import numba

        if numba.version_info.short < OLDEST_NUMBA:
            raise ImportError(f"numba {numba.__version__} is older than {'.'.join(map(str, OLDEST_NUMBA))}")
        from warmkv.kernels.attention import chunk
        from warmkv.kernels.attention import fast as fast_attention
        from warmkv.kernels.attention.soften import soften
        from warmkv.kernels.nystrom import fast as fast_nystrom
        from warmkv.kernels.quant import fast as fast_quant
        from warmkv.kernels.ring import fast as fast_ring
        from warmkv.kernels.rope import fast as fast_rope

        turbo = turboquant.fast()
    except Exception as exc:  # a numba that doesn't fit this numpy says so in many ways
        raise BackendMissing(f"backend 'fast' cannot be loaded: {exc}") from exc
    return Kernels(
        "fast", fast_attention.attend, partial(chunk.attend_chunk, soften=soften, decode=fast_quant.decode), fast_quant.encode,
        fast_quant.decode, fast_quant.refield, fast_ring.attend, fast_nystrom.prefill, fast_nystrom.step, turbo,
        fast_attention.attend_heads, fast_attention.merge, fast_rope.shift_in_place,
    )  # fmt: skip
