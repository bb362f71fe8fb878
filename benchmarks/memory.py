"""What a live cache costs: bytes of rows by storage mode and of the states that do not grow.

Measured from live layers, array by array, beside the formulas written out here. One byte off and
the run fails.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from harness import print_table, write_json

from warmkv.kernels.dispatch import kernels
from warmkv.kernels.formats import Block, RowFormat
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.plan import LayerPlan, NystromPlan, RingPlan, modes
from warmkv.kvstore.testing.allocated import allocated_bytes
from warmkv.schema.identity import LayerKind

F32 = npt.NDArray[np.float32]
KV_HEADS, CHUNK = 2, 512
SIZES = (64, 80, 128)


@dataclass(frozen=True)
class Line:
    """One figure: what was measured must be what was expected. Without a formula it is compared only.
    ``less`` compares with f32, ``room`` is what was allocated."""

    what: str
    formula: str
    expected: int
    measured: int
    less: float = 1.0
    room: float = 0.0


def numbers(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, np.float32)


def row_lines(tokens: int) -> list[Line]:
    """Bytes of a token and KV head in every mode and head size, from how much more is stored for twice
    the tokens; beside it what is allocated, room to grow included."""
    lines = []
    for mode, key_format, value_format in modes(blocked=True):
        for size in SIZES:
            if key_format.refusal(size) or value_format.refusal(size):
                continue
            plan = LayerPlan(
                LayerKind.FULL, KV_HEADS, KV_HEADS, size, size, key_format=key_format, value_format=value_format, importance=False
            )
            layer = AttentionLayer(plan, kernels=kernels("reference"))
            rng = np.random.default_rng(size)
            held = [0, 0]
            for part in range(2):
                for _ in range(tokens // CHUNK):
                    layer.append(numbers(rng, CHUNK, KV_HEADS, size), numbers(rng, CHUNK, KV_HEADS, size))
                held[part] = stored(layer)
            rows = 2 * (tokens // CHUNK) * CHUNK
            keys, key_formula = row_formula(key_format, size, -(-size // 32))
            values, value_formula = row_formula(value_format, size, 1)
            per_token, rest = divmod(held[1] - held[0], KV_HEADS * rows // 2)
            if rest:
                raise SystemExit(f"{mode}, {size} channels: rows of unequal size")
            room = allocated_bytes(layer) / (KV_HEADS * rows)
            what, formula = f"{mode}, {size} channels", f"{key_formula} + {value_formula}"
            lines.append(Line(what, formula, keys + values, per_token, 8 * size / per_token, room))
            field = 4 * KV_HEADS * size * (key_format.quantised + value_format.quantised)
            report = layer.memory()
            lines.append(
                Line(f"{mode}, {size} channels, {rows} tokens", "", KV_HEADS * rows * (keys + values) + field, report.stored)
            )
            lines.append(Line("report of arrays", "", allocated_bytes(layer), report.total))
    return lines


def row_formula(format_: RowFormat, size: int, scales: int) -> tuple[int, str]:
    """Of one row of one head: codes, for q8_2f an int8 a channel and a float32 a scale, for blocks 32 codes and their
    float16 numbers."""
    blocks = {RowFormat.Q8_0: (8, 1), RowFormat.Q5_1: (5, 2), RowFormat.Q4_0: (4, 1)}
    if format_ in blocks:
        bits, halves = blocks[format_]
        return size // 32 * (4 * bits + 2 * halves), f"{size // 32}x({4 * bits} + {2 * halves})"
    width = {RowFormat.F32: 4, RowFormat.F16: 2, RowFormat.BF16: 2, RowFormat.Q8_2F: 1, RowFormat.FP8: 1}[format_]
    if format_ is RowFormat.Q8_2F:
        return size + 4 * scales, f"({size} + 4x{scales})"
    return width * size, f"{width}x{size}"


def stored(layer: AttentionLayer) -> int:
    """Bytes of the rows themselves: codes and scales of all blocks."""
    planes = (layer.keys, layer.values)
    return sum(block_bytes(block) for plane in planes for head in range(KV_HEADS) for block in plane.blocks(head))


def block_bytes(block: Block) -> int:
    return block.codes.nbytes + (0 if block.scales is None else block.scales.nbytes)


def state_lines() -> list[Line]:
    """States that do not grow: measured twice, early and after many more tokens."""
    return [*ring_lines(), *nystrom_lines(), *recurrent_lines()]


def ring_lines() -> list[Line]:
    ring = RingPlan(128, 4, tuple(1e4 ** (-i / 64) for i in range(64)))
    layer = BoundedLayer(LayerPlan(LayerKind.RING, 8, KV_HEADS, 128, 128, ring=ring), kernels=kernels("reference"))
    rng = np.random.default_rng(1)
    layer.set_sinks(numbers(rng, KV_HEADS, 4, 128), numbers(rng, KV_HEADS, 4, 128))
    lines = []
    for steps in (1, 300):
        layer.step_chunk(numbers(rng, steps, 8, 128), *(numbers(rng, steps, KV_HEADS, 128) for _ in range(2)))
        memory, at = layer.memory(), f"after {layer.position} tokens"
        rings = layer.keys.nbytes + layer.values.nbytes
        lines.append(Line(f"bounded ring, 2 KV heads x 128 x 128, {at}", "2x4x2x128x128", 262_144, rings))
        lines.append(Line(f"  with 64 undo rows, {at}", "262144 + 2x4x2x64x128", 262_144 + 131_072, memory.bounded))
        lines.append(Line("report of arrays", "", allocated_bytes(layer), memory.total + memory.weights))
    return lines


def nystrom_lines() -> list[Line]:
    plan = LayerPlan(LayerKind.NYSTROM, 8, KV_HEADS, 128, 128, nystrom=NystromPlan(32, 128, 4), importance=False)
    layer = NystromLayer(plan, kernels=kernels("reference"))
    rng = np.random.default_rng(2)
    q, k, v = (numbers(rng, 512, heads, 128) for heads in (8, KV_HEADS, KV_HEADS))
    layer.append(k, v)
    layer.push_queries(q)
    before = layer.memory()
    lines = [
        Line("Nyström, collecting 512 tokens: rows", "512x2x2x4x128", 512 * 2 * 2 * 4 * 128, before.stored),
        Line("  and their queries", "512x8x4x128", 512 * 8 * 4 * 128, layer.trace.nbytes),
        Line("report of arrays", "", allocated_bytes(layer), before.total),
    ]
    if not layer.seal():
        raise SystemExit("the Nyström layer was not sealed")
    for steps in (0, 1, 300):
        layer.step_chunk(numbers(rng, steps, 8, 128), *(numbers(rng, steps, KV_HEADS, 128) for _ in range(2)))
        at, memory = f"after {layer.position} tokens", layer.memory()
        group = layer.groups[0]
        own = sum(allocated_bytes(far) for far in group.far)
        lines += [
            Line(f"Nyström, sealed: a group, {at}", "4(w(d+dv) + s(d+dv) + m d)", 151_552, allocated_bytes(group) - own),
            Line(f"  a query head, {at}", "4(m(d+dv) + 2m + m²)", 37_120, own // len(group.far)),
            Line(f"  a layer of 2 groups and 8 heads, {at}", "2x151552 + 8x37120", 600_064, memory.total),
            Line("report of arrays", "", allocated_bytes(layer), memory.total),
        ]
    return lines


def recurrent_lines() -> list[Line]:
    size = 16 * 128 * 128
    layer = RecurrentLayer(LayerPlan(LayerKind.RECURRENT, state_size=size))
    layer.update(np.ones(size, np.float32), 1000)
    alone = layer.memory().total
    layer.speculate(np.ones(size, np.float32))
    return [
        Line("recurrent, 16 x 128 x 128", f"4x{size}", 4 * size, alone),
        Line("  with its scratch", f"2x4x{size}", 8 * size, layer.memory().total),
        Line("report of arrays", "", allocated_bytes(layer), layer.memory().total),
    ]


def shown(lines: list[Line]) -> list[list[str]]:
    return [[each.what, each.formula, f"{each.expected:,}", f"{each.measured:,}"] for each in lines if each.formula]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens appended before and after the first reading")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    tokens = max(CHUNK, given.tokens)
    rows, states = row_lines(tokens), state_lines()
    columns = ["", "formula", "by formula", "measured"]
    beside = [[f"{each.less:.2f}", f"{each.room:.0f}"] for each in rows if each.formula]
    table = [left + right for left, right in zip(shown(rows), beside, strict=True)]
    title = f"Rows: bytes of a token and KV head, keys and values ({2 * (tokens // CHUNK) * CHUNK:,} tokens)"
    print_table(title, [*columns, "x less than f32", "allocated, room to grow included"], table)
    print_table("States: bytes", columns, shown(states))
    if given.json:
        write_json(given.json, {each.what.strip(): each.measured for each in rows + states if each.formula})
    wrong = [each for each in rows + states if each.expected != each.measured]
    for each in wrong:
        print(f"WRONG: {each.what.strip()}: {each.measured:,} bytes, by formula {each.expected:,}")
    print(f"{len(rows) + len(states)} figures compared, reports with arrays among them; {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
