"""The fingerprint a `.kvcache` file of a model must have, recomputed from the model's identity.

The way rows are stored is part of it, as a tag of the model id: nothing for f32 (and for the native f16
of Metal), ``f16:``, or TurboQuant with its sides and its seed. So a file whose rows were rotated by
another seed is another model's.
"""

from __future__ import annotations

import re

from warmkv.kvstore.kvcache.about import About
from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, UnsupportedError
from warmkv.schema.identity import Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, rotation_seed
from warmkv.schema.kvcache_file import KvFile, Tag

_PREFIX = re.compile(r"(?:cpu|wgpu|metal):")
_TAG = re.compile(r"f16:|tq3(?:kv|k|v)-s\d+:")
#: Whose uncompressed rows are f16, and not named so.
NATIVE_F16 = "metal:"
_TAGS = {
    (PlaneFormat.F32, PlaneFormat.F32): Tag.ATTENTION,
    (PlaneFormat.F16, PlaneFormat.F16): Tag.ATTENTION_F16,
    (PlaneFormat.TQ_KEY, PlaneFormat.TQ_VALUE): Tag.TURBOQUANT,
}


def plane(layer: LayerSpec, role: PlaneRole) -> PlaneSpec:
    """Raises UnsupportedError for a layer without it."""
    for spec in layer.planes:
        if spec.role == role:
            return spec
    raise UnsupportedError(f"a {layer.kind.name} layer without plane {role.name} is in no .kvcache file")


def layer_tags(identity: Identity, about: About) -> tuple[Tag, ...]:
    """By layer the tag it is written with. Raises UnsupportedError for layers these files cannot hold."""
    tags = []
    for index, layer in enumerate(identity.layers):
        _require_kind(index, layer)
        if layer.kind == LayerKind.CONV:
            if {(spec.role, spec.format) for spec in layer.planes} != {(PlaneRole.CONV, PlaneFormat.F32)}:
                raise UnsupportedError(f"layer {index}: its state is not one plane CONV of F32, which is all these files hold")
            tags.append(Tag.CONV)
            continue
        formats = (plane(layer, PlaneRole.KEY).format, plane(layer, PlaneRole.VALUE).format)
        tag = _TAGS.get(formats)
        if tag is None or len(layer.planes) != 2:
            stored = " and ".join(spec.format.name for spec in layer.planes)
            raise UnsupportedError(f"layer {index} stores {stored}; these files hold F32, F16 or TurboQuant on both sides")
        native = tag == Tag.ATTENTION_F16 and about.model_id.startswith(NATIVE_F16) and "f16" not in _given_tag(about)
        tags.append(Tag.ATTENTION if native else tag)
    return tuple(tags)


def cache_tag(identity: Identity, tags: tuple[Tag, ...]) -> str:
    """What a file with layers of these ``tags`` has in its model id. Raises FormatError where they are not of
    one mode."""
    modes = set(tags) - {Tag.CONV}
    if len(modes) > 1:
        raise FormatError(f"layers are stored as {', '.join(sorted(mode.name for mode in modes))}, expected one way")
    if modes == {Tag.ATTENTION_F16}:
        return "f16:"
    if modes != {Tag.TURBOQUANT}:
        return ""
    seeds = {rotation_seed(spec.parameters) for layer in identity.layers for spec in layer.row_planes}
    if len(seeds) != 1 or None in seeds:
        raise UnsupportedError(f"rows of the model were rotated by {sorted(map(str, seeds))}, expected one seed")
    return f"tq3kv-s{seeds.pop()}:"


def expected(identity: Identity, about: About, tags: tuple[Tag, ...]) -> int:
    """The fingerprint of files with layers of these ``tags``. Raises FormatError where ``about`` names another
    way of storing rows than they and the identity do, UnsupportedError."""
    given, tag = _given_tag(about), cache_tag(identity, tags)
    if given and given != tag:
        ours = tag or "none"
        raise FormatError(f"model_id is {about.model_id!r}, of rows {given!r}; identity and layers say {ours!r}")
    prefix, rest = _split(about.model_id)
    convolutions = [layer.kind == LayerKind.CONV for layer in identity.layers]
    pairs = zip(convolutions, identity.layers, strict=True)
    heads = [0 if conv else plane(layer, PlaneRole.KEY).row_shape[0] for conv, layer in pairs]
    model_id = prefix + tag + rest.removeprefix(given)
    return kvcache_file.model_fingerprint(model_id, about.architecture, about.hidden_size, about.n_heads, convolutions, heads)


def require_model(file: KvFile, about: About, identity: Identity) -> None:
    """FormatError unless the file is of the model it is said to be of; UnsupportedError for layers that
    cannot be taken."""
    if len(file.layers) != len(identity.layers):
        raise FormatError(f"the file has {len(file.layers)} layers, the model {len(identity.layers)}")
    for index, (layer, found) in enumerate(zip(identity.layers, file.layers, strict=True)):
        _require_kind(index, layer)
        if (layer.kind == LayerKind.CONV) != (found.tag == Tag.CONV):
            raise FormatError(f"layer {index} is {found.tag.name} in the file, {layer.kind.name} in the model")
        stored = {spec.format for spec in layer.planes}
        if (found.tag == Tag.TURBOQUANT) != (stored == {PlaneFormat.TQ_KEY, PlaneFormat.TQ_VALUE}):
            names = " and ".join(spec.format.name for spec in layer.planes)
            raise UnsupportedError(f"layer {index} is {found.tag.name} in the file, {names} in the model; nothing is converted")
    wanted = expected(identity, about, tuple(layer.tag for layer in file.layers))
    if file.fingerprint != wanted:
        raise FormatError(f"the file is of model {file.fingerprint:016x}, what is said of it makes {wanted:016x}")


def _require_kind(index: int, layer: LayerSpec) -> None:
    if layer.kind not in (LayerKind.FULL, LayerKind.CONV):
        raise UnsupportedError(f"layer {index} is {layer.kind.name}; these files hold full attention and convolutions only")


def _split(model_id: str) -> tuple[str, str]:
    """The backend's prefix, and what follows."""
    found = _PREFIX.match(model_id)
    return (found[0], model_id[found.end() :]) if found else ("", model_id)


def _given_tag(about: About) -> str:
    found = _TAG.match(_split(about.model_id)[1])
    return found[0] if found else ""
