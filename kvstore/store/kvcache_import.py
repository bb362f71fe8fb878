"""Import of cera's `.kvcache` files into a namespace that is there already.

Such a file names its model by id and shape only. So a sidecar, ``<file>.toml``, must say which
namespace the numbers belong to and repeat what the file's fingerprint was made of; that is made
again, from the namespace's own layers, and must be the same.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from warmkv.kvstore.rows import Array, LayerRows, LayerState, PlaneRows
from warmkv.kvstore.store import landing
from warmkv.kvstore.store.access import Access
from warmkv.kvstore.store.exporting import require_file
from warmkv.kvstore.store.index import Namespace
from warmkv.kvstore.verbs import Ack, Verbs
from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, RecordError, StoreError, TooLarge, UnknownNamespace, UnsupportedError, WarmKVError
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.kvcache_file import KvFile, KvLayer, Tag

if TYPE_CHECKING:
    from warmkv.kvstore.store.engine import Engine

SIDECAR_SUFFIX = ".toml"
MAX_SIDECAR_BYTES = 64 << 10
_TYPES: dict[str, type] = {"namespace": str, "model_id": str, "architecture": str, "hidden_size": int, "n_heads": int}
_DTYPES: dict[PlaneFormat, np.dtype[np.generic]] = {PlaneFormat.F32: np.dtype("<f4"), PlaneFormat.F16: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Whose rows a file holds: the namespace by the beginning of its key, and what of the file's
    fingerprint the namespace does not know. ``model_id`` as cera has it, prefix and tag included."""

    namespace: str
    model_id: str
    architecture: str
    hidden_size: int
    n_heads: int


@dataclass(frozen=True, slots=True)
class Imported:
    """One file makes one snapshot: entered, or there already."""

    records: int
    duplicates: int
    total_bytes: int


def parse_sidecar(text: str) -> Sidecar:
    """Raises FormatError for anything but these keys, all of them."""
    if len(text) > MAX_SIDECAR_BYTES:
        raise FormatError(f"the sidecar has more than {MAX_SIDECAR_BYTES} bytes")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # no TOML, an integer or nesting without end
        raise FormatError(f"the sidecar is not TOML: {exc}") from exc
    if set(table) != set(_TYPES) or any(type(table[name]) is not kind for name, kind in _TYPES.items()):
        raise FormatError(
            f"the sidecar has {sorted(table)}, expected {', '.join(f'{n} ({k.__name__})' for n, k in _TYPES.items())}"
        )
    found = Sidecar(**table)
    if not 4 <= len(found.namespace) <= 32 or set(found.namespace.lower()) - set("0123456789abcdef"):
        raise FormatError(f"namespace of the sidecar is {found.namespace!r:.40}, expected 4 to 32 hex digits")
    if not (0 <= found.hidden_size < 2**63 and 0 <= found.n_heads < 2**63):
        raise FormatError("hidden_size or n_heads of the sidecar is no size")
    return found


