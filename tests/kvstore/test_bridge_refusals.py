"""What does not fit is refused with a typed error, and the cache it was meant for is as it was."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import warmkv
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import layer_specs, nystrom, on_prefix, restore_into, restoring
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, ModelPlan, NystromPlan, RingPlan, TurboQuantPlan
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.kvstore.restored import Restored, RestoredLayer, RestoredPlane
from warmkv.kvstore.rows import require_served
from warmkv.kvstore.store import Store
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt, save
from warmkv.schema.errors import FormatError, OutOfMemory, RecordError, WarmKVError
from warmkv.schema.identity import PlaneRole
from warmkv.schema.records import CLEAN

EVERYTHING = PLANS["everything"]


@pytest.fixture
def store() -> Iterator[Store]:
    opened = warmkv.open_store()
    yield opened
    opened.close()


def made(plan: ModelPlan) -> ModelCache:
    return ModelCache(plan, backend="reference")


def stored(store: Store, plan: ModelPlan, length: int = 70) -> Restored:
    cache, ids = made(plan), prompt(length + 1)
    fill(cache, length)
    save(store, identity_of(plan), ids[:length], cache)
    found = store.restore(identity_of(plan), ids, lineage=cache.lineage)
    assert found.usable == length
    return found


@pytest.fixture(scope="module")
def everything() -> Iterator[Restored]:
    """What came back of `EVERYTHING` after 70 tokens."""
    opened = warmkv.open_store()
    with stored(opened, EVERYTHING) as restored:
        yield restored
    opened.close()


def unchanged(cache: ModelCache, act: Callable[[], object], error: type[WarmKVError], match: str = "") -> None:
    """``act`` fails with ``error``, and nothing of the cache is another than before."""
    before = contents(cache), cache.lineage, [layer.generation for layer in cache.own], cache.memory()
    with pytest.raises(error, match=match):
        act()
    assert before == (contents(cache), cache.lineage, [layer.generation for layer in cache.own], cache.memory())


def with_layer(plan: ModelPlan, index: int, **changes: object) -> ModelPlan:
    layers = list(plan.layers)
    layers[index] = replace(layers[index], **changes)  # type: ignore[arg-type]
    return replace(plan, layers=tuple(layers))


OTHERS = {
    "fewer heads": with_layer(EVERYTHING, 0, heads=2, kv_heads=1),
    "a dead head": with_layer(EVERYTHING, 0, alive=(True, False)),
    "another size": with_layer(EVERYTHING, 0, value_size=8),
    "another format": with_layer(EVERYTHING, 0, key_format=RowFormat.F16),
    "no importance": with_layer(EVERYTHING, 0, importance=False),
    "another window": with_layer(EVERYTHING, 1, window=10),
    "another ring": with_layer(EVERYTHING, 2, ring=RingPlan(window=12)),
    "another state": with_layer(EVERYTHING, 3, state_size=34),
    "other landmarks": with_layer(EVERYTHING, 4, nystrom=NystromPlan(landmarks=7, window=5, sinks=2, boundary=48)),
    "another boundary": with_layer(EVERYTHING, 4, nystrom=NystromPlan(landmarks=6, window=5, sinks=2, boundary=50)),
    "a convolution of fewer channels": with_layer(EVERYTHING, 7, conv=ConvPlan(channels=12, taps=3)),
    "a convolution of fewer taps": with_layer(EVERYTHING, 7, conv=ConvPlan(channels=13, taps=2)),
    "another seed": with_layer(EVERYTHING, 8, turboquant=TurboQuantPlan(seed=43)),
    "one side plain": with_layer(EVERYTHING, 8, value_format=RowFormat.F32),
    "keys of other bits": with_layer(EVERYTHING, 8, key_format=RowFormat.TQ3),
    "shared with another": with_layer(EVERYTHING, 5, shared_with=1),
    "a layer less": ModelPlan(EVERYTHING.layers[:-1]),
    "a layer more": ModelPlan((*EVERYTHING.layers, EVERYTHING.layers[0])),
}


by_way = pytest.mark.parametrize("fill_in", [restore_into, on_prefix])


@pytest.mark.parametrize("name", OTHERS)
@by_way
def test_another_plan_is_refused(everything: Restored, name: str, fill_in: Callable[..., int]) -> None:
    cache = made(OTHERS[name])
    fill(cache, 30, seed=3)
    unchanged(cache, lambda: fill_in(cache, everything), RecordError, "layer")


class Scarce:
    """Memory that runs out after ``left`` allocations, once it is set."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> np.ndarray:  # type: ignore[type-arg]
        if self.left is not None:
            if not self.left:
                raise OutOfMemory("nothing is left", 17)
            self.left -= 1
        return allocate(shape, dtype)


