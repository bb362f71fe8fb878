"""cera's `.kvcache` files, version 2: FlatBuffers tables without a digest of any kind.

Everything is therefore checked by its bounds, and what the rows belong to cannot be: the
fingerprint names a model by its id and shape, not by its weights. Whoever imports must say which
model it was, and the fingerprint recomputed from that must be the same.

Files are written as the generated code of their home writes them: vectors in order, the fields of a
table from the widest to the narrowest, the last of each width first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import flatbuffers
import numpy as np
import numpy.typing as npt

from warmkv.schema import flat
from warmkv.schema.errors import FormatError, TooNewError
from warmkv.schema.generated import kvcache_generated as gen
from warmkv.schema.records import MAX_TOKENS, Anchor, AnchorKind, Tokens

SUFFIX = ".kvcache"
VERSION = 2
#: FlatBuffers offsets have 32 bits.
MAX_FILE_BYTES = (1 << 31) - 1
MAX_LAYERS = 4096
#: Magic, heads, channels of a head, rows: how blobs of TurboQuant keys and values begin.
_BLOB = struct.Struct("<4s3I")
#: By side: magic, and of one row of one head bytes for eight channels and bytes beside them.
_SIDES = (("keys", b"TQK1", 3, 4), ("values", b"TQV1", 2, 2))
_FNV_START, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_U64 = (1 << 64) - 1
Octets: TypeAlias = npt.NDArray[np.uint8]


class Tag(IntEnum):
    """What a layer's bytes are. ATTENTION has the width of its backend, f32 or f16."""

    ATTENTION = 0
    CONV = 1
    TURBOQUANT = 2
    ATTENTION_F16 = 3


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Bytes of one layer: keys and values, token-major; or a convolution buffer in ``keys``; or blobs of
    TurboQuant keys and values, head-major (docs/formats.md)."""

    tag: Tag
    keys: Octets
    values: Octets


@dataclass(frozen=True, slots=True)
class KvFile:
    """One file: the state of a model after ``tokens``. Arrays that were read are views of the
    bytes they were read from."""

    fingerprint: int
    tokens: Tokens
    layers: tuple[KvLayer, ...]
    anchor_depth: int = 0
    boundary_kind: AnchorKind = AnchorKind.UNSPECIFIED
    semantic_hash: int = 0
    shift_offset: int = 0

    @property
    def anchor(self) -> Anchor | None:
        """The named position the file was saved at, if it names one."""
        if not (self.anchor_depth or self.boundary_kind):
            return None
        return Anchor(len(self.tokens), self.boundary_kind, self.anchor_depth, self.semantic_hash)


def fnv1a(data: bytes) -> int:
    """FNV-1a of 64 bits."""
    value = _FNV_START
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & _U64
    return value


def token_hash(tokens: Tokens) -> int:
    """Second half of a file's name. Different prompts may have the same: compare the tokens."""
    return fnv1a(tokens.astype("<u4").tobytes())


def model_fingerprint(
    model_id: str, architecture: str, hidden_size: int, n_heads: int, convolutions: Sequence[bool], kv_heads: Sequence[int]
) -> int:
    """First half of a file's name: the model by its id, with the backend's prefix and tag, and its
    shape; per layer whether it is a convolution and its number of KV heads, 0 for those."""
    numbers = np.array([len(convolutions), hidden_size, n_heads, *kv_heads], "<u8")
    names = model_id.encode() + b"\0" + architecture.encode() + b"\0"
    return fnv1a(names + numbers[:3].tobytes() + bytes(map(int, convolutions)) + numbers[3:].tobytes())


def file_name(fingerprint: int, tokens: Tokens) -> str:
    return f"{fingerprint:016x}_{token_hash(tokens):016x}{SUFFIX}"


def encode(file: KvFile) -> bytes:
    """Bytes of a file. Raises FormatError for more than the format holds."""
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in file.layers) + file.tokens.nbytes
    if size > MAX_FILE_BYTES - (1 << 20) or len(file.layers) > MAX_LAYERS:
        raise FormatError(f"{size} bytes in {len(file.layers)} layers are more than a {SUFFIX} file holds")
    builder = flatbuffers.Builder(size + 4096)
    layers = [_put_layer(builder, layer) for layer in file.layers]
    gen.KvEntryStartLayersVector(builder, len(layers))
    for layer in reversed(layers):
        builder.PrependUOffsetTRelative(layer)
    listed = builder.EndVector()
    tokens = flat.put_array(builder, file.tokens, "<u4")
    gen.KvEntryStart(builder)
    gen.KvEntryAddSemanticHash(builder, file.semantic_hash)
    gen.KvEntryAddModelFingerprint(builder, file.fingerprint)
    gen.KvEntryAddShiftOffset(builder, file.shift_offset)
    gen.KvEntryAddAnchorDepth(builder, file.anchor_depth)
    gen.KvEntryAddFormatVersion(builder, VERSION)
    gen.KvEntryAddLayers(builder, listed)
    gen.KvEntryAddTokens(builder, tokens)
    gen.KvEntryAddSeqLen(builder, len(file.tokens))
    gen.KvEntryAddBoundaryKind(builder, int(file.boundary_kind))
    builder.Finish(gen.KvEntryEnd(builder))
    return bytes(builder.Output())


