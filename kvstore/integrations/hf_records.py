"""A cache as records of its layers, and records as a cache again, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from warmkv.kvstore.integrations import hf_layers
from warmkv.kvstore.integrations.hf_blocks import BlocksLayer
from warmkv.kvstore.integrations.hf_cache import cache_length, to_rows
from warmkv.kvstore.integrations.hf_counted import CountedCache
from warmkv.kvstore.integrations.hf_formats import DTYPES
from warmkv.kvstore.integrations.hf_geometry import Geometry
from warmkv.kvstore.integrations.hf_states import state_filler, state_planes
from warmkv.kvstore.restored import Restored, RestoredLayer, RestoredPlane
from warmkv.kvstore.rows import LayerRows, LayerState
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneRole

Fill = Callable[[CacheLayerMixin], None]


def to_records(cache: DynamicCache, geometry: Geometry, length: int) -> list[LayerRows | LayerState]:
    """All that ``cache`` holds after ``length`` tokens.

    Rows are views where they lie in host memory, see `to_rows`; states are copies, because the
    library writes into them. Of chunked layers only rows of the open chunk are handed out: what
    lies before it nobody sees again, and after a restore it is not there. Raises RecordError if
    the cache holds another number of tokens, or other states than the geometry says."""
    if cache_length(cache) != length:
        raise RecordError(f"the cache holds {cache_length(cache)} tokens, {length} were given")
    records: list[LayerRows | LayerState] = [
        _open_chunk(record, geometry.layers[record.layer], length) for record in to_rows(cache)
    ]
    for index, parts in enumerate(geometry.states):
        if parts:
            records.append(LayerState(index, length, state_planes(index, cache.layers[index], parts)))
    return records


def _open_chunk(record: LayerRows, spec: LayerSpec, length: int) -> LayerRows:
    surplus = length // spec.chunk * spec.chunk - record.first if spec.kind is LayerKind.CHUNKED else 0
    if surplus <= 0:
        return record
    planes = tuple(replace(plane, rows=plane.rows[surplus:]) for plane in record.planes)
    return LayerRows(record.layer, planes, record.first + surplus)


def from_restored(cache: DynamicCache, geometry: Geometry, restored: Restored, length: int) -> None:
    """Fill the empty ``cache`` with the first ``length`` restored tokens; all of them, unless the
    model resumes anywhere.

    On the CPU rows are attached where they lie (their mappings live as long as the tensors); the
    first forward pass copies them. For another device they are copied once. States are copied.
    Needs a restore with ``writable=True``: pages are private, so writes stay in this process. All
    tensors are made before the cache is touched. Raises RecordError for layers that do not fit."""
    if len(restored.layers) != len(cache.layers):
        raise RecordError(f"{len(restored.layers)} layers were restored, the model has {len(cache.layers)}")
    if length != restored.usable and not geometry.resumes_anywhere:
        raise RecordError(f"state of {restored.usable} tokens was restored, which cannot be cut to {length}")
    fills = [_filler(index, geometry, layer, length) for index, layer in enumerate(restored.layers)]
    for layer, steps in zip(cache.layers, fills, strict=True):
        for step in steps:
            step(layer)
    if isinstance(cache, CountedCache):
        cache.tokens = length


def _filler(index: int, geometry: Geometry, restored: RestoredLayer, length: int) -> list[Fill]:
    spec, device = geometry.layers[index], geometry.device
    fills: list[Fill] = []
    if geometry.states[index]:  # before the rows: the library notes the dtype of a layer with the first of the two
        fills.append(state_filler(index, geometry.states[index], restored.states, device))
    if spec.row_planes:
        fills.append(_rows_filler(index, spec, restored, length, device))
    return fills


def _rows_filler(index: int, spec: LayerSpec, restored: RestoredLayer, length: int, device: torch.device) -> Fill:
    first = _first_row(spec, length)
    blocks: dict[PlaneRole, list[torch.Tensor]] = {}
    for plane in spec.row_planes:
        blocks[plane.role] = _blocks(index, restored.planes.get(plane.role), plane.role, first, length, device)
        if spec.kind is LayerKind.CHUNKED and (missing := min(first, spec.chunk - 1 - (length - first))):
            # The library counts on chunk - 1 rows. Those of closed chunks are masked out, so any finite number will do.
            zeros = torch.zeros((missing, *plane.row_shape), dtype=DTYPES[plane.format], device=device)
            blocks[plane.role].insert(0, hf_layers.library_order(plane.role, zeros))

    def fill(layer: CacheLayerMixin) -> None:
        keys, values = blocks.get(PlaneRole.KEY), blocks.get(PlaneRole.VALUE)
        if keys and values:
            layer.lazy_initialization(keys[0], values[0])
            if type(layer) is DynamicLayer and len(keys) > 1:
                BlocksLayer.attach(layer, keys, values)
            else:
                layer.keys, layer.values = _joined(PlaneRole.KEY, keys), _joined(PlaneRole.VALUE, values)
        if indexer := blocks.get(PlaneRole.INDEXER_KEY):
            layer.lazy_initialization_indexer(indexer[0])
            layer.indexer_keys = _joined(PlaneRole.INDEXER_KEY, indexer)
        if spec.window or spec.chunk:
            layer.cumulative_length = length

    return fill


def _first_row(spec: LayerSpec, length: int) -> int:
    """The first row a layer needs to go on after ``length`` tokens."""
    if spec.kind is LayerKind.CHUNKED:
        return length // spec.chunk * spec.chunk
    return max(0, length - (spec.window - 1)) if spec.window else 0


def _blocks(
    index: int, plane: RestoredPlane | None, role: PlaneRole, first: int, length: int, device: torch.device
) -> list[torch.Tensor]:
    """Consecutive tensors, as the library holds them, of rows [first, length)."""
    found: list[torch.Tensor] = []
    at = first
    if plane is None:
        raise RecordError(f"layer {index}: no plane {role.name} was restored")
    for start, rows in zip(plane.starts, plane.blocks, strict=True):
        if start <= at < start + len(rows) and at < length:
            part = torch.from_numpy(rows[at - start : length - start]).view(DTYPES[plane.format])
            found.append(hf_layers.library_order(role, part))
            at = min(length, start + len(rows))
    if at != length:
        raise RecordError(f"layer {index}: plane {role.name} holds rows [{first}, {at}), rows up to {length} were promised")
    return found if device.type == "cpu" or not found else [_joined(role, found).to(device)]


def _joined(role: PlaneRole, blocks: list[torch.Tensor]) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=hf_layers.tokens_axis(role))
