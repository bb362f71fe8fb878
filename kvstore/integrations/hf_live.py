"""LiveCache: a transformers model that generates on our storage and kernels.

    model = attend_with_live(AutoModelForCausalLM.from_pretrained(folder)).eval()
    cache = LiveCache(model, "q8")
    model.generate(ids, cache=cache, max_new_tokens=200)

The model is the library's own, its code untouched: only where keys and values are kept and how
attention is computed over them changes. One sequence, not padded, in host memory.
"""

from __future__ import annotations

import weakref

import torch
from transformers import Cache

from warmkv.kernels.dispatch import Backend
from warmkv.kvstore.integrations.hf_live_attention import NAME, attend_with_live, chosen, register
from warmkv.kvstore.integrations.hf_live_layers import SLACK, ConstantLayer, LiveLayer, wrapped
from warmkv.kvstore.integrations.hf_live_plan import plan_of, sinks_of
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.memory import LayerMemory
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan, NystromPlan
from warmkv.schema.errors import RecordError, UnsupportedError

__all__ = ["NAME", "SLACK", "LiveCache", "LiveLayer", "attend_with_live", "plan_of"]

register()


class LiveCache(Cache):
    """The cache of one sequence, for ``generate(cache=...)`` and for ``forward``.

    ``mode`` is one of `plan.modes`, rotated ones included. With ``max_rows`` the cache asks for eviction at so
    many rows and goes down to ``keep_rows`` (half of it by default) before the next tokens, as
    ``policy`` chooses. With ``nystrom`` full layers hold rows up to the plan's boundary and a state of
    constant size from there on. ``plan`` replaces what would be planned from the model.

    ``live`` is the `ModelCache` that holds everything; what it offers (eviction by hand, memory, the
    wire, saving through the bridge) works on it between two calls of the model.

    Raises UnsupportedError for a model that does not attend with `NAME` or has layers that are no
    attention, RecordError for settings that contradict each other.

    **Threading:** one caller at a time."""

    def __init__(
        self, model: torch.nn.Module, mode: str = "f32", *, policy: Policy | None = None, max_rows: int = 0, keep_rows: int = 0,
        nystrom: NystromPlan | None = None, backend: Backend = "auto", threads: int = 1, plan: ModelPlan | None = None,
    ) -> None:  # fmt: skip
        if chosen(model) != NAME:
            raise UnsupportedError(
                f"the model attends with {chosen(model)!r}; call attend_with_live(model) or load it with "
                f"attn_implementation={NAME!r}"
            )
        policy = Recent() if policy is None else policy
        plan = plan or plan_of(model, mode, importance=isinstance(policy, Mass), nystrom=nystrom, max_rows=max_rows)
        self.keep_rows = keep_rows or plan.max_rows // 2
        if keep_rows and not plan.max_rows:
            raise RecordError(f"keep_rows is {keep_rows} without max_rows: nothing would be evicted")
        if plan.max_rows and not 0 < self.keep_rows < plan.max_rows:
            raise RecordError(f"keep_rows is {self.keep_rows}, expected 1 to {plan.max_rows - 1}, less than max_rows")
        self.live = ModelCache(plan, backend=backend, threads=threads, policy=policy)
        layers = [wrapped(index, layer) for index, layer in enumerate(self.live.layers)]
        for index, sinks in sinks_of(model).items():
            layers[index].take_sinks(sinks)
        self._model = weakref.ref(model)
        super().__init__(layers=layers)

    @property
    def model(self) -> torch.nn.Module | None:
        """The model it was made for; None once that is gone."""
        return self._model()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand keys and values [1, KV heads, tokens, size] of one layer over. They are stored when the
        layer attends, which must follow."""
        if layer_idx == 0:
            self._ready()
        layer = self.layers[layer_idx]
        layer.offer(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Position of the next token, rows given up included."""
        return self.live.position

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens, all layers or none; the count is negative, as the library has it.

        Raises ValueError for a positive one, RecordError beyond the start, CannotRewind where a layer's
        rows or state of that position are gone."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): tell how many tokens to remove as a negative number")
        if tokens_to_remove:
            self.live.truncate_last(-tokens_to_remove)

    def reset(self) -> None:
        """Forget the conversation."""
        self.live.clear()

    def seal(self) -> bool:
        """Let full layers of a plan with `NystromPlan` give their rows up now; whether all have. Those that
        hold too few do at the plan's floor. Raises SealError where one cannot."""
        constant = [layer.state for layer in self.layers if isinstance(layer, ConstantLayer)]
        return all([layer.seal() for layer in constant])

    def memory(self) -> LayerMemory:
        """What all layers have allocated."""
        return self.live.memory()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: beams are several sequences."""
        raise UnsupportedError("a live cache holds one sequence; beam search needs several")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused beyond one sequence."""
        if repeats != 1:
            raise UnsupportedError(f"a live cache holds one sequence, {repeats} were asked for")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused but for the one sequence."""
        if indices.tolist() != [0]:
            raise UnsupportedError(f"a live cache holds one sequence, {indices.tolist()} were asked for")

    def _ready(self) -> None:
        """Before the first layer of a call: layers agree, and there is room."""
        positions = {layer.position for layer in self.live.layers}
        if len(positions) > 1:
            raise RecordError(
                f"layers of the cache are at positions {sorted(positions)}: a call of the model was cut short; reset"
            )
        if self.live.needs_eviction:
            self.live.evict(self.keep_rows)
