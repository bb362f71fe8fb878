"""Packing: one contiguous segment in the warm tier instead of many, made of the same rows.

A chain of many small segments costs descriptors, mappings and time at every restore. On their
way from disk neighbours are copied into one container, since they are copied anyway; chains that
grew long in memory are packed when they are asked for. The originals stay on disk; where there
is no disk they give way once the packed segment is in the index, never before. No answer changes:
whatever the packed segment does not hold, its originals keep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from warmkv.kvstore import memfd
from warmkv.kvstore.geometry import NO_ROWS, Coverage, Extent
from warmkv.kvstore.needs import ModelNeeds
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.store.path import Span
from warmkv.schema import ids
from warmkv.schema import segment as container
from warmkv.schema.errors import FormatError
from warmkv.schema.records import Attachment, Plane, RecordId, coverage, row_bytes

#: A chain that is asked for and has more segments than this is packed first.
MAX_SEGMENTS = 64
#: Bytes of one packed segment, within a quarter of the budget: it needs that much room beside
#: what it is made of.
MAX_PACK_BYTES = 512 << 20
#: Parts of one packed segment: they give way under the index lock, some 20 us each.
MAX_PARTS = 512
WRITER = "warmkv pack 1"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, end) that a packed segment takes from ``record``."""

    record: Record
    start: int
    end: int


@dataclass(slots=True)
class Pack:
    """A segment to be made: its parts in order, tokens and attachments of the whole prefix, and
    the range of rows it will hold of each group. ``reserved`` once room was made for it."""

    parts: tuple[Part, ...]
    tokens: bytes
    attachments: tuple[Attachment, ...]
    extents: tuple[Extent, ...]
    header: container.SegmentHeader
    payload_bytes: int
    head_bytes: int
    reserved: bool = False

    @property
    def total_bytes(self) -> int:
        return self.head_bytes + self.payload_bytes

    @property
    def coverage(self) -> Coverage:
        return Coverage(self.extents)

    @property
    def prefill_us(self) -> int:
        """What was said of how long its rows took to compute; 0 unless it was of all."""
        known = [part.record.prefill_us for part in self.parts]
        return sum(known) if all(known) else 0

    def replaces(self, part: Part) -> bool:
        """Whether every row of a part's record is in the packed segment."""
        record = part.record
        inside = all(
            first >= last or (ours[0] <= first and last <= ours[1])
            for (first, last), ours in zip(record.extents, self.extents, strict=True)
        )
        return inside and part.start == record.start and part.end == record.end


def runs(spans: Sequence[Span], max_bytes: int) -> Iterator[list[Record]]:
    """Neighbours worth packing: segments from disk, or all where there are too many."""
    segments = [span.record for span in spans if not span.record.is_state and span.start < span.end]
    crowded = len(segments) > MAX_SEGMENTS
    stale = crowded and sum(not record.packed for record in segments) * 2 < len(segments)
    run: list[Record] = []
    size = 0
    for record in segments:
        if _beside(record):
            continue
        fits = _packable(record) and (not record.warm or (crowded and (stale or not record.packed)))
        joins = fits and (not run or _continues(run[-1], record))
        if not joins or size + record.total_bytes > max_bytes or len(run) == MAX_PARTS:
            if len(run) > 1:
                yield run
            run, size = [], 0
        if fits and record.total_bytes <= max_bytes:
            run.append(record)
            size += record.total_bytes
    if len(run) > 1:
        yield run


def _beside(record: Record) -> bool:
    """Whether a segment holds only rows that not every token needs: others go on along it."""
    groups = record.namespace.needs.groups
    return any(group.whole and not last for group, (_, last) in zip(groups, record.extents, strict=True))


def _packable(record: Record) -> bool:
    return not record.fields and not record.gone and (record.warm or record.cold == Cold.STORED)


def _continues(above: Record, record: Record) -> bool:
    """Whether two segments can be one: neighbours under one pin, so that nothing is kept longer than
    it was; and if nothing but memory holds them, no other prompt parts from the first: what is
    forgotten of one would stay for the other."""
    if not above.start < record.start <= above.end or above.pinned_until_ns != record.pinned_until_ns:
        return False
    return above.cold != Cold.ABSENT or all(child.is_state or child is record for child in above.children)


