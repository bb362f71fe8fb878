"""The rotary embedding of a live model, as its modules resolved it.

Served are regimes whose rows are a function of position alone. Regimes that change with the
length of the sequence are refused: two rows of equal tokens may then differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from warmkv.kvstore.integrations.hf_tensors import content_digest
from warmkv.schema import canonical
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import RopeRegime

#: Kinds of the library that are computed once, whatever the length.
SERVED = frozenset({"default", "linear", "llama3", "yarn"})


def rope_regime(model: nn.Module) -> RopeRegime:
    """Regime of ``model``; kind "none" when it has no rotary embedding.

    Raises UnsupportedError for kinds that depend on the length of the sequence (dynamic,
    longrope), for several regimes in one model and for kinds this version does not know."""
    config = model.config
    parameters = _parameters(config)
    kinds = {str(parameters.get("rope_type") or parameters.get("type") or "default")} if parameters else set()
    frequencies: list[torch.Tensor] = []
    scalings: set[float] = set()
    for module in model.modules():
        own = [tensor for name, tensor in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        frequencies.extend(own)
        if own:
            kinds |= _declared(module)
            scalings.add(float(getattr(module, "attention_scaling", 1.0)))
    _require_served(kinds, config)
    if not frequencies and not parameters:
        return RopeRegime("none", 0.0, 1.0, 0, 0, b"none")
    if len(kinds) != 1 or len(scalings) > 1:
        raise UnsupportedError(
            f"the model's rotary embeddings are of kind {', '.join(sorted(kinds)) or 'unknown'}; one known kind is served"
        )
    entries = [(str(tensor.dtype), tuple(tensor.shape), content_digest(tensor)) for tensor in frequencies]
    digest = hashlib.blake2b(canonical.encode(entries), digest_size=16).digest() if entries else b"none"
    original = parameters.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
    rotary = 2 * int(frequencies[0].numel()) if frequencies else 0
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 0.0
    return RopeRegime(kinds.pop(), _number(base), scalings.pop() if scalings else 1.0, rotary, int(_number(original)), digest)


def _parameters(config: object) -> Mapping[str, object]:
    """The one set of rotary parameters of a configuration, in either of its spellings."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = cast(Mapping[str, object], found)
    nested = [item for item in found.values() if isinstance(item, Mapping)]
    if not nested:
        return found
    if any(item != nested[0] for item in nested):
        raise UnsupportedError("the model has rotary embeddings that differ by layer; one is served until a later version")
    return cast(Mapping[str, object], nested[0])


def _declared(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, Mapping):
        return {str(item) for item in kind.values()}
    return {kind} if isinstance(kind, str) else set()


def _require_served(kinds: set[str], config: object) -> None:
    for kind in sorted(kinds - SERVED):
        if "dynamic" in kind or "longrope" in kind:
            raise UnsupportedError(
                f"rotary embedding {kind!r} is refused: its rows depend on how the sequence reached its length"
            )
        raise UnsupportedError(f"rotary embedding {kind!r} is unknown to this version; served are {', '.join(sorted(SERVED))}")
    if getattr(config, "use_dynamic_ntk", False):
        raise UnsupportedError(
            "rotary embedding with dynamic NTK is refused: its rows depend on how the sequence reached its length"
        )
    if "mrope_section" in _parameters(config):
        raise UnsupportedError("rotary embedding with sections for images is refused until a later version")


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
