"""Memory for rows: asked for in one place, so that a refusal is an answer and can be rehearsed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import OutOfMemory

#: Rows a plane has room for once it has any.
MIN_ROWS = 64


class Allocate(Protocol):
    """Where arrays come from. Contents are unspecified. Raises OutOfMemory with the bytes asked for."""

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]: ...


def allocate(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """An array of the process's own memory. Raises OutOfMemory, also for more than can be addressed."""
    requested = prod(shape) * dtype.itemsize
    if requested > sys.maxsize:
        raise OutOfMemory(f"{requested} bytes for {shape} of {dtype}: more than this machine can address", requested)
    with refusals(requested, f"{shape} of {dtype}"):
        return np.empty(shape, dtype)


@contextmanager
def refusals(requested: int, what: str) -> Iterator[None]:
    """Turn Python's MemoryError into OutOfMemory with ``requested`` bytes for ``what``."""
    try:
        yield
    except MemoryError as exc:
        raise OutOfMemory(f"{requested} bytes for {what} could not be had", requested) from exc


def grown(capacity: int, rows: int) -> int:
    """The capacity after growth from ``capacity`` to at least ``rows``: by half, so that appending row by
    row copies each row a bounded number of times."""
    return max(MIN_ROWS, rows, capacity + capacity // 2)
