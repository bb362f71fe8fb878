"""Who computes what an attention layer answers: the seam between a layer and where its rows lie."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from warmkv.kernels.attention.layer import attend_heads, attend_heads_chunk
from warmkv.kernels.attention.reference import Blocks
from warmkv.kernels.dispatch import Kernels
from warmkv.kernels.formats import F32
from warmkv.kvstore.live.layers import checks
from warmkv.kvstore.live.plan import LayerPlan
from warmkv.kvstore.live.rows.base import PlaneRows


class Computing(Protocol):
    """Attention over the planes of one layer. Queries were handed to `queries` first.

    **Threading:** one caller at a time."""

    def queries(self, q: F32, shape: tuple[int | None, ...], what: str) -> F32:
        """``q`` where it is float32 of ``shape`` (None: any length). Raises RecordError."""
        ...

    def weigh(self, sinks: F32 | None) -> None:
        """Learned sink logits (heads,), finite or minus infinity, of all that is answered from now on. Raises
        OutOfMemory, and then they are as before."""
        ...

    def nothing(self, *shape: int) -> F32:
        """Answers where there are no rows: zeros."""
        ...

    def one(self, q: F32, keys: PlaneRows, values: PlaneRows, first: int, last: int, mass: F32 | None) -> F32:
        """Answers (heads, value_size) to queries (heads, key_size) over rows [first, last), at least one;
        what every row was attended with is added to ``mass`` (rows,)."""
        ...

    def chunk(self, q: F32, keys: PlaneRows, values: PlaneRows, mass: F32 | None) -> F32:
        """Answers (n, heads, value_size) to queries (n, heads, key_size) of the newest n rows, at least one,
        each of which sees itself and what came before it."""
        ...


class HostComputing:
    """On the host, by ``kernels`` on up to ``threads`` threads. Query heads of dead KV heads get zeros."""

    def __init__(self, plan: LayerPlan, kernels: Kernels, threads: int) -> None:
        self._plan, self._kernels, self._threads = plan, kernels, threads
        alive = plan.alive_heads
        # Query heads that are answered; None: all, and nothing has to be picked out.
        self._answered: list[int] | None = None
        if len(alive) < plan.kv_heads:
            self._answered = [head * plan.group + at for head in alive for at in range(plan.group)]
        self._sinks: F32 | None = None

    def queries(self, q: F32, shape: tuple[int | None, ...], what: str) -> F32:
        return checks.floats(q, shape, what)

    def weigh(self, sinks: F32 | None) -> None:
        self._sinks = sinks if sinks is None or self._answered is None else sinks[self._answered]

    def nothing(self, *shape: int) -> F32:
        return np.zeros(shape, np.float32)

    def one(self, q: F32, keys: PlaneRows, values: PlaneRows, first: int, last: int, mass: F32 | None) -> F32:
        out = attend_heads(
            self._kernels, q if self._answered is None else q[self._answered], _blocks(keys), _blocks(values),
            scale=self._plan.logit_scale, first=first, upto=last, softcap=self._plan.softcap, sinks=self._sinks,
            importance=mass, threads=self._threads,
        ).out  # fmt: skip
        return self._with_dead(out, 0)

    def chunk(self, q: F32, keys: PlaneRows, values: PlaneRows, mass: F32 | None) -> F32:
        out = attend_heads_chunk(
            self._kernels, q if self._answered is None else q[:, self._answered], _blocks(keys), _blocks(values),
            scale=self._plan.logit_scale, start=len(keys) - len(q), window=self._plan.window, softcap=self._plan.softcap,
            sinks=self._sinks, importance=mass, threads=self._threads,
        ).out  # fmt: skip
        return self._with_dead(out, 1)

    def _with_dead(self, answers: F32, axis: int) -> F32:
        """Answers of the query heads of alive KV heads along ``axis``, with zeros for the others."""
        if self._answered is None:
            return answers
        shape = list(answers.shape)
        shape[axis] = self._plan.heads
        out = np.zeros(shape, np.float32)
        out[(slice(None),) * axis + (self._answered,)] = answers
        return out


def _blocks(plane: PlaneRows) -> list[Blocks]:
    return [plane.blocks(head) for head in range(plane.heads)]
