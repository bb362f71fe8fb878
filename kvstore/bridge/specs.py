"""What the layers of a plan keep, as planes of an identity."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec

FORMATS = {
    RowFormat.F32: PlaneFormat.F32, RowFormat.F16: PlaneFormat.F16, RowFormat.BF16: PlaneFormat.BF16,
    RowFormat.Q8_2F: PlaneFormat.Q8_2F,
}  # fmt: skip
ROW_FORMATS = {stored: format_ for format_, stored in FORMATS.items()}
#: A Nystroem state is as many rows of so many bytes as it takes: rows are counted in 24 bits.
PAGE_BYTES = 4096
#: Says whether the rows of a SPARSE layer have gaps or only begin late: version u32, flags u32.
SEAT = struct.Struct("<II")
SEAT_VERSION, HAS_GAPS = 1, 1


@dataclass(frozen=True, slots=True)
class Side:
    """Keys or values of an attention layer: ``heads`` alive KV heads of ``size`` channels."""

    role: PlaneRole
    format: RowFormat
    heads: int
    size: int

    @property
    def keys(self) -> bool:
        return self.role == PlaneRole.KEY


def sides_of(plan: LayerPlan) -> tuple[Side, Side]:
    """Keys and values."""
    heads = len(plan.alive_heads)
    return (
        Side(PlaneRole.KEY, plan.key_format, heads, plan.key_size),
        Side(PlaneRole.VALUE, plan.value_format, heads, plan.value_size),
    )


def field_size(plan: LayerPlan) -> int:
    """Numbers of the fields of all quantised planes."""
    return sum(side.heads * side.size for side in sides_of(plan) if side.format.quantised)


def layer_specs(plan: ModelPlan, *, gaps: bool = False) -> tuple[LayerSpec, ...]:
    """The layers of an identity whose caches follow ``plan``.

    ``gaps``: of caches from which rows in the middle were evicted. Their layers of full attention are
    SPARSE, which makes them another model's: a prefix of such rows is of no use to anybody."""
    return tuple(_spec(layer, gaps) for layer in plan.layers)


def _spec(plan: LayerPlan, gaps: bool) -> LayerSpec:
    if plan.kind is LayerKind.SHARED:
        return LayerSpec(LayerKind.SHARED, (), shared_with=plan.shared_with)
    if plan.kind is LayerKind.RECURRENT:
        return LayerSpec(plan.kind, (PlaneSpec(PlaneRole.RECURRENT, PlaneFormat.F32, (plan.state_size,)),))
    if plan.kind is LayerKind.NYSTROM:
        return LayerSpec(plan.kind, (PlaneSpec(PlaneRole.NYSTROM, PlaneFormat.RAW, (PAGE_BYTES,), _nystrom(plan)),))
    dead = "none"
    if len(plan.alive_heads) < plan.kv_heads:
        dead = f"KV heads {','.join(map(str, plan.alive_heads))} of {plan.kv_heads}"
    sides = sides_of(plan)
    meaning = dead if plan.ring is None else _ring(plan)
    planes = [PlaneSpec(side.role, FORMATS[side.format], (side.heads, side.size), meaning) for side in sides]
    if plan.kind is LayerKind.RING:
        assert plan.ring is not None
        return LayerSpec(plan.kind, tuple(planes), window=plan.ring.window, sinks=plan.ring.sinks)
    if plan.quantised:
        planes.append(PlaneSpec(PlaneRole.FIELD, PlaneFormat.F32, (field_size(plan),)))
    if plan.importance:
        planes.append(PlaneSpec(PlaneRole.IMPORTANCE, PlaneFormat.F32, (1,)))
    if gaps and plan.kind is LayerKind.FULL:
        planes.append(PlaneSpec(PlaneRole.BLOB, PlaneFormat.RAW, (SEAT.size,)))
        return LayerSpec(LayerKind.SPARSE, tuple(planes))
    return LayerSpec(LayerKind.HYBRID if plan.importance else plan.kind, tuple(planes), window=plan.window)


def _nystrom(plan: LayerPlan) -> str:
    """All that decides what a state's bytes mean."""
    nystrom = plan.nystrom
    assert nystrom is not None
    return (
        f"heads {plan.heads}/{plan.kv_heads}, sizes {plan.key_size} and {plan.value_size}, landmarks {nystrom.landmarks}, "
        f"window {nystrom.window}, sinks {nystrom.sinks}, boundary {nystrom.target}, {nystrom.rectifier.name}, "
        f"scale {plan.logit_scale!r}, importance {'counted' if plan.importance else 'none'}"
    )


def _ring(plan: LayerPlan) -> str:
    """All that decides what the raw keys of a ring mean; undo rows are never stored."""
    ring = plan.ring
    assert ring is not None
    numbers = struct.pack(f"<{2 + len(ring.inv_freq)}d", plan.logit_scale, ring.rope_scale, *ring.inv_freq)
    digest = hashlib.blake2b(numbers, digest_size=16).hexdigest()
    return f"heads {plan.heads}/{plan.kv_heads}, scale, rope scale and frequencies {digest}"
