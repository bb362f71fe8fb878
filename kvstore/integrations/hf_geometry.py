"""Geometry of a model's cache as really seen: a few tokens are run, the cache is read.

Heads and head sizes guessed from a configuration are wrong for some models (latent attention,
explicit head sizes), and shapes of states are written down nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedConfig

from warmkv.kvstore.integrations import hf_layers
from warmkv.kvstore.integrations.hf_cache import cache_length, new_cache
from warmkv.kvstore.integrations.hf_feed import feed
from warmkv.kvstore.integrations.hf_formats import FORMATS
from warmkv.kvstore.integrations.hf_states import StateParts, state_parts, state_specs
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneRole, PlaneSpec

#: Tokens fed one after the other: alone, alone behind others, several behind others.
_STEPS = (1, 1, 3)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model's cache looks like: a LayerSpec a layer, what its states consist of, and the
    device it lies on."""

    layers: tuple[LayerSpec, ...]
    states: tuple[StateParts, ...]
    device: torch.device

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a cache may be cut at any position: every layer keeps all its rows, or nothing."""
        return all(layer.kind in (LayerKind.FULL, LayerKind.SHARED) for layer in self.layers)

    @property
    def rowless(self) -> bool:
        """Whether no layer has rows."""
        return not any(layer.row_planes for layer in self.layers)

    @property
    def delicate(self) -> bool:
        """Whether some layer has state at one position, or an index over its keys: model files that
        go on from those are wrong now and then about several tokens at once, see `hf_versions`."""
        return any(self.states) or any(plane.role is PlaneRole.INDEXER_KEY for layer in self.layers for plane in layer.row_planes)


def observe(model: torch.nn.Module, device: torch.device) -> Geometry:
    """Runs up to five tokens through ``model`` and reads the cache it filled; one is enough where
    all layers keep all their rows.

    Raises UnsupportedError, naming the layer, for what cannot be stored or is not the same after
    one token and after several."""
    cache = new_cache(model)
    geometry: Geometry | None = None
    fed = 0
    for step in _STEPS:
        with torch.no_grad():
            feed(model, cache, torch.zeros((1, step), dtype=torch.long, device=device), fed)
        fed += step
        _require_length(model, cache, fed)
        seen = read(cast(PreTrainedConfig, model.config), cache)
        if geometry is not None:
            _require_same(geometry, seen, fed)
        geometry = seen
        if seen.resumes_anywhere:
            break
    assert geometry is not None
    return geometry


def read(config: PreTrainedConfig, cache: DynamicCache) -> Geometry:
    """Geometry of a cache that was made for ``config`` and fed. Raises UnsupportedError."""
    windows = hf_layers.windows(config, cache.layers)
    specs: list[LayerSpec | None] = []
    states: list[StateParts] = []
    devices: set[torch.device] = set()
    for index, layer in enumerate(cache.layers):
        known = hf_layers.keeps(index, layer)
        rows = hf_layers.row_tensors(index, layer)
        parts = state_parts(index, layer) if known.state else {}
        devices |= {tensor.device for tensor in rows.values()} | ({layer.device} if parts else set())
        planes = (*(_row_spec(index, role, tensor) for role, tensor in rows.items()), *state_specs(parts))
        if planes:
            specs.append(_layer_spec(planes, windows[index]))
        elif known.rows or known.state:
            raise UnsupportedError(f"layer {index} ({type(layer).__name__}) kept nothing of the tokens it was fed")
        else:
            specs.append(None)
        states.append(parts)
    if len(devices) != 1:
        raise UnsupportedError(f"the cache lies on {len(devices)} devices; one device is served until a later version")
    return Geometry(_shared(config, specs), tuple(states), devices.pop())


def _row_spec(index: int, role: PlaneRole, tensor: torch.Tensor) -> PlaneSpec:
    if tensor.dtype not in FORMATS:
        raise UnsupportedError(f"layer {index}: {role.name} rows are {tensor.dtype}; float32, float16 and bfloat16 can be stored")
    return PlaneSpec(role, FORMATS[tensor.dtype], tuple(map(int, hf_layers.token_major(role, tensor).shape[1:])))


def _layer_spec(planes: tuple[PlaneSpec, ...], window: tuple[LayerKind, int]) -> LayerSpec:
    roles = {plane.role for plane in planes}
    kind, size = window
    if roles <= {PlaneRole.CONV, PlaneRole.RECURRENT}:
        return LayerSpec(LayerKind.RECURRENT if PlaneRole.RECURRENT in roles else LayerKind.CONV, planes)
    if roles & {PlaneRole.CONV, PlaneRole.RECURRENT}:
        if kind is LayerKind.CHUNKED:
            raise UnsupportedError("layers of chunked attention with state cannot be served until a later version")
        return LayerSpec(LayerKind.HYBRID, planes, window=size)
    if kind is LayerKind.CHUNKED:
        return LayerSpec(kind, planes, chunk=size)
    return LayerSpec(kind, planes, window=size)


def _shared(config: PreTrainedConfig, specs: list[LayerSpec | None]) -> tuple[LayerSpec, ...]:
    """All specs, where layers that keep nothing name the one whose rows they use: the last one
    before them of their type, or the first that keeps anything if they use none's."""
    text = config.get_text_config(decoder=True)
    types = list(getattr(text, "layer_types", None) or [None] * len(specs))
    keeping = [index for index, spec in enumerate(specs) if spec is not None]
    if not keeping:
        raise UnsupportedError("no layer of the model keeps anything")
    found = []
    for index, spec in enumerate(specs):
        before = [other for other in keeping if other < index and types[other] == types[index]]
        found.append(spec or LayerSpec(LayerKind.SHARED, (), shared_with=(before or keeping[:1])[-1]))
    return tuple(found)


def _require_length(model: torch.nn.Module, cache: DynamicCache, fed: int) -> None:
    try:
        length = cache_length(cache)
    except RecordError as exc:
        raise UnsupportedError(f"{type(model).__name__} fed with {fed} tokens: {exc}") from exc
    if length != fed:
        raise UnsupportedError(f"{type(model).__name__} kept {length} rows of {fed} tokens; expected one row a token and layer")


def _require_same(before: Geometry, after: Geometry, fed: int) -> None:
    for index, (one, other) in enumerate(zip(before.layers, after.layers, strict=True)):
        if one != other or before.states[index] != after.states[index]:
            raise UnsupportedError(f"layer {index} keeps another state after {fed} tokens than after the first: {other}")
