"""Identity: everything that decides whether stored numbers fit a model.

No field has a default: a field nobody filled in is an error at construction, "none" is a
value, nothing is a wildcard. Two identities with equal canonical bytes may share state; any
difference at all is another namespace, hence a miss.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

from warmkv.schema import canonical
from warmkv.schema.errors import FormatError, IdentityError

IDENTITY_VERSION = 1
MAX_IDENTITY_BYTES = 1 << 20

#: RoPE regimes whose rows are a function of position alone.
ROPE_KINDS = frozenset({"none", "default", "linear", "llama3", "yarn", "longrope-short", "longrope-long", "mrope"})
#: RoPE regimes whose rows depend on how the sequence came to its length.
PATH_DEPENDENT_ROPE = frozenset({"dynamic", "dynamic-ntk", "longrope"})


class LayerKind(IntEnum):
    """What a layer keeps; `kvstore.resume` derives from it where the layer can resume."""

    FULL = 1
    SLIDING = 2
    CHUNKED = 3
    SINK_WINDOW = 4
    RING = 5
    CONV = 6
    RECURRENT = 7
    NYSTROM = 8
    OPAQUE = 9
    ENCODER = 10
    SHARED = 11
    HYBRID = 12
    SPARSE = 13


class PlaneFormat(IntEnum):
    """How the numbers of a plane are written. Numbers are final; a new format takes a new one."""

    F32 = 1
    F16 = 2
    BF16 = 3
    RAW = 4
    Q8_2F = 5
    Q8_0 = 6
    Q5_1 = 7
    Q4_0 = 8
    FP8_E4M3FN = 9
    FP8_E4M3FNUZ = 10
    FP8_E5M2 = 11
    FP8_E5M2FNUZ = 12
    TQ_KEY = 13
    TQ_VALUE = 14
    TQ3 = 15


class PlaneRole(IntEnum):
    """Which quantity of a layer a plane holds."""

    KEY = 1
    VALUE = 2
    LATENT = 3
    INDEXER_KEY = 4
    CONV = 5
    RECURRENT = 6
    RING = 7
    NYSTROM = 8
    BLOB = 9
    IMPORTANCE = 10
    LOGITS = 11
    FIELD = 12


#: Roles of planes that layers have at one position. In layers that keep rows as well (HYBRID)
#: the role tells the two apart.
STATE_ROLES = frozenset(
    {
        PlaneRole.CONV,
        PlaneRole.RECURRENT,
        PlaneRole.RING,
        PlaneRole.NYSTROM,
        PlaneRole.BLOB,
        PlaneRole.IMPORTANCE,
        PlaneRole.LOGITS,
    }
)
#: Kinds all of whose planes are state, whatever their role. SPARSE layers keep rows of which some in the
#: middle were given up: those of a prefix are no prefix of them.
_STATE_KINDS = frozenset(
    {LayerKind.RING, LayerKind.CONV, LayerKind.RECURRENT, LayerKind.NYSTROM, LayerKind.OPAQUE, LayerKind.ENCODER,
     LayerKind.SPARSE}
)  # fmt: skip

#: Bytes of one element, for formats whose elements stand alone.
ELEMENT_BYTES = {
    PlaneFormat.F32: 4, PlaneFormat.F16: 2, PlaneFormat.BF16: 2, PlaneFormat.RAW: 1, PlaneFormat.FP8_E4M3FN: 1,
    PlaneFormat.FP8_E4M3FNUZ: 1, PlaneFormat.FP8_E5M2: 1, PlaneFormat.FP8_E5M2FNUZ: 1,
}  # fmt: skip
#: Elements and bytes of one block, for formats that pack blocks along a head.
BLOCK_BYTES = {PlaneFormat.Q8_0: (32, 34), PlaneFormat.Q5_1: (32, 24), PlaneFormat.Q4_0: (32, 18)}
#: Formats whose rows depend on a field that is frozen once per sequence.
FIELD_FORMATS = frozenset({PlaneFormat.Q8_2F})
#: Bits of a channel and further bytes of a head, for rows that were rotated as a seed says. Eight channels
#: fill whole bytes.
ROTATED_BYTES = {PlaneFormat.TQ_KEY: (3, 4), PlaneFormat.TQ_VALUE: (2, 2), PlaneFormat.TQ3: (3, 2)}
ROTATED_STEP = 8
_SEED = re.compile(r"rotation seed (0|[1-9][0-9]{0,19})")


def with_rotation(seed: int, parameters: str = "none") -> str:
    """``parameters`` of a plane of rotated rows, with the seed of the model's rotations: that of a layer is
    it XOR the layer's number. Raises IdentityError for a seed that is none of 64 bits."""
    _check_integer("rotation seed", seed, 0, 2**64 - 1)
    return f"rotation seed {seed}" if parameters == "none" else f"{parameters}; rotation seed {seed}"


