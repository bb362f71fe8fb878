"""What each layer of a model keeps, as plain values: geometry, storage formats, window, sharing.

A plan decides sizes and needs; the same functions of it serve allocation and admission (`sizing`).
Weights that attention needs (learned sinks, sink rows) are not in it: they are handed to the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from warmkv.kernels.formats import RowFormat
from warmkv.kernels.nystrom.reference import EXACT_SLACK, MIN_LANDMARKS, Rectifier
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind

#: Largest number of anything a plan may name: products of three stay below 2^63.
MAX_SIZE = 1 << 20
#: Seeds of rotations have 64 bits.
MAX_SEED = (1 << 64) - 1
#: Rows a ring gives back after a rejected draft.
UNDO_ROWS = 64
#: Steps a convolution can be taken back.
CONV_HISTORY = 64
#: Longest convolution: a buffer is written when it is made, so that its size has to be one a machine has.
MAX_TAPS = 1 << 10

#: Kinds a plan may name; others come with later formats and devices.
PLANNED = frozenset(
    {LayerKind.FULL, LayerKind.SLIDING, LayerKind.RING, LayerKind.CONV, LayerKind.RECURRENT, LayerKind.NYSTROM, LayerKind.SHARED}
)


@dataclass(frozen=True, slots=True)
class RingPlan:
    """A ring of the last ``window`` rows beside ``sinks`` learned rows (`swa_sink_v1`).

    ``inv_freq`` are the inverse frequencies of the rotated channel pairs (i, i + half), at most half
    the key size; ``rope_scale`` the attention factor of the rotary embedding, which hits both sides."""

    window: int
    sinks: int = 0
    inv_freq: tuple[float, ...] = ()
    rope_scale: float = 1.0
    undo_rows: int = UNDO_ROWS


@dataclass(frozen=True, slots=True)
class NystromPlan:
    """Attention in constant memory from a boundary on: ``landmarks``, an exact ``window`` and ``sinks``
    rows. ``boundary`` is the row count at which rows are given up, at least `floor`; 0 means the floor,
    asked for by whoever seals."""

    landmarks: int = 32
    window: int = 128
    sinks: int = 4
    rectifier: Rectifier = Rectifier.AGGREGATE
    boundary: int = 0

    @property
    def floor(self) -> int:
        """The shortest prompt there is anything to estimate of."""
        return self.window + self.sinks + EXACT_SLACK + 1

    @property
    def target(self) -> int:
        """Rows at which the state is sealed."""
        return max(self.boundary, self.floor)


@dataclass(frozen=True, slots=True)
class TurboQuantPlan:
    """What rotated rows were turned by, and how the signs of keys count.

    ``seed`` (64 bits) is the model's; a layer's own is it XOR the layer's number. Stored bytes depend on
    the seed, and not on the ``estimator``: that is a choice of whoever reads them."""

    seed: int = 42
    estimator: Estimator = Estimator.UNBIASED


@dataclass(frozen=True, slots=True)
class ConvPlan:
    """The last ``taps`` inputs of a causal convolution (its kernel without the tap of the token itself), each
    of ``channels`` numbers, and as many earlier states as there are ``history`` steps (0: it cannot go back)."""

    channels: int
    taps: int = 2
    history: int = CONV_HISTORY


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer. ``heads`` query heads share ``kv_heads`` KV heads in equal groups; ``alive`` tells
    which KV heads store anything (empty: all). ``window`` W means a query sees itself and the W - 1 rows
    before it (0: all). ``scale`` 0 means key_size ** -0.5; ``softcap`` 0 means none. ``state_size``
    counts the float32 numbers of a recurrent layer, which may have a ``conv`` beside them, one without a
    history: neither can go back. ``turboquant`` is there just where a format is rotated.
    ``wire_identity`` and ``untagged_wire`` are what the layer wire says about the operator (see `wire`)."""

    kind: LayerKind
    heads: int = 0
    kv_heads: int = 0
    key_size: int = 0
    value_size: int = 0
    key_format: RowFormat = RowFormat.F32
    value_format: RowFormat = RowFormat.F32
    alive: tuple[bool, ...] = ()
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    importance: bool = True
    ring: RingPlan | None = None
    nystrom: NystromPlan | None = None
    state_size: int = 0
    conv: ConvPlan | None = None
    turboquant: TurboQuantPlan | None = None
    shared_with: int = -1
    wire_identity: int = 0
    untagged_wire: bool = True

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def logit_scale(self) -> float:
        return self.scale or float(self.key_size) ** -0.5

    @property
    def alive_heads(self) -> tuple[int, ...]:
        """KV heads that store rows, in order."""
        return tuple(head for head in range(self.kv_heads) if not self.alive or self.alive[head])

    @property
    def quantised(self) -> bool:
        """Whether there is a side whose rows have a field."""
        return self.key_format.quantised or self.value_format.quantised

    @property
    def rotated(self) -> bool:
        """Whether there is a side of TurboQuant rows."""
        return self.key_format.rotated or self.value_format.rotated

    def validate(self, index: int) -> None:
        """Raises RecordError that names layer ``index``, what was found and what was expected."""
        if not isinstance(self.kind, LayerKind):
            raise RecordError(f"layer {index}: kind {self.kind!r}, expected a LayerKind")
        where = f"layer {index} ({self.kind.name})"
        if self.kind not in PLANNED:
            raise RecordError(f"{where}: expected one of {', '.join(sorted(kind.name for kind in PLANNED))}")
        if self.kind is LayerKind.SHARED:
            return
        if self.kind in (LayerKind.CONV, LayerKind.RECURRENT):
            self._validate_states(where)
            return
        if self.conv is not None:
            raise RecordError(f"{where}: conv plan {self.conv}")
        for name in ("heads", "kv_heads", "key_size", "value_size"):
            _size(where, name, getattr(self, name))
        for name in ("key_format", "value_format"):
            if not isinstance(getattr(self, name), RowFormat):
                raise RecordError(f"{where}: {name} is {getattr(self, name)!r}, expected a RowFormat")
        if self.heads % self.kv_heads:
            raise RecordError(f"{where}: {self.heads} query heads over {self.kv_heads} KV heads, expected a multiple")
        if self.alive and len(self.alive) != self.kv_heads:
            raise RecordError(f"{where}: an alive mask of {len(self.alive)} for {self.kv_heads} KV heads")
        if self.alive and not any(self.alive):
            raise RecordError(f"{where}: no KV head is alive")
        if not isfinite(self.scale) or not isfinite(self.softcap) or self.softcap < 0:
            raise RecordError(f"{where}: scale {self.scale}, soft cap {self.softcap}; expected finite ones, the cap at least 0")
        if (self.kind is LayerKind.SLIDING) != (self.window > 0):
            raise RecordError(f"{where}: window {self.window}, expected at least 1 for SLIDING layers and 0 for others")
        if (self.kind is LayerKind.RING) != (self.ring is not None):
            raise RecordError(f"{where}: ring plan {self.ring}")
        if (self.kind is LayerKind.NYSTROM) != (self.nystrom is not None):
            raise RecordError(f"{where}: Nystroem plan {self.nystrom}")
        self._validate_bounded(where)
        self._validate_formats(where)

    def _validate_states(self, where: str) -> None:
        recurrent = self.kind is LayerKind.RECURRENT
        if recurrent:
            _size(where, "state_size", self.state_size)
        if self.conv is None and recurrent:
            return
        if self.conv is None:
            raise RecordError(f"{where}: conv plan None")
        _size(where, "conv channels", self.conv.channels)
        if not 1 <= self.conv.taps <= MAX_TAPS:
            raise RecordError(f"{where}: conv taps is {self.conv.taps}, expected 1 to {MAX_TAPS}")
        most = 0 if recurrent else MAX_SIZE
        if not 0 <= self.conv.history <= most:
            raise RecordError(f"{where}: a history of {self.conv.history} steps, expected 0 to {most}")

    def _validate_formats(self, where: str) -> None:
        for side, format_, size in (("keys", self.key_format, self.key_size), ("values", self.value_format, self.value_size)):
            if not format_.stores(keys=side == "keys"):
                raise RecordError(f"{where}: {side} as {format_.value}, which stores the other side only")
            reason = format_.refusal(size)
            if reason is not None:
                raise RecordError(f"{where}: {side} as {format_.value}: {reason}")
        if self.rotated != (self.turboquant is not None):
            raise RecordError(
                f"{where}: {self.turboquant} for rows of {self.key_format.value} and {self.value_format.value}, "
                f"expected {'a TurboQuant plan' if self.rotated else 'none'}"
            )
        if self.turboquant is not None and not is_seed(self.turboquant.seed):
            raise RecordError(f"{where}: seed {self.turboquant.seed!r}, expected a whole number of 64 bits")

    def _validate_bounded(self, where: str) -> None:
        if self.ring is not None:
            _size(where, "ring window", self.ring.window)
            counts = (self.ring.sinks, self.ring.undo_rows)
            if min(counts) < 0 or max(counts) > MAX_SIZE or 2 * len(self.ring.inv_freq) > self.key_size:
                raise RecordError(f"{where}: {self.ring} for keys of {self.key_size} channels")
            if not all(isfinite(number) for number in (self.ring.rope_scale, *self.ring.inv_freq)):
                raise RecordError(f"{where}: {self.ring}; expected finite frequencies and scale")
        if self.nystrom is not None:
            plan = self.nystrom
            if plan.landmarks < MIN_LANDMARKS or plan.window < 1 or plan.sinks < 0 or plan.boundary < 0:
                raise RecordError(f"{where}: {plan}; expected at least {MIN_LANDMARKS} landmarks and a window of 1")
            if max(plan.landmarks, plan.window, plan.sinks) > MAX_SIZE:
                raise RecordError(f"{where}: {plan}; expected at most {MAX_SIZE} of anything")
        if (self.ring or self.nystrom) and (self.key_format, self.value_format) != (RowFormat.F32, RowFormat.F32):
            raise RecordError(f"{where}: rows of {self.key_format.value} and {self.value_format.value}, expected f32")
        if (self.ring or self.nystrom) and self.softcap:
            raise RecordError(f"{where}: a soft cap of {self.softcap}, expected none")
        if (self.ring or self.nystrom) and self.alive and not all(self.alive):
            raise RecordError(f"{where}: dead KV heads, expected all alive")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The layers of a model, checked when made. ``max_rows`` is the row count at which a cache asks for eviction
    (0: never). The last ``mtp`` layers are blocks that predict tokens ahead, behind the trunk; they keep rows as any."""

    layers: tuple[LayerPlan, ...]
    max_rows: int = 0
    names: tuple[str, ...] = field(default=(), compare=False)
    mtp: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise RecordError("a plan without layers")
        if not isinstance(self.mtp, (int, np.integer)) or not 0 <= self.mtp < len(self.layers):
            raise RecordError(f"{self.mtp!r} of {len(self.layers)} layers are MTP blocks, expected 0 to {len(self.layers) - 1}")
        for index, layer in enumerate(self.layers):
            layer.validate(index)
            if layer.kind is LayerKind.SHARED:
                self._check_shared(index, layer.shared_with)
        if self.max_rows < 0:
            raise RecordError(f"max_rows is {self.max_rows}, expected at least 0")

    def _check_shared(self, index: int, source: int) -> None:
        if not 0 <= source < len(self.layers) or source == index or self.layers[source].kind is LayerKind.SHARED:
            raise RecordError(f"layer {index} shares with layer {source}, expected another one that has rows of its own")

    @property
    def trunk(self) -> int:
        """Layers before the MTP blocks."""
        return len(self.layers) - self.mtp

    @classmethod
    def uniform(cls, count: int, layer: LayerPlan, max_rows: int = 0) -> ModelPlan:
        """``count`` layers alike."""
        return cls((layer,) * count, max_rows)


def _size(where: str, name: str, value: int) -> None:
    if not isinstance(value, (int, np.integer)) or not 1 <= value <= MAX_SIZE:
        raise RecordError(f"{where}: {name} is {value!r}, expected 1 to {MAX_SIZE}")


def is_seed(seed: object) -> bool:
    """Whether rotations can be made from it."""
    return isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= int(seed) <= MAX_SEED


def modes(*, rotated: bool = False, blocked: bool = False) -> Sequence[tuple[str, RowFormat, RowFormat]]:
    """The storage modes by their names: what keys and what values are written as. Those of ``rotated`` rows
    are added where asked for: they need a `TurboQuantPlan` and heads of a multiple of 8 channels; so are those of
    ``blocked`` rows, which need heads of a multiple of 32."""
    f32, f16, q8, bits = RowFormat.F32, RowFormat.F16, RowFormat.Q8_2F, RowFormat.TQ_VALUE
    q8_0, q5_1, q4_0, fp8 = RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0, RowFormat.FP8
    plain = (
        ("f32", f32, f32), ("f16", f16, f16), ("bf16", RowFormat.BF16, RowFormat.BF16),
        ("q8", q8, q8), ("q8k", q8, f32), ("q8v", f32, q8), ("fp8", fp8, fp8),
    )  # fmt: skip
    turned = (
        ("turboquant", RowFormat.TQ_KEY, bits), ("tqk", RowFormat.TQ_KEY, f32), ("tqv", f32, bits),
        ("tq3", RowFormat.TQ3, bits), ("tq3k", RowFormat.TQ3, f16),
    )  # fmt: skip
    packed = (
        ("q8_0", q8_0, q8_0), ("q5_1", q5_1, q5_1), ("q4_0", q4_0, q4_0), ("q8_0/q5_1", q8_0, q5_1), ("q8_0/q4_0", q8_0, q4_0),
        ("q8_0/fp8", q8_0, fp8), ("fp8/q5_1", fp8, q5_1), ("fp8/q4_0", fp8, q4_0),
    )  # fmt: skip
    return (*plain, *(turned if rotated else ()), *(packed if blocked else ()))