@by_way
@pytest.mark.parametrize("length", [40, 70], ids=["collecting", "sealed"])
def test_memory_that_runs_out_anywhere_leaves_the_cache_as_it_was(store: Store, fill_in: Callable[..., int], length: int) -> None:
    plan = ModelPlan(tuple(layer for layer in EVERYTHING.layers if not (layer.quantised and layer.window)))
    scarce = Scarce()
    cache = ModelCache(plan, backend="reference", allocate=scarce)
    fill(cache, 33, seed=3)
    with stored(store, plan, length) as restored:
        refused = 0
        while True:
            scarce.left = refused
            try:
                unchanged(cache, lambda: fill_in(cache, restored), OutOfMemory, "nothing is left")
            except pytest.fail.Exception:
                break
            refused += 1
    assert refused >= 3 and cache.position == length


def altered(restored: Restored, layer: int, change: Callable[[RestoredLayer], RestoredLayer]) -> Restored:
    layers = list(restored.layers)
    layers[layer] = change(layers[layer])
    return replace(restored, layers=layers, _release=None)


def with_state(role: PlaneRole, rows: Callable[[np.ndarray], np.ndarray]) -> Callable[[RestoredLayer], RestoredLayer]:  # type: ignore[type-arg]
    def change(layer: RestoredLayer) -> RestoredLayer:
        plane = layer.states[role]
        return replace(layer, states={**layer.states, role: replace(plane, blocks=(rows(plane.array()),))})

    return change


def without(role: PlaneRole) -> Callable[[RestoredLayer], RestoredLayer]:
    return lambda layer: replace(
        layer,
        planes={key: plane for key, plane in layer.planes.items() if key != role},
        states={key: plane for key, plane in layer.states.items() if key != role},
    )


def with_rows(change: Callable[[RestoredPlane], RestoredPlane]) -> Callable[[RestoredLayer], RestoredLayer]:
    return lambda layer: replace(layer, planes={**layer.planes, PlaneRole.KEY: change(layer.planes[PlaneRole.KEY])})


def holed(plane: RestoredPlane) -> RestoredPlane:
    rows = plane.array()
    return replace(plane, blocks=(rows[:3], rows[4:]), starts=(0, 4), fields=plane.fields * 2)


