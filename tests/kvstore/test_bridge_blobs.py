"""TQK1 and TQV1 blobs of live layers: golden bytes out, the same rows in, everything else refused."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warmkv.kernels.turboquant.blobs import write_keys, write_values
from warmkv.kernels.turboquant.reference import encode_keys, encode_values
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kvstore.bridge import blobs_of, prepare_blobs
from warmkv.kvstore.live.evict import Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, rotated
from warmkv.schema.errors import FormatError, OutOfMemory, RecordError, WarmKVError

#: Of one row (i + 1) / 100, seed 42, layer 0, one head of 64 channels.
GOLDEN = (
    "54514b310100000040000000010000006a6dd229e20558d485916f9d19aba53bad01b52170b6bda8fb415b35",
    "545156310100000040000000010000006a6dd229e20558d485916f9d19aba53bfb41",
)
LAYER = rotated("turboquant", heads=6, kv_heads=3, key_size=40, value_size=16)


def layer_of(plan: LayerPlan, rows: int, seed: int = 0) -> AttentionLayer:
    cache = ModelCache(ModelPlan((plan,)), backend="reference")
    fill(cache, rows, seed)
    (layer,) = cache.own
    assert isinstance(layer, AttentionLayer)
    return layer


def held(layer: AttentionLayer) -> list[bytes]:
    return [
        block.codes.tobytes()
        for plane in (layer.keys, layer.values)
        for head in range(plane.heads)
        for block in plane.blocks(head)
    ]


def test_a_live_row_is_the_published_one() -> None:
    layer = layer_of(rotated("turboquant", heads=1, kv_heads=1, key_size=64, value_size=64), 0)
    row = (np.arange(1, 65, dtype=np.float32) * np.float32(0.01)).reshape(1, 1, 64)
    layer.append(row, row)
    keys, values = blobs_of(layer)
    assert (keys.hex(), values.hex()) == GOLDEN
    again = layer_of(layer.plan, 9)
    prepare_blobs(again, bytes.fromhex(GOLDEN[0]), bytes.fromhex(GOLDEN[1]))()
    assert held(again) == held(layer) and again.position == 1


@pytest.mark.parametrize("rows", [1, 2, 67])
def test_blobs_are_the_rows_whoever_holds_them(rows: int) -> None:
    """Blobs are head-major: the encoder's planes of all rows at once are their oracle."""
    cache = ModelCache(PLANS["turboquant"], backend="reference")
    twin, used = (ModelCache(PLANS["turboquant"], backend="reference") for _ in range(2))
    numbers = np.random.default_rng(rows)
    fill(used, 31, seed=3)
    for layer, target in zip(cache.own, used.own, strict=True):
        assert isinstance(layer, AttentionLayer) and isinstance(target, AttentionLayer)
        sizes = (layer.plan.key_size, layer.plan.value_size)
        k, v = (numbers.standard_normal((rows, 2, size)).astype(np.float32) for size in sizes)
        layer.append(k, v)
        seed = layer.plan.turboquant.seed if layer.plan.turboquant else 0
        expected = (
            write_keys(encode_keys(k, Rotation.of(seed, layer.index, sizes[0]))),
            write_values(encode_values(v, Rotation.of(seed, layer.index, sizes[1]))),
        )
        assert blobs_of(layer) == expected
        prepare_blobs(target, memoryview(expected[0]), memoryview(expected[1]))()
        twin_layer = twin.own[layer.index]
        assert isinstance(twin_layer, AttentionLayer)
        twin_layer.append(k, v)
    assert contents(used) == contents(cache) == contents(twin)
    assert feed(used, 4) == feed(cache, 4) == feed(twin, 4)
    assert contents(used) == contents(cache)


def test_no_rows_are_blobs_too() -> None:
    layer, used = layer_of(LAYER, 0), layer_of(LAYER, 5)
    keys, values = blobs_of(layer)
    assert (len(keys), len(values)) == (16, 16)
    prepare_blobs(used, keys, values)()
    assert (used.rows, used.position) == (0, 0)


def test_attention_that_was_drawn_is_not_in_a_file() -> None:
    layer = layer_of(replace(LAYER, importance=True), 7)
    assert layer.importance is not None and layer.importance.any()
    prepare_blobs(layer, *blobs_of(layer))()
    assert layer.importance is not None and not layer.importance.any() and layer.rows == 7


