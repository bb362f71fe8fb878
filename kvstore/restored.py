"""A restored prefix: rows and states in sealed memory, mapped into this process.

What arrives here was checked by `assembly`; see there for what is proven before it is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import overload

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.results import Match
from warmkv.kvstore.rows import stored_shape
from warmkv.schema.errors import ClosedError
from warmkv.schema.identity import PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Anchor

Rows = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class RestoredPlane:
    """One plane of a layer as consecutive ``blocks``, each (rows, *row_shape); ``starts`` are the
    token positions of their first rows, ``fields`` the digests of their quantisation fields
    (blocks with different fields must not be joined).

    Of a full layer they hold rows [0, usable), of a windowed one those it needs. Of a state there
    is one block, its rows as its runtime counts them. Blocks are read-only views of sealed memory
    (private and writable ones if the restore asked for that) and keep their mapping alive. bf16
    comes as uint16 bits, see ``format``."""

    role: PlaneRole
    format: PlaneFormat
    row_shape: tuple[int, ...]
    blocks: tuple[Rows, ...]
    starts: tuple[int, ...] = ()
    fields: tuple[bytes, ...] = ()

    def array(self) -> Rows:
        """All rows in one array: the block itself where there is one, else a copy."""
        if not self.blocks:
            dtype, shape = stored_shape(PlaneSpec(self.role, self.format, self.row_shape))
            return np.empty((0, *shape), dtype)
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)


@dataclass(frozen=True, slots=True)
class RestoredLayer:
    """Planes of one layer by role: those that hold rows, those that hold state, and the frozen
    quantisation fields by digest. ``constants`` are encoder outputs by the start of their
    attachment."""

    layer: int
    planes: dict[PlaneRole, RestoredPlane]
    states: dict[PlaneRole, RestoredPlane] = field(default_factory=dict)
    constants: dict[int, dict[PlaneRole, RestoredPlane]] = field(default_factory=dict)
    fields: dict[bytes, Rows] = field(default_factory=dict)

    def plane(self, role: PlaneRole) -> RestoredPlane:
        return self.planes[role]

    @property
    def first(self) -> int:
        """Position of the first row; 0 where there are none."""
        return min((plane.starts[0] for plane in self.planes.values() if plane.starts), default=0)

    @property
    def keys(self) -> Rows:
        """Key rows, shape (rows, heads, head_size)."""
        return self.planes[PlaneRole.KEY].array()

    @property
    def values(self) -> Rows:
        """Value rows, shape (rows, heads, head_size)."""
        return self.planes[PlaneRole.VALUE].array()


class Layers(Sequence[RestoredLayer]):
    """Layers that are put together when they are first looked at: a model has dozens, each with
    views of its own, and nothing they are made of is left to be checked.

    Keeps the mappings alive, as its layers do. **Threading:** any; two that look at the same layer
    at the same time may see equal layers instead of one."""

    __slots__ = ("_made", "_make")

    def __init__(self, count: int, make: Callable[[int], RestoredLayer]) -> None:
        self._make = make
        self._made: list[RestoredLayer | None] = [None] * count

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> RestoredLayer: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[RestoredLayer, ...]: ...

    def __getitem__(self, index: int | slice) -> RestoredLayer | tuple[RestoredLayer, ...]:
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        layer = self._made[index]
        if layer is None:
            layer = self._made[index] = self._make(index % len(self._made))
        return layer


@dataclass
class Flight:
    """The promise to compute what a restore did not find; others who asked to wait do, until it
    is closed, the connection ends or its time is over. Use as a context manager."""

    _release: Callable[[], None] | None = field(default=None, repr=False)

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let those who wait go on. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # noqa: BLE001 - a finalizer has nobody to tell
            pass


@dataclass
class Restored:
    """State of the first ``usable`` tokens; false when it is a miss. Use as a context manager:
    `close` ends the lease, views taken before stay valid. ``layers`` has one entry a layer.

    ``anchor`` is the named position restored to, where one was asked for and found; ``logits``
    those parked after the last id, where they were asked for. ``flight`` is set where this caller
    is the one who computes the rest while others wait: close it once the state is saved, or when
    it will not be."""

    match: Match
    layers: Sequence[RestoredLayer] = ()
    promoted_bytes: int = 0
    logits: npt.NDArray[np.float32] | None = None
    flight: Flight | None = None
    _release: Callable[[], None] | None = field(default=None, repr=False)
    _closed: bool = field(default=False, repr=False)

    @property
    def usable(self) -> int:
        return self.match.usable

    @property
    def matched(self) -> int:
        return self.match.matched

    @property
    def tier(self) -> str | None:
        """Where the state lay when it was asked for."""
        return self.match.tier

    @property
    def reason(self) -> str:
        return self.match.reason

    @property
    def anchor(self) -> Anchor | None:
        return next((item for item in self.match.anchors if item.position == self.usable), None)

    def __bool__(self) -> bool:
        return self.usable > 0

    def __enter__(self) -> Restored:
        if self._closed:
            raise ClosedError("restored state was closed")
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the lease and forget the layers. Idempotent."""
        self._closed, self.layers = True, ()
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # noqa: BLE001 - a finalizer has nobody to tell
            pass