def rotation_seed(parameters: str) -> int | None:
    """The seed that `with_rotation` wrote; None where there is none."""
    found = _SEED.fullmatch(parameters.rpartition("; ")[2])
    seed = -1 if found is None else int(found[1])
    return seed if 0 <= seed < 2**64 else None


def without_rotation(parameters: str) -> str:
    """What `with_rotation` was given."""
    return parameters if rotation_seed(parameters) is None else parameters.rpartition("; ")[0] or "none"


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One plane of a layer: role, format and the shape of one row (heads, head size)."""

    role: PlaneRole
    format: PlaneFormat
    row_shape: tuple[int, ...]
    parameters: str = "none"

    def canonical(self) -> canonical.Value:
        return (int(self.role), int(self.format), tuple(self.row_shape), self.parameters)

    def validate(self, where: str) -> None:
        if not isinstance(self.role, PlaneRole) or not isinstance(self.format, PlaneFormat):
            raise IdentityError(f"{where}: plane role {self.role!r} or format {self.format!r} is not one of the enumerations")
        if not isinstance(self.row_shape, tuple) or not 1 <= len(self.row_shape) <= 4:
            raise IdentityError(f"{where}: row shape {self.row_shape!r} of plane {self.role.name} is not 1-4 sizes")
        for size in self.row_shape:
            _check_integer(f"{where} plane {self.role.name} row size", size, 1, 2**32 - 1)
        _check_text(f"{where} plane {self.role.name} parameters", self.parameters)
        if self.format in ROTATED_BYTES:
            self._validate_rotated(f"{where} plane {self.role.name} ({self.format.name})")

    def _validate_rotated(self, name: str) -> None:
        """Bytes mean nothing without the rotation, and two of them must not pass for one."""
        if self.row_shape[-1] % ROTATED_STEP:
            raise IdentityError(f"{name}: heads of {self.row_shape[-1]} channels, expected a multiple of {ROTATED_STEP}")
        if rotation_seed(self.parameters) is None:
            raise IdentityError(f"{name}: parameters {self.parameters!r} name no seed, expected 'rotation seed N' of 64 bits")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Kind and geometry of one layer. ``window`` W means a query sees itself and W-1 rows
    before it; ``shared_with`` is the layer whose rows are used, or -1."""

    kind: LayerKind
    planes: tuple[PlaneSpec, ...]
    window: int = 0
    chunk: int = 0
    sinks: int = 0
    shared_with: int = -1

    @property
    def row_planes(self) -> tuple[PlaneSpec, ...]:
        """Planes of which every token adds a row; none where another layer's rows are used."""
        if self.kind in _STATE_KINDS or self.shared_with >= 0:
            return ()
        return tuple(plane for plane in self.planes if plane.role not in STATE_ROLES and plane.role != PlaneRole.FIELD)

    @property
    def field_planes(self) -> tuple[PlaneSpec, ...]:
        """Planes that hold the frozen quantisation field of the rows beside them."""
        if self.kind in _STATE_KINDS or self.shared_with >= 0:
            return ()
        return tuple(plane for plane in self.planes if plane.role == PlaneRole.FIELD)

    @property
    def state_planes(self) -> tuple[PlaneSpec, ...]:
        """Planes that exist at one position, not per token."""
        if self.kind in _STATE_KINDS:
            return self.planes
        return tuple(plane for plane in self.planes if plane.role in STATE_ROLES and self.shared_with < 0)

    @property
    def optional_planes(self) -> frozenset[PlaneRole]:
        """Roles of state that may be absent: importance, where other state stands beside it. It alone
        makes a state, and what SPARSE layers keep belongs together."""
        alone = all(plane.role == PlaneRole.IMPORTANCE for plane in self.state_planes)
        return frozenset() if alone or self.kind == LayerKind.SPARSE else frozenset({PlaneRole.IMPORTANCE})

    def canonical(self) -> canonical.Value:
        planes = tuple(plane.canonical() for plane in self.planes)
        return (int(self.kind), planes, self.window, self.chunk, self.sinks, self.shared_with)

    def validate(self, index: int) -> None:
        if not isinstance(self.kind, LayerKind) or not isinstance(self.planes, tuple):
            raise IdentityError(f"layer {index}: kind {self.kind!r} with planes {self.planes!r} is not a layer")
        where = f"layer {index} ({self.kind.name})"
        for name in ("window", "chunk", "sinks"):
            _check_integer(f"{where} {name}", getattr(self, name))
        _check_integer(f"{where} shared_with", self.shared_with, -1)
        windowed = self.kind in (LayerKind.SLIDING, LayerKind.SINK_WINDOW)
        if windowed and self.window < 1:
            raise IdentityError(f"{where}: window is {self.window}, expected at least 1")
        if self.kind == LayerKind.CHUNKED and self.chunk < 1:
            raise IdentityError(f"{where}: chunk is {self.chunk}, expected at least 1")
        if (self.kind == LayerKind.SHARED) != (self.shared_with >= 0):
            raise IdentityError(f"{where}: shared_with is {self.shared_with}")
        if self.kind != LayerKind.SHARED and not self.planes:
            raise IdentityError(f"{where}: no planes")
        for plane in self.planes:
            _check_type(f"{where} planes", plane, PlaneSpec)
            plane.validate(where)
            if plane.role == PlaneRole.LOGITS:
                raise IdentityError(f"{where}: logits belong to no layer")
        if self.kind == LayerKind.HYBRID and not (self.row_planes and self.state_planes):
            raise IdentityError(f"{where}: its planes are only rows or only state, expected both")
        if len({plane.role for plane in self.planes}) != len(self.planes):
            raise IdentityError(f"{where}: two planes of one role")


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An active adapter: digest of its content and the scale in force. Names do not count."""

    digest: bytes
    scale: float

    def canonical(self) -> canonical.Value:
        return (self.digest, float(self.scale))

    def validate(self) -> None:
        _check_digest("adapters", self.digest)
        if self.digest == b"none":
            raise IdentityError("an adapter without a content digest cannot be told from another")
        _check_number("adapter scale", self.scale)


@dataclass(frozen=True, slots=True)
class RopeRegime:
    """Rotary embedding as resolved for the length at hand. ``frequencies`` is a digest of the
    inverse frequencies in use (or b"none"); ``kind`` one of ROPE_KINDS."""

    kind: str
    base: float
    attention_scaling: float
    rotary_dim: int
    original_max_tokens: int
    frequencies: bytes

    def canonical(self) -> canonical.Value:
        base, scaling = float(self.base), float(self.attention_scaling)
        return (self.kind, base, scaling, self.rotary_dim, self.original_max_tokens, self.frequencies)

    def validate(self) -> None:
        _check_text("rope.kind", self.kind)
        if self.kind in PATH_DEPENDENT_ROPE:
            raise IdentityError(f"RoPE kind {self.kind!r} is refused: its rows depend on how the sequence reached its length")
        if self.kind not in ROPE_KINDS:
            raise IdentityError(f"unknown RoPE kind {self.kind!r}; known: {', '.join(sorted(ROPE_KINDS))}")
        _check_number("rope.base", self.base)
        _check_number("rope.attention_scaling", self.attention_scaling)
        _check_integer("rope.rotary_dim", self.rotary_dim)
        _check_integer("rope.original_max_tokens", self.original_max_tokens)
        _check_digest("rope.frequencies", self.frequencies)


@dataclass(frozen=True, slots=True)
class Topology:
    """Place of this process in a tensor- and pipeline-parallel group."""

    rank: int
    world: int
    stage: int
    stages: int

    def canonical(self) -> canonical.Value:
        return (self.rank, self.world, self.stage, self.stages)

    def validate(self) -> None:
        for name in ("rank", "world", "stage", "stages"):
            _check_integer(f"topology.{name}", getattr(self, name))
        if not (0 <= self.rank < self.world and 0 <= self.stage < self.stages):
            raise IdentityError(f"topology rank {self.rank}/{self.world}, stage {self.stage}/{self.stages} is impossible")


SINGLE = Topology(0, 1, 0, 1)


@dataclass(frozen=True)
class Identity:
    """See the module docstring. Digest fields are 16 to 64 bytes, or b"none".

    ``parameters`` covers parameters and buffers as they are in memory; ``settings`` the
    remaining switches of the model (configuration, per-module options); ``tenant`` is a digest
    of the tenant's salt."""

    architecture: str
    parameters: bytes
    settings: bytes
    adapters: tuple[AdapterRef, ...]
    layers: tuple[LayerSpec, ...]
    compute_dtype: str
    attention: str
    layout: str
    rope: RopeRegime
    tokenizer: bytes
    runtime: str
    runtime_state_version: str
    topology: Topology
    tenant: bytes = field(repr=False)

    def __post_init__(self) -> None:
        for name in ("architecture", "compute_dtype", "attention", "layout", "runtime", "runtime_state_version"):
            _check_text(name, getattr(self, name))
        for name in ("parameters", "settings", "tokenizer", "tenant"):
            _check_digest(name, getattr(self, name))
        if self.parameters == b"none":
            raise IdentityError("identity field parameters is 'none'; expected a digest of the tensors in memory")
        _check_type("adapters", self.adapters, tuple)
        for adapter in self.adapters:
            _check_type("adapters", adapter, AdapterRef)
            adapter.validate()
        _check_type("layers", self.layers, tuple)
        if not self.layers:
            raise IdentityError("identity has no layers")
        for index, layer in enumerate(self.layers):
            _check_type("layers", layer, LayerSpec)
            layer.validate(index)
            if layer.shared_with >= len(self.layers) or layer.shared_with == index:
                raise IdentityError(f"layer {index} shares with layer {layer.shared_with}, which it cannot")
        _check_type("rope", self.rope, RopeRegime)
        _check_type("topology", self.topology, Topology)
        self.rope.validate()
        self.topology.validate()

    def fields(self) -> dict[str, canonical.Value]:
        """Field name to canonical value, in the order of the canonical bytes."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    def __hash__(self) -> int:
        """That of the canonical bytes, which keep theirs: what is remembered by identity is asked for
        at every request, and the layers alone are hundreds of values."""
        return hash(self._canonical)

    def canonical(self) -> bytes:
        """The bytes the fingerprint is computed over."""
        return self._canonical

    @cached_property
    def _canonical(self) -> bytes:
        body = tuple((name, value) for name, value in self.fields().items())
        data = canonical.encode(("identity", IDENTITY_VERSION, body))
        if len(data) > MAX_IDENTITY_BYTES:
            raise IdentityError(f"identity takes {len(data)} bytes, at most {MAX_IDENTITY_BYTES} are allowed")
        return data

    @classmethod
    def from_canonical(cls, data: bytes) -> Identity:
        """Inverse of `canonical`. Raises FormatError or IdentityError on anything else."""
        if len(data) > MAX_IDENTITY_BYTES:
            raise FormatError(f"identity of {len(data)} bytes, at most {MAX_IDENTITY_BYTES} are allowed")
        try:
            decoded: Any = canonical.decode(data)
            tag, version, body = decoded
            if tag != "identity" or version != IDENTITY_VERSION:
                raise FormatError(f"identity version {version!r}, expected {IDENTITY_VERSION}")
            values: dict[str, Any] = dict(body)
            if list(values) != [f.name for f in fields(cls)]:
                raise FormatError(f"identity fields {list(values)} are not those of version {IDENTITY_VERSION}")
            identity = cls(**{name: _UNPACK.get(name, _same)(value) for name, value in values.items()})
        except (TypeError, ValueError, KeyError) as exc:
            raise FormatError(f"identity bytes do not spell an identity: {exc}") from exc
        if identity.canonical() != data:
            raise FormatError("identity bytes are not in canonical form")
        return identity


def differing_fields(ours: Identity, theirs: Identity) -> tuple[str, ...]:
    """Names of the fields in which two identities differ, in order."""
    theirs_fields = theirs.fields()
    return tuple(name for name, value in ours.fields().items() if value != theirs_fields[name])


def first_difference(ours: Identity, theirs: Identity) -> str | None:
    """Name of the first field in which two identities differ."""
    return next(iter(differing_fields(ours, theirs)), None)


def _check_digest(name: str, value: object) -> None:
    if not isinstance(value, bytes) or (value != b"none" and not 16 <= len(value) <= 64):
        # A salt handed in by mistake instead of its digest must not end up in a log.
        found = type(value).__name__ if name == "tenant" else repr(value)
        raise IdentityError(f"identity field {name} is {found}; expected a digest of 16-64 bytes, or b'none'")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise IdentityError(f"identity field {name} is {value!r}; expected text, 'none' where there is none")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise IdentityError(f"identity field {name} is {value!r}, which has no UTF-8 spelling") from exc


def _check_integer(name: str, value: object, low: int = 0, high: int = 2**63 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise IdentityError(f"identity field {name} is {value!r}; expected an integer in {low}..{high}")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise IdentityError(f"identity field {name} is {value!r}; expected a finite number")


def _check_type(name: str, value: object, expected: type) -> None:
    if not isinstance(value, expected):
        raise IdentityError(f"identity field {name} is or holds {value!r}; expected {expected.__name__}")


def _plain(value: object) -> canonical.Value:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, (AdapterRef, LayerSpec, RopeRegime, Topology)):
        return value.canonical()
    assert isinstance(value, (str, bytes, int, float))
    return value


def _same(value: object) -> object:
    return value


def _layer(value: Any) -> LayerSpec:
    kind, planes, window, chunk, sinks, shared = value
    specs = tuple(PlaneSpec(PlaneRole(r), PlaneFormat(f), shape, p) for r, f, shape, p in planes)
    return LayerSpec(LayerKind(kind), specs, window, chunk, sinks, shared)


_UNPACK: dict[str, Callable[[Any], Any]] = {
    "adapters": lambda value: tuple(AdapterRef(*item) for item in value),
    "layers": lambda value: tuple(_layer(item) for item in value),
    "rope": lambda value: RopeRegime(*value),
    "topology": lambda value: Topology(*value),
}
