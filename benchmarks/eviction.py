"""Which blocks of a recorded service would still be there: `python benchmarks/eviction.py TRACE`.

TRACE is JSON lines with ``hash_ids``, the numbers of each prompt's blocks. Capacities are shares of
the blocks the trace names; the rate is of blocks asked for, found as part of an unbroken prefix.
Such traces tell neither sizes nor prefill times: what a cost-aware policy gains by these cannot
be seen here.

Source: the traces of Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import print_table
from simulator import Belady, Cache, Fifo, Lfu, Prompt, Ranked, S3Fifo, Segments, Sieve, replay

from warmkv.kvstore.store.options import StoreOptions

SHARES = (0.01, 0.05, 0.10, 0.25, 0.50, 1.00)
DEFAULT = StoreOptions().policy


def prompts_of(path: Path, limit: int | None = None) -> list[Prompt]:
    """The blocks of each prompt, in the order of the trace."""
    with open(path) as lines:
        return [json.loads(line)["hash_ids"] for line, _ in zip(lines, range(limit or sys.maxsize), strict=False)]


def rows(prompts: Sequence[Prompt], shares: Sequence[float] = SHARES) -> list[tuple[str, list[float]]]:
    """Hit rates of every policy at every capacity."""
    unique = len({block for prompt in prompts for block in prompt})
    caches: list[tuple[str, Callable[[int], Cache]]] = [
        ("LRU", lambda capacity: Ranked(capacity, "lru")),
        ("GDSF, uniform", lambda capacity: Ranked(capacity, "gdsf")),
        (f"our default: {DEFAULT}, segments", lambda capacity: Segments(capacity, DEFAULT)),
        ("lru, segments", lambda capacity: Segments(capacity, "lru")),
        ("FIFO", Fifo),
        ("LFU", Lfu),
        ("SIEVE", Sieve),
        ("S3-FIFO", S3Fifo),
        ("Belady", lambda capacity: Belady(capacity, prompts)),
    ]
    return [(name, [replay(make(max(1, round(unique * share))), prompts) for share in shares]) for name, make in caches]


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} TRACE", file=sys.stderr)
        return 2
    prompts = prompts_of(Path(sys.argv[1]))
    unique = len({block for prompt in prompts for block in prompt})
    title = f"{Path(sys.argv[1]).stem}: {len(prompts):,} prompts, {unique:,} blocks; share of blocks found by capacity"
    table = [[name, *(f"{rate:.3f}" for rate in rates)] for name, rates in rows(prompts)]
    print_table(title, ["", *(f"{share:.0%}" for share in SHARES)], table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
