"""All planes of a layer as one: each change is made to every plane or to none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from warmkv.kernels.formats import F32, WARMUP_ROWS
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.encoded import Indices


class Planes:
    """Planes of one length: keys, values, and the attention mass of each row where a layer counts it.

    **Threading:** as `PlaneRows`."""

    def __init__(self, planes: Sequence[PlaneRows]) -> None:
        self.planes = tuple(planes)

    def __len__(self) -> int:
        return len(self.planes[0])

    @property
    def open(self) -> bool:
        """Whether there are quantised planes and none of them has a frozen field."""
        quantised = [plane for plane in self.planes if plane.format.quantised]
        return bool(quantised) and not any(plane.frozen for plane in quantised)

    def append(self, rows: Sequence[F32]) -> bool:
        """Store rows (n, heads, size) of each plane behind the others. Fields are frozen between the row
        that fills the warm-up and the next, wherever calls are cut: n rows are stored as in n calls.

        Returns whether they were frozen now. Raises OutOfMemory, RecordError: nothing changed."""
        count, before = rows[0].shape[0], len(self)
        for plane in self.planes:
            plane.reserve(count)
        cut = min(count, max(0, WARMUP_ROWS - before)) if self.open else count
        try:
            self._write([part[:cut] for part in rows])
            if cut < count:
                self._freeze_and_write([part[cut:] for part in rows])
        except BaseException:
            self.truncate(before)
            raise
        return bool(cut < count)

    def prepare_keep(self, kept: Indices) -> Callable[[], None]:
        """What keeps these rows, ascending, when it is called, and then cannot fail. One run is cut out where
        it lies; other choices are copied now, each plane on its own. Raises OutOfMemory."""
        if len(kept) == 0 or kept[-1] - kept[0] + 1 == len(kept):
            return lambda: self._cut(int(kept[0]) if len(kept) else 0, len(kept))
        copies = [plane.gathered(kept) for plane in self.planes]

        def take() -> None:
            for plane, copy in zip(self.planes, copies, strict=True):
                plane.take(copy)

        return take

    def truncate(self, rows: int) -> None:
        for plane in self.planes:
            plane.truncate(rows)

    def drop_front(self, rows: int) -> None:
        for plane in self.planes:
            plane.drop_front(rows)

    def clear(self) -> None:
        for plane in self.planes:
            plane.clear()

    def release(self) -> None:
        for plane in self.planes:
            plane.release()

    def _cut(self, first: int, count: int) -> None:
        self.truncate(first + count)
        self.drop_front(first)

    def _write(self, rows: Sequence[F32]) -> None:
        encoded = [plane.encode(part) for plane, part in zip(self.planes, rows, strict=True)]
        for plane, part in zip(self.planes, encoded, strict=True):
            plane.write(part)

    def _freeze_and_write(self, rows: Sequence[F32]) -> None:
        count = rows[0].shape[0]
        frozen = [plane.refielded(count) if plane.format.quantised else None for plane in self.planes]
        targets = [plane if copy is None else copy for copy, plane in zip(frozen, self.planes, strict=True)]
        encoded = [target.encode(part) for target, part in zip(targets, rows, strict=True)]
        for plane, copy, part in zip(self.planes, frozen, encoded, strict=True):
            if copy is not None:
                plane.take(copy)
            plane.write(part)


def run_at_end(kept: Indices, rows: int) -> int:
    """How many of the newest ``rows`` rows are kept without a gap."""
    if len(kept) == 0 or kept[-1] != rows - 1:
        return 0
    gaps = np.flatnonzero(np.diff(kept) > 1)
    return len(kept) - (int(gaps[-1]) + 1 if len(gaps) else 0)
