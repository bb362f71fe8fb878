"""Whether a sequence fits, asked before anything is allocated, and how long it could be.

Devices are pipeline stages, as `residence.Residence` has them: cuts part the trunk, and blocks beyond it live
with the last. What a stage needs is `geometry`'s number and what its kernels work in, so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.geometry import ModelGeometry, check_capacity, layer_geometry
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rings import MAX_LENGTH
from warmkv.schema.errors import OutOfMemory, RecordError

#: Bytes that stage ``stage`` allocates beside its layers for ``capacity`` tokens; never fewer for more tokens.
Beside: TypeAlias = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class StageAdmission:
    """One device: its layers [first, last), the bytes it would need for the tokens asked for, those that are
    free, and the most tokens that fit (0: not even one)."""

    first: int
    last: int
    needed_bytes: int
    free_bytes: int
    max_tokens: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True)
class Admission:
    """What came of asking for ``tokens`` tokens."""

    tokens: int
    stages: tuple[StageAdmission, ...]

    @property
    def fits(self) -> bool:
        """Whether every stage has room."""
        return all(stage.fits for stage in self.stages)

    @property
    def max_tokens(self) -> int:
        """The longest sequence all stages have room for."""
        return min(stage.max_tokens for stage in self.stages)

    def check(self) -> None:
        """Raises OutOfMemory with the bytes the first stage without room would need."""
        for number, stage in enumerate(self.stages):
            if not stage.fits:
                raise OutOfMemory(
                    f"stage {number} (layers [{stage.first}, {stage.last})): {stage.needed_bytes} bytes for {self.tokens} "
                    f"tokens, {stage.free_bytes} are free, enough for {stage.max_tokens}",
                    stage.needed_bytes,
                )


def admit(
    plan: ModelPlan, free_bytes: Sequence[int], tokens: int, *, cuts: Sequence[int] = (), rings: bool = False,
    beside: Beside | None = None,
) -> Admission:  # fmt: skip
    """Whether caches of ``plan`` (of one rank, see `sharding`) for ``tokens`` tokens fit ``free_bytes`` of each
    stage. Raises RecordError for cuts that part no trunk and for counts that are none, CapacityExceeded for
    tokens beyond int32, UnsupportedError for layers that no device keeps, OutOfMemory beyond 64 bits."""
    check_capacity(tokens)
    spans = stage_spans(plan, cuts)
    if len(free_bytes) != len(spans) or min(free_bytes) < 0:
        raise RecordError(f"free bytes {tuple(free_bytes)}, expected at least 0 for each of {len(spans)} stages")
    stages = []
    for number, ((first, last), free) in enumerate(zip(spans, free_bytes, strict=True)):
        stage = _Stage(number, plan.layers[first:last], rings, beside)
        stages.append(StageAdmission(first, last, stage.needed(tokens), int(free), stage.most(int(free))))
    return Admission(tokens, tuple(stages))


def stage_spans(plan: ModelPlan, cuts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The layers [first, last) of every stage. Raises RecordError for cuts that do not ascend within the trunk."""
    bounds = (0, *cuts, plan.trunk)
    if any(first >= last for first, last in zip(bounds, bounds[1:], strict=False)):
        raise RecordError(f"cuts {tuple(cuts)}, expected layers that ascend within the trunk of {plan.trunk}")
    return tuple(zip(bounds, (*cuts, len(plan.layers)), strict=False))


@dataclass(frozen=True, slots=True)
class _Stage:
    number: int
    layers: tuple[LayerPlan, ...]
    rings: bool
    beside: Beside | None

    def needed(self, tokens: int) -> int:
        layers = ModelGeometry(tuple(layer_geometry(layer, tokens, rings=self.rings) for layer in self.layers))
        return sizing.total(layers.allocated_bytes, 0 if self.beside is None else self.beside(self.number, tokens))

    def most(self, free: int) -> int:
        """Found by halving: bytes never fall as tokens grow."""
        fitting, too_many = 0, MAX_LENGTH + 1
        while too_many - fitting > 1:
            middle = (fitting + too_many) // 2
            if self._fits(middle, free):
                fitting = middle
            else:
                too_many = middle
        return fitting

    def _fits(self, tokens: int, free: int) -> bool:
        try:
            return self.needed(tokens) <= free
        except OutOfMemory:
            return False
