"""The radix tree of one namespace and lineage: which stored tokens does a query share?

Edges are runs of little-endian uint32 tokens kept as bytes, compared whole. A child is found
by its first token; where an attachment begins, its length and digest belong to the key, so
two images behind the same placeholder tokens are two branches. Nodes carry the segments whose
span covers their whole span, and the states that lie in (start, end]; splitting a node splits
no record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from warmkv.schema.records import Attachment

WIDTH = 4
R = TypeVar("R")
State = tuple[int, bool, R]


class Node(Generic[R]):
    """Tokens [start, end) below ``parent``. ``key`` is its key among the parent's children;
    ``only`` is the child where there is a single one, which most nodes of conversations have, and no
    attachment begins with it: it is tried without a look into ``children``. ``states`` are (position,
    can be cut back, record) in order; ``trimmable`` counts those here and below that can be cut back."""

    __slots__ = (
        "parent", "key", "start", "end", "edge", "children", "only", "records", "attachment", "states", "trimmable",
    )  # fmt: skip

    def __init__(self, parent: Node[R] | None, key: bytes, start: int, edge: bytes, attachment: Attachment | None) -> None:
        self.parent = parent
        self.key = key
        self.start = start
        self.end = start + len(edge) // WIDTH
        self.edge = edge
        self.children: dict[bytes, Node[R]] = {}
        self.only: Node[R] | None = None
        self.records: tuple[R, ...] = ()
        self.attachment = attachment
        self.states: tuple[State[R], ...] = ()
        self.trimmable = 0

    def hang(self) -> None:
        """Enter the node among its parent's children, in the place of one with the same key."""
        assert self.parent is not None
        self.parent.children[self.key] = self
        self.parent._note_only()

    def unhang(self) -> None:
        """Take the node off its parent."""
        assert self.parent is not None
        del self.parent.children[self.key]
        self.parent._note_only()

    def _note_only(self) -> None:
        child = next(iter(self.children.values())) if len(self.children) == 1 else None
        self.only = child if child is not None and child.attachment is None else None


@dataclass(slots=True)
class Walk(Generic[R]):
    """Nodes along a query, the last perhaps only in part; ``matched`` tokens agree. ``stored``
    is the id found where the query differs, None where nothing more is stored."""

    nodes: tuple[Node[R], ...]
    matched: int
    stored: int | None


def key_of(first: bytes, attachment: Attachment | None) -> bytes:
    return first if attachment is None else first + attachment.length.to_bytes(8, "little") + attachment.digest


