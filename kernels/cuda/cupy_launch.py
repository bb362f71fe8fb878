"""Programs on a GPU, compiled and launched by cupy."""

from __future__ import annotations

from typing import Any

import numpy as np

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.nvrtc import OPTIONS
from warmkv.kernels.cuda.source import joined
from warmkv.kernels.errors import BackendMissing, KernelError

#: Dynamic shared memory that a kernel may have unasked.
UNASKED_SHARED_BYTES = 48 << 10
_NULL = np.uint64(0)


class CupyLauncher:
    """Launches on ``stream``, a cupy stream, and on its device. Programs are compiled once a launcher; cupy
    keeps what was compiled on disk, too.

    **Threading:** one caller at a time. Nothing is waited for: what fails later is noticed by whoever waits."""

    def __init__(self, stream: Any) -> None:
        """Raises BackendMissing without cupy."""
        self._cupy = _cupy()
        self._stream = stream
        self._device = self._cupy.cuda.Device(stream.device_id)
        self._modules: dict[Program, Any] = {}
        self._kernels: dict[tuple[Program, str], tuple[Any, Any]] = {}
        self._shared: dict[tuple[Program, str], int] = {}

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: int, arguments: tuple[Any, ...], *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        """See `Launcher`."""
        cuda = self._cupy.cuda
        passed = tuple(_NULL if argument is None else argument for argument in arguments)
        with self._device:
            raw, function = self._kernel(program, kernel)
            try:
                if shared > self._shared.get((program, kernel), UNASKED_SHARED_BYTES):
                    raw.max_dynamic_shared_size_bytes = shared
                    self._shared[program, kernel] = shared
                function(grid, (block, 1, 1), passed, shared, self._stream)
            except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
                raise KernelError(f"{kernel} of {program.sources[-1]}, {grid} blocks of {block} threads: {error}") from error

    def constant(self, values: Any) -> Any:
        """See `Launcher`."""
        with self._device, self._stream:
            made = self._cupy.ndarray(values.shape, values.dtype)
            made.set(np.ascontiguousarray(values), stream=self._stream)
            self._stream.synchronize()
            return made

    def _kernel(self, program: Program, kernel: str) -> tuple[Any, Any]:
        """A kernel as cupy has it: what its attributes are set on, and what is called."""
        found = self._kernels.get((program, kernel))
        if found is None:
            if program not in self._modules:
                self._modules[program] = self._cupy.RawModule(code=joined(program), options=OPTIONS, backend="nvrtc")
            found = self._kernels[program, kernel] = self._named(program, kernel)
        return found

    def _named(self, program: Program, kernel: str) -> tuple[Any, Any]:
        cuda = self._cupy.cuda
        try:
            raw = self._modules[program].get_function(kernel)
            return raw, raw.kernel
        except cuda.compiler.CompileException as error:
            raise KernelError(f"{' + '.join(program.sources)} does not compile:\n{error}") from error
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            raise KernelError(f"{kernel} of {program.sources[-1]}: {error}") from error


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendMissing("no cupy here: install warmkv[cuda] for kernels on a GPU") from error
    return cupy
