"""Import of cera's `.kvcache` files into a namespace that is there already.

Such a file names its model by id and shape only. So a sidecar, ``<file>.toml``, must say which
namespace the numbers belong to and repeat what the file's fingerprint was made of; that is made
again, from the namespace's own layers, and must be the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from warmkv.kvstore.kvcache import about, fingerprint, layers
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.store import landing
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.exporting import require_file
from warmkv.kvstore.store.index import Namespace
from warmkv.kvstore.verbs import Ack, Verbs
from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, RecordError, StoreError, TooLarge, UnknownNamespace, UnsupportedError, WarmKVError
from warmkv.schema.kvcache_file import KvFile

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

SIDECAR_SUFFIX = ".toml"
MAX_SIDECAR_BYTES = about.MAX_BYTES


@dataclass(frozen=True, slots=True)
class Imported:
    """One file makes one snapshot: entered, or there already."""

    records: int
    duplicates: int
    total_bytes: int


def parse_sidecar(text: str) -> About:
    """Raises FormatError for anything but the keys of `About`, all of them, with a namespace."""
    found = about.parse(text)
    if found.identity:
        raise FormatError("the sidecar names an identity in a file, which only the command line reads; expected a namespace")
    return found


def sidecar_of(path: Path) -> About:
    """The sidecar beside a file. Raises RecordError where there is none."""
    beside = path.with_name(path.name + SIDECAR_SUFFIX)
    try:
        fd = os.open(beside, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as exc:
        raise RecordError(f"{path.name} names no weights; {beside.name} must say whose rows it holds: {exc.strerror}") from exc
    try:
        if require_file(fd, os.O_RDONLY) > MAX_SIDECAR_BYTES:
            raise FormatError(f"{beside.name} has more than {MAX_SIDECAR_BYTES} bytes")
        data = os.pread(fd, MAX_SIDECAR_BYTES, 0)
    finally:
        os.close(fd)
    try:
        return parse_sidecar(data.decode())
    except UnicodeDecodeError as exc:
        raise FormatError(f"{beside.name} is not UTF-8") from exc


def import_kvcache(engine: Engine, access: Access, fd: int, sidecar: About, *, durable: bool = False) -> Imported:
    """Save what the regular file ``fd``, borrowed, holds, with ``durable`` to the disk where there is one.

    Raises FormatError for a damaged file or one of another model, UnsupportedError for what cannot be
    taken, UnknownNamespace, TooLarge; ColdFull and Busy where the disk did not take it."""
    size, budget = require_file(fd, os.O_RDONLY), engine.warm.ledger.budget_bytes
    namespace = _namespace(engine, access, sidecar.namespace.lower())
    if size > min(budget // 2, kvcache_file.MAX_FILE_BYTES):  # it is read, then its rows are stored
        raise TooLarge(f"a file of {size} bytes does not fit twice into the warm budget of {budget} bytes")
    with landing.room(engine, max(1, size), access.uid, namespace.key):
        ack: Ack = "disk" if durable and engine.writer is not None else "memory"
        return _take(engine, access, namespace, kvcache_file.decode(_read(fd, size)), sidecar, ack)


def _take(
    engine: Engine, access: Access, namespace: Namespace, file: KvFile, sidecar: About, ack: Ack
) -> Imported:  # fmt: skip
    fingerprint.require_model(file, sidecar, namespace.identity)
    if file.shift_offset:
        raise UnsupportedError(f"the rows were shifted by {file.shift_offset} positions, which no import can undo")
    records = layers.records_of(file, namespace.identity)
    agent = _Agent(engine.session(access.uid, every_share=access.every_share), share=namespace.share)
    try:
        anchors = [file.anchor] if file.anchor is not None else []
        saved = agent.save(namespace.identity, file.tokens, records, anchors=anchors, ack=ack)
    finally:
        agent.close()
    new = not saved.duplicate
    return Imported(int(new), int(not new), saved.sent_bytes if new else 0)


class _Agent(Verbs):
    """Saves as any user does."""

    def _failed(self, exc: WarmKVError) -> NoReturn:
        raise exc


def _namespace(engine: Engine, access: Access, digits: str) -> Namespace:
    with engine.index.changed:
        found = [item for item in access.readable(engine.index) if item.key.hex().startswith(digits) and access.writes(item)]
    if len(found) != 1:
        raise UnknownNamespace(f"namespace {digits} is the beginning of {len(found)} that you may write, expected of 1")
    return found[0]


def _read(fd: int, size: int) -> bytes:
    parts, at = [], 0
    while at < size:
        try:
            part = os.pread(fd, size - at, at)
        except OSError as exc:
            raise StoreError(f"the file cannot be read: {exc.strerror}") from exc
        if not part:
            raise FormatError(f"the file was cut while it was read: {at} of {size} bytes")
        parts.append(part)
        at += len(part)
    return b"".join(parts)
