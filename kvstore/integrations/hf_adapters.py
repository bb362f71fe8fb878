"""Active adapters of a live model: content digest and scale, whatever their names.

Adapter layers are recognised by their attributes, so that the adapter library is never imported
on a model that has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import nn

from warmkv.kvstore.integrations.hf_tensors import content_digest, require_plain
from warmkv.schema import canonical
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import AdapterRef

_SERVED = "peft.tuners.lora."


def base_model(model: nn.Module) -> nn.Module:
    """The language model itself, below an adapter library's wrapper."""
    unwrap = getattr(model, "get_base_model", None)
    return cast(nn.Module, unwrap()) if callable(unwrap) else model


def active_adapters(model: nn.Module) -> tuple[AdapterRef, ...]:
    """Adapters in force, in the order they are applied. One that was merged is part of the base
    weights, one that is disabled does nothing; neither is listed.

    Raises UnsupportedError for adapters whose effect on a row depends on later tokens, or that
    are not LoRA."""
    _require_prefix_pure(model)
    layers = [(name, module) for name, module in model.named_modules() if _is_adapter_layer(module)]
    for name, layer in layers:
        if not type(layer).__module__.startswith(_SERVED):
            raise UnsupportedError(
                f"adapter layer {name} is a {type(layer).__name__}; only LoRA can be served until a later version"
            )
    order: dict[str, None] = {}
    for _, layer in layers:
        order.update(dict.fromkeys(_in_force(layer)))
    return tuple(_reference(adapter, layers) for adapter in order)


def _reference(adapter: str, layers: list[tuple[str, nn.Module]]) -> AdapterRef:
    entries: list[canonical.Value] = []
    scales: list[float] = []
    for name, layer in layers:
        if adapter not in _in_force(layer):
            continue
        scale = float(getattr(layer, "scaling", {}).get(adapter, 1.0))
        scales.append(scale)
        for kind, tensor in _tensors(layer, adapter):
            require_plain(f"{name}.{kind}", tensor)
            entries.append((name, kind, str(tensor.dtype), tuple(tensor.shape), content_digest(tensor)))
    uniform = len(set(scales)) == 1
    digest = hashlib.blake2b(canonical.encode((entries, [] if uniform else scales)), digest_size=16).digest()
    return AdapterRef(digest, scales[0])


def _tensors(layer: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    for kind in cast(tuple[str, ...], layer.adapter_layer_names):
        held = getattr(layer, kind, None)
        if not isinstance(held, (Mapping, nn.ModuleDict, nn.ParameterDict)) or adapter not in held:
            continue
        item = held[adapter]
        if isinstance(item, torch.Tensor):
            yield kind, item
        elif isinstance(item, nn.Module):
            yield from ((f"{kind}.{name}", tensor) for name, tensor in item.named_parameters())


def _in_force(layer: nn.Module) -> list[str]:
    if bool(layer.disable_adapters):
        return []
    merged = set(cast(list[str], layer.merged_adapters))
    return [
        name for name in cast(list[str], layer.active_adapters) if name not in merged and name in getattr(layer, "scaling", {})
    ]


def _is_adapter_layer(module: nn.Module) -> bool:
    return all(
        hasattr(module, name) for name in ("adapter_layer_names", "active_adapters", "merged_adapters", "disable_adapters")
    )


def _require_prefix_pure(model: nn.Module) -> None:
    configs = getattr(model, "peft_config", None) or getattr(base_model(model), "peft_config", None) or {}
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if kind != "LORA":
            raise UnsupportedError(f"adapter {name!r} is of type {kind}; only LoRA can be served until a later version")
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise UnsupportedError(f"adapter {name!r} is switched on by later tokens, so a row depends on more than its prefix")
