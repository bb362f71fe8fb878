"""The compiled loops over packed bits that everything fast about TurboQuant is made of.

A level is a sum of signs, one for each bit of its code, times constants (see `fast`). So a score is a
sum of table entries where bits are set, and a weighted sum adds a weight where bits are set. Sixteen
bits of a row are the mask of as many adjacent float32 lanes: two bytes are loaded as a mask, and no
code is ever unpacked. Written in LLVM's vector types, since a scalar loop over bits is not recognised
as this; they lower to masked additions with AVX-512 and to compares and blends elsewhere. What calls them is in
this file too: compiled code is cached, and made anew only where its own file has changed.

Weighted sums take runs of `RUN` rows, each corrected to signs before it is added: both are small then.

**Threading:** no interpreter lock, no state; one thread computes a call.
"""

# Compiled code has no annotations: numba finds the types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from warmkv.kernels.compiled.caching import compiled

#: Rows of which sums of entries are taken at once, so that an entry is loaded once for them.
ROWS = 4
#: Bytes of a row whose weighted sums `bit_sums` keeps in registers.
BYTES = 16
#: Rows ahead of which the first byte is asked for. Rows of one head among others lie too far apart for
#: the processor to guess, and a step over `ROWS` of them is too long for it to see the next one.
AHEAD = 24
#: Rows whose weighted sum is taken in registers before it is added to the total.
RUN = 128
#: Lanes, and the entries that have to be readable behind a table.
LANES = 16

_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_ZEROS = ir.Constant(_FLOATS, [0.0] * LANES)


def _dots(planes):
    @intrinsic
    def dots(typingctx, bits, first, apart, count, table, at, out):
        """``out[r]`` = the sum of table[at + i] over the bits i that are set in row r, for ROWS rows that begin
        at bits[first + r * apart] and have ``count`` bytes in each plane. Three planes are followed by a
        fourth that is not stored, their exclusive or. Every row is summed alike, on its own."""

        def generate(context, builder, signature, args):
            bits, table, out = (_data(context, builder, signature, args, index) for index in (0, 4, 6))
            _, first, apart, count, _, at, _ = args
            starts = [builder.gep(bits, [builder.add(first, builder.mul(apart, _I64(row)))]) for row in range(ROWS)]
            sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(ROWS)]
            for start, total in zip(starts, sums, strict=True):
                _prefetch(builder, builder.gep(start, [builder.mul(apart, _I64(AHEAD))]))
                builder.store(_ZEROS, total)

            def add(byte, load):
                """All planes of all rows at one place, its bits as ``load`` reads them."""
                place = builder.add(at, builder.mul(byte, _I64(8)))
                step = builder.mul(count, _I64(8))
                spots = [builder.add(place, builder.mul(step, _I64(plane))) for plane in range(4 if planes == 3 else planes)]
                entries = [_entries(builder, table, spot) for spot in spots]
                for start, total in zip(starts, sums, strict=True):
                    offsets = [builder.add(byte, builder.mul(count, _I64(plane))) for plane in range(planes)]
                    words = [load(builder, builder.gep(start, [offset])) for offset in offsets]
                    if planes == 3:
                        words.append(builder.xor(builder.xor(words[0], words[1]), words[2]))
                    for word, floats in zip(words, entries, strict=True):
                        _add_where(builder, word, floats, total)

            with cgutils.for_range(builder, builder.lshr(count, _I64(1))) as loop:
                add(builder.shl(loop.index, _I64(1)), _two_bytes)
            with builder.if_then(builder.trunc(count, ir.IntType(1))):
                add(builder.sub(count, _I64(1)), _one_byte)
            for row, total in enumerate(sums):
                builder.store(_reduced(builder, builder.load(total)), builder.gep(out, [_I64(row)]))
            return context.get_dummy_value()

        return types.void(bits, types.int64, types.int64, types.int64, table, types.int64, out), generate

    return dots


