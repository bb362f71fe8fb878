"""Attention over rotated rows by CUDA programs: what is turned before and behind it, and what its rows read as."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_harness import HostLauncher
from turned_rows import F32, F64, LEVELS, bits, counters_of, dense, nothing, plane_of, rows_of, some, turn_of

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.numbers import FORMAT_NUMBERS
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.plane import TAIL_PAD, ResidentPlane
from warmkv.kernels.testing import softmax_attention
from warmkv.kernels.turboquant import reference
from warmkv.kernels.turboquant.cuda import ROWS, SPANS, Turning, attention_defines, width
from warmkv.kernels.turboquant.levels import levels
from warmkv.kernels.turboquant.packing import unpack
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.turn import Turn

KEY, VALUE, TQ3 = RowFormat.TQ_KEY, RowFormat.TQ_VALUE, RowFormat.TQ3
#: Every row as `Row` reads it by one, two, four and eight, by sixteen where the size allows, and as `Span` does.
READER = """
constexpr bool KEYS = READ_FORMAT != TQ_VALUE;
using One = Row<READ_FORMAT, READ_SIZE, KEYS>;
using Eight_ = Span<READ_FORMAT, READ_SIZE, KEYS, true>;

template <int N> DEVICE void read_by(const u8* row, float* out) {
    for (int channel = 0; channel < One::WIDTH; channel += N) {
        float some[N];
        One::template read<N>(row, channel, some);
        for (int i = 0; i < N; ++i) out[channel + i] = some[i];
    }
}

