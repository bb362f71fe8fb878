"""Forms of rows: what is stored where a row lies, and how it becomes float32 in vectors of 16.

Rows are given by address, in bytes, and need no alignment: planes of any distance and segments packed
by others are read where they lie. Whoever passes an address keeps the memory alive. A form is known when code
is compiled; ``count`` < 16 reads so many numbers, the others are 0 and not touched. Blocks of the ggml
formats have 32 channels and are two vectors.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from llvmlite import ir
from numba.core.registry import cpu_target

from warmkv.kernels.compiled.vectors import (
    _BYTE,
    _BYTES,
    _F,
    _H,
    _HALVES,
    _I,
    _INTS,
    _MASK,
    _P,
    _SHORT,
    _SHORTS,
    _VEC,
    WIDTH,
    _at,
    _call,
    _const,
    _fma,
    _mask,
    _splat,
)  # fmt: skip

#: What a code is.
F32, F16, BF16, I8, FP8, Q8_0, Q5_1, Q4_0 = range(8)
#: Forms whose rows are blocks, each with a scale of its own.
BLOCKED = (Q8_0, Q5_1, Q4_0)
_CODES = {F32: _F, F16: _H, BF16: _SHORT, I8: _BYTE, FP8: _BYTE}
_NAMES = {F32: "f32", F16: "f16", BF16: "i16", I8: "i8", FP8: "i8"}


def _widens_halves():
    """Whether the machine compiled for turns f16 into float32 itself. Where it does not, LLVM calls a function
    that no process has."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return not triple.startswith(("x86", "i386", "i686")) or "+f16c" in features.split(",")


_WIDENS_HALVES = _widens_halves()


def _widened(builder, halves):
    """float32 of f16 in whole-number steps: exponents are moved by a product that is exact, denormals too."""
    bits = builder.zext(builder.bitcast(halves, _SHORTS), _INTS)
    size = builder.shl(builder.and_(bits, _const(0x7FFF, _INTS)), _const(13, _INTS))
    finite = builder.bitcast(builder.fmul(builder.bitcast(size, _VEC), _const(2.0**112)), _INTS)
    endless = builder.or_(size, _const(0x7F800000, _INTS))
    size = builder.select(builder.icmp_signed(">=", size, _const(0x7C00 << 13, _INTS)), endless, finite)
    sign = builder.shl(builder.and_(bits, _const(0x8000, _INTS)), _const(16, _INTS))
    return builder.bitcast(builder.or_(size, sign), _VEC)


def _narrowed(builder, x):
    """f16 of float32, to the nearest, ties to even; in whole-number steps where the machine has none of its own."""
    if _WIDENS_HALVES:
        return builder.bitcast(builder.fptrunc(x, _HALVES), _SHORTS)
    bits = builder.bitcast(x, _INTS)
    size = builder.and_(bits, _const(0x7FFFFFFF, _INTS))
    odd = builder.and_(builder.lshr(size, _const(13, _INTS)), _const(1, _INTS))
    rounded = builder.add(builder.add(size, odd), _const(0xFFF - (112 << 23), _INTS))
    normal = builder.lshr(rounded, _const(13, _INTS))
    # Beside 1/2 the last bit of a float32 is the last of the smallest halves: adding rounds.
    small = builder.sub(
        builder.bitcast(builder.fadd(builder.bitcast(size, _VEC), _const(0.5)), _INTS), _const(0x3F000000, _INTS)
    )  # fmt: skip
    found = builder.select(builder.icmp_signed("<", size, _const(113 << 23, _INTS)), small, normal)
    found = builder.select(builder.icmp_signed(">=", size, _const(143 << 23, _INTS)), _const(0x7C00, _INTS), found)
    found = builder.select(builder.icmp_signed(">", size, _const(255 << 23, _INTS)), _const(0x7E00, _INTS), found)
    sign = builder.lshr(builder.and_(bits, _const(1 << 31, _INTS)), _const(16, _INTS))
    return builder.trunc(builder.or_(found, sign), _SHORTS)


def _from_halves(builder, halves):
    return builder.fpext(halves, _VEC) if _WIDENS_HALVES else _widened(builder, halves)


def _half(builder, address):
    """One f16, in all lanes as float32."""
    value = builder.load(_at(builder, address, _H), align=1)
    return _splat(builder, builder.fpext(value, _F)) if _WIDENS_HALVES else _widened(builder, _splat(builder, value))


def _from_fp8(builder, codes):
    """float32 of e4m3fn by way of f16, whose exponent is 8 larger: every number is one there, none of them
    denormal in float32, where products would be slow."""
    bits = builder.zext(codes, _SHORTS)
    size = builder.shl(builder.and_(bits, _const(0x7F, _SHORTS)), _const(7, _SHORTS))
    nan = builder.icmp_signed("==", size, _const(0x7F << 7, _SHORTS))
    size = builder.select(nan, _const(0x7E00, _SHORTS), size)
    sign = builder.shl(builder.and_(bits, _const(0x80, _SHORTS)), _const(8, _SHORTS))
    halves = builder.bitcast(builder.or_(size, sign), _HALVES)
    return builder.fmul(_from_halves(builder, halves), _const(256.0))


def _load(builder, form, address, count=None):
    """Sixteen numbers of a form without blocks, as float32."""
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
        return _from_halves(builder, codes)
    if form == FP8:
        return _from_fp8(builder, codes)
    if form == BF16:
        return builder.bitcast(builder.shl(builder.zext(codes, _INTS), _const(16, _INTS)), _VEC)
    return builder.sitofp(builder.sext(codes, _INTS), _VEC)


def _load_block(builder, form, address):
    """The 32 numbers of a block, as two times sixteen float32. Scale times code is exact."""

    def bytes_at(offset):
        return builder.load(_at(builder, builder.add(address, _P(offset)), _BYTES), align=1)

    scale = _half(builder, address)
    if form == Q8_0:
        return tuple(builder.fmul(builder.sitofp(builder.sext(bytes_at(at), _INTS), _VEC), scale) for at in (2, 2 + WIDTH))
    packed = bytes_at(2 if form == Q4_0 else 8)
    codes = builder.and_(packed, _const(15, _BYTES)), builder.lshr(packed, _const(4, _BYTES))
    if form == Q4_0:
        whole = [builder.sext(builder.sub(code, _const(8, _BYTES)), _INTS) for code in codes]
        return tuple(builder.fmul(builder.sitofp(code, _VEC), scale) for code in whole)
    least = _half(builder, builder.add(address, _P(2)))
    found = []
    for offset, code in zip((4, 6), codes, strict=True):
        fifth = builder.bitcast(builder.load(_at(builder, builder.add(address, _P(offset)), _SHORT), align=1), _MASK)
        code = builder.or_(code, builder.select(fifth, _const(16, _BYTES), _const(0, _BYTES)))
        found.append(_fma(builder, builder.sitofp(builder.zext(code, _INTS), _VEC), scale, least))
    return tuple(found)


def _store(builder, address, vector, count=None):
    pointer = _at(builder, address, vector.type)
    if count is None:
        builder.store(vector, pointer, align=1)
        return
    name = f"llvm.masked.store.v16{'f32' if vector.type == _VEC else 'i16'}.p0"
    _call(builder, name, ir.VoidType(), vector, pointer, ir.Constant(_I, 1), _mask(builder, count))