def _sums(width):
    @intrinsic
    def bit_sums(typingctx, bits, first, apart, rows, weights, out, at):
        """``out[at + i]`` = the sum of weights[r] over the rows r whose bit i is set, for all bits of ``width``
        bytes from bits[first + r * apart] on, row after row."""

        def generate(context, builder, signature, args):
            bits, weights, out = (_data(context, builder, signature, args, index) for index in (0, 4, 5))
            _, first, apart, rows, _, _, at = args
            sums = [cgutils.alloca_once(builder, _FLOATS) for _ in range(width // 2)]
            for total in sums:
                builder.store(_ZEROS, total)
            start = builder.gep(bits, [first])
            with cgutils.for_range(builder, rows) as loop:
                row = builder.gep(start, [builder.mul(loop.index, apart)])
                _prefetch(builder, builder.gep(row, [builder.mul(apart, _I64(AHEAD))]))
                weight = _spread(builder, builder.load(builder.gep(weights, [loop.index])))
                for index, total in enumerate(sums):
                    _add_where(builder, _two_bytes(builder, builder.gep(row, [_I64(2 * index)])), weight, total)
            target = builder.bitcast(builder.gep(out, [at]), _FLOATS.as_pointer())
            for index, total in enumerate(sums):
                builder.store(builder.load(total), builder.gep(target, [_I64(index)]), align=4)
            return context.get_dummy_value()

        return types.void(bits, types.int64, types.int64, types.int64, weights, out, types.int64), generate

    return bit_sums


bit_dots = _dots(1)
plain_dots = _dots(3)
bit_sums = _sums(BYTES)
word_sums = _sums(2)


def _data(context, builder, signature, args, index):
    return context.make_array(signature.args[index])(context, builder, args[index]).data


def _prefetch(builder, place):
    """Ask for the cache line of an address, which may lie behind the array."""
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    ask = builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
    builder.call(ask, [place, _I32(0), _I32(3), _I32(1)])


def _two_bytes(builder, place):
    return builder.load(builder.bitcast(place, _I16.as_pointer()), align=1)


def _one_byte(builder, place):
    return builder.zext(builder.load(place), _I16)


def _entries(builder, table, at):
    return builder.load(builder.bitcast(builder.gep(table, [at]), _FLOATS.as_pointer()), align=4)


def _add_where(builder, word, floats, total):
    """Add ``floats`` to ``total`` in the lanes whose bit is set."""
    before = builder.load(total)
    builder.store(builder.select(builder.bitcast(word, _MASK), builder.fadd(before, floats), before), total)


def _spread(builder, value):
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


def _reduced(builder, floats):
    """The sum of all lanes, halves first."""
    count = LANES
    while count > 1:
        count //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, count), list(range(at, at + count))) for at in (0, count))
        floats = builder.fadd(builder.shuffle_vector(floats, floats, low), builder.shuffle_vector(floats, floats, high))
    return builder.extract_element(floats, _I32(0))


@njit(inline="always")
def _wide(bits):
    """The finite, not negative float16 of these bits."""
    return np.uint32(np.uint32(bits) << np.uint32(13)).view(np.float32) * np.float32(2.0**112)


@compiled()
def score_bits(codes, apart, signs, signs_apart, norms, norms_apart, rho, rho_apart, table, signed, scale, out):
    """Fill ``out`` (queries, rows) with scores; a table is entries, half their sums, bytes of a row."""
    (entries, less, width), (signed_entries, signed_less, signed_width) = table, signed
    queries, count = out.shape
    coded, rest = np.empty(ROWS, np.float32), np.empty(ROWS, np.float32)
    for begin in range(0, count, RUN):
        for query in range(queries):
            at, signed_at = 8 * width * query, 8 * signed_width * query
            row, end = begin, min(begin + RUN, count)
            while row < end:
                # At the end of all rows one is taken, as if it were several.
                taken = ROWS if row + ROWS <= end else 1
                step, signed_step = (apart, signs_apart) if taken == ROWS else (0, 0)
                bit_dots(codes, row * apart, step, width, entries, at, coded)
                bit_dots(signs, row * signs_apart, signed_step, signed_width, signed_entries, signed_at, rest)
                for index in range(taken):
                    left = _wide(rho[(row + index) * rho_apart]) * (rest[index] - signed_less[query])
                    found = coded[index] - less[query] + left
                    out[query, row + index] = _wide(norms[(row + index) * norms_apart]) * scale * found
                row += taken


@compiled()
def score_plain_bits(codes, apart, norms, norms_apart, table, scale, out):
    """As `score_bits`, for three planes of bits and the entries of a fourth."""
    entries, less, width = table
    queries, count = out.shape
    coded = np.empty(ROWS, np.float32)
    for begin in range(0, count, RUN):
        for query in range(queries):
            row, end = begin, min(begin + RUN, count)
            while row < end:
                taken = ROWS if row + ROWS <= end else 1
                plain_dots(codes, row * apart, apart if taken == ROWS else 0, width // 4, entries, 8 * width * query, coded)
                for index in range(taken):
                    found = coded[index] - less[query]
                    out[query, row + index] = _wide(norms[(row + index) * norms_apart]) * scale * found
                row += taken


@compiled()
def weigh_bits(weights, codes, apart, norms, norms_apart, sums):
    """Add to ``sums`` (queries, bits) float64, for every bit, the sum with its sign of weights times norms."""
    queries, count = weights.shape
    width = sums.shape[1] // 8
    part = np.empty(sums.shape[1], np.float32)
    scaled = np.empty(RUN, np.float32)
    for begin in range(0, count, RUN):
        rows = min(RUN, count - begin)
        for query in range(queries):
            given = weights[query, begin : begin + rows]
            for row in range(rows):
                scaled[row] = given[row] * _wide(norms[(begin + row) * norms_apart])
            total = _sum(scaled[:rows])
            byte = 0
            while byte + BYTES <= width:
                bit_sums(codes, begin * apart + byte, apart, rows, scaled, part, 8 * byte)
                byte += BYTES
            while byte < width:
                word_sums(codes, begin * apart + byte, apart, rows, scaled, part, 8 * byte)
                byte += 2
            whole = sums[query]
            for index in range(part.shape[0]):
                whole[index] += np.float32(2) * part[index] - total


@compiled(fastmath={"reassoc", "nsz"})
def _sum(numbers):
    total = np.float32(0)
    for index in range(numbers.shape[0]):
        total += numbers[index]
    return total
