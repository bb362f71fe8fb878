"""An index filled with made-up records, and the naive twin beside it.

No memory, no files: thousands of small indexes a second, so that most cases of the rule and of
the tree can be tried here. Looks inside the store, as `check` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from warmkv.kvstore.geometry import NO_ROWS, Coverage, Extent
from warmkv.kvstore.needs import Provides
from warmkv.kvstore.store.index import Cold, Found, Index, Namespace, Record
from warmkv.kvstore.testing.naive import LOGITS, ROW, STATE, TOKEN, Expected, Item, NaiveStore, Part, Planes, prefixes
from warmkv.kvstore.testing.samples import Prompt
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Lineage, NamespaceKey, RecordId

KEY = NamespaceKey(b"namespace of a t")


class IndexTwin:
    """``held`` says of each record of the index the prompt it was made from and what it holds."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.index = Index()
        self.namespace = Namespace(KEY, 0, "", identity, 0)
        self.twin = NaiveStore()
        self.held: dict[Record, tuple[Prompt, Mapping[Item, Planes]]] = {}
        self._ids = 0

    # -- filling -------------------------------------------------------------------------

    def starts(self, prompt: Prompt, lineage: Lineage) -> list[int]:
        """Where a segment that ends with this prompt may begin: at 0 or on what is stored."""
        ids, images = prompt
        path = self.index.path(KEY, lineage, packed(ids), images)
        known = min(path.walk.matched if path else 0, len(ids) - 1)
        return [at for at in range(known + 1) if not _inside(prompt, at)]

    def add_segment(
        self, prompt: Prompt, lineage: Lineage, start: int, windows: Sequence[Extent], *, whole: bool = True, warm: bool = True
    ) -> Record:
        """Rows of [start, len): all of them of layers that need all (unless not ``whole``), of the
        other groups the ranges ``windows``, cut to the segment."""
        ids, images = prompt
        path = self.index.path(KEY, lineage, packed(ids), images)
        parent = path.covering(start) if path and start else None
        groups = self.namespace.needs.groups
        ranges = iter(windows)
        extents = [((start, len(ids)) if whole else NO_ROWS) if group.whole else next(ranges) for group in groups]
        cut = [(max(start, first), min(len(ids), last)) for first, last in extents]
        extents = [extent if extent[0] < extent[1] else NO_ROWS for extent in cut]
        spelled = prefixes(ids, images)
        items: dict[Item, Planes] = {(TOKEN, -1, spelled[at + 1]): {} for at in range(start, len(ids))}
        for group, extent in zip(groups, extents, strict=True):
            items.update({(ROW, layer, spelled[at + 1]): {} for layer in group.layers for at in range(*extent)})
        record = self._record(lineage, start, len(ids), coverage=Coverage(tuple(extents)))
        return self._enter(record, parent, prompt, items, warm)

    def positions(self, segment: Record) -> list[int]:
        """Where a state that builds on this segment may lie."""
        prompt, _ = self.held[segment]
        return [at for at in range(segment.start + 1, segment.end + 1) if not _inside(prompt, at)]

    def provided(self, segment: Record, position: int) -> Provides:
        """All a state there may be good for."""
        needs, (_, images) = self.namespace.needs, self.held[segment][0]
        found = Provides.LOGITS
        found |= Provides.EXACT if needs.exact else Provides.NOTHING
        found |= Provides.TRIMMABLE if needs.trimmable else Provides.NOTHING
        ends = any(item.end == position for item in images)
        return found | (Provides.CONSTANT if needs.constant and ends else Provides.NOTHING)

    def add_state(self, segment: Record, position: int, provides: Provides, *, warm: bool = True) -> Record:
        prompt, _ = self.held[segment]
        prefix, needs = prefixes(*prompt)[position], self.namespace.needs
        items: dict[Item, Planes] = {(LOGITS, -1, prefix): {}} if provides & Provides.LOGITS else {}
        for flag, layers in (
            (Provides.EXACT, needs.exact), (Provides.TRIMMABLE, needs.trimmable), (Provides.CONSTANT, needs.constant)
        ):  # fmt: skip
            items.update({(STATE, layer, prefix): {} for layer in layers if provides & flag})
        record = self._record(segment.lineage, position, position, provides=provides)
        return self._enter(record, segment, prompt, items, warm)

    def leaves(self) -> list[Record]:
        """What may be dropped: nothing builds on it."""
        return [record for record in self.held if not record.children]

    def drop(self, record: Record) -> None:
        _, items = self.held.pop(record)
        self.index.set_warm(record, -1)
        self.index.set_cold(record, Cold.ABSENT)
        self.index.drop(record)
        kept = {item for other, (_, theirs) in self.held.items() if other.lineage == record.lineage for item in theirs}
        self.twin.drop(self.identity, set(items) - kept, record.lineage)

    def _record(self, lineage: Lineage, start: int, end: int, **kind: object) -> Record:
        self._ids += 1
        name = RecordId(self._ids.to_bytes(16, "little"))
        return Record(name, self.namespace, lineage, start, end, 64 + self._ids % 3, 64, 0, "test", **kind)  # type: ignore[arg-type]

    def _enter(self, record: Record, parent: Record | None, prompt: Prompt, items: Mapping[Item, Planes], warm: bool) -> Record:
        self.index.add(record, parent, packed(prompt[0]), prompt[1])
        self.held[record] = prompt, items
        if warm:
            self.index.set_warm(record, 0)
        else:
            self.index.set_cold(record, Cold.STORED)
        self.twin.keep(self.identity, items, record.lineage)
        return record

    # -- asking --------------------------------------------------------------------------

    def ask(self, prompt: Prompt, lineage: Lineage = CLEAN, *, logits: bool = False) -> Expected:
        """Index and twin give the same answer in all its parts, and the chosen records are enough
        to resume from. Raises AssertionError."""
        ids, images = prompt
        found = self.index.find(KEY, lineage, packed(ids), images, logits=logits, detail=True)
        expected = self.twin.find(self.identity, ids, images, lineage, logits=logits)
        assert (found.matched, found.usable) == (expected.matched, expected.usable)
        assert found.held == self.twin.held(self.identity, ids, images, lineage)
        self._check_groups(found, prompt, lineage)
        chosen = NaiveStore()
        for span in found.spans:
            chosen.keep(self.identity, self.held[span.record][1], lineage)
        if found.usable:
            chosen.keep(
                self.identity, {(TOKEN, -1, prefix): {} for prefix in prefixes(ids, images)[1 : found.usable + 1]}, lineage
            )
        enough = chosen.find(self.identity, ids, images, lineage, logits=logits)
        assert enough.usable == found.usable, f"the chosen records allow {enough.usable}, promised were {found.usable}"
        return expected

    def _check_groups(self, found: Found, prompt: Prompt, lineage: Lineage) -> None:
        """Groups of layers, each with its first layer and what it alone would allow."""
        if found.path is None:
            return
        needs, (ids, images) = self.namespace.needs, prompt
        named: list[tuple[int, Iterable[Part]]] = [(g.layers[0], [(layer, ROW) for layer in g.layers]) for g in needs.groups]
        states = (needs.exact, needs.trimmable, needs.constant if images else ())
        named += [(layers[0], [(layer, STATE) for layer in layers]) for layers in states if layers]
        usable = [(layer, self.twin.find(self.identity, ids, images, lineage, parts=parts).usable) for layer, parts in named]
        assert list(found.groups) == usable


def packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def _inside(prompt: Prompt, at: int) -> bool:
    return any(item.start < at < item.end for item in prompt[1])
