"""PromptCache: a transformers model whose prompts' state outlives the process.

    cache = PromptCache(model, tokenizer, warmkv.connect())
    answer = cache.generate(messages, max_new_tokens=200, streamer=TextStreamer(tokenizer))

A turn continues from the live cache where that holds the prefix, from the store where the store
holds more, and computes the rest. Models with windows, convolutions or recurrence resume only
where their state was kept: their prompts are computed in pieces, and kept at the end of each. What
can go wrong in the store costs time, never the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from warmkv.kvstore.integrations import hf_cache, hf_feed, hf_records, hf_request
from warmkv.kvstore.integrations.hf_adapters import base_model
from warmkv.kvstore.integrations.hf_anchors import AnchorPlan, last_and_branch, stops
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.integrations.hf_request import Messages
from warmkv.kvstore.integrations.hf_start import Live, PrefixStore, Source, Start, Starts
from warmkv.kvstore.integrations.hf_tensors import Weights
from warmkv.kvstore.integrations.hf_versions import continues_at_once
from warmkv.kvstore.results import Saved
from warmkv.kvstore.verbs import Ack
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Tokens, TokensLike

__all__ = ["AnchorPlan", "Generated", "PrefixStore", "PromptCache", "Source"]

#: Saves of one prompt that may be under way before its prefill waits for the oldest, and for how long:
#: a queue that is full would give up the state at an anchor.
BACKLOG, BACKLOG_S = 4, 1.0
#: How long a prompt that the live cache cannot serve waits for the saves of the turn before it.
SETTLE_S = 2.0
log = logging.getLogger("warmkv.transformers")


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


class PromptCache:
    """A causal language model whose prefix state lives in a store between turns and processes.

    ``model`` is a transformers model (or a LoRA wrapper around one) in eval mode; ``ack`` and
    ``background`` say how `generate` saves: by default it hands the state to `save_async` and goes
    on. ``anchors`` plans where models that resume nowhere else keep their state within a prompt.
    ``weights`` says how changes of the model are noticed, see `hf_tensors.TensorDigests`: "auto"
    reads all bytes at every call up to 2 GiB of host memory, beyond that it trusts torch's version
    counters and a sample. ``salt`` separates tenants that share a store.

    Raises UnsupportedError, here and at each call, for models and states of models that are not
    served: layers of kinds nobody has proven to come back right, rotary embeddings that depend on
    length, hooks, training with dropout, autocast.

    **Threading:** every method may be called from any thread; calls wait for each other."""

    def __init__(
        self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, client_or_store: PrefixStore, *, ack: Ack = "memory",
        background: bool = True, weights: Weights = "auto", salt: str | bytes | None = None,
        anchors: AnchorPlan = last_and_branch,
    ) -> None:  # fmt: skip
        self._model = model
        self._base = base_model(model)
        self._tokenizer = tokenizer
        self._prefixes = client_or_store
        self._ack: Ack = ack
        self._background = background
        self._plan = anchors
        self._identity = ModelIdentity(model, tokenizer, weights=weights, salt=salt)
        self._starts = Starts(self._base, self._identity, client_or_store, self._failed, self._settle)
        self._live: Live | None = None
        self._saving: list[Future[Saved]] = []
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
        template: Mapping[str, object] | None = None, ack: Ack | None = None,
        anchors: Iterable[int | Anchor] | None = None, **options: object,
    ) -> Generated:  # fmt: skip
        """Answer a conversation (rendered with the chat template, ``tools`` and ``template``
        passed on) or continue token ids, and save the new state.

        ``anchors`` are positions in this prompt, in place of the plan's; those that say what they
        are get saved under their name, by models of every kind. ``options`` go to the model's
        generate: max_new_tokens, do_sample, eos_token_id, streamer, logits_processor,
        stopping_criteria and the like. Raises UnsupportedError for those that are refused, and
        whatever the model raises. A failing store is one logged warning and a cold run."""
        if hf_request.is_messages(messages_or_ids):
            tokens = self.render(cast(Messages, messages_or_ids), tools=tools, template=template)
        else:
            tokens = hf_request.token_ids(cast(TokensLike, messages_or_ids))
            hf_request.require_unpadded(tokens, self._tokenizer)
        passed = hf_request.check_options(options, self._defaults, len(tokens))
        ack = ack or self._ack
        with self._lock:
            identity = self._identity.now()
            if self._identity.geometry.rowless:
                hf_feed.require_id_free(passed, self._defaults)
            began = time.perf_counter()
            live, self._live = self._live, None  # a turn that fails must not leave a half-grown cache behind
            start = self._starts.best(identity, tokens, live)
            restore_s = time.perf_counter() - began
            planned = self._plan(tokens, start.matched, start.usable) if anchors is None else anchors
            sequence, named = self._run(identity, tokens, start, tuple(planned), passed, ack)
            saved = self._save(identity, sequence, start.cache, ack, named, keep=True)
        new = sequence[len(tokens) :].tolist()
        text = cast(str, self._tokenizer.decode(new, skip_special_tokens=True))
        return Generated(
            ids=tuple(sequence.tolist()), new_ids=tuple(new), text=text, prompt_tokens=len(tokens),
            suffix_tokens=len(tokens) - start.usable, matched=start.matched, usable=start.usable, tier=start.tier,
            restore_s=restore_s, source=start.source, saved=saved,
        )  # fmt: skip

    def load(self, ids: TokensLike | torch.Tensor) -> DynamicCache:
        """A cache with the longest usable prefix of ``ids``, shorter than ``ids`` by at least one
        token; empty on a miss. It is the caller's: nothing else refers to it. A cache without rows
        counts its tokens (`get_seq_length`), but `generate` of the library does not look: pass
        it the embeddings of new tokens only.

        Raises what the store raises; a client that cannot reach its daemon gives a miss."""
        tokens = hf_request.token_ids(ids)
        with self._lock:
            return self._starts.from_store(self._identity.now(), tokens).cache

    def store(self, ids: TokensLike | torch.Tensor, cache: DynamicCache, *, ack: Ack | None = None) -> Saved:
        """Save the state ``cache`` holds of ``ids``, computed by this model from exactly those.

        Counts the cache's own tokens: all of ``ids``, or all but the last, which was sampled and
        never fed. Raises RecordError for any other length, for a cache that does not know its
        length, and what the store raises. The cache is read until the call returns."""
        tokens = hf_request.token_ids(ids)
        with self._lock:
            identity = self._identity.now()
            length = _covered(len(tokens), cache)
            records = hf_records.to_records(cache, self._identity.geometry, length)
            return self._prefixes.save(identity, tokens[:length], records, ack=ack or self._ack)

    def release(self) -> None:
        """Let go of the live cache; the next turn starts from the store."""
        with self._lock:
            self._live = None

    # -- one turn ------------------------------------------------------------------------

    @property
    def _defaults(self) -> GenerationConfig | None:
        return getattr(self._base, "generation_config", None)

    def _run(
        self, identity: Identity, tokens: Tokens, start: Start, planned: tuple[int | Anchor, ...], options: hf_request.Options,
        ack: Ack,
    ) -> tuple[Tokens, tuple[Anchor, ...]]:  # fmt: skip
        """The whole sequence after generation, with which ``start.cache`` grows, and the named
        anchors whose state is not saved yet."""
        geometry = self._identity.geometry
        ids = torch.from_numpy(tokens.astype(np.int64)).unsqueeze(0).to(geometry.device)
        anchors = stops(planned, len(tokens), start.usable)
        pieces, later = ((), anchors) if geometry.resumes_anywhere else (anchors, ())
        held = self._prefill(identity, tokens, ids, start, pieces, ack)
        arguments = hf_feed.generate_arguments(self._base, start.cache, ids, held, options, self._defaults)
        # Wrappers of adapters do not let embeddings through; the model below has the adapters in it.
        model = self._base if "inputs_embeds" in arguments else self._model
        generate = cast(Callable[..., object], getattr(model, "generate"))  # noqa: B009 - not every Module has it
        output = generate(**arguments)
        sequence = cast(torch.Tensor, getattr(output, "sequences", output))
        tokens_after: Tokens = sequence[0].cpu().numpy().astype(np.uint32)
        return tokens_after, tuple(anchor for anchor in later if anchor.kind != AnchorKind.UNSPECIFIED)

    def _prefill(
        self, identity: Identity, tokens: Tokens, ids: torch.Tensor, start: Start, anchors: tuple[Anchor, ...], ack: Ack
    ) -> int:
        """Feed the prompt up to the last of ``anchors``, saving the state at each; how many tokens
        the cache holds then. At least one token is left for `generate`: exactly one where several
        at once would be computed wrongly."""
        at, cache, last = start.usable, start.cache, len(tokens) - 1
        at_once = not self._identity.geometry.delicate or continues_at_once(self._model_type)
        targets: dict[int, Anchor | None] = {anchor.position: anchor for anchor in anchors}
        if not at_once and last > at:
            targets.setdefault(last, None)
        saves: list[Future[Saved]] = []
        for position, anchor in targets.items():
            feed = hf_feed.feed if at_once or at == 0 else hf_feed.feed_singly
            with torch.no_grad():
                feed(self._base, cache, ids[:, at:position], at)
            at = position
            if anchor is not None:
                wait(saves[-BACKLOG:][:1] if len(saves) >= BACKLOG else (), BACKLOG_S)
                named = (anchor,) if anchor.kind != AnchorKind.UNSPECIFIED else ()
                saves.append(self._save(identity, tokens[:at], cache, ack, named))
        return at

    @property
    def _model_type(self) -> str:
        return str(self._base.config.get_text_config(decoder=True).model_type)

    def _save(
        self, identity: Identity, sequence: Tokens, cache: DynamicCache, ack: Ack, named: tuple[Anchor, ...], *,
        keep: bool = False,
    ) -> Future[Saved]:  # fmt: skip
        """Save what ``cache`` holds of ``sequence``, and ``keep`` it for the next turn; never raises
        for the store."""
        try:
            length = _covered(len(sequence), cache)
            # The state was computed while others could write to the model: look again, cheaply.
            if self._identity.now(trust_version=True) != identity:
                raise RecordError("the model changed while it generated; the new state fits neither of the two")
            records = hf_records.to_records(cache, self._identity.geometry, length)
            if keep:
                self._live = Live(identity, sequence[:length], cache)
            verb = self._prefixes.save_async if self._background else self._prefixes.save
            outcome = verb(identity, sequence[:length], records, ack=ack, anchors=named)
        except Exception as exc:  # noqa: BLE001 - whatever a store does, the answer stands
            self._failed("saved to", exc)
            outcome = Saved(False, reason=str(exc))
        if isinstance(outcome, Saved):
            done: Future[Saved] = Future()
            done.set_result(outcome)
            return done
        outcome.add_done_callback(self._saved)
        self._saving = [*(future for future in self._saving if not future.done()), outcome]
        return outcome

    def _settle(self) -> None:
        wait(self._saving, SETTLE_S)

    def _saved(self, done: Future[Saved]) -> None:
        if not done.cancelled() and (exc := done.exception()) is not None:
            self._failed("saved to", exc)

    def _failed(self, verb: str, exc: BaseException) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        known = isinstance(exc, WarmKVError)
        log.log(level, "state was not %s the store: %s: %s", verb, type(exc).__name__, exc, exc_info=None if known else exc)


def _covered(length: int, cache: DynamicCache) -> int:
    """Tokens of a sequence of ``length`` that ``cache`` holds the state of."""
    held = hf_cache.cache_length(cache)
    if held not in (length, length - 1) or held == 0:
        raise RecordError(
            f"the cache holds rows of {held} tokens, {length} ids were given; expected {length} or {length - 1} rows"
        )
    return held
