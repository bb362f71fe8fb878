"""Bytes as functions of a plan: what a token costs, and a layer or a model at a given length.

These are the formulas of the formats, without the room that growing memory keeps in reserve: what
`LayerMemory.stored` reports of rows, and what decides beforehand whether a sequence fits. Every product
is checked: sizes beyond 64-bit addresses raise OutOfMemory with the bytes they would be.
"""

from __future__ import annotations

import sys
from math import prod

import numpy as np

from warmkv.kernels.formats import WARMUP_ROWS
from warmkv.kernels.nystrom.reference import EXACT_SLACK, MIN_LANDMARKS
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.schema.errors import OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

_FLOAT = 4
_POSITION = 8


def row_bytes(plan: LayerPlan) -> int:
    """Keys and values of one position in the alive KV heads; 0 where nothing is stored per position."""
    return total(key_bytes(plan), value_bytes(plan))


def key_bytes(plan: LayerPlan) -> int:
    """The keys' part of `row_bytes`."""
    return product(_heads(plan), plan.key_format.row_bytes(plan.key_size, keys=True))


def value_bytes(plan: LayerPlan) -> int:
    """The values' part of `row_bytes`."""
    return product(_heads(plan), plan.value_format.row_bytes(plan.value_size, keys=False))


def token_bytes(plan: LayerPlan) -> int:
    """`row_bytes`, and the importance of a position where it is counted."""
    rows = row_bytes(plan)
    return rows + (_FLOAT if rows and plan.importance else 0)


def field_bytes(plan: LayerPlan) -> int:
    """The fields of a layer's quantised planes, once frozen."""
    if not row_bytes(plan):
        return 0
    keys = plan.key_size if plan.key_format.quantised else 0
    return product(_FLOAT, len(plan.alive_heads), keys + (plan.value_size if plan.value_format.quantised else 0))


def stored_bytes(plan: LayerPlan, rows: int, *, frozen: bool | None = None) -> int:
    """Keys and values of ``rows`` rows, fields included where ``frozen`` (None: where as many rows were
    appended to an empty layer)."""
    _check_count("rows", rows)
    fixed = rows > WARMUP_ROWS if frozen is None else frozen
    return total(product(rows, row_bytes(plan)), field_bytes(plan) if fixed else 0)


def rows_at(plan: LayerPlan, tokens: int, *, slack: int = 0, align: int = 1) -> int:
    """The most rows a layer stores on the way to ``tokens`` tokens, one appended at a time. A sliding layer
    stores up to two windows and the row that makes it trim, or what a trim with ``slack`` and ``align``
    leaves where that is more, and the warm-up of a field; a Nyström layer the rows up to its boundary, or
    all where it waits for a seal."""
    _check_count("tokens", tokens)
    if not row_bytes(plan):
        return 0
    if plan.window:
        after_trim = plan.window + slack + align - 1
        warm_up = WARMUP_ROWS + 1 if plan.quantised else 0
        return min(tokens, max(2 * plan.window + 1, after_trim + 1, warm_up))
    if plan.nystrom is not None and plan.nystrom.boundary:
        return min(tokens, plan.nystrom.target)
    return tokens


def state_bytes(plan: LayerPlan) -> int:
    """What a layer keeps however long the sequence: a recurrent vector and its convolution without their
    scratch, a ring with its undo rows, a convolution with its earlier states; 0 for others."""
    if plan.kind is LayerKind.RECURRENT:
        return total(product(_FLOAT, plan.state_size), conv_bytes(plan))
    if plan.conv is not None:
        state = conv_bytes(plan)
        return total(state, product(plan.conv.history, total(state, _POSITION)))
    if plan.ring is not None:
        return product(_FLOAT, plan.kv_heads, plan.ring.window + plan.ring.undo_rows, plan.key_size + plan.value_size)
    return 0


def conv_bytes(plan: LayerPlan) -> int:
    """The inputs a convolution of the layer waits with, earlier states not included; 0 where there is none."""
    return 0 if plan.conv is None else product(_FLOAT, plan.conv.taps, plan.conv.channels)


def sealed_bytes(plan: LayerPlan, rows: int) -> int:
    """The states of a Nyström layer sealed at ``rows`` rows, and 0 for other layers."""
    _check_count("rows", rows)
    if plan.nystrom is None:
        return 0
    nystrom, both = plan.nystrom, plan.key_size + plan.value_size
    if rows <= nystrom.window + nystrom.sinks + EXACT_SLACK:
        return product(_FLOAT, plan.kv_heads, rows, both)
    marks = int(np.clip(rows // 8, MIN_LANDMARKS, nystrom.landmarks))
    near = total(product(nystrom.window + nystrom.sinks, both), product(marks, plan.key_size))
    far = product(marks, both + 2 + marks)
    return total(product(_FLOAT, plan.kv_heads, near), product(_FLOAT, plan.heads, far))


def layer_bytes(plan: LayerPlan, tokens: int) -> int:
    """The most a layer's state takes on the way to ``tokens`` tokens: rows with fields and importance, the
    queries a Nyström layer collects or the states it is sealed to, whichever is more, and fixed states."""
    rows = rows_at(plan, tokens)
    collected = total(stored_bytes(plan, rows), product(rows, token_bytes(plan) - row_bytes(plan)))
    if plan.nystrom is None:
        return total(collected, state_bytes(plan))
    collected = total(collected, product(_FLOAT, rows, plan.heads, plan.key_size))
    return max(collected, sealed_bytes(plan, rows) if tokens >= plan.nystrom.target else 0)


def model_bytes(plan: ModelPlan, tokens: int) -> int:
    """`layer_bytes` of all layers; layers that share another's rows cost nothing. Where the plan has
    ``max_rows``, layers that keep every row are evicted once they hold so many."""
    needed = 0
    for layer in plan.layers:
        bound = min(tokens, plan.max_rows) if plan.max_rows and layer.kind is LayerKind.FULL else tokens
        needed = total(needed, layer_bytes(layer, bound))
    return needed


def product(*factors: int) -> int:
    """A count of bytes. Raises OutOfMemory where an address cannot be so large."""
    return _addressable(prod(map(int, factors)))


def total(*terms: int) -> int:
    """A count of bytes. Raises OutOfMemory where an address cannot be so large."""
    return _addressable(sum(map(int, terms)))


def _heads(plan: LayerPlan) -> int:
    """KV heads that store a row per position."""
    return len(plan.alive_heads) if plan.kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.NYSTROM) else 0


def _addressable(count: int) -> int:
    if count > sys.maxsize:
        raise OutOfMemory(f"{count} bytes: more than this machine can address", count)
    return count


def _check_count(name: str, count: int) -> None:
    if count < 0:
        raise RecordError(f"{count} {name}, expected at least 0")
