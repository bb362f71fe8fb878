"""Libraries of CUDA programs for the host: shim, sources and runtime, by whatever C++ compiler there is."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from warmkv.kernels.cuda.source import digest, kernels_of
from warmkv.kernels.errors import KernelError

HERE = Path(__file__).resolve().parent
SHIM, RUNTIME = HERE / "shim.h", HERE / "runtime.cpp"
#: How long a library is kept that nobody uses.
KEPT_S = 3 * 24 * 3600
#: Accesses are instrumented, calls are not; libtsan is not linked. No -march: products and sums stay apart.
KERNEL_FLAGS = (
    "-std=c++20", "-O2", "-fPIC", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-ffp-contract=off",
    "-fno-math-errno", "-fno-strict-aliasing", "-fno-exceptions", "-fno-stack-protector",
    "-Wall", "-Wno-unknown-pragmas", "-Wno-unused", "-Werror",
)  # fmt: skip
RUNTIME_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fcf-protection=none", "-Wall", "-Werror")


@cache
def compiler_missing() -> str:
    """Why programs cannot be compiled here, or nothing."""
    return "" if shutil.which("g++") else "no g++ here, which the host harness compiles CUDA sources with"


@cache
def folder() -> Path:
    """Where libraries are kept: one folder a user, the same for all processes, since names tell contents. What
    nobody has used for days is removed."""
    where = Path(tempfile.gettempdir()) / f"warmkv-cuda-harness-{os.getuid()}"
    where.mkdir(mode=0o700, exist_ok=True)
    if where.stat().st_uid != os.getuid():
        raise KernelError(f"{where} belongs to another user")
    for path in where.iterdir():
        with suppress(OSError):
            if path.is_file() and time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
    return where


def library(text: str) -> Path:
    """The library of a joined source, compiled if nobody has. Raises KernelError with the compiler's log."""
    shim = SHIM.read_text()
    made = folder() / f"{digest(text, shim, RUNTIME.read_text(), *KERNEL_FLAGS, *RUNTIME_FLAGS)}.so"
    with _alone(made):
        if made.exists():
            os.utime(made)
        else:
            _build(text, shim, made)
    return made


def _build(text: str, shim: str, made: Path) -> None:
    kernels = "".join(f"WARMKV_KERNEL({name})\n" for name in kernels_of(text))
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        source, part = Path(scratch) / "program.cpp", Path(scratch) / "program.so"
        source.write_text(f'#line 1 "shim.h"\n{shim}\n{text}\n#line 1 "kernels"\n{kernels}')
        object_ = Path(scratch) / "program.o"
        _run("g++", *KERNEL_FLAGS, "-c", source, "-o", object_)
        _run("g++", "-shared", object_, _runtime(), "-lm", "-o", part)
        os.replace(part, made)


def _runtime() -> Path:
    """The runtime as an object file, compiled once."""
    code = RUNTIME.read_text()
    made = folder() / f"runtime-{hashlib.sha256((code + ' '.join(RUNTIME_FLAGS)).encode()).hexdigest()[:32]}.o"
    with _alone(made):
        if not made.exists():
            part = made.with_suffix(f".{os.getpid()}.part")
            _run("g++", *RUNTIME_FLAGS, "-c", RUNTIME, "-o", part)
            os.replace(part, made)
    return made


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(f"the host compiler refused a program:\n{done.stderr[:4000]}")


@contextmanager
def _alone(made: Path) -> Iterator[None]:
    """One process at a time per name; the others find it made."""
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
