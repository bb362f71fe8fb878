"""The words of sixteen numbers, and machines that lack what makes them short."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

pytest.importorskip("numba")

#: Prints the widened f16 of all bits, e^x of some numbers, the widened fp8 of all bits, a block of each format under
#: some scales, and the f16 of numbers all over float32, as hexadecimal bytes.
PROGRAM = """
import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from warmkv.kernels.compiled import forms, lanes
from warmkv.kernels.compiled.vectors import WIDTH, _P

@intrinsic
def widened(typingctx, address):
    def codegen(context, builder, signature, args):
        return lanes._pack(builder, [forms._load(builder, forms.F16, args[0])])
    return lanes.ONE(types.intp), codegen

@njit("void(intp, intp, intp)")
def widen(codes, out, count):
    for index in range(0, count, WIDTH):
        lanes.store(out + 4 * index, widened(codes + 2 * index))

@intrinsic
def fp8(typingctx, address):
    def codegen(context, builder, signature, args):
        return lanes._pack(builder, [forms._load(builder, forms.FP8, args[0])])
    return lanes.ONE(types.intp), codegen

def read(form):
    @intrinsic
    def block(typingctx, address):
        def codegen(context, builder, signature, args):
            return lanes._pack(builder, forms._load_block(builder, form, args[0]))
        return lanes.Lanes(2)(types.intp), codegen
    return block

@intrinsic
def store_two(typingctx, address, two):
    def codegen(context, builder, signature, args):
        for index, vector in enumerate(lanes._unpack(builder, args[1])):
            forms._store(builder, builder.add(args[0], _P(64 * index)), vector)
        return context.get_dummy_value()
    return types.void(types.intp, lanes.Lanes(2)), codegen

q8_0, q5_1, q4_0 = read(forms.Q8_0), read(forms.Q5_1), read(forms.Q4_0)

@njit("void(intp, intp)")
def widen_fp8(codes, out):
    for index in range(0, 256, WIDTH):
        lanes.store(out + 4 * index, fp8(codes + index))

@njit("void(intp, intp, intp)")
def widen_blocks(blocks, out, count):
    for index in range(count):
        store_two(out + 384 * index, q8_0(blocks + 34 * index))
        store_two(out + 384 * index + 128, q5_1(blocks + 34 * index))
        store_two(out + 384 * index + 256, q4_0(blocks + 34 * index))

@njit("void(intp, intp, intp)")
def narrow(x, out, count):
    for index in range(0, count, WIDTH):
        lanes.store_halves(out + 2 * index, lanes.load(x + 4 * index), WIDTH)

@njit("void(intp, intp)")
def exponential(x, out):
    lanes.store(out, lanes.exp(lanes.load(x)))

codes = np.arange(1 << 16, dtype=np.uint16)
numbers = np.empty(1 << 16, np.float32)
widen(codes.ctypes.data, numbers.ctypes.data, codes.size)
x = np.linspace(-80, 1, 16, dtype=np.float32)
powers = np.empty_like(x)
exponential(x.ctypes.data, powers.ctypes.data)
bytes_ = np.arange(256, dtype=np.uint8)
eights = np.empty(256, np.float32)
widen_fp8(bytes_.ctypes.data, eights.ctypes.data)
blocks = np.random.default_rng(1).integers(0, 256, (64, 34), np.uint8)
unpacked = np.empty((64, 3, 32), np.float32)
widen_blocks(blocks.ctypes.data, unpacked.ctypes.data, len(blocks))
bits = np.arange(0, 1 << 32, 65521, dtype=np.uint32)[: 1 << 16].copy()
halves = np.empty(bits.size, np.uint16)
narrow(bits.ctypes.data, halves.ctypes.data, bits.size // WIDTH * WIDTH)
print(*(array.tobytes().hex() for array in (numbers, powers, eights, unpacked, halves)))
"""


@pytest.mark.parametrize("machine", ["", "x86-64", "x86-64-v2", "x86-64-v3"])
def test_any_machine_widens_halves_and_multiplies_and_adds(machine: str) -> None:
    if machine and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a machine of another kind")
    asked_for = {"NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": ""} if machine else {}
    environment = os.environ | asked_for | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    parts = [bytes.fromhex(part) for part in done.stdout.split()]
    numbers, powers, eights, unpacked = (np.frombuffer(part, np.float32) for part in parts[:4])
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(numbers, halves.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(numbers), np.signbit(halves))
    np.testing.assert_allclose(powers, np.exp(np.linspace(-80, 1, 16, dtype=np.float32).astype(np.float64)), rtol=3e-7)
    np.testing.assert_array_equal(eights, np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.array_equal(np.signbit(eights), np.arange(256) >= 128)
    blocks = np.random.default_rng(1).integers(0, 256, (64, 34), np.uint8)
    kinds = ((GGMLQuantizationType.Q8_0, 34), (GGMLQuantizationType.Q5_1, 24), (GGMLQuantizationType.Q4_0, 18))
    for index, (kind, width) in enumerate(kinds):
        with np.errstate(invalid="ignore"):
            wanted = quants.dequantize(np.ascontiguousarray(blocks[:, :width]), kind)
        np.testing.assert_array_equal(unpacked.reshape(64, 3, 32)[:, index], wanted)
    x = np.arange(0, 1 << 32, 65521, dtype=np.uint32)[: 1 << 16].view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(np.float16)
    ours = np.frombuffer(parts[4], np.float16)
    whole = len(x) // 16 * 16
    np.testing.assert_array_equal(ours[:whole], narrow[:whole])
    number = ~np.isnan(narrow[:whole])
    assert np.array_equal(np.signbit(ours[:whole][number]), np.signbit(narrow[:whole][number]))
