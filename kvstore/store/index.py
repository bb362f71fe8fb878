"""The index: namespaces, their radix trees, and the records both tiers agree about.

Passive data behind one lock. Whoever changes it holds ``Index.changed``; nothing here reads
or writes files, closes descriptors or hashes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from warmkv.kvstore.geometry import Coverage
from warmkv.kvstore.needs import Provides, needs_of_model
from warmkv.kvstore.store.clock import NS, Clock
from warmkv.kvstore.store.path import Path, Span
from warmkv.kvstore.store.policy import ranking
from warmkv.kvstore.store.radix import Node, RadixTree
from warmkv.kvstore.store.ranking import Ranking
from warmkv.kvstore.store.worth import Prefill, worth_of
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Attachment, Lineage, NamespaceKey, RecordId


class Cold(Enum):
    """Where a record stands with the cold tier."""

    ABSENT = 0
    QUEUED = 1
    WRITING = 2
    STORED = 3


#: Only in memory yet, and on its way to disk: it waits for that before it may go.
DIRTY = (Cold.QUEUED, Cold.WRITING)
NOTHING_COVERED = Coverage(())
DAY_S = 86400


class Record:
    """A segment, rows of tokens [start, end), or a state at ``start`` == ``end``; of one namespace
    and lineage, in either tier or both.

    ``extents`` are the rows a segment holds, one range a group of layers, ``complete`` whether those
    of layers that need every row are among them; ``fields`` those they were quantised with;
    ``provides`` what a state is good for. ``packed`` marks a segment made of others, which are on
    disk instead of it. ``prefill_us`` is how long its own rows took to compute, 0 where nobody said;
    ``used_at_s`` the wall clock at its last use. ``awaited`` counts requests that wait until it is on
    disk, and readers of what lies there: neither must see it give way. ``fd`` is the sealed memfd of
    the warm tier or -1; ``leases`` maps lease id to its deadline."""

    __slots__ = (
        "id", "namespace", "lineage", "start", "end", "complete", "extents", "fields", "provides", "packed", "parent", "children",
        "states", "node", "total_bytes", "payload_bytes", "created_ns", "writer", "fd", "cold", "cold_error", "cold_children",
        "warm_children", "last_used", "hits", "pinned_until_ns", "prefill_us", "used_at_s", "leases", "promotion", "anchors",
        "awaited", "gone",
    )  # fmt: skip

    def __init__(
        self, id_: RecordId, namespace: Namespace, lineage: Lineage, start: int, end: int, total_bytes: int, payload_bytes: int,
        created_ns: int, writer: str, *, coverage: Coverage = NOTHING_COVERED, provides: Provides = Provides.NOTHING,
        packed: bool = False, prefill_us: int = 0,
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
        self.prefill_us = prefill_us
        self.used_at_s = 0
        self.awaited = 0
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
    """One model's state under one owner. Its trees are apart per lineage. ``warm_bytes`` and
    ``cold_bytes`` are its containers in each tier; ``prefill`` sums what was said of how long its
    rows took to compute."""

    def __init__(self, key: NamespaceKey, owner_uid: int, share: str, identity: Identity, created_ns: int) -> None:
        self.key = key
        self.owner_uid = owner_uid
        self.share = share
        self.identity = identity
        self.created_ns = created_ns
        self.trees: dict[Lineage, RadixTree[Record]] = {}
        self.records: set[Record] = set()
        self.needs = needs_of_model(identity.layers)
        self.warm_bytes = 0
        self.cold_bytes = 0
        self.prefill = Prefill()


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
    """``warm_order`` and ``cold_order`` rank what each tier holds by ``policy``. ``tokens`` are the
    ids its segments name, ``dirty_bytes`` those of records on their way to disk.

    **Threading:** hold ``changed`` around every call; it is notified when records change."""

    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    namespaces: dict[NamespaceKey, Namespace] = field(default_factory=dict)
    records: dict[RecordId, Record] = field(default_factory=dict)
    touched: set[Record] = field(default_factory=set)
    counter: int = 0
    policy: str = "lru"
    clock: Clock = field(default_factory=Clock)
    max_gap_s: int = DAY_S
    tokens: int = 0
    dirty_bytes: int = 0
    prefill: Prefill = field(default_factory=Prefill)
    warm_order: Ranking[Record] = field(init=False)
    cold_order: Ranking[Record] = field(init=False)

    def __post_init__(self) -> None:
        worth = partial(worth_of, self.prefill)
        self.warm_order = ranking(self.policy, worth)
        self.cold_order = ranking(self.policy, worth)

    def restore(self) -> None:
        """Rank what a restart found on disk, worst first and a record before what it builds on, and go
        on where its time stopped.

        A clock that was set forward while nobody served must not make everything too old, nor one
        that was set back keep it for ever: since its last use a store is older by what the clock says,
        by ``max_gap_s`` at most and never by less than nothing."""
        records = sorted(self.records.values(), key=lambda record: (record.last_used, -record.start))
        self.counter = max(self.counter, max((record.last_used for record in records), default=0))
        self.cold_order.restore(records)
        last_s = max((record.used_at_s for record in records), default=0)
        self.clock.not_before(last_s * NS)
        now_s = self.clock.wall_s()
        skipped_s = max(0, now_s - last_s - self.max_gap_s) if last_s else 0
        for record in records:
            if skipped_s and record.pinned_until_ns > last_s * NS:
                record.pinned_until_ns = min(record.pinned_until_ns + skipped_s * NS, 2**63 - 1)
            if skipped_s or not record.used_at_s:
                record.used_at_s = record.used_at_s + skipped_s if record.used_at_s else now_s
                self.touched.add(record)

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

    def add(
        self, record: Record, parent: Record | None, tokens: bytes, attachments: Sequence[Attachment], *, below: bool = False
    ) -> None:  # fmt: skip
        """Enter a segment whose whole prefix is ``tokens`` with ``attachments``, or a state, for
        which its parent's are enough. ``below``: both are the segment's own, behind its parent's."""
        namespace = record.namespace
        tree = namespace.trees.get(record.lineage)
        if tree is None:
            tree = namespace.trees[record.lineage] = RadixTree()
        if record.is_state:
            assert parent is not None and parent.node is not None
            tree.add_state(parent.node, record.end, record, trimmable=bool(record.provides & Provides.TRIMMABLE))
        else:
            above = parent.node if below and parent is not None else None
            record.node = tree.insert(tokens, attachments, record.start, record, above)
        record.parent = parent
        if parent is not None:
            parent.children.add(record)
            if record.is_state:
                parent.states.add(record)
        namespace.records.add(record)
        self.namespaces[namespace.key] = namespace
        self.records[record.id] = record
        self.tokens += tokens_of(record)
        if record.prefill_us:
            namespace.prefill.note(record)
            self.prefill.note(record)

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
        self.tokens -= tokens_of(record)
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
        now_s = self.clock.wall_s()
        asked = list(dict.fromkeys(records))
        states = [record for record in asked if record.is_state]
        segments: set[Record] = set()
        for record in asked:
            link: Record | None = record.parent if record.is_state else record
            while link is not None and link not in segments:
                segments.add(link)
                link = link.parent
        segments.update(item for record in asked if record.packed for item in _beneath(record))
        shared = [state for link in segments for state in link.states if self.branches(state)]
        # What builds on a record begins behind its start, and may end before its end.
        ordered = sorted(segments, key=lambda record: (-record.start, -record.end))
        last = list(dict.fromkeys([*(item for item in shared if item not in states), *states]))
        for record in [*ordered, *last]:
            record.last_used = self.counter
            record.used_at_s = now_s
            record.hits += hit
            self.touched.add(record)
        for order in (self.warm_order, self.cold_order):
            _use(order, ordered, last)

    @staticmethod
    def branches(state: Record) -> bool:
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
        if (fd >= 0) != record.warm:
            step = 1 if fd >= 0 else -1
            record.namespace.warm_bytes += step * record.total_bytes
            if record.parent is not None:
                record.parent.warm_children += step
        record.fd = fd
        if fd >= 0:
            self.warm_order.use(record)
        else:
            self.warm_order.leave(record)

    def set_cold(self, record: Record, state: Cold) -> None:
        """Change where a record stands with the cold tier; queued ones count as children, so
        that nothing they build on is evicted before they are written."""
        if (state != Cold.ABSENT) != (record.cold != Cold.ABSENT) and record.parent is not None:
            record.parent.cold_children += 1 if state != Cold.ABSENT else -1
        self.dirty_bytes += record.total_bytes * ((state in DIRTY) - (record.cold in DIRTY))
        record.namespace.cold_bytes += record.total_bytes * ((state == Cold.STORED) - (record.cold == Cold.STORED))
        record.cold = state
        if state != Cold.STORED:
            self.cold_order.leave(record)
        else:
            self.cold_order.use(record)

    def all_nodes(self) -> Iterator[Node[Record]]:
        for namespace in self.namespaces.values():
            for tree in namespace.trees.values():
                pending = list(tree.root.children.values())
                while pending:
                    node = pending.pop()
                    yield node
                    pending.extend(node.children.values())


def _use(order: Ranking[Record], ordered: Iterable[Record], states: Iterable[Record]) -> None:
    """Rank what an order has of a path, leaves first. None goes before what builds on it anyway: no
    segment ranks below that, or plans would read past all that only wait for their leaves."""
    least = max((order.use(state) for state in states if state in order), default=0.0)
    for record in ordered:
        if record in order:
            least = order.use(record, least)
    for state in states:
        if state in order:
            order.use(state)


def tokens_of(record: Record) -> int:
    """Token ids the index keeps for a record: a packed one, and a state, add none."""
    return 0 if record.packed or record.is_state else record.end - record.start


def _beneath(packed: Record) -> Iterator[Record]:
    """Segments that hold rows of a packed one too: what it was made of."""
    node = packed.node
    while node is not None and node.end > packed.start:
        yield from (record for record in node.records if not record.packed)
        node = node.parent
