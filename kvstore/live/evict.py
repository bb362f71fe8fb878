"""Which rows of a layer stay when its cache has grown too large: pure plans over plain numbers.

Two policies: `Recent` keeps the newest rows, `Mass` keeps the first rows (attention sinks), the newest
rows, and of those between the ones that drew the most attention. Both keep the order of what stays.
Applying a plan is `model.ModelCache.evict`.

**Source:** the eviction of the CMF runtime's cache, whose figures say why mass is worth its vector:
perplexity 8.342 with it, 8.687 with the newest rows alone, 8.295 with all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import numpy as np
import numpy.typing as npt

from warmkv.schema.errors import RecordError

Kept = npt.NDArray[np.intp]
#: First rows that are kept because models park attention on them.
DEFAULT_SINKS = 4


@dataclass(frozen=True, slots=True)
class Recent:
    """Keep the newest rows."""

    @property
    def name(self) -> str:
        return "recent"


@dataclass(frozen=True, slots=True)
class Mass:
    """Keep the first ``sinks`` rows, the newest half of the budget, and the rows with the highest
    accumulated attention for the rest of it."""

    sinks: int = DEFAULT_SINKS

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise RecordError(f"a policy with {self.sinks} sinks, expected at least 0")

    @property
    def name(self) -> str:
        return "mass"


Policy = Union[Recent, Mass]


def recent_rows(keep: int) -> int:
    """Of a budget of ``keep`` rows, those that go to the newest under `Mass`; sinks come before them."""
    return max(keep // 2, 1)


def plan(policy: Policy, rows: int, keep: int, importance: npt.NDArray[np.float32] | None) -> Kept | None:
    """Indices of the rows that stay of ``rows``, ascending; None where all do. ``importance`` (rows,)
    is needed by `Mass` alone.

    Raises RecordError for another policy, a budget that is negative or no whole number, or where `Mass` has
    no importance to go by."""
    if not isinstance(keep, (int, np.integer)) or keep < 0:
        raise RecordError(f"an eviction down to {keep!r} rows, expected a whole number of at least 0")
    if not isinstance(policy, (Recent, Mass)):
        raise RecordError(f"an eviction policy of {policy!r}, expected Recent() or Mass()")
    if rows <= keep:
        return None
    if isinstance(policy, Recent):
        return kept_recent(rows, keep)
    if importance is None or importance.shape != (rows,):
        found = "none" if importance is None else f"shape {importance.shape}"
        raise RecordError(f"eviction by mass needs importance of shape ({rows},), found {found}")
    return kept_by_mass(importance, keep, policy.sinks, recent_rows(keep))


def kept_recent(rows: int, keep: int) -> Kept:
    """The last ``keep`` of ``rows``."""
    return np.arange(max(rows - keep, 0), rows, dtype=np.intp)


def kept_by_mass(importance: npt.NDArray[np.float32], keep: int, sinks: int, recent: int) -> Kept:
    """At most ``keep`` rows: sinks first, then the newest ``recent``, both cut so that the budget
    holds, then those between by falling importance, ties to the lower index."""
    rows = int(importance.shape[0])
    if rows <= keep:
        return np.arange(rows, dtype=np.intp)
    sinks = min(sinks, keep)
    recent = min(recent, keep - sinks)
    between = np.arange(sinks, rows - recent, dtype=np.intp)
    chosen = between[_falling(importance[between])[: keep - sinks - recent]]
    kept = np.ones(rows, np.bool_)
    kept[between] = False
    kept[chosen] = True
    return np.flatnonzero(kept)


def _falling(mass: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Indices by falling mass, stable. NaN counts as equal to whatever stands beside it, so that
    nothing moves past one: the runs between are sorted each for itself."""
    nan = np.isnan(mass)
    order: npt.NDArray[np.intp]
    if not nan.any():
        order = np.argsort(-mass, kind="stable")
    else:
        order = np.lexsort((np.where(nan, -np.inf, -mass), np.cumsum(nan)))
    return order
