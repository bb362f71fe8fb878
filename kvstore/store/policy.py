"""Eviction plans: pure functions from an order and a need to a list of victims."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[K]):
    """One record of a tier, as a policy sees it. ``children`` counts records of the same tier
    that build on it; ``keep`` marks pins, leases and work in flight."""

    key: K
    parent: K | None
    total_bytes: int
    children: int
    keep: bool


def plan_eviction(order: Iterable[Candidate[K]], needed_bytes: int) -> list[K] | None:
    """Victims in order, leaves before what they build on, that free at least ``needed_bytes``;
    None when everything evictable together would not. ``order`` is worst first and is read no
    further than necessary."""
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
            victims.append(ready.key)
            freed += ready.total_bytes
            if freed >= needed_bytes:
                return victims
            if ready.parent is None:
                break
            evicted_children[ready.parent] = evicted_children.get(ready.parent, 0) + 1
            ready = waiting.pop(ready.parent, None)
    return None