class RadixTree(Generic[R]):
    """See the module docstring. **Threading:** the caller holds the index lock."""

    def __init__(self) -> None:
        self.root: Node[R] = Node(None, b"", 0, b"", None)
        self.nodes = 0

    def walk(self, tokens: bytes, attachments: Sequence[Attachment] = (), top: Node[R] | None = None) -> Walk[R]:
        """Follow ``tokens`` from ``top`` (the root) on as far as stored ones agree; positions, also of
        ``attachments``, count from the end of ``top``. O(length compared + nodes passed)."""
        path: list[Node[R]] = []
        node, at, end = top or self.root, 0, len(tokens)
        pending = list(reversed(attachments))
        while at < end:
            child = node.only
            if child is not None and not pending and tokens.startswith(edge := child.edge, at):
                path.append(child)
                node, at = child, at + len(edge)
                continue
            key = tokens[at : at + WIDTH]
            if pending and pending[-1].start * WIDTH == at:
                key = key_of(key, pending.pop())
            child = node.children.get(key)
            if child is None:
                return Walk(tuple(path), at // WIDTH, _first_stored(node))
            edge = child.edge
            stop = at + len(edge)
            path.append(child)
            if (pending and stop > pending[-1].start * WIDTH) or not tokens.startswith(edge, at):
                same = common_tokens(tokens, at, min(pending[-1].start * WIDTH, end) if pending else end, edge)
                differs = same * WIDTH < len(edge) and at + same * WIDTH < end
                stored = int.from_bytes(edge[same * WIDTH : same * WIDTH + WIDTH], "little") if differs else None
                return Walk(tuple(path), at // WIDTH + same, stored)
            node, at = child, stop
        return Walk(tuple(path), at // WIDTH, None)

    def insert(
        self, tokens: bytes, attachments: Sequence[Attachment], start: int, record: R, above: Node[R] | None = None
    ) -> Node[R]:  # fmt: skip
        """Add ``record`` for rows [start, end) of the whole prefix ``tokens``, whose first
        ``start`` tokens must be there already; the node that ends where the record does. With
        ``above``, a node on the path that reaches ``start``, tokens and attachments are those from
        ``start`` on, and the path above is not walked again."""
        top, base = self.root, 0
        if above is not None and above.end == start:
            top, base = above, start
            if not attachments and tokens[:WIDTH] not in above.children:
                return self._sprout(above, tokens, record)
        elif above is not None:
            holder = self.node_at(above, start)
            assert holder.parent is not None
            top, base = holder.parent, holder.start
            tokens = holder.edge[: (start - base) * WIDTH] + tokens
            attachments = [*([holder.attachment] if holder.attachment else ()), *attachments]
        if base and attachments:
            attachments = [Attachment(item.start - base, item.length, item.digest) for item in attachments]
        walk = self.walk(tokens, attachments, top)
        node = walk.nodes[-1] if walk.nodes else top
        if node.start < base + walk.matched < node.end:
            node = self._split(node, base + walk.matched)
        at = walk.matched
        ordered = deque(item for item in attachments if item.start >= at)
        end = len(tokens) // WIDTH
        while at < end:
            here = ordered.popleft() if ordered and ordered[0].start == at else None
            stop = ordered[0].start if ordered else end
            edge = tokens[at * WIDTH : stop * WIDTH]
            kept = Attachment(here.start + base, here.length, here.digest) if here is not None and base else here
            child = Node(node, key_of(edge[:WIDTH], here), base + at, edge, kept)
            child.hang()
            self.nodes += 1
            node, at = child, stop
        self._attach(node, start, record)
        return node

    def _sprout(self, above: Node[R], edge: bytes, record: R) -> Node[R]:
        """A record whose rows are one new node."""
        child = Node(above, edge[:WIDTH], above.end, edge, None)
        child.hang()
        child.records = (record,)
        self.nodes += 1
        return child

    def _attach(self, bottom: Node[R], start: int, record: R) -> None:
        node = bottom
        while node.parent is not None and node.end > start:
            if node.start < start:
                self._split(node, start)
            node.records = (*node.records, record)
            node = node.parent

    def remove(self, bottom: Node[R], start: int, record: R) -> None:
        """Take ``record`` off the nodes from ``bottom`` up to ``start`` and prune what is empty."""
        node: Node[R] | None = bottom
        while node is not None and node.parent is not None and node.end > start:
            node.records = tuple(item for item in node.records if item != record)
            node = node.parent
        node = bottom
        while node.parent is not None and not node.records and not node.children:
            node.unhang()
            self.nodes -= 1
            node = node.parent
        while node.parent is not None and node.end >= start:
            node = self._merge(node).parent or self.root

    def add_state(self, bottom: Node[R], position: int, record: R, *, trimmable: bool) -> None:
        """Enter a state on the path from the root to ``bottom``."""
        node = self.node_at(bottom, position)
        at = bisect_right(node.states, position, key=_position)
        node.states = (*node.states[:at], (position, trimmable, record), *node.states[at:])
        self._count(node, trimmable)

    def remove_state(self, bottom: Node[R], position: int, record: R, *, trimmable: bool) -> None:
        """Take a state off again."""
        node = self.node_at(bottom, position)
        node.states = tuple(item for item in node.states if item != (position, trimmable, record))
        self._count(node, -int(trimmable))

    def node_at(self, bottom: Node[R], position: int) -> Node[R]:
        """The node above or at ``bottom`` that holds the token before ``position``."""
        node = bottom
        while node.start >= position and node.parent is not None:
            node = node.parent
        return node

    def _count(self, node: Node[R] | None, trimmable: int) -> None:
        while trimmable and node is not None:
            node.trimmable += trimmable
            node = node.parent

    def _merge(self, node: Node[R]) -> Node[R]:
        """Undo a split that nothing needs any more: join a node and its only child where they
        carry the same records. The lower keeps its identity, as in a split; the joined node."""
        child = next(iter(node.children.values()), None)
        if child is None or len(node.children) > 1 or child.attachment is not None:
            return node
        if set(child.records) != set(node.records) or node.parent is None:
            return node
        child.parent, child.key, child.attachment = node.parent, node.key, node.attachment
        child.start, child.edge = node.start, node.edge + child.edge
        child.states, child.trimmable = node.states + child.states, node.trimmable
        child.hang()
        self.nodes -= 1
        return child

    def prefix(self, bottom: Node[R], end: int) -> tuple[bytes, tuple[Attachment, ...]]:
        """Tokens [0, end) on the path to ``bottom`` and the attachments that begin among them."""
        edges: list[bytes] = []
        found: list[Attachment] = []
        node: Node[R] | None = bottom
        while node is not None and node.parent is not None:
            edges.append(node.edge)
            if node.attachment is not None and node.start < end:
                found.append(node.attachment)
            node = node.parent
        return b"".join(reversed(edges))[: end * WIDTH], tuple(reversed(found))

    def _split(self, node: Node[R], at: int) -> Node[R]:
        """Cut ``node`` at position ``at``; the new upper part. The lower keeps its identity, so
        that whoever remembers the node a record ends at stays right."""
        cut = (at - node.start) * WIDTH
        assert node.parent is not None
        upper: Node[R] = Node(node.parent, node.key, node.start, node.edge[:cut], node.attachment)
        upper.records = node.records
        upper.states, node.states = _cut_states(node.states, at)
        upper.trimmable = node.trimmable
        node.trimmable -= sum(trimmable for _, trimmable, _ in upper.states)
        upper.hang()
        node.parent, node.attachment, node.start, node.edge = upper, None, at, node.edge[cut:]
        node.key = node.edge[:WIDTH]
        node.hang()
        self.nodes += 1
        return upper


def _position(item: State[R]) -> int:
    return item[0]


def _cut_states(states: tuple[State[R], ...], at: int) -> tuple[tuple[State[R], ...], tuple[State[R], ...]]:
    cut = bisect_right(states, at, key=_position)
    return states[:cut], states[cut:]


def common_tokens(tokens: bytes, at: int, end: int, edge: bytes) -> int:
    """How many leading tokens of ``edge`` equal ``tokens[at:end]``."""
    count = min(end - at, len(edge)) // WIDTH
    ours = np.frombuffer(tokens, "<u4", count, at)
    theirs = np.frombuffer(edge, "<u4", count)
    differing = np.flatnonzero(ours != theirs)
    return int(differing[0]) if differing.size else count


def _first_stored(node: Node[R]) -> int | None:
    key = next(iter(node.children), None)
    return None if key is None else int.from_bytes(key[:WIDTH], "little")
