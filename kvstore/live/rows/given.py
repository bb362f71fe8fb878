"""Stored rows that come from elsewhere, checked against the plane they are to be part of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from warmkv.kernels.errors import KernelError
from warmkv.kernels.formats import F32, Block, RowFormat, check_block, total_rows
from warmkv.kernels.turboquant.turn import Turn
from warmkv.schema.errors import RecordError


class Made(Protocol):
    """What a plane's rows are like."""

    format: RowFormat
    heads: int
    size: int
    groups: int
    name: str
    turn: Turn | None


def check_given(rows: Sequence[Sequence[Block]], plane: Made) -> None:
    """Raises RecordError unless ``rows`` hold blocks of as many rows for every head, all of them of the
    plane's format, geometry and rotation."""
    if len(rows) != plane.heads:
        raise RecordError(f"{plane.name}: rows of {len(rows)} heads, expected {plane.heads}")
    counts = [total_rows(blocks) for blocks in rows]
    if len(set(counts)) > 1:
        raise RecordError(f"{plane.name}: heads of {counts} rows, expected as many in each")
    for head, blocks in enumerate(rows):
        for index, block in enumerate(blocks):
            where = f"{plane.name}, head {head}, block {index}"
            if block.format is not plane.format:
                raise RecordError(f"{where}: rows of {block.format.value}, expected {plane.format.value}")
            try:
                check_block(block, plane.size, where)
            except KernelError as exc:
                raise RecordError(str(exc)) from exc
            if block.turn != plane.turn:
                raise RecordError(f"{where}: rows rotated as {block.turn}, expected {plane.turn}")
            if block.scales is not None and block.scales.shape[1] != plane.groups:
                raise RecordError(f"{where}: {block.scales.shape[1]} scales a row, expected {plane.groups}")


def common_field(rows: Sequence[Sequence[Block]], plane: Made) -> F32 | None:
    """The field (heads, size) that all rows were written against; None where it is open or there is none.
    Rows of different fields are never rows of one plane: raises RecordError."""
    fields: list[F32 | None] = []
    for head, blocks in enumerate(rows):
        found = {None if block.field is None else block.field.tobytes() for block in blocks}
        if len(found) > 1:
            raise RecordError(f"{plane.name}, head {head}: rows of {len(found)} different fields, expected one")
        fields.append(blocks[0].field if blocks else None)
    frozen = [field for field in fields if field is not None]
    if frozen and len(frozen) != len(fields):
        raise RecordError(f"{plane.name}: {len(frozen)} of {len(fields)} heads have a frozen field, expected all or none")
    return np.stack(frozen) if frozen else None