def plan(run: Sequence[Record], parent: RecordId, tokens: bytes, attachments: tuple[Attachment, ...]) -> Pack:
    """The segment that packs a run which ends with ``tokens``. Hashes, hence wants the index lock
    free."""
    first, last = run[0], run[-1]
    needs = first.namespace.needs
    ends = [*(record.start for record in run[1:]), last.end]
    parts = tuple(Part(record, record.start, end) for record, end in zip(run, ends, strict=True))
    extents = tuple(_joined(parts, number) for number in range(len(needs.groups)))
    planes, payload_bytes = container.layout(_planes(first, needs, extents))
    whole = np.frombuffer(tokens, "<u4")
    header = container.SegmentHeader(
        id=ids.segment_id(first.namespace.key, first.lineage, first.start, coverage(planes), attachments, whole),
        namespace=first.namespace.key, lineage=first.lineage, parent=parent, start=first.start, end=last.end,
        tokens=whole[first.start :], attachments=tuple(item for item in attachments if item.start >= first.start),
        planes=planes, digests=bytes(16 * container.chunk_count(payload_bytes)), created_ns=time.time_ns(), writer=WRITER,
    )  # fmt: skip
    head_bytes = container.align(len(container.encode_head(header, payload_bytes)), container.PAYLOAD_ALIGNMENT)
    return Pack(parts, tokens, attachments, extents, header, payload_bytes, head_bytes)


def _joined(parts: Sequence[Part], group: int) -> Extent:
    """The unbroken range of a group's rows that ends last, over all parts."""
    joined = NO_ROWS
    for part in parts:
        first, last = part.record.extents[group]
        first, last = max(first, part.start), min(last, part.end)
        if first < last:
            joined = (joined[0], last) if joined[1] == first else (first, last)
    return joined


def _planes(first: Record, needs: ModelNeeds, extents: Sequence[Extent]) -> list[Plane]:
    layers = first.namespace.identity.layers
    planes = []
    for group, (start, end) in zip(needs.groups, extents, strict=True):
        for index in group.layers if start < end else ():
            for spec in layers[index].row_planes:
                size = row_bytes(spec.format, spec.row_shape, spec.role)
                planes.append(Plane(index, spec.role, spec.format, spec.row_shape, start, end - start, size))
    return sorted(planes, key=lambda plane: (plane.layer, plane.role))


class Packer:
    """Writes a packed segment from the payloads of its parts, whatever pieces they come in.

    Rows of one segment are many short runs in the other, one a plane. ``finish`` seals; the
    descriptor is the caller's. Not thread-safe."""

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._target = {(plane.layer, plane.role): plane for plane in pack.header.planes}
        self._written_bytes = 0
        self._fd = memfd.create(f"warmkv:{pack.header.id.hex()}", pack.total_bytes)

    def place(self, part: Part, header: container.Header, offset: int, piece: memoryview) -> None:
        """Take what is wanted of a piece of a part's payload that begins at ``offset``."""
        stop = offset + len(piece)
        for plane in header.planes:
            if plane.offset >= stop or plane.offset + plane.total_bytes <= offset:
                continue
            target = self._target.get((plane.layer, plane.role))
            if target is None:
                continue
            first, last = self._rows(part, plane, target)
            low = max(offset, plane.offset + (first - plane.first_row) * plane.row_bytes)
            high = min(stop, plane.offset + (last - plane.first_row) * plane.row_bytes)
            if low < high:
                shift = target.offset + (plane.first_row - target.first_row) * plane.row_bytes - plane.offset
                memfd.write(self._fd, piece[low - offset : high - offset], self._pack.head_bytes + low + shift)
                self._written_bytes += high - low

    @staticmethod
    def _rows(part: Part, plane: Plane, target: Plane) -> Extent:
        """Rows of a plane that the packed segment takes from this part."""
        first = max(plane.first_row, part.start, target.first_row)
        return first, min(plane.first_row + plane.rows, part.end, target.first_row + target.rows)

    def finish(self) -> int:
        """Hash, write the head, seal; the descriptor. Raises FormatError when rows are missing."""
        pack = self._pack
        wanted = sum(plane.total_bytes for plane in pack.header.planes)
        if self._written_bytes != wanted:
            raise FormatError(f"{self._written_bytes} bytes of rows came for a packed segment of {wanted}")
        view = memoryview(memfd.map_private(self._fd, pack.total_bytes))
        digests = container.payload_digests(view[pack.head_bytes :])
        view.release()
        memfd.write(self._fd, container.encode_head(replace(pack.header, digests=digests), pack.payload_bytes), 0)
        memfd.seal(self._fd)
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Drop what was written, unless it was finished. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
