"""Random rotations that a seed stands for: signs, then a flat orthogonal transform.

A head size is d = m * 2^k with m odd. With signs s, the natural-order Hadamard matrix H of 2^k and the
Hartley matrix T of m, T_ab = cos(2 pi ab/m) + sin(2 pi ab/m):

    R x = (T (x) H) (s * x) / sqrt(d)            R^-1 y = s * ((T (x) H) y / sqrt(d))

Channel a * 2^k + b is in row a and column b of what the product acts on. T and H are symmetric and
T T = m I, H H = 2^k I, so that one transform serves both ways for every d. For a power of two m is 1
and R is the randomised Hadamard transform, bit for bit that of the CERA runtime; entries of T are at
most sqrt(2) as large as those of a Hadamard matrix, which keeps other sizes nearly as flat. (A slice
of a larger Hadamard matrix would not be orthogonal.)

Order in float32: signs; T, adding b = 0, 1, ... one after the other; butterflies with strides 1, 2, 4, ...;
one multiplication by float32(1/sqrt(d)).

**Source:** xoshiro256** and splitmix64: Blackman and Vigna, arXiv 1805.01407; random rotations before
quantisation: TurboQuant, arXiv 2504.19874.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from warmkv.kernels.arrays import F32
from warmkv.kernels.errors import KernelError

_WORD = (1 << 64) - 1
#: Signs are packed eight to a byte.
SIZE_STEP = 8
MAX_SIZE = 1 << 16


def xoshiro(seed: int) -> Iterator[int]:
    """The endless outputs of xoshiro256**, its state filled by splitmix64 from a 64-bit seed."""
    state = []
    for index in range(1, 5):
        x = (seed + index * 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        state.append(x ^ (x >> 31))
    while True:
        yield (_turn((state[1] * 5) & _WORD, 7) * 9) & _WORD
        shifted = (state[1] << 17) & _WORD
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= shifted
        state[3] = _turn(state[3], 45)


def signs(seed: int, size: int) -> F32:
    """(size,) float32 of +1 and -1: the lowest bit of each output."""
    source = xoshiro(seed & _WORD)
    return np.array([1.0 if next(source) & 1 else -1.0 for _ in range(size)], np.float32)


def refusal(size: int) -> str | None:
    """Why rows of so many channels cannot be stored, None for those that can."""
    if not 0 < size <= MAX_SIZE:
        return f"heads of {size} channels: expected 1 to {MAX_SIZE}"
    if size % SIZE_STEP:
        return f"heads of {size} channels: not a multiple of {SIZE_STEP}, so that their bits do not fill bytes"
    return None


def odd_part(size: int) -> int:
    """m of size = m * 2^k."""
    return size // (size & -size)


def hartley(count: int) -> F32:
    """(count, count) float32, not normalised. Angles are reduced in whole numbers."""
    index = np.arange(count)
    angles = (2 * np.pi / count) * (np.outer(index, index) % count)
    matrix: F32 = (np.cos(angles) + np.sin(angles)).astype(np.float32)
    return matrix


@dataclass(frozen=True, slots=True)
class Rotation:
    """The two rotations of a layer, for all its heads: ``polar`` ahead of the codes of keys and values,
    ``jl`` ahead of the signs of what the codes of keys leave over. Equal ones have equal seeds and sizes.

    ``polar`` and ``jl`` are (size,) float32 signs, ``mix`` (m, m) float32; all are read-only."""

    layer_seed: int
    size: int
    polar: F32 = field(compare=False, repr=False)
    jl: F32 = field(compare=False, repr=False)
    mix: F32 = field(compare=False, repr=False)

    @classmethod
    def of(cls, seed: int, layer: int, size: int) -> Rotation:
        """For a layer of a model with a 64-bit seed. Raises KernelError for a seed or layer that does
        not fit and a head size that has no rotation."""
        if not 0 <= seed <= _WORD or not 0 <= layer <= _WORD:
            raise KernelError(f"seed {seed} of layer {layer}: expected whole numbers of 64 bits")
        reason = refusal(size)
        if reason is not None:
            raise KernelError(reason)
        return _rotation(int(seed) ^ int(layer), int(size))

    @property
    def scale(self) -> np.float32:
        return np.float32(1.0 / np.sqrt(np.float64(self.size)))

    @property
    def nbytes(self) -> int:
        """Of its arrays, which all rotations that are equal share."""
        return self.polar.nbytes + self.jl.nbytes + self.mix.nbytes

    def forward(self, rows: F32) -> F32:
        """``rows`` (..., size) float32 under the polar rotation, as a copy."""
        return self._transform(rows * self.polar)

    def inverse(self, rows: F32) -> F32:
        return self._transform(rows) * self.polar

    def forward_jl(self, rows: F32) -> F32:
        """``rows`` (..., size) float32 under the second rotation, as a copy."""
        return self._transform(rows * self.jl)

    def inverse_jl(self, rows: F32) -> F32:
        return self._transform(rows) * self.jl

    def _transform(self, rows: F32) -> F32:
        if rows.shape[-1:] != (self.size,) or rows.dtype != np.float32:
            raise KernelError(f"rows are {rows.dtype} of shape {rows.shape}, expected float32 (..., {self.size})")
        mixed = _mix(rows, self.mix)
        run = self.size // self.mix.shape[0]
        stride = 1
        while stride < run:
            pairs = mixed.reshape(-1, 2, stride)
            low, high = pairs[:, 0].copy(), pairs[:, 1]
            pairs[:, 0] += high
            np.subtract(low, high, out=pairs[:, 1])
            stride *= 2
        mixed *= self.scale
        return mixed


def _mix(rows: F32, mix: F32) -> F32:
    """T over the odd factor; always a contiguous copy."""
    count = mix.shape[0]
    if count == 1:
        return np.array(rows, np.float32, order="C")
    parts = np.ascontiguousarray(rows).reshape(-1, count, rows.shape[-1] // count)
    total = np.zeros_like(parts)
    for index in range(count):
        total += mix[:, index, None] * parts[:, index, None, :]
    return total.reshape(rows.shape)


@lru_cache(maxsize=1024)
def _rotation(layer_seed: int, size: int) -> Rotation:
    jl_seed = (layer_seed * 0x9E3779B97F4A7C15 + 1) & _WORD
    arrays = signs(layer_seed, size), signs(jl_seed, size), hartley(odd_part(size))
    for array in arrays:
        array.flags.writeable = False
    return Rotation(layer_seed, size, *arrays)


def _turn(word: int, bits: int) -> int:
    return ((word << bits) | (word >> (64 - bits))) & _WORD
