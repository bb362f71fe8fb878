"""Sixteen float32 numbers at once: the words compiled kernels are written in.

Left to itself the compiler picks the order of a sum by what surrounds it, and a head would get other
bits alone than in its group. Here the order is in the words: lane after lane, then a fixed tree. They
are LLVM vectors of 16, which become one, two or four registers of the machine.

Rows are given by address, in bytes, and need no alignment: planes of any distance and segments packed
by others are read where they lie. Whoever passes an address keeps the memory alive. ``form`` says what
is stored there and must be a constant where a word is used; ``count`` < 16 reads so many numbers,
the others are 0 and not touched.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

#: Forms of rows: what a code is.
F32, F16, BF16, I8 = 0, 1, 2, 3
WIDTH = 16

_F, _I, _B = ir.FloatType(), ir.IntType(32), ir.IntType(1)
_VEC, _INTS, _MASK = (ir.VectorType(kind, WIDTH) for kind in (_F, _I, _B))
_CODES = {F32: _F, F16: ir.HalfType(), BF16: ir.IntType(16), I8: ir.IntType(8)}
_NAMES = {F32: "f32", F16: "f16", BF16: "i16", I8: "i8"}


class Lanes(types.Type):
    """``count`` vectors that stay in registers."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"Lanes({count})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, ir.ArrayType(_VEC, fe_type.count))


ONE = Lanes(1)


def _pack(builder, vectors):
    packed = ir.Constant(ir.ArrayType(_VEC, len(vectors)), ir.Undefined)
    for index, vector in enumerate(vectors):
        packed = builder.insert_value(packed, vector, index)
    return packed


def _unpack(builder, packed):
    return [builder.extract_value(packed, index) for index in range(packed.type.count)]


def _const(value, kind=_VEC):
    return ir.Constant(kind, [value] * kind.count)


def _splat(builder, scalar):
    kind = ir.VectorType(scalar.type, WIDTH)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(_I, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), _const(0, _INTS))


def _shuffle(builder, a, b, places):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I, len(places)), places))


def _call(builder, name, kind, *args):
    """An LLVM intrinsic by its whole name."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [arg.type for arg in args]), name)
    return builder.call(function, args)


def _fma(builder, a, b, c):
    """a x b + c, rounded once where the machine can do that, else twice."""
    return _call(builder, "llvm.fmuladd.v16f32", _VEC, a, b, c)


def _at(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _scalar(builder, address):
    return builder.load(_at(builder, address, _F), align=1)


def _mask(builder, count):
    places = ir.Constant(_INTS, list(range(WIDTH)))
    return builder.icmp_signed("<", places, _splat(builder, builder.trunc(count, _I)))


def _widens_halves():
    """Whether the machine compiled for turns f16 into float32 itself. Where it does not, LLVM calls a function
    that no process has."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return not triple.startswith(("x86", "i386", "i686")) or "+f16c" in features.split(",")


_WIDENS_HALVES = _widens_halves()


def _widened(builder, halves):
    """float32 of f16 in whole-number steps: exponents are moved by a product that is exact, denormals too."""
    bits = builder.zext(builder.bitcast(halves, ir.VectorType(ir.IntType(16), WIDTH)), _INTS)
    size = builder.shl(builder.and_(bits, _const(0x7FFF, _INTS)), _const(13, _INTS))
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, _VEC), _const(2.0**112)), _INTS)
    endless = builder.or_(size, _const(0x7F800000, _INTS))
    size = builder.select(builder.icmp_signed(">=", size, _const(0x7C00 << 13, _INTS)), endless, finite)
    sign = builder.shl(builder.and_(bits, _const(0x8000, _INTS)), _const(16, _INTS))
    return builder.bitcast(builder.or_(size, sign), _VEC)


def _load(builder, form, address, count=None):
    """Sixteen numbers of a form, as float32."""
    kind = ir.VectorType(_CODES[form], WIDTH)
    pointer = _at(builder, address, kind)
    if count is None:
        codes = builder.load(pointer, align=1)
    else:
        name = f"llvm.masked.load.v16{_NAMES[form]}.p0"
        codes = _call(builder, name, kind, pointer, ir.Constant(_I, 1), _mask(builder, count), ir.Constant(kind, None))
    if form == F32:
        return codes
    if form == F16:
        return builder.fpext(codes, _VEC) if _WIDENS_HALVES else _widened(builder, codes)
    if form == BF16:
        return builder.bitcast(builder.shl(builder.zext(codes, _INTS), _const(16, _INTS)), _VEC)
    return builder.sitofp(builder.sext(codes, _INTS), _VEC)


def _store(builder, address, vector, count=None):
    pointer = _at(builder, address, vector.type)
    if count is None:
        builder.store(vector, pointer, align=1)
        return
    _call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), vector, pointer, ir.Constant(_I, 1), _mask(builder, count))