extern "C" __global__ void read_rows(const u8* plane, float* out) {
    const u8* row = plane + (size_t)blockIdx.x * One::BYTES;
    float* to = out + (size_t)blockIdx.x * 7 * One::WIDTH;
    for (int channel = 0; channel < One::WIDTH; ++channel) to[channel] = One::at(row, channel);
    read_by<1>(row, to + One::WIDTH);
    read_by<2>(row, to + 2 * One::WIDTH);
    read_by<4>(row, to + 3 * One::WIDTH);
    read_by<8>(row, to + 4 * One::WIDTH);
    read_by<READ_SIZE % 16 ? 8 : 16>(row, to + 5 * One::WIDTH);
    for (int octet = 0; octet < Eight_::WIDTH / 8; ++octet) {
        float eight[8];
        Eight_::read(Eight_::load(row, octet), octet, eight);
        for (int i = 0; i < 8; ++i) to[6 * One::WIDTH + 8 * octet + i] = eight[i];
    }
}
"""


def appended(machine: Any, format_: RowFormat, x: F32, turn: Turn) -> Any:
    plane = plane_of(machine, format_, len(x), x.shape[1], turn)
    Turning(machine.launcher).append(plane, machine.put(x), counters_of(machine, 0))
    return plane


def numbers_of(format_: RowFormat, rows: Any, size: int) -> F32:
    """Rows (..., bytes) as numbers in rotated space, by the layout."""
    count = {KEY: 2, VALUE: 2, TQ3: 3}[format_]
    split = size * (3 if format_ is not VALUE else 2) // 8
    lengths = np.ascontiguousarray(rows[..., split:]).view("<f2").astype(np.float32)
    codes = levels(size, count).centroids[unpack(rows[..., : size * count // 8], count)]
    numbers = lengths[..., :1] * codes
    if format_ is not KEY:
        return numbers
    signs = unpack(rows[..., size // 4 : split], 1).astype(np.float32) * 2 - 1
    return np.concatenate([numbers, lengths[..., :1] * lengths[..., 1:] * signs], axis=-1)


@pytest.mark.parametrize(("format_", "size"), [(KEY, 8), (KEY, 40), (KEY, 64), (VALUE, 72), (VALUE, 128), (TQ3, 64), (TQ3, 80)])
def test_rows_read_as_numbers_in_rotated_space_however_many_at_once(machine: Any, format_: RowFormat, size: int) -> None:
    if machine.name != "host":
        pytest.skip("what reads them here is a program of the test's")
    launcher = HostLauncher("shuffled", edit=lambda text: text + READER)
    x = some(6, 1, size)
    x[2] = 0
    plane = appended(machine, format_, x, turn_of(size))
    keys, values = (format_, RowFormat.F32) if format_ is not VALUE else (RowFormat.F32, format_)
    sources = ("cuda/prelude.cu", "quant/rows.cu", ROWS, "attention/spans.cu", SPANS)
    defines = (("READ_FORMAT", FORMAT_NUMBERS[format_]), ("READ_SIZE", size), *attention_defines(keys, size, values, size))
    out = nothing(machine, 6, 7, width(format_, size))
    launcher.launch(Program(sources, defines), "read_rows", (6, 1, 1), 1, (plane.data, out))
    expected = numbers_of(format_, rows_of(machine, plane)[:, 0], size)
    np.testing.assert_array_equal(out, np.broadcast_to(expected[:, None], out.shape))


@pytest.mark.parametrize("size", [64, 80])
@pytest.mark.parametrize("estimator", Estimator)
def test_products_with_turned_queries_are_the_scores_of_the_reference(machine: Any, size: int, estimator: Estimator) -> None:
    turn = turn_of(size, layer=2, estimator=estimator)
    q, x = some(3, 2, size, seed=5), some(13, 1, size)
    for format_ in (KEY, TQ3):
        plane = appended(machine, format_, x, turn)
        wide = width(format_, size)
        out = nothing(machine, 6 * wide + 1)
        Turning(machine.launcher).queries(machine.put(q), format_, turn, out)
        numbers = machine.get(out)
        assert np.isnan(numbers[-1])
        turned = numbers[:-1].reshape(6, wide)
        np.testing.assert_array_equal(turned[:, :size], turn.rotation.forward(q).reshape(6, size))
        rows = numbers_of(format_, rows_of(machine, plane)[:, 0], size)
        found = turned.astype(np.float64) @ rows.astype(np.float64).T
        planes = (reference.encode_keys if format_ is KEY else reference.encode_plain_keys)(x, turn.rotation).head(0)
        expected = reference.scores(q.reshape(6, size), planes, turn.rotation, estimator=estimator)
        assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("size", [8, 64, 80, 96, 128, 256])
def test_turned_queries_and_sums_are_dense_products_in_float64(machine: Any, size: int) -> None:
    turn, turning = turn_of(size, seed=9, layer=4), Turning(machine.launcher)
    q = some(2, 3, size)
    out, sums = nothing(machine, 12 * size), machine.put(q)
    turning.queries(sums, KEY, turn, out)
    once = (q.astype(np.float64) * turn.rotation.polar) @ dense(size)
    twice = (once * turn.rotation.jl) @ dense(size) * np.sqrt(np.pi / 2 / size)
    expected = np.concatenate([once, twice], axis=-1)
    assert np.abs(machine.get(out).reshape(expected.shape) - expected).max() <= 1e-6 * np.abs(expected).max()
    turning.values(sums, turn)
    back = (q.astype(np.float64) @ dense(size)) * turn.rotation.polar
    assert np.abs(machine.get(sums) - back).max() <= 1e-6 * np.abs(back).max()
    np.testing.assert_array_equal(machine.get(sums), turn.rotation.inverse(q))


SIDES = [(KEY, VALUE), (KEY, RowFormat.F16), (RowFormat.F32, VALUE), (TQ3, VALUE), (TQ3, RowFormat.Q8_0)]


def meant(format_: RowFormat, rows: Any, turn: Turn) -> F64:
    """The rows (..., size) in float64 that bytes (..., row bytes) of one head stand for, by dense products."""
    size = turn.size
    if format_ is RowFormat.F32:
        return np.ascontiguousarray(rows).view("<f4").astype(np.float64)
    if format_ is RowFormat.F16:
        return np.ascontiguousarray(rows).view("<f2").astype(np.float64)
    if format_ is RowFormat.Q8_0:
        blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 34)
        scales = np.ascontiguousarray(blocks[..., :2]).view("<f2").astype(np.float64)
        return (scales * blocks[..., 2:].view(np.int8)).reshape(len(rows), size)
    split = size * (2 if format_ is VALUE else 3) // 8
    lengths = np.ascontiguousarray(rows[..., split:]).view("<f2").astype(np.float64)
    if format_ is TQ3:
        planes = bits(rows[..., :split], 1).reshape(len(rows), 3, size)
        unit = levels(size, 3).centroids.astype(np.float64)[planes[:, 0] + 2 * planes[:, 1] + 4 * planes[:, 2]]
    else:
        inner, outer = np.array(LEVELS[size]) / np.sqrt(size)
        unit = np.array([-outer, -inner, inner, outer])[bits(rows[..., : size // 4], 2)]
    if format_ is KEY:
        signs = 2.0 * bits(rows[..., size // 4 : split], 1) - 1
        weight = {Estimator.UNBIASED: np.sqrt(np.pi / 2 / size), Estimator.MINIMUM_MSE: np.sqrt(2 / np.pi / size)}
        kappa = weight.get(turn.estimator, np.sqrt(np.pi / 2) / size)
        unit = unit + kappa * lengths[..., 1:] * ((signs @ dense(size)) * turn.rotation.jl)
    whole: F64 = lengths[..., :1] * ((unit @ dense(size)) * turn.rotation.polar)
    return whole


class Cache:
    """Keys and values of two heads on a device, beside what they mean."""

    def __init__(self, machine: Any, sides: tuple[RowFormat, RowFormat], turn: Turn, rows: int, base: int = 0) -> None:
        self.machine, self.turn, self.base = machine, turn, base
        self.operations = CudaOperations(machine.launcher, blocks=4)
        self.counters = counters_of(machine, base, base)
        self.sides = [self.plane(format_, index == 0, rows) for index, format_ in enumerate(sides)]
        for index, plane in enumerate(self.sides):
            given = some(rows, 2, turn.size, seed=index) * np.float32(0.5)
            self.operations.append(plane, machine.put(given), self.counters)
        self.operations.advance(self.counters, rows)

    def plane(self, format_: RowFormat, keys: bool, rows: int) -> ResidentPlane:
        if format_.rotated:
            return plane_of(self.machine, format_, rows, 2, self.turn)
        data = np.zeros(rows * 2 * format_.row_bytes(self.turn.size, keys=keys) + TAIL_PAD, np.uint8)
        return ResidentPlane(format_, 2, self.turn.size, keys, rows, self.machine.put(data))

    def attended(self, q: F32, window: int = 0, softcap: float = 0.0, sinks: F32 | None = None) -> F32:
        """Queries (n, heads, size) of the newest positions."""
        out = nothing(self.machine, *q.shape)
        scratch = nothing(self.machine, self.operations.scratch_floats(q.shape[1], q.shape[2], self.sides[0].rows))
        self.operations.attend_chunk(
            self.machine.put(q), *self.sides, self.counters, out=out, scratch=scratch, scale=0.1, window=window,
            softcap=softcap, sinks=None if sinks is None else self.machine.put(sinks),
        )  # fmt: skip
        found: F32 = self.machine.get(out)
        return found

    def expected(self, q: F32, window: int = 0, softcap: float = 0.0, sinks: F32 | None = None) -> F64:
        keys, values = (
            [meant(plane.format, rows_of(self.machine, plane)[:, head], self.turn) for head in range(2)] for plane in self.sides
        )
        out, group, rows = np.empty(q.shape), q.shape[1] // 2, self.sides[0].rows
        for token in range(len(q)):
            upto = rows - len(q) + token + 1
            first = max(0, upto - window) if window else 0
            for head in range(2):
                part = slice(head * group, (head + 1) * group)
                logits = None if sinks is None else sinks[part].tolist()
                wide = q[token, part].astype(np.float64)
                out[token, part] = softmax_attention(wide, keys[head], values[head], 0.1, first, upto, softcap, logits)[0]
        return out


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize(
    ("rows", "base", "queries", "window", "softcap", "sinks"),
    [(1, 0, 1, 0, 0.0, False), (150, 0, 1, 0, 0.0, True), (70, 96, 1, 33, 5.0, False), (40, 3, 3, 9, 2.0, True)],
)
def test_attention_is_that_over_what_the_rows_mean(
    machine: Any, sides: tuple[RowFormat, RowFormat], rows: int, base: int, queries: int, window: int, softcap: float, sinks: bool
) -> None:
    cache = Cache(machine, sides, turn_of(64, layer=base), rows, base)
    q, logits = some(queries, 6, 64, seed=11), some(1, 1, 6, seed=12)[0, 0] if sinks else None
    found, expected = cache.attended(q, window, softcap, logits), cache.expected(q, window, softcap, logits)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("size", "estimator"),
    [(32, Estimator.UNBIASED), (96, Estimator.CERA_COMPAT), (128, Estimator.MINIMUM_MSE), (256, Estimator.UNBIASED)],
)
def test_attention_weighs_signs_as_its_estimator_says(machine: Any, size: int, estimator: Estimator) -> None:
    q, turns = some(1, 4, size, seed=2), {other: turn_of(size, estimator=other) for other in Estimator}
    cache = Cache(machine, (KEY, VALUE), turns[estimator], 50)
    found, bound = cache.attended(q), 1e-5 * np.abs(cache.expected(q)).max()
    for other, turn in turns.items():
        cache.turn = turn
        assert (np.abs(found - cache.expected(q)).max() <= bound) == (other is estimator)
