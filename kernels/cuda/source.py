"""The sources of programs, as one text for one compilation."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files

from warmkv.kernels.cuda.launch import Program
from warmkv.kernels.errors import KernelError

_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')


@cache
def read(path: str) -> str:
    """The text of one source, by its path below `warmkv.kernels`. Raises KernelError if there is none."""
    found = files("warmkv.kernels").joinpath(*path.split("/"))
    if not path.endswith(".cu") or not found.is_file():
        raise KernelError(f"no CUDA source {path} in warmkv.kernels")
    return found.read_text(encoding="utf-8")


def joined(program: Program) -> str:
    """Defines, then the sources in order; messages of compilers name the file and line of each."""
    defines = [f"#define {name} ({value})\n" for name, value in program.defines]
    return "".join(defines + [f'#line 1 "{path}"\n{read(path)}\n' for path in program.sources])


def kernels_of(text: str) -> tuple[str, ...]:
    """Names of the kernels in a source."""
    return tuple(_KERNEL.findall(text))


def digest(*parts: str) -> str:
    """A name for what was compiled from these texts."""
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part.encode())
    return made.hexdigest()[:32]
