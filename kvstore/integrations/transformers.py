"""PromptCache: a transformers model whose prompts' state outlives the process.

    cache = PromptCache(model, tokenizer, warmkv.connect())
    answer = cache.generate(messages, max_new_tokens=200, streamer=TextStreamer(tokenizer))

A turn continues from the live cache where that holds the prefix, from the store where the store
holds more, and computes the rest. What can go wrong in the store costs time, never the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from warmkv.kvstore.integrations import hf_cache, hf_request
from warmkv.kvstore.integrations.hf_adapters import base_model
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.integrations.hf_request import Messages
from warmkv.kvstore.integrations.hf_tensors import Weights
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.verbs import Ack
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Tokens, TokensLike

__all__ = ["Generated", "PrefixStore", "PromptCache", "Source"]

Source = Literal["live", "warm", "cold", "none"]
log = logging.getLogger("warmkv.transformers")


class PrefixStore(Protocol):
    """The verbs PromptCache needs; a client and an embedded store both have them."""

    def match(self, identity: Identity, ids: TokensLike) -> Match: ...

    def restore(self, target: Match | Identity, ids: TokensLike, *, writable: bool = ...) -> Restored: ...

    def save(self, identity: Identity, ids: TokensLike, records: Sequence[LayerRows], *, ack: Ack = ...) -> Saved: ...

    def save_async(
        self, identity: Identity, ids: TokensLike, records: Sequence[LayerRows], *, ack: Ack = ...
    ) -> Future[Saved]: ...


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer and where its prompt's state came from.

    ``ids`` are prompt and answer, ``new_ids`` the answer, ``text`` its decoding without special
    tokens. Of ``prompt_tokens``, ``matched`` agreed with the source, ``usable`` were resumed from
    and ``suffix_tokens`` were computed. ``source`` is "none" for a cold run, ``tier`` the store's
    tier where the store was the source; ``restore_s`` is the time from the first question to the
    store until the cache was ready. ``saved`` resolves once the new state is stored or given up."""

    ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    suffix_tokens: int
    matched: int
    usable: int
    tier: str | None
    restore_s: float
    source: Source
    saved: Future[Saved]


