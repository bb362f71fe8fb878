"""How much memory twenty processes take that attend over one restored prefix.

Each process restores the same prompt, builds a live cache on the mapped rows, and attends over all of them in
every layer. What it then stands for is read from its smaps: of the mapping its proportional share (Pss,
pages others map too are divided by how many do), and the private memory it has grown by. Beside it, in the
same run, as many processes with a copy of their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import console, daemon, print_table, write_json

import warmkv
from warmkv.daemon.testing import DaemonProcess, child_environ
from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.bridge import on_prefix, records_of, restore_into
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.testing.live import identity_of, prompt
from warmkv.schema.identity import LayerKind

TOKENS = 4096
LAYERS, HEADS, KV_HEADS, SIZE = 8, 32, 8, 128
PROCESSES = 20
FORMATS = {"f16": RowFormat.F16, "q8": RowFormat.Q8_2F, "f32": RowFormat.F32}
#: What all processes together may take of one copy.
BOUND = 1.1


def plan_of(name: str, layers: int) -> ModelPlan:
    format_ = FORMATS[name]
    layer = LayerPlan(
        LayerKind.FULL, heads=HEADS, kv_heads=KV_HEADS, key_size=SIZE, value_size=SIZE, key_format=format_, value_format=format_,
        importance=False,
    )  # fmt: skip
    return ModelPlan.uniform(layers, layer)


def filled(plan: ModelPlan, tokens: int) -> ModelCache:
    """A cache of made-up rows."""
    cache, rng = ModelCache(plan), np.random.default_rng(0)
    for layer in cache.own:
        assert isinstance(layer, AttentionLayer)
        k, v = (rng.standard_normal((tokens, KV_HEADS, SIZE), np.float32) for _ in range(2))
        layer.append(k, v)
    return cache


def attended(cache: ModelCache) -> float:
    """Attend one position over all rows of every layer; the seconds that took."""
    rng, began = np.random.default_rng(1), time.perf_counter()
    for layer in cache.own:
        assert isinstance(layer, AttentionLayer)
        layer.attend(rng.standard_normal((HEADS, SIZE), np.float32))
    return time.perf_counter() - began


def kilobytes(pid: int) -> tuple[int, int]:
    """(proportional set size of maps of our memfds, private anonymous memory) of a process, from smaps."""
    shared = anonymous = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = len(words) > 5 and words[5].startswith("/memfd:warmkv")
        elif words[0] == "Pss:":
            shared += int(words[1]) if ours else 0
        elif words[0] == "Anonymous:":
            anonymous += 0 if ours else int(words[1])
    return shared, anonymous


def child(socket: str, name: str, layers: int, tokens: int, way: str) -> None:
    """Restore, attend, say so, wait until nobody measures any more."""
    plan = plan_of(name, layers)
    cache = ModelCache(plan)
    attended(filled(plan_of(name, 1), 80))  # kernels are loaded by now: they are nobody's rows
    with warmkv.connect(socket, timeout_s=120, strict=True) as client:
        idle = kilobytes(os.getpid())[1]
        with client.restore(identity_of(plan), prompt(tokens + 1)) as restored:
            taken = (on_prefix if way == "mapped" else restore_into)(cache, restored)
        assert taken == tokens, restored.match
        del restored
        attended(cache)
        took = attended(cache)
        print(f"{took} {idle}", flush=True)
        sys.stdin.readline()


def measured(served: DaemonProcess, name: str, layers: int, tokens: int, way: str, processes: int) -> dict[str, float]:
    """All processes at once: totals in bytes, the median seconds of one position."""
    command = [sys.executable, __file__, "--child", str(served.socket), name, str(layers), str(tokens), way]
    environ = child_environ()
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environ["PYTHONPATH"]])
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(processes)
    ]
    try:
        told = [one.stdout.readline().split() for one in children if one.stdout is not None]
        if any(len(words) != 2 for words in told):
            raise RuntimeError(f"{sum(len(words) != 2 for words in told)} of {processes} processes did not get ready")
        found = [kilobytes(one.pid) for one in children]
    finally:
        for one in children:
            one.communicate("done\n", timeout=60)
    seconds = sorted(float(took) for took, _ in told)
    grown = sum(anonymous - int(idle) for (_, anonymous), (_, idle) in zip(found, told, strict=True))
    return {"shared": 1024.0 * sum(shared for shared, _ in found), "own": 1024.0 * grown, "seconds": seconds[len(seconds) // 2]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4 processes, 512 tokens, 2 layers")
    parser.add_argument("--formats", nargs="+", default=["f16", "q8"], choices=FORMATS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()), help="where the store lies")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        socket, name, layers, tokens, way = options.child
        child(socket, name, int(layers), int(tokens), way)
        return 0
    tokens, layers, processes = (512, 2, 4) if options.quick else (TOKENS, LAYERS, PROCESSES)
    rows, figures, good = [], {}, True
    with daemon(root=options.root) as served:
        for name in options.formats:
            plan = plan_of(name, layers)
            cache = filled(plan, tokens)
            copy_bytes = cache.memory().stored
            attended(cache)  # compiles what is not compiled yet, once for all processes
            with warmkv.connect(str(served.socket), timeout_s=120, strict=True) as client:
                assert client.save(identity_of(plan), prompt(tokens), records_of(cache, tokens)).stored
            del cache
            for way in ("mapped", "copied"):
                found = measured(served, name, layers, tokens, way, processes)
                ratio = (found["shared"] + (found["own"] if way == "copied" else 0)) / copy_bytes
                good &= way != "mapped" or found["shared"] / copy_bytes <= BOUND
                sizes = (f"{size / 2**20:.1f}" for size in (copy_bytes, found["shared"], found["own"]))
                rows.append([f"{name}, {way}", *sizes, f"{ratio:.3f}", f"{found['seconds'] * 1e3:.1f}"])
                figures[f"{name} {way}"] = {**found, "copy": copy_bytes, "ratio": ratio}
    columns = ["rows", "one copy, MiB", "Pss of the mapping, MiB", "own memory, MiB", "x one copy", "ms a position"]
    print_table(f"{processes} processes over one prefix of {tokens} tokens, {layers} layers, {KV_HEADS} x {SIZE}", columns, rows)
    write_json(options.json, figures)
    if not good:
        console.print(f"[red]the mapping takes more than {BOUND} x one copy[/red]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
