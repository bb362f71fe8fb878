"""The words of sixteen numbers, and machines that lack what makes them short."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("numba")

#: Prints the widened f16 of all bits, then e^x of some numbers, as hexadecimal bytes.
PROGRAM = """
import numpy as np
from numba import njit, types
from numba.extending import intrinsic
from warmkv.kernels.compiled import lanes

@intrinsic
def widened(typingctx, address):
    def codegen(context, builder, signature, args):
        return lanes._pack(builder, [lanes._load(builder, lanes.F16, args[0])])
    return lanes.ONE(types.intp), codegen

@njit("void(intp, intp, intp)")
def widen(codes, out, count):
    for index in range(0, count, lanes.WIDTH):
        lanes.store(out + 4 * index, widened(codes + 2 * index))

@njit("void(intp, intp)")
def exponential(x, out):
    lanes.store(out, lanes.exp(lanes.load(x)))

codes = np.arange(1 << 16, dtype=np.uint16)
numbers = np.empty(1 << 16, np.float32)
widen(codes.ctypes.data, numbers.ctypes.data, codes.size)
x = np.linspace(-80, 1, 16, dtype=np.float32)
powers = np.empty_like(x)
exponential(x.ctypes.data, powers.ctypes.data)
print(numbers.tobytes().hex(), powers.tobytes().hex())
"""


@pytest.mark.parametrize("machine", ["", "x86-64", "x86-64-v2", "x86-64-v3"])
def test_any_machine_widens_halves_and_multiplies_and_adds(machine: str) -> None:
    if machine and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a machine of another kind")
    asked_for = {"NUMBA_CPU_NAME": machine, "NUMBA_CPU_FEATURES": ""} if machine else {}
    environment = os.environ | asked_for | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    numbers, powers = (np.frombuffer(bytes.fromhex(part), np.float32) for part in done.stdout.split())
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(numbers, halves.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(numbers), np.signbit(halves))
    np.testing.assert_allclose(powers, np.exp(np.linspace(-80, 1, 16, dtype=np.float32).astype(np.float64)), rtol=3e-7)
