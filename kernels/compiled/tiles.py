"""Words over runs of rows: a few rows against a few heads, all sums in registers.

However rows, heads and channels are tiled, a sum meets the same numbers in the same order. Loops are
written in LLVM's own terms: one word serves all forms of rows, and little is left to compile.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from warmkv.kernels.compiled.forms import BF16, BLOCKED, F16, F32, FP8, I8, Q4_0, Q5_1, Q8_0, _load, _load_block
from warmkv.kernels.compiled.vectors import _I, _P, _VEC, WIDTH, _at, _call, _const, _fma, _halves, _scalar, _splat

#: Bytes that come from memory together.
LINE = 64
#: Rows that are scored together.
ROWS = 4
#: Query heads that are done together, where there are so many; others one by one.
MOST = 4
#: Channels of a group of keys that share a scale, of a block, and the unit in which rows are scored.
GROUP = 32
#: Bytes of so many channels in each form.
GROUP_BYTES = {F32: 128, F16: 64, BF16: 64, I8: 32, FP8: 32, Q8_0: 34, Q5_1: 24, Q4_0: 18}
#: What a quantised plane's scales are to its weighted sum: one a row goes into the weights, one per 32
#: channels into the row.
ONE_SCALE, MANY_SCALES = 1, 2
_D = ir.DoubleType()


def _by(builder, address, distance, times):
    """``address`` + ``distance`` x ``times``, of numbers known here or then."""
    distance, times = (_P(number) if isinstance(number, int) else number for number in (distance, times))
    return builder.add(address, builder.mul(distance, times))


def _sums(builder, count):
    """Places for so many vectors, which become registers."""
    return [cgutils.alloca_once(builder, _VEC) for _ in range(count)]


def _clear(builder, sums):
    for place in sums:
        builder.store(_const(0.0), place)


def _add(builder, place, a, b):
    builder.store(_fma(builder, a, b, builder.load(place)), place)


def _load_group(builder, code, address, left=None):
    """32 channels as two vectors, or ``left`` of them where these are no blocks."""
    if code in BLOCKED:
        return _load_block(builder, code, address)
    second = builder.add(address, _P(GROUP_BYTES[code] // 2))
    counts = (None, None) if left is None else (left, builder.sub(left, _P(WIDTH)))
    return _load(builder, code, address, counts[0]), _load(builder, code, second, counts[1])


def _where(builder, form, code):
    return builder.if_then(builder.icmp_signed("==", form, _P(code)))


@intrinsic
def ask(typingctx, row, apart, rows, size_bytes):
    """Ask for so many rows of ``size_bytes`` to be in the second-level cache. Rows a power of two apart
    would push each other out of the first."""

    def codegen(context, builder, signature, args):
        row, apart, rows, size_bytes = args
        with cgutils.for_range(builder, rows) as each:
            first = _by(builder, row, apart, each.index)
            begin = builder.and_(first, _P(-LINE))
            end = builder.add(first, size_bytes)
            lines = builder.ashr(builder.sub(builder.add(end, _P(LINE - 1)), begin), _P(LINE.bit_length() - 1))
            with cgutils.for_range(builder, lines) as line:
                pointer = _at(builder, _by(builder, begin, LINE, line.index), _I)
                _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, _I(0), _I(2), _I(1))
        return context.get_dummy_value()

    return types.void(*([types.intp] * 4)), codegen


@intrinsic
def score_run(typingctx, heads, form, row, apart, scale, scale_apart, scale_step, rows, q, q_apart, size, factor, out, out_apart):
    """<q, row> x ``factor`` of ``rows`` rows and 1 or MOST ``heads``, to adjacent float32 at ``out`` + head
    x ``out_apart``; up to three behind them are written over. Queries are padded with zeros to GROUP channels.
    ``scale_step`` is the distance of scales of neighbouring groups of 32 channels, 0: a row has one."""

    def codegen(context, builder, signature, args):
        for many in (1, MOST):
            with _where(builder, args[0], many):
                for code in GROUP_BYTES:
                    with _where(builder, args[1], code):
                        _score(builder, code, many, *args[2:])
        return context.get_dummy_value()

    return types.void(*([types.intp] * 11), types.float32, types.intp, types.intp), codegen


def _score(builder, code, heads, row, apart, scale, scale_apart, scale_step, rows, q, q_apart, size, factor, out, out_apart):
    sums = _sums(builder, heads * ROWS)
    together = builder.sdiv(rows, _P(ROWS))
    single = builder.srem(rows, _P(ROWS))
    with cgutils.for_range(builder, builder.add(together, single)) as loop:
        # What is left of the rows is done one by one, each as all rows of a tile.
        full = builder.icmp_signed("<", loop.index, together)
        first = builder.select(full, builder.mul(loop.index, _P(ROWS)), _by(builder, loop.index, together, ROWS - 1))
        near, scale_near = (builder.select(full, distance, _P(0)) for distance in (apart, scale_apart))
        codes, scales = _by(builder, row, apart, first), _by(builder, scale, scale_apart, first)
        _clear(builder, sums)

        def step(rows_here, group, left):
            """32 channels of some rows, or ``left`` of them."""
            lanes = []
            for index in rows_here:
                at = _by(builder, _by(builder, codes, near, index), group, GROUP_BYTES[code])
                vectors = _load_group(builder, code, at, left)
                own = None
                if code == I8:
                    own = _splat(
                        builder, _scalar(builder, _by(builder, _by(builder, scales, scale_near, index), group, scale_step))
                    )
                lanes.append((index, vectors, own))
            for head in range(heads):
                query = _by(builder, _by(builder, q, q_apart, head), group, GROUP * 4)
                queries = _load(builder, F32, query), _load(builder, F32, _by(builder, query, WIDTH, 4))
                for index, vectors, own in lanes:
                    place = sums[head * ROWS + index]
                    if own is None:
                        _add(builder, place, queries[0], vectors[0])
                        _add(builder, place, queries[1], vectors[1])
                    else:
                        products = _fma(builder, queries[1], vectors[1], builder.fmul(queries[0], vectors[0]))
                        _add(builder, place, products, own)

        groups = builder.sdiv(size, _P(GROUP))
        left = builder.srem(size, _P(GROUP))
        abreast = 2 if heads > 1 and code != F32 else 1  # rows of f32 come faster one after the other
        for begin in range(0, ROWS, abreast):
            rows_here = range(begin, begin + abreast)
            with cgutils.for_range(builder, groups) as groups_:
                step(rows_here, groups_.index, None)
            if code in BLOCKED:
                continue  # their rows are whole blocks
            with builder.if_then(builder.icmp_signed(">", left, _P(0))):
                step(rows_here, groups, left)
        for head in range(heads):
            _put(
                builder, sums[head * ROWS : (head + 1) * ROWS], factor, _by(builder, _by(builder, out, out_apart, head), first, 4)
            )


def _put(builder, sums, factor, out):
    """The four sums of a head, times ``factor``."""
    four = _halves(builder, [builder.load(place) for place in sums])
    kind = four.type
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), factor, _I(0))
    factors = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I, ROWS), [0] * ROWS))
    builder.store(builder.fmul(four, factors), _at(builder, out, kind), align=1)


@intrinsic
def weigh_run(typingctx, heads, form, scaled, row, apart, scale, scale_apart, rows, weight, weight_apart, size, to, to_apart):
    """The sum of weight x row over ``rows`` rows for 1 or MOST ``heads``: taken in float32 and added to
    float64 numbers at ``to`` + head x ``to_apart``. ``scaled`` counts where the form is I8."""

    def codegen(context, builder, signature, args):
        for many, wide in ((1, 2 * MOST), (MOST, MOST)):
            with _where(builder, args[0], many):
                for code in GROUP_BYTES:
                    with _where(builder, args[1], code):
                        if code != I8:
                            _weigh_channels(builder, code, 0, many, wide, *args[3:])
                            continue
                        for kind in (ONE_SCALE, MANY_SCALES):
                            with _where(builder, args[2], kind):
                                _weigh_channels(builder, code, kind, many, wide, *args[3:])
        return context.get_dummy_value()

    return types.void(*([types.intp] * 13)), codegen


def _weigh_channels(
    builder, code, scaled, heads, wide, row, apart, scale, scale_apart, rows, weight, weight_apart, size, to, to_apart
):
    """All channels of a run: ``wide`` vectors at a time, then single ones, or blocks, then what is left of one."""
    least = GROUP // WIDTH if code in BLOCKED else 1

    def part(channel, vectors, count):
        codes = builder.add(row, builder.sdiv(_by(builder, _P(0), channel, GROUP_BYTES[code]), _P(GROUP)))
        scales = _by(builder, scale, builder.ashr(channel, _P(5)), 4) if scaled == MANY_SCALES else scale
        sums = _sums(builder, heads * vectors)
        _clear(builder, sums)
        _weigh(builder, code, scaled, heads, vectors, sums, codes, apart, scales, scale_apart, rows, weight, weight_apart, count)
        _add_up(builder, sums, vectors, _by(builder, to, channel, 8), to_apart)

    blocks = builder.sdiv(size, _P(wide * WIDTH))
    with cgutils.for_range(builder, blocks) as loop:
        part(builder.mul(loop.index, _P(wide * WIDTH)), wide, None)
    done = builder.mul(blocks, _P(wide * WIDTH))
    singles = builder.sdiv(builder.sub(size, done), _P(least * WIDTH))
    with cgutils.for_range(builder, singles) as loop:
        part(_by(builder, done, loop.index, least * WIDTH), least, None)
    if code in BLOCKED:
        return
    done = _by(builder, done, singles, WIDTH)
    left = builder.sub(size, done)
    with builder.if_then(builder.icmp_signed(">", left, _P(0))):
        part(done, 1, left)


def _weigh(builder, code, scaled, heads, each, sums, row, apart, scale, scale_apart, rows, weight, weight_apart, count):
    with cgutils.for_range(builder, rows) as loop:
        codes, scales = _by(builder, row, apart, loop.index), _by(builder, scale, scale_apart, loop.index)
        lanes = []
        for index in range(each // 2):
            lanes += _load_group(builder, code, _by(builder, codes, GROUP_BYTES[code], index))
        if each == 1:
            lanes.append(_load(builder, code, codes, count))
        if scaled == MANY_SCALES:
            for index in range(each):
                own = _splat(builder, _scalar(builder, _by(builder, scales, 4, index // 2)))
                lanes[index] = builder.fmul(lanes[index], own)
        factor = _scalar(builder, scales) if scaled == ONE_SCALE else None
        for head in range(heads):
            mine = _scalar(builder, _by(builder, _by(builder, weight, weight_apart, head), loop.index, 4))
            mine = _splat(builder, mine if factor is None else builder.fmul(mine, factor))
            for index, vector in enumerate(lanes):
                _add(builder, sums[head * each + index], mine, vector)


def _add_up(builder, sums, each, to, to_apart):
    kind = ir.VectorType(_D, WIDTH)
    for at, place in enumerate(sums):
        address = _by(builder, _by(builder, to, to_apart, at // each), WIDTH * 8, at % each)
        pointer = _at(builder, address, kind)
        total = builder.fadd(builder.load(pointer, align=1), builder.fpext(builder.load(place), kind))
        builder.store(total, pointer, align=1)
