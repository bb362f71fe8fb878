"""What every benchmark needs: a daemon of its own, medians, a table with its baselines."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import warmkv
from warmkv import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime
from warmkv.kvstore.rows import LayerRows

console = Console(highlight=False, width=150)


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
    from dataclasses import replace

    return [replace(record, planes=tuple(replace(plane, rows=plane.rows[:end]) for plane in record.planes)) for record in records]


def arrays(records: list[LayerRows]) -> list[npt.NDArray[np.generic]]:
    return [plane.rows for record in records for plane in record.planes]


class Daemon:
    """A `warmkv serve` with a store and socket of its own."""

    def __init__(self, root: Path, *arguments: str) -> None:
        self.root = root
        self.socket = str(Path(tempfile.mkdtemp(prefix="warmkv-bench-")) / "warmkv.sock")
        self.store = root / "store"
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "warmkv.daemon.cli", "serve", "--socket", self.socket, "--store", str(self.store)]
        environment = {**os.environ, "WARMKV_LOG_LEVEL": "warning"}
        self.process = subprocess.Popen([*command, *self.arguments], env=environment)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise SystemExit(f"the daemon ended with status {self.process.returncode}")
            try:
                with warmkv.connect(self.socket, strict=True) as client:
                    client.stats()
                return
            except warmkv.WarmKVError:
                time.sleep(0.02)
        raise SystemExit("the daemon did not become ready")

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(120)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


@contextlib.contextmanager
def daemon(*arguments: str, root: Path | None = None) -> Iterator[Daemon]:
    """A running daemon, its files removed afterwards. ``root`` should lie on a real disk."""
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=root or Path.cwd()))
    served = Daemon(base, *arguments)
    try:
        served.start()
        yield served
    finally:
        served.stop(signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(Path(served.socket).parent, ignore_errors=True)


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


def resident_bytes(pid: int) -> int:
    """Resident set of a process, shared memory included."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes(pid: int) -> int:
    """Private anonymous memory of a process: RSS without what is shared or file-backed."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
