"""How a cache stores its rows: asked for by name, resolved against a model, and told apart by a tag.

A model may have layers that a format cannot store, so what was asked for and what came of it differ.
Only what came of it may name a namespace: two caches share a tag just where their rows are written
alike, and read alike too, for what is read decides the rows of the layers above.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan, TurboQuantPlan, is_seed, modes
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

log = logging.getLogger(__name__)
DEFAULT_SEED = TurboQuantPlan().seed
#: Kinds whose rows may be written in any format.
_OF_ROWS = frozenset({LayerKind.FULL, LayerKind.SLIDING})
#: Tags of the CERA runtime, whose rows are read in its own way; other pairs are spelled out.
_TAGS = {
    (RowFormat.F32, RowFormat.F32): "", (RowFormat.F16, RowFormat.F16): "f16:",
    (RowFormat.TQ_KEY, RowFormat.TQ_VALUE): "tq3kv-s{seed}{read}:", (RowFormat.TQ_KEY, RowFormat.F32): "tq3k-s{seed}{read}:",
    (RowFormat.F32, RowFormat.TQ_VALUE): "tq3v-s{seed}:",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Compression:
    """What ``keys`` and ``values`` are written as. ``seed`` stands for the rotations of TurboQuant sides and
    is 0 where there are none; ``estimator`` decides how keys with signs of their residual (TQ_KEY) are read,
    and is UNBIASED for others.

    Equal values that are `resolved` make equal rows. Raises RecordError for a format of the
    other side or a seed beyond 64 bits."""

    keys: RowFormat = RowFormat.F32
    values: RowFormat = RowFormat.F32
    seed: int = 0
    estimator: Estimator = Estimator.UNBIASED

    def __post_init__(self) -> None:
        if not (self.keys.stores(keys=True) and self.values.stores(keys=False)):
            raise RecordError(
                f"keys as {self.keys.value} and values as {self.values.value}: one of them stores the other side only"
            )
        if not is_seed(self.seed):
            raise RecordError(f"seed {self.seed!r}, expected a whole number of 64 bits")
        object.__setattr__(self, "seed", int(self.seed) if self.rotated else 0)
        if self.keys is not RowFormat.TQ_KEY:
            object.__setattr__(self, "estimator", Estimator.UNBIASED)

    @classmethod
    def turboquant(
        cls, seed: int = DEFAULT_SEED, *, keys: bool = True, values: bool = True, estimator: Estimator = Estimator.UNBIASED
    ) -> Compression:
        """TurboQuant on both sides, on one, or on neither, which is f32."""
        f32 = RowFormat.F32
        return cls(RowFormat.TQ_KEY if keys else f32, RowFormat.TQ_VALUE if values else f32, seed, estimator)

    @classmethod
    def named(cls, name: str, seed: int = DEFAULT_SEED) -> Compression:
        """A mode of `plan.modes`. Raises RecordError for another name."""
        known = {mode: (keys, values) for mode, keys, values in modes(rotated=True, blocked=True)}
        if name not in known:
            raise RecordError(f"storage mode {name!r}, expected one of {', '.join(known)}")
        return cls(*known[name], seed)

    @property
    def rotated(self) -> bool:
        """Whether a side is rotated by the seed."""
        return self.keys.rotated or self.values.rotated

    def resolved(self, plan: ModelPlan) -> Compression:
        """What caches of ``plan``'s geometry will use: this, or f32 on both sides where a layer of rows has
        heads that a rotated or blocked side cannot store, or where there is no such layer. Formats of ``plan`` are
        not looked at."""
        layers = [layer for layer in plan.layers if layer.kind in _OF_ROWS]
        if not layers:
            return Compression()
        for layer in layers:
            for format_, size in ((self.keys, layer.key_size), (self.values, layer.value_size)):
                reason = format_.refusal(size)
                if reason is not None:
                    log.warning("rows are stored as f32, not as %s and %s: %s", self.keys.value, self.values.value, reason)
                    return Compression()
        return self

    def applied(self, plan: ModelPlan) -> ModelPlan:
        """``plan`` with the rows of its FULL and SLIDING layers written as this resolves to."""
        mode = self.resolved(plan)
        return replace(plan, layers=tuple(mode.written(layer) for layer in plan.layers))

    @property
    def tag(self) -> str:
        """What tells namespaces of one model apart: empty for f32, else text that ends in a colon. Where the
        CERA runtime computes the same rows (its modes, CERA_COMPAT) it is that runtime's tag. Ask the
        `resolved` mode for it.

        **Source:** cera `KvCompression::cache_tag`."""
        own_way = self.keys is RowFormat.TQ_KEY and self.estimator is not Estimator.CERA_COMPAT
        read = f"-{self.estimator.value}" if own_way else ""
        spelled = "k-{keys},v-{values}" + (",s{seed}{read}:" if self.rotated else ":")
        text = _TAGS.get((self.keys, self.values), spelled)
        return text.format(keys=self.keys.value, values=self.values.value, seed=self.seed, read=read)

    def written(self, layer: LayerPlan) -> LayerPlan:
        """``layer`` with its rows written so, whether it can have them or not: the layer itself where its kind
        decides how rows are written."""
        if layer.kind not in _OF_ROWS:
            return layer
        turboquant = TurboQuantPlan(self.seed, self.estimator) if self.rotated else None
        return replace(layer, key_format=self.keys, value_format=self.values, turboquant=turboquant)


def compression_of(plan: ModelPlan) -> Compression:
    """What the rows of a plan are written as, resolved by being there. Raises RecordError where layers
    differ."""
    found = {_of_layer(layer) for layer in plan.layers if layer.kind in _OF_ROWS}
    if len(found) > 1:
        raise RecordError(
            f"layers written in {len(found)} ways, expected one: {', '.join(sorted(mode.tag or 'f32' for mode in found))}"
        )
    return found.pop() if found else Compression()


def _of_layer(layer: LayerPlan) -> Compression:
    about = layer.turboquant or TurboQuantPlan(0)
    return Compression(layer.key_format, layer.value_format, about.seed, about.estimator)
