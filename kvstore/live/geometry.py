"""Bytes of resident caches: what a device allocates for layers of a plan, and what admission asks beforehand.

Both ask here, so that an estimate is what is allocated, to the byte. A layer of rows has two planes of fixed
capacity, keys and values (`kernels.resident.plane`), flat or as a ring of its window (`rings`), and an int32
mirror of its length. Mirrors of the bases of rings lie in one table per device (`ModelGeometry.table_bytes`);
whatever attention needs for its work is the device's and not counted. What a token takes per format is
`sizing`'s to say, and what a rank keeps of a layer is `sharding`'s.

**Source:** the allocation shapes of the memra engine; its tensor-parallel ranks have `rank_geometry`.
"""

from __future__ import annotations

from dataclasses import dataclass

from warmkv.kernels.formats import BLOCK, RowFormat
from warmkv.kernels.resident.plane import TAIL_PAD
from warmkv.kvstore.live import sizing
from warmkv.kvstore.live.plan import LayerPlan, ModelPlan
from warmkv.kvstore.live.rings import MAX_LENGTH, check_count, ring_rows
from warmkv.schema.errors import CapacityExceeded, RecordError, UnsupportedError
from warmkv.schema.identity import LayerKind

#: Bytes of the mirror of a length or of a base.
MIRROR = 4
#: Two planes' tail pads and the mirror of the length.
FIXED = 2 * TAIL_PAD + MIRROR
#: State buffers of a recurrent layer: the one that is read and the one that is written.
STATE_BUFFERS = 2
_FLOAT = 4
_OF_ROWS = frozenset({LayerKind.FULL, LayerKind.SLIDING})
#: Formats of which a row has no more than its channels: what a token takes follows from their number.
_BY_CHANNEL = frozenset(
    {RowFormat.F32, RowFormat.F16, RowFormat.BF16, RowFormat.Q8_0, RowFormat.Q5_1, RowFormat.Q4_0, RowFormat.FP8}
)


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer allocates on its device. ``key_bytes`` and ``value_bytes`` are those of a token, of which
    there is room for ``rows``; ``fixed_bytes`` is the rest: pads and the mirror of the length, fields of
    quantised planes, states. ``ringed`` tells whether rows are a ring, which a longer context does not
    lengthen beyond `rings.ring_rows`."""

    key_bytes: int = 0
    value_bytes: int = 0
    rows: int = 0
    fixed_bytes: int = 0
    ringed: bool = False

    @property
    def token_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    @property
    def key_plane_bytes(self) -> int:
        """Of the buffer of keys, its tail pad included; 0 where there is none."""
        return self._plane(self.key_bytes)

    @property
    def value_plane_bytes(self) -> int:
        return self._plane(self.value_bytes)

    @property
    def allocated_bytes(self) -> int:
        return sizing.total(sizing.product(self.rows, self.token_bytes), self.fixed_bytes)

    def _plane(self, token: int) -> int:
        return sizing.total(sizing.product(self.rows, token), TAIL_PAD) if token else 0


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What layers allocate, in their order."""

    layers: tuple[LayerGeometry, ...]

    @property
    def token_bytes(self) -> int:
        """What a token takes in all layers, ringed ones included."""
        return sizing.total(*(layer.token_bytes for layer in self.layers))

    @property
    def ring_token_bytes(self) -> int:
        """The part of `token_bytes` that grows no further once rings are full."""
        return sizing.total(*(layer.token_bytes for layer in self.layers if layer.ringed))

    @property
    def ring_row_cap(self) -> int:
        """Rows of the longest ring; 0 where there is none."""
        return max((layer.rows for layer in self.layers if layer.ringed), default=0)

    @property
    def fixed_bytes(self) -> int:
        return sizing.total(*(layer.fixed_bytes for layer in self.layers))

    @property
    def table_bytes(self) -> int:
        """The mirrors of the bases of rings, all layers on one device."""
        return sizing.product(MIRROR, sum(layer.ringed for layer in self.layers))

    @property
    def allocated_bytes(self) -> int:
        """Of layers and of the table of bases."""
        return sizing.total(self.table_bytes, *(layer.allocated_bytes for layer in self.layers))

    def part(self, first: int, last: int) -> ModelGeometry:
        """Layers [first, last): those of one device. Raises RecordError outside the layers."""
        if not 0 <= first <= last <= len(self.layers):
            raise RecordError(f"layers [{first}, {last}), there are {len(self.layers)}")
        return ModelGeometry(self.layers[first:last])


