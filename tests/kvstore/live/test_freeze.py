"""When the field of q8_2f is fixed, from which rows, and for how long."""

from __future__ import annotations

import numpy as np
import pytest
from dumps import bits

from warmkv.kernels.dispatch import REFERENCE
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.reference import encode, refield
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, modes
from warmkv.schema.identity import LayerKind

MODES = [pytest.param(keys, values, id=name) for name, keys, values in modes() if keys.quantised or values.quantised]


def layer(keys: RowFormat = RowFormat.Q8_2F, values: RowFormat = RowFormat.Q8_2F) -> AttentionLayer:
    return AttentionLayer(LayerPlan(LayerKind.FULL, 2, 2, 40, 24, keys, values, importance=False), kernels=REFERENCE)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple((rng.standard_normal((count, 2, size)) * np.linspace(0.1, 9, size)).astype(np.float32) for size in (40, 24))


def content(found: AttentionLayer) -> list[object]:
    """Everything but where blocks are cut."""
    planes = []
    for plane in (found.keys, found.values):
        for head in range(plane.heads):
            blocks = plane.blocks(head)
            scales = None if blocks[0].scales is None else bits(np.concatenate([block.scales for block in blocks]))
            planes.append((bits(np.concatenate([block.codes for block in blocks])), scales, bits(blocks[0].field)))
    return planes


def frozen(found: AttentionLayer) -> bool:
    """Of the quantised planes, which always agree."""
    states = {plane.frozen for plane in (found.keys, found.values) if plane.format.quantised}
    assert len(states) == 1
    return states.pop()


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 66, 200])
def test_the_65th_row_finds_the_field_fixed(keys: RowFormat, values: RowFormat, count: int) -> None:
    cache = layer(keys, values)
    cache.append(*rows(count))
    assert frozen(cache) == (count > 64)


@pytest.mark.parametrize("keys, values", MODES)
@pytest.mark.parametrize("cuts", [(63,), (64,), (65,), (1, 64), (30, 66), (63, 64, 65, 66), tuple(range(1, 100))])
def test_how_appends_are_cut_changes_no_bit(keys: RowFormat, values: RowFormat, cuts: tuple[int, ...]) -> None:
    k, v = rows(100)
    whole, pieces = layer(keys, values), layer(keys, values)
    whole.append(k, v)
    for first, last in zip((0, *cuts), (*cuts, 100), strict=True):
        pieces.append(k[first:last], v[first:last])
    assert content(pieces) == content(whole)


def test_field_is_the_rms_of_what_the_first_rows_decode_to() -> None:
    k, v = rows(100)
    cache = layer()
    cache.append(k, v)
    for plane, given in ((cache.keys, k), (cache.values, v)):
        for head in range(2):
            first = encode(np.ascontiguousarray(given[:64, head]), RowFormat.Q8_2F, keys=plane.keys)
            (block,) = plane.blocks(head)
            scales = np.repeat(first.scales, first.group, axis=1)[:, : first.size]
            decoded = first.codes.astype(np.float64) * scales
            assert np.allclose(block.field, np.sqrt((decoded**2).mean(axis=0)), rtol=1e-5)
            assert block.rows(0, 64).codes.tobytes() == refield(first).codes.tobytes()


def test_rejected_rows_leave_no_trace_in_the_field() -> None:
    k, v = rows(80)
    draft = [100 * part for part in rows(1, seed=9)]
    straight, drafted = layer(), layer()
    straight.append(k, v)
    drafted.append(k[:63], v[:63])
    drafted.append(*draft)
    drafted.truncate_last(1)
    drafted.append(k[63:64], v[63:64])
    assert not frozen(drafted)
    drafted.append(k[64:], v[64:])
    assert content(drafted) == content(straight)


def test_field_survives_rollback_below_the_warm_up() -> None:
    k, v = rows(100)
    cache = layer()
    cache.append(k[:70], v[:70])
    field = cache.keys.field.tobytes(), cache.values.field.tobytes()
    for back in (60, 0):
        cache.truncate_last(cache.rows - back)
        assert frozen(cache) and (cache.keys.field.tobytes(), cache.values.field.tobytes()) == field
        cache.append(k[back:], v[back:])
        assert (cache.keys.field.tobytes(), cache.values.field.tobytes()) == field
        # Written once and straight against the field, like every row behind the warm-up.
        (block,) = cache.keys.blocks(0)
        want = encode(np.ascontiguousarray(k[back:, 0]), RowFormat.Q8_2F, keys=True, field=block.field)
        assert block.codes[back:].tobytes() == want.codes.tobytes()


def test_field_survives_eviction_around_the_warm_up_until_clear() -> None:
    k, v = rows(130)
    cache = layer()
    cache.append(k[:65], v[:65])
    field = cache.keys.field.tobytes()
    for kept in (
        range(0, 65, 2),
        [],
    ):
        cache.keep(list(kept))
        cache.append(k[65:], v[65:])
        assert frozen(cache) and cache.keys.field.tobytes() == field
    cache.clear()
    assert not frozen(cache)
    cache.append(k, v)
    twin = layer()
    twin.append(k, v)
    assert content(cache) == content(twin)


def test_eviction_before_the_warm_up_delays_the_freeze() -> None:
    k, v = rows(130)
    cache = layer()
    cache.append(k[:64], v[:64])
    cache.keep([0, 1, *range(40, 64)])
    cache.append(k[64:102], v[64:102])
    assert cache.rows == 64 and not frozen(cache)
    cache.append(k[102:103], v[102:103])
    assert frozen(cache)
    twin = layer()
    twin.append(*(np.concatenate([part[:2], part[40:103]]) for part in (k, v)))
    assert content(cache) == content(twin)


def test_more_rows_than_the_warm_up_with_an_open_field_are_fixed_by_the_next() -> None:
    k, v = rows(101)
    given = layer()
    made = given.empty_planes()
    for plane, part in zip(made, (k, v), strict=True):
        plane.reserve(100)
        plane.append(part[:100])
    given.adopt(*made, position=100, base=0, importance=None, gapless=True)
    assert not frozen(given)
    given.append(k[100:], v[100:])
    assert frozen(given)
    (block,) = given.keys.blocks(1)
    want = refield(encode(np.ascontiguousarray(k[:100, 1]), RowFormat.Q8_2F, keys=True))
    assert block.field.tobytes() == want.field.tobytes()
    assert block.codes[:100].tobytes() == want.codes.tobytes()


def test_abs_max_is_that_of_the_rows_as_they_were_written_anew() -> None:
    k, v = (0 * part for part in rows(65))
    for part in (k, v):
        # The largest number is that of its group until another channel, small elsewhere, sets the scale.
        part[:64, :, :2] = 9.9, 0.01
        part[0, :, :2] = 10.0, 1.0
    asked, fresh = layer(), layer()
    asked.append(k[:64], v[:64])
    before = asked.abs_max()
    asked.append(k[64:], v[64:])
    fresh.append(k, v)
    assert asked.abs_max() == fresh.abs_max()
    assert all(new != old for new, old in zip(asked.abs_max(), before, strict=True))
