"""Identity of a live torch model: everything that decides whether stored rows fit it now."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import cast

import torch
import transformers
from torch import nn
from transformers import PreTrainedTokenizerBase

from warmkv.kvstore.integrations.hf_adapters import active_adapters, base_model
from warmkv.kvstore.integrations.hf_cache import new_cache
from warmkv.kvstore.integrations.hf_geometry import Geometry, observe
from warmkv.kvstore.integrations.hf_rope import rope_regime
from warmkv.kvstore.integrations.hf_settings import class_name, observe_settings
from warmkv.kvstore.integrations.hf_tensors import TensorDigests, Weights
from warmkv.schema import canonical
from warmkv.schema.errors import UnsupportedError
from warmkv.schema.identity import SINGLE, Identity

#: What rows are: keys after the rotary embedding, values as projected; what states are: the tensors
#: of a layer's convolution and recurrence. All as a DynamicCache holds them.
STATE_VERSION = "dynamic-cache 1"
LAYOUT = "rows of (heads, head size)"


class ModelIdentity:
    """Computes the identity of one model and tokenizer, as they are at the time of asking.

    **Threading:** one caller at a time. Nothing about the model is changed; the first call, and
    the first after a change of configuration or dtype, runs up to five tokens through it."""

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, *, weights: Weights = "auto", salt: str | bytes | None = None
    ) -> None:
        self._model = model
        self._tokenizer = TokenizerDigest(tokenizer)
        self._tensors = TensorDigests(weights)
        self._tenant = b"none" if salt is None else tenant_digest(salt)
        self._geometry: tuple[object, Geometry] | None = None

    @property
    def geometry(self) -> Geometry:
        """What the model's cache looked like at the last `now`; the first one is made if need be."""
        if self._geometry is None:
            self.now()
        assert self._geometry is not None
        return self._geometry[1]

    def now(self, *, trust_version: bool = False) -> Identity:
        """The identity. ``trust_version`` reuses tensor digests whose version counters did not
        move, for a second look at a model whose content was just read.

        Raises UnsupportedError for a model, or a state of it, that is not served."""
        model, base = self._model, base_model(self._model)
        new_cache(base)  # refuses other kinds of layers before anything is read
        device = _one_device(base)
        if torch.is_autocast_enabled(device.type):
            raise UnsupportedError(
                f"autocast is active for {device.type}, which casts per operation; leave it or load the model in the dtype wanted"
            )
        facts = observe_settings(model)
        geometry = self._observe(base, facts.settings, device)
        return Identity(
            architecture=f"{getattr(base.config, 'model_type', 'none') or 'none'} {class_name(type(base))}",
            parameters=self._tensors.digest(facts.tensors, trust_version=trust_version),
            settings=facts.settings,
            adapters=active_adapters(model),
            layers=geometry.layers,
            compute_dtype=_name(_dtype(base)),
            attention=str(getattr(base.config, "_attn_implementation", None) or "none"),
            layout=f"{LAYOUT}, {geometry.device.type}",
            rope=rope_regime(base),
            tokenizer=self._tokenizer.now(),
            runtime=f"transformers {transformers.__version__} torch {torch.__version__}",
            runtime_state_version=STATE_VERSION,
            topology=SINGLE,
            tenant=self._tenant,
        )

    def _observe(self, base: nn.Module, settings: bytes, device: torch.device) -> Geometry:
        key = (settings, _dtype(base), device)
        if self._geometry is None or self._geometry[0] != key:
            rope_regime(base)  # a refusal must come before anything runs
            self._geometry = (key, observe(base, device))
        return self._geometry[1]


def tenant_digest(salt: str | bytes) -> bytes:
    """Digest that keeps namespaces of different salts apart without storing the salt."""
    data = salt.encode() if isinstance(salt, str) else salt
    return hashlib.blake2b(canonical.encode(("tenant", data)), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class _TokenizerKey:
    backend: int
    tokens: int
    template: str
    parts: bytes


class TokenizerDigest:
    """Digest of a tokenizer: its whole backend and its chat template. Padding and truncation
    are left out; they are set by calls and do not change what a text's tokens are."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._kept: tuple[_TokenizerKey, bytes] | None = None

    def now(self) -> bytes:
        """The digest; recomputed when vocabulary size, template, normaliser, pre-tokenizer,
        post-processor or decoder changed."""
        key = self._key()
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, self._digest(key))
        return self._kept[1]

    def _key(self) -> _TokenizerKey:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        names = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        parts = [_state(getattr(backend, name, None)) for name in names]
        template = json.dumps(getattr(self._tokenizer, "chat_template", None), sort_keys=True)
        return _TokenizerKey(id(backend), len(self._tokenizer), template, b"\0".join(parts))

    def _digest(self, key: _TokenizerKey) -> bytes:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            vocabulary = sorted(self._tokenizer.get_vocab().items())
            content = json.dumps([class_name(type(self._tokenizer)), vocabulary])
        else:
            content = _without_call_settings(backend.to_str())
        body = (content.encode("utf-8", "surrogatepass"), key.template)
        return hashlib.blake2b(canonical.encode(body), digest_size=16).digest()


def _without_call_settings(text: str) -> str:
    """A serialised backend without its padding and truncation, which come first in it: parsing
    the megabytes of vocabulary behind them would be most of the cost of starting a process."""
    head, mark, rest = text.partition('"added_tokens":')
    try:
        before = json.loads(head.rstrip(", \n") + "}")
    except ValueError:
        before = None
    if mark and isinstance(before, dict) and set(before) <= {"version", "truncation", "padding"}:
        return f"{before.get('version')} {rest}"
    document = json.loads(text)
    document.pop("padding", None)
    document.pop("truncation", None)
    return json.dumps(document, sort_keys=True)


def _state(part: object) -> bytes:
    state = getattr(part, "__getstate__", lambda: None)() if part is not None else None
    return state if isinstance(state, bytes) else repr(state).encode()


def _one_device(model: nn.Module) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedError(f"the model lies on {len(devices)} devices; one device is served until a later version")
    return devices.pop()


def _dtype(model: nn.Module) -> torch.dtype:
    return cast(torch.dtype, model.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
