"""Models and `.kvcache` files made up for tests: rows are functions of all tokens up to theirs, so that files
of prompts with a common beginning agree about it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warmkv.kvstore.testing import mixed_identity
from warmkv.schema import kvcache_file
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, with_rotation
from warmkv.schema.kvcache_file import KvFile, KvLayer, Octets, Tag
from warmkv.schema.records import AnchorKind

HEADS, DIM, TAPS, CHANNELS, SEED = 3, 16, 2, 5, 42
ABOUT = {"architecture": "lfm2", "hidden_size": 48, "n_heads": 6}
CONV = LayerSpec(LayerKind.CONV, (PlaneSpec(PlaneRole.CONV, PlaneFormat.F32, (TAPS, CHANNELS)),))
#: By mode: formats of keys and values, tag in the file, and what the model id is told apart by.
MODES = {
    "f32": (PlaneFormat.F32, PlaneFormat.F32, Tag.ATTENTION, ""),
    "f16": (PlaneFormat.F16, PlaneFormat.F16, Tag.ATTENTION_F16, "f16:"),
    "native": (PlaneFormat.F16, PlaneFormat.F16, Tag.ATTENTION, ""),
    "turboquant": (PlaneFormat.TQ_KEY, PlaneFormat.TQ_VALUE, Tag.TURBOQUANT, f"tq3kv-s{SEED}:"),
}


def attention(mode: str, seed: int = SEED) -> LayerSpec:
    keys, values, tag, _ = MODES[mode]
    parameters = with_rotation(seed) if tag == Tag.TURBOQUANT else "none"
    planes = [
        PlaneSpec(PlaneRole.KEY, keys, (HEADS, DIM), parameters),
        PlaneSpec(PlaneRole.VALUE, values, (HEADS, DIM), parameters),
    ]
    return LayerSpec(LayerKind.FULL, tuple(planes))


def identity_of(mode: str, *, conv: bool = True, seed: int = SEED) -> Identity:
    rows = attention(mode, seed)
    return mixed_identity(rows, CONV, rows) if conv else mixed_identity(rows, rows)


def prefix_of(mode: str) -> str:
    return "metal:" if mode == "native" else "cpu:"


def file_of(tokens: Sequence[int], mode: str, *, conv: bool = True, depth: int = 0, kind: int = 0, hash_: int = 0) -> KvFile:
    """What the other program would have written after ``tokens``."""
    tag = MODES[mode][2]
    kinds = (tag, Tag.CONV, tag) if conv else (tag, tag)
    layers = tuple(layer_of(tokens, index, kind_, mode) for index, kind_ in enumerate(kinds))
    heads = [0 if item == Tag.CONV else HEADS for item in kinds]
    model_id = prefix_of(mode) + MODES[mode][3] + "lfm"
    model = kvcache_file.model_fingerprint(model_id, "lfm2", 48, 6, [item == Tag.CONV for item in kinds], heads)
    return KvFile(model, np.array(tokens, "<u4"), layers, depth, AnchorKind(kind), hash_)


def layer_of(tokens: Sequence[int], index: int, tag: Tag, mode: str) -> KvLayer:
    if tag == Tag.CONV:
        return KvLayer(tag, octets(numbers(tokens, index, 0, TAPS * CHANNELS, 4)), octets(b""))
    if tag == Tag.TURBOQUANT:
        return KvLayer(tag, blob(tokens, index, b"TQK1", 3 * DIM // 8, 2), blob(tokens, index, b"TQV1", DIM // 4, 1))
    width = 4 if mode == "f32" else 2
    rows = [[numbers(tokens[: at + 1], index, side, HEADS * DIM, width) for at in range(len(tokens))] for side in (0, 1)]
    return KvLayer(tag, octets(b"".join(rows[0])), octets(b"".join(rows[1])))


def numbers(tokens: Sequence[int], *about: int) -> bytes:
    """``about`` ends with how many numbers, and of how many bytes."""
    *which, count, width = about
    digest = hashlib.blake2b(repr((list(tokens), which)).encode(), digest_size=8).digest()
    drawn = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(count)
    return drawn.astype(f"<f{width}").tobytes()


def blob(tokens: Sequence[int], index: int, magic: bytes, packed: int, norms: int) -> Octets:
    """Head after head, plane after plane: codes and signs of ``packed`` bytes a row, then float16 lengths."""
    widths = [DIM // 4, DIM // 8][: 1 + (packed > DIM // 4)]
    rows = np.stack([draw(tokens[: at + 1], index, magic) for at in range(len(tokens))])  # (rows, heads, bytes)
    parts, at = [], 0
    for width in widths:
        parts += [rows[:, head, at : at + width].tobytes() for head in range(HEADS)]
        at += width
    lengths = np.abs(rows[:, :, at : at + norms].astype("<f2")) / 16
    for number in range(norms):
        parts += [lengths[:, head, number].astype("<f2").tobytes() for head in range(HEADS)]
    return octets(magic + struct.pack("<3I", HEADS, DIM, len(tokens)) + b"".join(parts))


def draw(tokens: Sequence[int], index: int, magic: bytes) -> Any:
    digest = hashlib.blake2b(repr((list(tokens), index, magic)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).integers(0, 256, (HEADS, DIM), np.uint8)


def octets(data: bytes) -> Octets:
    return np.frombuffer(data, np.uint8)


def table(path: Path, mode: str, **more: object) -> Path:
    """The TOML file that describes the model."""
    lines = {"model_id": f"{prefix_of(mode)}lfm", **ABOUT, **more}
    path.write_text("".join(f"{name} = {value!r}\n" for name, value in lines.items() if value is not None))
    return path


def planes_of(file: KvFile) -> list[tuple[int, bytes, bytes]]:
    return [(int(layer.tag), layer.keys.tobytes(), layer.values.tobytes()) for layer in file.layers]
