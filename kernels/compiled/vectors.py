"""LLVM in terms of sixteen lanes: types, constants and the instructions that words are made of.

Left to itself the compiler picks the order of a sum by what surrounds it, and a head would get other
bits alone than in its group. Here the order is in the instructions: lane after lane, then a fixed tree.
Vectors of 16 become one, two or four registers of the machine.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"
from llvmlite import ir
from numba.core import cgutils

WIDTH = 16
_F, _H, _I, _B = ir.FloatType(), ir.HalfType(), ir.IntType(32), ir.IntType(1)
_SHORT, _BYTE, _P = ir.IntType(16), ir.IntType(8), ir.IntType(64)
_VEC, _INTS, _MASK, _HALVES, _SHORTS, _BYTES = (ir.VectorType(kind, WIDTH) for kind in (_F, _I, _B, _H, _SHORT, _BYTE))


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
