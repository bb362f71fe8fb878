"""Programs compiled by NVRTC, without a device or a driver: whether sources are CUDA, and what they cost.

NVRTC comes with the wheel `nvidia-cuda-nvrtc` or with a toolkit; it is found when first asked for.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.cuda.source import joined
from warmkv.kernels.errors import BackendMissing, KernelError

#: What every compilation is told: products and sums stay apart, so that bits are those of other processors.
OPTIONS = ("-std=c++17", "-fmad=false")
_USED = re.compile(r"Function properties for (\w+)|(\d+) bytes spill stores|Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A CUBIN; the compiler's ``log``, empty if it had nothing to say; and per kernel the registers a thread has
    and the bytes it spills."""

    cubin: bytes
    log: str
    registers: dict[str, int]
    spilled: dict[str, int]


def compile_cubin(program: Program, arch: str) -> Compiled:
    """``program`` for an architecture ("sm_90"). Raises KernelError with the log for what does not compile, its
    lines as file(line), and BackendMissing where there is no NVRTC."""
    library, handle = _library(), ctypes.c_void_p()
    source = joined(program).encode()
    _check(library, library.nvrtcCreateProgram(ctypes.byref(handle), source, b"program.cu", 0, None, None))
    try:
        options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={arch}", "--ptxas-options=-v")]
        status = library.nvrtcCompileProgram(handle, len(options), (ctypes.c_char_p * len(options))(*options))
        log = _text(library, handle, "ProgramLog").decode(errors="replace").strip("\0\n ")
        if status:
            raise KernelError(f"{' + '.join(program.sources)} does not compile for {arch}:\n{log}")
        return Compiled(_text(library, handle, "CUBIN"), *_told(log))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(handle))


def version() -> tuple[int, int]:
    """Of the NVRTC there is. Raises BackendMissing where there is none."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library = _library()
    _check(library, library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _told(log: str) -> tuple[str, dict[str, int], dict[str, int]]:
    """What is left of a log without the notes of the assembler, registers, and bytes spilled."""
    registers: dict[str, int] = {}
    spilled: dict[str, int] = {}
    rest, kernel = [], ""
    for line in log.splitlines():
        for name, spill, used in _USED.findall(line):
            kernel = name or kernel
            if spill:
                spilled[kernel] = int(spill)
            if used:
                registers[kernel] = int(used)
        if line.strip() and not line.lstrip().startswith("ptxas info") and "bytes stack frame" not in line:
            rest.append(line)
    return "\n".join(rest), registers, spilled


def _text(library: ctypes.CDLL, handle: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library, library[f"nvrtcGet{what}Size"](handle, ctypes.byref(size)))
    text = ctypes.create_string_buffer(max(1, size.value))
    _check(library, library[f"nvrtcGet{what}"](handle, text))
    return text.raw[: size.value]


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise KernelError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


@cache
def _library() -> ctypes.CDLL:
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise BackendMissing("no NVRTC here: install nvidia-cuda-nvrtc (extra cuda), or a CUDA toolkit")


def _candidates() -> Iterator[str]:
    """Where NVRTC may be: in wheels, which have a folder per major version, then on the loader's path."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), reverse=True):
            yield str(path)
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found
    for toolkit in sorted(Path("/usr/local").glob("cuda*/lib64/libnvrtc.so"), reverse=True):
        yield str(toolkit)
