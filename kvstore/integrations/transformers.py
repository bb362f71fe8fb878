"""PromptCache: a transformers model whose prompts' state outlives the process.

    cache = PromptCache(model, tokenizer, warmkv.connect())
    answer = cache.generate(messages, max_new_tokens=200, streamer=TextStreamer(tokenizer))

A turn continues from the live cache where that holds the prefix, from the store where the store
holds more, and computes the rest. Models with windows, convolutions or recurrence resume only
where their state was kept: their prompts are computed in pieces, and kept at the end of each. What
can go wrong in the store costs time, never the answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations import hf_cache, hf_feed, hf_records, hf_request
from warmkv.kvstore.integrations.hf_adapters import base_model
from warmkv.kvstore.integrations.hf_anchors import AnchorPlan, last_and_branch, stops
from warmkv.kvstore.integrations.hf_conversation import Conversation
from warmkv.kvstore.integrations.hf_first import with_first
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.integrations.hf_request import Messages
from warmkv.kvstore.integrations.hf_saves import Saves, settled
from warmkv.kvstore.integrations.hf_start import Live, PrefixStore, Source, Start, Starts
from warmkv.kvstore.integrations.hf_tensors import Weights
from warmkv.kvstore.integrations.hf_versions import continues_at_once
from warmkv.kvstore.restored import Flight
from warmkv.kvstore.results import Saved
from warmkv.kvstore.verbs import Ack
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import Anchor, AnchorKind, Tokens, TokensLike

#: A prompt of which so many tokens were computed is saved before its answer: others may wait for it.
EARLY_TOKENS = 256

__all__ = ["AnchorPlan", "Generated", "PrefixStore", "PromptCache", "Source"]


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer and where its prompt's state came from.

    ``ids`` are prompt and answer, ``new_ids`` the answer, ``text`` its decoding without special
    tokens. Of ``prompt_tokens``, ``matched`` agreed with the source, ``usable`` were resumed from
    and ``suffix_tokens`` were computed. ``source`` is "none" for a cold run, ``tier`` the store's
    tier where the store was the source; ``restore_s`` is the time from the first question to the
    store until the cache was ready. ``saved`` resolves once the new state is stored or given up.
    ``reason`` says, with words decoded, why the store had no more."""

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
    reason: str = ""


