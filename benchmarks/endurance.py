"""10,000 restores after 500 of warm-up: descriptors and memory of both sides must stay flat.

Exits non-zero when a descriptor leaks or private memory grows by more than 8 MB on either side.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
from harness import anonymous_bytes, cut, daemon, descriptors, print_table, rows_for, smollm_like

import warmkv

ALLOWED_BYTES = 8 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restores", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=500)
    given = parser.parse_args()
    identity = smollm_like(layers=12)
    records = rows_for(identity, 600)
    ids = np.arange(1, 602, dtype=np.uint32)
    with daemon(root=Path.cwd()) as served, warmkv.connect(str(served.socket), strict=True) as client:
        client.save(identity, ids[:400], cut(records, 400))
        client.save(identity, ids[:600], records, ack="disk")
        samples = {}
        began = time.perf_counter()
        for index in range(given.warm_up + given.restores):
            if index == given.warm_up:
                gc.collect()
                samples["before"] = sample(served.pid)
                began = time.perf_counter()
            with client.restore(identity, ids) as restored:
                assert restored.usable == 600
        took = time.perf_counter() - began
        gc.collect()
        samples["after"] = sample(served.pid)
    rows, failed = [], False
    for side in ("client", "daemon"):
        (fds0, rss0), (fds1, rss1) = samples["before"][side], samples["after"][side]
        failed |= fds1 != fds0 or rss1 - rss0 > ALLOWED_BYTES
        rows.append([side, str(fds0), f"{fds1 - fds0:+d}", f"{rss0 / 1e6:.1f}", f"{(rss1 - rss0) / 1e6:+.2f}"])
    title = f"{given.restores} restores of 2 segments after {given.warm_up}: {took / given.restores * 1e6:.0f} us each"
    print_table(title, ["", "descriptors", "change", "private MB", "change"], rows)
    return 1 if failed else 0


def sample(daemon_pid: int) -> dict[str, tuple[int, int]]:
    return {name: (descriptors(pid), anonymous_bytes(pid)) for name, pid in (("client", os.getpid()), ("daemon", daemon_pid))}


if __name__ == "__main__":
    sys.exit(main())
