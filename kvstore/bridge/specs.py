"""What the layers of a plan keep, as planes of an identity."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.identity import LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, rotation_seed, with_rotation

FORMATS = {
    RowFormat.F32: PlaneFormat.F32, RowFormat.F16: PlaneFormat.F16, RowFormat.BF16: PlaneFormat.BF16,
    RowFormat.Q8_2F: PlaneFormat.Q8_2F, RowFormat.TQ_KEY: PlaneFormat.TQ_KEY, RowFormat.TQ_VALUE: PlaneFormat.TQ_VALUE,
    RowFormat.TQ3: PlaneFormat.TQ3, RowFormat.Q8_0: PlaneFormat.Q8_0, RowFormat.Q5_1: PlaneFormat.Q5_1,
    RowFormat.Q4_0: PlaneFormat.Q4_0, RowFormat.FP8: PlaneFormat.FP8_E4M3FN,
}  # fmt: skip
ROW_FORMATS = {stored: format_ for format_, stored in FORMATS.items()}
#: A Nystroem state is as many rows of so many bytes as it takes: rows are counted in 24 bits.
PAGE_BYTES = 4096
#: Says whether the rows of a SPARSE layer have gaps or only begin late: version u32, flags u32.
SEAT = struct.Struct("<II")
SEAT_VERSION, HAS_GAPS = 1, 1


@dataclass(frozen=True, slots=True)
class Side:
    """Keys or values of an attention layer: ``heads`` alive KV heads of ``size`` channels, rotated as a
    model's ``seed`` says where the format rotates."""

    role: PlaneRole
    format: RowFormat
    heads: int
    size: int
    seed: int | None = None

    @property
    def keys(self) -> bool:
        return self.role == PlaneRole.KEY

    def turn(self, layer: int, estimator: Estimator) -> Turn | None:
        """What rows of that layer were rotated by, to be read by ``estimator``. Raises KernelError."""
        return None if self.seed is None else Turn(Rotation.of(self.seed, layer, self.size), estimator)


def sides_of(plan: LayerPlan) -> tuple[Side, Side]:
    """Keys and values."""
    return (
        _side(plan, PlaneRole.KEY, plan.key_format, plan.key_size),
        _side(plan, PlaneRole.VALUE, plan.value_format, plan.value_size),
    )


def stored_sides(plan: LayerPlan, spec: LayerSpec) -> tuple[Side, Side]:
    """Keys and values of a layer of this geometry as they were stored, in whatever formats."""
    planes = {plane.role: plane for plane in spec.planes}
    keys, values = (
        replace(side, format=ROW_FORMATS[planes[side.role].format], seed=rotation_seed(planes[side.role].parameters))
        for side in sides_of(plan)
    )
    return keys, values


def _side(plan: LayerPlan, role: PlaneRole, format_: RowFormat, size: int) -> Side:
    seed = plan.turboquant.seed if plan.turboquant is not None and format_.rotated else None
    return Side(role, format_, len(plan.alive_heads), size, seed)


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
    if plan.kind in (LayerKind.RECURRENT, LayerKind.CONV):
        return LayerSpec(plan.kind, _states(plan))
    if plan.kind is LayerKind.NYSTROM:
        return LayerSpec(plan.kind, (PlaneSpec(PlaneRole.NYSTROM, PlaneFormat.RAW, (PAGE_BYTES,), _nystrom(plan)),))
    planes = [
        PlaneSpec(side.role, FORMATS[side.format], (side.heads, side.size), _parameters(plan, side)) for side in sides_of(plan)
    ]
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


def _states(plan: LayerPlan) -> tuple[PlaneSpec, ...]:
    """The state vector of a recurrent layer, and the inputs of the convolution a layer has."""
    planes = []
    if plan.kind is LayerKind.RECURRENT:
        planes.append(PlaneSpec(PlaneRole.RECURRENT, PlaneFormat.F32, (plan.state_size,)))
    if plan.conv is not None:
        planes.append(PlaneSpec(PlaneRole.CONV, PlaneFormat.F32, (plan.conv.taps, plan.conv.channels)))
    return tuple(planes)


def attention_of(plan: ModelPlan, implementation: str) -> str:
    """An identity's ``attention``, for layers that ``implementation`` attends over: with how the signs of rotated
    keys count, where there are such keys. No byte of a row says it, but deeper layers keep what it made of them."""
    told = [f"{at} {layer.turboquant.estimator.value}" for at, layer in enumerate(plan.layers)
            if layer.turboquant is not None and layer.key_format is RowFormat.TQ_KEY]  # fmt: skip
    ways = {each.partition(" ")[2] for each in told}
    signs = ways.pop() if len(ways) == 1 else ", ".join(told)
    return f"{implementation}; signs {signs}" if told else implementation


def _parameters(plan: LayerPlan, side: Side) -> str:
    """Which heads are alive, and what rows were rotated by; how they are read is told by `attention_of`."""
    if plan.ring is not None:
        return _ring(plan)
    alive = "none"
    if side.heads < plan.kv_heads:
        alive = f"KV heads {','.join(map(str, plan.alive_heads))} of {plan.kv_heads}"
    return alive if side.seed is None else with_rotation(side.seed, alive)


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