def _halves(builder, vectors):
    """The sums of four vectors, each by the same tree: lanes 8 apart, 4, 2, then neighbours."""

    def fold(a, b, low, high):
        return builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))

    r0, r1, r2, r3 = vectors
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    a, b = fold(r0, r1, low, high), fold(r2, r3, low, high)
    low = [start + lane for start in range(0, 32, 8) for lane in range(4)]
    a = fold(a, b, low, [lane + 4 for lane in low])
    low = [start + lane for start in range(0, 16, 4) for lane in range(2)]
    a = fold(a, a, low, [lane + 2 for lane in low])
    return fold(a, a, [0, 2, 4, 6], [1, 3, 5, 7])


def _exp(builder, x):
    """e^x to about one unit in the last place; 0 for -inf, NaN for NaN, x <= 88."""
    x = builder.select(builder.fcmp_ordered("<", x, _const(-150.0)), _const(-150.0), x)
    magic = 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number in the low bits
    shifted = _fma(builder, x, _const(1.4426950408889634), _const(magic))
    whole = builder.fsub(shifted, _const(magic))
    power = builder.sub(builder.bitcast(shifted, _INTS), _const(0x4B400000, _INTS))
    r = _fma(builder, whole, _const(-0.693359375), x)
    r = _fma(builder, whole, _const(2.12194440e-4), r)
    p = _const(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(builder, p, r, _const(factor))
    y = builder.fadd(_fma(builder, p, builder.fmul(r, r), r), _const(1.0))
    half = builder.ashr(power, _const(1, _INTS))  # in two steps: results below 2^-126 are still there
    for part in (half, builder.sub(power, half)):
        bits = builder.shl(builder.add(part, _const(127, _INTS)), _const(23, _INTS))
        y = builder.fmul(y, builder.bitcast(bits, _VEC))
    return y


def _tanh(builder, x):
    size = _call(builder, "llvm.fabs.v16f32", _VEC, x)
    bound = builder.select(builder.fcmp_ordered(">", size, _const(20.0)), _const(20.0), size)
    e = _exp(builder, builder.fadd(bound, bound))
    large = builder.fsub(_const(1.0), builder.fdiv(_const(2.0), builder.fadd(e, _const(1.0))))
    large = builder.select(builder.fcmp_ordered("<", x, _const(0.0)), builder.fneg(large), large)
    z = builder.fmul(x, x)
    p = _const(-5.70498872745e-3)
    for factor in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        p = _fma(builder, p, z, _const(factor))
    small = _fma(builder, builder.fmul(p, z), x, x)
    return builder.select(builder.fcmp_ordered("<", size, _const(0.625)), small, large)


def _word(arity):
    """A word of so many vectors that gives one."""

    def made(build):
        def codegen(context, builder, signature, args):
            return _pack(builder, [build(builder, *(_unpack(builder, arg)[0] for arg in args))])

        if arity == 1:

            @intrinsic
            def one(typingctx, a):
                return ONE(ONE), codegen

            return one

        @intrinsic
        def two(typingctx, a, b):
            return ONE(ONE, ONE), codegen

        return two

    return made


exp = _word(1)(_exp)
tanh = _word(1)(_tanh)
add = _word(2)(lambda builder, a, b: builder.fadd(a, b))
sub = _word(2)(lambda builder, a, b: builder.fsub(a, b))
mul = _word(2)(lambda builder, a, b: builder.fmul(a, b))
div = _word(2)(lambda builder, a, b: builder.fdiv(a, b))
#: The larger of each two; NaN where one is NaN.
maximum = _word(2)(lambda builder, a, b: _call(builder, "llvm.maximum.v16f32", _VEC, a, b))


@intrinsic
def splat(typingctx, x):
    """A float32 in all lanes."""

    def codegen(context, builder, signature, args):
        return _pack(builder, [_splat(builder, args[0])])

    return ONE(types.float32), codegen


@intrinsic
def number(typingctx, address):
    """One float32."""

    def codegen(context, builder, signature, args):
        return _scalar(builder, args[0])

    return types.float32(types.intp), codegen


@intrinsic
def load(typingctx, address):
    """Sixteen float32."""

    def codegen(context, builder, signature, args):
        return _pack(builder, [_load(builder, F32, args[0])])

    return ONE(types.intp), codegen


@intrinsic
def load_part(typingctx, address, count):
    def codegen(context, builder, signature, args):
        return _pack(builder, [_load(builder, F32, args[0], args[1])])

    return ONE(types.intp, types.intp), codegen


@intrinsic
def store(typingctx, address, lanes):
    def codegen(context, builder, signature, args):
        _store(builder, args[0], _unpack(builder, args[1])[0])
        return context.get_dummy_value()

    return types.void(types.intp, ONE), codegen


@intrinsic
def store_part(typingctx, address, lanes, count):
    def codegen(context, builder, signature, args):
        _store(builder, args[0], _unpack(builder, args[1])[0], args[2])
        return context.get_dummy_value()

    return types.void(types.intp, ONE, types.intp), codegen


@intrinsic
def lane(typingctx, lanes, index):
    """One of the sixteen."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(_unpack(builder, args[0])[0], builder.trunc(args[1], _I))

    return types.float32(ONE, types.intp), codegen
