"""Restart: the index is rebuilt from the metadata on disk, and what is not whole is swept."""

from __future__ import annotations

import logging

from warmkv.kvstore.geometry import Coverage, segment_coverage, state_provides
from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.cold import ColdRecord, ColdTier
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.schema.errors import ColdFull, WarmKVError
from warmkv.schema.records import ROOT, Attachment, NamespaceKey, RecordId
from warmkv.schema.segment import SegmentHeader

log = logging.getLogger(__name__)


def load_index(index: Index, cold: ColdTier) -> int:
    """Fill an empty index; the number of records removed because they were not whole, had lost
    what they build on, or were left by a write that never finished."""
    namespaces = {
        key: Namespace(key, record.owner_uid, record.share, record.identity, record.created_ns)
        for key, record in cold.namespaces()
    }
    found, bad = cold.records()
    with index.changed:
        index.counter = cold.counter()
        # What a record builds on begins before it.
        for item in sorted(found, key=_start):
            try:
                added = _add(index, namespaces, item)
            except WarmKVError as exc:
                log.warning("segment %s on disk does not fit: %s", item.head.header.id.hex(), exc)
                added = False
            if not added:
                bad.append(item.head.header.id)
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


def _start(item: ColdRecord) -> int:
    header = item.head.header
    return header.start if isinstance(header, SegmentHeader) else header.position


def _add(index: Index, namespaces: dict[NamespaceKey, Namespace], item: ColdRecord) -> bool:
    header = item.head.header
    namespace = namespaces.get(header.namespace)
    if namespace is None:
        return False
    start = _start(item)
    parent: Record | None = None
    if header.parent != ROOT or start:
        parent = index.records.get(header.parent)
        if parent is None or parent.node is None or not parent.start < start <= parent.end:
            return False
        if parent.namespace is not namespace or parent.lineage != header.lineage:
            return False
    tokens: bytes = b""
    attachments: tuple[Attachment, ...] = ()
    coverage, provides, end = Coverage(()), Provides.NOTHING, start
    if isinstance(header, SegmentHeader):
        coverage, end = segment_coverage(header, namespace.identity), header.end
        if parent is not None and parent.node is not None:
            tokens, attachments = namespace.trees[parent.lineage].prefix(parent.node, start)
        tokens, attachments = tokens + header.tokens.tobytes(), (*attachments, *header.attachments)
    else:
        provides = state_provides(header, namespace.identity)
    record = Record(
        header.id, namespace, header.lineage, start, end, item.head.container_bytes, item.head.payload_bytes,
        header.created_ns, header.writer, coverage=coverage, provides=provides,
    )  # fmt: skip
    record.last_used, record.hits = item.usage.last_used, item.usage.hits
    record.pinned_until_ns = item.usage.pinned_until_ns
    record.anchors = {(anchor.position, anchor.kind): anchor for anchor in item.anchors}
    index.add(record, parent, tokens, attachments)
    index.set_cold(record, Cold.STORED)
    return True