class PromptCache:
    """A causal language model whose prefix state lives in a store between turns and processes.

    ``model`` is a transformers model (or a LoRA wrapper around one) in eval mode; ``ack`` and
    ``background`` say how `generate` saves: by default it hands the state to `save_async` and goes
    on. ``anchors`` plans where models that resume nowhere else keep their state within a prompt;
    conversations are planned from their messages instead, at most ``max_anchors`` positions of a
    prompt, unless a plan was given. What a template will not repeat (the thinking of an answer) is
    not kept, unless ``keep_thinking``. A prompt that another process is computing is waited for,
    ``wait_s`` at most and twice as long as computing it would take. ``admission`` holds measured
    speeds: prompts computed faster than the store could answer are not asked about or kept.
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
        anchors: AnchorPlan = last_and_branch, max_anchors: int = 6, keep_thinking: bool = False, wait_s: float = 60.0,
        admission: Admission | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._base = base_model(model)
        self._tokenizer = tokenizer
        self._prefixes = client_or_store
        self._ack: Ack = ack
        self._plan = anchors
        self._max_anchors = max_anchors
        self._keep_thinking = keep_thinking
        self._admission = Admission() if admission is None else admission
        self._identity = ModelIdentity(model, tokenizer, weights=weights, salt=salt)
        self._saves = Saves(client_or_store, self._identity, background=background, admission=self._admission)
        decode = cast(Callable[[Sequence[int]], str], tokenizer.decode)
        self._starts = Starts(self._base, self._identity, client_or_store, self._saves, self._admission, decode, wait_s)
        self._live: Live | None = None
        self._lock = threading.RLock()
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
        conversation: Conversation | None = None
        if hf_request.is_messages(messages_or_ids):
            messages = cast(Messages, messages_or_ids)
            tokens = self.render(messages, tools=tools, template=template)
            conversation = Conversation(self._tokenizer, messages, tools, template or {})
        else:
            tokens = hf_request.token_ids(cast(TokensLike, messages_or_ids))
            hf_request.require_unpadded(tokens, self._tokenizer)
        passed = hf_request.check_options(options, self._defaults, len(tokens))
        with self._lock:
            identity = self._identity.now()
            if self._identity.geometry.rowless:
                hf_feed.require_id_free(passed, self._defaults)
            began = time.perf_counter()
            live, self._live = self._live, None  # a turn that fails must not leave a half-grown cache behind
            start = self._starts.best(identity, tokens, live)
            restore_s = time.perf_counter() - began
            try:
                planned = self._planned(conversation, tokens, start) if anchors is None else tuple(anchors)
                return self._answer(identity, tokens, start, planned, passed, ack or self._ack, conversation, restore_s)
            except BaseException:
                if start.flight is not None:
                    start.flight.close()
                raise

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

    def _planned(self, conversation: Conversation | None, tokens: Tokens, start: Start) -> tuple[int | Anchor, ...]:
        """Where the prefill stops to keep the state."""
        if start.bypass or (self._identity.geometry.resumes_anywhere and self._plan is last_and_branch):
            return ()
        if conversation is None or self._plan is not last_and_branch:
            return tuple(self._plan(tokens, start.matched, start.usable))
        found = conversation.anchors(tokens, start.usable, self._max_anchors)
        return (*found, start.matched) if found else tuple(self._plan(tokens, start.matched, start.usable))

    def _answer(
        self, identity: Identity, tokens: Tokens, start: Start, planned: tuple[int | Anchor, ...], options: hf_request.Options,
        ack: Ack, conversation: Conversation | None, restore_s: float,
    ) -> Generated:  # fmt: skip
        sequence, named = self._run(identity, tokens, start, planned, options, ack)
        new = sequence[len(tokens) :].tolist()
        text = cast(str, self._tokenizer.decode(new, skip_special_tokens=True))
        kept = len(sequence)
        if conversation is not None and not self._keep_thinking:
            kept = max(len(tokens), conversation.live(sequence, text))
        saved = self._keep(identity, sequence, start, ack, named, kept)
        if start.flight is not None:
            _close_after(start.flight, saved)
        return Generated(
            ids=tuple(sequence.tolist()), new_ids=tuple(new), text=text, prompt_tokens=len(tokens),
            suffix_tokens=len(tokens) - start.usable, matched=start.matched, usable=start.usable, tier=start.tier,
            restore_s=restore_s, source=start.source, saved=saved, reason=start.reason,
        )  # fmt: skip

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
        began = time.perf_counter()

        def computed() -> None:
            """The prompt is computed; those who wait for it need not wait for the answer."""
            self._admission.note_prefill(len(tokens) - held, time.perf_counter() - began)
            if start.flight is not None and geometry.resumes_anywhere and len(tokens) - held >= EARLY_TOKENS:
                _close_after(start.flight, self._saves.put(identity, tokens, start.cache, ack=ack))

        options = {**options, "logits_processor": with_first(options.get("logits_processor"), computed)}
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
            began = time.perf_counter()
            with torch.no_grad():
                feed(self._base, cache, ids[:, at:position], at)
            self._admission.note_prefill(position - at, time.perf_counter() - began)
            at = position
            if anchor is not None:
                self._saves.hold_back(saves)
                named = (anchor,) if anchor.kind != AnchorKind.UNSPECIFIED else ()
                saves.append(self._saves.put(identity, tokens[:at], cache, ack=ack, anchors=named))
        if saves and start.flight is not None:
            _close_after(start.flight, saves[-1])
        return at

    def _keep(
        self, identity: Identity, sequence: Tokens, start: Start, ack: Ack, named: tuple[Anchor, ...], kept: int
    ) -> Future[Saved]:
        """Keep the cache for the next turn, and save what a later prompt can share of it."""
        cache = start.cache
        try:
            length = _covered(len(sequence), cache)
        except Exception as exc:  # noqa: BLE001 - the answer stands
            self._saves.failed("saved to", exc)
            return settled(Saved(False, reason=str(exc)))
        if start.bypass:
            saved = settled(Saved(False, reason=f"{length} tokens are computed faster than a store answers"))
        else:
            saved = self._saves.put(identity, sequence[:length], cache, ack=ack, anchors=named, kept=kept)
        if self._identity.now(trust_version=True) == identity:
            self._live = Live(identity, sequence[:length], cache)
        return saved

    @property
    def _model_type(self) -> str:
        return str(self._base.config.get_text_config(decoder=True).model_type)


def _covered(length: int, cache: DynamicCache) -> int:
    """Tokens of a sequence of ``length`` that ``cache`` holds the state of."""
    held = hf_cache.cache_length(cache)
    if held not in (length, length - 1) or held == 0:
        raise RecordError(
            f"the cache holds rows of {held} tokens, {length} ids were given; expected {length} or {length - 1} rows"
        )
    return held


def _close_after(flight: Flight, saved: Future[Saved]) -> None:
    """Let those who wait for a prompt go on once its state is saved, or will not be."""
    saved.add_done_callback(lambda _: flight.close())
