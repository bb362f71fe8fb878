"""Rows of all heads, token after token, wherever blocks of them lie: where they lie so already, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.lib.stride_tricks import as_strided

from warmkv.kernels.attention.reference import seen
from warmkv.kernels.formats import Block
from warmkv.kernels.quant.packed import Packed, pack, packed_dtype, packed_shape
from warmkv.kvstore.live.rows.base import PlaneRows


def laid(plane: PlaneRows, first: int = 0) -> list[Packed]:
    """The record bytes of the plane's rows from ``first`` on, in parts that follow one another: views of a
    mapped prefix, copies of what lies otherwise. To be used while the plane's blocks are."""
    heads = [
        [block.rows(low, high) for block, low, high in seen(plane.blocks(head), first, len(plane))] for head in range(plane.heads)
    ]
    if len({tuple(map(len, blocks)) for blocks in heads}) > 1:
        return [pack(heads, plane.format, plane.size, keys=plane.keys)]
    return [_part(blocks, plane) for blocks in zip(*heads, strict=True)]


def _part(blocks: Sequence[Block], plane: PlaneRows) -> Packed:
    """Of one block a head."""
    width = plane.format.row_bytes(plane.size, keys=plane.keys)
    codes = blocks[0].codes
    start = codes.ctypes.data
    apart = codes.strides[0] == len(blocks) * width or len(codes) < 2
    if plane.format.quantised or not apart or not _side_by_side(blocks, start, width):
        return pack([[block] for block in blocks], plane.format, plane.size, keys=plane.keys)
    shape = packed_shape(plane.format, len(blocks), plane.size, keys=plane.keys)
    dtype = packed_dtype(plane.format)
    strides = [len(blocks) * width, dtype.itemsize] if len(shape) == 1 else [len(blocks) * width, width, dtype.itemsize]
    # Every byte of it is one of some block, and all of these are alive.
    return as_strided(codes, (len(codes), *shape), strides, writeable=False)


def _side_by_side(blocks: Sequence[Block], start: int, width: int) -> bool:
    """Whether the rows of each head lie behind those of the head before, as far apart."""
    strides = blocks[0].codes.strides
    return all(
        block.codes.ctypes.data == start + head * width and block.codes.strides == strides for head, block in enumerate(blocks)
    )
