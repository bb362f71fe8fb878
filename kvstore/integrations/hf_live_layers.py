"""The layers of a live cache as transformers sees them: offered keys and values, then attended."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Union

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from warmkv.kernels.formats import F32
from warmkv.kvstore.integrations.hf_live_attention import mark
from warmkv.kvstore.integrations.hf_live_plan import as_f32
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.model import Layer
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

#: Tokens of a prefill that are attended at once: what is between logits and output stays small.
PIECE = 512
#: Rows a sliding layer keeps beyond its window, so that a rejected draft can be taken back.
SLACK = 64


@dataclass(frozen=True, slots=True)
class _Offered:
    keys: torch.Tensor
    values: torch.Tensor


class LiveLayer(CacheLayerMixin):
    """One layer of a `LiveCache` as the library sees it; ``state`` is the live layer."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    state: Union[AttentionLayer, NystromLayer]

    def __init__(self, index: int, state: Union[AttentionLayer, NystromLayer]) -> None:
        super().__init__()
        self.index = index
        self.state = state
        self.is_initialized = True
        self.is_sliding = state.plan.kind is LayerKind.SLIDING
        self._offered: _Offered | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None

    def offer(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note keys and values until the layer attends. Raises UnsupportedError for a batch,
        RecordError for heads or sizes that are not the plan's."""
        plan = self.state.plan
        for name, tensor, size in (("keys", keys, plan.key_size), ("values", values, plan.value_size)):
            if tensor.dim() != 4 or tensor.shape[0] != 1:
                raise UnsupportedError(
                    f"layer {self.index}: {name} of shape {tuple(tensor.shape)}; a live cache holds one sequence"
                )
            if tensor.shape[1] != plan.kv_heads or tensor.shape[3] != size:
                raise RecordError(
                    f"layer {self.index}: {name} of shape {tuple(tensor.shape)}, the plan has {plan.kv_heads} heads of {size}"
                )
        self._offered = _Offered(keys, values)
        mark(keys, self)

    def require(
        self, scaling: float | None, softcap: float | None, window: int | None, sinks: torch.Tensor | None
    ) -> None:  # fmt: skip
        """Raises RecordError where the model attends otherwise than the plan says; learned sinks that
        changed are taken over."""
        plan = self.state.plan
        if scaling is not None and abs(scaling - plan.logit_scale) > 1e-6 * abs(scaling):
            raise RecordError(f"layer {self.index}: logits scaled by {scaling}, the plan says {plan.logit_scale}")
        if (softcap or 0.0) != plan.softcap:
            raise RecordError(f"layer {self.index}: soft cap {softcap}, the plan says {plan.softcap}")
        if window is not None and self.is_sliding and window != plan.window:
            raise RecordError(f"layer {self.index}: a window of {window}, the plan says {plan.window}")
        self.take_sinks(None if sinks is None else as_f32(sinks))

    def require_call(self, module: torch.nn.Module, value: torch.Tensor, position_ids: torch.Tensor | None) -> None:
        """Raises RecordError where what is attended is not what was offered: a module of another model,
        values that were changed on the way, tokens that stand elsewhere than behind those held."""
        known = self._module() if self._module is not None else module
        if known is not module:
            raise RecordError(f"layer {self.index}: the cache is another model's; each model has its own")
        if self._offered is None or value is not self._offered.values:
            raise UnsupportedError(f"layer {self.index}: the model changes its values after it handed them to the cache")
        if position_ids is not None and position_ids.dim() == 2:
            found, at = position_ids[0].tolist(), self.state.position
            if found != list(range(at, at + value.shape[2])):
                raise RecordError(f"layer {self.index}: tokens at positions {found[0]} to {found[-1]}, the next one is {at}")
        self._module = weakref.ref(module)

    def take_sinks(self, sinks: F32 | None) -> None:
        """Learned sink logits (heads,) the model attends with now."""
        if isinstance(self.state, NystromLayer):
            if sinks is not None:
                raise UnsupportedError(f"layer {self.index}: attention in constant memory with learned sinks")
            return
        held = self.state.sinks
        if (sinks is None) != (held is None) or (sinks is not None and held is not None and not np.array_equal(sinks, held)):
            self.state.sinks = sinks

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Store what was offered and attend ``query`` [1, heads, tokens, size] over all of it; returns
        [1, tokens, heads, value size] of the query's dtype."""
        offered, self._offered = self._offered, None
        if offered is None or offered.keys.shape[2] != query.shape[2]:
            raise RecordError(f"layer {self.index} attends {query.shape[2]} queries without keys of its own")
        queries, keys, values = (_rows(tensor) for tensor in (query, offered.keys, offered.values))
        out = torch.from_numpy(self._attend(queries, keys, values)).unsqueeze(0)
        return out if out.dtype == query.dtype else out.to(query.dtype)

    def _attend(self, queries: F32, keys: F32, values: F32) -> F32:
        if len(queries) == 1:
            self.state.append(keys, values)
            found = self.state.attend(queries[0])[None]
        elif len(queries) <= PIECE:
            self.state.append(keys, values)
            found = self.state.attend_chunk(queries)
        else:
            pieces = [slice(at, at + PIECE) for at in range(0, len(queries), PIECE)]
            return np.concatenate([self._attend(queries[part], keys[part], values[part]) for part in pieces])
        if self.is_sliding and isinstance(self.state, AttentionLayer):
            self.state.trim_window(slack=SLACK)
        return found

    # -- what the library asks of a layer ------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, ...]:
        """As `LiveCache.update`, of one layer."""
        self.offer(key_states, value_states)
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: rows are allocated as they come."""

    def get_seq_length(self) -> int:
        return self.state.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Nothing reads them: no mask is built."""
        return self.state.position + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.24

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: a single layer would fall out of step."""
        raise UnsupportedError("layers are cropped together: call crop of the cache")

    def reset(self) -> None:
        self.state.clear()


class ConstantLayer(LiveLayer):
    """A layer that gives its rows up at the plan's boundary for a state of constant size."""

    is_croppable = False
    state: NystromLayer

    def _attend(self, queries: F32, keys: F32, values: F32) -> F32:
        if self.state.sealed:
            return self.state.step_chunk(queries, keys, values)
        if not self.state.crosses(len(queries)):
            return super()._attend(queries, keys, values)
        boundary = self.state.pending_boundary
        assert boundary is not None
        exact = max(0, boundary - self.state.rows)
        found = [super()._attend(queries[:exact], keys[:exact], values[:exact])] if exact else []
        self.state.seal()
        if exact < len(queries):
            found.append(self.state.step_chunk(queries[exact:], keys[exact:], values[exact:]))
        return np.concatenate(found)


def wrapped(index: int, layer: Layer) -> LiveLayer:
    """How the library sees a live layer. Raises UnsupportedError for kinds no model here attends over."""
    if isinstance(layer, NystromLayer):
        return ConstantLayer(index, layer)
    if isinstance(layer, AttentionLayer):
        return LiveLayer(index, layer)
    raise UnsupportedError(f"layer {index} ({layer.plan.kind.name}): models attend over full, sliding and Nystroem layers")


def _rows(tensor: torch.Tensor) -> F32:
    """[1, heads, tokens, size] as (tokens, heads, size): a view where the numbers are float32."""
    rows: F32 = as_f32(tensor)[0].transpose(1, 0, 2)
    return rows
