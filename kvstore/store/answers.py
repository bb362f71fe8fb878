"""What was found, as a message: sizes, estimates, and in words why there is no more."""

from __future__ import annotations

import numpy as np

from warmkv.kvstore.store.index import Found, Namespace
from warmkv.kvstore.store.path import Span
from warmkv.schema import messages as m
from warmkv.schema.identity import Identity, differing_fields
from warmkv.schema.records import MAX_TABLE_ROWS, Tokens, pack_anchors

#: Time a hand-over takes apart from copying: a round trip and the mappings.
HANDOVER_US = 200


def load_us(found: Found, bytes_per_s: float) -> int:
    """Estimated microseconds until everything of ``found`` is mapped."""
    cold = sum(span.record.total_bytes for span in found.spans if not span.record.warm)
    return HANDOVER_US + int(cold / bytes_per_s * 1e6) if found.usable else 0


def matched(tokens: Tokens, found: Found, bytes_per_s: float, epoch: int, refusal: str = "") -> m.Matched:
    """The reply to a query of ``tokens``, of which more is not offered because of ``refusal``; the
    index lock is held."""
    stored = found.path.walk.stored if found.path else None
    query = int(tokens[found.matched]) if found.matched < len(tokens) else 0
    cold = any(not span.record.warm for span in found.spans)
    return m.Matched(
        matched=found.matched,
        usable=found.usable,
        tier=m.TIER_NONE if not found.usable else m.TIER_COLD if cold else m.TIER_WARM,
        segments=len(found.spans),
        total_bytes=sum(span.record.total_bytes for span in found.spans),
        load_us=load_us(found, bytes_per_s),
        anchors=pack_anchors(found.anchors[-MAX_TABLE_ROWS:]),
        diff_position=found.matched if stored is not None else -1,
        diff_query=query if stored is not None else 0,
        diff_stored=stored or 0,
        reason=reason(len(tokens), found, query, stored, refusal),
        epoch=epoch,
        groups=np.array(found.groups, "<u8").tobytes(),
    )


def reason(length: int, found: Found, query: int, stored: int | None, refusal: str = "") -> str:
    """Why not all of the query is usable."""
    if refusal:
        return "; ".join(filter(None, (_difference(length, found, query, stored) if found.matched < length else "", refusal)))
    if found.path is None:
        return "nothing is stored for this model, lineage and owner"
    if found.usable == length:
        return ""
    if found.matched < length:
        return "; ".join(part for part in (_difference(length, found, query, stored), _short(found, found.matched)) if part)
    if found.usable == length - 1:
        return "all tokens are stored; one is left to feed, since no logits are parked at the end"
    return f"all {length} tokens agree{', ' if found.usable < length else ''}{_short(found, length)}"


def _difference(length: int, found: Found, query: int, stored: int | None) -> str:
    if stored is None:
        return f"stored tokens end at {found.matched} of {length}"
    if stored == query:
        return f"another attachment begins at {found.matched}"
    return f"differs at {found.matched}: asked for id {query}, stored is {stored}"


def _short(found: Found, most: int) -> str:
    """Why less is usable than agrees."""
    if found.usable >= most:
        return ""
    anchor = max((item.position for item in found.anchors if item.position <= found.usable), default=0)
    named = f", at an anchor of {anchor}" if anchor == found.usable and anchor else ""
    return f"rows and states to resume from end at {found.usable}{named}"


def pack_spans(spans: tuple[Span, ...]) -> bytes:
    table = np.zeros(len(spans), m.SPAN_DTYPE)
    for row, span in zip(table, spans, strict=True):
        row["id"], row["start"], row["end"] = np.frombuffer(span.record.id, np.uint8), span.start, span.end
        row["container_bytes"] = span.record.total_bytes
    return table.tobytes()


def nearest_difference(identity: Identity, readable: list[Namespace]) -> tuple[tuple[str, ...], str]:
    """Fields in which the nearest of these namespaces differs, and the same in words: of layers,
    which is the first that does."""
    best: tuple[str, ...] = ()
    said = ""
    for namespace in readable:
        fields = differing_fields(identity, namespace.identity)
        if not fields:
            return (), ""
        if not best or len(fields) < len(best):
            best = fields
            said = ", ".join(_named(name, identity, namespace.identity) for name in fields)
    return best, said


def _named(name: str, ours: Identity, theirs: Identity) -> str:
    if name != "layers":
        return name
    if len(ours.layers) != len(theirs.layers):
        return f"layers ({len(ours.layers)} asked for, {len(theirs.layers)} stored)"
    index = next(i for i, pair in enumerate(zip(ours.layers, theirs.layers, strict=True)) if pair[0] != pair[1])
    return f"layers (layer {index})"