def sidecar_of(path: Path) -> Sidecar:
    """The sidecar beside a file. Raises RecordError where there is none."""
    beside = path.with_name(path.name + SIDECAR_SUFFIX)
    try:
        fd = os.open(beside, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as exc:
        raise RecordError(f"{path.name} names no weights; {beside.name} must say whose rows it holds: {exc.strerror}") from exc
    try:
        if require_file(fd, os.O_RDONLY) > MAX_SIDECAR_BYTES:
            raise FormatError(f"{beside.name} has more than {MAX_SIDECAR_BYTES} bytes")
        data = os.pread(fd, MAX_SIDECAR_BYTES, 0)
    finally:
        os.close(fd)
    try:
        return parse_sidecar(data.decode())
    except UnicodeDecodeError as exc:
        raise FormatError(f"{beside.name} is not UTF-8") from exc


def import_kvcache(engine: Engine, access: Access, fd: int, sidecar: Sidecar, *, durable: bool = False) -> Imported:
    """Save what the regular file ``fd``, borrowed, holds, with ``durable`` to the disk where there is one.

    Raises FormatError for a damaged file or one of another model, UnsupportedError for what cannot be
    taken, UnknownNamespace, TooLarge; ColdFull and Busy where the disk did not take it."""
    size, budget = require_file(fd, os.O_RDONLY), engine.warm.ledger.budget_bytes
    namespace = _namespace(engine, access, sidecar.namespace.lower())
    if size > min(budget // 2, kvcache_file.MAX_FILE_BYTES):  # it is read, then its rows are stored
        raise TooLarge(f"a file of {size} bytes does not fit twice into the warm budget of {budget} bytes")
    with landing.room(engine, max(1, size), access.uid, namespace.key):
        ack: Ack = "disk" if durable and engine.writer is not None else "memory"
        return _take(engine, access, namespace, kvcache_file.decode(_read(fd, size)), sidecar, ack)


def _take(
    engine: Engine, access: Access, namespace: Namespace, file: KvFile, sidecar: Sidecar, ack: Ack
) -> Imported:  # fmt: skip
    _check_model(file, sidecar, namespace.identity)
    if file.shift_offset:
        raise UnsupportedError(f"the rows were shifted by {file.shift_offset} positions, which no import can undo")
    length = len(file.tokens)
    pairs = zip(namespace.identity.layers, file.layers, strict=True)
    records = [_record(index, layer, found, length) for index, (layer, found) in enumerate(pairs)]
    agent = _Agent(engine.session(access.uid, every_share=access.every_share), share=namespace.share)
    try:
        anchors = [file.anchor] if file.anchor is not None else []
        saved = agent.save(namespace.identity, file.tokens, records, anchors=anchors, ack=ack)
    finally:
        agent.close()
    new = not saved.duplicate
    return Imported(int(new), int(not new), saved.sent_bytes if new else 0)


class _Agent(Verbs):
    """Saves as any user does."""

    def _failed(self, exc: WarmKVError) -> NoReturn:
        raise exc


def _namespace(engine: Engine, access: Access, digits: str) -> Namespace:
    with engine.index.changed:
        found = [item for item in access.readable(engine.index) if item.key.hex().startswith(digits) and access.writes(item)]
    if len(found) != 1:
        raise UnknownNamespace(f"namespace {digits} is the beginning of {len(found)} that you may write, expected of 1")
    return found[0]


def _read(fd: int, size: int) -> bytes:
    parts, at = [], 0
    while at < size:
        try:
            part = os.pread(fd, size - at, at)
        except OSError as exc:
            raise StoreError(f"the file cannot be read: {exc.strerror}") from exc
        if not part:
            raise FormatError(f"the file was cut while it was read: {at} of {size} bytes")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _check_model(file: KvFile, sidecar: Sidecar, identity: Identity) -> None:
    """FormatError unless the file is of the model whose namespace it is for."""
    if len(file.layers) != len(identity.layers):
        raise FormatError(f"the file has {len(file.layers)} layers, the model {len(identity.layers)}")
    convolutions = [layer.kind == LayerKind.CONV for layer in identity.layers]
    for index, layer in enumerate(identity.layers):
        if layer.kind not in (LayerKind.FULL, LayerKind.CONV):
            raise UnsupportedError(f"layer {index} is {layer.kind.name}; these files hold full attention and convolutions only")
        if convolutions[index] != (file.layers[index].tag == Tag.CONV):
            raise FormatError(f"layer {index} is {file.layers[index].tag.name} in the file, {layer.kind.name} in the model")
    heads = [
        0 if conv else _plane(layer, PlaneRole.KEY).row_shape[0]
        for conv, layer in zip(convolutions, identity.layers, strict=True)
    ]
    about = (sidecar.model_id, sidecar.architecture, sidecar.hidden_size, sidecar.n_heads)
    expected = kvcache_file.model_fingerprint(*about, convolutions, heads)
    if file.fingerprint != expected:
        raise FormatError(f"the file is of model {file.fingerprint:016x}, sidecar and namespace make {expected:016x}")


def _record(index: int, layer: LayerSpec, found: KvLayer, length: int) -> LayerRows | LayerState:
    """One layer's bytes as rows. Raises FormatError, UnsupportedError."""
    if found.tag == Tag.CONV:
        spec = _plane(layer, PlaneRole.CONV)
        return LayerState(index, length, (PlaneRows(spec.role, spec.format, _array(index, spec, found.keys, 1, found.tag)),))
    planes = ((PlaneRole.KEY, found.keys), (PlaneRole.VALUE, found.values))
    specs = [(_plane(layer, role), data) for role, data in planes]
    return LayerRows(
        index, tuple(PlaneRows(spec.role, spec.format, _array(index, spec, data, length, found.tag)) for spec, data in specs)
    )


def _array(index: int, spec: PlaneSpec, data: kvcache_file.Octets, rows: int, tag: Tag) -> Array:
    """Bytes of a plane as ``rows`` rows of its shape, without conversion."""
    dtype = _DTYPES.get(spec.format)
    if dtype is None or (tag == Tag.ATTENTION_F16 and spec.format != PlaneFormat.F16):
        raise UnsupportedError(f"layer {index} is {tag.name} in the file, {spec.format.name} in the model; nothing is converted")
    expected = rows * int(np.prod(spec.row_shape)) * dtype.itemsize
    if data.size != expected:
        where = f"layer {index}, plane {spec.role.name}"
        raise FormatError(f"{where} has {data.size} bytes, {rows} rows of {spec.format.name} {spec.row_shape} take {expected}")
    return data.view(dtype).reshape(rows, *spec.row_shape)


def _plane(layer: LayerSpec, role: PlaneRole) -> PlaneSpec:
    for spec in layer.planes:
        if spec.role == role:
            return spec
    raise UnsupportedError(f"a {layer.kind.name} layer without plane {role.name} cannot be filled from such a file")
