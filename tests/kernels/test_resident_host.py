"""Operations on resident planes in numpy: the bytes of records, and attention over them where they lie."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants

from warmkv.kernels.attention.reference import Attended, merge
from warmkv.kernels.dispatch import kernels
from warmkv.kernels.errors import KernelError, NotFinite
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant import reference as quant
from warmkv.kernels.resident.host import TURNABLE, HostOperations
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.rope.reference import Pairs, Rope, shift
from warmkv.kernels.testing import softmax_attention
from warmkv.kernels.turboquant import block as turned
from warmkv.kernels.turboquant.attend import REFERENCE as TURBO
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

F32, F64, U8 = npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.uint8]
TYPES = {
    RowFormat.Q8_0: GGMLQuantizationType.Q8_0, RowFormat.Q5_1: GGMLQuantizationType.Q5_1,
    RowFormat.Q4_0: GGMLQuantizationType.Q4_0,
}  # fmt: skip
HEADS, SIZE, ROWS = 3, 64, 70
SIDES = [(format_, keys) for format_ in RowFormat for keys in (True, False) if format_.stores(keys=keys)]
#: Every format on every side it has, with something else on the other.
PAIRS = [
    (RowFormat.F32, RowFormat.TQ_VALUE), (RowFormat.F16, RowFormat.Q4_0), (RowFormat.BF16, RowFormat.F32),
    (RowFormat.Q8_2F, RowFormat.Q5_1), (RowFormat.TQ_KEY, RowFormat.Q8_2F), (RowFormat.TQ3, RowFormat.F16),
    (RowFormat.Q8_0, RowFormat.FP8), (RowFormat.Q5_1, RowFormat.BF16), (RowFormat.Q4_0, RowFormat.Q8_0),
    (RowFormat.FP8, RowFormat.FP8),
]  # fmt: skip
UNTOUCHED = 0xA5
BACKENDS = ["reference", pytest.param("fast", marks=pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"))]


@pytest.fixture(params=BACKENDS)
def host(request: pytest.FixtureRequest) -> HostOperations:
    return HostOperations(kernels(request.param), threads=2)


def some(count: int, seed: int = 0, heads: int = HEADS, size: int = SIZE) -> F32:
    return np.random.default_rng(seed).standard_normal((count, heads, size)).astype(np.float32)


def plane(format_: RowFormat, *, keys: bool, rows: int = ROWS, size: int = SIZE, field: F32 | None = None) -> ResidentPlane:
    turn = Turn(Rotation.of(42, 1, size)) if format_.rotated else None
    made = ResidentPlane(format_, HEADS, size, keys, rows, None, field, turn)
    return replace(made, data=np.full(rows * made.row_bytes + TAIL_PAD, UNTOUCHED, np.uint8))


def counters(length: int, base: int = 0) -> Counters:
    return Counters(np.array([length], np.int32), np.array([base], np.int32))


def bytes_of(rows: F32, into: ResidentPlane) -> U8:
    """(n, row bytes) of rows, head after head, as others write them where others do."""
    parts: list[U8] = []
    for head in range(rows.shape[1] if len(rows) else 0):
        x = np.ascontiguousarray(rows[:, head])
        if into.format in TYPES:
            parts.append(quants.quantize(x, TYPES[into.format]).reshape(len(x), -1))
        elif into.format is RowFormat.FP8:
            parts.append(np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        elif into.format.rotated:
            assert into.turn is not None
            parts.append(turned.encode(TURBO, x[:, None], into.format, into.turn)[:, 0])
        else:
            field = None if into.field is None else into.field[head]
            block = quant.encode(x, into.format, keys=into.keys, field=field)
            scales = [] if block.scales is None else [block.scales.astype("<f4").view(np.uint8)]
            parts += [*scales, block.codes.view(np.uint8).reshape(len(x), -1)]
    return np.concatenate(parts, axis=1) if len(rows) else np.empty((0, into.row_bytes), np.uint8)


def numbers(into: ResidentPlane, bytes_: U8) -> F64:
    """What rows of a plane stand for, (n, heads, size)."""
    count, f = len(bytes_), into.format
    if not count:
        return np.empty((0, into.heads, into.size))
    each = bytes_.reshape(count, into.heads, into.row_bytes // into.heads)
    if f in TYPES:
        return np.asarray(quants.dequantize(np.ascontiguousarray(each), TYPES[f]), np.float64)
    if f is RowFormat.FP8:
        return each.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    heads = []
    for head in range(into.heads):
        row = np.ascontiguousarray(each[:, head])
        if f.rotated:
            heads.append(turned.decode(Block(f, row, turn=into.turn)))
        elif f.quantised:
            split = 4 * f.groups(into.size, keys=into.keys)
            field = None if into.field is None else into.field[head]
            scales = np.ascontiguousarray(row[:, :split]).view(np.float32)
            heads.append(quant.decode(Block(f, row[:, split:].view(np.int8), scales, field)))
        else:
            heads.append(quant.decode(Block(f, row.view(f.code_dtype))))
    return np.stack(heads, axis=1).astype(np.float64)


def attended(
    q: F32, k: F64, v: F64, scale: float, window: int, softcap: float = 0.0, sinks: F32 | None = None
) -> F64:  # fmt: skip
    """Of the newest position over rows (n, heads, size), head by head."""
    group, outs = len(q) // k.shape[1], []
    for head in range(len(q)):
        first = max(0, len(k) - window) if window else 0
        sink = None if sinks is None else [float(sinks[head])]
        own = k[:, head // group], v[:, head // group]
        with np.errstate(invalid="ignore"):  # of a sink of -inf over no rows
            outs.append(softmax_attention(q[head : head + 1].astype(np.float64), *own, scale, first, len(k), softcap, sink)[0][0])
    return np.stack(outs)


@pytest.mark.parametrize(("format_", "keys"), SIDES)
@pytest.mark.parametrize("base", [0, 96])
def test_rows_are_appended_as_the_bytes_of_a_record(host: HostOperations, format_: RowFormat, keys: bool, base: int) -> None:
    into, at, written = plane(format_, keys=keys), counters(base, base), []
    for index, count in enumerate((1, 0, 31, 1, 30, 2)):  # ends at 1, 32, 33, 63 and 65 rows
        rows = some(count, index)
        host.append(into, rows, at)
        assert at.length[0] == base + sum(map(len, written))
        written.append(bytes_of(rows, into))
        host.advance(at, count)
    whole = np.concatenate(written)
    size = whole.size
    assert (int(at.length[0]), int(at.base[0])) == (base + 65, base)
    assert np.array_equal(into.data[:size].reshape(whole.shape), whole)
    assert (into.data[size:] == UNTOUCHED).all()
    out = np.full((62, HEADS, SIZE), np.nan, np.float32)
    host.decode(into, 2, 64, out)
    np.testing.assert_allclose(out, numbers(into, whole[2:64]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("size", [64, 65])
def test_rows_of_a_frozen_field_are_stored_against_it(host: HostOperations, keys: bool, size: int) -> None:
    field = np.abs(some(1, 9, size=size)[0]) + np.float32(0.5)
    into, rows = plane(RowFormat.Q8_2F, keys=keys, size=size, field=field), some(5, 1, size=size)
    host.append(into, rows, counters(2))
    want = bytes_of(rows, into)
    assert np.array_equal(into.data[2 * into.row_bytes : 7 * into.row_bytes].reshape(want.shape), want)
    out = np.empty((5, HEADS, size), np.float32)
    host.decode(into, 2, 7, out)
    np.testing.assert_allclose(out, numbers(into, want), rtol=0, atol=2e-6)
    other = plane(RowFormat.F32, keys=not keys, size=size)
    host.append(other, some(7, 2, size=size), counters(0))
    q, seen = some(1, 5, heads=2 * HEADS, size=size)[0], np.empty((2 * HEADS, size), np.float32)
    sides = (into, other) if keys else (other, into)
    k, v = (numbers(side, side.data[2 * side.row_bytes : 7 * side.row_bytes].reshape(5, -1)) for side in sides)
    host.attend(q, *sides, counters(7), out=seen, scratch=None, scale=0.2, window=5)
    np.testing.assert_allclose(seen, attended(q, k, v, 0.2, 0), rtol=0, atol=2e-5)


def filled(host: HostOperations, format_: RowFormat, count: int, base: int, *, keys: bool) -> tuple[ResidentPlane, F64]:
    """A plane of the last rows of ``count``, from ``base`` on, and what they stand for."""
    into, rows = plane(format_, keys=keys), some(count - base, 1 + keys)
    host.append(into, rows, counters(base, base))
    return into, numbers(into, bytes_of(rows, into))


def both(
    host: HostOperations, pair: tuple[RowFormat, RowFormat], count: int, base: int
) -> list[tuple[ResidentPlane, F64]]:  # fmt: skip
    """Keys and values, as `filled`."""
    return [filled(host, format_, count, base, keys=keys) for format_, keys in zip(pair, (True, False), strict=True)]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(side.value for side in pair))
@pytest.mark.parametrize("base", [0, 32])
def test_the_newest_position_sees_its_window(host: HostOperations, pair: tuple[RowFormat, RowFormat], base: int) -> None:
    q = some(1, 5, heads=2 * HEADS)[0]
    sinks = np.array([0.5, -1.0, 3.0, -np.inf, 0.0, 40.0], np.float32)
    for length in (0, 1, 33, 65):
        held = base + length
        (keys, k), (values, v) = both(host, pair, held, base)
        windows = {1, max(1, length - 1), max(1, length)} | ({0, length + 1} if base == 0 else set())
        for window in sorted(windows):
            if held - min(window or held, held) < base:
                continue
            given: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": 15.0 if window % 2 else 0.0}
            given["sinks"] = sinks if (length + window) % 4 < 2 else None
            out = np.full((2 * HEADS, SIZE), np.nan, np.float32)
            host.attend(q, keys, values, counters(held, base), out=out, scratch=None, **given)
            nothing = not length and given["sinks"] is None
            np.testing.assert_allclose(out, np.zeros_like(out) if nothing else attended(q, k, v, **given), rtol=0, atol=2e-5)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(side.value for side in pair))
@pytest.mark.parametrize(("base", "window", "count"), [(0, 0, 17), (0, 13, 65), (32, 14, 20), (32, 1, 3), (0, 0, 0)])
def test_each_of_a_chunk_sees_itself_and_what_came_before(
    host: HostOperations, pair: tuple[RowFormat, RowFormat], base: int, window: int, count: int
) -> None:
    length = 65
    q, sinks = some(count, 5, heads=2 * HEADS), np.array([0.5, -1.0, 3.0, -np.inf, 0.0, 40.0], np.float32)
    (keys, k), (values, v) = both(host, pair, length, base)
    out = np.full((count, 2 * HEADS, SIZE), np.nan, np.float32)
    given: dict[str, Any] = {"scale": 0.2, "window": window, "softcap": 15.0, "sinks": sinks}
    host.attend_chunk(q, keys, values, counters(length, base), out=out, scratch=None, **given)
    for index in sorted({0, 12, 13, count - 1} & {*range(count)}):
        upto = length - count + index + 1 - base
        np.testing.assert_allclose(out[index], attended(q[index], k[:upto], v[:upto], **given), rtol=0, atol=2e-5)


def test_the_newest_alone_is_the_last_of_its_chunk(host: HostOperations) -> None:
    (keys, _), (values, _) = both(host, (RowFormat.Q8_0, RowFormat.Q8_0), 65, 0)
    q, outs = some(4, 5), np.empty((4, HEADS, SIZE), np.float32)
    host.attend_chunk(q, keys, values, counters(65), out=outs, scratch=None, scale=0.2, window=7)
    for index in range(4):
        out = np.empty((HEADS, SIZE), np.float32)
        host.attend(q[index], keys, values, counters(62 + index), out=out, scratch=None, scale=0.2, window=7)
        np.testing.assert_allclose(outs[index], out, atol=2e-6)


def test_a_window_whose_rows_were_given_up_is_refused(host: HostOperations) -> None:
    (keys, _), (values, _) = both(host, (RowFormat.F16, RowFormat.F16), 65, 32)
    q, out = some(3, 5), np.full((3, HEADS, SIZE), 7, np.float32)
    for window in (0, 34):
        with pytest.raises(KernelError, match="the planes begin at 32"):
            host.attend(q[0], keys, values, counters(65, 32), out=out[0], scratch=None, scale=0.2, window=window)
    host.attend(q[0], keys, values, counters(65, 32), out=out[0].copy(), scratch=None, scale=0.2, window=33)
    with pytest.raises(KernelError, match="position 31 on are seen"):
        host.attend_chunk(q, keys, values, counters(65, 32), out=out, scratch=None, scale=0.2, window=32)
    assert (out == 7).all()


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_parts_merge_as_the_reference_merges_them(host: HostOperations, parts: int) -> None:
    outs, tops, totals = some(parts, 1), 30 * some(parts, 2, size=1)[..., 0], np.abs(some(parts, 3, size=1)[..., 0]) + 1
    tops[0, 1], totals[0, 1], outs[0, 1] = -np.inf, 0, 0  # saw nothing
    out = np.full((HEADS, SIZE), np.nan, np.float32)
    host.merge(outs, tops, totals, out)
    wanted = merge([Attended(*part) for part in zip(outs, tops, totals, strict=True)])
    assert np.array_equal(out, wanted.out)
    for head in (0, 2):
        weights = np.exp(tops[:, head].astype(np.float64) - tops[:, head].max()) * totals[:, head]
        share = weights / weights.sum()
        np.testing.assert_allclose(out[head], share @ outs[:, head], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("format_", sorted(TURNABLE, key=lambda format_: format_.value))
@pytest.mark.parametrize("pairs", list(Pairs))
def test_keys_are_turned_where_they_lie(host: HostOperations, format_: RowFormat, pairs: Pairs) -> None:
    rope, into, rows = Rope(SIZE, 1e4, pairs, rotary=40), plane(format_, keys=True), some(65, 1)
    host.append(into, rows, counters(0))
    before = into.data.copy()
    for first, last, delta in ((0, 0, 5), (3, 64, -7), (3, 64, 7)):
        host.shift(into, first, last, delta, rope)
        part = slice(first * into.row_bytes, last * into.row_bytes)
        stored = before[part].view(format_.code_dtype).reshape(-1, HEADS, SIZE)
        before[part] = shift(stored, delta, rope).reshape(-1).view(np.uint8)
        assert np.array_equal(into.data, before)


@pytest.mark.parametrize(("format_", "keys"), [side for side in SIDES if side[0] not in TURNABLE or not side[1]])
def test_rows_that_do_not_turn_are_refused(host: HostOperations, format_: RowFormat, keys: bool) -> None:
    into = plane(format_, keys=keys)
    with pytest.raises(KernelError, match="only keys of f16, f32"):
        host.shift(into, 0, 2, 1, Rope(SIZE, 1e4, Pairs.NEOX))
    assert (into.data == UNTOUCHED).all()


def test_a_key_that_would_overflow_leaves_all_as_they_are(host: HostOperations) -> None:
    into, rows = plane(RowFormat.F16, keys=True), some(5, 1)
    rows[4] = 60000
    host.append(into, rows, counters(0))
    before = into.data.copy()
    with pytest.raises(NotFinite, match="row 3"):
        host.shift(into, 1, 5, 1, Rope(SIZE, 1e4, Pairs.NEOX))
    assert np.array_equal(into.data, before)


@pytest.mark.parametrize(("format_", "keys"), SIDES)
@pytest.mark.parametrize("kept", ["none", "all", "last", "even", "runs"])
def test_kept_rows_move_to_the_front(host: HostOperations, format_: RowFormat, keys: bool, kept: str) -> None:
    rows = 700
    into = plane(format_, keys=keys, rows=rows)
    into.data[:] = np.random.default_rng(1).integers(0, 256, into.data.size, np.uint8)
    which = {
        "none": [], "all": range(rows), "last": [rows - 1], "even": range(0, rows, 2),
        "runs": [*range(3), *range(5, 330), *range(331, 690)],
    }[kept]  # fmt: skip
    before = into.data.copy()
    host.gather(into, np.array(list(which), np.int32), np.empty(rows, np.uint8))
    table, after = (data[: rows * into.row_bytes].reshape(rows, -1) for data in (before, into.data))
    assert np.array_equal(after[: len(which)], table[list(which)])
    assert np.array_equal(after[len(which) :], table[len(which) :]) and np.array_equal(into.data[-TAIL_PAD:], before[-TAIL_PAD:])


def test_what_does_not_fit_is_refused_and_nothing_is_written(host: HostOperations) -> None:
    keys, values, rows = plane(RowFormat.Q8_0, keys=True), plane(RowFormat.Q5_1, keys=False), some(4, 1)
    rope, q, out = Rope(SIZE, 1e4, Pairs.NEOX), some(1, 2)[0], np.full((HEADS, SIZE), 7, np.float32)
    at, bad = counters(60), some(4, 1)
    bad[2, 1, 5] = np.nan
    short = replace(keys, data=keys.data[:-1])
    still = out.copy()
    still.flags.writeable = False
    cases: list[tuple[str, Any]] = [
        ("expected float32", lambda: host.append(keys, rows.astype(np.float64), at)),
        (r"expected float32 \(n, 3, 64\)", lambda: host.append(keys, rows[:, :2], at)),
        ("11 rows behind 60 in a plane of 70", lambda: host.append(keys, some(11), at)),
        (r"positions \[0, 71\)", lambda: host.append(keys, rows[:0], counters(71))),
        (r"positions \[6, 5\)", lambda: host.append(keys, rows, counters(5, 6))),
        ("expected uint8", lambda: host.append(short, rows, at)),
        ("int64", lambda: host.append(keys, rows, replace(at, length=np.array([60])))),
        ("by -1", lambda: host.advance(at, -1)),
        ("row 2", lambda: host.append(keys, bad, at)),
        (r"rows \[3, 71\)", lambda: host.decode(keys, 3, 71, np.empty((68, HEADS, SIZE), np.float32))),
        (r"rows \[3, 2\)", lambda: host.decode(keys, 3, 2, np.empty((0, HEADS, SIZE), np.float32))),
        (r"float32 \(2, 3, 64\)", lambda: host.decode(keys, 3, 5, np.empty((3, HEADS, SIZE), np.float32))),
        ("queries", lambda: host.attend(q[:, :32], keys, values, at, out=out, scratch=None, scale=1.0)),
        ("out", lambda: host.attend(q, keys, values, at, out=out[:2], scratch=None, scale=1.0)),
        ("read-only", lambda: host.attend(q, keys, values, at, out=still, scratch=None, scale=1.0)),
        ("window of -1", lambda: host.attend(q, keys, values, at, out=out, scratch=None, scale=1.0, window=-1)),
        ("4 query heads", lambda: host.attend(
            some(1, 2, heads=4)[0], keys, values, at, out=np.empty((4, SIZE), np.float32), scratch=None, scale=1.0)),
        ("sink logits", lambda: host.attend(q, keys, values, at, out=out, scratch=None, scale=1.0, sinks=q[0])),
        ("values of 50 with 3", lambda: host.attend(
            q, keys, plane(RowFormat.Q5_1, keys=False, rows=50), at, out=out, scratch=None, scale=1.0)),
        ("61 queries", lambda: host.attend_chunk(
            some(61), keys, values, at, out=np.empty((61, HEADS, SIZE), np.float32), scratch=None, scale=1.0)),
        ("rope of 64", lambda: host.shift(plane(RowFormat.F16, keys=True, size=32), 0, 1, 1, rope)),
        (r"rows \[0, 71\)", lambda: host.shift(plane(RowFormat.F16, keys=True), 0, 71, 1, rope)),
        ("ascending", lambda: host.gather(keys, np.array([0, 2, 2], np.int32))),
        ("ascending", lambda: host.gather(keys, np.array([0, 70], np.int32))),
        ("ascending", lambda: host.gather(keys, np.array([-1, 3], np.int32))),
        ("int64", lambda: host.gather(keys, np.array([0, 1]))),
        ("sums of parts", lambda: host.merge(some(2), np.ones((2, HEADS), np.float32), np.ones((1, HEADS), np.float32), out)),
        ("cannot be merged", lambda: host.merge(some(0), np.ones((0, HEADS), np.float32), np.ones((0, HEADS), np.float32), out)),
    ]  # fmt: skip
    for match, call in cases:
        with pytest.raises(KernelError, match=match):
            call()
    assert (keys.data == UNTOUCHED).all() and (values.data == UNTOUCHED).all() and (out == 7).all()
    assert int(at.length[0]) == 60


@pytest.mark.parametrize(("format_", "keys"), SIDES)
def test_any_walk_leaves_what_a_list_of_rows_has(host: HostOperations, format_: RowFormat, keys: bool) -> None:
    """Rows come, go and turn; a list of rows forgets and moves the same."""
    rng = np.random.default_rng(len(format_.value) + keys)
    into, at, held = plane(format_, keys=keys, rows=40), counters(0), []
    rope = Rope(SIZE, 1e4, Pairs.NEOX)
    for step in range(40):
        action = rng.integers(0, 4)
        if action < 2 and len(held) < into.rows:
            rows = some(int(rng.integers(1, min(9, into.rows - len(held)) + 1)), step)
            host.append(into, rows, at)
            host.advance(at, len(rows))
            held += list(bytes_of(rows, into))
        elif action == 2:
            kept = np.flatnonzero(rng.random(len(held)) < 0.8).astype(np.int32)
            host.gather(into, kept, np.empty(into.rows, np.uint8))
            at.length[0] = len(kept)
            held = [held[index] for index in kept]
        elif action == 3 and keys and format_ in TURNABLE and held:
            first = int(rng.integers(0, len(held)))
            delta = int(rng.integers(-20, 20))
            host.shift(into, first, len(held), delta, rope)
            for index in range(first, len(held)):
                row = held[index].view(format_.code_dtype).reshape(1, HEADS, SIZE)
                held[index] = shift(row, delta, rope).reshape(-1).view(np.uint8)
        assert int(at.length[0]) == len(held)
        assert all(np.array_equal(into.data[i * into.row_bytes : (i + 1) * into.row_bytes], row) for i, row in enumerate(held))
