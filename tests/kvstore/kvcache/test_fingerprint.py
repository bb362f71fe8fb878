"""Fingerprints of `.kvcache` files, recomputed from identities: all that tells one model from another counts."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvcache_samples import ABOUT, CONV, HEADS, MODES, attention, file_of, identity_of, prefix_of, table

from warmkv.kvstore.kvcache import about as descriptions
from warmkv.kvstore.kvcache import fingerprint
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.testing import mixed_identity
from warmkv.kvstore.testing.samples import FULL, RECURRENT, sliding
from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, with_rotation

PROMPT = [1, 2, 3]


def about(model_id: str = "cpu:lfm", **change: Any) -> About:
    return About("", model_id, **{**ABOUT, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_the_fingerprint_is_over_the_bytes_described(mode: str) -> None:
    """Put together here once more, byte for byte."""
    tag = {"f32": b"", "f16": b"f16:", "native": b"", "turboquant": b"tq3kv-s42:"}[mode]
    head = prefix_of(mode).encode() + tag + b"lfm\0lfm2\0" + struct.pack("<QQQ", 3, 48, 6)
    expected = kvcache_file.fnv1a(head + b"\0\1\0" + struct.pack("<QQQ", HEADS, 0, HEADS))
    told = about(prefix_of(mode) + "lfm")
    identity = identity_of(mode)
    assert fingerprint.expected(identity, told, fingerprint.layer_tags(identity, told)) == expected
    fingerprint.require_model(file_of(PROMPT, mode), told, identity)
    assert file_of(PROMPT, mode).fingerprint == expected


@pytest.mark.parametrize(
    ("mode", "model_id"),
    [("f16", "cpu:f16:lfm"), ("turboquant", "cpu:tq3kv-s42:lfm"), ("f32", "cpu:lfm"), ("native", "metal:lfm")],
)
def test_a_tag_that_is_spelled_out_is_the_same(mode: str, model_id: str) -> None:
    fingerprint.require_model(file_of(PROMPT, mode), about(model_id), identity_of(mode))


def test_every_way_of_storing_rows_is_another_model() -> None:
    made = [file_of(PROMPT, mode).fingerprint for mode in MODES]
    for seed in (0, 41, 2**64 - 1):
        identity = identity_of("turboquant", seed=seed)
        made.append(fingerprint.expected(identity, about(), fingerprint.layer_tags(identity, about())))
    assert len(set(made)) == len(made)


@pytest.mark.parametrize(
    ("mode", "model_id"),
    [
        ("f32", "cpu:f16:lfm"), ("f16", "cpu:tq3kv-s42:lfm"), ("turboquant", "cpu:tq3kv-s43:lfm"),
        ("turboquant", "cpu:tq3k-s42:lfm"), ("turboquant", "cpu:tq3v-s42:lfm"),
    ],
)  # fmt: skip
def test_a_tag_that_says_otherwise_is_refused_in_words(mode: str, model_id: str) -> None:
    with pytest.raises(FormatError, match=f"of rows '{model_id.split(':')[1]}:'; identity and layers say"):
        fingerprint.require_model(file_of(PROMPT, mode), about(model_id), identity_of(mode))


@pytest.mark.parametrize(
    "change", [{"model_id": "wgpu:lfm"}, {"model_id": "cpu:lfm3"}, {"architecture": "x"}, {"hidden_size": 1}, {"n_heads": 7}]
)
def test_whatever_else_differs_is_another_model(change: dict[str, Any]) -> None:
    file = file_of(PROMPT, "turboquant")
    with pytest.raises(FormatError, match=f"the file is of model {file.fingerprint:016x}, what is said of it makes"):
        fingerprint.require_model(file, about(**change), identity_of("turboquant"))


def test_another_seed_of_the_model_is_another_model() -> None:
    with pytest.raises(FormatError, match="the file is of model"):
        fingerprint.require_model(file_of(PROMPT, "turboquant"), about(), identity_of("turboquant", seed=43))


def test_layers_of_other_kinds_are_named() -> None:
    file = file_of(PROMPT, "f32")
    with pytest.raises(FormatError, match="3 layers, the model 2"):
        fingerprint.require_model(file, about(), identity_of("f32", conv=False))
    with pytest.raises(UnsupportedError, match="layer 1 is SLIDING"):
        fingerprint.require_model(file, about(), mixed_identity(FULL, sliding(3), FULL))
    with pytest.raises(FormatError, match="layer 0 is ATTENTION in the file, CONV in the model"):
        fingerprint.require_model(file, about(), mixed_identity(CONV, FULL, FULL))
    with pytest.raises(UnsupportedError, match="layer 0 is ATTENTION in the file, TQ_KEY and TQ_VALUE in the model"):
        fingerprint.require_model(file, about(), identity_of("turboquant"))
    with pytest.raises(FormatError, match="ATTENTION, TURBOQUANT, expected one way"):
        mixed = replace(file, layers=(file.layers[0], file.layers[1], file_of(PROMPT, "turboquant").layers[2]))
        fingerprint.require_model(mixed, about(), mixed_identity(attention("f32"), CONV, attention("turboquant")))


def sides(keys: PlaneFormat, values: PlaneFormat, *seeds: int) -> LayerSpec:
    texts = [with_rotation(seed) for seed in seeds] or ["none", "none"]
    planes = zip((PlaneRole.KEY, PlaneRole.VALUE), (keys, values), ((2, 8), (2, 8)), texts, strict=True)
    return LayerSpec(LayerKind.FULL, tuple(PlaneSpec(*plane) for plane in planes))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (sides(PlaneFormat.TQ_KEY, PlaneFormat.F32, 1, 1), "TQ_KEY and F32"),
        (sides(PlaneFormat.BF16, PlaneFormat.BF16), "BF16 and BF16"),
        (sides(PlaneFormat.F32, PlaneFormat.F16), "F32 and F16"), (RECURRENT, "RECURRENT"),
        (LayerSpec(LayerKind.CONV, (PlaneSpec(PlaneRole.CONV, PlaneFormat.F16, (2, 2)),)), "one plane CONV of F32"),
        (sides(PlaneFormat.TQ_KEY, PlaneFormat.TQ_VALUE, 1, 2), "rotated by"),
    ],
)  # fmt: skip
def test_models_that_no_such_file_holds_are_refused(layer: LayerSpec, words: str) -> None:
    identity = mixed_identity(layer)
    with pytest.raises(UnsupportedError, match=words):
        fingerprint.expected(identity, about(), fingerprint.layer_tags(identity, about()))


# -- what is said of a model -------------------------------------------------------------------


def test_a_table_names_a_namespace_or_an_identity(tmp_path: Path) -> None:
    found = descriptions.read(table(tmp_path / "a.toml", "f32", namespace="ABCD"))
    assert found == About("ABCD", "cpu:lfm", "lfm2", 48, 6)
    assert descriptions.read(table(tmp_path / "b.toml", "f32", identity="m")).identity == "m"
    for wrong in ({}, {"namespace": "abcd", "identity": "m"}, {"namespace": "xyz0"}, {"identity": 3}, {"identity": "m", "n": 1}):
        with pytest.raises(FormatError, match=r"c\.toml"):
            descriptions.read(table(tmp_path / "c.toml", "f32", **wrong))
    with pytest.raises(RecordError, match="cannot be read"):
        descriptions.read(tmp_path / "nowhere.toml")


def test_an_identity_comes_from_a_file_of_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(identity_of("turboquant").canonical())
    assert descriptions.identity_in(tmp_path / "m") == identity_of("turboquant")
    for bad in (b"", b"WARMKVP\n", b"x" * 200, identity_of("f32").canonical()[:-1]):
        (tmp_path / "m").write_bytes(bad)
        with pytest.raises(FormatError):
            descriptions.identity_in(tmp_path / "m")
