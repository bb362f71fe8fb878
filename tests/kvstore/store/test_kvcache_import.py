"""`.kvcache` files become records of the model they are said to be of, or are refused in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.store import Store, kvcache_import
from warmkv.kvstore.store.importing import ImportResult, import_file
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.testing import TOKENS, mixed_identity, plane_bits, save
from warmkv.kvstore.testing.samples import FULL, sliding
from warmkv.schema import ids, kvcache_file
from warmkv.schema.errors import (
    FormatError,
    RecordError,
    StoreError,
    TooLarge,
    UnknownNamespace,
    UnsupportedError,
)
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.kvcache_file import KvFile, KvLayer, Tag
from warmkv.schema.records import Anchor, AnchorKind

OpenStore = Callable[..., Store]
UID = os.getuid()
HEADS, DIM, WIDTH = 2, 4, 6
PROMPT = np.array([5, 6, 7, 8, 9], "<u4")
ABOUT = {"model_id": "cpu:lfm", "architecture": "lfm2", "hidden_size": 64, "n_heads": 8}


def attention(format_: PlaneFormat, dim: int = DIM) -> LayerSpec:
    planes = tuple(PlaneSpec(role, format_, (HEADS, dim)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    return LayerSpec(LayerKind.FULL, planes)


CONV = LayerSpec(LayerKind.CONV, (PlaneSpec(PlaneRole.CONV, PlaneFormat.F32, (3, WIDTH)),))
WIDE, HALF = (mixed_identity(attention(format_), CONV, attention(format_)) for format_ in (PlaneFormat.F32, PlaneFormat.F16))


def numbers(seed: int, dtype: str, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def file_of(tag: Tag = Tag.ATTENTION, dtype: str = "<f4", length: int = len(PROMPT)) -> KvFile:
    """What cera would write for the model, every number random."""
    layers = []
    for index, kind in enumerate((tag, Tag.CONV, tag)):
        if kind == Tag.CONV:
            layers.append(KvLayer(kind, numbers(index, "<f4", 3, WIDTH).view(np.uint8).ravel(), np.zeros(0, np.uint8)))
        else:
            parts = (numbers(10 * index + part, dtype, length, HEADS * DIM).view(np.uint8).ravel() for part in range(2))
            layers.append(KvLayer(kind, *parts))
    model_id = "cpu:f16:lfm" if tag == Tag.ATTENTION_F16 else "cpu:lfm"
    print_ = kvcache_file.model_fingerprint(model_id, "lfm2", 64, 8, [False, True, False], [HEADS, 0, HEADS])
    return KvFile(print_, PROMPT[:length], tuple(layers), 2, AnchorKind.TURN, 77)


def key_of(identity: Identity) -> str:
    return ids.namespace_key(UID, "", ids.fingerprint(identity)).hex()


@pytest.fixture
def drop(tmp_path: Path) -> Callable[..., Path]:
    """Write a file and its sidecar; where they are."""

    def write(file: KvFile | bytes, identity: Identity = WIDE, **about: Any) -> Path:
        path = tmp_path / "x.kvcache"
        path.write_bytes(file if isinstance(file, bytes) else kvcache_file.encode(file))
        lines = {"namespace": key_of(identity)[:10], **ABOUT, **about}
        text = "".join(f"{name} = {value!r}\n" for name, value in lines.items() if value is not None)
        path.with_name("x.kvcache.toml").write_text(text)
        return path

    return write


@pytest.fixture
def store(open_store_with: OpenStore) -> Store:
    """A store that knows both models."""
    opened = open_store_with()
    for identity in (WIDE, HALF):
        save(opened, identity, TOKENS)
    return opened


@pytest.mark.parametrize(
    ("identity", "tag", "dtype"),
    [(WIDE, Tag.ATTENTION, "<f4"), (HALF, Tag.ATTENTION_F16, "<f2"), (HALF, Tag.ATTENTION, "<f2")],
    ids=["f32", "f16", "native f16"],
)
def test_rows_states_and_anchor_arrive_bit_for_bit(
    store: Store, drop: Callable[..., Path], identity: Identity, tag: Tag, dtype: str
) -> None:
    path = drop(file_of(tag, dtype), identity)
    done = import_file(store.engine, path, UID)
    assert (done.records, done.duplicates, done.refused) == (1, 0, 0) and done.total_bytes > 0
    with store.restore(identity, [*PROMPT, 1], verify=True) as restored:
        assert restored.usable == len(PROMPT)
        assert restored.anchor == Anchor(len(PROMPT), AnchorKind.TURN, 2, 77)
        for index in (0, 2):
            layer = restored.layers[index]
            for part, rows in enumerate((layer.keys, layer.values)):
                assert rows.tobytes() == numbers(10 * index + part, dtype, len(PROMPT), HEADS * DIM).tobytes()
        assert plane_bits(restored.layers[1].states[PlaneRole.CONV]) == numbers(1, "<f4", 3, WIDTH).tobytes()
    assert import_file(store.engine, path, UID) == ImportResult(0, 1, 0)


@pytest.mark.parametrize("change", [{"model_id": "wgpu:lfm"}, {"architecture": "lfm3"}, {"hidden_size": 65}, {"n_heads": 4}])
def test_another_model_is_refused(store: Store, drop: Callable[..., Path], change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="the file is of model"):
        import_file(store.engine, drop(file_of(), **change), UID)
    assert store.match(WIDE, PROMPT).matched == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": None}, {"n_heads": "8"}, {"hidden_size": 1.5}, {"namespace": "zz00"}, {"namespace": "ab"}, {"more": 1},
        {"hidden_size": -1}, {"n_heads": True},
    ],
)  # fmt: skip
def test_sidecars_that_do_not_say_it_all_are_refused(
    store: Store, drop: Callable[..., Path], change: dict[str, Any]
) -> None:  # fmt: skip
    path = drop(file_of(), **{name: value for name, value in change.items() if value is not True})
    if True in change.values():
        beside = path.with_name("x.kvcache.toml")
        beside.write_text(beside.read_text().replace("n_heads = 8", "n_heads = true"))
    with pytest.raises(FormatError, match="sidecar"):
        import_file(store.engine, path, UID)


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "#" * 65537, "a."])
def test_sidecars_without_end_are_refused_as_no_toml(text: str) -> None:
    with pytest.raises(FormatError, match="sidecar"):
        kvcache_import.parse_sidecar(text)


def test_a_file_without_sidecar_is_refused(store: Store, drop: Callable[..., Path], tmp_path: Path) -> None:
    path = drop(file_of())
    beside = path.with_name("x.kvcache.toml")
    beside.rename(tmp_path / "elsewhere")
    for make in (lambda: None, lambda: beside.symlink_to(tmp_path / "elsewhere")):
        make()
        with pytest.raises(RecordError, match="names no weights"):
            import_file(store.engine, path, UID)
    beside.unlink()
    beside.write_bytes(b"\xff")
    with pytest.raises(FormatError, match="UTF-8"):
        import_file(store.engine, path, UID)
    beside.write_bytes(b"#" * (64 << 10) + b"\n")
    with pytest.raises(FormatError, match="more than"):
        import_file(store.engine, path, UID)
    beside.write_text("namespace = [")
    with pytest.raises(FormatError, match="TOML"):
        import_file(store.engine, path, UID)


def test_namespaces_of_others_are_no_target(store: Store, drop: Callable[..., Path]) -> None:
    path = drop(file_of())
    with pytest.raises(UnknownNamespace):
        import_file(store.engine, path, UID + 1)
    with pytest.raises(UnknownNamespace):
        import_file(store.engine, drop(file_of(), namespace="0" * 32), UID)


def test_a_share_may_be_written_by_its_writers_only(open_store_with: OpenStore, drop: Callable[..., Path]) -> None:
    shares = {"team": Share(frozenset({UID, UID + 1}), frozenset({UID}))}
    engine = open_store_with(shares=shares).engine
    with Store(engine, share="team") as team:
        save(team, WIDE, TOKENS)
        path = drop(file_of(), namespace=ids.namespace_key(UID, "team", ids.fingerprint(WIDE)).hex())
        with pytest.raises(UnknownNamespace):
            import_file(engine, path, UID + 1)
        assert import_file(engine, path, UID).records == 1
        assert team.match(WIDE, [*PROMPT, 1]).usable == len(PROMPT)


def test_nothing_is_converted(store: Store, drop: Callable[..., Path]) -> None:
    """Whether rows are f32 or f16 follows from how many bytes there are, or the tag."""
    for tag, dtype, identity, words in (
        (Tag.ATTENTION_F16, "<f2", WIDE, "ATTENTION_F16 of F16 in the file, F32 in the model"),
        (Tag.ATTENTION, "<f2", WIDE, "ATTENTION of F16 in the file, F32 in the model"),
        (Tag.ATTENTION, "<f4", HALF, "ATTENTION of F32 in the file, F16 in the model"),
    ):
        with pytest.raises(UnsupportedError, match=f"layer 0, plane KEY: {words}"):
            import_file(store.engine, drop(file_of(tag, dtype), identity), UID)


def test_rows_of_another_geometry_are_refused(open_store_with: OpenStore, drop: Callable[..., Path]) -> None:
    store, identity = open_store_with(), mixed_identity(attention(PlaneFormat.F32, dim=5), CONV, attention(PlaneFormat.F32))
    save(store, identity, TOKENS)
    with pytest.raises(FormatError, match=r"layer 0, plane KEY has 160 bytes, 5 rows \(2, 5\) take 100 in F16 or 200 in F32"):
        import_file(store.engine, drop(file_of(), identity), UID)


def test_shapes_that_are_not_the_models_are_refused(store: Store, drop: Callable[..., Path]) -> None:
    file = file_of()
    swapped = replace(file, layers=(file.layers[1], file.layers[0], file.layers[2]))
    for bad, words in ((replace(file, layers=file.layers[:2]), "2 layers"), (swapped, "layer 0 is CONV in the file")):
        with pytest.raises(FormatError, match=words):
            import_file(store.engine, drop(bad), UID)
    with pytest.raises(UnsupportedError, match="shifted by 3"):
        import_file(store.engine, drop(replace(file, shift_offset=3)), UID)


def test_models_with_other_layers_are_refused(open_store_with: OpenStore, drop: Callable[..., Path]) -> None:
    store, identity = open_store_with(), mixed_identity(FULL, sliding(3), FULL)
    save(store, identity, TOKENS)
    with pytest.raises(UnsupportedError, match="layer 1 is SLIDING"):
        import_file(store.engine, drop(file_of(), identity), UID)


def test_a_file_larger_than_the_budget_is_not_read(open_store_with: OpenStore, drop: Callable[..., Path]) -> None:
    store = open_store_with(warm_bytes=1 << 16)
    save(store, WIDE, TOKENS)
    path = drop(file_of())
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(TooLarge):
        import_file(store.engine, path, UID)


def test_cut_and_flipped_files_never_change_what_a_prompt_restores(store: Store, drop: Callable[..., Path]) -> None:
    """Rows have no digest in such a file: flips in them cannot be seen. Anything else is refused, or
    belongs to another prompt."""
    raw = kvcache_file.encode(file_of(length=2))
    for at in range(0, len(raw), 3):
        for bad in (raw[:at], raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :]):
            try:
                import_file(store.engine, drop(bad), UID)
            except (FormatError, UnsupportedError, RecordError, StoreError):
                pass
    assert store.match(WIDE, TOKENS).matched == len(TOKENS)
