"""Restart: the index is rebuilt from the metadata on disk, and what is not whole is swept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from warmkv.kvstore.geometry import Coverage, segment_coverage, state_provides
from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.cold import ColdRecord, ColdTier
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.schema.errors import ColdFull, WarmKVError
from warmkv.schema.records import ROOT, Attachment, RecordId
from warmkv.schema.segment import SegmentHeader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the index needs of a record on disk. ``tokens`` are those of a segment."""

    record: Record
    parent: RecordId
    tokens: bytes
    attachments: tuple[Attachment, ...]


def load_index(index: Index, cold: ColdTier) -> int:
    """Fill an empty index; the number of records removed because they were not whole, had lost
    what they build on, or were left by a write that never finished."""
    namespaces = {
        key: Namespace(key, record.owner_uid, record.share, record.identity, record.created_ns)
        for key, record in cold.namespaces()
    }
    found: dict[RecordId, _Found] = {}
    unfit: list[RecordId] = []

    def take(item: ColdRecord) -> None:
        header = item.head.header
        try:
            found[header.id] = _read(namespaces[header.namespace], item)
        except (WarmKVError, KeyError) as exc:
            log.warning("record %s on disk does not fit: %s", header.id.hex(), exc)
            unfit.append(header.id)

    bad = cold.records(take) + unfit
    with index.changed:
        index.counter = cold.counter()
        for item in _ordered(found):
            if not _add(index, item):
                bad.append(item.record.id)
        index.counter = max(index.counter, max((r.last_used for r in index.records.values()), default=0))
        # Worst first; a record comes before what it builds on.
        for record in sorted(index.records.values(), key=lambda r: (r.last_used, -r.start)):
            index.cold_order.move_to_end(record)
    if bad:
        log.warning("swept %d unusable records from the store", len(bad))
    empty = [key for key, namespace in namespaces.items() if not namespace.records]
    if bad or empty:
        try:
            cold.sweep([RecordId(id_) for id_ in bad], empty)
        except ColdFull as exc:
            log.error("the sweep is left to the next start: %s", exc)
    return len(bad)


def _read(namespace: Namespace, item: ColdRecord) -> _Found:
    """Raises FormatError for a record that does not fit its model."""
    header = item.head.header
    coverage, provides, tokens = Coverage(()), Provides.NOTHING, b""
    if isinstance(header, SegmentHeader):
        start, end, tokens = header.start, header.end, header.tokens.tobytes()
        coverage = segment_coverage(header, namespace.identity)
    else:
        start = end = header.position
        provides = state_provides(header, namespace.identity)
    record = Record(
        header.id, namespace, header.lineage, start, end, item.head.container_bytes, item.head.payload_bytes,
        header.created_ns, header.writer, coverage=coverage, provides=provides,
    )  # fmt: skip
    record.last_used, record.hits = item.usage.last_used, item.usage.hits
    record.pinned_until_ns = item.usage.pinned_until_ns
    record.anchors = {(anchor.position, anchor.kind): anchor for anchor in item.anchors}
    return _Found(record, header.parent, tokens, header.attachments)


def _ordered(found: dict[RecordId, _Found]) -> Iterator[_Found]:
    """What a record builds on before it, and chains one after the other: what lies together in
    memory is walked together. Those whose parent is missing come last."""
    children: dict[RecordId, list[_Found]] = {}
    for item in found.values():
        children.setdefault(item.parent if item.parent in found else ROOT, []).append(item)
    pending = sorted(children.pop(ROOT, ()), key=lambda item: (item.parent == ROOT, item.record.start))
    while pending:
        item = pending.pop()
        yield item
        pending.extend(children.pop(item.record.id, ()))
    for left in children.values():  # records that build on each other
        yield from left


def _add(index: Index, item: _Found) -> bool:
    record = item.record
    parent: Record | None = None
    tokens: bytes = b""
    attachments: tuple[Attachment, ...] = ()
    if item.parent != ROOT or record.start:
        parent = index.records.get(item.parent)
        if parent is None or parent.node is None or not parent.start < record.start <= parent.end:
            return False
        if parent.namespace is not record.namespace or parent.lineage != record.lineage:
            return False
        if not record.is_state:
            tokens, attachments = parent.namespace.trees[parent.lineage].prefix(parent.node, record.start)
    index.add(record, parent, tokens + item.tokens, (*attachments, *item.attachments))
    index.set_cold(record, Cold.STORED)
    return True
