"""The rotary embeddings of a live model, as its modules resolved them.

Served are regimes whose rows are a function of position alone. Regimes that change with the
length of the sequence are refused: two rows of equal tokens may then differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TypeVar, cast

import torch
from torch import nn

from warmkv.kvstore.integrations.hf_tensors import content_digest
from warmkv.schema import canonical
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import RopeRegime

#: Kinds of the library that are computed once, whatever the length.
SERVED = frozenset({"default", "linear", "llama3", "yarn"})
#: The layer type that speaks for a model whose regimes differ by layer type.
SPOKESMAN = "full_attention"

Parameters = Mapping[str, object]
_Item = TypeVar("_Item")


def rope_regime(model: nn.Module) -> RopeRegime:
    """Regime of ``model``; kind "none" when it has no rotary embedding.

    Where regimes differ by layer type, kind, base, scaling and sizes are those of full attention
    (of the first type by name, if there is none); ``frequencies`` digests the parameters of every
    type and all inverse frequencies. Raises UnsupportedError for kinds that depend on the length
    of the sequence (dynamic, longrope) in any layer, and for kinds this version does not know."""
    config = model.config
    sets = _parameter_sets(config)
    kinds = {_kind(parameters) for parameters in sets.values()}
    frequencies: dict[str, torch.Tensor] = {}
    scalings: dict[str, float] = {}
    for where, module in model.named_modules():
        own = {name: tensor for name, tensor in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
        if own:
            kinds |= _declared(module)
            frequencies |= {f"{where}.{name}": tensor for name, tensor in own.items()}
            scalings |= {f"{where}.{name}": value for name, value in _scalings(module)}
    _require_served(kinds, sets, config)
    if not frequencies and not sets:
        return RopeRegime("none", 0.0, 1.0, 0, 0, b"none")
    chosen = SPOKESMAN if SPOKESMAN in sets else min(sets, default="")
    if len(sets) == 1 and (len(kinds) != 1 or len(set(scalings.values())) > 1):
        raise UnsupportedError(
            f"the model's rotary embeddings are of kinds {', '.join(sorted(kinds))} under one set of parameters"
        )
    parameters = sets.get(chosen, {})
    kind = _kind(parameters) if sets else kinds.pop() if len(kinds) == 1 else ""
    if not kind:
        raise UnsupportedError("the model has rotary embeddings of unknown kind; one known kind is served")
    original = parameters.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
    base = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 0.0
    rotary = 2 * int(_of(chosen, frequencies, torch.empty(0)).numel())
    digest = _digest(sets, frequencies, scalings)
    return RopeRegime(kind, _number(base), _of(chosen, scalings, 1.0), rotary, int(_number(original)), digest)


def _parameter_sets(config: object) -> dict[str, Parameters]:
    """Rotary parameters of a configuration, in either of its spellings, by layer type; under ""
    where one set is for all. Layer types without rotary embedding are left out."""
    found = cast(Parameters, getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    nested = {str(name): item for name, item in found.items() if isinstance(item, Mapping)}
    if not nested:
        return {"": found} if found else {}
    first = next(iter(nested.values()))
    return {"": first} if all(item == first for item in nested.values()) else nested


def _kind(parameters: Parameters) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _declared(module: nn.Module) -> set[str]:
    kind = getattr(module, "rope_type", None)
    if isinstance(kind, Mapping):
        return {str(item) for item in kind.values()}
    return {kind} if isinstance(kind, str) else set()


def _scalings(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Factors on the rotations that a module holds, by attribute: one, or one a layer type."""
    found = {name: float(value) for name, value in vars(module).items() if name.endswith("attention_scaling")}
    yield from (found or {"attention_scaling": 1.0}).items()


def _require_served(kinds: set[str], sets: Mapping[str, Parameters], config: object) -> None:
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
    if any("mrope_section" in parameters for parameters in sets.values()):
        raise UnsupportedError("rotary embedding with sections for images is refused until a later version")


def _of(layer_type: str, found: Mapping[str, _Item], default: _Item) -> _Item:
    """The item of a layer type, by the name of its attribute; the first one where none has its name."""
    named = (item for name, item in found.items() if layer_type and f".{layer_type}_" in f".{name}")
    return next(named, next(iter(found.values()), default))


def _digest(sets: Mapping[str, Parameters], frequencies: Mapping[str, torch.Tensor], scalings: Mapping[str, float]) -> bytes:
    entries = [(str(tensor.dtype), tuple(tensor.shape), content_digest(tensor)) for tensor in frequencies.values()]
    if len(sets) > 1:
        spelled = [
            (name, tuple(sorted((key, repr(value)) for key, value in item.items()))) for name, item in sorted(sets.items())
        ]
        body: canonical.Value = (spelled, list(frequencies), entries, sorted(scalings.items()))
    elif entries:
        body = entries
    else:
        return b"none"
    return hashlib.blake2b(canonical.encode(body), digest_size=16).digest()


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
