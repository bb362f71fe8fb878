"""The index: namespaces, their radix trees, and the records both tiers agree about.

Passive data behind one lock. Whoever changes it holds ``Index.changed``; nothing here reads
or writes files, closes descriptors or hashes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.needs import Provides, needs_of_model
from warmkv.kvstore.store.path import Path, Span
from warmkv.kvstore.store.radix import Node, RadixTree
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Attachment, Lineage, NamespaceKey, RecordId


class Cold(Enum):
    """Where a record stands with the cold tier."""

    ABSENT = 0
    QUEUED = 1
    WRITING = 2
    STORED = 3


NOTHING_COVERED = Coverage(())


class Record:
    """A segment, rows of tokens [start, end), or a state at ``start`` == ``end``; of one namespace
    and lineage, in either tier or both.

    ``extents`` are the rows a segment holds, one range a group of layers, ``complete`` whether those
    of layers that need every row are among them; ``fields`` those they were quantised with;
    ``provides`` what a state is good for. ``packed`` marks a segment made of others, which are on
    disk instead of it. ``fd`` is the sealed memfd of the warm tier or -1; ``leases`` maps lease id
    to its deadline."""

    __slots__ = (
        "id", "namespace", "lineage", "start", "end", "complete", "extents", "fields", "provides", "packed", "parent", "children",
        "states", "node", "total_bytes", "payload_bytes", "created_ns", "writer", "fd", "cold", "cold_error", "cold_children",
        "warm_children", "last_used", "hits", "pinned_until_ns", "leases", "promotion", "anchors", "gone",
    )  # fmt: skip

    def __init__(
        self, id_: RecordId, namespace: Namespace, lineage: Lineage, start: int, end: int, total_bytes: int, payload_bytes: int,
        created_ns: int, writer: str, *, coverage: Coverage = NOTHING_COVERED, provides: Provides = Provides.NOTHING,
        packed: bool = False,
    ) -> None:  # fmt: skip
        self.id = id_
        self.namespace = namespace
        self.lineage = lineage
        self.start = start
        self.end = end
        self.extents = coverage.extents
        groups = namespace.needs.groups
        self.complete = any(group.whole and last for group, (_, last) in zip(groups, coverage.extents, strict=False))
        self.fields = coverage.fields
        self.provides = provides
        self.packed = packed
        self.total_bytes = total_bytes
        self.payload_bytes = payload_bytes
        self.created_ns = created_ns
        self.writer = writer
        self.parent: Record | None = None
        self.children: set[Record] = set()
        self.states: set[Record] = set()
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

    @property
    def is_state(self) -> bool:
        return bool(self.provides)


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
        self.needs = needs_of_model(identity.layers)


@dataclass(slots=True)
class Found:
    """Answer of the index to a query: how much agrees, how far all that every token needs is
    held without a gap, where one can resume, and the records to resume from: segments by their
    start, then states. ``groups`` is usable by group of layers, where it was asked for."""

    path: Path | None = None
    held: int = 0
    usable: int = 0
    spans: tuple[Span, ...] = ()
    anchors: tuple[Anchor, ...] = ()
    groups: tuple[tuple[int, int], ...] = ()

    @property
    def matched(self) -> int:
        return self.path.walk.matched if self.path else 0


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

    def path(
        self, key: NamespaceKey, lineage: Lineage, tokens: bytes, attachments: Sequence[Attachment],
        fields: frozenset[bytes] | None = None,
    ) -> Path | None:  # fmt: skip
        """What is stored along ``tokens``; of rows that depend on a quantisation field, those of
        ``fields`` only, unless it is None."""
        namespace = self.namespaces.get(key)
        tree = namespace.trees.get(lineage) if namespace else None
        if namespace is None or tree is None:
            return None
        return Path(namespace.needs, tree.walk(tokens, attachments), len(tokens) // 4, tuple(attachments), fields)

    def find(
        self, key: NamespaceKey, lineage: Lineage, tokens: bytes, attachments: Sequence[Attachment], *,
        anchored: bool = False, limit: int = 0, logits: bool = False, detail: bool = False,
    ) -> Found:  # fmt: skip
        """The rule applied to what is stored along ``tokens``; ``limit`` > 0 caps usable, with
        ``logits`` parked ones count."""
        path = self.path(key, lineage, tokens, attachments)
        if path is None:
            return Found()
        usable = path.usable(limit or path.length, logits=logits)
        anchors = path.anchors()
        if anchored:
            positions = sorted({item.position for item in anchors if item.position < usable}, reverse=True)
            named = any(item.position == usable for item in anchors)
            usable = usable if named else next((at for at in positions if path.usable(at) == at), usable)
        groups = path.usable_by_layer() if detail else ()
        return Found(path, path.held(), usable, path.select(usable), anchors, groups)

    def add(self, record: Record, parent: Record | None, tokens: bytes, attachments: Sequence[Attachment]) -> None:
        """Enter a segment whose whole prefix is ``tokens`` with ``attachments``, or a state, for
        which its parent's are enough."""
        namespace = record.namespace
        tree = namespace.trees.setdefault(record.lineage, RadixTree())
        if record.is_state:
            assert parent is not None and parent.node is not None
            tree.add_state(parent.node, record.end, record, trimmable=bool(record.provides & Provides.TRIMMABLE))
        else:
            record.node = tree.insert(tokens, attachments, record.start, record)
        record.parent = parent
        if parent is not None:
            parent.children.add(record)
            if record.is_state:
                parent.states.add(record)
        namespace.records.add(record)
        self.namespaces[namespace.key] = namespace
        self.records[record.id] = record

    def adopt(self, heir: Record, record: Record) -> None:
        """Let what builds on ``record``, and its anchors, go over to a segment that holds all of
        its rows."""
        for child in list(record.children):
            if child is heir:
                continue
            record.children.discard(child)
            record.warm_children -= child.warm
            record.cold_children -= child.cold != Cold.ABSENT
            child.parent = heir
            heir.children.add(child)
            if child.is_state:
                record.states.discard(child)
                heir.states.add(child)
            heir.warm_children += child.warm
            heir.cold_children += child.cold != Cold.ABSENT
        heir.anchors.update(record.anchors)

    def drop(self, record: Record) -> None:
        """Take a record that is in neither tier out of the index."""
        tree = record.namespace.trees[record.lineage]
        if record.is_state:
            assert record.parent is not None and record.parent.node is not None
            trimmable = bool(record.provides & Provides.TRIMMABLE)
            tree.remove_state(record.parent.node, record.end, record, trimmable=trimmable)
        else:
            assert record.node is not None
            tree.remove(record.node, record.start, record)
        if not tree.root.children:
            del record.namespace.trees[record.lineage]
        if record.parent is not None:
            record.parent.children.discard(record)
            record.parent.states.discard(record)
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

    def touch(self, records: Iterable[Record], *, hit: bool = False) -> None:
        """Make these records and all they build on the most recently used: what others build on
        after what builds on it, so that a leaf always comes first, then states where the path
        branches, then those asked for."""
        self.counter += 1
        asked = list(dict.fromkeys(records))
        states = [record for record in asked if record.is_state]
        segments: set[Record] = set()
        for record in asked:
            link: Record | None = record.parent if record.is_state else record
            while link is not None and link not in segments:
                segments.add(link)
                link = link.parent
        segments.update(item for record in asked if record.packed for item in _beneath(record))
        shared = [state for link in segments for state in link.states if self._branches(state)]
        ordered = sorted(segments, key=lambda record: (-record.end, -record.start))
        for record in dict.fromkeys([*ordered, *(item for item in shared if item not in states), *states]):
            record.last_used = self.counter
            record.hits += hit
            self.touched.add(record)
            if record in self.warm_order:
                self.warm_order.move_to_end(record)
            if record in self.cold_order:
                self.cold_order.move_to_end(record)

    @staticmethod
    def _branches(state: Record) -> bool:
        """Whether prompts part where this state lies."""
        node = state.parent.node if state.parent else None
        while node is not None and node.start >= state.end:
            node = node.parent
        return node is not None and node.end == state.end and len(node.children) > 1

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


def _beneath(packed: Record) -> Iterator[Record]:
    """Segments that hold rows of a packed one too: what it was made of."""
    node = packed.node
    while node is not None and node.end > packed.start:
        yield from (record for record in node.records if not record.packed)
        node = node.parent
