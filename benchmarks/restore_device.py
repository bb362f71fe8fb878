"""A prefix from mapped segments into caches on a device, flat and ringed, beside copies of the same mapped bytes.

Every round maps the segments anew, as a restore by a process that just came does, and so does the copy beside
it: by numpy, block by block, into host memory that was written before. Caches are empty, so that rows go where
they belong at once; a cache that held others first brings them where nobody reads, and moves them on the device.
Finding and mapping the prefix is timed apart. Converting goes through float32 a few MiB at a time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from harness import console, print_table, timed, write_json

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.quant.packed import packed_dtype, packed_shape
from warmkv.kvstore.bridge import layer_specs, restore_into
from warmkv.kvstore.bridge.specs import FORMATS, sides_of
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.devices.opening import open_device
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.residence import Residence
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.rows import LayerRows, PlaneRows
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing.samples import mixed_identity
from warmkv.schema.errors import DeviceMissing
from warmkv.schema.identity import Identity, LayerKind, PlaneRole

LAYERS, HEADS, KV_HEADS, SIZE = 32, 32, 8, 128
RESTORED_BYTES = 1_000_000_000
#: Converting is arithmetic: as many bytes would take as many times as long.
CONVERTED_SHARE = 8
ROUNDS = 5
COLUMNS = ["restore", "tokens", "MB", "find ms", "memcpy GB/s", "restore GB/s", "of memcpy"]
SERVING = RowFormat.Q8_0, RowFormat.Q5_1


@dataclass(frozen=True)
class Case:
    """Rows ``stored`` in formats, wanted in others; of a window of all but a tenth of the tokens where ``ringed``."""

    name: str
    stored: tuple[RowFormat, RowFormat]
    wanted: tuple[RowFormat, RowFormat]
    ringed: bool = False
    used: bool = False
    share: int = 1


F16 = RowFormat.F16, RowFormat.F16
CASES = (
    Case("flat, q8_0/q5_1", SERVING, SERVING),
    Case("rings, q8_0/q5_1", SERVING, SERVING, ringed=True),
    Case("flat, f16", F16, F16),
    Case("flat, q8_0/q5_1, over others", SERVING, SERVING, used=True),
    Case("flat, f16 written as q8_0/q5_1", F16, SERVING, share=CONVERTED_SHARE),
)


@dataclass(frozen=True)
class Measured:
    """Bytes moved, seconds to find and map them, and bytes a second of both ways; ``ratio`` is of neighbours."""

    name: str
    tokens: int
    moved: int
    find_s: float
    memcpy: float
    restore: float
    ratio: float

    def line(self) -> list[str]:
        return [
            self.name, f"{self.tokens:,}", f"{self.moved / 1e6:,.0f}", f"{self.find_s * 1e3:.1f}", f"{self.memcpy / 1e9:.2f}",
            f"{self.restore / 1e9:.2f}", f"{self.ratio:.2f}",
        ]  # fmt: skip


def plan_of(formats: tuple[RowFormat, RowFormat], window: int) -> ModelPlan:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    return ModelPlan.uniform(
        LAYERS,
        LayerPlan(kind, HEADS, KV_HEADS, SIZE, SIZE, *formats, window=window, importance=False),
    )


def filled(store: Store, identity: Identity, plan: ModelPlan, tokens: int) -> None:
    """Rows in every layer: normal numbers as f16, and of other formats bytes of which all scales are numbers."""
    rng, records = np.random.default_rng(0), []
    for index, layer in enumerate(plan.layers):
        start = max(0, tokens - (layer.window - 1)) if layer.window else 0
        planes = []
        for side in sides_of(layer):
            shape = packed_shape(side.format, side.heads, side.size, keys=side.keys)
            if side.format is RowFormat.F16:
                rows = rng.standard_normal((tokens - start, *shape), np.float32).astype(np.float16)
            else:  # any bytes are as good to move
                rows = rng.integers(0, 0x3C, (tokens - start, *shape), np.uint8).astype(packed_dtype(side.format))
            planes.append(PlaneRows(side.role, FORMATS[side.format], rows))
        records.append(LayerRows(index, tuple(planes), start))
    saved = store.save(identity, np.arange(tokens, dtype=np.uint32), records, ack="memory")
    assert saved.stored, saved.reason


def blocks_of(restored: Restored) -> list[np.ndarray]:
    """The mapped rows, layers put together by then."""
    sides = PlaneRole.KEY, PlaneRole.VALUE
    return [block for layer in restored.layers for role in sides for block in layer.planes[role].blocks]


def copied(blocks: Sequence[np.ndarray], room: np.ndarray) -> None:
    at = 0
    for block in blocks:
        raw = block.reshape(-1).view(np.uint8)
        room[at : at + raw.size] = raw
        at += raw.size


def measure(device: Device, case: Case, wanted_bytes: int) -> Measured:
    row_bytes = sum(KV_HEADS * side.row_bytes(SIZE, keys=keys) for side, keys in zip(case.stored, (True, False), strict=True))
    rows = max(64, wanted_bytes // case.share // (LAYERS * row_bytes))
    tokens = rows + rows // 10 if case.ringed else rows
    window = rows + 1 if case.ringed else 0
    plan = plan_of(case.wanted, window)
    stored = plan_of(case.stored, window)
    identity, ids = mixed_identity(*layer_specs(stored)), np.arange(tokens + 1, dtype=np.uint32)
    room = 2 * tokens if case.used else tokens + 64
    with open_store(warm_bytes=2 * wanted_bytes + (256 << 20)) as store:
        filled(store, identity, stored, tokens)
        cache = ModelCache(plan, residence=Residence((device,), room, rings=case.ringed))
        target = np.zeros(LAYERS * rows * row_bytes, np.uint8)
        finds, copies, restores = [], [], []
        for _ in range(ROUNDS + 1):
            if not case.used:
                cache.clear()
            find_s, restored = timed(store.restore, identity, ids)
            with restored:
                assert restored.usable == tokens
                device.synchronize()
                began = time.perf_counter()
                taken = restore_into(cache, restored, convert=True)
                device.synchronize()
                restores.append(time.perf_counter() - began)
                assert taken == tokens
            with store.restore(identity, ids) as again:
                began = time.perf_counter()
                copied(blocks_of(again), target)
                copies.append(time.perf_counter() - began)
            finds.append(find_s)
    # The first round has everything to load, and a used cache nothing in it.
    ratio = median(copy / restore for copy, restore in zip(copies[1:], restores[1:], strict=True))
    rates = [target.size / median(times[1:]) for times in (copies, restores)]
    return Measured(case.name, tokens, target.size, median(finds[1:]), *rates, ratio)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--bytes", type=int, default=RESTORED_BYTES, help="bytes of rows to be restored, the store holds as many")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    try:
        device = open_device(options.device)
    except DeviceMissing as error:
        console.print(f"not run: {error}", markup=False)
        return 0
    found = [measure(device, case, options.bytes) for case in CASES]
    title = f"{device.name}: {LAYERS} layers of {KV_HEADS} KV heads of {SIZE} channels, from mapped segments"
    print_table(title, COLUMNS, [one.line() for one in found])
    write_json(options.json, [asdict(one) for one in found])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
