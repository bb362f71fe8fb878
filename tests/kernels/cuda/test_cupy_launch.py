"""What cupy's launcher tells cupy, seen by a stand-in; what comes of it is tested where there is a GPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warmkv.kernels.cuda import cupy_launch
from warmkv.kernels.cuda.cupy_launch import UNASKED_SHARED_BYTES, CupyLauncher
from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.nvrtc import OPTIONS
from warmkv.kernels.cuda.source import joined
from warmkv.kernels.errors import BackendMissing, KernelError
from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant import cuda as quant

PROGRAM = Program(("cuda/prelude.cu", "resident/advance.cu"))
STREAM = SimpleNamespace(device_id=3)


class DriverError(RuntimeError):
    pass


class RuntimeFault(RuntimeError):
    pass


class CompileFault(RuntimeError):
    pass


class Exhausted(MemoryError):
    pass


class Gpu:
    compute_capability = "90"

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class Cupy:
    """Notes what is compiled and loaded, and launches. ``fails`` is raised where it is told to: "compile", "get",
    "launch" or "memory"."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.fails = fails or {}
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.loaded: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.shared: list[int] = []
        self.devices: list[int] = []
        self.cuda = SimpleNamespace(
            Device=self._device, driver=SimpleNamespace(CUDADriverError=DriverError),
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeFault),
            compiler=SimpleNamespace(CompileException=CompileFault, compile_using_nvrtc=self._compile),
            memory=SimpleNamespace(OutOfMemoryError=Exhausted),
        )  # fmt: skip

    def _device(self, number: int) -> Any:
        self.devices.append(number)
        return Gpu()

    def _compile(self, source: str, *, options: tuple[str, ...], filename: str) -> tuple[bytes, None]:
        if "compile" in self.fails:
            raise self.fails["compile"]
        self.compiled.append((source, options))
        return f"code {len(self.compiled)}".encode(), None

    def RawModule(self, *, path: str) -> Any:
        self.loaded.append(Path(path).read_bytes())
        return SimpleNamespace(get_function=self._function)

    def ndarray(self, shape: Any, dtype: Any) -> Any:
        raise self.fails["memory"]

    def _function(self, name: str) -> Any:
        if "get" in self.fails:
            raise self.fails["get"]
        outer = self

        class Function:
            @property
            def max_dynamic_shared_size_bytes(self) -> int:
                raise AssertionError("asked for")

            @max_dynamic_shared_size_bytes.setter
            def max_dynamic_shared_size_bytes(self, count: int) -> None:
                outer.shared.append(count)

            @staticmethod
            def kernel(*given: Any) -> None:
                if "launch" in outer.fails:
                    raise outer.fails["launch"]
                outer.launches.append((name, *given))

        return Function()


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_launch, "_CODE", {})


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Cupy:
    made = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", made)  # type: ignore[arg-type]
    return made


def test_a_program_is_compiled_once_as_its_sources_say(cupy: Cupy) -> None:
    launcher, array = CupyLauncher(STREAM), np.zeros(1, np.int32)
    for _ in range(2):
        launcher.launch(PROGRAM, "advance", (5, 2, 1), 64, (array, None, np.int32(7)), shared=100)
    launcher.launch(Program(PROGRAM.sources, (("A", 1),)), "advance", (1, 1, 1), 32, (array,))
    assert [text for text, _ in cupy.compiled] == [joined(PROGRAM), "#define A (1)\n" + joined(PROGRAM)]
    assert all(options == OPTIONS and "-fmad=false" in options for _, options in cupy.compiled)
    assert cupy.loaded == [b"code 1", b"code 2"]
    name, grid, block, passed, shared, stream = cupy.launches[0]
    assert (name, grid, block, shared, stream) == ("advance", (5, 2, 1), (64, 1, 1), 100, STREAM)
    assert passed[0] is array and passed[2] == 7
    # A null pointer is passed as 8 bytes of zeros.
    assert isinstance(passed[1], np.uint64) and passed[1] == 0
    assert cupy.devices == [3] and cupy.shared == [] and len(cupy.launches) == 3


