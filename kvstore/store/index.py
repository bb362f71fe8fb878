"""The index: namespaces, their radix trees, and the records both tiers agree about.

Passive data behind one lock. Whoever changes it holds ``Index.changed``; nothing here reads
or writes files, closes descriptors or hashes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from warmkv.kvstore import resume
from warmkv.kvstore.resume import Held, Intervals, Need
from warmkv.kvstore.store.radix import Node, RadixTree, Walk
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Attachment, Lineage, NamespaceKey, RecordId


class Cold(Enum):
    """Where a record stands with the cold tier."""

    ABSENT = 0
    QUEUED = 1
    WRITING = 2
    STORED = 3


class Record:
    """Rows [start, end) of one namespace and lineage, in either tier or both.

    ``fd`` is the sealed memfd of the warm tier or -1; ``leases`` maps lease id to its deadline."""

    __slots__ = (
        "id", "namespace", "lineage", "start", "end", "parent", "children", "node", "total_bytes", "payload_bytes",
        "created_ns", "writer", "fd", "cold", "cold_error", "cold_children", "warm_children", "last_used", "hits",
        "pinned_until_ns", "leases", "promotion", "anchors", "gone",
    )  # fmt: skip

    def __init__(
        self, id_: RecordId, namespace: Namespace, lineage: Lineage, start: int, end: int, total_bytes: int, payload_bytes: int,
        created_ns: int, writer: str,
    ) -> None:  # fmt: skip
        self.id = id_
        self.namespace = namespace
        self.lineage = lineage
        self.start = start
        self.end = end
        self.total_bytes = total_bytes
        self.payload_bytes = payload_bytes
        self.created_ns = created_ns
        self.writer = writer
        self.parent: Record | None = None
        self.children: set[Record] = set()
        self.node: Node[Record] | None = None
        self.fd = -1
        self.cold = Cold.ABSENT
        self.cold_error = ""
        self.cold_children = 0
        self.warm_children = 0
        self.last_used = 0
        self.hits = 0
        self.pinned_until_ns = 0
        self.leases: dict[int, float] = {}
        self.promotion: object | None = None
        self.anchors: dict[tuple[int, AnchorKind], Anchor] = {}
        self.gone = False

    @property
    def warm(self) -> bool:
        return self.fd >= 0


class Namespace:
    """One model's state under one owner. Its trees are apart per lineage."""

    def __init__(self, key: NamespaceKey, owner_uid: int, share: str, identity: Identity, created_ns: int) -> None:
        self.key = key
        self.owner_uid = owner_uid
        self.share = share
        self.identity = identity
        self.created_ns = created_ns
        self.trees: dict[Lineage, RadixTree[Record]] = {}
        self.records: set[Record] = set()
        self.stored_cold = False
        needs: set[Need] = {need for layer in identity.layers for need in resume.needs_of(layer)}
        self.needs: tuple[Need, ...] = tuple(needs)