def layer_geometry(plan: LayerPlan, capacity: int, *, rings: bool = False) -> LayerGeometry:
    """What a resident layer of ``plan`` allocates for ``capacity`` tokens; ``rings`` arms the rings of SLIDING
    layers. Layers that share another's rows take nothing, recurrent ones their states.

    Raises RecordError for a plan or a capacity that is none, CapacityExceeded for one beyond int32,
    UnsupportedError for kinds that are not resident, OutOfMemory beyond 64 bits."""
    check_capacity(capacity)
    plan.validate(0)
    if plan.kind is LayerKind.SHARED:
        return LayerGeometry()
    if plan.kind is LayerKind.RECURRENT:
        states = sizing.product(_FLOAT, STATE_BUFFERS, plan.state_size)
        return LayerGeometry(fixed_bytes=sizing.total(states, sizing.conv_bytes(plan)))
    check_resident(plan)
    ringed = rings and plan.kind is LayerKind.SLIDING
    rows = ring_rows(plan.window, capacity) if ringed else capacity
    fixed = sizing.total(FIXED, sizing.field_bytes(plan))
    layer = LayerGeometry(sizing.key_bytes(plan), sizing.value_bytes(plan), rows, fixed, ringed)
    sizing.total(layer.allocated_bytes)  # refused here rather than when it is asked for
    return layer


def model_geometry(plan: ModelPlan, capacity: int, *, rings: bool = False) -> ModelGeometry:
    """`layer_geometry` of all layers, blocks beyond the trunk included."""
    return ModelGeometry(tuple(layer_geometry(layer, capacity, rings=rings) for layer in plan.layers))


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """What one rank keeps of a layer: ``key_dim`` and ``value_dim`` channels a token over its KV heads."""

    key_dim: int
    value_dim: int
    key_bytes: int
    value_bytes: int
    fixed_bytes: int = FIXED

    @property
    def token_bytes(self) -> int:
        return self.key_bytes + self.value_bytes

    def layer(self, capacity: int, window: int = 0) -> LayerGeometry:
        """For ``capacity`` tokens, flat, or as a ring of ``window``."""
        check_capacity(capacity)
        rows = ring_rows(window, capacity) if window else capacity
        return LayerGeometry(self.key_bytes, self.value_bytes, rows, self.fixed_bytes, bool(window))


def rank_geometry(key_dim: int, value_dim: int, ranks: int, key_format: RowFormat, value_format: RowFormat) -> RankGeometry:
    """One of ``ranks`` equal shares of a token of ``key_dim`` and ``value_dim`` channels over all KV heads.

    Raises RecordError for zero, for channels that ranks cannot share equally or in blocks of 32,
    UnsupportedError for formats that keep something per head, OutOfMemory beyond 64 bits."""
    if min(key_dim, value_dim, ranks) < 1:
        raise RecordError(f"keys of {key_dim} channels, values of {value_dim}, {ranks} ranks; expected at least 1 of each")
    sides = []
    for side, dim, format_ in (("keys", key_dim, key_format), ("values", value_dim, value_format)):
        if format_ not in _BY_CHANNEL:
            raise UnsupportedError(f"{side} as {format_.value}, of which a head keeps more than its channels")
        if dim % ranks:
            raise RecordError(f"{side} of {dim} channels over {ranks} ranks, expected a multiple")
        local = dim // ranks
        if local % BLOCK:
            raise RecordError(f"{side} of {local} channels a rank, expected a multiple of {BLOCK}")
        sides.append((local, sizing.product(format_.row_bytes(local, keys=side == "keys"))))
    (keys, key_bytes), (values, value_bytes) = sides
    sizing.total(key_bytes, value_bytes)
    return RankGeometry(keys, values, key_bytes, value_bytes)


def check_capacity(capacity: int) -> None:
    """Raises RecordError for a capacity below 1, CapacityExceeded for one that int32 mirrors cannot count."""
    if isinstance(capacity, int) and capacity > MAX_LENGTH:
        raise CapacityExceeded(f"a capacity of {capacity}, expected at most {MAX_LENGTH}: mirrors are int32")
    check_count("capacity", capacity, least=1)


def check_resident(plan: LayerPlan) -> None:
    """Raises UnsupportedError for kinds whose rows no device keeps."""
    if plan.kind not in _OF_ROWS:
        raise UnsupportedError(f"{plan.kind.name} layers, expected kinds that a device keeps")
