"""The prompts in a snapshot pack, each with all its rows and states: what an export as `.kvcache` writes.

A pack is read twice: front to back, which compares every digest, then record by record from where the
first reading found them. Of a model with states every state is a prompt's end, of others every segment's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from warmkv.kvstore.rows import Array, stored_shape
from warmkv.schema import segment as container
from warmkv.schema.errors import FormatError
from warmkv.schema.identity import Identity, PlaneRole, PlaneSpec
from warmkv.schema.pack_file import BLOCK_BYTES, DIGEST_BYTES, PackReader
from warmkv.schema.records import ANCHOR_DTYPE, CLEAN, ROOT, Anchor, Plane, RecordId, Tokens
from warmkv.schema.segment import SegmentHeader, StateHeader

#: Rows of a prompt by layer and role, token-major.
Planes = dict[int, dict[PlaneRole, Array]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One prompt: its tokens, the names of its end, and where its records lie."""

    tokens: Tokens
    anchors: tuple[Anchor, ...]
    chain: tuple[RecordId, ...]
    state: RecordId | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    header: container.Header
    payload_at: int
    anchors: tuple[Anchor, ...]


class PackedPrompts:
    """The prompts of the pack in the regular file ``fd``, borrowed. Raises FormatError, TooNewError, DigestError
    for a file that is none, or damaged."""

    def __init__(self, fd: int) -> None:
        size, at = os.fstat(fd).st_size, 0

        def take(wanted: int) -> bytes:
            nonlocal at
            data = os.pread(fd, wanted, at)
            at += len(data)
            return data

        reader = PackReader(take, size)
        self.identity = Identity.from_canonical(reader.identity)
        self._fd = fd
        self._places: dict[RecordId, _Place] = {}
        at_record = BLOCK_BYTES + len(reader.identity)
        for packed in reader.records():  # compares digests
            begin = at_record + BLOCK_BYTES + ANCHOR_DTYPE.itemsize * len(packed.anchors)
            for _ in packed.pieces:
                pass
            at_record = begin + packed.container_bytes + DIGEST_BYTES
            head_bytes = container.head_size(_bytes(fd, container.PREAMBLE.size, begin))
            self._enter(_bytes(fd, head_bytes, begin), begin, packed.anchors)

    def _enter(self, raw: bytes, begin: int, anchors: tuple[Anchor, ...]) -> None:
        head = container.decode_head(raw)
        if head.header.parent not in (ROOT, *self._places):
            raise FormatError(f"record {head.header.id.hex()} builds on one that does not come before it")
        self._places[head.header.id] = _Place(head.header, begin + head.payload_offset, anchors)

    def snapshots(self) -> Iterator[Snapshot]:
        """Every prompt once, the shortest first. One that tokens and rows alone cannot tell has a ``reason``."""
        states = {(index, spec.role) for index, layer in enumerate(self.identity.layers) for spec in layer.state_planes}
        seen: set[tuple[bytes, bytes]] = set()
        for header in sorted((place.header for place in self._places.values()), key=_end):
            is_end = isinstance(header, StateHeader) if states else isinstance(header, SegmentHeader)
            if not is_end or not states <= {(plane.layer, plane.role) for plane in header.planes}:
                continue
            snapshot = self._snapshot(header)
            name = (header.lineage, snapshot.tokens.tobytes())
            if name not in seen:
                seen.add(name)
                yield snapshot

    def planes(self, snapshot: Snapshot) -> Planes:
        """All rows and states of a prompt, copied where they lie in several records. Raises FormatError where
        some are missing."""
        found: Planes = {}
        for index, layer in enumerate(self.identity.layers):
            found[index] = {spec.role: self._rows(snapshot, index, spec) for spec in layer.row_planes}
            for spec in layer.state_planes:
                found[index][spec.role] = self._state(snapshot, index, spec)
        return found

    def _snapshot(self, header: container.Header) -> Snapshot:
        last = header if isinstance(header, SegmentHeader) else self._places[header.parent].header
        chain: list[SegmentHeader] = []
        end = _end(header)
        while isinstance(last, SegmentHeader):
            chain.append(last)
            if last.parent == ROOT:
                break
            last = self._places[last.parent].header
        chain.reverse()
        tokens = np.zeros(0, "<u4")
        for link in chain:
            tokens = np.concatenate([tokens[: link.start], link.tokens])
        # The names of other links at this position are those of prompts that went on another way.
        anchors = [item for item in self._places[chain[-1].id].anchors if item.position == end] if chain else []
        state = header.id if isinstance(header, StateHeader) else None
        return Snapshot(tokens[:end], tuple(anchors), tuple(link.id for link in chain), state, _refusal(header, chain, end))

    def _rows(self, snapshot: Snapshot, index: int, spec: PlaneSpec) -> Array:
        """Rows [0, end): of each record those up to where the next begins."""
        parts: list[Array] = []
        end, starts = len(snapshot.tokens), [self._start(id_) for id_ in snapshot.chain]
        for id_, start, stop in zip(snapshot.chain, starts, [*starts[1:], end], strict=True):
            plane, rows = self._plane(id_, index, spec)
            if plane.first_row > start or plane.first_row + plane.rows < stop:
                raise FormatError(f"layer {index}, plane {spec.role.name}: rows [{start}, {stop}) are not all there")
            parts.append(rows[start - plane.first_row : stop - plane.first_row])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _start(self, id_: RecordId) -> int:
        header = self._places[id_].header
        return header.start if isinstance(header, SegmentHeader) else header.position

    def _state(self, snapshot: Snapshot, index: int, spec: PlaneSpec) -> Array:
        if snapshot.state is None:
            raise FormatError(f"layer {index}: no state")
        return self._plane(snapshot.state, index, spec)[1]

    def _plane(self, id_: RecordId, index: int, spec: PlaneSpec) -> tuple[Plane, Array]:
        place = self._places[id_]
        for plane in place.header.planes:
            if (plane.layer, plane.role) == (index, spec.role):
                if (plane.format, plane.row_shape) != (spec.format, spec.row_shape):
                    raise FormatError(
                        f"layer {index}, plane {spec.role.name} is {plane.format.name} {plane.row_shape} in the pack"
                    )
                dtype, shape = stored_shape(spec)
                at = place.payload_at + plane.offset
                return plane, np.frombuffer(_bytes(self._fd, plane.total_bytes, at), dtype).reshape(plane.rows, *shape)
        raise FormatError(f"layer {index}, plane {spec.role.name} is missing in record {id_.hex()}")


def _bytes(fd: int, size: int, at: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.pread(fd, size, at)
        if not part:
            raise FormatError(f"the pack was cut while it was read: {size} bytes at {at} are missing")
        parts.append(part)
        at, size = at + len(part), size - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _end(header: container.Header) -> int:
    return header.end if isinstance(header, SegmentHeader) else header.position


def _refusal(header: container.Header, chain: list[SegmentHeader], end: int) -> str:
    """Why a prompt cannot be told by tokens and rows alone; empty where it can."""
    if header.lineage != CLEAN:
        return f"a prompt of {end} tokens: its rows were shifted, evicted from or written anew, which the file could not say"
    if any(item.start < end for link in chain for item in link.attachments):
        return f"a prompt of {end} tokens has images or other inputs, which the file could not name"
    return ""
