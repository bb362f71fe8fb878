"""The state of one inference over a model of attention and gated convolutions, built from its config.

Nothing is kept here that `ModelCache` does not keep: this is that cache with sizes from a config, room for
a whole context taken at once, and the ways back that such a runtime has.

**Source:** cera `InferenceState`; storage there is token-major, here it is that of the live layers.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum

import numpy as np

from warmkv.kernels.dispatch import Backend
from warmkv.kernels.rope.reference import Rope
from warmkv.kvstore.live import sizing, snapshot
from warmkv.kvstore.live.compression import Compression, compression_of
from warmkv.kvstore.live.evict import Recent
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.base import where
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan
from warmkv.kvstore.live.rows.allocation import Allocate, allocate
from warmkv.kvstore.live.shift import shift
from warmkv.kvstore.live.snapshot import Snapshot
from warmkv.schema.errors import RecordError
from warmkv.schema.identity import LayerKind
from warmkv.schema.records import TokensLike

log = logging.getLogger(__name__)
UNCOMPRESSED = Compression()


class BlockType(Enum):
    """What a layer of the model is."""

    ATTENTION = "attention"
    CONV = "conv"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model's files say of its sizes: ``heads`` query heads of ``head_size`` channels over
    ``kv_heads`` (by block; what is said of convolutions is not looked at), convolutions over
    ``hidden_size`` channels with ``conv_kernel`` taps, at most ``max_tokens`` positions. ``rope`` is how
    the forward pass turns keys, None where it turns none."""

    blocks: tuple[BlockType, ...]
    heads: int
    kv_heads: tuple[int, ...]
    head_size: int
    hidden_size: int
    max_tokens: int
    rope: Rope | None
    conv_kernel: int = 3

    def plan(self) -> ModelPlan:
        """The layers, rows in f32, attention mass not counted. Raises RecordError for sizes no model has."""
        if len(self.kv_heads) != len(self.blocks):
            raise RecordError(f"KV heads of {len(self.kv_heads)} layers, the config has {len(self.blocks)}")
        for block in self.blocks:
            if not isinstance(block, BlockType):
                raise RecordError(f"a layer that is {block!r}, expected a BlockType")
        for name in ("max_tokens", "conv_kernel"):
            if not isinstance(getattr(self, name), (int, np.integer)):
                raise RecordError(f"{name} is {getattr(self, name)!r}, expected a whole number")
        if self.conv_kernel < 2:
            raise RecordError(f"a convolution of {self.conv_kernel} taps, expected at least 2")
        if self.max_tokens < 1:
            raise RecordError(f"a context of {self.max_tokens} tokens, expected at least 1")
        if self.rope is not None and self.rope.size != self.head_size:
            raise RecordError(f"a rope of {self.rope.size} channels for heads of {self.head_size}")
        return ModelPlan(tuple(map(self._layer, self.blocks, self.kv_heads)))

    def _layer(self, block: BlockType, kv_heads: int) -> LayerPlan:
        if block is BlockType.CONV:
            return LayerPlan(LayerKind.CONV, conv=ConvPlan(self.hidden_size, self.conv_kernel - 1))
        return LayerPlan(
            LayerKind.FULL, heads=self.heads, kv_heads=kv_heads, key_size=self.head_size, value_size=self.head_size,
            importance=False,
        )  # fmt: skip


