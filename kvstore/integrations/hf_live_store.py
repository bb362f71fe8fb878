"""Live caches of one model in a store: saved as they lie, found again by any process.

store = LiveStore(model, tokenizer, warmkv.connect(), "q8")
cache = store.load(ids)                       # attends over the stored rows where they are mapped
model.generate(ids, cache=cache, max_new_tokens=200)
store.save(ids, cache)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from warmkv.kernels import dispatch
from warmkv.kernels.dispatch import Backend
from warmkv.kvstore.bridge import attention_of, field_digests, has_gaps, layer_specs, on_prefix, records_of, restore_into
from warmkv.kvstore.integrations import hf_request
from warmkv.kvstore.integrations.hf_adapters import base_model
from warmkv.kvstore.integrations.hf_geometry import Geometry
from warmkv.kvstore.integrations.hf_identity import ModelIdentity
from warmkv.kvstore.integrations.hf_live import NAME, LiveCache
from warmkv.kvstore.integrations.hf_live_plan import plan_of
from warmkv.kvstore.integrations.hf_tensors import Weights
from warmkv.kvstore.live.evict import Mass, Policy
from warmkv.kvstore.live.plan import ModelPlan, NystromPlan, TurboQuantPlan
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.verbs import Ack
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Lineage, TokensLike

if TYPE_CHECKING:
    from warmkv.kvstore.restored import Restored
    from warmkv.kvstore.verbs import Records

#: What rows are: keys after the rotary embedding, values as projected, attended by our kernels.
STATE_VERSION = "live-cache 1"


class LivePrefixes(Protocol):
    """The verbs a LiveStore needs; a client and an embedded store both have them."""

    def restore(self, target: Match | Identity, ids: TokensLike, *, lineage: Lineage = ...) -> Restored: ...

    def save(
        self, identity: Identity, ids: TokensLike, records: Records, *, ack: Ack = ..., lineage: Lineage = ...,
        fields: tuple[bytes, ...] = ...,
    ) -> Saved: ...  # fmt: skip


class LiveStore:
    """Makes, loads and saves the live caches of one model, all alike: ``mode``, ``policy``, ``max_rows``,
    ``keep_rows``, ``nystrom``, ``backend`` and ``threads`` are those of `LiveCache`, ``turboquant`` that of
    `plan_of`, ``weights`` and ``salt`` those of `PromptCache`.

    Raises UnsupportedError for models and states of models that are not served.

    **Threading:** one caller at a time."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, prefixes: LivePrefixes, mode: str = "f32", *,
        policy: Policy | None = None, max_rows: int = 0, keep_rows: int = 0, nystrom: NystromPlan | None = None,
        backend: Backend = "auto", threads: int = 1, weights: Weights = "auto", salt: str | bytes | None = None,
        turboquant: TurboQuantPlan | None = None,
    ) -> None:  # fmt: skip
        base = base_model(model)
        self.plan = plan_of(
            base, mode, importance=isinstance(policy, Mass), nystrom=nystrom, max_rows=max_rows, turboquant=turboquant
        )
        self._model, self._prefixes = base, prefixes
        self._policy, self._keep_rows, self._backend, self._threads = policy, keep_rows, backend, threads
        self._identity = _LiveIdentity(model, tokenizer, self.plan, weights=weights, salt=salt)
        self.new()

    def new(self) -> LiveCache:
        """An empty cache."""
        return LiveCache(
            self._model, policy=self._policy, keep_rows=self._keep_rows, backend=self._backend, threads=self._threads,
            plan=self.plan,
        )  # fmt: skip

    def identity(self, *, gaps: bool = False) -> Identity:
        """Identity of the model as it is now, of what its caches keep, and of the kernels: another backend
        rounds otherwise. ``gaps``: of caches from which rows were evicted."""
        kernels = f"{NAME} {dispatch.kernels(self._backend).name}"
        return replace(
            self._identity.now(), layers=layer_specs(self.plan, gaps=gaps), attention=attention_of(self.plan, kernels),
            runtime_state_version=STATE_VERSION,
        )  # fmt: skip

    def load(
        self, ids: TokensLike | torch.Tensor, *, lineage: Lineage = CLEAN, gaps: bool = False, copy: bool = False
    ) -> LiveCache:
        """A cache with the longest usable prefix of ``ids``, shorter than ``ids`` by at least one token;
        empty on a miss. Rows stay where they are mapped, shared with every process that has them, unless
        ``copy``. A cache that was evicted or sealed is found under its ``lineage`` (that of ``cache.live``
        when it was saved), one that was evicted with ``gaps`` besides, both at its own end only.

        Raises what the store raises; a client that cannot reach its daemon gives a miss."""
        cache = self.new()
        with self._prefixes.restore(self.identity(gaps=gaps), hf_request.token_ids(ids), lineage=lineage) as restored:
            (restore_into if copy else on_prefix)(cache.live, restored)
        return cache

    def save(self, ids: TokensLike | torch.Tensor, cache: LiveCache, *, ack: Ack = "memory") -> Saved:
        """Save what ``cache`` holds of ``ids``, computed by this model from exactly those: all of them, or
        all but the last, which was chosen and never fed.

        Raises RecordError for another length and for a cache of another model or plan, and what the store
        raises."""
        tokens, length = hf_request.token_ids(ids), cache.get_seq_length()
        if length not in (len(tokens), len(tokens) - 1):
            raise RecordError(f"the cache holds {length} tokens, {len(tokens)} ids were given")
        if cache.model is None or base_model(cache.model) is not self._model:
            raise RecordError("the cache is another model's than this store")
        if cache.live.plan != self.plan:
            raise RecordError("the cache follows another plan than this store")
        return self._prefixes.save(
            self.identity(gaps=has_gaps(cache.live)), tokens[:length], records_of(cache.live, length), ack=ack,
            lineage=cache.live.lineage, fields=field_digests(cache.live),
        )  # fmt: skip


class _LiveIdentity(ModelIdentity):
    """The identity of a model whose cache is known from its plan: nothing is run to see it."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, plan: ModelPlan, *, weights: Weights, salt: str | bytes | None
    ) -> None:  # fmt: skip
        super().__init__(model, tokenizer, weights=weights, salt=salt)
        self._plan = plan

    def _observe(self, base: nn.Module, settings: bytes, device: torch.device) -> Geometry:
        layers = layer_specs(self._plan)
        return Geometry(layers, ({},) * len(layers), device)
