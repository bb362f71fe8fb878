"""Restored rows on their way to a device: the mapped bytes themselves, or written anew a few at a time.

Rows of the layer's format are uploaded from where they are mapped: nothing holds them in between but the
pinned memory that a device copies from. The bytes a device holds are those of records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from warmkv.kernels.formats import F32, WARMUP_ROWS, total_rows
from warmkv.kernels.quant.packed import pack
from warmkv.kvstore.bridge.decoding import Heads, decoded
from warmkv.kvstore.bridge.specs import Side
from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.kvstore.live.rows.written import Part, Written
from warmkv.kvstore.restored import RestoredPlane

Sides = tuple[Side, Side]
#: Keys, then values.
Parts = tuple[Sequence[Part], Sequence[Part]]
Frozen = tuple[F32 | None, F32 | None]


def prepare(
    layer: ResidentLayer, planes: Sequence[RestoredPlane], stored: tuple[Sides, Sequence[Heads]], own: Sides, fields: Frozen, *,
    position: int, base: int, gapless: bool,
) -> Callable[[], None]:  # fmt: skip
    """What puts rows of ``stored`` sides, seen as heads, into ``layer``, which has its ``own``; they are uploaded now,
    where nobody reads. Raises RecordError, CapacityExceeded, OutOfMemory, DeviceFault."""
    sides, heads = stored
    parts: Parts
    if sides == own or not layer.plan.quantised:
        keys, values = (
            plane.blocks if side == mine else [_written(seen, side, empty)]
            for plane, side, mine, seen, empty in zip(planes, sides, own, heads, layer.empty_planes(), strict=True)
        )
        parts, found = (keys, values), fields if sides == own else (None, None)
    else:
        parts, found = _with_fields(heads, sides, layer.empty_planes())
    return layer.prepare_restore(*parts, position=position, base=base, fields=found, gapless=gapless)


def _with_fields(heads: Sequence[Heads], sides: Sides, made: tuple[GrowingRows, GrowingRows]) -> tuple[Parts, Frozen]:
    """Both planes as they would be had their rows been appended: fields are fixed for both at once, in host memory,
    from as many rows as that takes."""
    lead = min(total_rows(heads[0][0]), WARMUP_ROWS + 1)
    Planes(made).append([decoded(seen, side, 0, lead) for seen, side in zip(heads, sides, strict=True)])
    keys, values = (
        [_packed(plane), _written(seen, side, plane, lead)] for plane, seen, side in zip(made, heads, sides, strict=True)
    )
    return (keys, values), (made[0].field, made[1].field)


def _packed(plane: GrowingRows) -> Part:
    return pack([plane.blocks(head) for head in range(plane.heads)], plane.format, plane.size, keys=plane.keys)


def _written(heads: Heads, side: Side, plane: GrowingRows, first: int = 0) -> Part:
    """Rows from ``first`` on as ``plane`` would store them."""
    like = plane.like()
    if plane.field is not None and plane.format.quantised:
        like.seed_field(plane.field)
    return Written(like, partial(decoded, heads, side), first, total_rows(heads[0]))
