"""What the planes of an attention layer are made like, and whether what is handed over fits them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32, RowFormat
from warmkv.kernels.turboquant.rotation import Rotation
from warmkv.kernels.turboquant.turn import Turn
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.allocation import Allocate
from warmkv.kvstore.live.rows.base import PlaneRows
from warmkv.kvstore.live.rows.growing import GrowingRows
from warmkv.kvstore.live.rows.planes import Planes
from warmkv.schema.errors import RecordError


@dataclass(frozen=True, slots=True)
class Makings:
    """Of layer ``index``: its plan, what encodes its rows, and where their memory comes from."""

    plan: LayerPlan
    index: int
    kernels: Kernels
    allocate: Allocate

    @property
    def name(self) -> str:
        return where(self.plan, self.index)

    def empty_planes(self) -> tuple[GrowingRows, GrowingRows]:
        """Keys and values without rows."""
        return self._plane(keys=True), self._plane(keys=False)

    def empty_mass(self) -> GrowingRows | None:
        """Importance as a plane of one head and one channel; None where the plan does not count it."""
        if not self.plan.importance:
            return None
        return GrowingRows(RowFormat.F32, 1, 1, keys=False, allocate=self.allocate, name=f"{self.name}: importance")

    def rows_of(self, k: F32, v: F32, rows: int, position: int) -> tuple[F32, F32]:
        """The alive KV heads of rows (n, kv_heads, size), of which the first will be row ``rows`` at
        ``position``. Raises RecordError."""
        keys = self.side_of(k, rows, position, keys=True)
        values = self.side_of(v, rows, position, keys=False)
        checks.same_length(self.name, keys, values)
        return keys, values

    def side_of(self, given: F32, rows: int, position: int, *, keys: bool) -> F32:
        """`rows_of`, keys or values alone."""
        plan, alive = self.plan, self.plan.alive_heads
        format_, size = (plan.key_format, plan.key_size) if keys else (plan.value_format, plan.value_size)
        name = f"{self.name}: {'keys' if keys else 'values'}"
        part = checks.floats(given, (None, plan.kv_heads, size), name)
        if len(alive) < plan.kv_heads:
            part = part[:, alive]
        if format_.finite_only:
            checks.finite(part, name, alive, rows, position)
        if format_.rotated:
            checks.lengths(part, name, alive, rows, position)
        return part

    def planes_of(self, keys: F32 | PlaneRows, values: F32 | PlaneRows) -> tuple[PlaneRows, PlaneRows]:
        """Planes that fit the plan, or such made of rows (n, alive heads, size). Raises RecordError,
        OutOfMemory."""
        if isinstance(keys, np.ndarray) and isinstance(values, np.ndarray):
            return self._made_of(keys, values)
        if isinstance(keys, np.ndarray) or isinstance(values, np.ndarray):
            raise RecordError(f"{self.name}: keys and values, one of them an array, expected both or none")
        checks.same_length(self.name, keys, values)
        for given, mine in zip((keys, values), self.empty_planes(), strict=True):
            checks.same_makings(given, mine, mine.name)
        if keys.format.quantised and values.format.quantised and keys.frozen != values.frozen:
            raise RecordError(f"{self.name}: the field of one plane is frozen, that of the other is not")
        return keys, values

    def mass_of(self, importance: F32 | None, rows: int) -> GrowingRows | None:
        """Importance (rows,) as a plane. Raises RecordError unless it is there just where the plan counts
        it, OutOfMemory."""
        mass = self.empty_mass()
        if (importance is None) != (mass is None):
            raise RecordError(f"{self.name}: importance {'missing' if importance is None else 'given'}, the plan says otherwise")
        if mass is not None and importance is not None:
            checked = checks.floats(importance, (rows,), f"{self.name}: importance")
            mass.reserve(rows)
            mass.append(checked.reshape(rows, 1, 1))
        return mass

    def _made_of(self, keys: F32, values: F32) -> tuple[PlaneRows, PlaneRows]:
        made = self.empty_planes()
        rows = [
            checks.floats(given, (None, plane.heads, plane.size), plane.name)
            for given, plane in zip((keys, values), made, strict=True)
        ]
        checks.same_length(self.name, *rows)
        Planes(made).append(rows)
        return made

    def _plane(self, *, keys: bool) -> GrowingRows:
        plan = self.plan
        format_, size = (plan.key_format, plan.key_size) if keys else (plan.value_format, plan.value_size)
        return GrowingRows(
            format_, len(plan.alive_heads), size, keys=keys, allocate=self.allocate, kernels=self.kernels,
            name=f"{self.name}: {'keys' if keys else 'values'}", turn=self._turn(size) if format_.rotated else None,
        )  # fmt: skip

    def _turn(self, size: int) -> Turn:
        """What this layer rotates rows of ``size`` channels by."""
        turboquant = self.plan.turboquant
        assert turboquant is not None
        return Turn(Rotation.of(turboquant.seed, self.index, size), turboquant.estimator)
