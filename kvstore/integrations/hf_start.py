"""Where a turn starts: on the live cache, on what the store has, or on nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from warmkv.kvstore.integrations import hf_cache, hf_records
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.kvstore.verbs import Ack
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, Tokens, TokensLike

Source = Literal["live", "warm", "cold", "none"]
Records = Sequence[LayerRows | LayerState]


class PrefixStore(Protocol):
    """The verbs PromptCache needs; a client and an embedded store both have them."""

    def match(self, identity: Identity, ids: TokensLike) -> Match: ...

    def restore(self, target: Match | Identity, ids: TokensLike, *, writable: bool = ...) -> Restored: ...

    def save(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = ..., anchors: Sequence[Anchor] = ...
    ) -> Saved: ...

    def save_async(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = ..., anchors: Sequence[Anchor] = ...
    ) -> Future[Saved]: ...


@dataclass(frozen=True, slots=True)
class Live:
    """The cache of the last turn and the tokens whose state it holds."""

    identity: Identity
    tokens: Tokens
    cache: DynamicCache


@dataclass(frozen=True, slots=True)
class Start:
    """A cache that holds the first ``usable`` tokens of a prompt, of which ``matched`` are known."""

    cache: DynamicCache
    matched: int = 0
    usable: int = 0
    tier: str | None = None
    source: Source = "none"


class Starts:
    """Finds starts for one model; ``failed`` is told what the store raised, ``settle`` waits for what
    is still being saved.

    **Threading:** one caller at a time."""

    def __init__(
        self, base: torch.nn.Module, model: ModelIdentity, prefixes: PrefixStore,
        failed: Callable[[str, BaseException], None], settle: Callable[[], None],
    ) -> None:  # fmt: skip
        self._base = base
        self._model = model
        self._prefixes = prefixes
        self._failed = failed
        self._settle = settle

    def best(self, identity: Identity, tokens: Tokens, live: Live | None) -> Start:
        """The best start for ``tokens``. The live cache is given away: it is cut to the start's
        length, or may be dropped. Never raises for the store."""
        start = Start(hf_cache.new_cache(self._base))
        if live is not None and live.identity == identity:
            matched = common(live.tokens, tokens)
            usable = min(matched, len(tokens) - 1)
            # State of a window, a convolution or a recurrence cannot be taken back.
            if usable == len(live.tokens) or self._model.geometry.resumes_anywhere:
                start = Start(live.cache, matched, usable, None, "live") if usable > 0 else start
        if start.usable == 0 and not self._model.geometry.resumes_anywhere:
            self._settle()  # what the live cache cannot give back may be on its way to the store
        if start.usable < len(tokens) - 1:
            start = self._better(identity, tokens, start)
        if start.source == "live" and self._model.geometry.resumes_anywhere:
            hf_cache.shorten(start.cache, start.usable)
        return start

    def from_store(self, identity: Identity, tokens: Tokens, match: Match | None = None) -> Start:
        """What the store has; raises what it raises."""
        cache, geometry = hf_cache.new_cache(self._base), self._model.geometry
        target = identity if match is None else match
        with self._prefixes.restore(target, tokens, writable=True) as restored:
            usable = min(restored.usable, len(tokens) - 1)
            if usable <= 0 or (usable != restored.usable and not geometry.resumes_anywhere):
                return Start(cache, restored.matched)
            hf_records.from_restored(cache, geometry, restored, usable)
            source: Source = "cold" if restored.tier == "cold" else "warm"
            return Start(cache, restored.matched, usable, restored.tier, source)

    def _better(self, identity: Identity, tokens: Tokens, start: Start) -> Start:
        try:
            if start.usable == 0:
                return self.from_store(identity, tokens)
            match = self._prefixes.match(identity, tokens)
            if match.usable <= start.usable:
                return start
            found = self.from_store(identity, tokens, match)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer is computed
            self._failed("restored from", exc)
            return start
        return found if found.usable > start.usable else start


def common(ours: Tokens, theirs: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length
