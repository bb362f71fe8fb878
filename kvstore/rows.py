"""What a caller hands in to be saved, and its way into a sealed container.

Rows are given as they lie: any strides, any first position at or before what is already
held. Only rows [held, n) are read. Planes end up token-major, so that a prefix of tokens is
a prefix of bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from warmkv.kvstore import memfd
from warmkv.schema import ids
from warmkv.schema import segment as container
from warmkv.schema.errors import OfferAgain, RecordError, UnsupportedError
from warmkv.schema.identity import ELEMENT_BYTES, Identity, LayerKind, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Attachment, Lineage, NamespaceKey, Plane, RecordId, Tokens, coverage, row_bytes

#: numpy dtypes of planes as callers see them. numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[PlaneFormat, np.dtype[np.generic]] = {
    PlaneFormat.F32: np.dtype("<f4"),
    PlaneFormat.F16: np.dtype("<f2"),
    PlaneFormat.BF16: np.dtype("<u2"),
    PlaneFormat.RAW: np.dtype("u1"),
}
#: Strided rows are gathered through a buffer that stays in the processor's cache.
GATHER_BYTES = 1 << 20
WRITER = "warmkv 1"


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """Rows of one plane, shape (rows, *row_shape), any strides; bf16 as uint16 bits."""

    role: PlaneRole
    format: PlaneFormat
    rows: npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one layer; ``first`` is the token position of row 0 of every plane.

    The arrays are borrowed until the save is done and must not change before that."""

    layer: int
    planes: tuple[PlaneRows, ...]
    first: int = 0

    @classmethod
    def kv(
        cls,
        layer: int,
        keys: npt.NDArray[np.generic],
        values: npt.NDArray[np.generic],
        *,
        format: PlaneFormat = PlaneFormat.F32,  # noqa: A002 - the field's own name
        first: int = 0,
    ) -> LayerRows:
        """Keys and values of an attention layer, each (rows, heads, head_size)."""
        return cls(layer, (PlaneRows(PlaneRole.KEY, format, keys), PlaneRows(PlaneRole.VALUE, format, values)), first)


def require_served(identity: Identity) -> None:
    """UnsupportedError unless every layer is of a kind this version stores."""
    for index, layer in enumerate(identity.layers):
        if layer.kind not in (LayerKind.FULL, LayerKind.SHARED):
            raise UnsupportedError(f"layer {index} is {layer.kind.name}; only FULL attention layers can be stored yet")
        if layer.shared_with >= 0 and identity.layers[layer.shared_with].shared_with >= 0:
            raise UnsupportedError(f"layer {index} shares with layer {layer.shared_with}, which has no rows of its own either")
        for plane in layer.planes:
            if plane.format not in ELEMENT_BYTES:
                raise UnsupportedError(f"layer {index}: plane format {plane.format.name} cannot be stored yet")


def row_bytes_of(identity: Identity) -> int:
    """Bytes one token takes over all layers."""
    return sum(row_bytes(p.format, p.row_shape) for layer in identity.layers if layer.shared_with < 0 for p in layer.planes)


def check_rows(identity: Identity, records: Sequence[LayerRows], length: int) -> dict[int, LayerRows]:
    """Records by layer, once they cover every layer up to exactly ``length`` in the identity's
    geometry. Raises RecordError that names layer and plane."""
    by_layer = {record.layer: record for record in records}
    if len(by_layer) != len(records):
        raise RecordError("two records for one layer")
    wanted = {index for index, layer in enumerate(identity.layers) if layer.shared_with < 0}
    if set(by_layer) != wanted:
        missing, extra = sorted(wanted - set(by_layer)), sorted(set(by_layer) - wanted)
        raise RecordError(f"records for layers {missing} are missing, for layers {extra} unexpected")
    for index in sorted(wanted):
        record = by_layer[index]
        specs = {spec.role: spec for spec in identity.layers[index].planes}
        if {plane.role for plane in record.planes} != set(specs) or len(record.planes) != len(specs):
            raise RecordError(
                f"layer {index} has planes {[p.role.name for p in record.planes]}, expected {[r.name for r in specs]}"
            )
        for plane in record.planes:
            _check_plane(index, record.first, plane, specs[plane.role], length)
    return by_layer


def _check_plane(index: int, first: int, plane: PlaneRows, spec: PlaneSpec, length: int) -> None:
    name = f"layer {index}, plane {plane.role.name}"
    if plane.format != spec.format:
        raise RecordError(f"{name} is {plane.format.name}, the identity says {spec.format.name}")
    if not isinstance(plane.rows, np.ndarray) or plane.rows.ndim == 0:
        raise RecordError(f"{name} is {type(plane.rows).__name__}, expected a numpy array of rows")
    if plane.rows.dtype != DTYPES[plane.format]:
        raise RecordError(f"{name} has dtype {plane.rows.dtype}, expected {DTYPES[plane.format]} for {plane.format.name}")
    if plane.rows.shape[1:] != spec.row_shape:
        raise RecordError(f"{name} has rows of shape {plane.rows.shape[1:]}, expected {spec.row_shape}")
    if first < 0 or first + plane.rows.shape[0] != length:
        raise RecordError(f"{name} holds rows [{first}, {first + plane.rows.shape[0]}), expected them to end at {length}")


