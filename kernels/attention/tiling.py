"""How decode attention is spread over the threads of a device: the shape that `decode.cu` is compiled for.

A warp keeps queries and sums of some heads in registers; how many lanes share a row decides how many numbers
that is for each, and how much is spent on adding up.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Numbers that a device loads, and that the sums of a lane are made of, at a time.
OCTET = 8
LANES = 32
#: Rows of a warp on their way at once, one behind the other.
ROWS = 4
#: Numbers of queries and sums that a lane keeps, at most: more would halve the warps of a processor.
KEPT = 96
#: Heads of a warp, at most: with ROWS of each, logits are kept by the lane as well.
MOST_HEADS = 5
#: Warps of a block, at least where they take different rows, at most where they take different heads.
ROW_WARPS, HEAD_WARPS = 4, 8
#: Warps that a processor runs side by side, by the registers that a lane seems to need: those of queries, sums and
#: rows on their way, and OTHERS. Compilers do with 128, 168 or 255.
WARPS_BY_NEED, WARPS_AT_LEAST = {128: 16, 192: 12}, 8
OTHERS = 32
#: Bytes of shared memory that a block has without asking.
SHARED_BYTES = 40 << 10


@dataclass(frozen=True, slots=True)
class Tiling:
    """``across`` lanes a row; ``heads`` a warp, ``chunks`` warps for more heads of the group, ``row_warps`` for
    more rows; ``sections`` blocks cover a group, ``beside`` of them run on one processor."""

    heads: int
    chunks: int
    row_warps: int
    across: int
    sections: int
    beside: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return LANES * self.chunks * self.row_warps

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        """What makes `decode.cu` so."""
        return (
            ("HEADS", self.heads), ("CHUNKS", self.chunks), ("ROW_WARPS", self.row_warps), ("ACROSS", self.across),
            ("ROWS", ROWS), ("BESIDE", self.beside),
        )  # fmt: skip


def tiling(group: int, key_width: int, value_width: int, key_words: int = 4, value_words: int = 4) -> Tiling:
    """The shape for groups of ``group`` query heads over rows that read as so many numbers, of which an octet comes
    in at most so many registers."""
    keys, values = -(-key_width // OCTET), -(-value_width // OCTET)
    shapes = (1 << power for power in range(LANES.bit_length()))
    across = min(shapes, key=lambda across: (_cost(group, keys, values, across), -across))
    pieces, heads = _pieces(group, _kept(keys, values, across))
    room = max(1, SHARED_BYTES // (4 * OCTET * (values | 1) * heads))
    chunks = min(pieces, HEAD_WARPS, room)
    row_warps = -(-ROW_WARPS // chunks)
    loaded = ROWS * (-(-keys // across) * key_words + -(-values // across) * value_words)
    need = heads * _kept(keys, values, across) + loaded + OTHERS
    warps = next((warps for most, warps in WARPS_BY_NEED.items() if need <= most), WARPS_AT_LEAST)
    return Tiling(heads, chunks, row_warps, across, -(-pieces // chunks), max(1, warps // (chunks * row_warps)))


def _kept(keys: int, values: int, across: int) -> int:
    """Numbers of one head that a lane keeps."""
    return OCTET * (-(-keys // across) + -(-values // across))


def _pieces(group: int, kept: int) -> tuple[int, int]:
    """In how many pieces a group is taken, and heads of each."""
    pieces = -(-group // min(MOST_HEADS, max(1, KEPT // kept)))
    return pieces, -(-group // pieces)


def _cost(group: int, keys: int, values: int, across: int) -> float:
    """Instructions of all lanes for a row, roughly: products, making numbers of bytes, adding up, exponentials."""
    kept = _kept(keys, values, across)
    pieces, heads = _pieces(group, kept)
    spilled = 10.0 * max(0, kept * heads - KEPT) + 40.0 * max(0, kept // OCTET - 4)
    held = max(1.0, ROWS * heads / across)
    return pieces * across * (kept * (heads + 3) + 4 * heads + 15 * held / ROWS + spilled)
