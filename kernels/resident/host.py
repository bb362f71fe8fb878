"""Operations on resident planes in numpy and its compiled twins: devices whose memory is the host's.

Rows are attended where they lie, as blocks over the bytes of a plane; what is appended is encoded by the
kernels that segments are written with, so that a plane holds the bytes of a record. Everything is checked
before anything is written.

**Threading:** calls on one plane are the caller's to order. Counters are read when a call begins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from warmkv.kernels.attention.layer import attend_heads, attend_heads_chunk
from warmkv.kernels.attention.reference import Attended
from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.quant.packed import pack, packed_dtype, packed_shape, view
from warmkv.kernels.resident.checks import (
    require,
    require_counters,
    require_plane,
    require_rows,
    require_sides,
    require_turnable,
    told,
)
from warmkv.kernels.resident.plane import Counters, ResidentPlane
from warmkv.kernels.rope.reference import Rope
from warmkv.kernels.turboquant.block import encode as encode_rotated

U8 = npt.NDArray[np.uint8]
#: Formats whose keys can be turned where they lie.
TURNABLE = frozenset({RowFormat.F32, RowFormat.F16})
#: Rows moved at once: what is held beside the plane.
_MOVED = 256


class HostOperations:
    """`RowOperations` of numpy arrays. Attention needs no scratch: ``scratch`` may be None."""

    name = "host"

    def __init__(self, kernels: Kernels, threads: int = 1) -> None:
        """Attention runs on so many threads, with the same bits on any number of them."""
        self._kernels, self._threads = kernels, threads

    def append(self, plane: ResidentPlane, rows: F32, counters: Counters) -> None:
        """See `RowOperations.append`. Raises KernelError for rows that do not fit, NotFinite where the format
        cannot hold one; nothing is written then."""
        require_plane(plane, "plane")
        require(rows, (None, plane.heads, plane.size), "rows")
        bytes_, (length, base) = _bytes(plane), _counted(plane, counters)
        at, count = length - base, len(rows)
        if at + count > plane.rows:
            raise KernelError(f"{count} rows behind {at} in a plane of {plane.rows}")
        if count:
            bytes_[at : at + count] = self._encoded(plane, rows)

    def advance(self, counters: Counters, count: int) -> None:
        """See `RowOperations.advance`."""
        require_counters(counters)
        if count < 0:
            raise KernelError(f"an advance by {count} rows")
        counters.length[0] += count

    def decode(self, plane: ResidentPlane, first: int, last: int, out: F32) -> None:
        """See `RowOperations.decode`. Raises KernelError for rows that are not in the plane."""
        require_plane(plane, "plane")
        require_rows(plane, first, last)
        _require_out(out, (last - first, plane.heads, plane.size))
        for head, block in enumerate(_blocks(plane, first, last)):
            out[:, head] = self._kernels.decode(block)

    def scratch_floats(self, heads: int, value_size: int, rows: int) -> int:
        """None are needed."""
        return 0

    def attend(
        self, q: F32, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: F32, scratch: Any = None,
        scale: float, window: int = 0, softcap: float = 0.0, sinks: F32 | None = None,
    ) -> None:  # fmt: skip
        """See `RowOperations.attend`. Raises KernelError for what does not fit, and where rows of the window
        are no longer in the planes."""
        require_sides(keys, values)
        require(q, (None, keys.size), "queries")
        _require_out(out, (len(q), values.size))
        last, base = _counted(keys, counters)
        first = max(0, last - window) if window else 0
        k, v = self._seen(keys, values, first, last, base, window)
        done = attend_heads(self._kernels, q, k, v, scale=scale, softcap=softcap, sinks=sinks, threads=self._threads)
        out[...] = done.out

    def attend_chunk(
        self, q: F32, keys: ResidentPlane, values: ResidentPlane, counters: Counters, *, out: F32, scratch: Any = None,
        scale: float, window: int = 0, softcap: float = 0.0, sinks: F32 | None = None,
    ) -> None:  # fmt: skip
        """See `RowOperations.attend_chunk`, and `attend` for what is raised."""
        require_sides(keys, values)
        require(q, (None, None, keys.size), "queries")
        _require_out(out, (*q.shape[:2], values.size))
        last, base = _counted(keys, counters)
        start = last - len(q)
        if start < 0:
            raise KernelError(f"{len(q)} queries of the newest positions of {last}")
        first = max(0, start + 1 - window) if window else 0
        k, v = self._seen(keys, values, first, last, base, window)
        done = attend_heads_chunk(
            self._kernels, q, k, v, scale=scale, start=start - first, window=window, softcap=softcap, sinks=sinks,
            threads=self._threads,
        )  # fmt: skip
        out[...] = done.out

    def merge(self, outs: F32, tops: F32, totals: F32, out: F32) -> None:
        """See `RowOperations.merge`."""
        require(outs, (None, None, None), "outputs of parts")
        require(tops, outs.shape[:2], "largest logits of parts")
        require(totals, outs.shape[:2], "sums of parts")
        _require_out(out, outs.shape[1:])
        out[...] = self._kernels.merge([Attended(*part) for part in zip(outs, tops, totals, strict=True)]).out

    def shift(self, plane: ResidentPlane, first: int, last: int, delta: int, rope: Rope) -> None:
        """See `RowOperations.shift`. Raises NotFinite for a key that would overflow; none is turned then."""
        require_plane(plane, "plane")
        require_turnable(plane, rope, TURNABLE)
        require_rows(plane, first, last)
        self._kernels.shift(_packed(plane, first, last), delta, rope)

    def gather(self, plane: ResidentPlane, kept: npt.NDArray[np.int32], scratch: Any = None) -> None:
        """See `RowOperations.gather`; a few rows are held beside the plane. Raises KernelError for rows that are
        not in the plane or not ascending."""
        require_plane(plane, "plane")
        require(kept, (None,), "kept rows", np.int32)
        if len(kept) and (kept[0] < 0 or kept[-1] >= plane.rows or not (kept[1:] > kept[:-1]).all()):
            raise KernelError(f"kept rows from {kept[0]} to {kept[-1]} of {plane.rows}, expected each once, ascending")
        bytes_ = _bytes(plane)
        still = int(np.count_nonzero(kept == np.arange(len(kept))))  # ascending: only the first can be at their places
        for first in range(still, len(kept), _MOVED):
            # No later row comes from here: it lies at or behind its place.
            bytes_[first : first + len(kept[first : first + _MOVED])] = bytes_[kept[first : first + _MOVED]]

    def _seen(
        self, keys: ResidentPlane, values: ResidentPlane, first: int, last: int, base: int, window: int
    ) -> tuple[list[list[Block]], list[list[Block]]]:  # fmt: skip
        """The rows of positions [first, last), by KV head. Raises KernelError unless they are there."""
        if window < 0:
            raise KernelError(f"a window of {window} rows")
        if first < base:
            raise KernelError(f"rows from position {first} on are seen, the planes begin at {base}")
        k, v = (_blocks(plane, first - base, last - base) for plane in (keys, values))
        return [[block] for block in k], [[block] for block in v]

    def _encoded(self, plane: ResidentPlane, rows: F32) -> U8:
        """``rows`` (n, heads, size) as (n, row bytes)."""
        count, heads, size = rows.shape
        if plane.turn is not None:
            return encode_rotated(self._kernels.turbo, rows, plane.format, plane.turn).reshape(count, -1)
        if plane.field is not None:
            blocks = [[self._encode(plane, rows[:, head], plane.field[head])] for head in range(heads)]
            return pack(blocks, plane.format, size, keys=plane.keys).view(np.uint8).reshape(count, -1)
        try:
            together = self._encode(plane, rows.reshape(count * heads, size), None)
        except NotFinite:
            for head in range(heads):  # which row it is, among tokens
                self._encode(plane, rows[:, head], None)
            raise
        return pack([[together]], plane.format, size, keys=plane.keys).view(np.uint8).reshape(count, -1)

    def _encode(self, plane: ResidentPlane, rows: F32, field: F32 | None) -> Block:
        return self._kernels.encode(rows, plane.format, keys=plane.keys, field=field)


def _bytes(plane: ResidentPlane) -> U8:
    """(rows, row bytes) of a plane. Raises KernelError where it is read-only."""
    data: U8 = plane.data
    if not data.flags.writeable:
        raise KernelError(f"a plane of {plane.rows} rows is read-only")
    return data[: plane.rows * plane.row_bytes].reshape(plane.rows, plane.row_bytes)


def _packed(plane: ResidentPlane, first: int, last: int) -> npt.NDArray[Any]:
    """Rows [first, last) as records have them, in place."""
    shape = packed_shape(plane.format, plane.heads, plane.size, keys=plane.keys)
    return _bytes(plane)[first:last].view(packed_dtype(plane.format)).reshape(last - first, *shape)


def _blocks(plane: ResidentPlane, first: int, last: int) -> tuple[Block, ...]:
    """Rows [first, last), a block a head."""
    rows = _packed(plane, first, last)
    return view(rows, plane.format, plane.heads, plane.size, keys=plane.keys, field=plane.field, turn=plane.turn)


def _counted(plane: ResidentPlane, counters: Counters) -> tuple[int, int]:
    """Length and base. Raises KernelError unless so many rows can be in the plane."""
    require_counters(counters)
    length, base = int(counters.length[0]), int(counters.base[0])
    if not 0 <= base <= length <= base + plane.rows:
        raise KernelError(f"positions [{base}, {length}) in a plane of {plane.rows} rows")
    return length, base


def _require_out(out: Any, shape: tuple[int, ...]) -> None:
    require(out, shape, "out")
    if not out.flags.writeable:
        raise KernelError(f"out: {told(out)} is read-only")
