"""Who runs CUDA kernels: the seam between the sources and whatever executes them.

`Launcher` is all that operations know. cupy's is in `cupy_launch`; tests bring one that runs the same
sources on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Program:
    """One compilation: ``sources`` are paths below `warmkv.kernels`, put together in order; ``defines`` are
    NAME=VALUE constants that specialise it. Equal programs are compiled once."""

    sources: tuple[str, ...]
    defines: tuple[tuple[str, int], ...] = ()


class Launcher(Protocol):
    """Compiles programs when they are first used and launches their kernels, in order on one stream.

    Products and sums are never contracted: sources say `fmaf` where they mean it, and give the bits they give
    on any processor. **Threading:** one caller at a time."""

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], block: int, arguments: tuple[Any, ...], *,
        shared: int = 0,
    ) -> None:  # fmt: skip
        """``arguments`` are device arrays (their address is passed), None (a null pointer) and numpy scalars
        (int32, int64, uint64, float32); ``shared`` bytes of dynamic shared memory a block. Raises KernelError
        with the compiler's log for sources that do not compile, and for a kernel that is not in them."""
        ...

    def constant(self, values: Any) -> Any:
        """A device array of the numbers of a small numpy array, for the caller to keep: tables are made once,
        outside of what is captured."""
        ...
