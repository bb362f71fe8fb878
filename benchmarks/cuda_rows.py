"""Rows of every format on a device: appended, read back and attended, beside a copy in the same memory.

So many layers are held that what is moved does not stay in a cache. Operations of all layers are enqueued
together, on a GPU captured once and replayed, so that what is timed is the device; a round takes each in
its turn, and ratios are of one round's neighbours. Bytes are what has to move: of a copy both ways, of
append and read float32 rows on one side and stored ones on the other, of attention the stored rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import console, print_table, write_json

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.resident.plane import TAIL_PAD, Counters, ResidentPlane
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.opening import open_device
from warmkv.schema.errors import DeviceMissing

HEADS, KV_HEADS, SIZE = 32, 8, 128
COUNTS = (4096, 32768, 131072)
#: Keys and values.
SIDES = (
    (RowFormat.F16, RowFormat.F16), (RowFormat.BF16, RowFormat.BF16), (RowFormat.Q8_2F, RowFormat.Q8_2F),
    (RowFormat.Q8_0, RowFormat.Q5_1), (RowFormat.Q8_0, RowFormat.Q4_0), (RowFormat.FP8, RowFormat.FP8),
    (RowFormat.TQ_KEY, RowFormat.TQ_VALUE), (RowFormat.TQ3, RowFormat.TQ_VALUE),
)  # fmt: skip
#: Bytes that a round goes through, five times the second-level cache of an H200.
WORKING_SET_BYTES = 256 << 20
ROUNDS = 5
AIM_READ, AIM_ATTEND, AIM_ROWS = 0.7, 0.5, 32768
COLUMNS = [
    "rows",
    "keys/values",
    "MB a layer",
    "copy GB/s",
    "append GB/s",
    "of copy",
    "read GB/s",
    "of copy",
    "attend µs",
    "GB/s",
    "of copy",
]

Act = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Bytes a second of one round's best, and seconds of attention in one layer."""

    rows: int
    storage: str
    layer_bytes: int
    copy: float
    append: float
    read: float
    attend: float
    attend_s: float

    def line(self) -> list[str]:
        def beside(rate: float) -> list[str]:
            return [f"{rate / 1e9:,.1f}", f"{rate / self.copy:.2f}"]

        return [
            f"{self.rows:,}", self.storage, f"{self.layer_bytes / 1e6:.1f}", f"{self.copy / 1e9:,.1f}", *beside(self.append),
            *beside(self.read), f"{self.attend_s * 1e6:,.1f}", *beside(self.attend),
        ]  # fmt: skip


def plane(device: Device, format_: RowFormat, count: int, layer: int, *, keys: bool) -> ResidentPlane:
    turn = Turn(Rotation.of(1, layer, SIZE)) if format_.rotated else None
    data = device.zeros((count * KV_HEADS * format_.row_bytes(SIZE, keys=keys) + TAIL_PAD,), np.uint8)
    return ResidentPlane(format_, KV_HEADS, SIZE, keys, count, data, turn=turn)


def uploaded(device: Device, array: Any) -> Any:
    placed = device.alloc(array.shape, array.dtype)
    device.upload(array.reshape(-1), placed.reshape(-1))
    return placed


def measure(device: Device, count: int, key_format: RowFormat, value_format: RowFormat, working_set: int) -> Measured:
    operations, rng = device.operations, np.random.default_rng(0)
    layer_bytes = count * KV_HEADS * (key_format.row_bytes(SIZE, keys=True) + value_format.row_bytes(SIZE, keys=False))
    layers = max(1, -(-working_set // layer_bytes))
    # Rotations are one a model here: tables of each are a matter of kilobytes.
    sides = [
        (plane(device, key_format, count, 0, keys=True), plane(device, value_format, count, 0, keys=False)) for _ in range(layers)
    ]
    rows = uploaded(device, rng.standard_normal((count, KV_HEADS, SIZE), np.float32))
    out = device.alloc(rows.shape, np.float32)
    zero, full = device.zeros((1,), np.int32), device.zeros((1,), np.int32)
    device.set_one(full, count)
    q, attended = uploaded(device, rng.standard_normal((HEADS, SIZE), np.float32)), device.alloc((HEADS, SIZE), np.float32)
    scratch = device.alloc((operations.scratch_floats(HEADS, SIZE, count),), np.float32)
    flat, other = rows.reshape(-1), out.reshape(-1)
    append = [partial(operations.append, side, rows, Counters(zero, zero)) for pair in sides for side in pair]
    read = [partial(operations.decode, side, 0, count, out) for pair in sides for side in pair]
    attend = [
        partial(operations.attend, q, k, v, Counters(full, zero), out=attended, scratch=scratch, scale=SIZE**-0.5)
        for k, v in sides
    ]
    copy = [partial(device.copy_into, other, 0, flat, 0, flat.size)] * (2 * layers)
    copy_s, append_s, read_s, attend_s = in_turn(device, [copy, append, read, attend])
    moved = layers * (layer_bytes + 2 * rows.nbytes)
    return Measured(
        count, f"{key_format.value}/{value_format.value}", layer_bytes, 2 * len(copy) * rows.nbytes / copy_s, moved / append_s,
        moved / read_s, layers * layer_bytes / attend_s, attend_s / layers,
    )  # fmt: skip


def in_turn(device: Device, lists: list[list[Act]]) -> list[float]:
    """The least seconds of each list; all take their turn in every round."""
    runs = [replayed(device, acts) for acts in lists]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for own, run in zip(times, runs, strict=True):
            device.synchronize()
            began = time.perf_counter()
            run()
            device.synchronize()
            own.append(time.perf_counter() - began)
    return [min(own) for own in times]


def replayed(device: Device, acts: list[Act]) -> Act:
    """All of ``acts`` in one call, of a GPU as one graph. They have run once by then: nothing is compiled in it."""

    def run() -> None:
        for act in acts:
            act()

    run()
    device.synchronize()
    stream = getattr(device, "stream", None)
    if stream is None:
        return run
    stream.begin_capture()
    run()
    graph = stream.end_capture()
    return lambda: graph.launch(stream)


def verdict(found: list[Measured]) -> bool:
    """Prints each aim with what was reached; whether all were."""
    reached = True
    for one in found:
        if one.rows == AIM_ROWS:
            for what, value, aim in (("read", one.read / one.copy, AIM_READ), ("attended", one.attend / one.copy, AIM_ATTEND)):
                reached &= value >= aim
                said = "reached" if value >= aim else "MISSED"
                console.print(f"{said}: {one.storage} {what} at {value:.2f} of a copy's bytes a second, aim {aim}")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--working-set", type=int, default=WORKING_SET_BYTES, help="bytes of all layers together")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    try:
        device = open_device(options.device)
    except DeviceMissing as error:
        console.print(f"not run: {error}", markup=False)
        return 0
    found = [measure(device, count, *sides, options.working_set) for count in options.rows for sides in SIDES]
    title = f"{device.name}: {HEADS}/{KV_HEADS} heads of {SIZE} channels, a layer"
    print_table(title, COLUMNS, [one.line() for one in found])
    write_json(options.json, [asdict(one) for one in found])
    return 0 if verdict(found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
