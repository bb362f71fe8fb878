"""Blocked and fp8 rows as records: the bytes a row is made of, what they may become, and whose bytes they are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import pack
from warmkv.kernels.quant.reference import decode, encode
from warmkv.kvstore.bridge import field_digests, layer_specs, on_prefix, records_of, restore_into
from warmkv.kvstore.kvcache.about import About
from warmkv.kvstore.kvcache.fingerprint import layer_tags
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.rows import PlaneRows as Rows
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, blocked, contents, feed, fill, identity_of, prompt, save, written
from warmkv.kvstore.testing.samples import mixed_identity
from warmkv.schema.errors import FormatError, RecordError, UnsupportedError
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec
from warmkv.schema.records import CLEAN, NO_FIELD

LENGTH = 70
F32, F16, Q8_2F, FP8 = RowFormat.F32, RowFormat.F16, RowFormat.Q8_2F, RowFormat.FP8
PLAIN = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=96, value_size=64, importance=False)


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def one(name: str) -> ModelPlan:
    """A layer in a mode of blocked rows, or with both sides in one format."""
    try:
        return ModelPlan((blocked(name),))
    except KeyError:
        return ModelPlan((written(PLAIN, RowFormat(name), RowFormat(name)),))


def attention(cache: ModelCache, index: int = 0) -> AttentionLayer:
    layer = cache.own[index]
    assert isinstance(layer, AttentionLayer)
    return layer


def stored(store: Store, plan: ModelPlan, length: int = LENGTH) -> Restored:
    cache, ids = made(plan), prompt(length + 1)
    fill(cache, length)
    save(store, identity_of(plan), ids[:length], cache)
    found = store.restore(identity_of(plan), ids, lineage=cache.lineage, verify=True)
    assert found.usable == length
    return found


def foreign(store: Store, spec: LayerSpec, keys: np.ndarray, values: np.ndarray) -> Restored:
    """Rows that another runtime saved."""
    identity, ids = mixed_identity(spec), prompt(len(keys) + 1)
    planes = [Rows(plane.role, plane.format, rows) for plane, rows in zip(spec.planes, (keys, values), strict=True)]
    assert store.save(identity, ids[:-1], [LayerRows(0, tuple(planes))], ack="memory").stored
    return store.restore(identity, ids)


def unchanged(cache: ModelCache, act: Callable[[], object], error: type[Exception], match: str) -> None:
    before = contents(cache), cache.lineage, cache.position
    with pytest.raises(error, match=match):
        act()
    assert before == (contents(cache), cache.lineage, cache.position)


@pytest.mark.parametrize("name", ["q8_0/q5_1", "q4_0", "q8_0/fp8", "fp8/q4_0"])
@pytest.mark.parametrize("length", [0, 1, 31, 32, 33])
def test_rows_are_spelled_head_after_head_as_ggml_has_them(name: str, length: int) -> None:
    gguf, quants = pytest.importorskip("gguf"), pytest.importorskip("gguf.quants")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    cache = made(one(name))
    layer = attention(cache)
    numbers = np.random.default_rng(length)
    k, v = (numbers.standard_normal((length, 2, size)).astype(np.float32) for size in (96, 64))
    layer.append(k, v)
    (record,) = records_of(cache, length)
    assert field_digests(cache) == ()
    for plane, format_, rows in zip(record.planes, (layer.plan.key_format, layer.plan.value_format), (k, v), strict=True):
        if format_ is FP8:
            assert plane.format is PlaneFormat.FP8_E4M3FN and plane.rows.shape == rows.shape
            wanted = rows.astype(ml_dtypes.float8_e4m3fn).tobytes()
        else:
            assert plane.format is PlaneFormat[format_.name]
            wanted = quants.quantize(rows, gguf.GGMLQuantizationType[format_.name]).tobytes() if length else b""
        assert plane.field == NO_FIELD and plane.rows.dtype == np.uint8 and plane.rows.tobytes() == wanted


def test_specs_name_the_format_of_each_side() -> None:
    planes = [
        [(plane.role.name, plane.format.name, plane.row_shape) for plane in spec.planes] for spec in layer_specs(PLANS["blocks"])
    ]
    assert planes == [
        [("KEY", "Q8_0", (2, 96)), ("VALUE", "Q5_1", (2, 64))], [("KEY", "FP8_E4M3FN", (2, 96)), ("VALUE", "Q4_0", (2, 64))]
    ]  # fmt: skip
    names = ("q8_0", "q5_1", "q4_0", "fp8", "q8_0/q5_1", "fp8/q4_0", "f16", "q8_2f")
    assert len({identity_of(one(name)).canonical() for name in names}) == len(names)


CONVERSIONS = [
    ("f32", "q8_0/q5_1"), ("q8_0/q5_1", "f32"), ("f16", "fp8"), ("fp8", "f16"), ("q8_0", "q4_0"), ("q8_0/q5_1", "q8_0/q4_0"),
    ("q5_1", "q8_2f"), ("q8_2f", "q8_0/fp8"), ("q8_0/fp8", "q8_0/fp8"),
]  # fmt: skip


@pytest.mark.parametrize("source, target", CONVERSIONS)
def test_rows_are_written_anew_where_that_is_asked_for_and_change_the_lineage(store: Store, source: str, target: str) -> None:
    original, cache, lent = made(one(source)), made(one(target)), made(one(target))
    fill(original, LENGTH)
    fill(lent, 9, seed=1)
    with stored(store, one(source)) as restored:
        if source != target:
            for restore in (restore_into, on_prefix):
                unchanged(
                    lent, lambda restore=restore: restore(lent, restored), RecordError, "layer 0 was stored as .*convert=True"
                )
        assert restore_into(cache, restored, convert=True) == LENGTH
    assert (cache.lineage == CLEAN) == (source == target)
    before, after = attention(original), attention(cache)
    for side, (ours, theirs) in enumerate(((after.keys, before.keys), (after.values, before.values))):
        if ours.format is theirs.format:
            assert planes_of(cache, side) == planes_of(original, side), "a side that fits is not written anew"
        elif not ours.format.quantised:
            for head in range(2):
                wide = np.concatenate([decode(block) for block in theirs.blocks(head)])
                (block,) = ours.blocks(head)
                assert block.codes.tobytes() == encode(wide, ours.format, keys=side == 0).codes.tobytes()
    feed(cache, 2)


def planes_of(cache: ModelCache, side: int) -> bytes:
    return records_of(cache, LENGTH)[0].planes[side].rows.tobytes()


def test_blocks_are_attended_where_they_were_mapped(store: Store) -> None:
    plan = PLANS["blocks"]
    lent, copied = made(plan), made(plan)
    with stored(store, plan) as restored:
        assert on_prefix(lent, restored) == restore_into(copied, restored) == LENGTH
        for index in range(2):
            for role, plane in zip(
                (PlaneRole.KEY, PlaneRole.VALUE), (attention(lent, index).keys, attention(lent, index).values), strict=True
            ):
                (found,) = restored.layers[index].planes[role].blocks
                (mine,) = plane.blocks(1)
                assert np.shares_memory(mine.codes, found) and not mine.codes.flags.writeable
    assert lent.memory().mapped == copied.memory().stored > 0
    for ours, theirs in zip(feed(lent, 3), feed(copied, 3), strict=True):
        np.testing.assert_allclose(np.frombuffer(ours, np.float32), np.frombuffer(theirs, np.float32), rtol=2e-5, atol=2e-5)
    assert contents(lent) == contents(copied)


VARIANTS = [PlaneFormat.FP8_E4M3FNUZ, PlaneFormat.FP8_E5M2, PlaneFormat.FP8_E5M2FNUZ]


def fp8_model(format_: PlaneFormat) -> LayerSpec:
    (spec,) = layer_specs(one("fp8"))
    return replace(spec, planes=tuple(replace(plane, format=format_) for plane in spec.planes))


@pytest.mark.parametrize("format_", VARIANTS)
@pytest.mark.parametrize("target", ["fp8", "f32", "q8_0"])
def test_another_variant_of_fp8_is_another_format_and_never_read_as_this_one(
    store: Store, format_: PlaneFormat, target: str
) -> None:
    """Read as the wrong variant every number is half, or twice, or a power of it."""
    codes = np.random.default_rng(0).integers(0, 0x78, (5, 2, 96), np.uint8)
    cache = made(one(target))
    fill(cache, 9, seed=1)
    with foreign(store, fp8_model(format_), codes, codes[..., :64]) as restored:
        assert restored.usable == 5
        for act in (
            lambda: restore_into(cache, restored), lambda: on_prefix(cache, restored),
            lambda: restore_into(cache, restored, convert=True),
        ):  # fmt: skip
            unchanged(cache, act, RecordError, f"stored as FULL: KEY {format_.name} .*read as F32, F16, .*FP8_E4M3FN alone")
    assert store.match(identity_of(one("fp8")), prompt(6)).matched == 0


def test_variants_have_namespaces_of_their_own() -> None:
    models: list[Identity] = [mixed_identity(fp8_model(format_)) for format_ in (PlaneFormat.FP8_E4M3FN, *VARIANTS)]
    assert len({model.canonical() for model in models}) == 4


@pytest.mark.parametrize("format_", [PlaneFormat.FP8_E4M3FN, *VARIANTS])
def test_every_byte_of_every_variant_comes_back_as_it_was(store: Store, format_: PlaneFormat) -> None:
    codes = np.arange(4 * 2 * 96, dtype=np.uint16).astype(np.uint8).reshape(4, 2, 96)
    assert len(np.unique(codes)) == 256
    with foreign(store, fp8_model(format_), codes, codes[..., :64]) as restored:
        plane = restored.layers[0].planes[PlaneRole.KEY]
        assert plane.format is format_ and plane.array().tobytes() == codes.tobytes()


def test_bytes_that_stand_for_nan_are_kept_as_they_are_and_never_written_anew_as_numbers(store: Store) -> None:
    codes = np.random.default_rng(0).integers(0, 0x78, (5, 2, 96), np.uint8)
    codes[3, 1, 7] = 0xFF
    cache, quantised, wide = made(one("fp8")), made(one("q8_0")), made(one("f32"))
    fill(quantised, 9, seed=1)
    with foreign(store, fp8_model(PlaneFormat.FP8_E4M3FN), codes, codes[..., :64]) as restored:
        assert restore_into(cache, restored) == 5
        unchanged(quantised, lambda: restore_into(quantised, restored, convert=True), RecordError, "head 1, row 3: NaN")
        assert restore_into(wide, restored, convert=True) == 5
    assert attention(cache).abs_max() == (np.inf, np.inf)
    assert np.argwhere(np.isnan(attention(wide).keys.blocks(1)[0].codes)).tolist() == [[3, 7]]


def test_heads_that_others_padded_to_whole_blocks_are_refused(store: Store) -> None:
    """A store keeps such rows, whatever they are; here no block is shared or padded."""
    planes = tuple(PlaneSpec(role, PlaneFormat.Q8_0, (2, 40)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    rows = np.zeros((5, 2 * 2 * 34), np.uint8)
    cache = made(ModelPlan((replace(PLAIN, key_size=40, value_size=40),)))
    with foreign(store, LayerSpec(LayerKind.FULL, planes), rows, rows) as restored:
        unchanged(
            cache,
            lambda: restore_into(cache, restored, convert=True),
            FormatError,
            "layer 0 .*heads of 40 channels: not a multiple",
        )


@pytest.mark.parametrize("name", ["q8_0/q5_1", "q4_0", "fp8"])
def test_files_of_another_runtime_have_no_such_rows(name: str) -> None:
    about = About(namespace="00", model_id="cpu:m", architecture="llama", hidden_size=192, n_heads=2)
    with pytest.raises(UnsupportedError, match="layer 0 stores .*; these files hold F32, F16 or TurboQuant"):
        layer_tags(identity_of(one(name)), about)


def test_rows_of_a_segment_are_those_of_a_plane_packed() -> None:
    cache = made(one("q8_0/q4_0"))
    fill(cache, 33)
    layer = attention(cache)
    packed = pack([layer.values.blocks(head) for head in range(2)], RowFormat.Q4_0, 64, keys=False)
    assert packed.tobytes() == records_of(cache, 33)[0].planes[1].rows.tobytes() and packed.shape == (33, 2 * 2 * 18)


@pytest.mark.parametrize("position", [1, 30, LENGTH - 1, LENGTH])
@pytest.mark.parametrize("parting", [True, False])
def test_short_of_where_rows_were_written_anew_is_another_lineage(store: Store, position: int, parting: bool) -> None:
    """Though nobody stored the tokens that were asked for: who then takes those that are stored computes them from
    rows of one format, and must not pass for who wrote them in another first."""
    plan, ids = one("f32"), prompt(LENGTH + 9)
    cache, used = made(plan), made(plan)
    with stored(store, one("f16")) as restored:
        assert restore_into(cache, restored, convert=True) == LENGTH
    save(store, identity_of(plan), ids[:LENGTH], cache)
    told = []
    for longer in (False, True):
        if longer:
            fill(cache, 9)
            save(store, identity_of(plan), ids, cache)
        query = [*ids[:position].tolist(), 60_000 if parting else int(ids[position])]
        with store.restore(identity_of(plan), query, lineage=cache.lineage) as restored:
            assert restore_into(used, restored) == position
        told.append(used.lineage == cache.lineage)
    assert told == [position == LENGTH, False]
