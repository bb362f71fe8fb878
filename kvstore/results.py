"""The small frozen answers of the verbs. A miss is one of them, never an exception."""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.schema import messages as m
from warmkv.schema.errors import RemoteProtocolError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Anchor, Attachment, Lineage, RecordId, unpack_anchors

TIERS = {m.TIER_NONE: None, m.TIER_WARM: "warm", m.TIER_COLD: "cold"}


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where the query leaves what is stored: both ids at that position."""

    position: int
    query: int
    stored: int


@dataclass(frozen=True, slots=True)
class Match:
    """``matched`` tokens agree with stored ones; from ``usable`` of them a model can resume.

    ``tier`` is where the slowest needed part lies ("warm", "cold" or None), ``load_s`` an
    estimate of the time to hand it over, ``reason`` why there is no more."""

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

    def __bool__(self) -> bool:
        return self.usable > 0

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
        )  # fmt: skip


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
