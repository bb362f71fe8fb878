"""The naive twin to compare a store with: a dict, no tree, no limits, no eviction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmkv.kvstore.rows import LayerRows
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Attachment, Lineage


@dataclass(frozen=True)
class Expected:
    """What a store without any limits would answer."""

    matched: int
    usable: int
    records: tuple[LayerRows, ...]


class NaiveStore:
    """Every saved prefix whole, in a dict from tokens and attachments to rows."""

    def __init__(self) -> None:
        self._entries: dict[tuple[bytes, Lineage], dict[tuple[tuple[int, ...], tuple[Attachment, ...]], Sequence[LayerRows]]] = {}

    def save(
        self, identity: Identity, ids: Sequence[int], records: Sequence[LayerRows],
        attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN,
    ) -> None:  # fmt: skip
        entries = self._entries.setdefault((identity.canonical(), lineage), {})
        entries[tuple(ids), tuple(sorted(attachments, key=lambda item: item.start))] = records

    def find(
        self, identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
    ) -> Expected:
        """Longest prefix of ``ids`` shared with any entry, and its rows."""
        best, records = 0, ()  # type: tuple[int, Sequence[LayerRows]]
        for (tokens, theirs), rows in self._entries.get((identity.canonical(), lineage), {}).items():
            common = common_prefix(ids, attachments, tokens, theirs)
            if common > best:
                best, records = common, rows
        usable = min(best, len(ids) - 1)
        usable = next((item.start for item in attachments if item.start < usable < item.end), usable)
        return Expected(best, usable, tuple(records))

    def forget_everything(self) -> None:
        self._entries.clear()


def common_prefix(
    ids: Sequence[int], attachments: Sequence[Attachment], tokens: Sequence[int], theirs: Sequence[Attachment]
) -> int:
    """Tokens two prefixes share: equal ids, and equal attachments wherever one begins."""
    a, b = ({item.start: item for item in side} for side in (attachments, theirs))
    for at, (ours, other) in enumerate(zip(ids, tokens, strict=False)):
        if ours != other or a.get(at) != b.get(at):
            return at
    return min(len(ids), len(tokens))
