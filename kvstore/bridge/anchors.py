"""Anchors of live caches: what travels with them is how far context shifts moved the rows.

Shifted rows have a lineage of their own, and everything saved under it was shifted by as much; so the
deepest anchor at or before the position restored to tells.
"""

from __future__ import annotations

from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.restored import Restored
from warmkv.schema.records import CLEAN, Anchor, AnchorKind


def anchor_of(
    cache: ModelCache, kind: AnchorKind = AnchorKind.UNSPECIFIED, *, depth: int = 0, semantic_hash: int = 0
) -> Anchor:  # fmt: skip
    """The position a cache is at, to be saved with it. Whoever saves a cache that was shifted without an
    anchor gets the rows back, and not how far they were moved."""
    return Anchor(cache.position, kind, depth, semantic_hash, cache.shift_offset)


def shift_offset_of(restored: Restored) -> int:
    """How many positions shifts took out of what was restored; 0 where no anchor at or before it says."""
    if restored.match.lineage == CLEAN:
        return 0
    told = (anchor for anchor in restored.match.anchors if anchor.position <= restored.usable)
    nearest = max(told, key=lambda anchor: anchor.position, default=None)
    return 0 if nearest is None else nearest.shift_offset
