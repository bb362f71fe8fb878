"""Random walks of a layer and a list that forgets nothing, compared after every step.

Steps: append one row or many, attend, truncate, trim, keep, clear, adopt (copies, mapped segments, float
rows), observe. Rows are compared bit for bit, attention with float64.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
from dumps import rows_of
from twin import Twin

from warmkv.kernels.dispatch import REFERENCE, Backend, Kernels, kernels
from warmkv.kernels.errors import BackendMissing
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, TurboQuantPlan, modes
from warmkv.kvstore.live.rows.allocation import allocate
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.schema.errors import CannotRewind, OutOfMemory, RecordError
from warmkv.schema.identity import LayerKind

HEADS, KV_HEADS = 4, 2
#: Channels of keys and of values; rotated rows need multiples of 8, and these have odd factors, blocked ones of 32.
SIZES, ROTATED_SIZES, BLOCKED_SIZES = (33, 7), (40, 24), (64, 32)
COUNTS = (0, 1, 1, 1, 2, 3, 17, 62, 63, 64, 65, 66)
#: Each blocked format is walked once, and fp8 beside one.
_WALKED = {name for name, *_ in modes(rotated=True)} - {"fp8"} | {"q8_0/q5_1", "fp8/q4_0"}
MODES = [pytest.param(keys, values, id=name) for name, keys, values in modes(rotated=True, blocked=True) if name in _WALKED]


class Faults:
    """Memory that can be refused at the k-th time it is asked for."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        wanted = int(np.prod(shape)) * dtype.itemsize
        if self.left is not None and wanted:
            if self.left == 0:
                raise OutOfMemory(f"{wanted} bytes refused", wanted)
            self.left -= 1
        found = allocate(shape, dtype)
        found.view(np.uint8)[...] = 0xFF
        return found