def _put_layer(builder: flatbuffers.Builder, layer: KvLayer) -> int:
    keys = builder.CreateNumpyVector(layer.keys)
    values = None if layer.tag == Tag.CONV else builder.CreateNumpyVector(layer.values)
    gen.KvLayerStart(builder)
    if values is not None:
        gen.KvLayerAddVData(builder, values)
    gen.KvLayerAddKData(builder, keys)
    gen.KvLayerAddTypeTag(builder, int(layer.tag))
    return int(gen.KvLayerEnd(builder))


def decode(data: bytes) -> KvFile:
    """Check and read a file; the layers' bytes are not copied. Raises FormatError, TooNewError."""
    if not 16 <= len(data) <= MAX_FILE_BYTES:
        raise FormatError(f"a {SUFFIX} file of {len(data)} bytes, expected 16 to {MAX_FILE_BYTES}")
    with flat.reading(f"{SUFFIX} file"):
        entry = gen.KvEntry.GetRootAs(data, 0)
        version = entry.FormatVersion() & 0xFF
        if version > VERSION:
            raise TooNewError(f"{SUFFIX} file of version {version}, this program reads version {VERSION}")
        if version != VERSION:
            raise FormatError(f"{SUFFIX} file of version {version}, expected {VERSION}")
        tokens = np.ascontiguousarray(flat.vector(entry.TokensAsNumpy(), "<u4"), "<u4")
        if not 0 < tokens.size <= MAX_TOKENS or entry.SeqLen() != tokens.size:
            raise FormatError(f"{tokens.size} tokens for a length of {entry.SeqLen()}, expected as many, 1 to {MAX_TOKENS}")
        count = entry.LayersLength()
        if not 0 < count <= MAX_LAYERS:
            raise FormatError(f"{count} layers, expected 1 to {MAX_LAYERS}")
        layers = tuple(_layer(index, entry.Layers(index), tokens.size) for index in range(count))
        kind = AnchorKind(entry.BoundaryKind())
        named = (entry.AnchorDepth(), kind, entry.SemanticHash(), entry.ShiftOffset())
        total_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        if total_bytes > len(data):  # vectors may lie upon each other
            raise FormatError(f"{total_bytes} bytes of layers in a file of {len(data)}")
        return KvFile(entry.ModelFingerprint(), tokens, layers, *named)


def _layer(index: int, table: gen.KvLayer, length: int) -> KvLayer:
    if table.TypeTag() not in tuple(Tag):
        raise FormatError(f"layer {index} has type {table.TypeTag()}, expected 0 to 3")
    tag = Tag(table.TypeTag())
    keys, values = (np.asarray(flat.vector(part, "u1"), np.uint8) for part in (table.KDataAsNumpy(), table.VDataAsNumpy()))
    if tag == Tag.CONV:
        if values.size or not keys.size or keys.size % 4:
            raise FormatError(f"layer {index}, a convolution, has {keys.size} and {values.size} bytes, expected f32 and none")
    elif tag == Tag.TURBOQUANT:
        _check_pair(index, (keys, values), length)
    elif not keys.size or any(part.size % (2 * length) for part in (keys, values)) or not values.size:
        raise FormatError(f"layer {index} has {keys.size} and {values.size} bytes, expected rows of {length} tokens")
    return KvLayer(tag, keys, values)


def _check_pair(index: int, blobs: Sequence[Octets], length: int) -> None:
    """FormatError unless these are TurboQuant keys and values of ``length`` rows. Counts are multiplied as
    unbounded whole numbers."""
    for blob, (side, magic, bytes_of_eight, norms) in zip(blobs, _SIDES, strict=True):
        where = f"layer {index}, TurboQuant {side}"
        if blob.size < _BLOB.size:
            raise FormatError(f"{where}: {blob.size} bytes, expected at least {_BLOB.size}")
        found, heads, channels, rows = _BLOB.unpack_from(blob.data)
        if found != magic:
            raise FormatError(f"{where}: begin with {found!r}, expected {magic!r}")
        about = f"{rows} rows of {heads} heads with {channels} channels"
        if not heads or not channels or channels % 8 or rows != length:
            raise FormatError(f"{where}: {about}, expected {length} rows of some heads, with a multiple of 8 channels")
        expected = _BLOB.size + heads * rows * (channels // 8 * bytes_of_eight + norms)
        if blob.size != expected:
            raise FormatError(f"{where}: {blob.size} bytes, {about} take {expected}")
