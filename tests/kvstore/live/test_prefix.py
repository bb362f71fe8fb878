"""A layer on rows that lie in somebody else's memory: cut where they lie, copied where they would change."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import pytest
from dumps import rows_of

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.testing import softmax_attention
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, modes
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.schema.errors import OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

MODES = [pytest.param(keys, values, id=name) for name, keys, values in modes()]
HEADS, KEY_SIZE, VALUE_SIZE = 2, 33, 8


def layer(keys: RowFormat = RowFormat.F32, values: RowFormat = RowFormat.F32, window: int = 0) -> AttentionLayer:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    return AttentionLayer(LayerPlan(kind, 4, HEADS, KEY_SIZE, VALUE_SIZE, keys, values, window=window), kernels=REFERENCE)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((count, HEADS, size)).astype(np.float32) for size in (KEY_SIZE, VALUE_SIZE))


def mapped(plane: PlaneRows, cuts: Sequence[int]) -> list[list[Block]]:
    """A plane's rows as token-major segments in read-only mappings, one for each run between ``cuts``."""
    heads: list[list[Block]] = [[] for _ in range(plane.heads)]
    whole = [plane.blocks(head) for head in range(plane.heads)]
    for first, last in zip((0, *cuts), (*cuts, len(plane)), strict=True):
        parts = []
        for name in ("codes", "scales"):
            arrays = [getattr(block, name) for (block,) in whole]
            if arrays[0] is not None:
                parts.append(_mapped(np.stack([array[first:last] for array in arrays], axis=1)))
        for head, ((block,), blocks) in enumerate(zip(whole, heads, strict=True)):
            scales = parts[1][:, head] if len(parts) > 1 else None
            blocks.append(Block(plane.format, parts[0][:, head], scales, block.field))
    return heads


def _mapped(array: np.ndarray) -> np.ndarray:
    memory = mmap.mmap(-1, max(1, array.nbytes))
    memory.write(array.tobytes())
    found = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
    found.flags.writeable = False
    return found


def on_prefix(parent: AttentionLayer, cuts: Sequence[int]) -> AttentionLayer:
    """A layer of the same plan on the parent's rows, not copied."""
    child = AttentionLayer(parent.plan, kernels=REFERENCE)
    planes = [
        PrefixRows(mapped(plane, cuts), empty)
        for plane, empty in zip((parent.keys, parent.values), child.empty_planes(), strict=True)
    ]
    child.adopt(*planes, position=parent.position, base=parent.base, importance=parent.importance.copy(), gapless=parent.gapless)
    return child


def content(found: AttentionLayer) -> list[object]:
    """Everything but where blocks are cut."""
    planes = []
    for plane in (found.keys, found.values):
        for head in range(plane.heads):
            blocks = plane.blocks(head)
            codes = np.concatenate([block.codes for block in blocks]).tobytes()
            scales = None if blocks[0].scales is None else np.concatenate([block.scales for block in blocks]).tobytes()
            fields = {None if block.field is None else block.field.tobytes() for block in blocks}
            assert len(fields) == 1
            planes.append((codes, scales, fields))
    return [found.rows, found.position, found.base, found.gapless, found.importance.tobytes(), planes]