class Walk:
    def __init__(self, plan: LayerPlan, seed: int, *, kernels: Kernels = REFERENCE, faults: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.plan, self.faults = plan, Faults()
        self.refused = 0
        self.rehearse = faults
        self.layer = AttentionLayer(plan, index=3, kernels=kernels, allocate=self.faults)
        self.twin = Twin(plan)
        if self.rng.random() < 0.5:
            self.twin.sinks = self.rng.standard_normal(HEADS).astype(np.float32)
            self.layer.sinks = self.twin.sinks

    def try_all(self, act) -> None:
        """``act`` with memory refused at every single time it is asked for, then with all of it."""
        before, left = rows_of(self.layer), 0
        while self.rehearse:
            self.faults.left = left
            try:
                act()
            except OutOfMemory as exc:
                assert exc.requested_bytes > 0
                assert rows_of(self.layer) == before, f"refusal {left} left something changed"
                self.refused, left = self.refused + 1, left + 1
                continue
            finally:
                self.faults.left = None
            return
        act()

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(np.float32)

    def rows(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        k, v = self.normal(count, KV_HEADS, self.plan.key_size), self.normal(count, KV_HEADS, self.plan.value_size)
        k[..., ::3] *= 4
        for head in range(KV_HEADS):
            if head not in self.plan.alive_heads:
                k[:, head] = v[:, head] = np.nan
        return k, v

    def step(self) -> None:
        name = self.rng.choice(
            ["append", "attend", "truncate", "trim", "keep", "accumulate", "chunk", "clear", "adopt"],
            p=[0.36, 0.14, 0.14, 0.13, 0.09, 0.03, 0.05, 0.02, 0.04],
        )
        getattr(self, name)()

    def append(self) -> None:
        count = int(self.rng.choice(COUNTS))
        k, v = self.rows(count)
        before, was_open = self.layer.generation, self.twin.is_open
        self.try_all(lambda: self.layer.append(k, v))
        self.twin.append(k, v)
        assert (self.layer.generation != before) == (was_open and not self.twin.is_open)

    def attend(self) -> None:
        stored = len(self.twin.stored)
        lowest = self.plan.window if self.plan.window and self.twin.base else 0
        if stored < lowest:
            with pytest.raises(RecordError, match="given up"):
                self.layer.attend(self.normal(HEADS, self.plan.key_size))
            return
        upto = None if self.rng.random() < 0.5 else int(self.rng.integers(lowest, stored + 1))
        q, observe = self.normal(HEADS, self.plan.key_size), bool(self.rng.random() < 0.7)
        assert np.allclose(
            self.layer.attend(q, upto=upto, observe=observe), self.twin.attend(q, upto, observe=observe), rtol=1e-5, atol=2e-5
        )

    def chunk(self) -> None:
        k, v = self.rows(int(self.rng.integers(0, 6)))
        self.layer.append(k, v)
        self.twin.append(k, v)
        stored = len(self.twin.stored)
        if self.twin.base and self.plan.window and stored - len(k) + 1 < self.plan.window:
            return
        q = self.normal(len(k), HEADS, self.plan.key_size)
        got = self.layer.attend_chunk(q)
        for at in range(len(k)):
            want = self.twin.attend(q[at], stored - len(k) + at + 1)
            assert np.allclose(got[at], want, rtol=1e-5, atol=2e-5)

    def truncate(self) -> None:
        count = int(self.rng.choice([0, 1, 2, 5, 30, self.twin.position, self.twin.position + 1, -1]))
        refusal, before = self.twin.refuses_truncation(count), rows_of(self.layer)
        if refusal:
            for ask in (self.layer.check_truncate, self.layer.truncate_last):
                with pytest.raises((RecordError, CannotRewind)) as caught:
                    ask(count)
                assert type(caught.value).__name__ == refusal
            assert rows_of(self.layer) == before
            return
        generation = self.layer.generation
        self.layer.truncate_last(count)
        self.twin.truncate(count)
        assert self.layer.generation == generation

    def trim(self) -> None:
        slack, align = int(self.rng.integers(0, 4)), int(self.rng.choice([1, 3, 4, 16]))
        anchor = None if self.rng.random() < 0.5 else int(self.rng.integers(0, self.twin.position + 3))
        generation = self.layer.generation
        given_up = self.layer.trim_window(slack, align, anchor)
        assert given_up == self.twin.trim(slack, align, anchor)
        assert (self.layer.generation != generation) == bool(given_up)

    def keep(self) -> None:
        stored = len(self.twin.stored)
        shape = self.rng.integers(0, 4)
        if shape == 0:
            kept = list(range(stored - int(self.rng.integers(0, stored + 1)), stored))
        elif shape == 1:
            first, last = sorted(int(at) for at in self.rng.integers(0, stored + 1, 2))
            kept = list(range(first, last))
        else:
            kept = [at for at in range(stored) if self.rng.random() < 0.7]
        if self.plan.window:
            with pytest.raises(RecordError, match="sliding"):
                self.layer.keep(kept)
            return
        generation = self.layer.generation
        self.try_all(lambda: self.layer.keep(kept))
        self.twin.keep(kept)
        assert (self.layer.generation != generation) == (len(kept) < stored)

    def accumulate(self) -> None:
        mass = np.abs(self.normal(self.layer.rows))
        self.layer.accumulate(mass)
        for row, extra in zip(self.twin.stored, mass, strict=True):
            row.mass += float(extra)

    def clear(self) -> None:
        self.layer.clear()
        self.twin = Twin(self.plan, self.twin.sinks)

    def adopt(self) -> None:
        donor = Walk(self.plan, int(self.rng.integers(1 << 30)))
        donor.twin.sinks = self.twin.sinks
        k, v = donor.rows(int(self.rng.choice([0, 1, 10, 63, 64, 65, 100])))
        donor.layer.append(k, v)
        donor.twin.append(k, v)
        if self.rng.random() < 0.5:
            donor.trim()
        mass = np.abs(self.normal(donor.layer.rows))
        for row, share in zip(donor.twin.stored, mass, strict=True):
            row.mass = float(share)
        way = self.rng.integers(0, 3)

        def act() -> None:
            planes = (donor.layer.keys, donor.layer.values)
            if way == 0:
                made = tuple(
                    empty.copied([plane.blocks(head) for head in range(plane.heads)])
                    for empty, plane in zip(self.layer.empty_planes(), planes, strict=True)
                )
            elif way == 1 or self.plan.quantised:
                made = tuple(
                    PrefixRows(segments(plane, self.rng), empty)
                    for empty, plane in zip(self.layer.empty_planes(), planes, strict=True)
                )
            else:
                first, alive = donor.layer.position - donor.layer.rows, list(self.plan.alive_heads)
                made = (np.ascontiguousarray(k[first:, alive]), np.ascontiguousarray(v[first:, alive]))
            self.layer.adopt(
                *made, position=donor.layer.position, base=donor.layer.base, importance=mass, gapless=donor.layer.gapless
            )

        self.try_all(act)
        self.twin = copy.deepcopy(donor.twin)

    def compare(self) -> None:
        layer, twin = self.layer, self.twin
        stored = twin.stored
        assert (layer.rows, layer.position, layer.base, layer.gapless) == (
            len(stored), twin.position, twin.base, twin.gapless
        )  # fmt: skip
        assert np.allclose(layer.importance, [row.mass for row in stored], rtol=1e-4, atol=1e-4)
        for plane, rows in enumerate((layer.keys, layer.values)):
            assert len(rows) == len(stored) and rows.heads == len(self.plan.alive_heads)
            for at in range(rows.heads):
                blocks = rows.blocks(at)
                frozen = twin.fields[plane][at]
                assert all(same(block.field, frozen) for block in blocks)
                if stored:
                    want = twin.block(plane, at, stored)
                    assert np.concatenate([block.codes for block in blocks]).tobytes() == want.codes.tobytes()
                    if want.scales is not None:
                        assert np.concatenate([block.scales for block in blocks]).tobytes() == want.scales.tobytes()


def same(found: np.ndarray | None, expected: np.ndarray | None) -> bool:
    return (found is None) == (expected is None) and (found is None or found.tobytes() == expected.tobytes())


def segments(plane, rng: np.random.Generator) -> list[list[Block]]:
    """The plane's rows as a mapped prefix has them: token-major runs, cut at random, read-only."""
    rows, cuts = len(plane), sorted(int(at) for at in rng.integers(0, len(plane) + 1, 3))
    bounds = [0, *cuts, rows]
    whole = [plane.blocks(head) for head in range(plane.heads)]
    codes = np.stack([np.concatenate([block.codes for block in blocks]) for blocks in whole], axis=1)
    scales = None
    if plane.format.quantised:
        scales = np.stack([np.concatenate([block.scales for block in blocks]) for blocks in whole], axis=1)
        scales.flags.writeable = False
    codes.flags.writeable = False
    return [
        [
            Block(plane.format, codes[a:b, head], None if scales is None else scales[a:b, head], whole[head][0].field, plane.turn)
            for a, b in zip(bounds, bounds[1:], strict=False)
        ]
        for head in range(plane.heads)
    ]


def plan_of(keys: RowFormat, values: RowFormat, *, window: int, alive: tuple[bool, ...], softcap: float) -> LayerPlan:
    kind = LayerKind.SLIDING if window else LayerKind.FULL
    rotated = keys.rotated or values.rotated
    sizes = ROTATED_SIZES if rotated else BLOCKED_SIZES if keys.blocked or values.blocked else SIZES
    estimator = list(Estimator)[(window + len(alive)) % 3]
    return LayerPlan(
        kind, HEADS, KV_HEADS, *sizes, keys, values, alive=alive, window=window, scale=0.2,
        softcap=softcap, turboquant=TurboQuantPlan(seed=5, estimator=estimator) if rotated else None,
    )  # fmt: skip


def walk(plan: LayerPlan, seed: int, steps: int, *, kernels: Kernels = REFERENCE, faults: bool = False) -> Walk:
    done = Walk(plan, seed, kernels=kernels, faults=faults)
    done.compare()
    for _ in range(steps):
        done.step()
        done.compare()
    return done


@pytest.mark.parametrize("backend", ["reference", "fast"])
@pytest.mark.parametrize("window", [0, 1, 6, 40])
@pytest.mark.parametrize("keys, values", MODES)
def test_layer_is_what_a_list_that_forgets_nothing_says(
    keys: RowFormat, values: RowFormat, window: int, backend: Backend
) -> None:
    try:
        table = kernels(backend)
    except BackendMissing as exc:
        pytest.skip(str(exc))
    seed = (backend == "fast") + 2 * window
    alive = ((), (True, False), (False, True))[seed % 3]
    walk(plan_of(keys, values, window=window, alive=alive, softcap=(0.0, 3.0)[window > 1]), seed, 80, kernels=table)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("keys, values", MODES)
def test_memory_refused_at_any_allocation_leaves_the_layer_bit_for_bit(keys: RowFormat, values: RowFormat, window: int) -> None:
    done = walk(plan_of(keys, values, window=window, alive=(), softcap=0.0), 11, 60, faults=True)
    assert done.refused > 10, f"only {done.refused} refusals were rehearsed"
