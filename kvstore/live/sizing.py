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
    if plan.kind not in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.NYSTROM):
        return 0
    keys = plan.key_format.row_bytes(plan.key_size, keys=True)
    return _bytes(len(plan.alive_heads), keys + plan.value_format.row_bytes(plan.value_size, keys=False))


def token_bytes(plan: LayerPlan) -> int:
    """`row_bytes`, and the importance of a position where it is counted."""
    rows = row_bytes(plan)
    return rows + (_FLOAT if rows and plan.importance else 0)


def field_bytes(plan: LayerPlan) -> int:
    """The fields of a layer's quantised planes, once frozen."""
    if not row_bytes(plan):
        return 0
    keys = plan.key_size if plan.key_format.quantised else 0
    return _bytes(_FLOAT, len(plan.alive_heads), keys + (plan.value_size if plan.value_format.quantised else 0))


def stored_bytes(plan: LayerPlan, rows: int, *, frozen: bool | None = None) -> int:
    """Keys and values of ``rows`` rows, fields included where ``frozen`` (None: where as many rows were
    appended to an empty layer)."""
    _check_count("rows", rows)
    fixed = rows > WARMUP_ROWS if frozen is None else frozen
    return _sum(_bytes(rows, row_bytes(plan)), field_bytes(plan) if fixed else 0)


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
    """What a layer keeps however long the sequence: a recurrent vector without its scratch, a ring with its
    undo rows, a convolution with its earlier states; 0 for others."""
    if plan.kind is LayerKind.RECURRENT:
        return _bytes(_FLOAT, plan.state_size)
    if plan.conv is not None:
        state = _bytes(_FLOAT, plan.conv.taps, plan.conv.channels)
        return _sum(state, _bytes(plan.conv.history, _sum(state, _POSITION)))
    if plan.ring is not None:
        return _bytes(_FLOAT, plan.kv_heads, plan.ring.window + plan.ring.undo_rows, plan.key_size + plan.value_size)
    return 0


def sealed_bytes(plan: LayerPlan, rows: int) -> int:
    """The states of a Nyström layer sealed at ``rows`` rows, and 0 for other layers."""
    _check_count("rows", rows)
    if plan.nystrom is None:
        return 0
    nystrom, both = plan.nystrom, plan.key_size + plan.value_size
    if rows <= nystrom.window + nystrom.sinks + EXACT_SLACK:
        return _bytes(_FLOAT, plan.kv_heads, rows, both)
    marks = int(np.clip(rows // 8, MIN_LANDMARKS, nystrom.landmarks))
    near = _sum(_bytes(nystrom.window + nystrom.sinks, both), _bytes(marks, plan.key_size))
    far = _bytes(marks, both + 2 + marks)
    return _sum(_bytes(_FLOAT, plan.kv_heads, near), _bytes(_FLOAT, plan.heads, far))


def layer_bytes(plan: LayerPlan, tokens: int) -> int:
    """The most a layer's state takes on the way to ``tokens`` tokens: rows with fields and importance, the
    queries a Nyström layer collects or the states it is sealed to, whichever is more, and fixed states."""
    rows = rows_at(plan, tokens)
    collected = _sum(stored_bytes(plan, rows), _bytes(rows, token_bytes(plan) - row_bytes(plan)))
    if plan.nystrom is None:
        return _sum(collected, state_bytes(plan))
    collected = _sum(collected, _bytes(_FLOAT, rows, plan.heads, plan.key_size))
    return max(collected, sealed_bytes(plan, rows) if tokens >= plan.nystrom.target else 0)


def model_bytes(plan: ModelPlan, tokens: int) -> int:
    """`layer_bytes` of all layers; layers that share another's rows cost nothing. Where the plan has
    ``max_rows``, layers that keep every row are evicted once they hold so many."""
    total = 0
    for layer in plan.layers:
        bound = min(tokens, plan.max_rows) if plan.max_rows and layer.kind is LayerKind.FULL else tokens
        total = _sum(total, layer_bytes(layer, bound))
    return total


def _bytes(*factors: int) -> int:
    return _addressable(prod(factors))


def _sum(*terms: int) -> int:
    return _addressable(sum(terms))


def _addressable(count: int) -> int:
    if count > sys.maxsize:
        raise OutOfMemory(f"{count} bytes: more than this machine can address", count)
    return count


def _check_count(name: str, count: int) -> None:
    if count < 0:
        raise RecordError(f"{count} {name}, expected at least 0")
