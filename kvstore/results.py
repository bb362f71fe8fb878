"""The small frozen answers of the verbs. A miss is one of them, never an exception."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmkv.kvstore.needs import needs_of_model
from warmkv.schema import messages as m
from warmkv.schema.errors import RemoteProtocolError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage, RecordId, unpack_anchors, unpack_table

TIERS = {m.TIER_NONE: None, m.TIER_WARM: "warm", m.TIER_COLD: "cold"}


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where the query leaves what is stored: both ids at that position."""

    position: int
    query: int
    stored: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same need (one of the two of layers that keep rows and state), and the
    number of tokens they alone could resume from."""

    layers: tuple[int, ...]
    usable: int


@dataclass(frozen=True, slots=True)
class Match:
    """``matched`` tokens agree with stored ones; from ``usable`` of them a model can resume.

    ``tier`` is where the slowest needed part lies ("warm", "cold" or None), ``load_s`` an
    estimate of the time to hand it over, ``reason`` why there is no more. ``groups`` are filled in
    on request; ``identity_difference`` names, where nothing is stored for the model, the fields in
    which the nearest model that is stored differs."""

    identity: Identity
    matched: int = 0
    usable: int = 0
    tier: str | None = None
    anchors: tuple[Anchor, ...] = ()
    first_difference: FirstDifference | None = None
    reason: str = ""
    segments: int = 0
    total_bytes: int = 0
    load_s: float = 0.0
    epoch: int = 0
    attachments: tuple[Attachment, ...] = ()
    lineage: Lineage = CLEAN
    groups: tuple[LayerGroup, ...] = ()
    identity_difference: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.usable > 0

    @property
    def nearest_anchor(self) -> Anchor | None:
        """The deepest named position at or before where the query leaves what is stored."""
        return max((item for item in self.anchors if item.position <= self.matched), key=_position, default=None)

    def explain(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """Why there is no more, for people. ``decode`` spells a list of ids, as tokenizers do."""
        parts = [self.reason] if self.reason else []
        difference = self.first_difference
        if difference is not None and decode is not None:
            parts.append(f"asked for {decode([difference.query])!r}, stored is {decode([difference.stored])!r}")
        nearest = self.nearest_anchor
        if nearest is not None and self.reason:
            parts.append(f"nearest anchor before it at {nearest.position} ({nearest.kind.name.lower()})")
        return "; ".join(parts)

    @classmethod
    def of(cls, reply: m.Matched, identity: Identity, attachments: tuple[Attachment, ...], lineage: Lineage) -> Match:
        if reply.tier not in TIERS:
            raise RemoteProtocolError(f"tier {reply.tier} is unknown, expected one of {sorted(TIERS)}")
        difference = None
        if reply.diff_position >= 0:
            difference = FirstDifference(reply.diff_position, reply.diff_query, reply.diff_stored)
        return cls(
            identity, reply.matched, reply.usable, TIERS[reply.tier], unpack_anchors(reply.anchors), difference, reply.reason,
            reply.segments, reply.total_bytes, reply.load_us / 1e6, reply.epoch, attachments, lineage,
            groups=_groups(reply.groups, identity), identity_difference=tuple(filter(None, reply.identity_difference.split(","))),
        )  # fmt: skip


def _groups(packed: bytes, identity: Identity) -> tuple[LayerGroup, ...]:
    """Groups of a reply; a group is named by one of its layers."""
    if not packed:
        return ()
    needs = needs_of_model(identity.layers)
    sets = [*(group.layers for group in needs.groups), needs.exact, needs.trimmable, needs.constant]
    found: list[LayerGroup] = []
    for layer, usable in unpack_table(packed, m.GROUP_DTYPE, "groups").tolist():
        named = [layers for layers in sets if layers and layers[0] == layer]
        if not named:
            raise RemoteProtocolError(f"layer {layer} begins no group of the model's layers")
        taken = named[0] if not any(item.layers == named[0] for item in found) else named[-1]
        found.append(LayerGroup(taken, usable))
    return tuple(found)


def _position(anchor: Anchor) -> int:
    return anchor.position


@dataclass(frozen=True, slots=True)
class Offer:
    """``held`` tokens need not be sent; ``reserved_bytes`` are kept free for the rest for a
    short time under ``epoch``."""

    held: int
    parent: RecordId
    reservation: int
    reserved_bytes: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Saved:
    """Outcome of a save. ``stored`` is False when it was given up, with the ``reason``; then
    nothing changed. ``start`` is the first row sent, ``sent_bytes`` the container's size."""

    stored: bool
    id: RecordId | None = None
    held: int = 0
    start: int = 0
    sent_bytes: int = 0
    duplicate: bool = False
    durable: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a forget or clear dropped, counted once per record over both tiers."""

    records: int
    total_bytes: int
