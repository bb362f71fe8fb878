"""A store and the naive twin, told and asked the same: every difference is an AssertionError.

After every change the store's records are read, head by head, and compared with the twin: what
was saved must be there, what was not saved must not be, and what a store may drop (rows nobody
needs any more, what was evicted) the twin drops as well. So the answers must be equal, not merely
bounded. Looks inside an embedded store; for clients compare with `NaiveStore` alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from warmkv.kvstore.memfd import map_private
from warmkv.kvstore.needs import needs_of_model
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.index import Cold, Record
from warmkv.kvstore.testing.comparison import assert_contents
from warmkv.kvstore.testing.naive import ANCHOR, LOGITS, ROW, STATE, TOKEN, Expected, Item, NaiveStore, Part, prefixes
from warmkv.kvstore.testing.samples import Prompt, Records
from warmkv.schema import segment as container
from warmkv.schema.identity import Identity, PlaneRole
from warmkv.schema.records import CLEAN, Anchor, Lineage, RecordId

Space = tuple[Identity, Lineage]


class StoreTwin:
    """``store`` may be replaced by one that was opened anew over the same files (`reopened`)."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.twin = NaiveStore()
        #: Every prompt saved, by its whole prefix.
        self._ends: defaultdict[Space, dict[bytes, Prompt]] = defaultdict(dict)
        self._read: dict[RecordId, tuple[Prompt, frozenset[Item]]] = {}

    # -- changing ------------------------------------------------------------------------

    def save(
        self, identity: Identity, prompt: Prompt, records: Records, lineage: Lineage = CLEAN, *, anchors: Sequence[Anchor] = (),
        logits: Any = None, **options: Any,
    ) -> Saved:  # fmt: skip
        """Save, and prove that all of it that is needed is held, and that nothing else was lost."""
        ids, images = prompt
        before = self.twin.items(identity, lineage)
        saved = self.store.save(
            identity, ids, records, anchors=anchors, logits=logits, attachments=images, lineage=lineage, **options
        )
        assert saved.stored and saved.held == len(ids)
        self._ends[identity, lineage][prefixes(ids, images)[-1]] = prompt
        self.twin.save(identity, ids, records, images, lineage, logits, anchors)
        given = self.twin.items(identity, lineage)
        optional = {item for item in given if item[0] == ROW} - before - self.twin.needed(identity, ids, images)
        lost = self._mirror(identity, lineage)
        assert lost <= optional, f"of what was saved {_told(lost - optional)} is missing"
        self.check()
        return saved

    def forget(self, identity: Identity, prompt: Prompt, lineage: Lineage = CLEAN) -> None:
        """Forget, and prove that only what lies along the prompt went, and that every prompt that
        was saved can be resumed as before where another one still passes beyond its end."""
        ids, images = prompt
        path = set(prefixes(ids, images))
        tokens = {prefix for what, _, prefix in self.twin.items(identity, lineage) if what == TOKEN}
        others = [
            saved
            for end, saved in self._ends[identity, lineage].items()
            if (end not in path or any(longer.startswith(end) for longer in tokens - path))
            and self._resumes(saved, identity, lineage)
        ]
        self.store.forget(identity, ids, attachments=images, lineage=lineage)
        lost = self._mirror(identity, lineage)
        stray = [item for item in lost if item[2] not in path]
        assert not stray, f"{_told(stray)} belongs to another prompt"
        for other in others:
            assert self._resumes(other, identity, lineage), f"{other} was not to be forgotten; gone is {_told(lost)}"
        self.check()

    def _resumes(self, prompt: Prompt, identity: Identity, lineage: Lineage) -> bool:
        ids, images = prompt
        return self.twin.find(identity, (*ids, 2**32 - 1), images, lineage).usable == len(ids)

    def evict(self, record: Record) -> None:
        """Drop a record nothing builds on, from both tiers."""
        assert not record.children
        removal: Any = self.store.engine.removal
        space = record.namespace.identity, record.lineage
        items = self._contents(record)[1] | self._anchors(record)
        with self.store.engine.index.changed:
            removal._drop(record)
        removal._finish([record])
        assert self._mirror(*space) <= items
        self.check()

    def demote(self, record: Record) -> None:
        """Let the warm copy of a stored record go; the cold one stays."""
        engine = self.store.engine
        with engine.index.changed:
            assert record.cold == Cold.STORED
            engine.warm.evict(record)
        engine.warm.reap()
        self.check()

    def reopened(self, store: Store) -> None:
        """The same files opened anew: nothing may be missing."""
        self.store = store
        for space in self._ends:
            lost = self._mirror(*space)
            assert not lost, f"{_told(lost)} is missing after the restart"
        self.check()

    def records(self) -> list[Record]:
        return list(self.store.engine.index.records.values())

    # -- asking --------------------------------------------------------------------------

    def ask(
        self, identity: Identity, prompt: Prompt, lineage: Lineage = CLEAN, *, logits: bool = False, anchored: bool = False,
        restore: bool = True,
    ) -> Expected:  # fmt: skip
        """match, offer and restore answer as the twin does; what is restored is equal bit for bit."""
        ids, images = prompt
        find = self.twin.find_anchored if anchored else self.twin.find
        expected = find(identity, ids, images, lineage, logits=logits)
        at: Any = "anchor" if anchored else "longest"
        match = self.store.match(identity, ids, attachments=images, lineage=lineage, at=at, logits=logits, detail=True)
        assert (match.matched, match.usable) == (expected.matched, expected.usable)
        self._check_groups(match, prompt)
        held = self.store.offer(identity, ids, attachments=images, lineage=lineage).held
        assert held == self.twin.held(identity, ids, images, lineage)
        if restore:
            with self.store.restore(
                identity, ids, attachments=images, lineage=lineage, at=at, logits=logits, verify=len(ids) % 4 == 0
            ) as restored:
                assert (restored.matched, restored.usable) == (expected.matched, expected.usable)
                self._check_contents(restored, prompt, logits)
        return expected

    def _check_contents(self, restored: Restored, prompt: Prompt, logits: bool) -> None:
        match, (ids, images) = restored.match, prompt
        if not restored:
            assert restored.layers == () and restored.logits is None
            return
        assert_contents(restored, self.twin.contents(match.identity, ids, restored.usable, images, match.lineage))
        parked = self.twin.logits(match.identity, ids, images, match.lineage) if restored.usable == len(ids) else None
        assert (restored.logits.tobytes() if restored.logits is not None else None) == parked

    def _check_groups(self, match: Match, prompt: Prompt) -> None:
        """Every layer with something of its own is in a group, and each group's answer is right."""
        ids, images = prompt
        needs = needs_of_model(match.identity.layers)
        rows = [group.layers for group in needs.groups]
        for number, group in enumerate(match.groups):
            what = ROW if number < len(rows) else STATE
            parts: list[Part] = [(layer, what) for layer in group.layers]
            alone = self.twin.find(match.identity, ids, images, match.lineage, parts=parts).usable
            assert group.usable == alone, f"layers {group.layers} ({what})"
        if match.groups:
            assert [group.layers for group in match.groups][: len(rows)] == rows

    # -- looking inside ------------------------------------------------------------------

    def check(self) -> None:
        assert check(self.store.engine) == []

    def _mirror(self, identity: Identity, lineage: Lineage) -> frozenset[Item]:
        """Drop from the twin what the store does not hold; what that was."""
        engine = self.store.engine
        with engine.index.changed:
            records = [r for r in engine.index.records.values() if r.namespace.identity == identity and r.lineage == lineage]
            stored = frozenset().union(*(self._contents(record)[1] | self._anchors(record) for record in records))
        kept = self.twin.items(identity, lineage)
        assert stored <= kept, f"{_told(stored - kept)} was never saved, or dropped before"
        self.twin.drop(identity, kept - stored, lineage)
        return kept - stored

    def _anchors(self, record: Record) -> frozenset[Item]:
        path = prefixes(*self._contents(record)[0])
        return frozenset((ANCHOR, int(kind), path[position]) for position, kind in record.anchors)

    def _contents(self, record: Record) -> tuple[Prompt, frozenset[Item]]:
        """The whole prefix of a record and what it holds, by its own head and its parents'."""
        if record.id not in self._read:
            header = self._header(record)
            ids, images = self._contents(record.parent)[0] if record.parent is not None else ((), ())
            ids, images = ids[: record.start], tuple(item for item in images if item.start < record.start)
            if isinstance(header, container.SegmentHeader):
                ids, images = (*ids, *header.tokens.tolist()), (*images, *header.attachments)
            else:
                assert images == header.attachments
            self._read[record.id] = (ids, images), frozenset(_held(header, record.namespace.identity, (ids, images)))
        return self._read[record.id]

    def _header(self, record: Record) -> container.Header:
        engine = self.store.engine
        fd = os.dup(record.fd) if record.warm else -1
        if fd < 0:
            assert engine.cold is not None
            fd = engine.cold.load(record.id, record.total_bytes)
        view = memoryview(map_private(fd, record.total_bytes))
        os.close(fd)
        return container.decode_head(view, record.total_bytes).header


def _held(header: container.Header, identity: Identity, prompt: Prompt) -> Iterable[Item]:
    path = prefixes(*prompt)
    planes = {(plane.layer, plane.role): plane for plane in header.planes}
    if isinstance(header, container.SegmentHeader):
        yield from ((TOKEN, -1, path[at + 1]) for at in range(header.start, header.end))
        for index, layer in enumerate(identity.layers):
            ranges = [planes.get((index, spec.role)) for spec in layer.row_planes]
            for at in range(header.start, header.end):
                if ranges and all(plane and plane.first_row <= at < plane.first_row + plane.rows for plane in ranges):
                    yield ROW, index, path[at + 1]
        return
    for index, layer in enumerate(identity.layers):
        roles = [spec.role for spec in layer.state_planes if spec.role != PlaneRole.IMPORTANCE]
        if roles and all((index, role) in planes for role in roles):
            yield STATE, index, path[header.position]
    if (len(identity.layers), PlaneRole.LOGITS) in planes:
        yield LOGITS, -1, path[header.position]


def _told(items: Iterable[Item]) -> str:
    """Items in words: what, of which layer, how many tokens in."""
    return ", ".join(sorted(f"{what} of {layer} at {len(prefix)} bytes" for what, layer, prefix in items)[:8])
