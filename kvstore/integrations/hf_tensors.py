"""Digests of a model's tensors as they are in memory.

A false hit is the worst thing a cache can do, so the bytes decide. Hashing runs at memory
speed; where that is still too slow, `version` trusts torch's change counter and a sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from warmkv.schema import canonical
from warmkv.schema.errors import UnsupportedError

Weights = Literal["auto", "version", "content"]
#: "auto" reads every byte at every call up to this many (about 0.1 s), in host memory.
CONTENT_BYTES = 2 << 30
#: Sampled cache lines of one tensor; tensors of fewer bytes than the sample are always read whole.
SAMPLE_LINES, LINE_BYTES = 256, 64
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


_weak_reference = cast(Callable[[torch.UntypedStorage], object], StorageWeakRef)


@dataclass(frozen=True, slots=True)
class _Kept:
    """``storage`` is a weak reference: while it lives, no other storage can take the old one's
    place in ``key``, even at the same address."""

    storage: object
    key: tuple[object, ...]
    sample: bytes
    digest: bytes


class TensorDigests:
    """Digest over a list of named tensors, with what can be kept between calls.

    ``weights`` decides when a digest counts as stale:

    - "content": always; every byte is read at every call.
    - "version": when a tensor's storage, address, version counter, shape, strides, dtype or
      device changed, or when a sample of 256 cache lines spread over it did. In-place operations
      bump the counter. Writes through ``.data`` or ``.numpy()`` do not: the sample notices those
      that touch much of a tensor, and may miss one that changes a few values of a large one.
    - "auto": content for models in host memory of up to 2 GiB, else version.

    **Threading:** one caller at a time."""

    def __init__(self, weights: Weights = "auto") -> None:
        if weights not in ("auto", "version", "content"):
            raise ValueError(f"weights is {weights!r}, expected 'auto', 'version' or 'content'")
        self._weights = weights
        self._kept: dict[str, _Kept] = {}

    def digest(self, tensors: Iterable[tuple[str, torch.Tensor]], *, trust_version: bool = False) -> bytes:
        """BLAKE2b-128 over name, dtype, shape and xxh3-128 of the bytes in row-major order of
        each tensor, sorted by name. ``trust_version`` asks for the quick answer whatever the
        setting. Raises UnsupportedError for a tensor whose bytes are not its value."""
        named = sorted(tensors, key=lambda item: item[0])
        for name, tensor in named:
            require_plain(name, tensor)
        content = not trust_version and self._reads_content(named)
        kept: dict[str, _Kept] = {}
        seen: dict[tuple[object, ...], bytes] = {}
        entries: list[canonical.Value] = []
        for name, tensor in named:
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if place not in seen:
                kept[name] = self._digest(name, tensor, content)
                seen[place] = kept[name].digest
            entries.append((name, str(tensor.dtype), tuple(tensor.shape), seen[place]))
        self._kept = kept
        return hashlib.blake2b(canonical.encode(entries), digest_size=16).digest()

    def _reads_content(self, named: list[tuple[str, torch.Tensor]]) -> bool:
        if self._weights != "auto":
            return self._weights == "content"
        in_host = all(tensor.device.type == "cpu" for _, tensor in named)
        return in_host and sum(tensor.nbytes for _, tensor in named) <= CONTENT_BYTES

    def _digest(self, name: str, tensor: torch.Tensor, content: bool) -> _Kept:
        key, sample = _key(tensor), b""
        old = self._kept.get(name)
        small = tensor.nbytes <= SAMPLE_LINES * LINE_BYTES
        if not small and not content:
            sample = _sample(tensor)
            if old is not None and key == old.key and sample == old.sample:
                return old
        elif not small:
            sample = _sample(tensor)
        return _Kept(_weak_reference(tensor.untyped_storage()), key, sample, content_digest(tensor))


def content_digest(tensor: torch.Tensor) -> bytes:
    """xxh3-128 of the tensor's bytes in row-major order."""
    return xxhash.xxh3_128_digest(_bytes(_flat(tensor)))


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """UnsupportedError unless the bytes in the tensor's storage are all there is to it."""
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"{name} is a {type(tensor).__name__} whose content cannot be digested until a later version")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"{name} has no memory (meta device); load the model's weights first")


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    # Inference tensors count no versions: a fresh object equals nothing, so they are read each time.
    version: object = object() if tensor.is_inference() else tensor._version
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = tensor.cpu().numpy()
    return array.data


def _sample(tensor: torch.Tensor) -> bytes:
    """Digest of 256 lines of 64 bytes, evenly spread over the tensor."""
    flat = _flat(tensor)
    step = max(LINE_BYTES, len(flat) // SAMPLE_LINES)
    lines = flat[: len(flat) // step * step].view(-1, step)[:, :LINE_BYTES]
    return xxhash.xxh3_128_digest(_bytes(lines.contiguous()))
