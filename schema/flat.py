"""The one place that touches FlatBuffers readers and their exceptions.

Python's FlatBuffers has no verifier: a hostile offset surfaces as whatever slicing, struct or
numpy raise. Readers run inside `reading`, which turns all of those into FormatError, and take
vectors as whole arrays, so that a claimed length is checked against the buffer at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import flatbuffers
import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import FormatError


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn any exception of a FlatBuffers accessor into FormatError."""
    try:
        yield
    except (struct.error, IndexError, ValueError, TypeError, OverflowError, AttributeError, KeyError, MemoryError) as exc:
        raise FormatError(f"{what}: not a readable FlatBuffer ({type(exc).__name__}: {exc})") from exc


def vector(value: object, dtype: str) -> npt.NDArray[np.generic]:
    """A generated ``...AsNumpy()`` result; an absent vector (the integer 0) becomes an empty array
    and an unaligned one, which only a foreign writer makes, a copy."""
    if isinstance(value, np.ndarray):
        return value if value.flags.aligned else value.copy()
    return np.zeros(0, dtype)


def octets(value: object) -> bytes:
    return vector(value, "u1").tobytes()


def text(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, bytes):
        raise FormatError(f"text is {type(value).__name__}")
    return value.decode("utf-8")


def put_bytes(builder: flatbuffers.Builder, data: bytes | memoryview) -> int:
    """A [ubyte] vector, copied in one piece."""
    return int(builder.CreateNumpyVector(np.frombuffer(data, np.uint8)))


def put_array(builder: flatbuffers.Builder, array: npt.NDArray[np.generic], dtype: str) -> int:
    """A vector of the elements ``dtype``; TypeError for any other array, whose bytes would be
    read back as other numbers."""
    if array.ndim != 1 or array.dtype.newbyteorder("<") != dtype:
        raise TypeError(f"array of {array.dtype} with {array.ndim} dimensions, expected one of {dtype}")
    return int(builder.CreateNumpyVector(array))


def elements(array: npt.NDArray[np.generic], dtype: str) -> tuple[int, int, bytes]:
    """How many elements ``dtype``, the bytes of one, and all of them; TypeError for any other array,
    whose bytes would be read back as other numbers."""
    if array.ndim != 1 or array.dtype.newbyteorder("<") != dtype:
        raise TypeError(f"array of {array.dtype} with {array.ndim} dimensions, expected one of {dtype}")
    return array.size, array.itemsize, array.astype(dtype, copy=False).tobytes()
