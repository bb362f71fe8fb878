"""Eviction plans: pure functions from an order and a need to a list of victims."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from warmkv.kvstore.store.ranking import Ranking, Recency, Worth

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[K]):
    """One record of a tier, as a policy sees it. ``children`` counts records of the same tier
    that build on it; ``keep`` marks pins, leases and work in flight; ``group`` is whose floor it
    counts for."""

    key: K
    parent: K | None
    total_bytes: int
    children: int
    keep: bool
    group: Hashable = None


def ranking(policy: str, worth: Callable[[K], float]) -> Ranking[K]:
    """An empty ranking of the policy: "lru", or "gdsf" with ``worth`` as frequency x cost / size."""
    return Worth(worth) if policy == "gdsf" else Recency()


def plan_eviction(
    order: Iterable[Candidate[K]], needed_bytes: int, *, partial: bool = False, spare: dict[Hashable, int] | None = None
) -> list[K] | None:
    """Victims in order, leaves before what they build on, that free at least ``needed_bytes``;
    None when everything evictable together would not, or with ``partial`` what there is. ``order``
    is worst first and is read no further than necessary.

    ``spare`` are the bytes each group has above its floor; none is brought below it. It is used up."""
    if needed_bytes <= 0:
        return []
    victims: list[K] = []
    freed = 0
    evicted_children: dict[K, int] = {}
    waiting: dict[K, Candidate[K]] = {}
    for candidate in order:
        ready: Candidate[K] | None = candidate
        while ready is not None and not ready.keep:
            if evicted_children.get(ready.key, 0) < ready.children:
                waiting[ready.key] = ready
                break
            if spare is not None and ready.group in spare:
                if spare[ready.group] < ready.total_bytes:
                    break
                spare[ready.group] -= ready.total_bytes
            victims.append(ready.key)
            freed += ready.total_bytes
            if freed >= needed_bytes:
                return victims
            if ready.parent is None:
                break
            evicted_children[ready.parent] = evicted_children.get(ready.parent, 0) + 1
            ready = waiting.pop(ready.parent, None)
    return victims if partial else None


def plan_above_floors(
    order: Callable[[], Iterable[Candidate[K]]], needed_bytes: int, spare: dict[Hashable, int] | None, *, partial: bool = False
) -> list[K] | None:
    """As `plan_eviction`, of what groups have above their floors if that is enough, else of all.
    ``order`` is asked for once or twice."""
    if spare:
        victims = plan_eviction(order(), needed_bytes, spare=spare)
        if victims is not None:
            return victims
    return plan_eviction(order(), needed_bytes, partial=partial)


def overfull(used_bytes: int, limit_bytes: int, high: float, low: float) -> int:
    """Bytes to let go: none up to the high watermark, above it all down to the low one."""
    return max(0, used_bytes - int(limit_bytes * low)) if used_bytes > limit_bytes * high else 0
