"""The plan of one prompt: which positions are worth a state, and which of them first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from warmkv.kvstore.planning import history, probes
from warmkv.kvstore.planning.positions import STEP, Ruler
from warmkv.kvstore.planning.ranks import Boundary, Rank
from warmkv.kvstore.planning.renderer import Encoded, Messages, Renderer, attempt_encode
from warmkv.kvstore.planning.spans import spans
from warmkv.kvstore.planning.story import Story
from warmkv.schema.errors import RecordError
from warmkv.schema.records import Anchor, AnchorKind, Attachment, TokensLike, as_tokens, check_attachments


@dataclass(frozen=True, slots=True)
class Planned:
    """An anchor of a plan; ``priority`` 0 is kept first.

    ``settled`` is false where the token before it may merge with what a later prompt puts behind
    it; then a settled one lies at most `STEP` tokens before. A state at any position from
    ``enough`` on, up to the anchor's, costs a resumed prompt at most `STEP` tokens more."""

    anchor: Anchor
    name: str
    rank: Rank
    priority: int
    settled: bool
    enough: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Anchors of a prompt of ``length`` tokens behind the ``beyond`` that are held; ``items``
    sorted by position, one for each. **Threading:** immutable."""

    length: int
    beyond: int
    items: tuple[Planned, ...]

    @property
    def anchors(self) -> tuple[Anchor, ...]:
        """All anchors, by position: where rows can be cut anywhere, a name costs nothing."""
        return tuple(item.anchor for item in self.items)

    def best(self, limit: int) -> tuple[Anchor, ...]:
        """At most ``limit`` anchors to keep states at, by position; for models that cannot be
        rewound, where a state costs megabytes.

        The boundaries of highest priority are served, each at most `STEP` tokens before its own
        position, so that one state serves all boundaries that lie close; none is spent on what
        the held tokens serve. Raises RecordError for a negative ``limit``."""
        if limit < 0:
            raise RecordError(f"{limit} anchors were asked for, expected none or more")
        settled = [item.anchor.position for item in self.items if item.settled]
        ranges: list[tuple[int, int]] = []  # where a state serves all that was put into each
        for item in sorted(self.items, key=lambda item: item.priority):
            low, high = item.enough, item.anchor.position
            if low <= self.beyond:
                continue
            narrowed = ((at, max(low, one[0]), min(high, one[1])) for at, one in enumerate(ranges))
            fitting = next((one for one in narrowed if _within(settled, one[1], one[2]) is not None), None)
            if fitting is not None:
                ranges[fitting[0]] = fitting[1:]
            elif len(ranges) < limit:
                ranges.append((low, high))
        kept = {_within(settled, low, high) for low, high in ranges}
        return tuple(anchor for anchor in self.anchors if anchor.position in kept)


def _within(ordered: Sequence[int], low: int, high: int) -> int | None:
    """The greatest of ``ordered`` numbers in [low, high]."""
    at = bisect_right(ordered, high)
    return ordered[at - 1] if at and ordered[at - 1] >= low else None


def plan(
    renderer: Renderer, messages: Messages, ids: TokensLike, *, attachments: Sequence[Attachment] = (), beyond: int = 0,
    generation: bool = True, encoded: Encoded | None = None,
) -> Plan:  # fmt: skip
    """Where ``ids``, the prompt of ``messages``, will be resumed from.

    ``beyond`` tokens are held already; nothing at or before them is planned. ``generation`` says
    whether the prompt ends with the prompt for an answer; ``encoded``, if given, is the rendering
    of exactly that, and saves one. ``ids`` may hold a run of placeholders for each of
    ``attachments`` where the text has a marker; where they differ from the text otherwise, what
    lies behind the difference is not planned, apart from attachments and length - 1.

    What a model answered is planned as well with the answer among ``messages``, its tokens among
    ``ids``, ``generation`` false and the prompt's length as ``beyond``: a thought ends, a call begins.

    Costs at most nine renderings of the conversation and one tokenization, however many messages
    it has. What a template refuses is not planned; nothing it raises comes out of here. Raises
    RecordError for ids or attachments that are none, a negative ``beyond``, and a renderer whose
    offsets do not fit its ids."""
    tokens = as_tokens(ids)
    attached = check_attachments(attachments, len(tokens))
    if beyond < 0:
        raise RecordError(f"{beyond} tokens are said to be held, expected none or more")
    if encoded is None:
        encoded = attempt_encode(renderer, messages, generation=generation)
    text = "" if encoded is None else encoded.text
    found = spans(renderer, messages, text, generation=generation) if text else []
    ruler = Ruler(encoded, tokens, attached, renderer.solid)
    marks = list(_structural(attached, ruler, len(tokens)))
    if text:
        asked = probes.boundaries(renderer, messages, text, generation=generation)
        for boundary in (*asked, *history.boundaries(messages, found, text)):
            marks += _placed(boundary, ruler)
    story = Story(messages, renderer.tools, found)
    return Plan(len(tokens), beyond, _planned(_unique(marks, beyond), story, ruler))


@dataclass(frozen=True, slots=True)
class _Mark:
    """A position that is worth a state, and why."""

    name: str
    rank: Rank
    kind: AnchorKind
    position: int
    settled: bool
    enough: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Settled ones first, then by rank, then later ones first."""
        return (not self.settled, self.rank, -self.position)