@dataclass(frozen=True, slots=True)
class _Live:
    """The cache of the last turn and the tokens whose rows it holds."""

    identity: Identity
    tokens: Tokens
    cache: DynamicCache


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a turn starts: a cache that holds ``usable`` tokens."""

    cache: DynamicCache
    matched: int = 0
    usable: int = 0
    tier: str | None = None
    source: Source = "none"


class PromptCache:
    """A causal language model whose prefix state lives in a store between turns and processes.

    ``model`` is a transformers model (or a LoRA wrapper around one) in eval mode; ``ack`` and
    ``background`` say how `generate` saves: by default it hands the rows to `save_async` and
    returns. ``weights`` says how changes of the model are noticed, see `hf_tensors.TensorDigests`:
    "auto" reads all bytes at every call up to 2 GiB of host memory, beyond that it trusts
    torch's version counters and a sample. ``salt`` separates tenants that share a store.

    Raises UnsupportedError, here and at each call, for models and states of models that are not
    served: layers other than full attention, rotary embeddings that depend on length, hooks,
    training with dropout, autocast.

    **Threading:** every method may be called from any thread; calls wait for each other."""

    def __init__(
        self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, client_or_store: PrefixStore, *, ack: Ack = "memory",
        background: bool = True, weights: Weights = "auto", salt: str | bytes | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._base = base_model(model)
        self._tokenizer = tokenizer
        self._prefixes = client_or_store
        self._ack: Ack = ack
        self._background = background
        self._identity = ModelIdentity(model, tokenizer, weights=weights, salt=salt)
        self._live: _Live | None = None
        self._lock = threading.RLock()
        self._warned = False
        self._identity.now()

    def identity(self) -> Identity:
        """Identity of the model as it is now."""
        with self._lock:
            return self._identity.now()

    def render(
        self, messages: Messages, *, tools: Sequence[object] | None = None, template: Mapping[str, object] | None = None
    ) -> Tokens:
        """Token ids of a conversation as `generate` would feed them."""
        return hf_request.render(self._tokenizer, messages, tools, template or {})

    def generate(
        self, messages_or_ids: Messages | TokensLike | torch.Tensor, *, tools: Sequence[object] | None = None,
        template: Mapping[str, object] | None = None, ack: Ack | None = None, **options: object,
    ) -> Generated:  # fmt: skip
        """Answer a conversation (rendered with the chat template, ``tools`` and ``template``
        passed on) or continue token ids, and save the new state.

        ``options`` go to the model's generate: max_new_tokens, do_sample, eos_token_id, streamer,
        logits_processor, stopping_criteria and the like. Raises UnsupportedError for those that
        are refused, and whatever the model raises. A failing store is one logged warning and a
        cold run."""
        if hf_request.is_messages(messages_or_ids):
            tokens = self.render(cast(Messages, messages_or_ids), tools=tools, template=template)
        else:
            tokens = hf_request.token_ids(cast(TokensLike, messages_or_ids))
            hf_request.require_unpadded(tokens, self._tokenizer)
        defaults: GenerationConfig | None = getattr(self._base, "generation_config", None)
        passed = hf_request.check_options(options, defaults, len(tokens))
        with self._lock:
            identity = self._identity.now()
            began = time.perf_counter()
            start = self._start(identity, tokens)
            restore_s = time.perf_counter() - began
            sequence = self._run(tokens, start.cache, passed)
            saved = self._keep(identity, sequence, start.cache, ack or self._ack)
        new = sequence[len(tokens) :].tolist()
        text = cast(str, self._tokenizer.decode(new, skip_special_tokens=True))
        return Generated(
            ids=tuple(sequence.tolist()), new_ids=tuple(new), text=text, prompt_tokens=len(tokens),
            suffix_tokens=len(tokens) - start.usable, matched=start.matched, usable=start.usable, tier=start.tier,
            restore_s=restore_s, source=start.source, saved=saved,
        )  # fmt: skip

    def load(self, ids: TokensLike | torch.Tensor) -> DynamicCache:
        """A cache with the longest usable prefix of ``ids``, shorter than ``ids`` by at least one
        token; empty on a miss. It is the caller's: nothing else refers to it.

        Raises what the store raises; a client that cannot reach its daemon gives a miss."""
        tokens = hf_request.token_ids(ids)
        with self._lock:
            identity = self._identity.now()
            return self._from_store(identity, tokens, None).cache

    def store(self, ids: TokensLike | torch.Tensor, cache: DynamicCache, *, ack: Ack | None = None) -> Saved:
        """Save the state ``cache`` holds of ``ids``, computed by this model from exactly those.

        Counts the cache's own rows: all of ``ids``, or all but the last, which was sampled and
        never fed. Raises RecordError for any other length, and what the store raises. The cache is
        read until the call returns."""
        tokens = hf_request.token_ids(ids)
        with self._lock:
            identity = self._identity.now()
            length = _covered(len(tokens), cache)
            return self._prefixes.save(identity, tokens[:length], hf_cache.to_rows(cache), ack=ack or self._ack)

    def release(self) -> None:
        """Let go of the live cache; the next turn starts from the store."""
        with self._lock:
            self._live = None

    # -- one turn ------------------------------------------------------------------------

    def _start(self, identity: Identity, tokens: Tokens) -> _Start:
        """The best start for ``tokens``. The live cache is given away: a turn that fails must
        not leave a half-grown one behind."""
        live, self._live = self._live, None
        start = _Start(hf_cache.new_cache(self._base))
        if live is not None and live.identity == identity:
            matched = _common(live.tokens, tokens)
            usable = min(matched, len(tokens) - 1)
            if usable > 0:
                start = _Start(live.cache, matched, usable, None, "live")
        if start.usable < len(tokens) - 1:
            start = self._better(identity, tokens, start)
        if start.source == "live":
            hf_cache.shorten(start.cache, start.usable)
        return start

    def _better(self, identity: Identity, tokens: Tokens, start: _Start) -> _Start:
        """What the store has where that is more than ``start``; never raises for the store."""
        try:
            if start.usable == 0:
                found = self._from_store(identity, tokens, None)
            else:
                match = self._prefixes.match(identity, tokens)
                if match.usable <= start.usable:
                    return start
                found = self._from_store(identity, tokens, match)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer is computed
            self._failed("restored from", exc)
            return start
        return found if found.usable > start.usable or start.usable == 0 else start

    def _from_store(self, identity: Identity, tokens: Tokens, match: Match | None) -> _Start:
        cache = hf_cache.new_cache(self._base)
        target = identity if match is None else match
        with self._prefixes.restore(target, tokens, writable=True) as restored:
            usable = min(restored.usable, len(tokens) - 1)
            if usable <= 0:
                return _Start(cache, restored.matched)
            hf_cache.from_restored(cache, restored, usable, self._identity.device)
            source: Source = "cold" if restored.tier == "cold" else "warm"
            return _Start(cache, restored.matched, usable, restored.tier, source)

    def _run(self, tokens: Tokens, cache: DynamicCache, options: hf_request.Options) -> Tokens:
        """The whole sequence after generation; ``cache`` grows with it."""
        ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0).to(self._identity.device)
        generate = cast(Callable[..., object], getattr(self._model, "generate"))  # noqa: B009 - not every Module has it
        carried = {hf_cache.GENERATE_ARGUMENT: cache}
        output = generate(input_ids=ids, attention_mask=torch.ones_like(ids), **carried, **options)
        sequence = cast(torch.Tensor, getattr(output, "sequences", output))
        tokens_after: Tokens = sequence[0].cpu().numpy().astype(np.uint32)
        return tokens_after

    def _keep(self, identity: Identity, sequence: Tokens, cache: DynamicCache, ack: Ack) -> Future[Saved]:
        """Keep ``cache`` for the next turn and save it; never raises for the store."""
        try:
            length = _covered(len(sequence), cache)
            # The rows were computed while others could write to the model: look again, cheaply.
            if self._identity.now(trust_version=True) != identity:
                raise RecordError("the model changed while it generated; the new state fits neither of the two")
            self._live = _Live(identity, sequence[:length], cache)
            verb = self._prefixes.save_async if self._background else self._prefixes.save
            outcome = verb(identity, sequence[:length], hf_cache.to_rows(cache), ack=ack)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer stands
            self._failed("saved to", exc)
            outcome = Saved(False, reason=str(exc))
        if isinstance(outcome, Saved):
            done: Future[Saved] = Future()
            done.set_result(outcome)
            return done
        outcome.add_done_callback(self._saved)
        return outcome

    def _saved(self, done: Future[Saved]) -> None:
        if not done.cancelled() and (exc := done.exception()) is not None:
            self._failed("saved to", exc)

    def _failed(self, verb: str, exc: BaseException) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        known = isinstance(exc, WarmKVError)
        log.log(level, "state was not %s the store: %s: %s", verb, type(exc).__name__, exc, exc_info=None if known else exc)


def _covered(length: int, cache: DynamicCache) -> int:
    """Tokens of a sequence of ``length`` that ``cache`` has rows of."""
    held = hf_cache.cache_length(cache)
    if held not in (length, length - 1) or held == 0:
        raise RecordError(
            f"the cache holds rows of {held} tokens, {length} ids were given; expected {length} or {length - 1} rows"
        )
    return held


def _common(ours: Tokens, theirs: Tokens) -> int:
    """Length of the common prefix of two sequences."""
    length = min(len(ours), len(theirs))
    different = np.flatnonzero(ours[:length] != theirs[:length])
    return int(different[0]) if len(different) else length
