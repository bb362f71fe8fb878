"""What cupy's launcher tells cupy, seen by a stand-in; what comes of it is tested where there is a GPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from warmkv.kernels.cuda.cupy_launch import UNASKED_SHARED_BYTES, CupyLauncher
from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.source import joined
from warmkv.kernels.errors import BackendMissing, KernelError

PROGRAM = Program(("cuda/prelude.cu", "resident/advance.cu"))
STREAM = SimpleNamespace(device_id=3)


class DriverError(RuntimeError):
    pass


class RuntimeFault(RuntimeError):
    pass


class CompileFault(RuntimeError):
    pass


class Cupy:
    """Notes modules and launches. ``fails`` is raised where it is told to: "get" or "launch"."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.fails = fails or {}
        self.modules: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.shared: list[int] = []
        self.devices: list[int] = []
        self.cuda = SimpleNamespace(
            Device=self._device, driver=SimpleNamespace(CUDADriverError=DriverError),
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeFault), compiler=SimpleNamespace(CompileException=CompileFault),
        )  # fmt: skip

    def _device(self, number: int) -> Any:
        self.devices.append(number)
        return nullcontext()

    def RawModule(self, **options: Any) -> Any:
        self.modules.append(options)
        return SimpleNamespace(get_function=self._function)

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
    assert [module["code"] for module in cupy.modules] == [joined(PROGRAM), "#define A (1)\n" + joined(PROGRAM)]
    assert all("-fmad=false" in module["options"] and module["backend"] == "nvrtc" for module in cupy.modules)
    name, grid, block, passed, shared, stream = cupy.launches[0]
    assert (name, grid, block, shared, stream) == ("advance", (5, 2, 1), (64, 1, 1), 100, STREAM)
    assert passed[0] is array and passed[2] == 7
    # A null pointer is passed as 8 bytes of zeros.
    assert isinstance(passed[1], np.uint64) and passed[1] == 0
    assert cupy.devices == [3] and cupy.shared == [] and len(cupy.launches) == 3


def test_much_shared_memory_is_asked_for_when_it_grows(cupy: Cupy) -> None:
    launcher = CupyLauncher(STREAM)
    sizes = [UNASKED_SHARED_BYTES, UNASKED_SHARED_BYTES + 1, UNASKED_SHARED_BYTES + 1, 1000, 60_000, 50_000]
    for shared in sizes:
        launcher.launch(PROGRAM, "advance", (1, 1, 1), 32, (), shared=shared)
    assert cupy.shared == [UNASKED_SHARED_BYTES + 1, 60_000]
    assert [launch[4] for launch in cupy.launches] == sizes


@pytest.mark.parametrize("where, error, message", [
    ("get", CompileFault("program.cu(3): error: no"), r"does not compile:\nprogram.cu\(3\): error: no"),
    ("get", DriverError("CUDA_ERROR_NOT_FOUND"), "advance of resident/advance.cu: CUDA_ERROR_NOT_FOUND"),
    ("launch", DriverError("CUDA_ERROR_INVALID_VALUE"), r"\(1, 1, 1\) blocks of 32 threads: CUDA_ERROR_INVALID_VALUE"),
    ("launch", RuntimeFault("cudaErrorUnknown"), "cudaErrorUnknown"),
])  # fmt: skip
def test_what_cupy_says_becomes_an_error_of_ours(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", Cupy({where: error}))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match=message):
        CupyLauncher(STREAM).launch(PROGRAM, "advance", (1, 1, 1), 32, ())


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    with pytest.raises(BackendMissing, match=r"warmkv\[cuda\]"):
        CupyLauncher(STREAM)
