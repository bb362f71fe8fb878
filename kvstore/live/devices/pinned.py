"""Host memory that a GPU copies from by itself: a buffer in two halves, one filled while the other is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]


class Pinned:
    """``size`` bytes twice. `take` hands out room for bytes about to be copied by work on ``stream``; a half
    is handed out anew once all that was enqueued when it was left is done. Takes no memory afterwards.

    **Threading:** one caller at a time."""

    def __init__(self, cupy: Any, stream: Any, size: int) -> None:
        self.size = size
        self._stream = stream
        memory = cupy.cuda.alloc_pinned_memory(2 * size)
        self._halves = np.frombuffer(memory, np.uint8, 2 * size).reshape(2, size)
        self._left = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._half = self._used = 0

    def take(self, count: int) -> U8:
        """Room for ``count`` bytes, at most `size`, to be filled and copied at once."""
        if self._used + count > self.size:
            self._left[self._half].record(self._stream)
            self._half, self._used = 1 - self._half, 0
            self._left[self._half].synchronize()
        found: U8 = self._halves[self._half, self._used : self._used + count]
        self._used += count
        return found
