"""How transformers spells the layers of a cache: what each class keeps, and where.

Every class that can be served is named here once. Any other one keeps its state in a way that
nobody has proven to come back right, so it is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin

from warmkv.kvstore.integrations.hf_blocks import BlocksLayer
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind, PlaneRole

_MODULE = "transformers.cache_utils"


@dataclass(frozen=True, slots=True)
class Keeps:
    """What a layer class keeps: ``rows`` of keys and values, only the last ``sliding_window`` - 1
    of them (``windowed``), rows of indexer keys beside them (``indexed``), convolution and
    recurrent ``state``."""

    rows: bool = False
    windowed: bool = False
    indexed: bool = False
    state: bool = False


_CLASSES = {
    "DynamicLayer": Keeps(rows=True),
    "DynamicSlidingWindowLayer": Keeps(rows=True, windowed=True),
    "DynamicIndexedLayer": Keeps(rows=True, indexed=True),
    "LinearAttentionLayer": Keeps(state=True),
    "LinearAttentionAndFullAttentionLayer": Keeps(rows=True, state=True),
    "LinearAttentionAndSlidingWindowAttentionLayer": Keeps(rows=True, windowed=True, state=True),
    "DummyLayer": Keeps(),
}
#: Layer types of configurations whose windowed layers see fixed chunks, and those that slide.
_CHUNKED = frozenset({"chunked_attention"})
_SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})
#: Axis of tokens in the library's tensors, and the number of their axes.
_AXES = {PlaneRole.KEY: (2, 4), PlaneRole.VALUE: (2, 4), PlaneRole.INDEXER_KEY: (1, 3)}


def keeps(index: int, layer: object) -> Keeps:
    """What layer ``index`` keeps. Raises UnsupportedError for classes that are not served."""
    cls = type(layer)
    found = Keeps(rows=True) if cls is BlocksLayer else _CLASSES.get(cls.__name__) if cls.__module__ == _MODULE else None
    if found is None:
        raise UnsupportedError(f"layer {index} keeps its state as {cls.__name__}, which cannot be served until a later version")
    if found.state and not isinstance(getattr(layer, "conv_states", None), dict):
        raise UnsupportedError(
            f"layer {index}: transformers {transformers.__version__} does not keep the states of {cls.__name__} by number; "
            "update transformers to serve it"
        )
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedError(
            f"layer {index} keeps positions beside its indexer keys, which cannot be served until a later version"
        )
    return found


def row_tensors(index: int, layer: CacheLayerMixin) -> dict[PlaneRole, torch.Tensor]:
    """The tensors layer ``index`` has rows in, as the library holds them: keys and values
    [1, heads, rows, size], indexer keys [1, rows, size]. Empty before the first token, and for
    layers without rows. Raises RecordError for a batch."""
    known = keeps(index, layer)
    if not known.rows:
        return {}
    found = {PlaneRole.KEY: layer.keys, PlaneRole.VALUE: layer.values}
    if known.indexed:
        found[PlaneRole.INDEXER_KEY] = layer.indexer_keys
    held = {role: tensor for role, tensor in found.items() if tensor is not None and tensor.numel()}
    for role, tensor in held.items():
        if tensor.dim() != _AXES[role][1] or tensor.shape[0] != 1:
            expected = "(1, tokens, size)" if role is PlaneRole.INDEXER_KEY else "(1, heads, tokens, head size)"
            raise RecordError(f"layer {index}: cache tensors have shape {tuple(tensor.shape)}, expected {expected}")
    return held


def token_major(role: PlaneRole, tensor: torch.Tensor) -> torch.Tensor:
    """A view (rows, *row shape) of one of the tensors of `row_tensors`."""
    rows = tensor.detach()[0]
    return rows if role is PlaneRole.INDEXER_KEY else rows.permute(1, 0, 2)


def library_order(role: PlaneRole, rows: torch.Tensor) -> torch.Tensor:
    """Inverse of `token_major`: a view as the library holds it."""
    return (rows if role is PlaneRole.INDEXER_KEY else rows.permute(1, 0, 2)).unsqueeze(0)


def tokens_axis(role: PlaneRole) -> int:
    """Axis of the tokens in the library's tensor of this role."""
    return _AXES[role][0]


def covered(index: int, layer: CacheLayerMixin) -> set[int]:
    """How many tokens layer ``index`` has seen, one number for each tensor it has rows in: one
    element unless the layer is out of step with itself. Empty for layers that have no rows.

    Rows a window has dropped count; nothing is joined or copied."""
    known = keeps(index, layer)
    if not known.rows:
        return set()
    if isinstance(layer, BlocksLayer):
        return {layer.get_seq_length()}
    rows = {int(tensor.shape[tokens_axis(role)]) for role, tensor in row_tensors(index, layer).items()} or {0}
    if not known.windowed:
        return rows
    seen = int(layer.cumulative_length)
    lost = min(seen, layer.sliding_window - 1)
    if any(count > seen or count < lost for count in rows):
        raise RecordError(f"layer {index} has seen {seen} tokens and holds {sorted(rows)} rows, expected {lost} at least")
    return {seen}


def has_state(layer: object) -> bool:
    """Whether a layer with convolution or recurrent state has seen any token."""
    return any(cast(dict[int, bool], getattr(layer, "has_previous_state", {})).values())


def windows(config: PreTrainedConfig, layers: Sequence[CacheLayerMixin]) -> tuple[tuple[LayerKind, int], ...]:
    """For each layer of a cache made for ``config``: SLIDING or CHUNKED and the size in tokens, or
    FULL and 0 where it is not windowed. The class is the same for both, the mask is not.

    Raises UnsupportedError for a windowed layer whose mask the configuration does not tell."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    if types is None:  # the library then looks for these sizes, in this order
        sliding, chunk = (getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
        known = {chunk: "chunked_attention"} if sliding is None else {sliding: "sliding_attention"}
        types = [known.get(getattr(layer, "sliding_window", None), "unknown") for layer in layers]
    elif len(types) != len(layers):
        types = ["unknown"] * len(layers)
    return tuple(_window(index, layer, kind) for index, (layer, kind) in enumerate(zip(layers, types, strict=True)))


def _window(index: int, layer: CacheLayerMixin, layer_type: str) -> tuple[LayerKind, int]:
    if not keeps(index, layer).windowed:
        return LayerKind.FULL, 0
    size = int(layer.sliding_window)
    if layer_type not in _CHUNKED | _SLIDING:
        raise UnsupportedError(
            f"layer {index} is windowed and of type {layer_type!r}; windows that slide and fixed chunks are served"
        )
    if size < 2:
        raise UnsupportedError(f"layer {index} has a window of {size} tokens; at least 2 are served")
    return (LayerKind.CHUNKED if layer_type in _CHUNKED else LayerKind.SLIDING), size
