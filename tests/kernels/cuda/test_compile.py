"""Every source compiles for the devices there are, without a word from the compiler, and names its faults."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warmkv.kernels
from warmkv.kernels.cuda import nvrtc, source
from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.errors import BackendMissing, KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.cuda import CudaOperations
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.rope.reference import Pairs, Rope
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn

ARCHES = ("sm_80", "sm_90", "sm_100")
#: Formats of keys and values, and sizes of heads: every format, and sizes that rows are less aligned for.
SIDES = (
    (RowFormat.Q8_0, RowFormat.Q5_1, 128), (RowFormat.F16, RowFormat.F16, 72), (RowFormat.F32, RowFormat.Q8_2F, 33),
    (RowFormat.BF16, RowFormat.FP8, 128), (RowFormat.Q8_2F, RowFormat.Q4_0, 128), (RowFormat.TQ_KEY, RowFormat.TQ_VALUE, 128),
    (RowFormat.TQ3, RowFormat.TQ_VALUE, 128),
)  # fmt: skip
#: So many registers let three blocks of 128 threads share a processor. Bytes that a thread spills once are not felt.
MOST_REGISTERS, MOST_SPILLED = 168, 16
#: The most threads of a block, a product, and the kernel they are declared of.
_BOUND = re.compile(r"__launch_bounds__\(([^,)]+)[^)]*\)\s*(\w+)\s*\(")
KERNELS = Path(warmkv.kernels.__file__).resolve().parent


def nvrtc_missing() -> str:
    """Why nothing can be compiled here, or nothing."""
    try:
        nvrtc.version()
    except BackendMissing as error:
        return str(error)
    return ""


needs_nvrtc = pytest.mark.skipif(bool(nvrtc_missing()), reason=nvrtc_missing() or "never")


class Noting:
    """A launcher that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: dict[Program, dict[str, int]] = {}

    def launch(self, program: Program, kernel: str, grid: Any, block: int, arguments: Any, *, shared: int = 0) -> None:
        known = self.asked.setdefault(program, {})
        known[kernel] = max(block, known.get(kernel, 0))

    def constant(self, values: Any) -> Any:
        return values


def plane(format_: RowFormat, size: int, *, keys: bool) -> ResidentPlane:
    heads, rows = 2, 256
    data = np.zeros(rows * heads * format_.row_bytes(size, keys=keys) + TAIL_PAD, np.uint8)
    turn = Turn(Rotation.of(7, 0, size)) if format_.rotated else None
    return ResidentPlane(format_, heads, size, keys, rows, data, turn=turn)


@cache
def asked() -> dict[Program, dict[str, int]]:
    """Programs, and kernels of them with the most threads of a block, that operations come to over planes of every
    format, of usual sizes and an odd one."""
    launcher = Noting()
    operations, counters = CudaOperations(launcher), Counters(np.zeros(1, np.int32), np.zeros(1, np.int32))
    for key_format, value_format, size in SIDES:
        keys, values = plane(key_format, size, keys=True), plane(value_format, size, keys=False)
        for side in (keys, values):
            operations.append(side, np.zeros((3, 2, size), np.float32), counters)
            operations.decode(side, 0, 3, np.zeros((3, 2, size), np.float32))
        q, out = np.zeros((8, size), np.float32), np.zeros((8, size), np.float32)
        scratch = np.zeros(operations.scratch_floats(8, size, keys.rows), np.float32)
        operations.attend(q, keys, values, counters, out=out, scratch=scratch, scale=1.0)
        operations.merge(np.zeros((3, 8, size), np.float32), *np.zeros((2, 3, 8), np.float32), out)
        operations.gather(keys, np.arange(2, dtype=np.int32), np.zeros(2 * keys.row_bytes, np.uint8))
    for format_, pairs in ((RowFormat.F32, Pairs.NEOX), (RowFormat.F16, Pairs.NORM), (RowFormat.BF16, Pairs.NEOX)):
        operations.shift(plane(format_, 64, keys=True), 0, 3, -5, Rope(64, 1e4, pairs))
    operations.advance(counters, 1)
    return launcher.asked


@cache
def compiled() -> dict[tuple[Program, str], nvrtc.Compiled | KernelError]:
    """Every program for one architecture, and one of each set of sources for all of them."""
    first: dict[tuple[str, ...], Program] = {}
    wanted = [(program, ARCHES[1]) for program in asked()]
    for program in asked():
        first.setdefault(program.sources, program)
    wanted += [(program, arch) for program in first.values() for arch in ARCHES if arch != ARCHES[1]]

    def one(what: tuple[Program, str]) -> nvrtc.Compiled | KernelError:
        try:
            return nvrtc.compile_cubin(*what)
        except KernelError as error:
            return error

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(wanted, pool.map(one, wanted), strict=True))


