"""Everything about a live model that is not a tensor: configuration, switches, code.

Walks the module tree once and notes what could change the numbers: classes and their source,
scalar attributes, functions held as attributes, tensors that nobody registered. What cannot be
noted (hooks, replaced methods) is refused: a toggle that is overlooked would be a false hit,
one too many is only a miss.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import math
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import numpy as np
import torch
import xxhash
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from warmkv.schema.errors import UnsupportedError

Plain = Union[None, bool, int, float, str, list["Plain"]]

#: Configuration entries that say where a model came from or how results are wrapped.
VOLATILE_CONFIG = frozenset(
    "transformers_version _name_or_path name_or_path architectures dtype torch_dtype use_cache return_dict "
    "output_hidden_states output_attentions id2label label2id problem_type _commit_hash".split()
)
#: Attributes of modules that runtimes write for their own bookkeeping.
VOLATILE_ATTRIBUTES = frozenset(
    "training name_or_path loss_type generation_config all_tied_weights_keys warnings_issued hf_device_map peft_config "
    "prepare_inputs_for_generation base_model_prepare_inputs_for_generation kernel_config "
    "_is_hf_initialized _hf_hook _hf_peft_config_loaded".split()
)
_INTERNAL = frozenset(vars(nn.Module()))
#: Hooks that only look: they were installed by the library to collect outputs.
_OBSERVERS = frozenset({"transformers.utils.output_capturing"})
_LIBRARIES = frozenset({"torch", "transformers", "peft", "accelerate", "tokenizers", "numpy"})
_STANDARD = sys.stdlib_module_names - {"types"}
_code_digests: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Digest of all settings, and every tensor of the model by name (tied ones under each)."""

    settings: bytes
    tensors: tuple[tuple[str, torch.Tensor], ...]


def observe_settings(model: nn.Module) -> ModelFacts:
    """Facts about ``model`` as it is now; the same model gives the same facts in any process.

    Raises UnsupportedError for hooks and replaced forwards, for training with dropout and for
    attention that looks ahead."""
    walk = _Walk()
    modules = [walk.module(name, module) for name, module in walk.tree("", model)]
    facts: list[Plain] = [walk.value("config", getattr(model, "config", None)), numeric_switches(), list(modules)]
    return ModelFacts(hashlib.blake2b(_json(facts).encode(), digest_size=16).digest(), tuple(walk.tensors))


def numeric_switches() -> Plain:
    """Process-wide switches of torch that change what a matrix product or attention computes."""
    backends = torch.backends
    paths = (
        "cuda.matmul.fp32_precision cuda.matmul.allow_fp16_reduced_precision_reduction "
        "cuda.matmul.allow_bf16_reduced_precision_reduction cudnn.fp32_precision mkldnn.enabled mkldnn.matmul.fp32_precision "
        "cudnn.deterministic cudnn.benchmark"
    ).split()
    found: list[Plain] = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    for path in paths:
        value: object = backends
        for part in path.split("."):
            value = getattr(value, part, None)
        found.append([path, str(value)])
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    found.extend([kind, bool(getattr(backends.cuda, f"{kind}_sdp_enabled", bool)())] for kind in kinds)
    return found


def config_value(config: PreTrainedConfig) -> dict[str, object]:
    """The configuration without entries that cannot change the numbers."""
    return {key: value for key, value in config.to_dict().items() if key not in VOLATILE_CONFIG}


