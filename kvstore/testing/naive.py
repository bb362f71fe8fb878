"""The naive twin to compare a store with: dicts from whole prefixes, no tree, no limits.

Every row is kept under the tokens and attachments up to it, every state and all logits under
those before them. A query tries one position after another and reads DESIGN's table of needs
aloud at each. Nothing here is shared with the rule or the index it is to prove.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneRole
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage

TOKEN, ROW, STATE, LOGITS, ANCHOR = "token", "row", "state", "logits", "anchor"
#: What is kept: a token, a row of a layer, its state, parked logits (layer -1 for what belongs to
#: none) or an anchor (its kind in the layer's place), and the prefix it is the last of, or comes
#: after, as `prefixes` spells it.
Item = tuple[str, int, bytes]
Planes = dict[PlaneRole, bytes]
#: What is kept of one model and lineage: first by what and layer, then by prefix.
Kept = defaultdict[tuple[str, int], dict[bytes, Planes]]
#: A kind of need of one layer: `ROW` or `STATE`.
Part = tuple[int, str]
_EXACT = (LayerKind.RING, LayerKind.CONV, LayerKind.RECURRENT, LayerKind.NYSTROM, LayerKind.HYBRID, LayerKind.SPARSE)


@dataclass(frozen=True)
class Expected:
    """What a store that keeps what the twin keeps answers."""

    matched: int
    usable: int


@dataclass(frozen=True)
class ExpectedLayer:
    """What comes back of one layer: the positions whose rows, and their bytes one after the other;
    the states any of which is right (none: there is none); encoder output by attachment's start."""

    layer: int
    positions: tuple[int, ...]
    rows: Planes
    states: tuple[Planes, ...]
    constants: dict[int, Planes]


