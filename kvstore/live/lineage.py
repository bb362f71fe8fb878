"""What was done to the rows of a cache that the tokens do not tell.

A lineage is a digest over operations, each with what decides its outcome; rows of different lineages
are never mixed (`schema.records`). Evictions, context shifts, Nystroem seals and changes of a row's
precision are such operations. Trimming a sliding window is none (nobody can read those rows), and neither
is the freeze of a format's field (it is a function of the rows). Taking tokens back is none, unless what
was done before is left standing on tokens that are gone: rows evicted or shifted, or a field fixed,
further on than the cut.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.rope.reference import Rope
from warmkv.kvstore.live.evict import Kept, Mass, Policy
from warmkv.kvstore.live.plan import NystromPlan
from warmkv.schema.ids import lineage_after as after
from warmkv.schema.records import CLEAN, Lineage

__all__ = ["CLEAN", "after", "evicted", "requantised", "rewound", "sealed", "shifted", "wired"]


def evicted(lineage: Lineage, policy: Policy, position: int, kept: Iterable[tuple[int, Kept]]) -> Lineage:
    """After an eviction at ``position`` that left the rows ``kept`` of each layer named. Which rows
    those are is part of it: importance depends on how a prompt was fed, and so may a choice by it."""
    sinks = policy.sinks if isinstance(policy, Mass) else 0
    rows = tuple((layer, np.ascontiguousarray(indices, "<i8").tobytes()) for layer, indices in kept)
    return after(lineage, "evicted", policy.name, sinks, position, rows)


def sealed(lineage: Lineage, layer: int, plan: NystromPlan, rows: int) -> Lineage:
    """After ``rows`` rows of a layer became a Nystroem state."""
    return after(lineage, "sealed", layer, plan.landmarks, plan.window, plan.sinks, plan.rectifier.value, rows)


def shifted(
    lineage: Lineage, position: int, keep: int, count: int, gone: bytes, ropes: Iterable[tuple[int, Rope | None]]
) -> Lineage:
    """After tokens [keep, keep + count) of ``position`` were taken out and the keys of each layer named
    turned by its rope. ``gone`` stands for the tokens that went: what is left was computed in their presence,
    and nothing else tells which they were."""
    turned = tuple(
        (layer, ()) if rope is None else (layer, (rope.size, rope.base, rope.pairs.value, rope.turned, rope.divisors))
        for layer, rope in ropes
    )
    return after(lineage, "shifted", position, keep, count, gone, turned)


def requantised(
    lineage: Lineage,
    layer: int,
    position: int,
    keys: tuple[RowFormat, RowFormat],
    values: tuple[RowFormat, RowFormat],
    seeds: Iterable[int] = (),
) -> Lineage:
    """After the rows of a layer up to ``position`` were written in other formats: each pair is (before, after).
    Rows behind it were never anything else. ``seeds`` are those
    of keys before, after, and of values before, after, -1 where nothing is rotated; none where nothing is at all."""
    formats = (format_.value for pair in (keys, values) for format_ in pair)
    return after(lineage, "requantised", layer, position, *formats, *(f"{seed:d}" for seed in seeds))


def rewound(lineage: Lineage, position: int, fields: Iterable[tuple[int, bytes]] = ()) -> Lineage:
    """After tokens back to ``position`` were forgotten that earlier operations had gone by; ``fields``
    (layer, bytes) are those fixed from rows that are gone."""
    return after(lineage, "rewound", position, tuple(fields))


def wired(lineage: Lineage, layer: int, position: int, base: int, half: bool) -> Lineage:
    """After the rows of a layer up to ``position`` came over the layer wire, in ``half`` precision or with
    gaps, whose ``base`` is what position and rows differ by."""
    return after(lineage, "wired", layer, position, base, half)