def prefix_rows(found: AttentionLayer) -> int:
    counts = {plane.prefix_rows for plane in (found.keys, found.values) if isinstance(plane, PrefixRows)}
    assert len(counts) == 1
    return counts.pop()


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 66, 100])
def test_layer_on_a_mapped_prefix_goes_on_as_its_parent(keys: RowFormat, values: RowFormat, length: int) -> None:
    parent = layer(keys, values)
    parent.append(*rows(length))
    child = on_prefix(parent, sorted({length // 3, length // 2}))
    assert content(child) == content(parent) and prefix_rows(child) == length
    more = rows(10, seed=1)
    q = np.random.default_rng(2).standard_normal((4, KEY_SIZE)).astype(np.float32)
    for cache in (parent, child):
        cache.append(*more)
        cache.attend(q)
    # Mass is summed block after block, so that it is the same numbers, not the same bits.
    assert content(child)[5] == content(parent)[5]
    assert np.allclose(child.importance, parent.importance, rtol=1e-5, atol=1e-7)
    assert np.allclose(child.attend(q), parent.attend(q), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("window", [0, 5])
def test_segments_and_tail_answer_as_one_softmax_in_float64(window: int) -> None:
    parent, (k, v), more = layer(window=window), rows(20), rows(3, seed=1)
    parent.append(k, v)
    child = on_prefix(parent, [1, 4, 4, 18])
    child.append(*more)
    q = np.random.default_rng(2).standard_normal((4, KEY_SIZE)).astype(np.float32)
    out = child.attend(q)
    for head in range(4):
        every = [np.concatenate(parts)[:, head // 2].astype(np.float64) for parts in zip((k, v), more, strict=True)]
        want, _, _ = softmax_attention(
            q[head : head + 1].astype(np.float64), *every, KEY_SIZE**-0.5, max(0, 23 - window) if window else 0, 23, 0.0, None
        )
        assert np.abs(out[head] - want[0]).max() < 2e-6


def test_mapped_rows_are_not_copied_and_counted_apart() -> None:
    parent = layer(RowFormat.F16, RowFormat.F16)
    parent.append(*rows(30))
    child = on_prefix(parent, [10])
    stored = parent.memory().stored
    assert (child.memory().mapped, child.memory().stored, child.memory().attention) == (stored, 0, 0)
    child.append(*rows(3))
    assert child.memory().mapped == stored and child.memory().stored == stored // 10
    assert [len(block) for block in child.keys.blocks(0)] == [10, 20, 3]
    for block in child.keys.blocks(0)[:2]:
        assert not block.codes.flags.owndata and not block.codes.flags.writeable
    child.truncate_last(8)
    assert child.memory().mapped == stored * 25 // 30 and child.memory().stored == 0


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("keep", [0, 1, 9, 10, 11, 30, 31, 34])
def test_truncation_into_the_prefix_only_cuts_views(keys: RowFormat, values: RowFormat, keep: int) -> None:
    parent = layer(keys, values)
    parent.append(*rows(30))
    child = on_prefix(parent, [10])
    for cache in (parent, child):
        cache.append(*rows(5, seed=1))
        cache.truncate_last(35 - keep)
    assert content(child) == content(parent)
    assert prefix_rows(child) == min(keep, 30)
    for cache in (parent, child):
        cache.append(*rows(7, seed=2))
    assert content(child) == content(parent)


@pytest.mark.parametrize("first", [0, 1, 9, 10, 11, 29, 30, 31, 34])
def test_eviction_of_the_oldest_rows_only_cuts_views(first: int) -> None:
    parent = layer(RowFormat.Q8_2F, RowFormat.Q8_2F)
    parent.append(*rows(30))
    child = on_prefix(parent, [10])
    for cache in (parent, child):
        cache.append(*rows(5, seed=1))
        cache.keep(range(first, 35))
    assert content(child) == content(parent)
    assert prefix_rows(child) == max(0, 30 - first)


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("length", [30, 100])
def test_eviction_from_the_midst_copies_what_it_keeps(keys: RowFormat, values: RowFormat, length: int) -> None:
    parent = layer(keys, values)
    parent.append(*rows(length))
    child = on_prefix(parent, [10, 20])
    lent = [block.codes.copy() for block in child.keys.blocks(0)]
    borrowed = child.keys.blocks(0)
    kept = [0, 1, 5, 9, 10, 11, 19, 20, 28, length - 1]
    for cache in (parent, child):
        cache.keep(kept)
    assert content(child) == content(parent) and prefix_rows(child) == 0
    assert child.memory().mapped == 0 and child.memory().stored == parent.memory().stored
    assert all(before.tobytes() == block.codes.tobytes() for before, block in zip(lent, borrowed, strict=True))
    for cache in (parent, child):
        cache.append(*rows(70, seed=3))
    assert content(child) == content(parent)


@pytest.mark.parametrize("length, mapped_after", [(60, 0), (64, 0), (65, 65), (100, 100)])
def test_freeze_of_an_open_prefix_copies_it_and_a_frozen_one_stays_mapped(length: int, mapped_after: int) -> None:
    parent = layer(RowFormat.Q8_2F, RowFormat.Q8_2F)
    parent.append(*rows(length))
    child = on_prefix(parent, [20])
    assert child.keys.frozen == (length > 64)
    for cache in (parent, child):
        cache.append(*rows(10, seed=1))
    assert content(child) == content(parent)
    assert prefix_rows(child) == mapped_after
    assert child.keys.frozen and child.values.frozen


def test_field_of_a_prefix_outlives_its_rows() -> None:
    parent = layer(RowFormat.Q8_2F, RowFormat.Q8_2F)
    parent.append(*rows(70))
    child, field = on_prefix(parent, [20]), parent.keys.field.tobytes()
    child.truncate_last(70)
    assert child.keys.frozen and child.keys.field.tobytes() == field
    child.clear()
    assert not child.keys.frozen
    child.append(*rows(70))
    assert content(child)[5] == content(parent)[5]


def test_window_trims_views_of_a_prefix() -> None:
    parent = layer(window=6)
    parent.append(*rows(30))
    child = on_prefix(parent, [10, 20])
    for cache in (parent, child):
        assert cache.trim_window(2, 4) == 20
    assert content(child) == content(parent) and prefix_rows(child) == 10


def test_abs_max_and_clear_look_at_the_prefix_too() -> None:
    parent = layer()
    parent.append(*rows(30))
    child = on_prefix(parent, [10])
    assert child.abs_max() == parent.abs_max()
    child.release()
    assert (child.rows, child.position, child.memory().mapped, child.abs_max()) == (0, 0, 0, (0.0, 0.0))


def block(
    count: int, *, format_: RowFormat = RowFormat.Q8_2F, size: int = 33, groups: int = 2, field: float | None = None
) -> Block:
    scales = np.ones((count, groups), np.float32) if format_.quantised else None
    fixed = None if field is None else np.full(size, field, np.float32)
    return Block(format_, np.ones((count, size), format_.code_dtype), scales, fixed)


@pytest.mark.parametrize(
    "prefix, found",
    [
        ([[block(3)]], "1 heads"),
        ([[block(3)], [block(2)]], r"\[3, 2\] rows"),
        ([[block(3, format_=RowFormat.F16)], [block(3)]], "f16"),
        ([[block(3)], [block(3, size=40)]], "head 1, block 0"),
        ([[block(3)], [block(3, groups=1)]], "1 scales"),
        ([[block(1), block(2, field=2.0)], [block(3)]], "2 different fields"),
        ([[block(3, field=1.0)], [block(3)]], "1 of 2 heads"),
        ([[block(1, field=1.0), block(2, field=2.0)], [block(3, field=1.0)]], "different fields"),
        ([[block(3, field=0.0)], [block(3, field=1.0)]], "above 0"),
    ],
)
def test_prefix_that_does_not_fit_is_refused(prefix: list[list[Block]], found: str) -> None:
    empty = GrowingRows(RowFormat.Q8_2F, 2, 33, keys=True)
    with pytest.raises(RecordError, match=found):
        PrefixRows(prefix, empty)
    with pytest.raises(RecordError, match=found):
        empty.copied(prefix)
    assert not empty.frozen and not len(empty)


def test_tail_with_rows_is_refused() -> None:
    tail = GrowingRows(RowFormat.F32, 1, 2, keys=True)
    tail.reserve(1)
    tail.append(np.ones((1, 1, 2), np.float32))
    with pytest.raises(RecordError, match="tail of 1 rows"):
        PrefixRows([[Block(RowFormat.F32, np.ones((3, 2), np.float32))]], tail)


@pytest.mark.parametrize("change", ["append", "keep"])
def test_refused_memory_leaves_a_prefix_as_it_was(change: str) -> None:
    parent = layer(RowFormat.Q8_2F, RowFormat.Q8_2F)
    parent.append(*rows(60))
    left = 1 << 30

    def weak(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nonlocal left
        if left == 0:
            raise OutOfMemory("refused", int(np.prod(shape)) * dtype.itemsize)
        left -= 1
        return np.empty(shape, dtype)

    child = AttentionLayer(parent.plan, kernels=REFERENCE, allocate=weak)
    planes = zip((parent.keys, parent.values), child.empty_planes(), strict=True)
    child.adopt(
        *[PrefixRows(mapped(plane, [20]), empty) for plane, empty in planes],
        position=60, base=0, importance=np.zeros(60, np.float32), gapless=True,
    )  # fmt: skip
    before, refused = rows_of(child), 0
    # Ten rows cross the warm-up: the open prefix is copied and written anew, between two appends.
    for allowed in range(100):
        left = allowed
        try:
            child.append(*rows(10)) if change == "append" else child.keep([0, 5, 59])
            break
        except OutOfMemory as exc:
            assert exc.requested_bytes > 0
            assert rows_of(child) == before and prefix_rows(child) == 60
            refused += 1
    assert refused >= 5 and prefix_rows(child) == 0