def test_another_launcher_loads_what_was_compiled_for_a_gpu_of_its_kind(cupy: Cupy, monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ("90", "90", "100"):
        monkeypatch.setattr(Gpu, "compute_capability", capability)
        CupyLauncher(STREAM).launch(PROGRAM, "advance", (1, 1, 1), 32, ())
    assert cupy.loaded == [b"code 1", b"code 1", b"code 2"] and len(cupy.launches) == 3


def test_much_shared_memory_is_asked_for_when_it_grows(cupy: Cupy) -> None:
    launcher = CupyLauncher(STREAM)
    sizes = [UNASKED_SHARED_BYTES, UNASKED_SHARED_BYTES + 1, UNASKED_SHARED_BYTES + 1, 1000, 60_000, 50_000]
    for shared in sizes:
        launcher.launch(PROGRAM, "advance", (1, 1, 1), 32, (), shared=shared)
    assert cupy.shared == [UNASKED_SHARED_BYTES + 1, 60_000]
    assert [launch[4] for launch in cupy.launches] == sizes


@pytest.mark.parametrize("where, error, message", [
    ("compile", CompileFault("program.cu(3): error: no"), r"does not compile:\nprogram.cu\(3\): error: no"),
    ("get", DriverError("CUDA_ERROR_NO_BINARY"), r"resident/advance.cu cannot be loaded: CUDA_ERROR_NO_BINARY"),
    ("launch", DriverError("CUDA_ERROR_INVALID_VALUE"), r"\(1, 1, 1\) blocks of 32 threads: CUDA_ERROR_INVALID_VALUE"),
    ("launch", RuntimeFault("cudaErrorUnknown"), "cudaErrorUnknown"),
])  # fmt: skip
def test_what_cupy_says_becomes_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy({where: error}))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=message):
        CupyLauncher(STREAM).launch(PROGRAM, "advance", (1, 1, 1), 32, ())


def test_a_kernel_that_is_not_there_is_refused(cupy: Cupy) -> None:
    with pytest.raises(KernelError, match="retreat of resident/advance.cu: there is no such kernel, only advance"):
        CupyLauncher(STREAM).launch(PROGRAM, "retreat", (1, 1, 1), 32, ())


def test_the_gpu_of_a_stream_that_does_not_say_is_given(cupy: Cupy) -> None:
    CupyLauncher(SimpleNamespace(device_id=-1), 2)
    assert cupy.devices == [2]


@pytest.mark.parametrize("error", [Exhausted("out of memory"), RuntimeFault("out of memory"), RuntimeError("out of memory")])
def test_no_memory_for_a_table_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy({"memory": error}))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="a table of 12 bytes: out of memory"):
        CupyLauncher(nullcontext(), 0).constant(np.zeros(3, np.float32))


def test_what_cupy_compiles_keeps_subnormal_numbers_and_products_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cupy itself, its compiler and no device: as code that can be read. Its own modules would say .ftz."""
    cupy = pytest.importorskip("cupy")
    compiler = cupy.cuda.compiler
    monkeypatch.setattr(compiler, "_get_arch", lambda: "90")
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch=None: ("-arch=compute_90", "ptx"))
    read: list[str] = []

    def module(*, path: str) -> Any:
        read.append(Path(path).read_text())
        return SimpleNamespace(get_function=lambda name: name)

    monkeypatch.setattr(cupy, "RawModule", module)
    monkeypatch.setattr(cupy.cuda, "Device", lambda number: Gpu())
    program = quant.program("decode", RowFormat.Q5_1, 1, 32, keys=True)
    assert CupyLauncher(STREAM)._compiled(program) == {"decode": "decode"}
    (text,) = read
    assert "mul.rn.f32" in text and "add.rn.f32" in text and ".ftz" not in text and "fma." not in text


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    with pytest.raises(BackendMissing, match=r"warmkv\[cuda\]"):
        CupyLauncher(STREAM)
