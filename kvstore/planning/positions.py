"""From characters of a rendered prompt to positions in its ids, and to ones that will stay.

Offsets of tokens are not always what they seem: tokens added around a text stand at (0, 0), the
bytes of one character each claim all of it, and some tokenizers leave the spaces a token begins
or ends with out of its offsets. A token is therefore taken to end where the next one begins, if
that is later: a boundary is rather one token early than inside a token.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.planning.renderer import Encoded
from warmkv.schema.records import Attachment, Tokens

#: Tokens to go back from a boundary whose last token may merge with what follows it. Published
#: measurements of changed tails have a median of 8 characters.
STEP = 8
#: Tokens behind an attachment that must agree before its placeholders are believed to be found.
_AGREEING = 8
#: Most tokens of a text that stand for one attachment where the ids hold a run of placeholders.
_MARKERS = 16


class Ruler:
    """Positions of one prompt.

    ``encoded`` is its text as tokenized, ``ids`` what the model is really fed: the same, or with
    each attachment's marker grown into as many placeholders as it takes positions. Where the two
    disagree for any other reason the ruler ends.

    **Threading:** immutable."""

    def __init__(
        self, encoded: Encoded | None, ids: Tokens, attachments: Sequence[Attachment], solid: Container[int]
    ) -> None:  # fmt: skip
        self._ids, self._attachments, self._solid = ids, tuple(attachments), solid
        self._ends = np.empty(0, np.int64) if encoded is None else carried(ends(encoded), encoded.ids, ids, attachments)
        self._complete = len(self._ends) == len(ids)

    def position(self, character: int) -> int | None:
        """Tokens that end at or before ``character``; None for one behind the ruler's end. Never
        inside an attachment: all its positions end at once."""
        found = int(np.searchsorted(self._ends, character, side="right"))
        if found == len(self._ends) and not self._complete:
            return None
        return found

    def character(self, position: int) -> int:
        """The character at which the tokens before ``position`` end, as far as it is known."""
        known = min(position, len(self._ends))
        return int(self._ends[known - 1]) if known > 0 else 0

    def outside(self, position: int) -> int:
        """``position``, or the start of the attachment it lies strictly inside."""
        return next((item.start for item in self._attachments if item.start < position < item.end), position)

    def settled(self, position: int) -> int:
        """The greatest position at or before ``position`` that no later text can move: behind a
        token that never merges, or else `STEP` tokens back (0 where there are fewer)."""
        lowest = max(position - STEP, 0)
        for at in range(position, lowest, -1):
            if self._is_solid(at - 1):
                return at
        return lowest

    def closed(self, position: int, limit: int) -> int | None:
        """The position behind the first token that never merges in [position, limit)."""
        return next((at + 1 for at in range(position, limit) if self._is_solid(at)), None)

    def _is_solid(self, index: int) -> bool:
        if any(item.start <= index < item.end for item in self._attachments):
            return True
        return int(self._ids[index]) in self._solid


def ends(encoded: Encoded) -> npt.NDArray[np.int64]:
    """For each token the character it ends at, at the latest; never decreasing.

    Tokens behind the text (an end-of-sequence token some tokenizers add) end behind it."""
    first, last = encoded.offsets[:, 0], encoded.offsets[:, 1]
    length = len(encoded.text)
    real = np.flatnonzero((first != 0) | (last != 0))
    begin_of_next = np.full(len(first), length + 1, np.int64)
    if len(real):
        # For each token the first real one behind it; behind the last of those the text ends.
        following = np.searchsorted(real, np.arange(len(first)), side="right")
        starts = np.append(first[real], length)
        begin_of_next[: real[-1] + 1] = starts[following[: real[-1] + 1]]
    return np.maximum.accumulate(np.maximum(last, begin_of_next))


@dataclass(frozen=True, slots=True)
class _Run:
    """``written`` tokens of a text from ``text`` on stand for ``fed`` ids from ``at`` on."""

    text: int
    written: int
    at: int
    fed: int
    attached: bool = False


def carried(
    of_text: npt.NDArray[np.int64], written: Tokens, ids: Tokens, attachments: Sequence[Attachment]
) -> npt.NDArray[np.int64]:
    """``of_text``, an end for each token of a text, as ends of the ids that were fed for it; cut
    where ``ids`` and ``written`` part. All positions of an attachment end where its marker does."""
    out = np.zeros(len(ids), np.int64)
    known = 0
    for run in _runs(written, ids, attachments):
        known, behind = run.at + run.fed, run.text + run.written
        if run.attached:
            out[run.at : known] = of_text[behind - 1] if behind else 0
        else:
            out[run.at : known] = of_text[run.text : behind]
    return out[:known]


def shared(written: Tokens, ids: Tokens, attachments: Sequence[Attachment] = ()) -> int:
    """Leading ids that the tokens of a text agree with; attachments whole or not at all."""
    return max((run.at + run.fed for run in _runs(written, ids, attachments)), default=0)


def _runs(written: Tokens, ids: Tokens, attachments: Sequence[Attachment]) -> Iterator[_Run]:
    """Agreeing stretches from the start on: text, attachment, text, ... until the first difference."""
    text = at = 0
    for index, item in enumerate(attachments):
        count = agreeing(written[text:], ids[at : item.start])
        yield _Run(text, count, at, count)
        if at + count < item.start:
            return
        text, at = text + count, item.start
        until = attachments[index + 1].start if index + 1 < len(attachments) else len(ids)
        markers = _markers(written[text:], ids[at:until], item.length)
        if markers is None:
            return
        yield _Run(text, markers, at, item.length, attached=True)
        text, at = text + markers, item.end
    count = agreeing(written[text:], ids[at:])
    yield _Run(text, count, at, count)


def _markers(written: Tokens, ids: Tokens, length: int) -> int | None:
    """Tokens at the start of ``written`` that stand for the attachment which is the first
    ``length`` of ``ids``; None where none fit.

    The placeholders themselves, or else as few as leave the most of what follows in agreement."""
    if len(written) >= length and np.array_equal(written[:length], ids[:length]):
        return length
    behind = ids[length : length + _AGREEING]
    counts = [count for count in (1, 0, *range(2, _MARKERS + 1)) if count <= len(written)]
    agreed = {count: agreeing(written[count:], behind) for count in counts}
    best = max(counts, key=lambda count: agreed[count])
    return best if agreed[best] or not len(behind) else None


def agreeing(one: Tokens, other: Tokens) -> int:
    """Length of the common prefix of two arrays of ids."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