class NaiveStore:
    """See the module docstring. The arrays handed in are copied."""

    def __init__(self) -> None:
        self._kept: dict[tuple[bytes, Lineage], Kept] = {}

    # -- keeping and dropping ------------------------------------------------------------

    def save(
        self, identity: Identity, ids: Sequence[int], records: Iterable[LayerRows | LayerState],
        attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN, logits: npt.NDArray[np.float32] | None = None,
        anchors: Iterable[Anchor] = (),
    ) -> None:  # fmt: skip
        """Keep all that is handed in, and the ids."""
        path = prefixes(ids, attachments)
        items: dict[Item, Planes] = {(TOKEN, -1, prefix): {} for prefix in path[1:]}
        for record in records:
            if isinstance(record, LayerState):
                items[STATE, record.layer, path[record.position]] = {p.role: p.rows.tobytes() for p in record.planes}
                continue
            for at in range(max(len(plane.rows) for plane in record.planes)):
                row = {plane.role: plane.rows[at].tobytes() for plane in record.planes}
                items[ROW, record.layer, path[record.first + at + 1]] = row
        if logits is not None:
            items[LOGITS, -1, path[-1]] = {PlaneRole.LOGITS: logits.tobytes()}
        items.update({(ANCHOR, int(anchor.kind), path[anchor.position]): {} for anchor in anchors})
        self.keep(identity, items, lineage)

    def keep(self, identity: Identity, items: Mapping[Item, Planes], lineage: Lineage = CLEAN) -> None:
        """Keep these as well."""
        kept = self._of(identity, lineage)
        for (what, layer, prefix), planes in items.items():
            kept[what, layer][prefix] = planes

    def items(self, identity: Identity, lineage: Lineage = CLEAN) -> frozenset[Item]:
        """Everything kept of one model and lineage."""
        kept = self._of(identity, lineage)
        return frozenset((what, layer, prefix) for (what, layer), found in kept.items() for prefix in found)

    def drop(self, identity: Identity, items: Iterable[Item], lineage: Lineage = CLEAN) -> None:
        """Keep these no longer, as when a store evicts a record."""
        kept = self._of(identity, lineage)
        for what, layer, prefix in items:
            del kept[what, layer][prefix]

    def forget_everything(self) -> None:
        self._kept.clear()

    def _of(self, identity: Identity, lineage: Lineage) -> Kept:
        return self._kept.setdefault((identity.canonical(), lineage), defaultdict(dict))

    # -- asking --------------------------------------------------------------------------

    def find(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN, *,
        logits: bool = False, parts: Iterable[Part] | None = None, most: int | None = None,
    ) -> Expected:  # fmt: skip
        """How many of ``ids`` agree with something kept, and the greatest position at which every
        need of the model (or ``parts`` of it alone) is met, ``most`` or before it. With ``logits``
        that may be the very end, where logits are parked."""
        kept = self._of(identity, lineage)
        path = prefixes(ids, attachments)
        matched = max((at for at, prefix in enumerate(path) if prefix in kept[TOKEN, -1]), default=0)
        asked = parts_of(identity) if parts is None else tuple(parts)
        for p in range(matched if most is None else min(matched, most), 0, -1):
            if p == len(ids) and not (logits and path[p] in kept[LOGITS, -1]):
                continue
            if any(item.start < p < item.end for item in attachments):
                continue
            if all(_met(kept, part, identity.layers[part[0]], p, path, attachments) for part in asked):
                return Expected(matched, p)
        return Expected(matched, 0)

    def find_anchored(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN, *,
        logits: bool = False,
    ) -> Expected:  # fmt: skip
        """As `find`, at the deepest anchor from which one can resume; without one, the longest."""
        kept, path = self._of(identity, lineage), prefixes(ids, attachments)
        longest = self.find(identity, ids, attachments, lineage, logits=logits)
        named = {prefix for (what, _), found in kept.items() if what == ANCHOR for prefix in found}
        for p in range(longest.usable, 0, -1):
            if path[p] in named and self.find(identity, ids, attachments, lineage, logits=logits, most=p).usable == p:
                return Expected(longest.matched, p)
        return longest

    def held(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
    ) -> int:
        """How many of ``ids`` have every row that layers need all rows of, not inside an attachment."""
        kept = self._of(identity, lineage)
        path = prefixes(ids, attachments)
        whole = [index for index, layer in enumerate(identity.layers) if _needs_all_rows(layer)]
        for p in range(self.find(identity, ids, attachments, lineage).matched, 0, -1):
            rows = (path[i + 1] in kept[ROW, index] for index in whole for i in range(p))
            if all(rows) and not any(item.start < p < item.end for item in attachments):
                return p
        return 0

    def contents(
        self, identity: Identity, ids: Sequence[int], p: int, attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Iterator[ExpectedLayer]:
        """What has to come back of each layer with something of its own, resumed at ``p``."""
        kept = self._of(identity, lineage)
        path = prefixes(ids, attachments)
        for index, layer in enumerate(identity.layers):
            if layer.kind != LayerKind.SHARED:
                at = tuple(sorted(_rows_needed(layer, p)))
                rows = [kept[ROW, index][path[i + 1]] for i in at]
                roles = [plane.role for plane in layer.row_planes]
                joined = {role: b"".join(row[role] for row in rows) for role in roles}
                constants = {
                    item.start: kept[STATE, index][path[item.end]]
                    for item in attachments
                    if layer.kind == LayerKind.ENCODER and item.start < p
                }
                yield ExpectedLayer(index, at, joined, tuple(_states(kept, index, layer, path[p])), constants)

    def needed(self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = ()) -> frozenset[Item]:
        """The rows that must be kept for a resume at the end of ``ids``."""
        path = prefixes(ids, attachments)
        layers = enumerate(identity.layers)
        return frozenset((ROW, index, path[i + 1]) for index, layer in layers for i in _rows_needed(layer, len(ids)))

    def logits(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
    ) -> bytes | None:
        """Those parked after the last of ``ids``."""
        kept = self._of(identity, lineage)
        planes = kept[LOGITS, -1].get(prefixes(ids, attachments)[-1])
        return planes[PlaneRole.LOGITS] if planes else None


def prefixes(ids: Sequence[int], attachments: Sequence[Attachment]) -> list[bytes]:
    """The spellings of the first 0, 1, 2... tokens, with the attachments that begin among them."""
    begins = {item.start: item for item in attachments}
    found = [b""]
    for at, token in enumerate(ids):
        here = begins.get(at)
        image = b"\0" if here is None else b"\1" + here.length.to_bytes(8, "little") + here.digest
        found.append(found[-1] + int(token).to_bytes(4, "little") + image)
    return found


def parts_of(identity: Identity) -> tuple[Part, ...]:
    """Everything a model may need."""
    return tuple((index, what) for index in range(len(identity.layers)) for what in (ROW, STATE))


def _needs_all_rows(layer: LayerSpec) -> bool:
    return layer.kind == LayerKind.FULL or (layer.kind == LayerKind.HYBRID and not layer.window)


def _rows_needed(layer: LayerSpec, p: int) -> set[int]:
    """The table: which rows must be there to resume at p."""
    if _needs_all_rows(layer):
        return set(range(p))
    if layer.kind in (LayerKind.SLIDING, LayerKind.HYBRID):
        return set(range(max(0, p - (layer.window - 1)), p))
    if layer.kind == LayerKind.CHUNKED:
        return set(range(p // layer.chunk * layer.chunk, p))
    if layer.kind == LayerKind.SINK_WINDOW:
        return set(range(min(layer.sinks, p))) | set(range(max(0, p - (layer.window - 1)), p))
    return set()


def _met(
    kept: Kept, part: Part, layer: LayerSpec, p: int, path: Sequence[bytes], attachments: Sequence[Attachment]
) -> bool:  # fmt: skip
    index, what = part
    if what == ROW:
        return all(path[i + 1] in kept[ROW, index] for i in _rows_needed(layer, p))
    if layer.kind in _EXACT:
        return path[p] in kept[STATE, index]
    if layer.kind == LayerKind.OPAQUE:
        return bool(_states(kept, index, layer, path[p]))
    if layer.kind == LayerKind.ENCODER:
        return all(path[item.end] in kept[STATE, index] for item in attachments if item.start < p)
    return True


def _states(kept: Kept, index: int, layer: LayerSpec, prefix: bytes) -> list[Planes]:
    """The states that serve a resume after ``prefix``."""
    if layer.kind in _EXACT:
        return [kept[STATE, index][prefix]]
    if layer.kind == LayerKind.OPAQUE:
        return [planes for longer, planes in kept[STATE, index].items() if longer.startswith(prefix)]
    return []


def common_prefix(
    ids: Sequence[int], attachments: Sequence[Attachment], tokens: Sequence[int], theirs: Sequence[Attachment]
) -> int:
    """Tokens two prefixes share: equal ids, and equal attachments wherever one begins."""
    a, b = ({item.start: item for item in side} for side in (attachments, theirs))
    for at, (ours, other) in enumerate(zip(ids, tokens, strict=False)):
        if ours != other or a.get(at) != b.get(at):
            return at
    return min(len(ids), len(tokens))
