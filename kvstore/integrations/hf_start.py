"""Where a turn starts: on the live cache, on what the store has, or on nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations import hf_cache, hf_records
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.restored import Flight, Restored
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.kvstore.verbs import Ack
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, Tokens, TokensLike

Source = Literal["live", "warm", "cold", "none"]
Records = Sequence[LayerRows | LayerState]


class PrefixStore(Protocol):
    """The verbs PromptCache needs; a client and an embedded store both have them."""

    def match(self, identity: Identity, ids: TokensLike, *, prefill_tps: float = ...) -> Match: ...

    def restore(
        self, target: Match | Identity, ids: TokensLike, *, writable: bool = ..., prefill_tps: float = ..., wait_s: float = ...
    ) -> Restored: ...

    def save(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = ..., anchors: Sequence[Anchor] = ...,
        prefill_s: float = ...,
    ) -> Saved: ...  # fmt: skip

    def save_async(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = ..., anchors: Sequence[Anchor] = ...,
        prefill_s: float = ...,
    ) -> Future[Saved]: ...  # fmt: skip


class Pending(Protocol):
    """Saves under way, as far as a start has to do with them."""

    def settle(self) -> None: ...

    def failed(self, verb: str, exc: BaseException) -> None: ...


@dataclass(frozen=True, slots=True)
class Live:
    """The cache of the last turn and the tokens whose state it holds."""

    identity: Identity
    tokens: Tokens
    cache: DynamicCache


@dataclass(frozen=True, slots=True)
class Start:
    """A cache that holds the first ``usable`` tokens of a prompt, of which ``matched`` are known.
    ``flight`` is set where others wait for the rest; ``bypass`` where it is not worth a store."""

    cache: DynamicCache
    matched: int = 0
    usable: int = 0
    tier: str | None = None
    source: Source = "none"
    reason: str = ""
    flight: Flight | None = None
    bypass: bool = False


class Starts:
    """Finds starts for one model; ``saves`` is told what the store raised, and waited for where a
    prompt may build on what is still being saved. ``decode`` spells ids for people.

    **Threading:** one caller at a time."""

    def __init__(
        self, base: torch.nn.Module, model: ModelIdentity, prefixes: PrefixStore, saves: Pending, admission: Admission,
        decode: Callable[[Sequence[int]], str], wait_s: float,
    ) -> None:  # fmt: skip
        self._base = base
        self._model = model
        self._prefixes = prefixes
        self._saves = saves
        self._admission = admission
        self._decode = decode
        self._wait_s = wait_s

    def best(self, identity: Identity, tokens: Tokens, live: Live | None) -> Start:
        """The best start for ``tokens``. The live cache is given away: it is cut to the start's
        length, or may be dropped. Never raises for the store."""
        start = Start(hf_cache.new_cache(self._base), bypass=self._admission.bypasses(len(tokens)))
        if live is not None and live.identity == identity:
            matched = common(live.tokens, tokens)
            usable = min(matched, len(tokens) - 1)
            # State of a window, a convolution or a recurrence cannot be taken back.
            if usable > 0 and (usable == len(live.tokens) or self._model.geometry.resumes_anywhere):
                start = replace(start, cache=live.cache, matched=matched, usable=usable, source="live")
        missing = len(tokens) - start.usable
        if start.usable == 0 and not self._model.geometry.resumes_anywhere:
            self._saves.settle()  # what the live cache cannot give back may be on its way to the store
        if missing > 1 and not self._admission.bypasses(missing):
            start = self._better(identity, tokens, start)
        if start.source == "live" and self._model.geometry.resumes_anywhere:
            hf_cache.shorten(start.cache, start.usable)
        return start

    def from_store(
        self, identity: Identity, tokens: Tokens, match: Match | None = None, *, prefill_tps: float = 0.0, wait_s: float = 0.0
    ) -> Start:
        """What the store has; raises what it raises."""
        cache, geometry = hf_cache.new_cache(self._base), self._model.geometry
        target = identity if match is None else match
        with self._prefixes.restore(target, tokens, writable=True, prefill_tps=prefill_tps, wait_s=wait_s) as restored:
            reason, flight = self._explained(restored.match), restored.flight
            usable = min(restored.usable, len(tokens) - 1)
            if usable <= 0 or (usable != restored.usable and not geometry.resumes_anywhere):
                return Start(cache, restored.matched, reason=reason, flight=flight)
            try:
                hf_records.from_restored(cache, geometry, restored, usable)
            except BaseException:
                if flight is not None:
                    flight.close()
                raise
            source: Source = "cold" if restored.tier == "cold" else "warm"
            return Start(cache, restored.matched, usable, restored.tier, source, reason, flight)

    def _better(self, identity: Identity, tokens: Tokens, start: Start) -> Start:
        speed = self._admission.prefill_tps
        try:
            if start.usable == 0:
                began = time.perf_counter()
                found = self.from_store(identity, tokens, prefill_tps=speed, wait_s=self._patience(len(tokens)))
                if found.flight is not None and found.usable == 0:  # nobody to wait for, nothing to load
                    self._admission.note_round_trip(time.perf_counter() - began)
                return found
            match = self._prefixes.match(identity, tokens, prefill_tps=speed)
            if match.usable <= start.usable:
                return replace(start, reason=self._explained(match))
            found = self.from_store(identity, tokens, match)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer is computed
            self._saves.failed("restored from", exc)
            return start
        return found if found.usable > start.usable else start

    def _explained(self, match: Match) -> str:
        """Why there is no more; without words where the tokenizer has none for a stored id."""
        try:
            return match.explain(self._decode)
        except Exception:  # noqa: BLE001 - a foreign program; a sentence for people is no reason to lose a hit
            return match.explain()

    def _patience(self, missing: int) -> float:
        """Seconds to wait for somebody who computes the same: to wait for longer than it would
        take to compute could at most double that."""
        speed = self._admission.prefill_tps
        return min(self._wait_s, 2 * missing / speed) if speed else self._wait_s


def common(ours: Tokens, theirs: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length
