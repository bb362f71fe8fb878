"""Codes of one, two and three bits in bytes.

    one bit     bit i % 8 of byte i // 8
    two bits    code[4j] | code[4j+1] << 2 | code[4j+2] << 4 | code[4j+3] << 6 in byte j
    three bits  three runs of size / 8 bytes, one after the other: bit 0 of all codes, bit 1, bit 2,
                each packed as one bit is

Read as little-endian words these are 32 signs or 16 two-bit codes each. Three-bit codes lie as planes
so that no code crosses a byte and each plane is read like signs are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from warmkv.kernels.errors import KernelError

U8 = npt.NDArray[np.uint8]


def packed_bytes(bits: int, size: int) -> int:
    """Bytes of one row of ``size`` codes. Raises KernelError unless its bits fill them."""
    if bits not in (1, 2, 3) or size < 0 or (size * bits) % 8 or (bits == 3 and size % 8):
        raise KernelError(f"{size} codes of {bits} bits do not fill whole bytes")
    return size * bits // 8


def pack(codes: U8, bits: int) -> U8:
    """``codes`` (..., size) below 2^bits as (..., bytes)."""
    packed_bytes(bits, codes.shape[-1])
    if bits == 3:
        return np.concatenate([pack((codes >> np.uint8(bit)) & np.uint8(1), 1) for bit in range(3)], axis=-1)
    if bits == 1:
        return np.packbits(codes, axis=-1, bitorder="little")
    four = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)
    shifted = four << np.array([0, 2, 4, 6], np.uint8)
    packed: U8 = np.bitwise_or.reduce(shifted, axis=-1)
    return packed


def unpack(packed: U8, bits: int) -> U8:
    """``packed`` (..., bytes) as codes (..., size)."""
    if bits == 1:
        return np.unpackbits(packed, axis=-1, bitorder="little")
    if bits == 2:
        four = packed[..., None] >> np.array([0, 2, 4, 6], np.uint8)
        return (four & np.uint8(3)).reshape(*packed.shape[:-1], 4 * packed.shape[-1])
    if bits != 3 or packed.shape[-1] % 3:
        raise KernelError(f"{packed.shape[-1]} bytes of {bits}-bit codes")
    run = packed.shape[-1] // 3
    planes = [unpack(packed[..., bit * run : (bit + 1) * run], 1) << np.uint8(bit) for bit in range(3)]
    codes: U8 = planes[0] | planes[1] | planes[2]
    return codes
