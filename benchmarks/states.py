"""States of a made-up model for the serving benchmarks: saved, restored, looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from harness import cut, smollm_like

import warmkv
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows

MIB = 1 << 20
LAYERS, HEADS, SIZE = 32, 4, 128
TOKEN_BYTES = LAYERS * 2 * HEADS * SIZE * 4
MODEL = smollm_like(LAYERS, HEADS, SIZE)
CALL_TIMEOUT_S = 120.0
Ids = npt.NDArray[np.uint32]
Figures = dict[str, float]


@dataclass(frozen=True)
class Effort:
    """How much is measured: sizes in MiB, clients, seconds of load, rounds, segments of a store."""

    sizes: tuple[int, ...] = (1, 16, 256, 1024)
    clients: tuple[int, ...] = (1, 8, 64)
    seconds: float = 5.0
    rounds: int = 1000
    copies: int = 9
    big: int = 256
    segments: int = 100_000


QUICK = Effort((1, 16), (1, 4), 0.5, 50, 3, 16, 2_000)


def prompt(mebibytes: int, seed: int = 0) -> Ids:
    """Ids of a state of this size and one to feed."""
    ids = np.random.default_rng(seed).integers(0, 50_000, mebibytes * MIB // TOKEN_BYTES + 1, np.uint32)
    ids[0] = 1_000_000 + 2_000 * seed + mebibytes
    return ids


def made_rows(mebibytes: int, seed: int = 0, *, distinct: bool = True) -> list[LayerRows]:
    """Rows of a state of this size; unless ``distinct`` all layers lend the same arrays."""
    rng, shape = np.random.default_rng(seed), (mebibytes * MIB // TOKEN_BYTES, HEADS, SIZE)
    planes = [rng.random(shape, np.float32) for _ in range(2 * LAYERS if distinct else 2)]
    return [
        LayerRows.kv(layer, planes[2 * layer % len(planes)], planes[(2 * layer + 1) % len(planes)]) for layer in range(LAYERS)
    ]


@contextmanager
def client_of(served: DaemonProcess) -> Iterator[warmkv.Client]:
    with warmkv.connect(str(served.socket), timeout_s=CALL_TIMEOUT_S, strict=True) as client:
        yield client


def save(client: warmkv.Client, ids: Ids, records: list[LayerRows], ack: str = "memory") -> None:
    saved = client.save(MODEL, ids[:-1], cut(records, len(ids) - 1), ack="disk" if ack == "disk" else "memory")
    assert saved.stored and saved.sent_bytes, saved


def restored(client: warmkv.Client, ids: Ids) -> Restored:
    """All but the last id of what was saved, or the benchmark ends."""
    found = client.restore(MODEL, ids)
    assert found.usable == len(ids) - 1, found.match
    return found


def blocks(found: Restored) -> Iterator[npt.NDArray[np.generic]]:
    for layer in found.layers:
        for plane in layer.planes.values():
            yield from plane.blocks


def micro(value: float) -> str:
    return f"{value * 1e6:,.0f}"


def milli(value: float) -> str:
    return f"{value * 1e3:,.2f}"
