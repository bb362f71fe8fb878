"""Layers of files as rows and back: the same numbers, and TurboQuant rows where kernels look for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kvcache_samples import CHANNELS, DIM, HEADS, MODES, TAPS, file_of, identity_of, planes_of

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import view
from warmkv.kernels.turboquant import blobs
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.kvcache import layers
from warmkv.kvstore.rows import LayerState, check_records
from warmkv.schema.errors import FormatError, UnsupportedError
from warmkv.schema.identity import Identity, PlaneRole
from warmkv.schema.kvcache_file import KvFile, KvLayer, Tag

PROMPT = [4, 5, 6, 7, 8]


def again(file: KvFile, identity: Identity) -> list[KvLayer]:
    records = layers.records_of(file, identity)
    check_records(identity, records, len(file.tokens))
    made = {}
    for record in records:
        planes = {plane.role: plane.rows for plane in record.planes}
        made[record.layer] = layers.layer_of(record.layer, identity.layers[record.layer], file.layers[record.layer].tag, planes)
    return [made[index] for index in range(len(file.layers))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_rows_become_the_same_bytes_again(mode: str, length: int) -> None:
    file, identity = file_of(PROMPT[:length], mode), identity_of(mode)
    assert planes_of(replace(file, layers=tuple(again(file, identity)))) == planes_of(file)


def test_a_row_holds_its_heads_one_after_the_other() -> None:
    """A blob has them plane by plane; counted out here by hand."""
    file = file_of(PROMPT, "turboquant")
    keys = layers.records_of(file, identity_of("turboquant"))[0].planes[0].rows
    raw, length = file.layers[0].keys.tobytes(), len(PROMPT)
    codes, signs = 16, 16 + HEADS * length * DIM // 4
    norms = signs + HEADS * length * DIM // 8
    residuals = norms + HEADS * length * 2
    for row in range(length):
        for head in range(HEADS):
            at = head * length + row
            parts = ((codes, DIM // 4), (signs, DIM // 8), (norms, 2), (residuals, 2))
            expected = b"".join(raw[base + at * width : base + (at + 1) * width] for base, width in parts)
            size = 3 * DIM // 8 + 4
            assert keys[row, head * size : (head + 1) * size].tobytes() == expected


def test_kernels_find_in_the_rows_what_is_in_the_blob() -> None:
    file = file_of(PROMPT, "turboquant")
    rows = layers.records_of(file, identity_of("turboquant"))[0].planes[0].rows
    turn = Turn(Rotation.of(42, 0, DIM), Estimator.UNBIASED)
    found = view(rows, RowFormat.TQ_KEY, HEADS, DIM, keys=True, turn=turn)
    planes = blobs.read_keys(file.layers[0].keys.tobytes())
    for head in range(HEADS):
        codes = np.asarray(found[head].codes)
        assert np.array_equal(codes[:, : DIM // 4], planes.head(head).codes)
        assert np.array_equal(np.ascontiguousarray(codes[:, -4:-2]).view("<f2")[:, 0], planes.head(head).norms)


def test_a_convolution_is_one_row() -> None:
    file = file_of(PROMPT, "f32")
    record = layers.records_of(file, identity_of("f32"))[1]
    assert isinstance(record, LayerState) and record.position == len(PROMPT)
    assert record.planes[0].rows.shape == (1, TAPS, CHANNELS)
    assert record.planes[0].rows.tobytes() == file.layers[1].keys.tobytes()


def changed(index: int, **parts: bytes) -> KvFile:
    file = file_of(PROMPT, "turboquant" if index == 3 else "f32")
    at = 0 if index == 3 else index
    found = list(file.layers)
    found[at] = replace(found[at], **{name: np.frombuffer(data, np.uint8) for name, data in parts.items()})
    return replace(file, layers=tuple(found))


@pytest.mark.parametrize(
    ("file", "mode", "words"),
    [
        (changed(0, keys=bytes(8 * len(PROMPT))), "f32", "layer 0, plane KEY has 40 bytes"),
        (changed(2, values=bytes(6 * HEADS * DIM * len(PROMPT))), "f32", "layer 2, plane VALUE has"),
        (changed(1, keys=bytes(4 * TAPS * CHANNELS + 4)), "f32", "layer 1, plane CONV has"),
        (changed(3, keys=file_of(PROMPT[:4], "turboquant").layers[0].keys.tobytes()), "turboquant", r"\(4, 3, 16\)"),
    ],
)
def test_rows_of_another_geometry_are_refused(file: KvFile, mode: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        layers.records_of(file, identity_of(mode))


@pytest.mark.parametrize("norm", [b"\x00\x7c", b"\x00\x7e", b"\x00\x80"], ids=["infinite", "no number", "negative"])
def test_lengths_that_are_none_are_refused_with_head_and_row(norm: bytes) -> None:
    raw = bytearray(file_of(PROMPT, "turboquant").layers[0].keys.tobytes())
    at = len(raw) - 2 * 2 * HEADS * len(PROMPT) + 2 * (1 * len(PROMPT) + 3)
    raw[at : at + 2] = norm
    with pytest.raises(FormatError, match="layer 0, plane KEY: TQK1, norms: .* for head 1 at row 3"):
        layers.records_of(changed(3, keys=bytes(raw)), identity_of("turboquant"))


def test_widths_are_told_and_never_converted() -> None:
    for mode, model, words in (
        ("native", "f32", "ATTENTION of F16 in the file, F32 in the model"), ("f32", "f16", "ATTENTION of F32 in the file, F16"),
        ("f16", "f32", "ATTENTION_F16 of F16 in the file, F32 in the model"), ("f32", "turboquant", "F32 in the file, TQ_KEY"),
        ("turboquant", "f32", "TURBOQUANT in the file, F32 in the model"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=f"layer 0, plane KEY: .*{words}"):
            layers.records_of(file_of(PROMPT, mode), identity_of(model))


def test_planes_that_no_blob_can_hold_are_refused() -> None:
    identity, file = identity_of("turboquant"), file_of(PROMPT, "turboquant")
    record = layers.records_of(file, identity)[0]
    planes = {plane.role: plane.rows for plane in record.planes}
    planes[PlaneRole.KEY] = planes[PlaneRole.KEY][:, :-1]
    with pytest.raises(FormatError, match="layer 0, plane KEY"):
        layers.layer_of(0, identity.layers[0], Tag.TURBOQUANT, planes)
