"""Rows in memory of their own that grows by half: head-major, so that a head reads one straight run.

Whatever can fail is done before anything is changed: `GrowingRows.reserve` makes room and
`GrowingRows.encode` computes what `GrowingRows.write` then copies; a freeze and a gather build new
storage that `GrowingRows.take` swaps in. So a layer can prepare both of its planes, then change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from warmkv.kernels.dispatch import REFERENCE, Kernels
from warmkv.kernels.errors import KernelError, NotFinite, TooLarge
from warmkv.kernels.formats import F32, Block, RowFormat
from warmkv.kernels.turboquant.block import encode
from warmkv.kernels.turboquant.planes import NormRefused
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.rows.allocation import Allocate, allocate, grown, refusals
from warmkv.kvstore.live.rows.encoded import Codes, Encoded, Indices
from warmkv.kvstore.live.rows.given import check_given, common_field
from warmkv.schema.errors import RecordError

T = TypeVar("T", bound=np.generic)
_F32 = np.dtype(np.float32)


class GrowingRows:
    """A plane that owns its rows: ``heads`` alive KV heads of ``size`` channels, ``keys`` or values.

    ``allocate`` is asked for every array that outlives a call. ``name`` is how messages call the plane.
    ``turn`` is what rows of a rotated format are rotated by, and needed there: RecordError otherwise.
    **Threading:** as `PlaneRows`."""

    def __init__(
        self, format: RowFormat, heads: int, size: int, *, keys: bool, allocate: Allocate = allocate,
        kernels: Kernels = REFERENCE, name: str = "", turn: Turn | None = None,
    ) -> None:  # fmt: skip
        self.format, self.heads, self.size, self.keys, self.turn = format, heads, size, keys, turn
        self.name = name or ("keys" if keys else "values")
        reason = format.refusal(size) if format.blocked else None
        if reason is not None:
            raise RecordError(f"{self.name}: {reason}")
        if format.rotated != (turn is not None) or (turn is not None and turn.size != size) or not format.stores(keys=keys):
            raise RecordError(f"{self.name}: rows of {format.value} with {size} channels, rotated as {turn}")
        self.groups = format.groups(size, keys=keys)
        self._allocate, self._kernels = allocate, kernels
        self._first = self._count = 0
        self._codes: Codes = np.empty((heads, 0, format.columns(size)), format.code_dtype)
        self._scales: F32 | None = np.empty((heads, 0, self.groups), np.float32) if format.quantised else None
        self._field: F32 | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def capacity(self) -> int:
        """Rows there is memory for."""
        return int(self._codes.shape[1])

    @property
    def frozen(self) -> bool:
        return self._field is not None or not self.format.quantised

    @property
    def field(self) -> F32 | None:
        """The frozen field (heads, size), read-only; None while it is open or where there is none."""
        return None if self._field is None else readonly(self._field)

    @property
    def stored_bytes(self) -> int:
        field = 0 if self._field is None else self._field.nbytes
        return self.heads * self._count * self.format.row_bytes(self.size, keys=self.keys) + field

    @property
    def allocated_bytes(self) -> int:
        scales = 0 if self._scales is None else self._scales.nbytes
        return self._codes.nbytes + scales + (0 if self._field is None else self._field.nbytes)

    @property
    def mapped_bytes(self) -> int:
        return 0

    def seed_field(self, field: F32) -> None:
        """Freeze the field of a plane without rows at a copy of ``field`` (heads, size). Raises RecordError
        for another shape, dtype, a plane with rows or a format without a field."""
        if not self.format.quantised or self._count:
            raise RecordError(f"{self.name}: a field for {self._count} rows of {self.format.value}, expected none of q8_2f")
        if field.shape != (self.heads, self.size) or field.dtype != np.float32:
            raise RecordError(f"{self.name}: a field of {field.dtype} {field.shape}, expected float32 {(self.heads, self.size)}")
        if not (np.isfinite(field).all() and (field > 0).all()):
            raise RecordError(f"{self.name}: a field with numbers that are not above 0 and finite")
        fresh = self._empty((self.heads, self.size))
        fresh[:] = field
        self._field = fresh

    def reserve(self, rows: int) -> None:
        needed = self._count + rows
        if self._first + needed <= self.capacity:
            return
        if needed <= self.capacity and self._count <= 4 * self._first:
            self._slide()
            return
        codes, scales = self._arrays(grown(self.capacity, needed))
        span = slice(self._first, self._first + self._count)
        codes[:, : self._count] = self._codes[:, span]
        if scales is not None and self._scales is not None:
            scales[:, : self._count] = self._scales[:, span]
        self._codes, self._scales, self._first = codes, scales, 0

    def encode(self, rows: F32, *, first: int | None = None) -> Encoded:
        """What ``rows`` (n, heads, size) are stored as. Changes nothing. ``first`` is what messages call the first
        of them (None: that behind the others).

        Raises RecordError that names head and row where a format of finite numbers meets NaN or infinity, a
        blocked one a scale and a rotated one a length that it cannot hold."""
        first = self._count if first is None else first
        if self.turn is not None:
            return self._rotated(rows, self.turn, first)
        turned = rows.transpose(1, 0, 2)
        if self.format is RowFormat.F32:
            return Encoded(turned, None)
        count = rows.shape[0]
        with refusals(rows.nbytes, f"{count} rows of {self.name}"):
            # One call for all heads: dividing by the field first is the first step of the encoder itself.
            # Divided row by row, a number too large for its channel's field becomes infinite and is refused.
            with np.errstate(over="ignore"):
                flat = turned if self._field is None else turned / self._field[:, None]
            flat = np.ascontiguousarray(flat, np.float32).reshape(self.heads * count, self.size)
            try:
                block = self._kernels.encode(flat, self.format, keys=self.keys)
            except NotFinite as exc:
                head, row = divmod(exc.row, count)
                found = "numbers too large for a float16 scale" if isinstance(exc, TooLarge) else "NaN or infinity"
                raise RecordError(
                    f"{self.name}, head {head}, row {first + row}: {found}, which {self.format.value} cannot hold"
                ) from exc
            except KernelError as exc:
                raise RecordError(f"{self.name}: {exc}") from exc
        scales = None if block.scales is None else block.scales.reshape(self.heads, count, self.groups)
        return Encoded(block.codes.reshape(self.heads, count, self.format.columns(self.size)), scales)

    def write(self, encoded: Encoded) -> None:
        """Store what `encode` gave behind the others; room was reserved, so nothing can fail."""
        start = self._first + self._count
        end = start + encoded.codes.shape[1]
        self._codes[:, start:end] = encoded.codes
        if self._scales is not None:
            self._scales[:, start:end] = encoded.scales
        self._count = end - self._first

    def append(self, rows: F32) -> None:
        self.write(self.encode(rows))

    def refielded(self, room: int = 0) -> GrowingRows:
        return self.collected([self.blocks(head) for head in range(self.heads)], None, room, refield=not self.frozen)

    def gathered(self, kept: Indices | None, room: int = 0) -> GrowingRows:
        return self.collected([self.blocks(head) for head in range(self.heads)], kept, room)

    def copied(self, rows: Sequence[Sequence[Block]], room: int = 0) -> GrowingRows:
        """A plane like this one that owns a copy, byte for byte, of ``rows``: the blocks of each head, with
        room for ``room`` more. Its field is theirs. Raises RecordError for blocks that do not fit or are of
        different fields, OutOfMemory; nothing changed."""
        check_given(rows, self)
        copy = self.like()
        field = common_field(rows, self)
        if field is not None:
            copy.seed_field(field)
        return copy.collected(rows, None, room)

    def collected(
        self, rows: Sequence[Sequence[Block]], kept: Indices | None, room: int, *, refield: bool = False
    ) -> GrowingRows:
        """As `copied` of the rows at ``kept``, ascending (None: all), for blocks known to fit this plane and its
        field; ``refield``: written anew, with their field fixed from them."""
        copy = self.like()
        count = sum(map(len, rows[0])) if kept is None else len(kept)
        if refield or self._field is not None:
            copy._field = self._empty((self.heads, self.size))
        copy._codes, copy._scales = self._arrays(count + room)
        copy._count = count
        with refusals(self.heads * count * self.format.row_bytes(self.size, keys=self.keys), f"{count} rows of {self.name}"):
            for head in range(self.heads):
                copy._fill(head, rows[head], kept)
                if refield:
                    copy._rewrite(head)
                elif copy._field is not None and self._field is not None:
                    copy._field[head] = self._field[head]
        return copy

    def like(self) -> GrowingRows:
        """An empty plane of the same geometry and makings, its field open."""
        return GrowingRows(
            self.format, self.heads, self.size, keys=self.keys, allocate=self._allocate, kernels=self._kernels, name=self.name,
            turn=self.turn,
        )  # fmt: skip

    def take(self, other: GrowingRows) -> None:
        """Become ``other``, which is not to be used any more."""
        self._codes, self._scales, self._field = other._codes, other._scales, other._field
        self._first, self._count = other._first, other._count

    def freeze(self) -> None:
        if not self.frozen:
            self.take(self.refielded())

    def gather(self, kept: Indices) -> None:
        self.take(self.gathered(kept))

    def truncate(self, rows: int) -> None:
        self._count = min(self._count, max(0, rows))

    def drop_front(self, rows: int) -> None:
        rows = min(self._count, max(0, rows))
        self._first, self._count = self._first + rows, self._count - rows

    def clear(self) -> None:
        self._first = self._count = 0
        self._field = None

    def release(self) -> None:
        """`clear`, and give the memory back."""
        self.take(self.like())

    def blocks(self, head: int) -> tuple[Block, ...]:
        span = slice(self._first, self._first + self._count)
        scales = None if self._scales is None else readonly(self._scales[head, span])
        field = None if self._field is None else readonly(self._field[head])
        return (Block(self.format, readonly(self._codes[head, span]), scales, field, self.turn),)

    def writable(self, head: int) -> Codes:
        """The codes (rows, size) of one head to be changed in place; for who owns the plane."""
        return self._codes[head, self._first : self._first + self._count]

    def _rotated(self, rows: F32, turn: Turn, first: int) -> Encoded:
        """Of a rotated format."""
        with refusals(rows.nbytes, f"{len(rows)} rows of {self.name}"):
            try:
                codes = encode(self._kernels.turbo, rows, self.format, turn)
            except NormRefused as exc:
                where = f"{self.name}, head {exc.head}, row {first + exc.row}"
                raise RecordError(f"{where}: {exc}") from exc
            except KernelError as exc:
                raise RecordError(f"{self.name}: {exc}") from exc
        return Encoded(codes.transpose(1, 0, 2), None)

    def _fill(self, head: int, blocks: Sequence[Block], kept: Indices | None) -> None:
        """Copy the rows at ``kept`` of ``blocks`` into the first rows of a head."""
        at = start = 0
        for block in blocks:
            picked: slice | Indices = slice(0, len(block))
            if kept is not None:
                low, high = np.searchsorted(kept, (start, start + len(block)))
                picked = kept[low:high] - start
            codes = block.codes[picked]
            self._codes[head, at : at + len(codes)] = codes
            if self._scales is not None and block.scales is not None:
                self._scales[head, at : at + len(codes)] = block.scales[picked]
            at, start = at + len(codes), start + len(block)

    def _rewrite(self, head: int) -> None:
        """Fix the field of one head of a copy that nobody else sees yet."""
        span = slice(0, self._count)
        scales = self._scales
        assert scales is not None and self._field is not None
        done = self._kernels.refield(Block(self.format, self._codes[head, span], scales[head, span]))
        self._codes[head, span], scales[head, span], self._field[head] = done.codes, done.scales, done.field

    def _slide(self) -> None:
        """Move the rows to the front of their memory, by slices no longer than the gap before them, so
        that none overlaps what it is copied over."""
        gap = self._first
        for array in (self._codes, self._scales):
            if array is not None:
                for at in range(0, self._count, gap):
                    end = min(at + gap, self._count)
                    array[:, at:end] = array[:, at + gap : end + gap]
        self._first = 0

    def _arrays(self, capacity: int) -> tuple[Codes, F32 | None]:
        codes = self._allocate((self.heads, capacity, self.format.columns(self.size)), self.format.code_dtype)
        return codes, self._empty((self.heads, capacity, self.groups)) if self.format.quantised else None

    def _empty(self, shape: tuple[int, ...]) -> F32:
        return np.asarray(self._allocate(shape, _F32), np.float32)


def readonly(array: npt.NDArray[T]) -> npt.NDArray[T]:
    """A view that cannot be written through."""
    view = array.view()
    view.setflags(write=False)
    return view
