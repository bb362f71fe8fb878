"""From stored rows to Nyström states, and which states a layer may take from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32
from warmkv.kernels.nystrom.reference import MIN_LANDMARKS, Group
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.schema.errors import RecordError, SealError


def sealed(plan: LayerPlan, name: str, keys: PlaneRows, values: PlaneRows, trace: F32, kernels: Kernels) -> tuple[Group, ...]:
    """A state for every KV head, from float32 rows and ``trace`` (rows, heads, key_size). Changes none
    of its arguments; ``name`` is how messages call the layer. Raises SealError where there is no finite state."""
    assert plan.nystrom is not None
    groups = []
    for head in range(plan.kv_heads):
        mine = slice(head * plan.group, (head + 1) * plan.group)
        # What overflows is found below.
        with np.errstate(over="ignore", invalid="ignore"):
            group = kernels.nystrom_prefill(
                np.ascontiguousarray(trace[:, mine].transpose(1, 0, 2)), _dense(keys, head), _dense(values, head),
                landmarks=plan.nystrom.landmarks, window=plan.nystrom.window, sinks=plan.nystrom.sinks,
                rectifier=plan.nystrom.rectifier, scale=plan.logit_scale,
            )  # fmt: skip
        if not all(np.isfinite(array).all() for array in (group.landmarks, *(far.solve for far in group.far))):
            raise SealError(f"{name}: the landmarks of KV head {head} are NaN, infinite or too large to solve for")
        groups.append(group)
    return tuple(groups)


def _dense(rows: PlaneRows, head: int) -> F32:
    parts = [np.asarray(block.codes, np.float32) for block in rows.blocks(head)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def check_groups(plan: LayerPlan, name: str, groups: Sequence[Group], position: int) -> None:
    """Raises RecordError unless ``groups`` are states of this plan that have seen ``position`` rows."""
    if len(groups) != plan.kv_heads:
        raise RecordError(f"{name}: states of {len(groups)} KV heads, expected {plan.kv_heads}")
    for head, group in enumerate(groups):
        _check_group(f"{name}, KV head {head}", plan, group, position)


def _check_group(name: str, plan: LayerPlan, group: Group, position: int) -> None:
    nystrom = plan.nystrom
    assert nystrom is not None
    found = (group.window, group.rectifier, group.scale, group.heads)
    if found != (nystrom.window, nystrom.rectifier, plan.logit_scale, plan.group):
        raise RecordError(
            f"{name}: a state of window, rectifier, scale and query heads {found}, "
            f"expected {(nystrom.window, nystrom.rectifier, plan.logit_scale, plan.group)}"
        )
    size, value_size = plan.key_size, plan.value_size
    count = 0 if group.exact else len(group.landmarks)
    if not group.exact and not MIN_LANDMARKS <= count <= nystrom.landmarks:
        raise RecordError(f"{name}: {count} landmarks, expected {MIN_LANDMARKS} to {nystrom.landmarks}")
    slots = group.filled if group.exact else nystrom.window
    sinks = 0 if group.exact else nystrom.sinks
    if not 0 <= group.filled <= slots or not 0 <= group.head < (1 if group.exact else nystrom.window):
        raise RecordError(f"{name}: {group.filled} rows from slot {group.head} on, in a window of {slots}")
    _plain(group.keys, (slots, size), f"{name}: window keys")
    _plain(group.values, (slots, value_size), f"{name}: window values")
    _plain(group.sink_keys, (sinks, size), f"{name}: sink keys")
    _plain(group.sink_values, (sinks, value_size), f"{name}: sink values")
    _plain(group.landmarks, (count, size), f"{name}: mean keys")
    if not group.keys.flags.writeable or not group.values.flags.writeable:
        raise RecordError(f"{name}: a window that cannot be written")
    for query_head, far in enumerate(group.far):
        mine = f"{name}, query head {query_head}"
        _plain(far.landmarks, (count, size), f"{mine}: mean queries")
        _plain(far.solve, (count, count), f"{mine}: solved matrix")
        _plain(far.values, (count, value_size), f"{mine}: far values")
        _plain(far.mass, (count,), f"{mine}: far mass")
        _plain(far.top, (count,), f"{mine}: far maxima")
        if far.rows < 0 or far.rows + group.filled + sinks != position:
            raise RecordError(
                f"{mine}: {far.rows} far rows, {group.filled} in the window and {sinks} sinks, expected {position} in all"
            )


def _plain(array: F32, shape: tuple[int, ...], what: str) -> None:
    """Raises RecordError unless ``array`` is float32 of ``shape`` without gaps, as kernels step it."""
    if not checks.floats(array, shape, what).flags.c_contiguous:
        raise RecordError(f"{what}: an array with gaps, expected a contiguous one")
