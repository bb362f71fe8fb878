"""Random walks of resident layers, flat and in rings, beside a list of rows that forgets nothing.

After every step the bytes held, both counters and what attention sees are compared; every refusal has to be
one the list can justify.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from devices_at_hand import at_hand
from dumps import rows_of
from resident_oracle import HEADS, KV_HEADS, SIZE, Oracle, made, near, plan_of

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.live.devices.base import Device
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.schema.errors import CannotRewind, CapacityExceeded

BLOCKS = (RowFormat.Q8_0, RowFormat.Q5_1)
COUNTS = (0, 1, 1, 1, 1, 2, 3, 31, 32, 33)


class Walk:
    def __init__(self, device: Device, plan: LayerPlan, rows: int, seed: int, *, ringed: bool = False) -> None:
        self.rng, self.device, self.plan = np.random.default_rng(seed), device, plan
        self.layer, self.oracle = made(device, plan, rows, ringed=ringed, chunk=8), Oracle(plan)
        self.seen: Counter[str] = Counter()

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            steps = [self.append] * 8 + [self.truncate] * 2 + [self.attend, self.chunk, self.cut, self.load]
            steps[int(self.rng.integers(len(steps)))]()
            self.oracle.check(self.layer)
        if self.rng.random() < 0.5:
            self.layer.clear()
            assert self.layer.mirrors() == (0, 0)

    def append(self) -> None:
        count = int(self.rng.choice(COUNTS))
        k, v = self.normal(count, KV_HEADS, SIZE), self.normal(count, KV_HEADS, SIZE)
        base, before = self.layer.base, rows_of(self.layer)
        padding = base % 32 if self.layer.ring is not None else 0
        needed = self.layer.rows + padding
        fits = needed + count <= self.layer.capacity
        if self.layer.ring is not None and not fits:
            # What the next query sees, from a multiple of 32 on.
            needed = self.layer.position - max(base - padding, max(0, self.layer.position - self.plan.window + 1) // 32 * 32)
        if needed + count > self.layer.capacity:
            with pytest.raises(CapacityExceeded):
                self.layer.append(k, v)
            assert rows_of(self.layer) == before
            self.seen["full"] += 1
            self.make_room()
            return
        self.layer.append(k, v)
        self.oracle.append(k, v)
        assert (self.layer.base == base) == fits
        self.seen["appended" if fits else "wrapped"] += 1

    def make_room(self) -> None:
        if self.layer.ring is not None:
            return
        if self.plan.window:
            self.layer.trim_window()
        if self.layer.rows > self.layer.capacity // 2:
            back = self.layer.rows // 2
            try:
                self.layer.truncate_last(back)
            except CannotRewind:
                self.clear()
            else:
                self.oracle.truncate(back)

    def clear(self) -> None:
        self.layer.clear()
        self.oracle.rows, self.oracle.position = [], 0

    def truncate(self) -> None:
        count = int(self.rng.integers(0, min(self.oracle.position, 45) + 1))
        back = self.layer.position - count
        first = max(0, back - self.plan.window + 1) if self.plan.window else 0
        held = self.layer.position - self.layer.rows if self.plan.window else 0
        # Rows that were picked out are solid at their end only, which the layer itself counts.
        lapped = count > self.layer.rows or (count > 0 and first < held)
        if lapped and self.plan.window:
            before = rows_of(self.layer)
            with pytest.raises(CannotRewind):
                self.layer.truncate_last(count)
            assert rows_of(self.layer) == before
            self.seen["lapped"] += 1
            return
        try:
            self.layer.truncate_last(count)
        except CannotRewind:
            newest = [row.position for row in self.oracle.rows[len(self.oracle.rows) - count :]]
            assert newest != list(range(back, self.oracle.position))
            self.seen["scattered"] += 1
            return
        self.oracle.truncate(count)
        self.seen["truncated"] += 1

    def attend(self) -> None:
        if self.plan.window and self.layer.base and self.layer.rows < self.plan.window:
            return  # just taken back: the window is whole again with the next row
        q = self.normal(HEADS, SIZE)
        near(self.device.download(self.layer.attend(q)), self.oracle.attend(q))
        self.seen["attended"] += 1

    def chunk(self) -> None:
        count = min(int(self.rng.integers(1, 4)), self.layer.rows)
        if self.plan.window and self.layer.base and self.layer.rows - count + 1 < self.plan.window:
            return
        q = self.normal(count, HEADS, SIZE)
        found = self.device.download(self.layer.attend_chunk(q))
        for at in range(count):
            near(found[at], self.oracle.attend(q[at], len(self.oracle.rows) - count + at + 1))

    def cut(self) -> None:
        """Trim a window, pick rows out of others."""
        rows = self.layer.rows
        if self.plan.window:
            base = self.layer.base
            assert self.layer.trim_window(slack=3, align=2) == self.layer.base - base
            self.seen["trimmed"] += self.layer.base > base
        elif rows > 20 and self.rng.random() < 0.3:
            kept = np.flatnonzero(self.rng.random(rows) < 0.7)
            self.layer.keep(kept)
            self.oracle.rows = [self.oracle.rows[at] for at in kept]
            self.seen["kept"] += 1

    def load(self) -> None:
        """The rows it has, from record bytes: all of a flat layer, of a ring its window."""
        if self.rng.random() > 0.3 or not self.layer.gapless:
            return
        window = self.plan.window
        if window and self.layer.base > max(0, self.layer.position - window + 1):
            return
        planes = (self.layer.keys, self.layer.values)
        base = self.layer.base
        if window and self.rng.random() < 0.5:
            base = max(0, self.layer.position - window + 1)  # as records end
        first = base - (self.layer.position - self.layer.rows)
        cut = int(self.rng.integers(first, self.layer.rows + 1))
        parts = [[plane.packed(first, cut), plane.packed(cut)] for plane in planes]
        install = self.layer.prepare_restore(*parts, position=self.layer.position, base=base)
        if self.rng.random() < 0.3:
            return  # prepared in vain
        install()
        if self.layer.ring is not None:
            assert self.layer.base == max(base, max(0, self.layer.position - window + 1) // 32 * 32)
        self.seen["loaded"] += 1


FLAT = {"appended", "full", "truncated", "attended", "loaded"}
WALKS = [
    pytest.param(plan_of(*BLOCKS), 120, False, 2000, FLAT | {"kept", "scattered"}, id="full"),
    pytest.param(plan_of(*BLOCKS, window=20), 120, False, 600, FLAT | {"trimmed", "lapped"}, id="window"),
    pytest.param(plan_of(*BLOCKS, window=20), 96, True, 2000, FLAT - {"full"} | {"wrapped", "lapped"}, id="ring"),
    pytest.param(plan_of(*BLOCKS, window=33), 70, True, 600, FLAT | {"wrapped", "lapped"}, id="short ring"),
]


@pytest.mark.parametrize(("plan", "rows", "ringed", "steps", "expected"), WALKS)
def test_a_long_walk(
    plan: LayerPlan, rows: int, ringed: bool, steps: int, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    walk = Walk(at_hand("host", monkeypatch), plan, rows, 7, ringed=ringed)
    walk.run(steps)
    assert expected <= set(walk.seen), walk.seen


@pytest.mark.parametrize("kind", ["stand-in", "harness", "cuda"])
@pytest.mark.parametrize(("plan", "rows", "ringed", "steps", "expected"), WALKS)
def test_a_walk_on_other_devices(
    kind: str, plan: LayerPlan, rows: int, ringed: bool, steps: int, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    walk = Walk(at_hand(kind, monkeypatch), plan, rows, 8, ringed=ringed)
    walk.run(80)
    assert {"appended", "attended"} <= set(walk.seen)


@pytest.mark.parametrize("ringed", [False, True])
@pytest.mark.parametrize(
    "formats", [(RowFormat.F32, RowFormat.F16), (RowFormat.BF16, RowFormat.FP8), (RowFormat.FP8, RowFormat.Q4_0)],
    ids=lambda pair: "-".join(format_.value for format_ in pair),
)  # fmt: skip
def test_a_walk_of_other_formats(formats: tuple[RowFormat, RowFormat], ringed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(at_hand("host", monkeypatch), plan_of(*formats, window=20), 96, 9, ringed=ringed)
    walk.run(150)
    assert {"appended", "attended", "wrapped" if ringed else "full"} <= set(walk.seen)
