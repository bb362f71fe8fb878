"""A restored prefix: sealed memory mapped into this process, checked, seen as rows.

Everything is verified before anything is handed out: seals, size, head digest, namespace,
lineage, tokens, geometry and bounds, and with ``verify=True`` every payload byte.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
import numpy.typing as npt

from warmkv.kvstore import memfd
from warmkv.kvstore.results import Match
from warmkv.kvstore.rows import DTYPES
from warmkv.kvstore.session import Grant
from warmkv.schema import messages as m
from warmkv.schema import segment as container
from warmkv.schema.errors import ClosedError, DigestError, RemoteProtocolError
from warmkv.schema.identity import Identity, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import Anchor, NamespaceKey, Plane, Tokens, unpack_table

Rows = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class RestoredPlane:
    """One plane of a layer: rows [0, usable) as consecutive ``blocks``, each (rows, *row_shape).

    Blocks are read-only views of sealed memory (private and writable ones if the restore asked
    for that) and keep their mapping alive. bf16 comes as uint16 bits, see ``format``."""

    role: PlaneRole
    format: PlaneFormat
    row_shape: tuple[int, ...]
    blocks: tuple[Rows, ...]

    def array(self) -> Rows:
        """All rows in one array: the block itself where there is one, else a copy."""
        return self.blocks[0] if len(self.blocks) == 1 else np.concatenate(self.blocks)


@dataclass(frozen=True, slots=True)
class RestoredLayer:
    """Planes of one layer by role."""

    layer: int
    planes: dict[PlaneRole, RestoredPlane]

    def plane(self, role: PlaneRole) -> RestoredPlane:
        return self.planes[role]

    @property
    def keys(self) -> Rows:
        """Key rows, shape (usable, heads, head_size)."""
        return self.planes[PlaneRole.KEY].array()

    @property
    def values(self) -> Rows:
        """Value rows, shape (usable, heads, head_size)."""
        return self.planes[PlaneRole.VALUE].array()


@dataclass
class Restored:
    """State of the first ``usable`` tokens; false when it is a miss. Use as a context manager:
    `close` ends the lease, views taken before stay valid.

    ``anchor`` is the named position restored to, where one was asked for and found."""

    match: Match
    layers: tuple[RestoredLayer, ...] = ()
    promoted_bytes: int = 0
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


def restore(grant: Grant, match: Match, namespace: NamespaceKey, tokens: Tokens, *, verify: bool, writable: bool) -> Restored:
    """Map and check a grant. On any failure the lease is released, every descriptor closed and
    the error raised; nothing is handed out. A grant of nothing becomes a miss."""
    try:
        layers = _layers(grant, match, namespace, tokens, verify, writable)
    except BaseException:
        grant.release()
        raise
    if not match.usable:
        grant.release()
        return Restored(match)
    return Restored(match, layers, grant.reply.promoted_bytes, grant.release)


def _layers(
    grant: Grant, match: Match, namespace: NamespaceKey, tokens: Tokens, verify: bool, writable: bool
) -> tuple[RestoredLayer, ...]:
    pending = list(grant.fds)
    collected: dict[tuple[int, PlaneRole], list[Rows]] = {}
    at = 0
    try:
        if match.usable > len(tokens):
            raise RemoteProtocolError(f"{match.usable} usable tokens were announced for {len(tokens)}")
        spans = unpack_table(grant.reply.spans, m.SPAN_DTYPE, "spans")
        if len(spans) != len(pending):
            raise RemoteProtocolError(f"{len(pending)} descriptors came for {len(spans)} spans")
        for id_, start, end, total_bytes in spans.tolist():
            fd = pending[0]
            if start != at or not start < end <= match.usable:
                raise RemoteProtocolError(f"span [{start}, {end}) does not continue at {at} within {match.usable}")
            if memfd.check_sealed(fd, total_bytes) != total_bytes:
                raise RemoteProtocolError(f"descriptor of span [{start}, {end}) is not {total_bytes} bytes long")
            memory = memfd.map_private(fd, total_bytes, writable=writable)
            os.close(pending.pop(0))
            _collect(memory, bytes(id_), start, end, match, namespace, tokens, verify, collected)
            at = end
    finally:
        for fd in pending:
            os.close(fd)
    if at != match.usable:
        raise RemoteProtocolError(f"spans end at {at}, {match.usable} tokens were promised")
    return _assemble(match.identity, collected)


def _collect(
    memory: mmap.mmap, id_: bytes, start: int, end: int, match: Match, namespace: NamespaceKey, tokens: Tokens,
    verify: bool, collected: dict[tuple[int, PlaneRole], list[Rows]],
) -> None:  # fmt: skip
    """Check one mapped container and add its rows [start, end) to each plane."""
    view = memoryview(memory)
    head = container.decode_head(view, len(view))
    header = head.header
    if not isinstance(header, container.SegmentHeader) or header.id != id_:
        raise RemoteProtocolError("descriptor holds another record than was announced")
    if header.namespace != namespace or header.lineage != match.lineage:
        raise RemoteProtocolError("segment belongs to another namespace or lineage")
    if not header.start <= start < end <= header.end:
        raise RemoteProtocolError(f"segment [{header.start}, {header.end}) does not hold rows [{start}, {end})")
    if not np.array_equal(header.tokens[: end - header.start], tokens[header.start : end]):
        raise RemoteProtocolError("segment holds the rows of other tokens")
    ours = [item for item in match.attachments if header.start <= item.start < end]
    if [item for item in header.attachments if item.start < end] != ours:
        raise RemoteProtocolError("segment holds the rows of other attachments")
    payload = view[head.payload_offset :]
    if verify and container.payload_digests(payload) != header.digests:
        raise DigestError(f"payload of segment {id_.hex()} does not match its digests")
    flat = np.frombuffer(memory, np.uint8)[head.payload_offset :]
    _check_geometry(header.planes, match.identity, start, end)
    for plane in header.planes:
        first = plane.offset + (start - plane.first_row) * plane.row_bytes
        raw = flat[first : first + (end - start) * plane.row_bytes]
        rows = raw.view(DTYPES[plane.format]).reshape(end - start, *plane.row_shape)
        collected.setdefault((plane.layer, plane.role), []).append(rows)


def _check_geometry(planes: Sequence[Plane], identity: Identity, start: int, end: int) -> None:
    seen: dict[tuple[int, PlaneRole], Plane] = {(plane.layer, plane.role): plane for plane in planes}
    count = 0
    for index, layer in enumerate(identity.layers):
        for spec in layer.planes if layer.shared_with < 0 else ():
            count += 1
            _check_spec(index, spec, seen.get((index, spec.role)), start, end)
    if count != len(seen):
        raise RemoteProtocolError(f"segment holds {len(seen)} planes, the identity has {count}")


def _check_spec(index: int, spec: PlaneSpec, plane: Plane | None, start: int, end: int) -> None:
    if plane is None or plane.format != spec.format or plane.row_shape != spec.row_shape:
        raise RemoteProtocolError(f"layer {index}: plane {spec.role.name} does not fit the identity")
    if plane.first_row > start or plane.first_row + plane.rows < end:
        raise RemoteProtocolError(f"layer {index}: plane {spec.role.name} lacks rows of [{start}, {end})")


def _assemble(identity: Identity, collected: dict[tuple[int, PlaneRole], list[Rows]]) -> tuple[RestoredLayer, ...]:
    layers = []
    for index, layer in enumerate(identity.layers):
        source = index if layer.shared_with < 0 else layer.shared_with
        planes = {
            spec.role: RestoredPlane(spec.role, spec.format, spec.row_shape, tuple(collected.get((source, spec.role), ())))
            for spec in identity.layers[source].planes
        }
        layers.append(RestoredLayer(index, planes))
    return tuple(layers)
