"""Identities, rows, states and prompts made up for tests.

`model_rows`, `model_states` and `model_logits` are a stand-in for a causal model of any layer
kinds: each row and each state is a function of all tokens and attachments up to it, so an answer
taken from another prefix can never look right. `records_at` gives what a runtime would hand in.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.rows import LayerRows, LayerState, PlaneRows, stored_shape
from warmkv.schema.identity import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime
from warmkv.schema.ids import lineage_after
from warmkv.schema.records import CLEAN, Attachment, Lineage, row_bytes

TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19]
IMAGE = hashlib.blake2b(b"image", digest_size=32).digest()
OTHER_IMAGE = hashlib.blake2b(b"other", digest_size=32).digest()
#: Differs from IMAGE in its first byte only.
NEAR_IMAGE = bytes([IMAGE[0] ^ 1]) + IMAGE[1:]
#: Differs from IMAGE in its last byte only.
LATE_IMAGE = IMAGE[:-1] + bytes([IMAGE[-1] ^ 1])
FOLDED = lineage_after(CLEAN, "evicted", 3)
#: Entries of the logits `model_logits` makes.
VOCABULARY = 7
#: Bytes a blob of `model_states` has per token; cutting it back keeps the first so many.
BLOB_TOKEN_BYTES = 8
#: Rows the rings of `model_states` have at most, and its Nystroem landmarks.
RING_ROWS, LANDMARKS = 4, 3

Records: TypeAlias = list[LayerRows | LayerState]
#: Token ids and the attachments among them.
Prompt: TypeAlias = tuple[tuple[int, ...], tuple[Attachment, ...]]

_KEY, _VALUE = (PlaneRole.KEY, PlaneFormat.F32, (1, 4)), (PlaneRole.VALUE, PlaneFormat.F16, (1, 3))
_CONV, _RECURRENT = (PlaneRole.CONV, PlaneFormat.BF16, (5, 3)), (PlaneRole.RECURRENT, PlaneFormat.F32, (2, 3, 2))
#: Roles, formats and row shapes of each kind's planes. Rings keep keys and values, which are no
#: rows of tokens there.
_PLANES: dict[LayerKind, tuple[tuple[PlaneRole, PlaneFormat, tuple[int, ...]], ...]] = {
    LayerKind.FULL: (_KEY, _VALUE),
    LayerKind.SLIDING: (_KEY, _VALUE),
    LayerKind.CHUNKED: (_KEY, _VALUE),
    LayerKind.SINK_WINDOW: (_KEY, _VALUE),
    LayerKind.RING: ((PlaneRole.KEY, PlaneFormat.F16, (1, 3)), (PlaneRole.VALUE, PlaneFormat.F16, (1, 2))),
    LayerKind.CONV: (_CONV,),
    LayerKind.RECURRENT: (_CONV, _RECURRENT),
    LayerKind.NYSTROM: ((PlaneRole.NYSTROM, PlaneFormat.F32, (3, 4)), (PlaneRole.IMPORTANCE, PlaneFormat.F32, (5,))),
    LayerKind.OPAQUE: ((PlaneRole.BLOB, PlaneFormat.RAW, (1,)),),
    LayerKind.ENCODER: ((PlaneRole.KEY, PlaneFormat.F32, (2, 2)), (PlaneRole.VALUE, PlaneFormat.F32, (2, 2))),
    LayerKind.SHARED: (),
    LayerKind.HYBRID: (_KEY, _VALUE, _CONV, _RECURRENT),
    LayerKind.SPARSE: (_KEY, _VALUE, (PlaneRole.FIELD, PlaneFormat.F32, (7,)), (PlaneRole.IMPORTANCE, PlaneFormat.F32, (1,))),
}


def layer_of(kind: LayerKind, *, window: int = 0, chunk: int = 0, sinks: int = 0, shared_with: int = -1) -> LayerSpec:
    """A small layer of this kind; its planes differ in format and shape."""
    planes = tuple(PlaneSpec(*plane) for plane in _PLANES[kind])
    return LayerSpec(kind, planes, window, chunk, sinks, shared_with)


FULL = layer_of(LayerKind.FULL)
RING, CONV, RECURRENT = layer_of(LayerKind.RING), layer_of(LayerKind.CONV), layer_of(LayerKind.RECURRENT)
SPARSE = layer_of(LayerKind.SPARSE)
NYSTROM, OPAQUE, ENCODER = layer_of(LayerKind.NYSTROM), layer_of(LayerKind.OPAQUE), layer_of(LayerKind.ENCODER)


def sliding(window: int) -> LayerSpec:
    return layer_of(LayerKind.SLIDING, window=window)


def chunked(chunk: int) -> LayerSpec:
    return layer_of(LayerKind.CHUNKED, chunk=chunk)


def sink_window(sinks: int, window: int) -> LayerSpec:
    return layer_of(LayerKind.SINK_WINDOW, window=window, sinks=sinks)


def hybrid(window: int = 0) -> LayerSpec:
    return layer_of(LayerKind.HYBRID, window=window)


def weighed(window: int = 0) -> LayerSpec:
    """Rows, and beside them nothing but their importance."""
    planes = (*FULL.planes, PlaneSpec(PlaneRole.IMPORTANCE, PlaneFormat.F32, (1,)))
    return LayerSpec(LayerKind.HYBRID, planes, window)


def shared(layer: int) -> LayerSpec:
    return layer_of(LayerKind.SHARED, shared_with=layer)


def random_identity(
    layers: int = 2, heads: int = 2, dim: int = 8, format: PlaneFormat = PlaneFormat.F32, seed: int = 0  # noqa: A002
) -> Identity:  # fmt: skip
    """A full-attention model; another seed is another model of the same geometry."""
    planes = tuple(PlaneSpec(role, format, (heads, dim)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    return _identity(tuple(LayerSpec(LayerKind.FULL, planes) for _ in range(layers)), dim, seed)


def mixed_identity(*layers: LayerSpec, seed: int = 0) -> Identity:
    """A model of these layers; another seed is another model of the same geometry."""
    return _identity(layers, 4, seed)


def _identity(layers: tuple[LayerSpec, ...], rotary_dim: int, seed: int) -> Identity:
    digest = hashlib.blake2b(f"weights {seed}".encode(), digest_size=32).digest()
    return Identity(
        architecture="test", parameters=digest, settings=b"none", adapters=(), layers=layers, compute_dtype="float32",
        attention="eager", layout="token-major", rope=RopeRegime("default", 10000.0, 1.0, rotary_dim, 4096, b"none"),
        tokenizer=b"none", runtime="test", runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def random_mixture(rng: random.Random, layers: int = 4, without: Iterable[LayerKind] = ()) -> tuple[LayerSpec, ...]:
    """Up to ``layers`` layers of any kinds but ``without``, their windows and chunks small."""
    left_out = {LayerKind.SHARED, *without}
    kinds = [kind for kind in LayerKind if kind not in left_out]
    made = [_random_layer(rng, rng.choice(kinds)) for _ in range(rng.randint(1, layers))]
    if all(layer.kind == LayerKind.ENCODER for layer in made):  # no decoder: nothing to resume
        made[0] = FULL
    owners = [index for index, layer in enumerate(made) if layer.row_planes]
    if owners and LayerKind.SHARED not in set(without) and rng.random() < 0.25:
        made.append(shared(rng.choice(owners)))
    return tuple(made)


def _random_layer(rng: random.Random, kind: LayerKind) -> LayerSpec:
    window, chunk, sinks = rng.randint(1, 8), rng.randint(2, 5), rng.randint(0, 3)
    return layer_of(
        kind,
        window=window if kind in (LayerKind.SLIDING, LayerKind.SINK_WINDOW) or (kind == LayerKind.HYBRID and rng.random() < 0.5)
        else 0,
        chunk=chunk if kind == LayerKind.CHUNKED else 0,
        sinks=sinks if kind == LayerKind.SINK_WINDOW else 0,
    )  # fmt: skip


def random_prompt(rng: random.Random, others: Sequence[Prompt] = (), *, vocabulary: int = 3, most: int = 40) -> Prompt:
    """Up to ``most`` tokens of few ids, now and then with an image; mostly a branch of one of
    ``others``, so that prefixes meet and part in every way."""
    ids: list[int] = []
    images: list[Attachment] = []
    if others and rng.random() < 0.75:
        ours, theirs = rng.choice(others)
        cut = rng.randint(0, len(ours))
        ids, images = list(ours[:cut]), [item for item in theirs if item.end <= cut]
    wanted = max(1, len(ids) + rng.choice((0, 1, 2, 5, 10, 20)))
    while len(ids) < wanted:
        if rng.random() < 0.06:
            images.append(Attachment(len(ids), rng.randint(1, 4), rng.choice((IMAGE, OTHER_IMAGE))))
            ids += [1] * images[-1].length
        else:
            ids.append(rng.randint(1, vocabulary))
    return tuple(ids[:most]), tuple(item for item in images if item.end <= most)


def random_rows(identity: Identity, n: int, seed: int = 0) -> list[LayerRows]:
    """``n`` rows of random bits (NaN patterns among them) for every layer that has rows."""
    rng = np.random.default_rng(seed)
    return _rows(identity, lambda index, spec: rng.bytes(n * row_bytes(spec.format, spec.row_shape, spec.role)))


def model_rows(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
) -> list[LayerRows]:
    """What a causal model would compute: row i depends on everything at or before i. All rows
    from the first token on, whatever the layers still need of them."""
    seeds = _seeds(identity, ids, attachments, lineage)
    return _rows(identity, lambda index, spec: _bits(seeds, index, spec, row_bytes(spec.format, spec.row_shape, spec.role)))


def model_states(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
) -> list[LayerState]:
    """What layers with a state have after ``ids``, and encoders at the end of each attachment. A
    blob has `BLOB_TOKEN_BYTES` for each token; its first so many bytes are the blob after fewer."""
    seeds = _seeds(identity, ids, attachments, lineage)
    records = []
    for index, layer in enumerate(identity.layers):
        ends = sorted(item.end for item in attachments) if layer.kind == LayerKind.ENCODER else [len(ids)]
        for end in ends if layer.state_planes else ():
            planes = tuple(_state_plane(seeds[:end], index, layer.kind, spec) for spec in layer.state_planes)
            records.append(LayerState(index, end, planes))
    return records


def model_logits(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
) -> npt.NDArray[np.float32]:
    """Logits after the last of ``ids``, shape (VOCABULARY,)."""
    seed = int(_seeds(identity, ids, attachments, lineage)[-1])
    return np.random.default_rng(seed).standard_normal(VOCABULARY, np.float32)


def records_at(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN, *,
    held: int = 0, spare: int = 0,
) -> Records:  # fmt: skip
    """What a runtime has after ``ids``: all rows of full attention (from ``held`` on), of windowed
    layers what the next token needs and ``spare`` rows more, and the states."""
    records: Records = []
    for record in model_rows(identity, ids, attachments, lineage):
        for start, end in _kept(identity.layers[record.layer], len(ids), held, spare):
            planes = tuple(replace(plane, rows=plane.rows[start:end]) for plane in record.planes)
            records.append(replace(record, planes=planes, first=start))
    return [*records, *model_states(identity, ids, attachments, lineage)]


def _kept(layer: LayerSpec, p: int, held: int, spare: int) -> list[tuple[int, int]]:
    """Ranges of rows that a runtime still has after ``p`` tokens."""
    if layer.kind == LayerKind.CHUNKED:
        return [(max(0, p - p % layer.chunk - spare), p)]
    if not layer.window:
        return [(min(held, p), p)]
    first = max(0, p - (layer.window - 1) - spare)
    if 0 < layer.sinks < first:
        return [(0, layer.sinks), (first, p)]
    return [(0 if layer.sinks else first, p)]


def _seeds(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment], lineage: Lineage
) -> npt.NDArray[np.uint64]:  # fmt: skip
    """For each position a number that everything at or before it decides."""
    seeds = np.empty(len(ids), np.uint64)
    begins = {item.start: item for item in attachments}
    digest = hashlib.blake2b(identity.canonical() + lineage, digest_size=8)
    for at, token in enumerate(ids):
        digest.update(int(token).to_bytes(4, "little"))
        if at in begins:
            digest.update(begins[at].digest + begins[at].length.to_bytes(8, "little"))
        seeds[at] = int.from_bytes(digest.copy().digest(), "little")
    return seeds


def _bits(seeds: npt.NDArray[np.uint64], index: int, spec: PlaneSpec, size: int, salt: int = 0) -> bytes:
    """``size`` bytes for each of ``seeds``, different for each layer, role and ``salt``."""
    words = np.arange(-(-size // 8), dtype=np.uint64) + np.uint64(((salt << 20) + index * 16 + spec.role) << 32)
    return np.ascontiguousarray(_mix(seeds[:, None] ^ _mix(words)[None, :]).view(np.uint8)[:, :size]).tobytes()


def _state_plane(seeds: npt.NDArray[np.uint64], index: int, kind: LayerKind, spec: PlaneSpec) -> PlaneRows:
    shape: tuple[int, ...] = (1, BLOB_TOKEN_BYTES * len(seeds))
    if spec.role == PlaneRole.BLOB:
        data = _bits(seeds, index, spec, BLOB_TOKEN_BYTES, salt=1)
    else:
        kept = min(len(seeds), RING_ROWS)
        count = {LayerKind.RING: kept, LayerKind.SPARSE: kept, LayerKind.ENCODER: 2}.get(kind, 1)
        count = 1 if spec.role == PlaneRole.FIELD else count
        count = LANDMARKS if spec.role == PlaneRole.NYSTROM else count
        data = _bits(seeds[-1:], index, spec, count * row_bytes(spec.format, spec.row_shape, spec.role), salt=1)
        shape = (count, *stored_shape(spec)[1])
    return PlaneRows(spec.role, spec.format, np.frombuffer(data, stored_shape(spec)[0]).reshape(shape))


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finisher of splitmix64: neighbours become unrelated."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _rows(identity: Identity, make: Callable[[int, PlaneSpec], bytes]) -> list[LayerRows]:
    records = []
    for index, layer in enumerate(identity.layers):
        if layer.row_planes:
            planes = tuple(
                PlaneRows(s.role, s.format, np.frombuffer(make(index, s), stored_shape(s)[0]).reshape(-1, *stored_shape(s)[1]))
                for s in layer.row_planes
            )
            records.append(LayerRows(index, planes))
    return records
