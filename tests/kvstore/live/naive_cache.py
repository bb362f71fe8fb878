"""A cache that keeps every row of every layer in lists and attends in float64: the twin of `ModelCache`.

It knows nothing of formats, memory or blocks: only which positions a query sees, and by which weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import Block, RowFormat
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rows.prefix import PrefixRows
from warmkv.schema.identity import LayerKind

F32, F64 = npt.NDArray[np.float32], npt.NDArray[np.float64]


@dataclass
class Token:
    """What one position hands to one layer."""

    q: F32
    k: F32
    v: F32


def tokens(plan: LayerPlan, seed: int, count: int) -> list[Token]:
    """Rows that depend on the seed and their number alone."""
    numbers = np.random.default_rng(seed)
    shapes = ((plan.heads, plan.key_size), (plan.kv_heads, plan.key_size), (plan.kv_heads, plan.value_size))
    return [Token(*(numbers.standard_normal(shape).astype(np.float32) for shape in shapes)) for _ in range(count)]


@dataclass
class NaiveLayer:
    """Rows as (position, key, value, mass); ``state`` of recurrent layers."""

    plan: LayerPlan
    position: int = 0
    rows: list[tuple[int, F32, F32]] = field(default_factory=list)
    mass: list[float] = field(default_factory=list)
    state: F32 | None = None
    undo: int = 0

    def step(self, token: Token) -> F64:
        """Add the token's rows, then answer its queries."""
        self.rows.append((self.position, token.k, token.v))
        self.mass.append(0.0)
        self.position += 1
        if self.plan.ring is not None:
            self.undo = min(self.undo + 1, self.plan.ring.undo_rows)
        return self.attend(token.q)

    def attend(self, q: F32) -> F64:
        plan, seen = self.plan, self._seen()
        out = np.zeros((plan.heads, plan.value_size))
        for head in range(plan.heads):
            group = head // plan.group
            if group not in plan.alive_heads or not seen:
                continue
            logits = [self._logit(q[head].astype(np.float64), self.rows[at], group) for at in seen]
            weights = np.exp(np.asarray(logits) - max(logits))
            weights /= weights.sum()
            for weight, at in zip(weights, seen, strict=True):
                out[head] += weight * self.rows[at][2][group].astype(np.float64)
                self.mass[at] += float(weight)
        return out

    def _seen(self) -> list[int]:
        """Indices of the rows a query at the newest position sees."""
        window = self.plan.window or (self.plan.ring.window if self.plan.ring else 0)
        return [at for at, row in enumerate(self.rows) if not window or row[0] >= self.position - window]

    def _logit(self, q: F64, row: tuple[int, F32, F32], group: int) -> float:
        position, key = row[0], row[1][group].astype(np.float64)
        if self.plan.ring is not None:
            q, key = turned(q, self.position - 1, self.plan.ring.inv_freq), turned(key, position, self.plan.ring.inv_freq)
        return float(q @ key) * self.plan.logit_scale

    def keep(self, kept: list[int]) -> None:
        self.rows = [self.rows[at] for at in kept]
        self.mass = [self.mass[at] for at in kept]

    def keep_apart(self) -> None:
        """Which positions the rows had is not known any more; only how many there are."""
        self.rows = [(-1, key, value) for _, key, value in self.rows]

    def can_truncate(self, count: int) -> bool:
        """Whether the last ``count`` positions are stored, nothing was evicted among them, and what the
        layer would see then is there."""
        if self.state is not None:
            return count == 0
        if self.plan.ring is not None:
            return count <= self.undo
        stored, back = {row[0] for row in self.rows}, self.position - count
        first = max(0, back - self.plan.window + 1) if self.plan.window else back
        return not count or stored.issuperset(range(first, self.position))

    def truncate(self, count: int) -> None:
        self.position -= count
        self.undo -= count if self.plan.ring is not None else 0
        if count and self.state is None:
            del self.rows[-count:], self.mass[-count:]

    def clear(self) -> None:
        self.position = self.undo = 0
        self.rows, self.mass = [], []
        if self.state is not None:
            self.state = np.zeros_like(self.state)


def turned(x: F64, position: int, inv_freq: tuple[float, ...]) -> F64:
    """Rotary embedding at an absolute position."""
    half = len(inv_freq)
    angles = position * np.asarray(inv_freq, np.float64)
    low, high = x[:half], x[half : 2 * half]
    turned_low, turned_high = low * np.cos(angles) - high * np.sin(angles), low * np.sin(angles) + high * np.cos(angles)
    return np.concatenate([turned_low, turned_high, x[2 * half :]])


def naive(plan: ModelPlan) -> dict[int, NaiveLayer]:
    """A twin of each layer that has something of its own."""
    made = {index: NaiveLayer(layer) for index, layer in enumerate(plan.layers) if layer.kind is not LayerKind.SHARED}
    for layer in made.values():
        if layer.plan.kind is LayerKind.RECURRENT:
            layer.state = np.zeros(layer.plan.state_size, np.float32)
    return made


def kept_by_hand(importance: Sequence[float], keep: int, sinks: int, recent: int) -> list[int]:
    """Sinks, recents, then an insertion sort of what is between: one moves left while it is greater
    than its neighbour, which nothing is that stands beside a NaN."""
    rows = len(importance)
    if rows <= keep:
        return list(range(rows))
    sinks = min(sinks, keep)
    recent = min(recent, keep - sinks)
    kept = set(range(sinks)) | set(range(rows - recent, rows))
    order: list[int] = []
    for row in range(rows):
        if row in kept:
            continue
        at = len(order)
        while at and importance[row] > importance[order[at - 1]]:
            at -= 1
        order.insert(at, row)
    return sorted(kept | set(order[: keep - len(kept)]))


def start_on_prefix(layer: AttentionLayer, keys: F32, values: F32) -> None:
    """Let a layer of f32 begin with rows (n, kv_heads, size) that lie in read-only memory, token-major and
    in two pieces, as a restored prefix does."""
    planes = []
    for given, tail in zip((keys, values), layer.empty_planes(), strict=True):
        given = given.copy()
        given.flags.writeable = False
        cut = len(given) // 3
        pieces = (given[:cut], given[cut:])
        heads = layer.plan.alive_heads
        planes.append(PrefixRows([[Block(RowFormat.F32, piece[:, head]) for piece in pieces] for head in heads], tail))
    count = len(keys)
    layer.adopt(planes[0], planes[1], position=count, base=0, importance=np.zeros(count, np.float32), gapless=True)
