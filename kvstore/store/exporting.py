"""Export: a stored prompt, or a whole namespace, as a snapshot pack (schema/pack_file.py).

Records go out parents first, each with its anchors. What is evicted while it is written is left
out with all that builds on it, and counted; what turns out damaged is quarantined and left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from warmkv.kvstore import memfd
from warmkv.kvstore.store import atomic
from warmkv.kvstore.store.index import Index, Namespace, Record
from warmkv.schema import segment as container
from warmkv.schema.errors import DescriptorLimit, FormatError, RecordError, StoreError
from warmkv.schema.pack_file import PIECE_BYTES, PackWriter, Take
from warmkv.schema.records import ROOT, Anchor, RecordId

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine


#: Names the records to export; called with the index lock held.
Choose = Callable[[], Sequence[Record]]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What a pack holds; ``skipped`` records were evicted, or found damaged, on the way."""

    records: int
    total_bytes: int
    skipped: int


@dataclass(frozen=True, slots=True)
class _Item:
    """A record to write and what it builds on in the pack, which may be another record than in the
    index: of rows that were packed the originals are written."""

    record: Record
    parent: RecordId
    anchors: tuple[Anchor, ...]


class _Evicted(Exception):
    """A record is in neither tier any more."""


def of_prompt(index: Index, record: Record) -> list[Record]:
    """Everything stored along the tokens of a record: its chain, what lies side by side with it,
    and states. The index lock is held."""
    last = record if record.node is not None else record.parent
    assert last is not None and last.node is not None
    tokens, attachments = record.namespace.trees[record.lineage].prefix(last.node, record.end)
    path = index.path(record.namespace.key, record.lineage, tokens, attachments)
    along = path.along() if path is not None else []
    return list({link for item in (*along, record) for link in index.chain_of(item)})


def export(engine: Engine, namespace: Namespace, choose: Choose, fd: int) -> ExportResult:
    """Write the records that ``choose`` names into the regular file ``fd``, borrowed, from its
    beginning on. Raises StoreError where it cannot be written."""
    require_file(fd, os.O_WRONLY)
    with engine.index.changed:
        items = _items(choose())
    skipped = 0
    written: set[RecordId] = set()
    try:
        writer = PackWriter(lambda data, at: _write(fd, data, at), namespace.identity.canonical(), time.time_ns())
        for item in items:
            if item.parent != ROOT and item.parent not in written:
                skipped += 1
                continue
            try:
                _write_item(engine, writer, item)
            except _Evicted:
                skipped += 1
                continue
            except FormatError as exc:
                engine.promotion.quarantine(item.record, str(exc))
                skipped += 1
                continue
            written.add(item.record.id)
        writer.finish()
        os.ftruncate(fd, writer.total_bytes)
    except OSError as exc:
        raise StoreError(f"the pack could not be written: {exc.strerror}") from exc
    return ExportResult(writer.records, writer.total_bytes, skipped)


@contextmanager
def new_file(path: Path) -> Iterator[int]:
    """A new file that becomes ``path``, in the place of what is there, only when the block ends
    without an error: written under another name, private to its owner, synced, renamed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror}") from exc
    try:
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(beside, path)
        atomic.sync_directory(path.parent)
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror}") from exc
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def require_file(fd: int, mode: int) -> int:
    """Bytes of a regular file that is open for reading (``mode`` O_RDONLY) or writing (O_WRONLY);
    RecordError for any other descriptor."""
    info, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    if not stat.S_ISREG(info.st_mode) or access not in (mode, os.O_RDWR):
        wanted = "writing" if mode == os.O_WRONLY else "reading"
        raise RecordError(f"expected a regular file open for {wanted}, found {stat.filemode(info.st_mode)}, access {access}")
    if mode == os.O_WRONLY and flags & os.O_APPEND:
        raise RecordError("expected a file that can be written anywhere, found one open for appending only")
    return info.st_size


def in_memory(fd: int) -> bool:
    """Whether what is written to a file takes memory of whoever writes: a memfd, a file on a tmpfs."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # only such files can have any
    except OSError:
        return False
    return True


def _items(records: Sequence[Record]) -> list[_Item]:
    """Parents before children. A segment that was packed from others gives way to them."""
    wanted = set(records)
    kept = {record for record in records if not (record.packed and _whole_without(record, wanted))}
    items = []
    for record in sorted(kept, key=lambda item: (item.start, item.is_state)):
        parent = record.parent
        if parent is not None and parent not in kept:
            parent = _instead_of(parent, record.start, kept)
        anchors = tuple(sorted(record.anchors.values(), key=lambda anchor: anchor.position))
        items.append(_Item(record, parent.id if parent is not None else ROOT, anchors))
    return items


def _whole_without(packed: Record, wanted: set[Record]) -> bool:
    """Whether every node of a packed segment has another one that is to be written too."""
    node = packed.node
    while node is not None and node.end > packed.start:
        if not any(not item.packed and item in wanted for item in node.records):
            return False
        node = node.parent
    return True


def _instead_of(packed: Record, start: int, kept: set[Record]) -> Record:
    node = packed.node
    while node is not None:
        for record in node.records:
            if record in kept and record.start < start <= record.end:
                return record
        node = node.parent
    raise AssertionError(f"nothing holds the row before {start} but a packed segment")


def _write_item(engine: Engine, writer: PackWriter, item: _Item) -> None:
    """Raises _Evicted, FormatError."""
    record, own = item.record, -1
    with engine.index.changed:
        if record.gone:
            raise _Evicted
        lease = engine.acquisition.hold(record)
        try:
            own = fcntl.fcntl(record.fd, fcntl.F_DUPFD_CLOEXEC, 0) if record.warm else -1
        except OSError as exc:
            engine.acquisition.release([lease])
            raise DescriptorLimit("no descriptor left to read a record") from exc
    fill = partial(_from_memory, item, own) if own >= 0 else partial(_from_disk, engine, item)
    try:
        writer.record(item.anchors, record.total_bytes, fill, record.prefill_us)
    except FormatError:
        if record.gone:
            raise _Evicted from None
        raise
    finally:
        if own >= 0:
            os.close(own)
        engine.acquisition.release([lease])


def _from_memory(item: _Item, fd: int, take: Take) -> None:
    view = memoryview(memfd.map_private(fd, item.record.total_bytes))
    take(_head(item, container.decode_head(view, len(view)).header))
    for at in range(len(view) - item.record.payload_bytes, len(view), PIECE_BYTES):
        take(view[at : at + PIECE_BYTES])


def _from_disk(engine: Engine, item: _Item, take: Take) -> None:
    """Piece by piece: no budget has to hold the record. Each is a read of its own, over before it is
    written: the file is the peer's, and may take as long as it likes."""
    with engine.promotion.kept(item.record) as stored:
        if engine.cold is None or not stored:
            raise _Evicted
        for index in range(container.chunk_count(item.record.payload_bytes)):
            head, piece = engine.cold.piece(item.record.id, index)
            if not index:
                take(_head(item, head.header))
            take(piece)


def _head(item: _Item, header: container.Header) -> bytes:
    """The head that names the parent in the pack, and what lies between it and the payload."""
    raw = container.encode_head(replace(header, parent=item.parent), item.record.payload_bytes)
    return raw + bytes(container.align(len(raw), container.PAYLOAD_ALIGNMENT) - len(raw))


def _write(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
