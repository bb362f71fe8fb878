"""Convolution and recurrent states of a layer: the library's numbered tensors, and planes.

A layer may hold several states of each sort, by number. One that is number 0 and alone is
stored in its own shape. Several are packed into one plane of bytes, one after the other in the
order of their numbers; the plane's parameters spell numbers, dtypes and shapes, so that another
packing is another identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from warmkv.kvstore.integrations.hf_formats import FORMATS, as_numpy
from warmkv.kvstore.restored import RestoredPlane
from warmkv.kvstore.rows import PlaneRows
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import PlaneFormat, PlaneRole, PlaneSpec

if TYPE_CHECKING:  # versions without it have no such layers
    from transformers.cache_utils import LinearAttentionLayer

_ATTRIBUTES = {PlaneRole.CONV: "conv_states", PlaneRole.RECURRENT: "recurrent_states"}


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's state: its number and its shape without the batch dimension."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)

    def spell(self) -> str:
        return f"{self.number} {str(self.dtype).removeprefix('torch.')} {'x'.join(map(str, self.shape))}"


#: The states of a layer by role, in the order of their numbers; empty where it has none.
StateParts = Mapping[PlaneRole, tuple[StatePart, ...]]


def state_parts(index: int, layer: LinearAttentionLayer) -> StateParts:
    """What layer ``index``, fed at least one token, holds. Raises UnsupportedError for states that
    the library would not find again."""
    found = {}
    for role in _ATTRIBUTES:
        parts = tuple(
            StatePart(number, tuple(map(int, tensor.shape[1:])), tensor.dtype) for number, tensor in _tensors(layer, role)
        )
        if parts:
            found[role] = parts
    numbers = {part.number for parts in found.values() for part in parts}
    marked = {number for number, seen in layer.has_previous_state.items() if seen}
    if numbers != marked or numbers != {part.number for part in found.get(PlaneRole.CONV, ())}:
        raise UnsupportedError(
            f"layer {index} has states {sorted(numbers)}, of which the library marks {sorted(marked)} as there; "
            "states without a convolution cannot be served until a later version"
        )
    return found


def state_specs(parts: StateParts) -> tuple[PlaneSpec, ...]:
    """One plane for each role."""
    return tuple(_spec(role, items) for role, items in parts.items())


def state_planes(index: int, layer: LinearAttentionLayer, parts: StateParts) -> tuple[PlaneRows, ...]:
    """Copies of the layer's states, each plane of one row: the library writes into them in place.

    Raises RecordError if the layer holds other states than ``parts``, as it does before its first
    token and while it records past ones."""
    planes = []
    for role, items in parts.items():
        tensors = dict(_tensors(layer, role))
        held = {(number, tuple(tensor.shape), tensor.dtype) for number, tensor in tensors.items()}
        expected = {(item.number, (1, *item.shape), item.dtype) for item in items}
        if held != expected:
            raise RecordError(f"layer {index}: {role.name} states are {_list(held)}, expected {_list(expected)}")
        spec = _spec(role, items)
        if spec.format is PlaneFormat.RAW:
            pieces = [tensors[item.number].detach().contiguous().reshape(-1).view(torch.uint8) for item in items]
            planes.append(PlaneRows(role, spec.format, as_numpy(torch.cat(pieces).unsqueeze(0))))
        else:
            planes.append(PlaneRows(role, spec.format, as_numpy(tensors[0].detach().clone())))
    return tuple(planes)


def state_filler(
    index: int, parts: StateParts, planes: Mapping[PlaneRole, RestoredPlane], device: torch.device
) -> Callable[[LinearAttentionLayer], None]:
    """What puts restored ``planes`` into an empty layer; made ready, and checked, without touching
    one. Raises RecordError for planes that do not hold ``parts``."""
    ready: dict[PlaneRole, list[tuple[int, torch.Tensor]]] = {}
    for role, items in parts.items():
        spec, plane = _spec(role, items), planes.get(role)
        if plane is None or plane.format is not spec.format or [block.shape for block in plane.blocks] != [(1, *spec.row_shape)]:
            raise RecordError(f"layer {index}: no {role.name} state of shape {spec.row_shape} was restored")
        ready[role] = [(number, tensor.to(device)) for number, tensor in _unpack(plane.blocks[0], items)]

    def fill(layer: LinearAttentionLayer) -> None:
        # The layer's own way in: it copies, remembers kernel size and device, and marks the state as there.
        for number, tensor in ready.get(PlaneRole.CONV, ()):
            layer.update_conv_state(tensor, number)
        for number, tensor in ready.get(PlaneRole.RECURRENT, ()):
            layer.update_recurrent_state(tensor, number)

    return fill


def _tensors(layer: LinearAttentionLayer, role: PlaneRole) -> list[tuple[int, torch.Tensor]]:
    held = cast(dict[int, torch.Tensor | None], getattr(layer, _ATTRIBUTES[role]))
    return [(number, tensor) for number, tensor in sorted(held.items()) if tensor is not None]


def _spec(role: PlaneRole, items: tuple[StatePart, ...]) -> PlaneSpec:
    only = items[0]
    if len(items) == 1 and only.number == 0 and only.dtype in FORMATS and 1 <= len(only.shape) <= 4:
        return PlaneSpec(role, FORMATS[only.dtype], only.shape)
    return PlaneSpec(role, PlaneFormat.RAW, (sum(item.bytes for item in items),), "; ".join(item.spell() for item in items))


def _unpack(row: np.ndarray, items: tuple[StatePart, ...]) -> list[tuple[int, torch.Tensor]]:
    """Tensors [1, *shape] by number, from one restored row [1, *row shape]."""
    if row.dtype != np.uint8:
        return [(items[0].number, torch.from_numpy(row).view(items[0].dtype))]
    found, at = [], 0
    for item in items:
        # A copy, so that it is aligned.
        piece = torch.from_numpy(row[0, at : at + item.bytes].copy())
        found.append((item.number, piece.view(item.dtype).reshape(1, *item.shape)))
        at += item.bytes
    return found


def _list(held: set[tuple[int, tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{number} {shape} {dtype}" for number, shape, dtype in sorted(held, key=str)) or "none"