class InferenceState(ModelCache):
    """The live cache of a config, rows written as ``compression`` resolves to.

    Memory for ``capacity`` rows a layer is taken at once (None: the whole context), so that nothing is
    copied while a sequence grows to it; beyond it planes grow as any. Attention mass is not counted, so that
    `evict` keeps the newest rows.

    **Threading:** one caller at a time."""

    def __init__(
        self, config: ModelConfig, compression: Compression = UNCOMPRESSED, *, capacity: int | None = None,
        backend: Backend = "auto", threads: int = 1, allocate: Allocate = allocate,
    ) -> None:  # fmt: skip
        """Raises RecordError for sizes no model has and OutOfMemory for those beyond any address, with the
        bytes, before any memory is asked for; OutOfMemory where it cannot be had; BackendMissing."""
        plan = compression.applied(config.plan())
        rows = config.max_tokens if capacity is None else capacity
        if not 1 <= rows <= config.max_tokens:
            raise RecordError(f"room for {rows} rows, expected 1 to {config.max_tokens}")
        sizing.model_bytes(plan, rows)
        super().__init__(plan, backend=backend, threads=threads, policy=Recent(), allocate=allocate)
        self.config, self.capacity = config, rows
        for layer in self.own:
            if isinstance(layer, AttentionLayer):
                planes = layer.keys.gathered(None, rows), layer.values.gathered(None, rows)
                layer.adopt(*planes, position=0, base=0, importance=None, gapless=True)

    @classmethod
    def for_prefill(cls, config: ModelConfig, tokens: int, *, backend: Backend = "auto", threads: int = 1) -> InferenceState:
        """A state for one pass over ``tokens`` tokens, then thrown away or cleared for the next: f32, and room
        for so many rows, at least one and at most the context."""
        capacity = max(1, min(tokens, config.max_tokens))
        return cls(config, capacity=capacity, backend=backend, threads=threads)

    @property
    def compression(self) -> Compression:
        """What rows are written as: resolved, whatever was asked for. Its tag names the namespace."""
        return compression_of(self.plan)

    def clear_for_reuse(self) -> None:
        """`clear`, of which it is a promise that rows, convolutions and their histories keep their memory: a
        state that is used again asks for none (but for the field of q8 rows, which is fixed anew)."""
        self.clear()

    def truncate_to(self, length: int) -> int:
        """Keep the first ``length`` tokens; layers that a pass left half-way are taken back as well. Rows of
        the prefix keep their bytes. Where a convolution does not know its state at ``length``, everything
        is cleared: a prefix it could not go on with is of no use.

        Returns the tokens that are left: ``length`` or 0. Raises RecordError for a length that a layer has not
        reached, CannotRewind where rows were evicted; nothing changed."""
        for layer in self.own:
            if not 0 <= length <= layer.position:
                raise RecordError(f"{where(layer.plan, layer.index)}: {length} tokens to keep of {layer.position}")
        if length == 0:
            self.clear()
            return 0
        counts = {layer.index: layer.position - length for layer in self.own}
        lost = None
        for layer in self.own:
            if not isinstance(layer, ConvLayer):
                layer.check_truncate(counts[layer.index])
            elif lost is None and not layer.history.has_pos(length):
                lost = layer
        if lost is not None:
            log.warning("%s has forgotten its state at position %d: all is cleared", where(lost.plan, lost.index), length)
            self.clear()
            return 0
        before = self.lineage
        for layer in self.own:
            layer.truncate_last(counts[layer.index])
        if any(counts.values()):
            self.taken_back(before)
        return length

    def shift(self, keep: int, count: int, rope: Rope | None = None, *, gone: TokensLike | None = None) -> None:
        """`shift.shift` with the config's rope; ``rope`` is what the caller's forward pass uses, to be held
        against it. Raises RecordError where the two differ."""
        own = self.config.rope
        if rope is not None:
            different = "it turns no keys" if own is None else own.differs(rope)
            if different is not None:
                raise RecordError(f"a rope that is not the model's: {different}")
        shift(self, keep, count, (own,) * len(self.plan.layers), gone=gone)

    def snapshot(self) -> Snapshot:
        """A copy of everything, see `snapshot.take`; `evict` and `shift` travel in its lineage."""
        return snapshot.take(self)

    def restore(self, taken: Snapshot) -> None:
        """Replace everything by a snapshot, as often as one likes. Raises RecordError for one of another
        geometry or of rows written otherwise, OutOfMemory; nothing changed."""
        snapshot.prepare(self, taken, room=self.capacity)()
