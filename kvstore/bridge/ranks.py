"""A cache over ranks to and from records: each rank has a namespace of its own, and what counts is what all have.

A rank's rows are of no use to another, nor to as many ranks otherwise shared out, so rank and world size are
identity. Ranks save one after the other and evict on their own: what one of them lacks none of them has.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from warmkv.kvstore.bridge.restoring import is_short, prepare
from warmkv.kvstore.bridge.saving import records_of
from warmkv.kvstore.bridge.specs import layer_specs
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.ranks import RankedCache
from warmkv.kvstore.live.sharding import shard_model
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Saved
from warmkv.kvstore.verbs import Ack, Verbs
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN, Lineage, TokensLike, as_tokens


def rank_identity(identity: Identity, plan: ModelPlan, rank: int, world: int) -> Identity:
    """The identity of rank ``rank`` of ``world`` of a model of ``plan``, whose own is ``identity``: that of its layers
    as the rank keeps them, at its place. Raises as `sharding.shard_model`."""
    layers = layer_specs(shard_model(plan, rank, world))
    return replace(identity, layers=layers, topology=replace(identity.topology, rank=rank, world=world))


def rank_identities(identity: Identity, cache: RankedCache, *, saved_as: ModelPlan | None = None) -> tuple[Identity, ...]:
    """`rank_identity` of all ranks of ``cache``, as caches of its plan are saved, or of the plan ``saved_as``."""
    return tuple(rank_identity(identity, saved_as or cache.plan, rank, cache.world) for rank in range(cache.world))


def usable_over_ranks(verbs: Verbs, identities: Sequence[Identity], ids: TokensLike, *, lineage: Lineage = CLEAN) -> int:
    """How many of ``ids`` every rank could resume from, were it asked for just these: 0 where one has nothing. A
    layer with a state may resume only earlier than others agreed on, and then all do. Moves nothing."""
    tokens = as_tokens(ids)
    found = [verbs.match(identity, tokens, lineage=lineage).usable for identity in identities]
    while min(found) < max(found):
        low = min(found)
        found = [
            # One token is always left to feed.
            usable if usable == low else verbs.match(identity, tokens[: low + 1], lineage=lineage).usable
            for identity, usable in zip(identities, found, strict=True)
        ]
    return found[0]


def restore_ranks(
    cache: RankedCache, verbs: Verbs, identity: Identity, ids: TokensLike, *, lineage: Lineage = CLEAN,
    saved_as: ModelPlan | None = None,
) -> int:  # fmt: skip
    """Replace all that ``cache`` holds by the longest prefix of ``ids`` that every rank has, of a model whose own
    identity is ``identity``. Rows that were saved by caches of a plan of other formats, ``saved_as``, are written anew,
    as `restore_into` converts them. Returns how many tokens that is; 0 is a miss, with the cache untouched.

    Rows of all ranks are uploaded before one rank changes, and all have one lineage then. Raises TransactionError while
    a transaction is open, and as `restore_into`, the cache untouched, but for logits that were parked; DeviceFault with
    every rank empty where rows cannot be put in place."""
    cache.require_quiescent("a restore")
    tokens = as_tokens(ids)
    identities = rank_identities(identity, cache, saved_as=saved_as)
    with ExitStack() as leases:
        found = _agreed(verbs, identities, tokens, lineage, leases)
        if not found:
            return 0
        # What is short on one rank is gone on with on all: together they are one sequence.
        short, convert = any(map(is_short, found)), saved_as is not None
        changes = [
            prepare(own, restored, convert=convert, short=short) for own, restored in zip(cache.caches, found, strict=True)
        ]
        ready = [change for change in changes if change is not None]
        if len(ready) < len(changes):
            return 0
        cache.refill(found[0].usable, ready)
        return found[0].usable


def save_ranks(
    cache: RankedCache, verbs: Verbs, identity: Identity, ids: TokensLike, *, ack: Ack = "memory"
) -> tuple[Saved, ...]:
    """Save what every rank holds of ``ids``, all of which the cache has to hold as committed; what is held already is
    not read. By rank what came of it: where one was given up, the prefix is as long as it was. Raises
    TransactionError while a transaction is open, ReplayDue, RecordError where ids end elsewhere; DeviceFault."""
    cache.require_quiescent("a save")
    tokens = as_tokens(ids)
    if len(tokens) != cache.committed:
        raise RecordError(f"{len(tokens)} ids, {cache.committed} tokens are committed")
    done = []
    for own, name in zip(cache.caches, rank_identities(identity, cache), strict=True):
        held = verbs.offer(name, tokens, lineage=own.lineage).held
        records = records_of(own, len(tokens), held=held)
        done.append(verbs.save(name, tokens, records, ack=ack, lineage=own.lineage, logits=own.parked_logits))
    return tuple(done)


def _agreed(
    verbs: Verbs, identities: Sequence[Identity], tokens: TokensLike, lineage: Lineage, leases: ExitStack
) -> list[Restored]:
    """By rank what was restored of one length, closed with ``leases``; nothing where there is none."""
    found: list[Restored] = []
    for identity in identities:
        found.append(leases.enter_context(verbs.restore(identity, tokens, lineage=lineage)))
        if not found[-1]:
            return []
    while (low := min(restored.usable for restored in found)) < max(restored.usable for restored in found):
        for rank, identity in enumerate(identities):
            if found[rank].usable > low:
                # One token is always left to feed.
                shorter = verbs.restore(identity, as_tokens(tokens)[: low + 1], lineage=lineage)
                found[rank] = leases.enter_context(shorter)
                if not shorter:
                    return []
    return found
