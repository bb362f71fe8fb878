"""Decode steps whose launches were captured once and run again: what the host has to do beside them.

A captured step appends, advances counters and attends on the device alone; the host is not asked. Before a
run of steps `prepare` makes room in every layer, rings included, and after it `ran` lets the host's counts
follow. In between the cache is the device's: nothing else may be called.
"""

from __future__ import annotations

from warmkv.kvstore.live.layers.resident import ResidentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.rings import check_count
from warmkv.schema.errors import UnsupportedError


def prepare(cache: ModelCache, steps: int) -> None:
    """Make room for ``steps`` positions. Raises UnsupportedError for a cache in host memory, CapacityExceeded,
    RecordError while a layer's field is open, DeviceFault. No position has changed then, though rings may have
    given up rows that no query sees."""
    _check(cache, steps)
    for layer in cache.own:
        if isinstance(layer, ResidentLayer):
            layer.prepare_captured(steps)


def ran(cache: ModelCache, steps: int) -> None:
    """``steps`` captured steps ran, each of one position in every layer: rows were appended, counters advanced,
    recurrent layers read `state` and wrote `spare`, in turns. Raises CapacityExceeded for more steps than there was
    room for, RecordError, DeviceFault, and then no layer follows."""
    _check(cache, steps)
    for layer in cache.own:
        if isinstance(layer, ResidentLayer):
            layer.check_captured(steps)
    for layer in cache.own:
        if isinstance(layer, ResidentLayer):
            layer.ran_captured(steps)
        elif isinstance(layer, ResidentRecurrentLayer):
            for _ in range(steps):
                layer.step()


def _check(cache: ModelCache, steps: int) -> None:
    check_count("steps", steps)
    if cache.residence is None:
        raise UnsupportedError("captured launches are of caches with a residence, this one is in host memory")