#: Layer and what is made of what came back of it.
BROKEN: dict[str, tuple[int, Callable[[RestoredLayer], RestoredLayer]]] = {
    "no keys": (0, without(PlaneRole.KEY)),
    "no values": (1, without(PlaneRole.VALUE)),
    "no importance": (0, without(PlaneRole.IMPORTANCE)),
    "importance of fewer rows": (0, with_state(PlaneRole.IMPORTANCE, lambda rows: rows[1:])),
    "fewer keys": (0, with_rows(lambda plane: replace(plane, blocks=(plane.array()[1:],)))),
    "keys from later on": (0, with_rows(lambda plane: replace(plane, starts=(1,)))),
    "a hole between rows": (0, with_rows(lambda plane: holed(plane))),
    "keys of another shape": (1, with_rows(lambda plane: replace(plane, blocks=(plane.array()[:, :1],)))),
    "keys of another type": (1, with_rows(lambda plane: replace(plane, blocks=(plane.array().astype(np.float64),)))),
    "bytes of keys cut": (0, with_rows(lambda plane: replace(plane, blocks=(plane.array()[:, 1:],)))),
    "no field": (0, lambda layer: replace(layer, fields={})),
    "another field under its name": (0, lambda layer: replace(layer, fields={key: row * 2 for key, row in layer.fields.items()})),
    "a smaller window": (1, with_rows(lambda plane: replace(plane, blocks=(plane.array()[1:],), starts=(63,)))),
    "no ring": (2, without(PlaneRole.VALUE)),
    "a ring of fewer rows": (2, with_state(PlaneRole.KEY, lambda rows: rows[1:])),
    "no convolution": (7, without(PlaneRole.CONV)),
    "a convolution of more taps": (7, with_state(PlaneRole.CONV, lambda rows: np.concatenate([rows, rows], axis=1))),
    "a convolution turned round": (7, with_state(PlaneRole.CONV, lambda rows: rows.transpose(0, 2, 1))),
    "two convolutions": (7, with_state(PlaneRole.CONV, lambda rows: np.concatenate([rows, rows]))),
    "no rotated values": (8, without(PlaneRole.VALUE)),
    "bytes of rotated keys cut": (8, with_rows(lambda plane: replace(plane, blocks=(plane.array()[:, 2:],)))),
    "rotated keys as other numbers": (8, with_rows(lambda plane: replace(plane, blocks=(plane.array().view(np.int8),)))),
    "fewer rotated keys": (8, with_rows(lambda plane: replace(plane, blocks=(plane.array()[:-1],)))),
    "no recurrent state": (3, without(PlaneRole.RECURRENT)),
    "a recurrent state of another size": (3, with_state(PlaneRole.RECURRENT, lambda rows: rows[:, 1:])),
    "no blob": (4, without(PlaneRole.NYSTROM)),
    "a blob without its last page": (4, with_state(PlaneRole.NYSTROM, lambda rows: rows[:-1])),
    "a blob with a page more": (4, with_state(PlaneRole.NYSTROM, lambda rows: np.concatenate([rows, rows[:1] * 0]))),
    "an empty blob": (4, with_state(PlaneRole.NYSTROM, lambda rows: rows[:0])),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@by_way
def test_what_came_back_broken_is_refused(everything: Restored, name: str, fill_in: Callable[..., int]) -> None:
    cache = made(EVERYTHING)
    fill(cache, 30, seed=3)
    layer, change = BROKEN[name]
    broken = altered(everything, layer, change)
    unchanged(cache, lambda: fill_in(cache, broken), FormatError, f"layer {layer} ")
    assert restore_into(cache, everything) == 70


@pytest.mark.parametrize("length", [30, 60], ids=["collecting", "sealed"])
def test_flipped_bytes_of_a_nystroem_state_are_refused_or_are_other_numbers(length: int) -> None:
    source, cache = made(PLANS["nystroem"]), made(PLANS["nystroem"])
    fill(source, length)
    fill(cache, 25, seed=1)
    ours, theirs = cache.own[0], source.own[0]
    assert isinstance(ours, NystromLayer) and isinstance(theirs, NystromLayer) and theirs.sealed == (length == 60)
    pages = nystrom.pages(theirs)
    size = struct.unpack_from("<Q", pages.tobytes(), nystrom.HEAD.size - 8)[0]
    rng = np.random.default_rng(0)
    refused = 0
    for at in [*range(nystrom.HEAD.size + 48), *rng.integers(0, pages.size, 40).tolist(), size, pages.size - 1]:
        bad = pages.copy()
        bad.reshape(-1)[at] ^= np.uint8(1 << int(rng.integers(8)))
        before = contents(cache)
        try:
            nystrom.prepare(ours, bad, length)
        except (FormatError, RecordError):
            refused += 1
        else:
            assert nystrom.HEAD.size - 40 <= at < size, f"byte {at} was not looked at"
        assert contents(cache) == before
    assert refused > 40
    longer = pages.copy()
    longer.reshape(-1)[nystrom.HEAD.size - 8 : nystrom.HEAD.size] = np.frombuffer(struct.pack("<Q", size + 4), np.uint8)
    with pytest.raises(FormatError, match="4 bytes behind a state"):
        nystrom.prepare(ours, longer, length)
    nystrom.prepare(ours, pages, length)()
    assert contents(cache)[0] == contents(source)[0]


def test_only_a_conversion_that_was_asked_for_writes_rows_anew(store: Store) -> None:
    plain, quantised = PLANS["f32"], PLANS["q8"]
    cache, twin, source = made(quantised), made(quantised), made(plain)
    fill(cache, 20, seed=3)
    fill(twin, 70)
    fill(source, 70)
    with stored(store, plain) as restored:
        unchanged(cache, lambda: restore_into(cache, restored), RecordError, "convert=True")
        unchanged(cache, lambda: on_prefix(cache, restored), RecordError, "convert=True")
        assert restore_into(cache, restored, convert=True) == 70
        same = made(plain)
        assert restore_into(same, restored, convert=True) == 70 and same.lineage == CLEAN
    assert contents(cache) == contents(twin), "as if the rows had been appended"
    assert cache.lineage != CLEAN
    assert feed(cache, 5) == feed(twin, 5)
    with stored(store, quantised) as restored:
        back = made(plain)
        assert restore_into(back, restored, convert=True) == 70
    assert back.lineage not in (CLEAN, cache.lineage)
    ours, exact = (item.own[0] for item in (back, source))
    assert isinstance(ours, AttentionLayer) and isinstance(exact, AttentionLayer)
    codes, wanted = ours.keys.blocks(0)[0].codes, exact.keys.blocks(0)[0].codes
    np.testing.assert_allclose(codes, wanted, atol=0.05 * float(np.abs(wanted).max()))
    assert not np.array_equal(codes, wanted)


def test_conversions_of_prefixes_of_different_lengths_do_not_mix(store: Store) -> None:
    """Rows behind what was converted were never quantised."""
    source, ids = made(PLANS["q8"]), prompt(91)
    fill(source, 90)
    save(store, identity_of(PLANS["q8"]), ids[:90], source)
    found = {}
    for length in (70, 80):
        cache = made(PLANS["f32"])
        with store.restore(identity_of(PLANS["q8"]), ids[: length + 1]) as restored:
            assert restore_into(cache, restored, convert=True) == length
        fill(cache, 90 - length)
        found[cache.lineage] = contents(cache)
    (one, other) = found.values()
    assert one != other, "which is why their lineages differ"


@pytest.mark.parametrize("name", ["window f32", "importance", "dead heads"])
def test_a_conversion_changes_formats_only(store: Store, name: str) -> None:
    cache = made(PLANS["f32"])
    with stored(store, PLANS[name]) as restored:
        unchanged(cache, lambda: restore_into(cache, restored, convert=True), RecordError, "layer 0")


def test_numbers_a_format_cannot_hold_are_refused(store: Store) -> None:
    plan = PLANS["f32"]
    source, cache = made(plan), made(PLANS["q8"])
    for layer in source.own:
        assert isinstance(layer, AttentionLayer)
        rows = np.ones((9, 2, 40), np.float32)
        rows[4, 1, 2] = np.nan if layer.index else 1
        layer.append(rows, np.ones((9, 2, 7), np.float32))
    save(store, identity_of(plan), prompt(9), source)
    fill(cache, 5)
    with store.restore(identity_of(plan), prompt(10)) as restored:
        unchanged(cache, lambda: restore_into(cache, restored, convert=True), RecordError, "layer 1.*row 4")


def test_memory_that_numpy_cannot_have_is_a_typed_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["ring"]
    cache = made(plan)
    fill(cache, 20, seed=3)

    def nothing(*_: object, **__: object) -> None:
        raise MemoryError("no")

    with stored(store, plan) as restored:
        monkeypatch.setattr(restoring, "_ring", nothing)
        unchanged(cache, lambda: restore_into(cache, restored), OutOfMemory, "70 tokens")


def test_specs_of_a_plan_make_an_identity_that_is_served() -> None:
    for plan in PLANS.values():
        for gaps in (False, True):
            require_served(identity_of(plan, gaps=gaps))
            assert layer_specs(plan, gaps=gaps) == identity_of(plan, gaps=gaps).layers
