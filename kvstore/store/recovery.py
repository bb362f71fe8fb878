"""Restart: the index is rebuilt from the metadata on disk, and what is not whole is swept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.cold import ColdRecord, ColdTier
from warmkv.kvstore.store.cold_records import Restart
from warmkv.kvstore.store.index import Cold, Index, Namespace, Record
from warmkv.kvstore.store.long_lived import long_lived
from warmkv.schema.errors import ColdFull
from warmkv.schema.records import ROOT, Attachment, Lineage, NamespaceKey, RecordId

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Found:
    """What the index needs of a record on disk. ``tokens`` and ``attachments`` are a segment's own."""

    record: Record
    parent: RecordId
    tokens: bytes
    attachments: tuple[Attachment, ...]


def load_index(index: Index, cold: ColdTier) -> int:
    """Fill an empty index; the number of records removed because they were not whole, had lost
    what they build on, or were left by a write that never finished. Raises CorruptStore."""
    with long_lived():
        return _load(index, cold)


def _load(index: Index, cold: ColdTier) -> int:
    namespaces = {
        key: Namespace(key, record.owner_uid, record.share, record.identity, record.created_ns)
        for key, record in cold.namespaces()
    }
    found: dict[RecordId, _Found] = {}
    reader = _Reader(namespaces, found)
    restart = cold.records({key: namespace.identity for key, namespace in namespaces.items()}, reader.take)
    bad = sorted(restart.bad)
    for id_ in bad:
        found.pop(id_, None)
    with index.changed:
        index.counter = cold.counter()
        for item in _ordered(found):
            if not _add(index, item):
                bad.append(item.record.id)
        index.restore()
    if bad:
        log.warning("swept %d unusable records from the store", len(bad))
    empty = [key for key, namespace in namespaces.items() if not namespace.records]
    _tidy(cold, bad, empty, restart)
    return len(bad)


def _tidy(cold: ColdTier, bad: list[RecordId], empty: list[NamespaceKey], restart: Restart) -> None:
    """Write what the restart found out; a disk that refuses it now is asked at the next start."""
    try:
        cold.faults.reached("start.loaded")
        if bad or empty:
            cold.sweep(bad, empty)
        if restart.made or restart.stray:
            gone = set(bad)
            restart.made = [item for item in restart.made if item[0] not in gone]
            log.info("writing %d summaries, removing %d", len(restart.made), len(restart.stray))
            cold.write_summaries(restart)
        cold.faults.reached("start.swept")
    except (ColdFull, OSError) as exc:
        log.error("the sweep is left to the next start: %s", exc)


class _Reader:
    """Makes index records of what is on disk."""

    def __init__(self, namespaces: dict[NamespaceKey, Namespace], found: dict[RecordId, _Found]) -> None:
        self._namespaces = namespaces
        self._found = found
        #: Values that most records share, kept once.
        self._lineages: dict[Lineage, Lineage] = {}
        self._coverages: dict[object, Coverage] = {}
        self._writers: dict[str, str] = {}
        self._provides: dict[int, Provides] = {0: Provides.NOTHING}

    def take(self, item: ColdRecord) -> None:
        about, usage = item.summary, item.usage
        covered = (about.extents, about.fields)
        coverage = self._coverages.get(covered)
        if coverage is None:
            coverage = Coverage(about.extents, frozenset(about.fields))
            if not about.start:  # of prompts that begin alike
                self._coverages[covered] = coverage
        provides = self._provides.get(about.provides)
        if provides is None:
            provides = self._provides[about.provides] = Provides(about.provides)
        record = Record(
            item.id, self._namespaces[about.namespace], self._lineages.setdefault(about.lineage, about.lineage), about.start,
            about.end, about.total_bytes, about.payload_bytes, about.created_ns,
            self._writers.setdefault(about.writer, about.writer), coverage=coverage, provides=provides,
            prefill_us=usage.prefill_us,
        )  # fmt: skip
        record.last_used, record.hits = usage.last_used, usage.hits
        record.pinned_until_ns, record.used_at_s = usage.pinned_until_ns, usage.used_at_s
        if item.anchors:
            record.anchors = {(anchor.position, anchor.kind): anchor for anchor in item.anchors}
        self._found[item.id] = _Found(record, about.parent, item.tokens, about.attachments)


def _ordered(found: dict[RecordId, _Found]) -> Iterator[_Found]:
    """What a record builds on before it, and chains one after the other: what lies together in
    memory is walked together. Those whose parent is missing come last."""
    children: dict[RecordId, list[_Found]] = {}
    for item in found.values():
        above = item.parent if item.parent in found else ROOT
        if above in children:
            children[above].append(item)
        else:
            children[above] = [item]
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
    if item.parent != ROOT or record.start:
        parent = index.records.get(item.parent)
        if parent is None or parent.node is None or not parent.start < record.start <= parent.end:
            return False
        if parent.namespace is not record.namespace or parent.lineage != record.lineage:
            return False
    index.add(record, parent, item.tokens, item.attachments, below=True)
    # As `Index.set_cold` does, but for its rank: `Index.restore` ranks all of them at once.
    record.cold = Cold.STORED
    record.namespace.cold_bytes += record.total_bytes
    if parent is not None:
        parent.cold_children += 1
    return True
