"""A launcher of CUDA programs on the host: arrays are numpy's, threads are fibers."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuda_harness.build import compiler_missing, library
from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.source import joined
from warmkv.kernels.errors import KernelError

#: The order in which threads of a block, and blocks, come to run.
ORDERS = ("forward", "reverse", "shuffled")
#: What a parameter is to the shim: bytes of a whole number, or one of these.
POINTER, WRITABLE, FLOAT = 0, ord("w"), ord("f")
MOST_THREADS = 1024
#: Of addresses that a device hands out.
ALIGN = 256
#: Programs, shared by all launchers, keep the state of a launch in variables.
_LOCK = threading.Lock()
_LIBRARIES: dict[Program, ctypes.CDLL] = {}


class HostLauncher:
    """Runs programs in ``order``; ``edit`` changes joined sources before they are compiled, for tests that want
    to see a fault found. Raises KernelError for what a device would do silently: accesses outside of arrays, or
    not aligned, races on shared memory and on arrays, barriers that not all threads come to. Where there is no compiler, who asks
    for one is skipped."""

    def __init__(self, order: str = "forward", *, seed: int = 0, edit: Callable[[str], str] | None = None) -> None:
        if compiler_missing():
            pytest.skip(compiler_missing())
        self.order, self.seed, self.edit = ORDERS.index(order), seed, edit
        self.launches = 0
        self._libraries: dict[Program, ctypes.CDLL] = {} if edit else _LIBRARIES

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: int, arguments: tuple[Any, ...], *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        """See `Launcher`."""
        where = f"{kernel} of {program.sources[-1]}"
        if min(grid) < 1 or not 1 <= block <= MOST_THREADS:
            raise KernelError(f"{where}: a grid of {grid} with blocks of {block} threads")
        with _LOCK:
            code = self._library(program)
            try:
                run, kinds_of = code[f"warmkv_run_{kernel}"], code[f"warmkv_kinds_{kernel}"]
            except AttributeError as error:
                raise KernelError(f"{where}: there is no such kernel") from error
            kinds = (ctypes.c_int * 64)()
            values, ranges = _passed(arguments, list(kinds[: kinds_of(kinds)]), where)
            addresses = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
            self.launches += 1
            sizes = (ctypes.c_longlong * 8)(*grid, block, shared, self.order, self.seed + self.launches, len(ranges))
            spans = (ctypes.c_ulonglong * (3 * len(ranges) + 1))(*[number for span in ranges for number in span])
            code.warmkv_launch.restype = ctypes.c_char_p
            said = code.warmkv_launch(run, addresses, sizes, spans)
        if said is not None:
            raise KernelError(f"{where}: {said.decode()}")

    def constant(self, values: Any) -> Any:
        """See `Launcher`."""
        return aligned(values)

    def _library(self, program: Program) -> ctypes.CDLL:
        if program not in self._libraries:
            text = joined(program)
            self._libraries[program] = ctypes.CDLL(str(library(self.edit(text) if self.edit else text)))
        return self._libraries[program]


def aligned(array: Any) -> Any:
    """A copy that begins as aligned as a device's memory does; numpy's own may not."""
    array = np.ascontiguousarray(array)
    room = np.empty(array.nbytes + ALIGN, np.uint8)
    start = -room.ctypes.data % ALIGN
    placed = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def _passed(arguments: tuple[Any, ...], kinds: list[int], where: str) -> tuple[list[Any], list[tuple[int, int, int]]]:
    """Arguments as C has them, and first and last addresses of arrays and whether they may be written. Raises
    KernelError where they are not what the kernel takes."""
    if len(arguments) != len(kinds):
        raise KernelError(f"{where}: {len(arguments)} arguments, expected {len(kinds)}")
    values: list[Any] = []
    ranges = []
    for number, (argument, kind) in enumerate(zip(arguments, kinds, strict=True)):
        if argument is None or isinstance(argument, np.ndarray):
            fits = kind in (POINTER, WRITABLE)
            start = 0 if argument is None else argument.ctypes.data
            values.append(ctypes.c_void_p(start))
            if argument is not None:
                if not argument.flags.c_contiguous:
                    raise KernelError(f"{where}: argument {number} is not contiguous")
                ranges.append((start, start + argument.nbytes, int(kind == WRITABLE)))
        elif isinstance(argument, np.float32):
            fits = kind == FLOAT
            values.append(ctypes.c_float(float(argument)))
        elif isinstance(argument, (np.int32, np.uint32, np.int64, np.uint64)):
            fits = kind == argument.dtype.itemsize
            values.append(np.ctypeslib.as_ctypes_type(argument.dtype)(int(argument)))
        else:
            raise KernelError(f"{where}: argument {number} is {type(argument).__name__}, expected an array or a numpy scalar")
        if not fits:
            raise KernelError(f"{where}: argument {number} is not what the kernel takes")
    return values, ranges