def test_every_format_is_among_them() -> None:
    assert {format_ for side in SIDES for format_ in side[:2]} == set(RowFormat)


def test_every_source_and_every_kernel_is_in_use() -> None:
    there = {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")}
    assert there == {path for program in asked() for path in program.sources}
    used = {kernel for kernels in asked().values() for kernel in kernels}
    assert used == {kernel for path in there for kernel in source.kernels_of(source.read(path))}


def test_blocks_are_no_larger_than_kernels_are_compiled_for() -> None:
    """A GPU refuses such a launch; the host does not look."""
    bounded = set()
    for program, kernels in asked().items():
        names = {"LANES": 32, **dict(program.defines)}
        for bound, kernel in _BOUND.findall(source.joined(program)):
            threads = prod(names.get(factor) or int(factor) for factor in re.findall(r"\w+", bound))
            assert kernels.get(kernel, 0) <= threads <= 1024, (program, kernel)
            bounded.add(kernel)
    assert bounded == {"append", "decode", "attend", "merge"}


@needs_nvrtc
def test_every_program_compiles_for_every_architecture() -> None:
    failed = [str(found) for found in compiled().values() if isinstance(found, KernelError)]
    assert failed == []
    assert {(program.sources, arch) for program, arch in compiled()} == {
        (program.sources, arch) for program in asked() for arch in ARCHES
    }


@needs_nvrtc
def test_the_compiler_has_nothing_to_say_and_kernels_fit_their_registers() -> None:
    dear = []
    for (program, arch), found in compiled().items():
        assert isinstance(found, nvrtc.Compiled)
        assert found.log == "" and found.cubin.startswith(b"\x7fELF"), program
        names = {kernel for path in program.sources for kernel in source.kernels_of(source.read(path))}
        assert set(found.registers) == set(found.spilled) == names, program
        if max(found.spilled.values()) > MOST_SPILLED or max(found.registers.values()) > MOST_REGISTERS:
            dear.append((program, arch, found.registers, found.spilled))
    assert dear == []


@needs_nvrtc
def test_faults_are_told_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void k(float* out) {\n    out[0] = nothing_like_this;\n}\n'
    monkeypatch.setattr(source, "read", lambda path: text)
    with pytest.raises(KernelError, match=r'does not compile for sm_90:\ntried/it\.cu\(2\): error: .*"nothing_like_this"'):
        nvrtc.compile_cubin(Program(("tried/it.cu",)), "sm_90")
    with pytest.raises(KernelError, match="arch"):
        nvrtc.compile_cubin(Program(("tried/it.cu",)), "sm_1")


@needs_nvrtc
def test_warnings_are_told_and_products_are_not_contracted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        source, "read", lambda path: 'extern "C" __global__ void k(float* x) { int y; x[0] = x[1] * x[2] + x[N]; }'
    )
    found = nvrtc.compile_cubin(Program(("tried/it.cu",), (("N", 3),)), "sm_90")
    assert "tried/it.cu(1): warning" in found.log and found.registers["k"] > 0
    monkeypatch.setattr(nvrtc, "OPTIONS", ("-std=c++17", "-fmad=true"))
    assert nvrtc.compile_cubin(Program(("tried/it.cu",), (("N", 3),)), "sm_90").cubin != found.cubin


def test_defines_come_first_and_sources_in_order() -> None:
    text = source.joined(Program(("cuda/prelude.cu", "resident/advance.cu"), (("A", 3), ("B", -1))))
    assert text.startswith('#define A (3)\n#define B (-1)\n#line 1 "cuda/prelude.cu"\n')
    assert text.index('#line 1 "resident/advance.cu"') > text.index("typedef")
    assert source.kernels_of(text) == ("advance",)
    for path in ("cuda/absent.cu", "cuda", "../schema/errors.py"):
        with pytest.raises(KernelError, match="no CUDA source"):
            source.read(path)


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_candidates", lambda: iter(["/nowhere/libnvrtc.so"]))
    nvrtc._library.cache_clear()
    try:
        with pytest.raises(BackendMissing, match="nvidia-cuda-nvrtc"):
            nvrtc.compile_cubin(Program(("cuda/prelude.cu",)), "sm_90")
    finally:
        nvrtc._library.cache_clear()
