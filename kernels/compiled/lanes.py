"""Sixteen float32 numbers at once: the words compiled kernels are written in.

What they are made of stands in `vectors`, and how rows are read in `forms`. Addresses are in bytes and need
no alignment; whoever passes one keeps the memory alive. ``count`` < 16 reads or writes so many numbers.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

from warmkv.kernels.compiled.forms import F16, F32, _load, _narrowed, _store
from warmkv.kernels.compiled.vectors import _I, _INTS, _VEC, WIDTH, _call, _const, _fma, _scalar, _shuffle, _splat


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
#: Each two neighbours in each other's place.
swap = _word(1)(lambda builder, a: _shuffle(builder, a, a, [lane ^ 1 for lane in range(WIDTH)]))
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
def load_halves(typingctx, address, count):
    """``count`` f16, of 16."""

    def codegen(context, builder, signature, args):
        return _pack(builder, [_load(builder, F16, args[0], args[1])])

    return ONE(types.intp, types.intp), codegen


@intrinsic
def store_halves(typingctx, address, lanes, count):
    def codegen(context, builder, signature, args):
        _store(builder, args[0], _narrowed(builder, _unpack(builder, args[1])[0]), args[2])
        return context.get_dummy_value()

    return types.void(types.intp, ONE, types.intp), codegen


@intrinsic
def lane(typingctx, lanes, index):
    """One of the sixteen."""

    def codegen(context, builder, signature, args):
        return builder.extract_element(_unpack(builder, args[0])[0], builder.trunc(args[1], _I))

    return types.float32(ONE, types.intp), codegen
