"""Removal and pinning: what users ask to be dropped or kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from warmkv.kvstore.store.index import Index, Record
from warmkv.kvstore.store.warm import WarmTier
from warmkv.kvstore.store.write_behind import WriteBehind
from warmkv.schema import messages as m
from warmkv.schema.errors import ColdFull
from warmkv.schema.records import Lineage, NamespaceKey, check_attachments, unpack_attachments


class Removal:
    """**Threading:** every method wants the index lock free. Returns when the bytes are gone
    from both tiers."""

    def __init__(
        self, index: Index, warm: WarmTier, writer: WriteBehind | None, *,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:  # fmt: skip
        self._index = index
        self._warm = warm
        self._writer = writer
        self._wall_ns = wall_ns

    def forget(self, request: m.Forget) -> m.Forgotten:
        """Drop the records along the tokens that nothing else builds on, deepest first."""
        attachments = check_attachments(unpack_attachments(request.attachments), len(request.tokens))
        dropped: list[Record] = []
        with self._index.changed:
            path = self._index.path(request.namespace, Lineage(request.lineage), request.tokens.tobytes(), attachments)
            # What builds on a record begins behind its start.
            along = path.along() if path is not None else []
            shared = path.shared() if path is not None else 0
            above = path.covering(shared) if path is not None and shared else None
            # States first, then what they hang on.
            for record in sorted(along, key=lambda item: (-item.start, not item.is_state)):
                # Rows before ``shared`` are others' too, and stay, but in a packed copy of them.
                copied = record.packed and above is not None and not above.packed
                if record.end > shared and not record.children and (copied or _first_row(record) >= shared):
                    dropped.append(record)
                    self._drop(record)
        return self._finish(dropped)

    def clear(self, keys: Iterable[NamespaceKey]) -> m.Forgotten:
        """Drop everything in these namespaces."""
        dropped: list[Record] = []
        with self._index.changed:
            for key in keys:
                namespace = self._index.namespaces.get(key)
                if namespace is None:
                    continue
                for record in sorted(namespace.records, key=lambda item: item.start, reverse=True):
                    dropped.append(record)
                    self._drop(record)
                self._index.namespaces.pop(key, None)
        return self._finish(dropped)

    def pin(self, request: m.Pin) -> m.Pinned:
        """Keep the chain of the tokens until ``ttl_ms`` from now; 0 ends its pins."""
        attachments = check_attachments(unpack_attachments(request.attachments), len(request.tokens))
        until = self._wall_ns() + request.ttl_ms * 1_000_000 if request.ttl_ms else 0
        with self._index.changed:
            path = self._index.path(request.namespace, Lineage(request.lineage), request.tokens.tobytes(), attachments)
            held = path.held() if path is not None else 0
            record = path.covering(held) if path is not None and held else None
            beside = [item for item in path.along() if item.is_state or item.packed] if path is not None else []
            beside += path.resumed_from(held) if path is not None and held else []
            for link in {*(self._index.chain_of(record) if record else ()), *beside}:
                link.pinned_until_ns = min(until, 2**63 - 1)
                self._index.touched.add(link)
            self._index.changed.notify_all()
        return m.Pinned(held if record else 0)

    def _drop(self, record: Record) -> None:
        if self._writer is not None:
            self._writer.discard(record)
        if record.warm:
            self._warm.evict(record)
        if not record.gone:
            self._index.drop(record)

    def _finish(self, dropped: list[Record]) -> m.Forgotten:
        self._warm.reap()
        if self._writer is not None and dropped:
            self._writer.settle()
            with self._index.changed:
                if self._writer.refused(record.id for record in dropped):
                    raise ColdFull("dropped, but the disk refused to delete some of it; that is tried again with every write")
        with self._index.changed:
            self._index.changed.notify_all()
        return m.Forgotten(len(dropped), sum(record.total_bytes for record in dropped))


def _first_row(record: Record) -> int:
    """The first row a segment holds; of a state, which looks back at none, its position."""
    return min((first for first, last in record.extents if first < last), default=record.end)
