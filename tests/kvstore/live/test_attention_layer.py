"""What the layer of the source does, as its own tests assert it, with their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from warmkv.kernels.dispatch import REFERENCE, Kernels, kernels
from warmkv.kernels.errors import BackendMissing
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.testing import softmax_attention
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, modes
from warmkv.schema.errors import CannotRewind, RecordError
from warmkv.schema.identity import LayerKind

F32, Q8 = RowFormat.F32, RowFormat.Q8_2F
MODES = [pytest.param(keys, values, id=name) for name, keys, values in modes()]


@pytest.fixture(params=["reference", "fast"])
def backend(request: pytest.FixtureRequest) -> Kernels:
    try:
        return kernels(request.param)
    except BackendMissing as exc:
        pytest.skip(str(exc))


def layer(
    kv_heads: int, size: int, *, group: int = 1, keys: RowFormat = F32, values: RowFormat = F32, window: int = 0,
    alive: tuple[bool, ...] = (), scale: float = 0.0, kernels: Kernels = REFERENCE,
) -> AttentionLayer:  # fmt: skip
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    plan = LayerPlan(
        kind, kv_heads * group, kv_heads, size, size, keys, values, alive=alive, window=window, scale=scale
    )  # fmt: skip
    return AttentionLayer(plan, kernels=kernels)


def hashed(position: int, count: int, salt: int) -> np.ndarray:
    """Numbers in [-1, 1) that depend on the position alone."""
    at = np.arange(count)
    return ((position * 7919 + at * 104_729 + salt * 1_299_709) % 2003 / 1001.5 - 1.0).astype(np.float32)


def row(position: int, heads: int, size: int, salt: int) -> np.ndarray:
    return hashed(position, heads * size, salt).reshape(1, heads, size)


def constant(value: float, heads: int, size: int, rows: int = 1) -> np.ndarray:
    return np.full((rows, heads, size), value, np.float32)


def codes(found: AttentionLayer, head: int = 0, *, values: bool = False) -> np.ndarray:
    plane = found.values if values else found.keys
    return np.concatenate([block.codes for block in plane.blocks(head)])


def test_append_counts_rows_and_lays_heads_out_one_after_the_other() -> None:
    cache = layer(4, 8)
    assert cache.rows == cache.position == 0
    k = np.arange(32, dtype=np.float32).reshape(1, 4, 8)
    cache.append(k, constant(2.0, 4, 8))
    assert cache.rows == cache.position == 1
    assert codes(cache, 1).tolist() == [list(range(8, 16))]
    assert cache.memory().stored == 256
    assert cache.keys.blocks(1)[0].codes.flags.c_contiguous


def test_dead_head_stores_nothing_and_answers_zeros() -> None:
    cache = layer(2, 4, group=3, alive=(True, False))
    k, v = constant(1.0, 2, 4), constant(2.0, 2, 4)
    k[:, 1] = v[:, 1] = np.nan
    cache.append(k, v)
    cache.append(k, v)
    assert (cache.rows, cache.keys.heads) == (2, 1)
    assert cache.memory().stored == 2 * 2 * 4 * 4
    out = cache.attend(np.ones((6, 4), np.float32))
    assert out[:3].tolist() == constant(2.0, 3, 4)[0].tolist() and not out[3:].any()
    chunk = cache.attend_chunk(np.ones((2, 6, 4), np.float32))
    assert (chunk[:, :3] == 2.0).all() and not chunk[:, 3:].any()
    answer, probabilities = cache.attend_head(np.ones(4, np.float32), 4)
    assert not answer.any() and probabilities.tolist() == [0.0, 0.0]


def test_keeping_the_newest_rows_leaves_the_next_position() -> None:
    cache = layer(4, 8)
    for _ in range(8):
        cache.append(constant(1.0, 4, 8), constant(2.0, 4, 8))
    cache.keep(range(4, 8))
    assert (cache.rows, cache.position, cache.base, cache.gapless) == (4, 8, 4, True)
    assert cache.memory().stored == 4 * 2 * 4 * 8 * 4


def test_truncation_rolls_rejected_positions_back() -> None:
    cache = layer(2, 4)
    for position in range(5):
        cache.append(constant(position, 2, 4), constant(position, 2, 4))
    cache.truncate_last(2)
    assert cache.rows == cache.position == 3
    assert codes(cache)[2, 0] == 2.0


def banded(position: int, salt: int, heads: int = 2, size: int = 32) -> np.ndarray:
    """Even channels sixteen times as large as odd ones."""
    at = np.arange(heads * size)
    x = ((at * 31 + position * 17 + salt * 7 + 3) % 97) / 97 - 0.5
    return np.where(at % 2 == 0, x * 4, x * 0.25).astype(np.float32).reshape(1, heads, size)


def test_q8_attends_like_f32_within_its_grid(backend: Kernels) -> None:
    exact, q8 = layer(2, 32, kernels=backend), layer(2, 32, keys=Q8, values=Q8, kernels=backend)
    for position in range(100):
        for cache in (exact, q8):
            cache.append(banded(position, 1), banded(position, 2))
    q = (((np.arange(32) * 13 + 5) % 89) / 89 - 0.5).astype(np.float32)
    for head in range(2):
        want, want_p = exact.attend_head(q, head)
        got, got_p = q8.attend_head(q, head)
        assert np.abs(got - want).max() <= 0.03 * np.abs(want).max() + 1e-3
        assert np.abs(got_p - want_p).max() < 0.02
    assert q8.memory().stored * 3 < exact.memory().stored
    q8.truncate_last(30)
    assert q8.rows == 70
    q8.accumulate(np.arange(70, dtype=np.float32))
    q8.keep([0, 1, *range(52, 70)])
    assert q8.rows == 20 and q8.importance.tolist() == [0, 1, *range(52, 70)]
    assert np.isfinite(q8.attend_head(q, 0)[0]).all()


@pytest.mark.parametrize("keys, values", MODES)
def test_group_answers_are_those_of_single_heads_bit_for_bit(keys: RowFormat, values: RowFormat, backend: Kernels) -> None:
    cache = layer(2, 32, group=3, keys=keys, values=values, kernels=backend)
    cache.sinks = np.array([0.5, -1, 2, 0, 3, -2], np.float32)
    at = np.arange(64)
    for position in range(70):
        k = (((at * 31 + position * 17 + 3) % 97) / 97 - 0.5).astype(np.float32)
        v = (((at * 13 + position * 29 + 7) % 89) / 89 - 0.5).astype(np.float32)
        cache.append(k.reshape(1, 2, 32), v.reshape(1, 2, 32))
    q = (((np.arange(192) * 11 + 5) % 83) / 83 - 0.5).astype(np.float32).reshape(6, 32)
    out = cache.attend(q)
    each = [cache.attend_head(q[head], head) for head in range(6)]
    assert out.tobytes() == np.stack([answer for answer, _ in each]).tobytes()
    # Mass is summed for each KV head from zero, then over KV heads in order.
    mass = np.zeros(70, np.float32)
    for first in (0, 3):
        group = np.zeros(70, np.float32)
        for _, probabilities in each[first : first + 3]:
            group += probabilities
        mass += group
    assert cache.importance.tobytes() == mass.tobytes()


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("upto", [1, 2, 5, 9])
def test_sinks_are_an_explicit_column_without_a_value(upto: int, window: int, backend: Kernels) -> None:
    cache = layer(2, 8, group=3, window=window, kernels=backend)
    cache.sinks = sinks = np.array([0.7, -1.3, 2.5, 0.0, -4.0, 6.0], np.float32)
    at, ks, vs = np.arange(16), [], []
    for position in range(9):
        ks.append(((((position * 31 + at * 7 + 3) % 97) / 97 - 0.5) * 2).astype(np.float32).reshape(1, 2, 8))
        vs.append(((((position * 17 + at * 7 + 3) % 89) / 89 - 0.5) * 2).astype(np.float32).reshape(1, 2, 8))
        cache.append(ks[-1], vs[-1])
    q = ((((np.arange(48) * 11 + 5) % 83) / 83 - 0.5) * 3).astype(np.float32).reshape(6, 8)
    first = max(0, upto - window) if window else 0
    out = cache.attend(q, upto=upto)
    mass = np.zeros(9)
    for head in range(6):
        k, v = (np.concatenate(rows)[:, head // 3].astype(np.float64) for rows in (ks, vs))
        want, _, p = softmax_attention(
            q[head : head + 1].astype(np.float64), k, v, 8**-0.5, first, upto, 0.0, [float(sinks[head])]
        )
        assert np.abs(out[head] - want[0]).max() < 1e-6
        mass += p[0]
    assert np.abs(cache.importance - mass).max() < 1e-6
    assert cache.importance.sum() < 6, "sinks must absorb some mass"


@pytest.mark.parametrize("window", [1, 7, 39, 40, 41, 100])
def test_windowed_attention_is_that_over_the_masked_row(window: int, backend: Kernels) -> None:
    cache, only = layer(1, 16, group=2, window=window, kernels=backend), layer(1, 16, group=2, kernels=backend)
    r, at = np.arange(40)[:, None, None], np.arange(16)
    k = ((r * 13 + at * 5) % 29 / 29 - 0.5).astype(np.float32)
    v = ((r * 7 + at * 3) % 31 / 31 - 0.5).astype(np.float32)
    cache.append(k, v)
    only.append(k[-window:], v[-window:])
    q = (((np.arange(32) * 19) % 23) / 23 - 0.5).astype(np.float32).reshape(2, 16)
    out = cache.attend(q)
    assert out.tobytes() == only.attend(q).tobytes()
    assert cache.importance[-window:].tobytes() == only.importance.tobytes()
    assert not cache.importance[: max(0, 40 - window)].any()
    want, _, p = softmax_attention(
        q.astype(np.float64), k[:, 0].astype(np.float64), v[:, 0].astype(np.float64), 0.25, max(0, 40 - window), 40, 0.0, None
    )
    assert np.abs(out - want).max() < 1e-6 and np.abs(cache.importance - p.sum(axis=0)).max() < 1e-6


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("keys, values", MODES)
def test_chunk_attention_is_that_position_by_position(keys: RowFormat, values: RowFormat, window: int, backend: Kernels) -> None:
    one, chunked = (layer(2, 16, group=2, keys=keys, values=values, window=window, kernels=backend) for _ in range(2))
    n, q = 70, np.stack([hashed(position, 64, 3).reshape(4, 16) for position in range(70)])
    k, v = (np.concatenate([row(position, 2, 16, salt) for position in range(n)]) for salt in (1, 2))
    chunked.append(k[:60], v[:60])
    chunked.append(k[60:], v[60:])
    out = chunked.attend_chunk(q[60:])
    one.append(k, v)
    for position in range(60, n):
        want = one.attend(q[position], upto=position + 1)
        assert np.abs(out[position - 60] - want).max() <= 2e-6 * np.abs(want).max() + 1e-7
    assert np.allclose(chunked.importance, one.importance, rtol=2e-5, atol=1e-6)


def test_sinks_survive_clear() -> None:
    cache = layer(1, 4, group=2)
    given = np.array([0.5, -0.5], np.float32)
    cache.sinks = given
    cache.append(constant(1.0, 1, 4), constant(2.0, 1, 4))
    given[0] = 9.0
    cache.clear()
    assert cache.rows == 0 and cache.sinks.tolist() == [0.5, -0.5]
    assert cache.memory().weights == 8
    cache.sinks = None
    assert cache.sinks is None


def test_trim_keeps_a_contiguous_tail_within_its_bounds() -> None:
    w, slack, align = 6, 2, 4
    full, trimmed = (layer(2, 8, window=w, alive=(True, False)) for _ in range(2))
    trims = 0
    for position in range(100):
        k, v = row(position, 2, 8, 1), row(position, 2, 8, 2)
        full.append(k, v)
        trimmed.append(k, v)
        if trimmed.trim_window(slack, align):
            trims += 1
            assert w + slack <= trimmed.rows < w + slack + align
        assert trimmed.rows <= 2 * w
        assert trimmed.position == position + 1 and trimmed.base % align == 0
        assert trimmed.base + trimmed.rows == full.rows
        for values in (False, True):
            assert codes(trimmed, values=values).tobytes() == codes(full, values=values)[trimmed.base :].tobytes()
        assert len(trimmed.importance) == trimmed.rows
    assert trims > 5


def test_anchored_trim_keeps_what_a_rollback_to_the_anchor_reads() -> None:
    w, slack, align, anchor = 6, 2, 4, 40
    full, trimmed = layer(1, 4, window=w), layer(1, 4, window=w)
    for position in range(100):
        for cache in (full, trimmed):
            cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
        trimmed.trim_window(slack, align, anchor)
        assert trimmed.base + w <= anchor - slack + 1
    assert trimmed.base > 0
    back = anchor - slack
    for cache in (full, trimmed):
        cache.truncate_last(cache.position - back)
    assert trimmed.position == back and trimmed.rows >= w - 1
    for values in (False, True):
        assert codes(trimmed, values=values).tobytes() == codes(full, values=values)[trimmed.base :].tobytes()
    for position in range(back, back + 3 * w):
        trimmed.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
        trimmed.trim_window(slack, align)
    assert trimmed.rows <= 2 * w


@pytest.mark.parametrize("window, slack, align", [(40, 2, 4), (37, 5, 16), (64, 64, 64)])
@pytest.mark.parametrize("format_", [F32, Q8])
def test_trimmed_layer_answers_as_an_untrimmed_one_bit_for_bit(
    format_: RowFormat, window: int, slack: int, align: int, backend: Kernels
) -> None:
    full, trimmed = (
        layer(2, 16, group=2, keys=format_, values=format_, window=window, scale=0.3, kernels=backend) for _ in range(2)
    )
    # The specification is slow: it looks where rows were just trimmed and in between.
    every, trims = (1 if backend.name == "fast" else 7), 0
    for position in range(400):
        k, v, q = row(position, 2, 16, 3), row(position, 2, 16, 4), hashed(position, 64, 5).reshape(4, 16)
        full.append(k, v)
        trimmed.append(k, v)
        if position % every == 0 or trimmed.rows <= window + slack + align:
            assert full.attend(q).tobytes() == trimmed.attend(q).tobytes(), f"at {position}"
        trims += trimmed.trim_window(slack, align) > 0
        assert full.importance[trimmed.base :].tobytes() == trimmed.importance.tobytes(), f"at {position}"
    assert trims > 0


def test_rollback_within_the_slack_of_a_trim_is_exact(backend: Kernels) -> None:
    w = 10
    full, trimmed = (layer(1, 8, window=w, scale=0.5, kernels=backend) for _ in range(2))
    position = 0
    for round_ in range(60):
        for _ in range(3):
            for cache in (full, trimmed):
                cache.append(row(position, 1, 8, 6), row(position, 1, 8, 7))
            position += 1
        trimmed.trim_window(2, 4)
        position -= 2
        for cache in (full, trimmed):
            cache.truncate_last(2)
        assert trimmed.position == full.rows
        for _ in range(2):
            for cache in (full, trimmed):
                cache.append(row(position, 1, 8, 8 + round_), row(position, 1, 8, 9 + round_))
            position += 1
        q = row(position, 1, 8, 10)[0]
        assert full.attend(q).tobytes() == trimmed.attend(q).tobytes()
    assert trimmed.base > 0


def test_rollback_beyond_the_slack_of_a_trim_is_refused() -> None:
    cache = layer(1, 4, window=10)
    for position in range(21):
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    assert cache.trim_window(slack=2) == 9
    # At position 18 the next query sees rows 9 to 18: row 9 is the oldest stored.
    before = codes(cache).tobytes()
    for count in (4, 13):
        with pytest.raises(CannotRewind, match="window of 10"):
            cache.truncate_last(count)
    assert (cache.rows, cache.position, codes(cache).tobytes()) == (12, 21, before)
    cache.truncate_last(3)
    assert (cache.rows, cache.position, cache.base) == (9, 18, 9)
    with pytest.raises(RecordError, match="given up"):
        cache.attend(row(1, 1, 4, 3)[0])
    cache.append(row(18, 1, 4, 1), row(18, 1, 4, 2))
    assert np.isfinite(cache.attend(row(1, 1, 4, 3)[0])).all()


def test_rollback_stops_at_rows_that_were_evicted() -> None:
    cache = layer(1, 4)
    for position in range(20):
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    cache.keep(range(10, 20))
    cache.truncate_last(3)
    with pytest.raises(CannotRewind, match="newest 7 rows"):
        cache.truncate_last(8)
    cache.keep([0, 2, 5, 6])
    cache.append(row(17, 1, 4, 1), row(17, 1, 4, 2))
    assert (cache.position, cache.gapless, cache.base) == (18, False, 0)
    with pytest.raises(CannotRewind, match="newest 3 rows"):
        cache.truncate_last(4)
    cache.truncate_last(3)
    assert (cache.rows, cache.position) == (2, 15)
    with pytest.raises(CannotRewind, match="newest 0 rows"):
        cache.truncate_last(1)


def test_adopted_rows_with_gaps_cannot_be_rolled_back() -> None:
    cache, given = layer(1, 4), np.ones((3, 1, 4), np.float32)
    cache.adopt(given, given, position=9, base=0, importance=np.ones(3, np.float32), gapless=False)
    assert (cache.rows, cache.position, cache.base, cache.gapless) == (3, 9, 0, False)
    cache.append(given, given)
    with pytest.raises(CannotRewind, match="newest 3 rows"):
        cache.truncate_last(4)
    cache.truncate_last(3)
    assert (cache.rows, cache.position) == (3, 9)


def test_chunk_whose_first_query_sees_rows_that_were_given_up_is_refused() -> None:
    cache = layer(1, 4, window=10)
    for position in range(21):
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    assert cache.trim_window(slack=2) == 9 and cache.rows == 12
    q = np.ones((4, 1, 4), np.float32)
    assert np.isfinite(cache.attend_chunk(q[:3])).all()
    with pytest.raises(RecordError, match="up to row 9"):
        cache.attend_chunk(q)


def test_a_query_before_the_first_row_sees_nothing_or_what_was_given_up() -> None:
    cache = layer(1, 4, window=1)
    q = np.ones((1, 4), np.float32)
    for position in range(5):
        assert not cache.attend(q, upto=0).any()
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    assert cache.trim_window() == 4 and cache.rows == 1
    for _ in range(2):
        with pytest.raises(RecordError, match="rows before row 0 were given up"):
            cache.attend(q, upto=0)
        cache.truncate_last(min(1, cache.rows))


def test_trim_gives_nothing_up_while_a_field_is_open() -> None:
    cache = layer(1, 4, keys=Q8, window=10)
    for position in range(65):
        assert cache.trim_window(2, 4) == 0 and cache.base == 0
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    # Rows from 65 - (10 + 2) on are kept, from a multiple of 4.
    assert cache.trim_window(2, 4) == 52 and cache.rows == 13


def test_trim_gives_nothing_up_without_a_window() -> None:
    cache = layer(1, 4)
    cache.append(constant(1.0, 1, 4, 200), constant(1.0, 1, 4, 200))
    assert cache.trim_window() == 0 and cache.rows == 200


def test_generation_is_fresh_after_what_a_row_count_does_not_tell() -> None:
    cache = layer(1, 4, window=10)
    first = cache.generation
    assert layer(1, 4).generation != first
    for position in range(20):
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    assert cache.generation == first
    cache.truncate_last(2)
    assert cache.generation == first
    assert cache.trim_window(2, 4) == 0, "18 rows, no more than two windows"
    assert cache.generation == first
    for position in range(18, 21):
        cache.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    assert cache.trim_window(2, 4) > 0
    trimmed = cache.generation
    cache.clear()
    assert len({first, trimmed, cache.generation}) == 3
    assert (cache.base, cache.position, cache.plan.window) == (0, 0, 10)

    evicted = layer(1, 4)
    for position in range(12):
        evicted.append(row(position, 1, 4, 1), row(position, 1, 4, 2))
    seen = [evicted.generation]
    evicted.keep(range(12))
    assert evicted.generation == seen[-1], "an eviction that gives nothing up"
    for kept in (range(6, 12), [0, 2, 5]):
        evicted.keep(kept)
        assert evicted.generation not in seen
        seen.append(evicted.generation)
    other = layer(1, 4)
    before = other.generation
    evicted.adopt(other.keys, other.values, position=0, base=0, importance=np.zeros(0, np.float32), gapless=True)
    assert evicted.generation not in (*seen, before)


def test_generation_tells_of_the_freeze_that_rewrites_rows() -> None:
    cache = layer(1, 4, keys=Q8, values=Q8)
    first = cache.generation
    cache.append(constant(1.0, 1, 4, 64), constant(1.0, 1, 4, 64))
    assert cache.generation == first
    cache.append(constant(1.0, 1, 4), constant(1.0, 1, 4))
    assert cache.generation != first


def test_abs_max_follows_appends_truncation_and_clear() -> None:
    cache = layer(2, 4)

    def append(k: float, v: float) -> None:
        cache.append(constant(k, 2, 4), constant(v, 2, 4))

    for _ in range(4):
        append(0.5, -0.25)
    assert cache.abs_max() == (0.5, 0.25)
    cache.truncate_last(2)
    append(-9.0, 3.0)
    append(0.5, 0.25)
    assert cache.abs_max() == (9.0, 3.0), "rewritten rows are scanned again"
    append(np.nan, 0.0)
    assert cache.abs_max() == (np.inf, 3.0)
    cache.clear()
    append(1.0, 2.0)
    assert cache.abs_max() == (1.0, 2.0)
    append(4.0, 1.0)
    assert cache.abs_max_after(1, 2, 4.0, 1.0) == (4.0, 2.0)
    append(8.0, 1.0)
    assert cache.abs_max_after(0, 3, 0.0, 0.0) == (8.0, 2.0), "another start is scanned"


def test_abs_max_believes_what_it_is_told_of_rows_not_scanned() -> None:
    cache = layer(1, 4)
    cache.append(constant(1.0, 1, 4), constant(1.0, 1, 4))
    assert cache.abs_max_after(0, 1, 7.0, np.nan) == (7.0, np.inf)
    cache.truncate_last(1)
    cache.append(constant(2.0, 1, 4), constant(2.0, 1, 4))
    assert cache.abs_max_after(0, 1, 3.0, 2.0) == (3.0, 2.0), "the first rows start afresh"
    cache.truncate_last(1)
    cache.append(constant(2.0, 1, 4), constant(2.0, 1, 4))
    assert cache.abs_max() == (2.0, 2.0)


def test_abs_max_scans_rows_appended_after_a_trim() -> None:
    w = 8
    cache = layer(1, 4, window=w)
    for _ in range(2 * w + 4):
        cache.append(constant(0.5, 1, 4), constant(0.5, 1, 4))
    assert cache.abs_max() == (0.5, 0.5)
    given_up = cache.trim_window(2, 2)
    assert given_up > 0
    first_new = cache.rows
    cache.append(constant(-7.0, 1, 4), constant(6.0, 1, 4))
    for _ in range(given_up + 3):
        cache.append(constant(0.5, 1, 4), constant(0.5, 1, 4))
    assert cache.rows > 2 * w + 4 > first_new
    assert cache.abs_max() == (7.0, 6.0)


@pytest.mark.parametrize("keys, values", [(F32, Q8), (Q8, F32)])
def test_eviction_gathers_each_storage_of_mixed_modes_on_its_own(keys: RowFormat, values: RowFormat) -> None:
    cache = layer(1, 4, keys=keys, values=values)
    for position in range(80):
        cache.append(constant(position * 0.01, 1, 4), constant(position, 1, 4))
    cache.accumulate(np.arange(80, dtype=np.float32))
    before = cache.memory().stored
    # What mass-based eviction to 20 chooses: 4 sinks, 8 recent, and the 8 heaviest between.
    cache.keep([*range(4), *range(64, 80)])
    assert cache.rows == 20 and cache.memory().stored < before / 2
    out, probabilities = cache.attend_head(np.ones(4, np.float32), 0)
    assert out[0] > 30 and probabilities.shape == (20,)


def test_observed_queries_count_as_if_they_had_been_attended() -> None:
    attended, observed = layer(2, 8, group=2), layer(2, 8, group=2)
    k, v, q = (np.concatenate([row(position, 4, 8, salt) for position in range(9)]) for salt in (1, 2, 3))
    for cache in (attended, observed):
        cache.append(k[:, :2], v[:, :2])
    attended.attend_chunk(q[4:])
    observed.observe_queries(q[4:])
    assert attended.importance.any() and attended.importance.tobytes() == observed.importance.tobytes()
    before = observed.importance.copy()
    observed.attend(q[0], observe=False)
    observed.attend_chunk(q, observe=False)
    observed.attend_head(q[0, 0], 0)
    assert observed.importance.tobytes() == before.tobytes()


def test_layer_without_rows_answers_zeros(backend: Kernels) -> None:
    cache = layer(2, 4, group=2, kernels=backend)
    cache.sinks = np.ones(4, np.float32)
    nothing = np.empty((0, 2, 4), np.float32)
    cache.append(nothing, nothing)
    assert not cache.attend(np.ones((4, 4), np.float32)).any()
    assert cache.attend_chunk(np.empty((0, 4, 4), np.float32)).shape == (0, 4, 4)
    answer, probabilities = cache.attend_head(np.ones(4, np.float32), 1)
    assert not answer.any() and probabilities.shape == (0,)
    cache.append(constant(1.0, 2, 4), constant(1.0, 2, 4))
    assert not cache.attend(np.ones((4, 4), np.float32), upto=0).any()
    assert cache.abs_max() == (1.0, 1.0)


def test_threads_change_no_bit(backend: Kernels) -> None:
    answers = []
    for threads in (1, 2):
        cache = layer(2, 32, group=2, kernels=backend)
        cache.threads = threads
        k, v = (np.concatenate([row(position, 2, 32, salt) for position in range(66)]) for salt in (1, 2))
        cache.append(k, v)
        out = [cache.attend(hashed(at, 128, 5).reshape(4, 32)).tobytes() for at in range(3)]
        answers.append((out, cache.importance.tobytes()))
    assert answers[0] == answers[1]
