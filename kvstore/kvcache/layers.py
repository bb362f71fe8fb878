"""A layer's bytes in a `.kvcache` file, and the same numbers as rows of a record. Nothing is converted.

Rows of f32 and f16 and the buffers of convolutions are the same bytes in both. TurboQuant is not: a blob
has all rows of one head after the other, a record all heads of one row (docs/formats.md).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.turboquant import blobs
from warmkv.kernels.turboquant.packing import packed_bytes
from warmkv.kernels.turboquant.planes import KeyPlanes, Planes, ValuePlanes
from warmkv.kvstore.kvcache.fingerprint import plane
from warmkv.kvstore.rows import Array, LayerRows, LayerState, PlaneRows, stored_shape
from warmkv.schema.errors import FormatError, UnsupportedError
from warmkv.schema.identity import ELEMENT_BYTES, Identity, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.kvcache_file import KvFile, KvLayer, Octets, Tag

#: By bytes of an element, what rows of tag ATTENTION are.
_WIDTHS = {4: PlaneFormat.F32, 2: PlaneFormat.F16}
_SIDES: dict[PlaneFormat, type[KeyPlanes] | type[ValuePlanes]] = {
    PlaneFormat.TQ_KEY: KeyPlanes,
    PlaneFormat.TQ_VALUE: ValuePlanes,
}


def records_of(file: KvFile, identity: Identity) -> list[LayerRows | LayerState]:
    """What a save of the file's tokens takes; f32 and f16 rows are views of the file. Raises FormatError and
    UnsupportedError that name the layer and what differs."""
    pairs = zip(identity.layers, file.layers, strict=True)
    return [_record(index, layer, found, len(file.tokens)) for index, (layer, found) in enumerate(pairs)]


def layer_of(index: int, layer: LayerSpec, tag: Tag, planes: dict[PlaneRole, Array]) -> KvLayer:
    """A layer of a file, from the rows of its planes by role, token-major. Raises FormatError for rows that
    cannot be."""
    if tag == Tag.CONV:
        return KvLayer(tag, _octets(planes[PlaneRole.CONV]), np.zeros(0, np.uint8))
    found = [(plane(layer, role), planes[role]) for role in (PlaneRole.KEY, PlaneRole.VALUE)]
    if tag != Tag.TURBOQUANT:
        return KvLayer(tag, *(_octets(rows) for _, rows in found))
    return KvLayer(tag, *(_blob(index, spec, rows) for spec, rows in found))


def _record(index: int, layer: LayerSpec, found: KvLayer, length: int) -> LayerRows | LayerState:
    if found.tag == Tag.CONV:
        spec = plane(layer, PlaneRole.CONV)
        return LayerState(index, length, (PlaneRows(spec.role, spec.format, _array(index, spec, found, found.keys, 1)),))
    sides = ((plane(layer, PlaneRole.KEY), found.keys), (plane(layer, PlaneRole.VALUE), found.values))
    made = _unpacked if found.tag == Tag.TURBOQUANT else _array
    planes = (PlaneRows(spec.role, spec.format, made(index, spec, found, data, length)) for spec, data in sides)
    return LayerRows(index, tuple(planes))


def _array(index: int, spec: PlaneSpec, found: KvLayer, data: Octets, rows: int) -> Array:
    """Bytes of a plane as ``rows`` rows of its shape. Their width follows from how many there are."""
    where, elements = f"layer {index}, plane {spec.role.name}", rows * math.prod(spec.row_shape)
    width = 2 if found.tag == Tag.ATTENTION_F16 else data.size // elements
    if data.size != elements * width or width not in _WIDTHS:
        text = f"{2 * elements} in F16 or {4 * elements} in F32"
        raise FormatError(f"{where} has {data.size} bytes, {rows} rows {spec.row_shape} take {text}")
    if spec.format != _WIDTHS[width]:
        text = f"{where}: {found.tag.name} of {_WIDTHS[width].name} in the file, {spec.format.name} in the model"
        raise UnsupportedError(f"{text}; nothing is converted")
    dtype, shape = stored_shape(spec)
    assert dtype.itemsize == ELEMENT_BYTES[spec.format]
    return data.view(dtype).reshape(rows, *shape)


def _unpacked(index: int, spec: PlaneSpec, found: KvLayer, data: Octets, rows: int) -> Array:
    """A blob as rows. Raises FormatError for one with other heads, and for norms that are none."""
    where, kind = f"layer {index}, plane {spec.role.name}", _SIDES.get(spec.format)
    if kind is None:
        raise UnsupportedError(f"{where}: {found.tag.name} in the file, {spec.format.name} in the model; nothing is converted")
    try:
        read: Planes = blobs.read_keys(data.data) if kind is KeyPlanes else blobs.read_values(data.data)
    except KernelError as exc:
        raise FormatError(f"{where}: {exc}") from exc
    shape = (*read.norms.shape, read.size)
    if shape != (rows, *spec.row_shape):
        raise FormatError(f"{where} has (rows, heads, channels) {shape}, expected {(rows, *spec.row_shape)}")
    parts = [getattr(read, name) for name in kind.bits]
    heads = [part if part.ndim == 3 else np.ascontiguousarray(part)[..., None].view(np.uint8) for part in parts]
    return np.concatenate(heads, axis=2).reshape(rows, -1)


def _blob(index: int, spec: PlaneSpec, rows: Array) -> Octets:
    kind = _SIDES[spec.format]
    heads, size = math.prod(spec.row_shape[:-1]), spec.row_shape[-1]
    if rows.dtype != np.uint8 or rows.shape[1:] != (heads * kind.row_bytes(size),):
        found, expected = f"{rows.dtype} of {rows.shape[1:]}", f"{heads * kind.row_bytes(size)} bytes"
        raise FormatError(f"layer {index}, plane {spec.role.name}: a row is {found}, expected {expected}")
    split = np.ascontiguousarray(rows).reshape(len(rows), heads, kind.row_bytes(size))
    arrays: dict[str, Any] = {}
    at = 0
    for name, bits in kind.bits.items():
        width = packed_bytes(bits, size) if bits else 2
        part = np.ascontiguousarray(split[..., at : at + width])
        arrays[name], at = (part if bits else part.view("<f2")[..., 0]), at + width
    try:
        keys = kind is KeyPlanes
        made = blobs.write_keys(KeyPlanes(size, **arrays)) if keys else blobs.write_values(ValuePlanes(size, **arrays))
    except KernelError as exc:
        raise FormatError(f"layer {index}, plane {spec.role.name}: {exc}") from exc
    return np.frombuffer(made, np.uint8)


def _octets(rows: Array) -> Octets:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
