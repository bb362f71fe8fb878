"""A layer as a list of rows that forgets nothing it might be asked for: slow, and simple enough to trust.

Each row remembers its position. Trimmed rows stay in the list, so that what a window sees is known
whatever the layer under test gave up. Attention is one softmax in float64 over decoded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import turned

from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.quant.reference import decode, encode, refield
from warmkv.kernels.testing import softmax_attention
from warmkv.kvstore.live.plan import LayerPlan

WARM_UP = 64


@dataclass
class Row:
    """``planes``: keys and values, a block of one row for each alive head; its attention ``mass``."""

    position: int
    planes: tuple[list[Block], list[Block]]
    mass: float = 0.0


def numbers(block: Block) -> np.ndarray:
    """Rows in float64."""
    return turned.numbers(block) if block.turn is not None else decode(block).astype(np.float64)


@dataclass
class Twin:
    plan: LayerPlan
    sinks: np.ndarray | None = None
    rows: list[Row] = field(default_factory=list)
    trimmed: int = 0
    position: int = 0
    fields: list[list[np.ndarray | None]] = field(default_factory=list)
    index: int = 3

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.fields = [[None] * len(self.plan.alive_heads) for _ in range(2)]

    @property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        return self.plan.key_format, self.plan.value_format

    @property
    def stored(self) -> list[Row]:
        return self.rows[self.trimmed :]

    @property
    def is_open(self) -> bool:
        return self.plan.quantised and all(one is None for plane in self.fields for one in plane)

    @property
    def gapless(self) -> bool:
        first = self.position - len(self.stored)
        return [row.position for row in self.stored] == list(range(first, self.position))

    @property
    def base(self) -> int:
        return self.position - len(self.stored) if self.gapless else 0

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        for key_row, value_row in zip(k, v, strict=True):
            if self.is_open and len(self.stored) >= WARM_UP:
                self.freeze()
            planes = tuple(
                [self.written(np.ascontiguousarray(given[head]), plane, at) for at, head in enumerate(self.plan.alive_heads)]
                for plane, given in enumerate((key_row, value_row))
            )
            self.rows.append(Row(self.position, planes))
            self.position += 1

    def written(self, row: np.ndarray, plane: int, at: int) -> Block:
        """One row (size,) as it is stored."""
        format_ = self.formats[plane]
        if format_.rotated:
            return turned.stored(row, format_, turned.turn_of(self.plan, self.index, len(row)))
        return encode(row[None], format_, keys=plane == 0, field=self.fields[plane][at])

    def freeze(self) -> None:
        for plane, format_ in enumerate(self.formats):
            if not format_.quantised:
                continue
            for at in range(len(self.plan.alive_heads)):
                anew = refield(self.block(plane, at, self.stored))
                self.fields[plane][at] = anew.field
                for index, row in enumerate(self.stored):
                    row.planes[plane][at] = anew.rows(index, index + 1)

    def block(self, plane: int, at: int, rows: list[Row]) -> Block:
        """The rows of one alive head as one block; at least one row."""
        parts = [row.planes[plane][at] for row in rows]
        scales = None if parts[0].scales is None else np.concatenate([part.scales for part in parts])
        return Block(
            parts[0].format, np.concatenate([part.codes for part in parts]), scales, self.fields[plane][at], parts[0].turn
        )

    def refuses_truncation(self, count: int) -> str:
        """The name of the error that is expected, or nothing."""
        if not 0 <= count <= self.position:
            return "RecordError"
        back = self.position - count
        newest = [row.position for row in self.stored[len(self.stored) - count :]] if count <= len(self.stored) else []
        if newest != list(range(back, self.position)):
            return "CannotRewind"
        seen = range(max(0, back - self.plan.window + 1), back) if self.plan.window else range(0)
        held = {row.position for row in self.stored}
        return "CannotRewind" if count and not held.issuperset(seen) else ""

    def truncate(self, count: int) -> None:
        del self.rows[len(self.rows) - count :]
        self.position -= count

    def keep(self, kept: list[int]) -> None:
        self.rows, self.trimmed = [self.stored[at] for at in kept], 0

    def trim(self, slack: int, align: int, anchor: int | None) -> int:
        """The rows a trim gives up, by trying every multiple of ``align``."""
        window, end = self.plan.window, self.position if anchor is None else min(anchor, self.position)
        if not window or self.is_open or len(self.stored) <= 2 * window:
            return 0
        base, good = self.base, self.base
        for cut in range(0, self.position + 1, align):
            if cut <= end - window - slack and cut > good:
                good = cut
        self.trimmed += good - base
        return good - base

    def attend(self, q: np.ndarray, upto: int | None = None, *, observe: bool = True) -> np.ndarray:
        plan = self.plan
        out = np.zeros((plan.heads, plan.value_size))
        last = len(self.rows) if upto is None else self.trimmed + upto
        first = max(0, last - plan.window) if plan.window else self.trimmed
        seen = self.rows[first:last]
        if not seen:
            return out
        for at, head in enumerate(plan.alive_heads):
            mine = slice(head * plan.group, (head + 1) * plan.group)
            k, v = (numbers(self.block(plane, at, seen)) for plane in range(2))
            sinks = None if self.sinks is None else self.sinks[mine].tolist()
            answer, _, p = softmax_attention(
                q[mine].astype(np.float64), k, v, plan.logit_scale, 0, len(seen), plan.softcap, sinks
            )
            out[mine] = answer
            if observe:
                for row, mass in zip(seen, p.sum(axis=0), strict=True):
                    row.mass += mass
        return out