@dataclass(frozen=True, slots=True)
class Span:
    """Rows [start, end) taken from one record."""

    record: Record
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer of the index to a query: the walk, how far rows are held without a gap, where one
    can resume, and the spans that make up the rows [0, usable)."""

    walk: Walk[Record] | None = None
    held: int = 0
    usable: int = 0
    spans: tuple[Span, ...] = ()
    anchors: tuple[Anchor, ...] = ()

    @property
    def matched(self) -> int:
        return self.walk.matched if self.walk else 0


@dataclass
class Index:
    """**Threading:** hold ``changed`` around every call; it is notified when records change."""

    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    namespaces: dict[NamespaceKey, Namespace] = field(default_factory=dict)
    records: dict[RecordId, Record] = field(default_factory=dict)
    warm_order: OrderedDict[Record, None] = field(default_factory=OrderedDict)
    cold_order: OrderedDict[Record, None] = field(default_factory=OrderedDict)
    touched: set[Record] = field(default_factory=set)
    counter: int = 0

    def find(
        self,
        key: NamespaceKey,
        lineage: Lineage,
        tokens: bytes,
        attachments: Sequence[Attachment],
        *,
        anchored: bool = False,
        limit: int = 0,
    ) -> Found:
        """The rule applied to what is stored along ``tokens``; ``limit`` > 0 caps usable."""
        namespace = self.namespaces.get(key)
        tree = namespace.trees.get(lineage) if namespace else None
        if namespace is None or tree is None:
            return Found()
        walk = tree.walk(tokens, attachments)
        length = len(tokens) // 4
        rows = Intervals((node.start, min(node.end, walk.matched)) for node in walk.nodes if node.records)
        held = Held(rows=rows)
        needs = [(need, held) for need in namespace.needs]
        around = tuple(attachments)
        usable = resume.usable(needs, walk.matched, length, around)
        anchors = self._anchors(walk)
        if limit and limit < usable:
            usable = resume.usable(needs, limit, length, around)
        if anchored:
            deepest = max((item.position for item in anchors if item.position <= usable), default=usable)
            usable = resume.usable(needs, deepest, length, around)
        run = min(rows.run_end(0), walk.matched)
        run = next((item.start for item in around if item.start < run < item.end), run)
        return Found(walk, run, usable, self._spans(walk, usable), anchors)

    def _spans(self, walk: Walk[Record], usable: int) -> tuple[Span, ...]:
        """Fewest records that hold rows [0, usable), warm ones first among equals."""
        spans: list[Span] = []
        end = usable
        for node in reversed(walk.nodes):
            if end <= node.start:
                continue
            best = min(node.records, key=lambda record: (record.start, not record.warm))
            spans.append(Span(best, best.start, end))
            end = best.start
        return tuple(reversed(spans))

    def _anchors(self, walk: Walk[Record]) -> tuple[Anchor, ...]:
        seen: dict[tuple[int, AnchorKind], Anchor] = {}
        for node in walk.nodes:
            for record in node.records:
                for place, anchor in record.anchors.items():
                    if node.start < place[0] <= min(node.end, walk.matched):
                        seen[place] = anchor
        return tuple(seen[place] for place in sorted(seen))

    def covering(self, walk: Walk[Record], position: int) -> Record | None:
        """A record that holds row ``position - 1`` on the walk, the deepest reaching one."""
        for node in reversed(walk.nodes):
            if node.start < position <= node.end and node.records:
                return max(node.records, key=lambda record: record.end)
        return None

    def add(self, record: Record, parent: Record | None, tokens: bytes, attachments: Sequence[Attachment]) -> None:
        """Enter a record whose whole prefix is ``tokens`` with ``attachments``."""
        namespace = record.namespace
        tree = namespace.trees.setdefault(record.lineage, RadixTree())
        record.node = tree.insert(tokens, attachments, record.start, record)
        record.parent = parent
        if parent is not None:
            parent.children.add(record)
        namespace.records.add(record)
        self.namespaces[namespace.key] = namespace
        self.records[record.id] = record

    def drop(self, record: Record) -> None:
        """Take a record that is in neither tier out of the index."""
        assert record.node is not None
        tree = record.namespace.trees[record.lineage]
        tree.remove(record.node, record.start, record)
        if not tree.root.children:
            del record.namespace.trees[record.lineage]
        if record.parent is not None:
            record.parent.children.discard(record)
        record.namespace.records.discard(record)
        if not record.namespace.records:
            self.namespaces.pop(record.namespace.key, None)
        self.records.pop(record.id, None)
        self.touched.discard(record)
        record.gone = True

    def subtree(self, record: Record) -> list[Record]:
        """The record and all that builds on it, leaves first."""
        found, pending = [], [record]
        while pending:
            current = pending.pop()
            found.append(current)
            pending.extend(current.children)
        return found[::-1]

    def touch(self, records: Sequence[Record], *, hit: bool = False) -> None:
        """Make a chain (root first) the most recently used. Deepest first in the order, so that
        a record always comes before what it builds on."""
        self.counter += 1
        for record in reversed(records):
            record.last_used = self.counter
            record.hits += hit
            self.touched.add(record)
            if record in self.warm_order:
                self.warm_order.move_to_end(record)
            if record in self.cold_order:
                self.cold_order.move_to_end(record)

    def chain_of(self, record: Record) -> list[Record]:
        """The record and its parents, root first."""
        chain: list[Record] = []
        current: Record | None = record
        while current is not None:
            chain.append(current)
            current = current.parent
        return chain[::-1]

    def set_warm(self, record: Record, fd: int) -> None:
        """Enter or, with -1, leave the warm tier; keeps child counts and order."""
        if (fd >= 0) != record.warm and record.parent is not None:
            record.parent.warm_children += 1 if fd >= 0 else -1
        record.fd = fd
        if fd >= 0:
            self.warm_order[record] = None
        else:
            self.warm_order.pop(record, None)

    def set_cold(self, record: Record, state: Cold) -> None:
        """Change where a record stands with the cold tier; queued ones count as children, so
        that nothing they build on is evicted before they are written."""
        if (state != Cold.ABSENT) != (record.cold != Cold.ABSENT) and record.parent is not None:
            record.parent.cold_children += 1 if state != Cold.ABSENT else -1
        record.cold = state
        if state == Cold.STORED:
            self.cold_order[record] = None
        else:
            self.cold_order.pop(record, None)

    def all_nodes(self) -> Iterator[Node[Record]]:
        for namespace in self.namespaces.values():
            for tree in namespace.trees.values():
                pending = list(tree.root.children.values())
                while pending:
                    node = pending.pop()
                    yield node
                    pending.extend(node.children.values())
