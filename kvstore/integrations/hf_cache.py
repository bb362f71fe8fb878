"""DynamicCache to rows and back: the one place that knows how transformers spells a cache.

The library renamed the argument that carries a cache and changed the meaning of `crop` between
versions; both are settled here by looking at signatures, not at version numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from warmkv.kvstore.restored import Restored, RestoredPlane
from warmkv.kvstore.rows import LayerRows
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec

#: Name of the argument of `generate` that takes a cache: "cache" from 5.24 on.
GENERATE_ARGUMENT = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
FORMATS = {torch.float32: PlaneFormat.F32, torch.float16: PlaneFormat.F16, torch.bfloat16: PlaneFormat.BF16}
_DTYPES = {format_: dtype for dtype, format_ in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model's cache looks like: one LayerSpec a layer and the device rows live on."""

    layers: tuple[LayerSpec, ...]
    device: torch.device


def forward_argument(model: torch.nn.Module) -> str:
    """Name of the argument of the model's forward that takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def new_cache(model: torch.nn.Module) -> DynamicCache:
    """An empty cache for ``model``. Raises UnsupportedError unless every layer of it is full
    attention that keeps all its rows."""
    config = cast(PreTrainedConfig, model.config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError("encoder-decoder models cannot be served until a later version")
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is not None and not cast(Callable[[], bool], supports)():
        raise UnsupportedError(
            f"{type(model).__name__} keeps its state in a cache of its own, which cannot be served until a later version"
        )
    cache = DynamicCache(config=config)
    require_full_attention(cache)
    return cache


def require_full_attention(cache: DynamicCache) -> None:
    """UnsupportedError unless all layers of ``cache`` are plain growing attention layers."""
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, BlocksLayer):
            raise UnsupportedError(
                f"layer {index} keeps its state as {type(layer).__name__}; only full attention is served until a later version"
            )


def observe(model: torch.nn.Module, device: torch.device) -> Geometry:
    """Geometry as really seen: runs one token through ``model`` and reads the cache it filled.

    Heads and head sizes guessed from a configuration are wrong for some models (latent
    attention, explicit head sizes); one forward pass of one token settles them."""
    cache = new_cache(model)
    token = torch.zeros((1, 1), dtype=torch.long, device=device)
    with torch.no_grad():
        model(input_ids=token, use_cache=True, **{forward_argument(model): cache})
    require_full_attention(cache)
    if cache_length(cache) != 1:
        raise UnsupportedError(f"{type(model).__name__} kept {cache_length(cache)} rows of one token; expected one row a layer")
    specs, devices = [], set()
    for index, (keys, values) in enumerate(_tensors(cache)):
        devices |= {keys.device, values.device}
        planes = tuple(_spec(index, role, t) for role, t in ((PlaneRole.KEY, keys), (PlaneRole.VALUE, values)))
        specs.append(LayerSpec(LayerKind.FULL, planes))
    if len(devices) != 1:
        raise UnsupportedError(f"cache rows lie on {len(devices)} devices; one device is served until a later version")
    return Geometry(tuple(specs), devices.pop())


def _spec(index: int, role: PlaneRole, tensor: torch.Tensor) -> PlaneSpec:
    if tensor.dtype not in FORMATS:
        raise UnsupportedError(f"layer {index}: {role.name} rows are {tensor.dtype}; float32, float16 and bfloat16 can be stored")
    return PlaneSpec(role, FORMATS[tensor.dtype], (int(tensor.shape[1]), int(tensor.shape[3])))


def cache_length(cache: DynamicCache) -> int:
    """Tokens whose rows ``cache`` holds. Raises RecordError if its layers disagree, or if it
    holds more than one sequence; UnsupportedError for layers that are not full attention."""
    require_full_attention(cache)
    lengths = set()
    for keys, values in _tensors(cache, empty=True):
        for tensor in (keys, values):
            if tensor.numel() and (tensor.dim() != 4 or tensor.shape[0] != 1):
                raise RecordError(f"cache tensors have shape {tuple(tensor.shape)}, expected (1, heads, tokens, head size)")
            lengths.add(int(tensor.shape[2]) if tensor.numel() else 0)
    if len(lengths) > 1:
        raise RecordError(f"layers of the cache disagree about its length: {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def shorten(cache: DynamicCache, length: int) -> None:
    """Drop rows from the end until ``length`` tokens are left. Old rows are not written to.

    A negative count of tokens to remove is what every version of `crop` agrees about."""
    surplus = cache_length(cache) - length
    if surplus < 0:
        raise RecordError(f"cache holds {length + surplus} tokens, {length} were asked for")
    if surplus:
        cache.crop(-surplus)


def to_rows(cache: DynamicCache) -> list[LayerRows]:
    """Rows of every layer as (tokens, heads, head size) arrays, bf16 as uint16 bits.

    Tensors in host memory are viewed, not copied; the arrays keep them alive. The cache may grow
    meanwhile: growing and cropping make new tensors and leave these alone."""
    return [
        LayerRows.kv(index, _rows(keys), _rows(values), format=FORMATS[keys.dtype])
        for index, (keys, values) in enumerate(_tensors(cache))
    ]


def _rows(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    rows = tensor.detach()[0].permute(1, 0, 2)
    if rows.device.type != "cpu":
        rows = rows.contiguous().cpu()
    if rows.dtype == torch.bfloat16:
        rows = rows.view(torch.uint16)
    return cast(npt.NDArray[np.generic], rows.numpy())


def from_restored(cache: DynamicCache, restored: Restored, length: int, device: torch.device) -> None:
    """Fill the empty ``cache`` with the first ``length`` restored tokens.

    On the CPU the blocks are attached where they lie (their mappings live as long as the
    tensors); the first forward pass copies them. For another device they are copied once. Needs a
    restore with ``writable=True``: pages are private, so writes stay in this process. All
    tensors are made before the cache is touched."""
    if len(restored.layers) != len(cache.layers):
        raise RecordError(f"{len(restored.layers)} layers were restored, the model has {len(cache.layers)}")
    pairs = [
        (_blocks(layer.plane(PlaneRole.KEY), length, device), _blocks(layer.plane(PlaneRole.VALUE), length, device))
        for layer in restored.layers
    ]
    for layer, (keys, values) in zip(cache.layers, pairs, strict=True):
        full = cast(DynamicLayer, layer)
        full.lazy_initialization(keys[0], values[0])
        if len(keys) == 1:
            full.keys, full.values = keys[0], values[0]
        else:
            BlocksLayer.attach(full, keys, values)


def _blocks(plane: RestoredPlane, length: int, device: torch.device) -> list[torch.Tensor]:
    """Consecutive tensors [1, heads, rows, head size] that hold ``length`` rows together."""
    blocks, left = [], length
    for rows in plane.blocks:
        if left > 0:
            rows = rows[:left]
            left -= len(rows)
            tensor = torch.from_numpy(rows).view(_DTYPES[plane.format]).permute(1, 0, 2).unsqueeze(0)
            blocks.append(tensor)
    if left:
        raise RecordError(f"plane {plane.role.name} holds {length - left} rows, {length} were promised")
    return blocks if device.type == "cpu" else [torch.cat(blocks, dim=-2).to(device)]


class BlocksLayer(DynamicLayer):
    """A layer whose rows lie in several restored blocks until its first update joins them with
    the new rows: one copy instead of two. From then on it is a plain DynamicLayer; whoever looks
    at its tensors before joins them too."""

    _parts: tuple[list[torch.Tensor], list[torch.Tensor]]

    @classmethod
    def attach(cls, layer: DynamicLayer, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Turn an initialised, empty ``layer`` into one over these blocks."""
        layer.__class__ = cls
        cast(BlocksLayer, layer)._parts = (keys, values)

    def _join(self, *new: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Become a plain layer that holds the blocks, and ``new`` rows behind them."""
        keys, values = self._parts
        more_keys, more_values = [pair[0] for pair in new], [pair[1] for pair in new]
        joined = torch.cat([*keys, *more_keys], dim=-2), torch.cat([*values, *more_values], dim=-2)
        del self._parts
        self.__class__ = DynamicLayer
        self.keys, self.values = joined
        return joined

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._join((key_states, value_states))

    def get_seq_length(self, *args: object) -> int:
        return sum(int(block.shape[-2]) for block in self._parts[0])

    @property
    def keys(self) -> torch.Tensor | None:
        self._join()
        return cast(torch.Tensor, self.__dict__["keys"])

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._join()
        self.__dict__["keys"] = tensor

    @property
    def values(self) -> torch.Tensor | None:
        self._join()
        return cast(torch.Tensor, self.__dict__["values"])

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._join()
        self.__dict__["values"] = tensor


def _tensors(cache: DynamicCache, empty: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pairs = []
    for index, layer in enumerate(cache.layers):
        keys, values = cast(DynamicLayer, layer).keys, cast(DynamicLayer, layer).values
        if keys is None or values is None:
            if not empty:
                raise RecordError(f"layer {index} of the cache holds no rows")
            keys = values = torch.empty(0)
        pairs.append((keys, values))
    return pairs