@pytest.mark.parametrize("name", ["tqk", "tqv", "tq3", "tq3k"])
def test_what_is_not_rotated_on_both_sides_has_no_blobs(name: str) -> None:
    layer = layer_of(rotated(name, heads=6, kv_heads=3, key_size=40, value_size=16), 3)
    with pytest.raises(RecordError, match=r"layer 0 \(FULL\): rows of .*, blobs are of tq_key and tq_value"):
        blobs_of(layer)
    with pytest.raises(RecordError, match="blobs are of"):
        prepare_blobs(layer, *blobs_of(layer_of(LAYER, 3)))


def test_rows_that_were_given_up_leave_no_blobs() -> None:
    cache = ModelCache(ModelPlan((LAYER,)), backend="reference", policy=Recent())
    fill(cache, 20)
    cache.evict(8)
    (layer,) = cache.own
    assert isinstance(layer, AttentionLayer)
    with pytest.raises(RecordError, match="8 rows before position 20, expected all of them"):
        blobs_of(layer)


def refused(
    layer: AttentionLayer, keys: bytes, values: bytes, error: type[WarmKVError] = FormatError, match: str | None = None
) -> None:
    before = held(layer), layer.position, layer.generation
    with pytest.raises(error, match=match):
        prepare_blobs(layer, keys, values)
    assert (held(layer), layer.position, layer.generation) == before


def test_other_heads_sizes_or_rows_are_refused() -> None:
    layer = layer_of(LAYER, 3)
    keys, values = blobs_of(layer_of(LAYER, 5))
    fewer = blobs_of(layer_of(LAYER, 4))
    heads = blobs_of(layer_of(replace(LAYER, heads=2, kv_heads=2), 5))
    sizes = blobs_of(layer_of(replace(LAYER, key_size=16, value_size=40), 5))
    for pair, match in (
        ((values, keys), "begins with b'TQV1'"), ((keys, keys), "begins with b'TQK1'"), ((keys, fewer[1]), r"\(4, 3, 16\)"),
        (heads, r"\(5, 2, 40\), expected \(5, 3, 40\)"), ((keys, heads[1]), r"\(5, 2, 16\), expected \(5, 3, 16\)"),
        (sizes, r"\(5, 3, 16\), expected \(5, 3, 40\)"), ((b"", values), "0 bytes"), ((keys, b""), "0 bytes"),
    ):  # fmt: skip
        refused(layer, *pair, match=match)
    prepare_blobs(layer, keys, values)()
    assert layer.rows == 5


def test_every_truncation_and_any_header_leaves_the_layer_as_it_was() -> None:
    layer = layer_of(LAYER, 3)
    good = blobs_of(layer_of(LAYER, 2, seed=5))
    for side in (0, 1):
        for cut in range(len(good[side])):
            pair = [*good]
            pair[side] = good[side][:cut]
            refused(layer, pair[0], pair[1])
        for at in (4, 8, 12):
            for number in (0, 1, 7, 2**31, 2**32 - 1):
                bent = bytearray(good[side])
                struct.pack_into("<I", bent, at, number)
                pair = [*good]
                pair[side] = bytes(bent)
                refused(layer, pair[0], pair[1])


def test_flipped_bits_are_refused_or_read_as_other_rows() -> None:
    """A blob has no digest: codes may be anything, lengths may not."""
    layer, dice = layer_of(LAYER, 3), random.Random(1)
    good = blobs_of(layer_of(LAYER, 2, seed=5))
    refusals = 0
    for _ in range(300):
        pair = [bytearray(blob) for blob in good]
        side = dice.randrange(2)
        pair[side][dice.randrange(len(pair[side]))] ^= 1 << dice.randrange(8)
        before = held(layer)
        try:
            prepare_blobs(layer, bytes(pair[0]), bytes(pair[1]))()
        except FormatError:
            refusals += 1
            assert held(layer) == before
        else:
            assert [*map(bytes, pair)] == [*blobs_of(layer)] and layer.position == 2
    assert 0 < refusals < 300


def test_memory_that_cannot_be_had_changes_nothing() -> None:
    left = [1000]

    def scarce(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        if not left[0]:
            raise OutOfMemory("none left", 1)
        left[0] -= 1
        return allocate(shape, dtype)

    layer = AttentionLayer(LAYER, allocate=scarce)
    numbers = np.random.default_rng(0)
    layer.append(*(numbers.standard_normal((3, 3, size)).astype(np.float32) for size in (40, 16)))
    keys, values = blobs_of(layer_of(LAYER, 50))
    for arrays in (0, 1):
        left[0] = arrays
        refused(layer, keys, values, OutOfMemory)
    left[0] = 2
    prepare_blobs(layer, keys, values)()
    assert layer.rows == 50