class _Walk:
    """One pass over a model. Notes tensors on the way; modules held outside the tree (in plain
    lists, say) are walked like registered ones."""

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._seen: set[int] = set()
        self._configs: dict[int, Plain] = {}

    def tree(self, prefix: str, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Modules below ``root`` in registration order, each once."""
        if id(root) not in self._seen:
            self._seen.add(id(root))
            yield prefix, root
            for name, child in root._modules.items():
                if child is not None:
                    yield from self.tree(f"{prefix}.{name}", child)

    def module(self, name: str, module: nn.Module) -> Plain:
        where = f"module {name.lstrip('.') or type(module).__name__}"
        _require_unhooked(where, module)
        _require_deterministic(where, module)
        for kind in (module._parameters, module._buffers):
            for key, tensor in kind.items():
                if tensor is not None:
                    self.tensors.append((f"{name}.{key}", tensor))
        attributes: list[Plain] = []
        library = isinstance(module, PreTrainedModel)
        for key, value in sorted(vars(module).items()):
            if key in _INTERNAL or key in VOLATILE_ATTRIBUTES or (key[0] == "_" and (library or not _scalar(value))):
                continue
            attributes.append([key, self.value(f"{name}.{key}", value)])
        compiled = module._compiled_call_impl is not None
        return [name, class_name(type(module)), code_digest(type(module)), compiled, attributes]

    def value(self, path: str, value: object) -> Plain:
        """``value`` as plain data that is equal whenever the value works alike."""
        if value is None or isinstance(value, (bool, int, str)):
            return value if not isinstance(value, enum.Enum) else [class_name(type(value)), value.name]
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, value))
            return "tensor"
        if isinstance(value, (np.ndarray, np.generic, bytes)):
            data = np.ascontiguousarray(value)
            return [str(data.dtype), list(data.shape), xxhash.xxh3_128_hexdigest(data.tobytes())]
        if isinstance(value, (list, tuple)):
            return [self.value(f"{path}.{index}", item) for index, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return sorted((self.value(path, item) for item in value), key=_json)
        if isinstance(value, dict):
            return sorted(([self.value(path, key), self.value(f"{path}.{key}", item)] for key, item in value.items()), key=_json)
        return self._object(path, value)

    def _object(self, path: str, value: object) -> Plain:
        if isinstance(value, nn.Module):
            return [self.module(name, module) for name, module in self.tree(path, value)]
        if isinstance(value, PreTrainedConfig):
            if id(value) not in self._configs:
                self._configs[id(value)] = self.value(path, config_value(value))
            return self._configs[id(value)]
        if isinstance(value, (torch.dtype, torch.device)):
            return str(value)
        if isinstance(value, functools.partial):
            return [self.value(path, value.func), self.value(path, value.args), self.value(path, value.keywords)]
        if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)):
            return [str(value.__module__), value.__qualname__, _bytecode(value)]
        kind = class_name(type(value))
        top = kind.partition(".")[0]
        if id(value) in self._seen or top in _LIBRARIES or top in _STANDARD or not hasattr(value, "__dict__"):
            return kind
        self._seen.add(id(value))
        return [kind, code_digest(type(value)), self.value(path, vars(value))]


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def code_digest(cls: type) -> str:
    """Digest of the source files that define ``cls`` and its bases (of their bytecode where there
    is no file), and of where its forward comes from: classes get patched and edited."""
    found = _code_digests.get(cls)
    if found is None:
        bases = [base for base in cls.__mro__ if base not in (object, nn.Module)]
        found = _code_digests[cls] = _json([[class_name(base), _source(base)] for base in bases])
    forward = getattr(cls, "forward", None)
    patched: Plain = None if forward is None else [str(forward.__module__), forward.__qualname__, _bytecode(forward)]
    return xxhash.xxh3_128_hexdigest(_json([found, patched]).encode())


def _source(cls: type) -> str:
    path = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return _file_digest(path) if path else _bytecode(cls)


@functools.cache
def _file_digest(path: str) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(Path(path).read_bytes())
    except OSError:
        return "unreadable"


def _bytecode(value: object) -> str:
    """Digest of what a function does: bytecode, names, constants and plain closure values, of it
    and of what it wraps; of a class, that of all its functions."""
    if isinstance(value, type):
        parts = [_bytecode(item) for _, item in sorted(vars(value).items()) if inspect.isfunction(item)]
        return xxhash.xxh3_128_hexdigest("".join(parts).encode())
    parts = []
    while value is not None:
        code = getattr(value, "__code__", None)
        if isinstance(code, types.CodeType):
            cells = [
                repr(c.cell_contents)
                for c in getattr(value, "__closure__", None) or ()
                if _filled(c) and _scalar(c.cell_contents)
            ]
            parts.append(_code_digest(code) + "".join(cells))
        value = getattr(value, "__wrapped__", None)
    return xxhash.xxh3_128_hexdigest("".join(parts).encode())


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


@functools.lru_cache(maxsize=4096)
def _code_digest(code: types.CodeType) -> str:
    constants: list[Plain] = []
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            constants.append(_code_digest(item))
        else:
            constants.append(repr(sorted(item, key=repr) if isinstance(item, frozenset) else item))
    return xxhash.xxh3_128_hexdigest(_json([code.co_code.hex(), list(code.co_names), constants]).encode())


def _require_unhooked(where: str, module: nn.Module) -> None:
    hooks: Iterable[Callable[..., object]] = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(getattr(hook, "__module__", None) not in _OBSERVERS for hook in hooks):
        raise UnsupportedError(f"{where} has forward hooks; what they do to the numbers cannot be known, so remove them first")
    if "forward" in vars(module):
        raise UnsupportedError(f"{where} has had its forward replaced; what that does to the numbers cannot be known")


def _require_deterministic(where: str, module: nn.Module) -> None:
    if vars(module).get("is_causal") is False:
        raise UnsupportedError(f"{where} attends to later tokens, so its rows depend on more than the prefix")
    if not module.training:
        return
    drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    drops = drops or any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items())
    if drops or isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise UnsupportedError(f"{where} is in training mode with active dropout or batch statistics; call model.eval() first")


def _scalar(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (bool, int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
