"""Looking at a daemon from outside, once a second, and what the numbers must keep to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from harness import anonymous_bytes

import warmkv
from warmkv.daemon.testing import DaemonProcess

MIB = 1 << 20
WARM_BYTES, COLD_BYTES, CONNECTIONS, TOKENS = 64 * MIB, 192 * MIB, 160, 1 << 22
#: How many samples a fit needs.
FIT_SAMPLES = 20
#: A sum over descriptors that come and go meanwhile may be above a budget: it is taken again so often.
LOOKS = 4
HELD = "memory of descriptors"


@dataclass(frozen=True)
class Flat:
    """A number that must not rise: its fitted line over the second half may by ``rise``, by ``part``
    of its mean, and by ``each`` for every record more. A leak a step, a connection or an eviction
    (tens a second) is far beyond that."""

    name: str
    rise: float
    part: float = 0.0
    each: float = 0.0


#: Descriptors and warm bytes follow what the warm tier holds, which swings between its watermarks (a
#: tenth of the budget); threads and readers follow how many ask at a time. The index takes some
#: thousand bytes a record, of which there are more as small ones drive out big ones: the budget of the
#: cold tier is one of bytes.
FLAT = (
    Flat("descriptors", 16, 0.2), Flat("threads", 8, 0.1), Flat("readers", 4, 0.1), Flat("rss", 6 * MIB, 0.05, 6000),
    Flat("warm", 0.1 * WARM_BYTES), Flat("cold", 0.1 * COLD_BYTES), Flat("file", 0.1 * COLD_BYTES),
)  # fmt: skip


@dataclass
class Sampler:
    """Looks at the daemon, from outside through /proc and by asking it."""

    served: DaemonProcess
    clients: Callable[[], list[int]] = list
    samples: list[dict[str, float]] = field(default_factory=list)
    exceeded: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def take(self, client: warmkv.Client) -> dict[str, float]:
        """One sample, kept; budgets are checked. Raises WarmKVError when the daemon does not answer."""
        sample = self.look(client)
        over = exceeded(sample)
        for _ in range(LOOKS):
            if not any(name == HELD for name, _, _ in over):
                break
            over = [item for item in over if item[0] != HELD]
            over += [item for item in exceeded(self.look(client)) if item[0] == HELD]
        self.samples.append(sample)
        self.exceeded += [
            f"at {sample['t']:.0f} s: {name} is {value:,.0f}, the budget {budget:,.0f}" for name, value, budget in over
        ]
        return sample

    def look(self, client: warmkv.Client) -> dict[str, float]:
        # An upload on its way is the client's, which holds it as well until it is answered.
        theirs = self._uploads()
        sockets, others, held = _open_files(self.served.pid)
        theirs |= self._uploads()
        stats = client.stats()
        warm, cold = _numbers(stats["warm"]), _numbers(stats["cold"])
        status = _status(self.served.pid)
        return {
            "t": time.monotonic() - self.began, "descriptors": sockets + others + len(held), "connections": sockets,
            "held": sum(size for inode, size in held.items() if inode not in theirs),
            "uploads": sum(size for inode, size in held.items() if inode in theirs), "rss": anonymous_bytes(self.served.pid),
            "threads": status["Threads"],
            "readers": cold.get("readers", 0), "warm": warm["bytes"], "reserved": warm["reserved_bytes"],
            "promoting": warm["promoting_bytes"], "leased": warm["leased_bytes"], "lent": warm["lent_bytes"],
            "used": warm["bytes"] + warm["reserved_bytes"] + warm["promoting_bytes"] + warm["leased_bytes"],
            "peak": warm["peak_bytes"], "warm entries": warm["entries"], "warm entries budget": warm["budget_entries"],
            "cold": cold["bytes"], "file": cold.get("file_bytes", 0), "map": cold.get("map_bytes", 0), "queued": cold["queued"],
            "entries": float(str(stats["entries"])), "leases": float(str(stats["leases"])),
        }  # fmt: skip

    def _uploads(self) -> set[int]:
        """Shared memory that clients have open, by inode."""
        return {inode for pid in self.clients() for inode in _open_files(pid)[2]}


def _numbers(value: object) -> dict[str, float]:
    assert isinstance(value, dict), value
    return {name: float(number) for name, number in value.items() if isinstance(number, (int, float))}


def _status(pid: int) -> dict[str, float]:
    words = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {found[0].rstrip(":"): float(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}


def _open_files(pid: int) -> tuple[int, int, dict[int, int]]:
    """Sockets, other files, and bytes of each shared memory a process holds, by inode."""
    sockets = others = 0
    held: dict[int, int] = {}
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        names = []  # ended meanwhile
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            target = os.readlink(path)
            if target.startswith("/memfd:"):
                info = os.stat(path)
                held[info.st_ino] = info.st_blocks * 512
            elif target.startswith("socket:"):
                sockets += 1
            else:
                others += 1
        except OSError:
            continue  # closed meanwhile
    return sockets, others, held


def exceeded(sample: dict[str, float]) -> list[tuple[str, float, float]]:
    """(what, how much, its budget) of everything above its budget."""
    budgets = [
        ("warm bytes in use", sample["used"], WARM_BYTES),
        ("peak of warm bytes", sample["peak"], WARM_BYTES),
        (HELD, sample["held"], WARM_BYTES + sample["lent"]),
        ("cold bytes", sample["cold"], COLD_BYTES),
        ("file", sample["file"], sample["map"]),
        ("warm entries", sample["warm entries"], sample["warm entries budget"]),
        # The listening socket beside them, and a connection that is being turned away.
        ("connections", sample["connections"], CONNECTIONS + 4),
    ]
    return [item for item in budgets if item[1] > item[2]]


def rises(samples: Sequence[dict[str, float]]) -> list[tuple[str, float, float]]:
    """(what, by how much its fitted line rises over the second half, how much is allowed)."""
    half = samples[len(samples) // 2 :]
    if len(half) < FIT_SAMPLES:
        return []
    at = np.array([sample["t"] for sample in half])

    def rise(name: str) -> tuple[float, float]:
        values = np.array([sample[name] for sample in half])
        return float(np.polyfit(at - at[0], values, 1)[0] * (at[-1] - at[0])), float(values.mean())

    more = max(0.0, rise("entries")[0])
    found = []
    for flat in FLAT:
        by, mean = rise(flat.name)
        found.append((flat.name, by, flat.rise + flat.part * mean + flat.each * more))
    return found
