"""Live caches of every kind, a stand-in for the model that fills them, and what they then hold as bytes.

What a layer is fed at a position is a function of the seed, the layer and that position (and, where the
layer is recurrent, of what came before): two caches that are fed alike hold alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from warmkv.kernels.formats import F32, RowFormat
from warmkv.kernels.nystrom.reference import Rectifier
from warmkv.kvstore.bridge import layer_specs, records_of
from warmkv.kvstore.live.layers.attention import AttentionLayer
from warmkv.kvstore.live.layers.bounded import BoundedLayer
from warmkv.kvstore.live.layers.conv import ConvLayer
from warmkv.kvstore.live.layers.nystrom import NystromLayer
from warmkv.kvstore.live.layers.recurrent import RecurrentLayer
from warmkv.kvstore.live.layers.resident_recurrent import ResidentRecurrentLayer
from warmkv.kvstore.live.model import Layer, ModelCache
from warmkv.kvstore.live.plan import ConvPlan, LayerPlan, ModelPlan, NystromPlan, RingPlan, TurboQuantPlan, modes
from warmkv.kvstore.results import Saved
from warmkv.kvstore.testing.samples import mixed_identity
from warmkv.kvstore.verbs import Ack, Verbs
from warmkv.schema.identity import Identity, LayerKind
from warmkv.schema.records import Anchor

Ids = npt.NDArray[np.uint32]
_FULL = LayerPlan(LayerKind.FULL, heads=4, kv_heads=2, key_size=40, value_size=7, importance=False)
_WINDOW = replace(_FULL, kind=LayerKind.SLIDING, window=9)
_RING = LayerPlan(
    LayerKind.RING, heads=4, kv_heads=2, key_size=8, value_size=6,
    ring=RingPlan(window=11, sinks=0, inv_freq=(1.0, 0.1), undo_rows=5),
)  # fmt: skip
_RECURRENT = LayerPlan(LayerKind.RECURRENT, state_size=33)
_DELTA = LayerPlan(LayerKind.RECURRENT, state_size=21, conv=ConvPlan(channels=5, taps=3, history=0))
_NYSTROM = LayerPlan(
    LayerKind.NYSTROM, heads=4, kv_heads=2, key_size=8, value_size=6,
    nystrom=NystromPlan(landmarks=6, window=5, sinks=2, boundary=48),
)  # fmt: skip
_FM = replace(_NYSTROM, nystrom=NystromPlan(landmarks=4, window=3, sinks=0, rectifier=Rectifier.FM, boundary=20))
_SHARED = LayerPlan(LayerKind.SHARED, shared_with=0)
_CONV = LayerPlan(LayerKind.CONV, conv=ConvPlan(channels=13, taps=3))


def written(layer: LayerPlan, keys: RowFormat, values: RowFormat, **changes: object) -> LayerPlan:
    """The layer with rows of these formats."""
    return replace(layer, key_format=keys, value_format=values, **changes)  # type: ignore[arg-type]


def rotated(name: str, layer: LayerPlan = _FULL, seed: int = 42, **changes: object) -> LayerPlan:
    """The layer in a mode of rotated rows; its heads have a size that is no power of two."""
    return replace(written(layer, *_ROTATED[name], value_size=24, turboquant=TurboQuantPlan(seed)), **changes)  # type: ignore[arg-type]


def blocked(name: str, layer: LayerPlan = _FULL, **changes: object) -> LayerPlan:
    """The layer in a mode of blocked rows; keys and values of different sizes."""
    return replace(written(layer, *_BLOCKED[name], key_size=96, value_size=64), **changes)  # type: ignore[arg-type]


_MODES = {name: (keys, values) for name, keys, values in modes()}
_BLOCKED = {name: (keys, values) for name, keys, values in modes(blocked=True) if name not in _MODES}
_ROTATED = {name: (keys, values) for name, keys, values in modes(rotated=True) if name not in _MODES}
#: Plans by name: every kind of layer, rows in every mode, some of them mixed.
PLANS: dict[str, ModelPlan] = {
    **{name: ModelPlan((written(_FULL, *pair),) * 2) for name, pair in _MODES.items()},
    **{f"window {name}": ModelPlan((written(_WINDOW, *pair), written(_FULL, *pair))) for name, pair in _MODES.items()},
    "wide window q8": ModelPlan((written(_WINDOW, *_MODES["q8"], window=90),)),
    "dead heads": ModelPlan(
        (written(_FULL, *_MODES["q8"], heads=10, kv_heads=5, alive=(False, True, True, False, True)), replace(_FULL, window=0))
    ),
    "importance": ModelPlan((replace(_FULL, importance=True), written(_FULL, *_MODES["q8"], importance=True))),
    "window and importance": ModelPlan((replace(_WINDOW, importance=True), written(_WINDOW, *_MODES["q8k"], importance=True))),
    "turboquant": ModelPlan((rotated("turboquant"), rotated("turboquant", key_size=64, seed=2**64 - 1))),
    "one side rotated": ModelPlan((rotated("tqk"), rotated("tqv"), rotated("tq3k", seed=0))),
    "window rotated": ModelPlan((rotated("turboquant", _WINDOW), rotated("tqv", _WINDOW))),
    "tq3": ModelPlan((rotated("tq3", importance=True), rotated("tq3", heads=6, kv_heads=3, alive=(True, False, True)))),
    "blocks": ModelPlan((blocked("q8_0/q5_1"), blocked("fp8/q4_0", heads=6, kv_heads=3, alive=(True, False, True)))),
    "window blocks": ModelPlan((blocked("q8_0/q4_0", _WINDOW), blocked("q5_1", importance=True))),
    "blocks beside a field": ModelPlan((blocked("q4_0", key_format=RowFormat.Q8_2F), blocked("q8_0/fp8"))),
    "convolutions": ModelPlan((_CONV, rotated("turboquant"), _CONV, written(_FULL, *_MODES["f16"]))),
    "ring": ModelPlan((_RING, _FULL)),
    "recurrent": ModelPlan((_RECURRENT,)),
    "hybrid": ModelPlan((_DELTA, written(_FULL, *_MODES["f16"]), _DELTA)),
    "nystroem": ModelPlan((_NYSTROM, replace(_FM, importance=False))),
    "everything": ModelPlan(
        (written(_FULL, *_MODES["q8"], importance=True), _WINDOW, _RING, _RECURRENT, _NYSTROM, _SHARED,
         written(_WINDOW, *_MODES["q8v"]), _CONV, rotated("turboquant"))
    ),
}  # fmt: skip


def identity_of(plan: ModelPlan, *, gaps: bool = False, seed: int = 0) -> Identity:
    """A model whose caches follow ``plan``."""
    return mixed_identity(*layer_specs(plan, gaps=gaps), seed=seed)


def prompt(length: int, seed: int = 0) -> Ids:
    """Token ids; those of another seed differ from the first on."""
    return np.random.default_rng(seed).integers(0, 50_000, length, np.uint32)


def feed(cache: ModelCache, count: int, seed: int = 0) -> list[bytes]:
    """Take ``count`` further tokens one by one, as a model would. The outputs of all layers, step by step."""
    return [_feed_layer(layer, 1, seed, attend=True).tobytes() for _ in range(count) for layer in cache.own]


def fill(cache: ModelCache, count: int, seed: int = 0) -> None:
    """Take ``count`` further tokens at once. Rows are attended only where somebody remembers it."""
    for layer in cache.own if count else ():
        _feed_layer(layer, count, seed, attend=False)


def replay(cache: ModelCache, seed: int = 0) -> None:
    """Take the tokens that a rollback left some layers behind with once more, through these layers."""
    position = cache.position
    behind = {layer.index: lag for layer, lag in cache.replay.layers}
    for layer in cache.own:
        if layer.index in behind:
            _feed_layer(layer, position - behind[layer.index] - layer.position, seed, attend=False)


def save(
    verbs: Verbs, identity: Identity, ids: Ids, cache: ModelCache, *, ack: Ack = "memory", held: int = 0,
    anchors: Sequence[Anchor] = (),
) -> Saved:  # fmt: skip
    """Save what the cache holds of ``ids``."""
    records = records_of(cache, len(ids), held=held)
    saved = verbs.save(identity, ids, records, ack=ack, lineage=cache.lineage, anchors=anchors)
    assert saved.stored, saved.reason
    return saved


def contents(cache: ModelCache, *, importance: bool = True) -> list[object]:
    """Everything the layers hold that a next step may see, as plain values and bytes; of layers with a
    window as many of the newest rows as it needs. ``importance`` may be left out: sums over rows that were
    cut otherwise into blocks differ in their last bits."""
    return [_contents(layer, importance) for layer in cache.own]


def _feed_layer(layer: Layer, count: int, seed: int, *, attend: bool) -> F32:
    plan, at = layer.plan, layer.position
    if isinstance(layer, ConvLayer):
        inputs = np.empty((count, layer.state.shape[1]), np.float32)
        for index in range(count):
            inputs[index] = _numbers(seed, layer.index, at + index, inputs.shape[1])
        layer.append(inputs)
        return layer.state.copy()
    if isinstance(layer, (RecurrentLayer, ResidentRecurrentLayer)):
        return _feed_recurrent(layer, count, seed)
    shapes = ((plan.heads, plan.key_size), (plan.kv_heads, plan.key_size), (plan.kv_heads, plan.value_size))
    q, k, v = (np.empty((count, *shape), np.float32) for shape in shapes)
    for index in range(count):
        numbers = _numbers(seed, layer.index, at + index, q[0].size + k[0].size + v[0].size)
        for part in (q, k, v):
            part[index], numbers = numbers[: part[0].size].reshape(part.shape[1:]), numbers[part[0].size :]
    if isinstance(layer, BoundedLayer):
        return layer.step_chunk(q, k, v)
    if isinstance(layer, NystromLayer):
        return np.concatenate([_feed_nystrom(layer, *(part[i : i + 1] for part in (q, k, v))) for i in range(count)])
    assert isinstance(layer, AttentionLayer)
    layer.append(k, v)
    out = layer.attend_chunk(q) if attend or layer.importance is not None else q[:0]
    layer.trim_window()
    return out if isinstance(out, np.ndarray) else np.asarray(layer.device.download(out), np.float32)


def _feed_recurrent(layer: RecurrentLayer | ResidentRecurrentLayer, count: int, seed: int) -> F32:
    for position in range(layer.position, layer.position + count):
        before, conv = layer.taken(), None
        if before.conv is not None:
            inputs = _numbers(seed, layer.index, position + (1 << 20), before.conv.shape[1])
            conv = np.concatenate([before.conv[1:], inputs[None]])
        layer.update(np.float32(0.9) * before.state + _numbers(seed, layer.index, position, layer.plan.state_size), conv=conv)
    return layer.taken().state


def _feed_nystrom(layer: NystromLayer, q: F32, k: F32, v: F32) -> F32:
    if layer.sealed:
        return layer.step_chunk(q, k, v)
    layer.append(k, v)
    out = layer.attend(q[0])[None]
    if layer.crosses(0):
        layer.seal()
    return out


def _numbers(seed: int, layer: int, position: int, size: int) -> F32:
    numbers = np.random.default_rng((seed, layer, position)).standard_normal(size, np.float32)
    numbers[::3] *= 4
    return numbers


def _contents(layer: Layer, importance: bool) -> object:
    if isinstance(layer, AttentionLayer):
        return _rows(layer, importance)
    if isinstance(layer, BoundedLayer):
        return layer.position, layer.keys.tobytes(), layer.values.tobytes()
    if isinstance(layer, NystromLayer):
        if layer.attention is not None:
            return _rows(layer.attention, importance), layer.trace.tobytes(), layer.pending_boundary, layer.failure
        flat = [
            (group.exact, group.filled, group.head, group.window, group.scale, group.rectifier, far.rows, *(
                array.tobytes() for array in (group.keys, group.values, group.sink_keys, group.sink_values, group.landmarks,
                                              far.landmarks, far.solve, far.values, far.mass, far.top)
            ))
            for group in layer.groups
            for far in group.far
        ]  # fmt: skip
        return layer.position, layer.sealed_rows, flat
    if isinstance(layer, ConvLayer):
        return layer.position, layer.state.tobytes()
    taken, scratch = layer.taken(), layer.scratch if isinstance(layer, RecurrentLayer) else None
    found = (layer.position, taken.state.tobytes(), scratch)
    return found if taken.conv is None else (*found, taken.conv.tobytes())


def _rows(layer: AttentionLayer, importance: bool) -> object:
    kept = min(layer.rows, layer.plan.window - 1) if layer.plan.window else layer.rows
    first = layer.rows - kept
    planes = []
    for plane in (layer.keys, layer.values):
        for head in range(plane.heads):
            blocks = plane.blocks(head)
            codes = np.concatenate([block.codes for block in blocks])[first:]
            scales = [block.scales for block in blocks if block.scales is not None]
            planes.append((codes.tobytes(), np.concatenate(scales)[first:].tobytes() if scales else b""))
        planes.append((b"" if plane.field is None else plane.field.tobytes(), b"frozen" if plane.frozen else b"open"))
    mass = b"" if layer.importance is None or not importance else layer.importance[first:].tobytes()
    return kept, layer.position, layer.gapless, layer.gapless and layer.position - kept, mass, planes
