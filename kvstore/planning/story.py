"""What lies before a boundary: how many messages, and a digest of what they say."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence

from warmkv.kvstore.planning.renderer import Messages, Tools
from warmkv.kvstore.planning.spans import Span


class Story:
    """Depths and hashes of the anchors of one conversation.

    A hash is made of the name of a boundary, the tools and the messages before it, mappings in
    sorted order: the same point of the same conversation has the same hash, whatever the tokens and
    whatever the order of JSON keys, in every process. **Threading:** immutable."""

    def __init__(self, messages: Messages, tools: Tools | None, found: Sequence[Span]) -> None:
        passed = sorted((item.start if item.end is None else item.end, item.message + 1) for item in found)
        self._ends = [end for end, _ in passed]
        self._depths: list[int] = []
        for _, depth in passed:
            self._depths.append(max(depth, self._depths[-1]) if self._depths else depth)
        running = hashlib.blake2b(_canonical(tools), digest_size=16)
        self._digests = [running.digest()]
        for message in messages:
            running.update(_canonical(message))
            self._digests.append(running.copy().digest())

    def depth(self, character: int) -> int:
        """Messages before ``character``, counted by the last string that ends there or earlier."""
        at = bisect_right(self._ends, character)
        return self._depths[at - 1] if at else 0

    def hash(self, name: str, depth: int) -> int:
        """64 bits that say which boundary this is."""
        digest = hashlib.blake2b(self._digests[depth] + name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _canonical(value: object) -> bytes:
    """Bytes that do not depend on the order of keys or on where in memory an object lies."""
    try:
        text = json.dumps(value, sort_keys=True, default=_named)
    except (TypeError, ValueError):  # keys that cannot be sorted, or a value within itself
        text = _named(value)
    return text.encode() + b"\0"


def _named(value: object) -> str:
    """What stands for an object JSON has no form for: an image, a function."""
    return f"<{getattr(value, '__qualname__', type(value).__qualname__)}>"