@dataclass(frozen=True, slots=True)
class Container:
    """A sealed container ready to be passed on. ``close`` it once it was."""

    fd: int
    id: RecordId
    total_bytes: int

    def close(self) -> None:
        os.close(self.fd)


def write_segment(
    identity: Identity,
    namespace: NamespaceKey,
    lineage: Lineage,
    parent: RecordId,
    held: int,
    tokens: Tokens,
    attachments: Sequence[Attachment],
    by_layer: dict[int, LayerRows],
) -> Container:
    """Write rows [held, len(tokens)) into a new sealed memfd. ``tokens`` and ``attachments``
    are those of the whole prefix; ``by_layer`` comes from `check_rows`.

    Raises OfferAgain where rows that are no longer held were not handed in either."""
    end = len(tokens)
    sources: list[npt.NDArray[np.generic]] = []
    planes: list[Plane] = []
    for index in sorted(by_layer):
        record = by_layer[index]
        if record.first > held:
            raise OfferAgain(f"layer {index} has rows from {record.first} on, rows from {held} on are needed")
        for plane in sorted(record.planes, key=lambda item: item.role):
            rows = plane.rows[held - record.first :]
            sources.append(rows)
            shape = tuple(int(size) for size in rows.shape[1:])
            planes.append(Plane(index, plane.role, plane.format, shape, held, end - held, row_bytes(plane.format, shape)))
    placed, payload_bytes = container.layout(planes)
    inside = tuple(item for item in attachments if held <= item.start < end)
    before = [item for item in attachments if item.start < end]
    header = container.SegmentHeader(
        id=ids.segment_id(namespace, lineage, held, coverage(placed), before, tokens),
        namespace=namespace, lineage=lineage, parent=parent, start=held, end=end, tokens=tokens[held:],
        attachments=inside, planes=placed, digests=bytes(16 * container.chunk_count(payload_bytes)),
        created_ns=time.time_ns(), writer=WRITER,
    )  # fmt: skip
    head = container.encode_head(header, payload_bytes)
    offset = container.align(len(head), container.PAYLOAD_ALIGNMENT)
    fd = memfd.create(f"warmkv:{header.id.hex()}", offset + payload_bytes)
    try:
        digests = _write_payload(fd, offset, placed, sources)
        memfd.write(fd, container.encode_head(replace(header, digests=digests), payload_bytes), 0)
        memfd.seal(fd)
    except BaseException:
        Container(fd, header.id, 0).close()
        raise
    return Container(fd, header.id, offset + payload_bytes)


def _write_payload(fd: int, base: int, planes: Sequence[Plane], sources: Sequence[npt.NDArray[np.generic]]) -> bytes:
    """pwrite the planes, hashing each 4 MiB of payload on the way; the digests."""
    digests: list[bytes] = []
    hasher, filled, at = xxhash.xxh3_128(), 0, 0
    for plane, rows in zip(planes, sources, strict=True):
        hasher, filled = _hash(hasher, filled, memoryview(bytes(plane.offset - at)), digests)
        at = plane.offset
        for piece in _pieces(rows):
            memfd.write(fd, piece, base + at)
            hasher, filled = _hash(hasher, filled, piece, digests)
            at += len(piece)
    if filled:
        digests.append(hasher.digest())
    return b"".join(digests)


def _hash(hasher: xxhash.xxh3_128, filled: int, piece: memoryview, digests: list[bytes]) -> tuple[xxhash.xxh3_128, int]:
    """Feed a piece, closing a digest at each chunk boundary; the open hasher and its fill."""
    while len(piece):
        take = piece[: container.CHUNK_BYTES - filled]
        hasher.update(take)
        filled, piece = filled + len(take), piece[len(take) :]
        if filled == container.CHUNK_BYTES:
            digests.append(hasher.digest())
            hasher, filled = xxhash.xxh3_128(), 0
    return hasher, filled


def _pieces(rows: npt.NDArray[np.generic]) -> Iterator[memoryview]:
    """The rows' bytes in token order, in pieces of about 1 MiB; contiguous rows are not copied."""
    if rows.size == 0:
        return
    step = max(1, GATHER_BYTES // (rows[0].nbytes))
    contiguous = rows.flags.c_contiguous
    buffer = None if contiguous else np.empty((min(step, len(rows)), *rows.shape[1:]), rows.dtype)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        if buffer is not None:
            np.copyto(buffer[: len(part)], part)
            part = buffer[: len(part)]
        yield part.view(np.uint8).reshape(-1).data
