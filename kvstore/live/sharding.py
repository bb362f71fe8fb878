"""Layers of a model as one tensor-parallel rank keeps them: plans again, so that all else is as for a whole model."""

from __future__ import annotations

from dataclasses import replace

from warmkv.kvstore.live.geometry import check_resident
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.errors import RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind


def shard(plan: LayerPlan, rank: int, world: int) -> LayerPlan:
    """The layer as rank ``rank`` of ``world`` keeps it: its equal share of query and KV heads (of a recurrent
    layer, of its state and of the channels of its convolution). Raises RecordError where there is no equal
    share: KV heads are not kept twice; UnsupportedError for kinds that are not resident."""
    if world < 1 or not 0 <= rank < world:
        raise RecordError(f"rank {rank} of {world}, expected one of at least 1")
    plan.validate(0)
    if plan.kind is LayerKind.SHARED:
        return plan
    if plan.kind is LayerKind.RECURRENT:
        state_size = _share("a state", plan.state_size, world)
        conv = None if plan.conv is None else replace(plan.conv, channels=_share("channels", plan.conv.channels, world))
        return replace(plan, state_size=state_size, conv=conv)
    check_resident(plan)
    heads, kv_heads = _share("query heads", plan.heads, world), _share("KV heads", plan.kv_heads, world)
    alive = plan.alive[rank * kv_heads : (rank + 1) * kv_heads]
    if alive and not any(alive):
        raise RecordError(f"rank {rank} of {world}: none of its KV heads is alive")
    return replace(plan, heads=heads, kv_heads=kv_heads, alive=alive)


def shard_model(plan: ModelPlan, rank: int, world: int) -> ModelPlan:
    """`shard` of all layers. Raises as that does, with the layer named."""
    return replace(plan, layers=tuple(_shard_of(index, layer, rank, world) for index, layer in enumerate(plan.layers)))


def _share(what: str, count: int, world: int) -> int:
    if count % world:
        raise RecordError(f"{what} of {count} over {world} ranks, expected a multiple")
    return count // world


def _shard_of(index: int, layer: LayerPlan, rank: int, world: int) -> LayerPlan:
    try:
        return shard(layer, rank, world)
    except (RecordError, UnsupportedError) as exc:
        raise type(exc)(f"layer {index}: {exc}") from exc
