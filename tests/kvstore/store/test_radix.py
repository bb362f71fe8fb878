"""The radix tree against a naive set of token tuples with attachments."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from warmkv.kvstore.store.radix import Node, RadixTree, key_of
from warmkv.kvstore.testing import IMAGE, OTHER_IMAGE, common_prefix
from warmkv.schema.records import Attachment

Prefix = tuple[tuple[int, ...], tuple[Attachment, ...]]


def packed(tokens: tuple[int, ...] | list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    """Few tokens and two images, so that prefixes collide in every way."""
    tokens = tuple(draw(st.lists(st.sampled_from([1, 2, 0x01000000]), min_size=1, max_size=12)))
    attachments, at = [], 0
    for _ in range(draw(st.integers(0, 2))):
        start = at + draw(st.integers(0, 4))
        length = draw(st.integers(1, 3))
        if start + length > len(tokens):
            break
        attachments.append(Attachment(start, length, draw(st.sampled_from([IMAGE, OTHER_IMAGE]))))
        at = start + length
    return tokens, tuple(attachments)


@dataclass(frozen=True)
class Stored:
    """A record: the prefix it ends, and its first row."""

    number: int
    prefix: Prefix
    start: int


@dataclass(frozen=True)
class State:
    """A state ``on`` a record, at ``position``; ``trimmable`` ones can be cut back."""

    number: int
    on: Stored
    position: int
    trimmable: bool

    @property
    def prefix(self) -> Prefix:
        tokens, attachments = self.on.prefix
        return tokens[: self.position], tuple(item for item in attachments if item.start < self.position)


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tree: RadixTree[Stored | State] = RadixTree()
        self.nodes: dict[Stored, Node[Stored | State]] = {}
        self.states: set[State] = set()
        self.numbers = 0

    def common(self, prefix: Prefix) -> int:
        tokens, attachments = prefix
        return max((common_prefix(tokens, attachments, *item.prefix) for item in self.nodes), default=0)

    @rule(prefix=prefixes(), data=st.data())
    def insert(self, prefix: Prefix, data: st.DataObject) -> None:
        tokens, attachments = prefix
        start = data.draw(st.integers(0, min(self.common(prefix), len(tokens) - 1)))
        self.numbers += 1
        record = Stored(self.numbers, prefix, start)
        parents = [item for item in self.nodes if item.start < start <= common_prefix(tokens, attachments, *item.prefix)]
        parent = data.draw(st.sampled_from([None, *parents]))
        if parent is None:
            self.nodes[record] = self.tree.insert(packed(tokens), attachments, start, record)
        else:
            own = [item for item in attachments if item.start >= start]
            self.nodes[record] = self.tree.insert(packed(tokens[start:]), own, start, record, self.nodes[parent])

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Only what nothing builds on, as the store does: no tokens may hang in the air."""
        leaves = [item for item in self.nodes if not self.builds_on(item)]
        if leaves:
            record = data.draw(st.sampled_from(leaves))
            self.tree.remove(self.nodes.pop(record), record.start, record)

    def builds_on(self, record: Stored) -> bool:
        return any(state.on == record for state in self.states) or any(
            0 < other.start and record.start < other.start and common_prefix(*other.prefix, *record.prefix) >= other.start
            for other in self.nodes if other != record
        )  # fmt: skip

    @rule(data=st.data(), trimmable=st.booleans())
    def add_state(self, data: st.DataObject, trimmable: bool) -> None:
        if self.nodes:
            on = data.draw(st.sampled_from(list(self.nodes)))
            position = data.draw(st.integers(on.start + 1, len(on.prefix[0])))
            self.numbers += 1
            state = State(self.numbers, on, position, trimmable)
            self.tree.add_state(self.nodes[on], position, state, trimmable=trimmable)
            self.states.add(state)

    @rule(data=st.data())
    def remove_state(self, data: st.DataObject) -> None:
        if self.states:
            state = data.draw(st.sampled_from(sorted(self.states, key=lambda item: item.number)))
            self.states.remove(state)
            self.tree.remove_state(self.nodes[state.on], state.position, state, trimmable=state.trimmable)

    @rule(prefix=prefixes())
    def walk(self, prefix: Prefix) -> None:
        tokens, attachments = prefix
        walk = self.tree.walk(packed(tokens), attachments)
        expected = self.common(prefix)
        assert walk.matched == expected
        at = 0
        for node in walk.nodes:
            assert node.start == at
            at = node.end
        assert at >= expected and (not walk.nodes or walk.nodes[-1].start < expected)
        if expected == len(tokens):
            assert walk.stored is None
        else:
            follows = {
                item.prefix[0][expected]
                for item in self.nodes
                if len(item.prefix[0]) > expected and common_prefix(tokens, attachments, *item.prefix) == expected
            }
            assert walk.stored in follows if follows else walk.stored is None
        for node in walk.nodes:
            for record in node.records:
                shared = common_prefix(tokens, attachments, *record.prefix)
                assert shared >= min(node.end, expected), "a record on the walk belongs to other tokens"
        met = {state for node in walk.nodes for position, _, state in node.states if position <= expected}
        of_ours = {item for item in self.states if common_prefix(tokens, attachments, *item.prefix) == item.position}
        assert met == of_ours, "the states on the walk are those of the tokens that agree"

    @invariant()
    def every_record_lies_on_exactly_its_nodes(self) -> None:
        for record, bottom in self.nodes.items():
            tokens, attachments = record.prefix
            assert bottom.end == len(tokens)
            assert self.tree.prefix(bottom, len(tokens)) == (packed(tokens), attachments)
            node, reached = bottom, bottom.end
            while node.parent is not None and node.end > record.start:
                assert record in node.records and node.end == reached
                reached, node = node.start, node.parent
            assert reached == record.start

    @invariant()
    def structure_holds(self) -> None:
        count, pending = 0, list(self.tree.root.children.values())
        while pending:
            node = pending.pop()
            count += 1
            assert node.parent is not None and node.parent.children[node.key] is node
            single = len(node.parent.children) == 1 and node.attachment is None
            assert (node.parent.only is node) == single and (single or node.parent.only is None)
            assert node.start == node.parent.end and len(node.edge) == 4 * (node.end - node.start) > 0
            assert node.key == key_of(node.edge[:4], node.attachment)
            assert node.attachment is None or node.attachment.start == node.start
            assert node.records or node.children
            assert len(set(node.records)) == len(node.records)
            if len(node.children) == 1:
                (child,) = node.children.values()
                assert child.attachment is not None or set(child.records) != set(node.records), "a needless split"
            pending.extend(node.children.values())
        assert count == self.tree.nodes
        assert self.nodes or not count

    @invariant()
    def every_state_lies_in_the_node_that_holds_the_token_before_it(self) -> None:
        seen: set[State] = set()
        pending = [self.tree.root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            assert [position for position, _, _ in node.states] == sorted(position for position, _, _ in node.states)
            for position, trimmable, state in node.states:
                assert isinstance(state, State) and (position, trimmable) == (state.position, state.trimmable)
                assert node.start < position <= node.end
                tokens, attachments = state.prefix
                assert self.tree.prefix(node, position) == (packed(tokens), attachments)
                assert self.tree.node_at(self.nodes[state.on], position) is node
                seen.add(state)
            below = sum(child.trimmable for child in node.children.values())
            assert node.trimmable == below + sum(trimmable for _, trimmable, _ in node.states)
        assert seen == self.states


TestRadix = RadixMachine.TestCase
TestRadix.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_walk_stops_where_the_query_has_an_image_and_the_tree_none() -> None:
    tree: RadixTree[str] = RadixTree()
    tree.insert(packed([1, 2, 3, 4]), (), 0, "text")
    walk = tree.walk(packed([1, 2, 3, 4]), (Attachment(2, 2, IMAGE),))
    assert (walk.matched, walk.stored) == (2, 3)


def test_keys_of_tokens_and_images_cannot_be_confused() -> None:
    keys = {key_of(packed([1]), image) for image in (None, Attachment(0, 1, IMAGE), Attachment(0, 2, IMAGE))}
    assert len(keys) == 3


def test_splitting_keeps_a_thousand_branches_apart() -> None:
    tree: RadixTree[int] = RadixTree()
    trunk = list(range(1000))
    for at in range(1, 1000):
        tree.insert(packed([*trunk[:at], 5000 + at]), (), 0, at)
    for at in range(1, 1000):
        assert tree.walk(packed([*trunk[:at], 5000 + at, 1])).matched == at + 1
    bottoms = {at: tree.walk(packed([*trunk[:at], 5000 + at])).nodes[-1] for at in range(1, 1000)}
    for at in range(2, 1000):
        tree.remove(bottoms[at], 0, at)
    assert tree.nodes == 1 and tree.walk(packed([0, 5001])).matched == 2
