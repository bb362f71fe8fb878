"""Programs on a GPU, compiled and launched by cupy.

cupy's modules add -ftz=true to whatever they compile: subnormal numbers become 0, and with them the smallest
codes of fp8. So the compiler is called directly, and modules are made of what it gives.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.nvrtc import OPTIONS
from warmkv.kernels.cuda.source import digest, joined, kernels_of
from warmkv.kernels.errors import BackendMissing, KernelError

#: Dynamic shared memory that a kernel may have unasked.
UNASKED_SHARED_BYTES = 48 << 10
_NULL = np.uint64(0)
#: What the compiler gave for programs and kinds of GPU, shared by all launchers of a process.
_CODE: dict[tuple[Program, str], bytes] = {}


class CupyLauncher:
    """Launches on ``stream``, a cupy stream, and on the GPU of that number (None: the stream's own). Programs
    are compiled once a process and kind of GPU.

    **Threading:** one caller at a time. Nothing is waited for: what fails later is noticed by whoever waits."""

    def __init__(self, stream: Any, device: int | None = None) -> None:
        """Raises BackendMissing without cupy."""
        self._cupy = _cupy()
        self._stream = stream
        self._device = self._cupy.cuda.Device(stream.device_id if device is None else device)
        self._kernels: dict[Program, dict[str, Any]] = {}
        self._shared: dict[tuple[Program, str], int] = {}

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: int, arguments: tuple[Any, ...], *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        """See `Launcher`."""
        passed = tuple(_NULL if argument is None else argument for argument in arguments)
        with self._device:
            raw = self._kernel(program, kernel)
            try:
                if shared > self._shared.get((program, kernel), UNASKED_SHARED_BYTES):
                    raw.max_dynamic_shared_size_bytes = shared
                    self._shared[program, kernel] = shared
                raw.kernel(grid, (block, 1, 1), passed, shared, self._stream)
            except self._faults() as error:
                raise KernelError(f"{kernel} of {program.sources[-1]}, {grid} blocks of {block} threads: {error}") from error

    def constant(self, values: Any) -> Any:
        """See `Launcher`."""
        with self._device, self._stream:
            try:
                made = self._cupy.ndarray(values.shape, values.dtype)
                made.set(np.ascontiguousarray(values), stream=self._stream)
                self._stream.synchronize()
            except (RuntimeError, self._cupy.cuda.memory.OutOfMemoryError) as error:
                # Of CUDA, and cupy's own while the stream is captured.
                raise KernelError(f"a table of {values.nbytes} bytes: {error}") from error
            return made

    def _kernel(self, program: Program, kernel: str) -> Any:
        found = self._kernels.get(program)
        if found is None:
            found = self._kernels[program] = self._compiled(program)
        if kernel not in found:
            raise KernelError(f"{kernel} of {program.sources[-1]}: there is no such kernel, only {', '.join(found)}")
        return found[kernel]

    def _compiled(self, program: Program) -> dict[str, Any]:
        """All kernels of a program, loaded."""
        cuda, text = self._cupy.cuda, joined(program)
        try:
            kind = program, self._device.compute_capability
            if kind not in _CODE:
                _CODE[kind], _ = cuda.compiler.compile_using_nvrtc(text, options=OPTIONS, filename="program.cu")
            with TemporaryDirectory() as folder:
                # cupy keeps modules by path: the name tells contents.
                path = Path(folder, f"{digest(text)}.cubin")
                path.write_bytes(_CODE[kind])
                module = self._cupy.RawModule(path=str(path))
                return {name: module.get_function(name) for name in kernels_of(text)}
        except cuda.compiler.CompileException as error:
            raise KernelError(f"{' + '.join(program.sources)} does not compile:\n{error}") from error
        except self._faults() as error:
            raise KernelError(f"{' + '.join(program.sources)} cannot be loaded: {error}") from error

    def _faults(self) -> tuple[type[Exception], ...]:
        """What cupy raises where CUDA fails."""
        cuda = self._cupy.cuda
        return cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendMissing("no cupy here: install warmkv[cuda] for kernels on a GPU") from error
    return cupy
