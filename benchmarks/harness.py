"""What every benchmark needs: a daemon of its own, medians, a table with its baselines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from warmkv import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore.rows import LayerRows

console = Console(highlight=False, width=150)
T = TypeVar("T")


def median_s(action: Callable[[], object], rounds: int = 5, *, before: Callable[[], object] | None = None) -> float:
    """Median seconds of ``action`` over ``rounds``; ``before`` runs untimed ahead of each."""
    times = []
    for _ in range(rounds):
        if before is not None:
            before()
        began = time.perf_counter()
        kept = action()
        times.append(time.perf_counter() - began)
        del kept
    return median(times)


def timed(action: Callable[..., T], *given: object) -> tuple[float, T]:
    """Seconds of one call, and its answer."""
    began = time.perf_counter()
    answer = action(*given)
    return time.perf_counter() - began, answer


def percentile(values: Sequence[float], percent: int) -> float:
    """The least value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def microseconds(value: float) -> str:
    return f"{value * 1e6:.1f}" if value < 1e-3 else f"{value * 1e6:,.0f}"


def alone(action: Callable[..., T], *given: object) -> T:
    """The answer of a process of its own, whose memory nothing else has used."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(action, *given).result()


def smollm_like(layers: int = 30, heads: int = 3, size: int = 64) -> Identity:
    """An identity with the geometry of SmolLM2-135M in f32: 46,080 bytes a token."""
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (heads, size)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    return Identity(
        architecture="benchmark", parameters=b"benchmark-weight", settings=b"none", adapters=(),
        layers=(LayerSpec(LayerKind.FULL, planes),) * layers, compute_dtype="float32", attention="none", layout="token-major",
        rope=RopeRegime("default", 1e5, 1.0, size, 8192, b"none"), tokenizer=b"none", runtime="benchmark",
        runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def rows_for(identity: Identity, tokens: int, seed: int = 0) -> list[LayerRows]:
    """Random token-major rows of every layer."""
    rng = np.random.default_rng(seed)
    made = []
    for index, layer in enumerate(identity.layers):
        keys, values = (rng.standard_normal((tokens, *plane.row_shape), dtype=np.float32) for plane in layer.planes)
        made.append(LayerRows.kv(index, keys, values))
    return made


def cut(records: list[LayerRows], end: int) -> list[LayerRows]:
    """The same rows up to token ``end``."""
    return [replace(record, planes=tuple(replace(plane, rows=plane.rows[:end]) for plane in record.planes)) for record in records]


def arrays(records: list[LayerRows]) -> list[npt.NDArray[np.generic]]:
    return [plane.rows for record in records for plane in record.planes]


@contextlib.contextmanager
def daemon(*arguments: str, root: Path) -> Iterator[DaemonProcess]:
    """A running daemon, its files removed afterwards. Its store lies below ``root``, which should
    be on a real disk; its socket in a short path of its own."""
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=root))
    runtime = Path(tempfile.mkdtemp(prefix="warmkv-bench-"))
    try:
        with DaemonProcess(runtime, "--log-level", "warning", *arguments, store=base / "store") as served:
            yield served
    finally:
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(runtime, ignore_errors=True)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_json(path: Path | None, value: object) -> None:
    if path is not None:
        path.write_text(json.dumps(value, indent=1))


def anonymous_bytes(pid: int) -> int:
    """Private anonymous memory of a process: RSS without what is shared or file-backed."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