def _placed(boundary: Boundary, ruler: Ruler) -> Iterator[_Mark]:
    """Positions of a boundary: one, or a settled one and the one that a merge may move."""
    name, rank, kind = boundary.name, boundary.rank, boundary.kind
    position = ruler.position(boundary.character)
    if position is None:
        return
    closed = _closed(boundary, position, ruler)
    if closed is not None:
        yield _Mark(name, rank, kind, closed, True, closed - STEP)
        return
    settled = ruler.settled(position)
    enough = min(settled, position - STEP)
    if settled < position:
        yield _Mark(f"before {name}", rank, kind, settled, True, enough)
    yield _Mark(name, rank, kind, position, settled == position, enough)


def _closed(boundary: Boundary, position: int, ruler: Ruler) -> int | None:
    """The position behind the closing token of ``boundary``, where it has one."""
    limit = None if boundary.until is None else ruler.position(boundary.until)
    if limit is None:
        return None
    return ruler.closed(position, limit if boundary.within is None else min(limit, position + boundary.within))


def _structural(attachments: Sequence[Attachment], ruler: Ruler, length: int) -> Iterator[_Mark]:
    """What is known without the text. Nothing but an attachment's own end saves computing it."""
    for item in attachments:
        start, end = item.start, item.end
        yield _Mark("attachment start", Rank.ATTACHMENT, AnchorKind.IMAGE_TOKENS, start, True, start - STEP)
        yield _Mark("attachment end", Rank.ATTACHMENT, AnchorKind.IMAGE_TOKENS, end, True, end)
    last = ruler.outside(length - 1)
    yield _Mark("last", Rank.LAST, AnchorKind.UNSPECIFIED, last, True, last - STEP)


def _unique(marks: Iterable[_Mark], beyond: int) -> list[_Mark]:
    """The best mark of each position behind ``beyond``, best first."""
    best: dict[int, _Mark] = {}
    for mark in sorted(marks, key=lambda mark: mark.order):
        if mark.position > beyond:
            best.setdefault(mark.position, mark)
    return list(best.values())


def _planned(marks: Sequence[_Mark], story: Story, ruler: Ruler) -> tuple[Planned, ...]:
    items = []
    for priority, mark in enumerate(marks):
        depth = story.depth(ruler.character(mark.position))
        anchor = Anchor(mark.position, mark.kind, depth, story.hash(mark.name, depth))
        items.append(Planned(anchor, mark.name, mark.rank, priority, mark.settled, mark.enough))
    return tuple(sorted(items, key=lambda item: item.anchor.position))
