"""Identities, rows and prompts made up for tests.

`model_rows` is a stand-in for a causal model: each row is a function of all tokens and
attachments up to it, so an answer taken from another prefix can never look right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from warmkv.kvstore.rows import DTYPES, LayerRows, PlaneRows
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


def random_identity(
    layers: int = 2, heads: int = 2, dim: int = 8, format: PlaneFormat = PlaneFormat.F32, seed: int = 0  # noqa: A002
) -> Identity:  # fmt: skip
    """A full-attention model; another seed is another model of the same geometry."""
    planes = tuple(PlaneSpec(role, format, (heads, dim)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    digest = hashlib.blake2b(f"weights {seed}".encode(), digest_size=32).digest()
    return Identity(
        architecture="test", parameters=digest, settings=b"none", adapters=(),
        layers=tuple(LayerSpec(LayerKind.FULL, planes) for _ in range(layers)), compute_dtype="float32", attention="eager",
        layout="token-major", rope=RopeRegime("default", 10000.0, 1.0, dim, 4096, b"none"), tokenizer=b"none", runtime="test",
        runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def random_rows(identity: Identity, n: int, seed: int = 0) -> list[LayerRows]:
    """``n`` rows of random bits (NaN patterns among them) for every layer that has rows."""
    rng = np.random.default_rng(seed)
    return _rows(identity, lambda index, spec: rng.bytes(n * row_bytes(spec.format, spec.row_shape)))


def model_rows(
    identity: Identity, ids: Sequence[int], attachments: Sequence[Attachment] = (), lineage: Lineage = CLEAN
) -> list[LayerRows]:
    """What a causal model would compute: row i depends on everything at or before i."""
    seeds = np.empty(len(ids), np.uint64)
    begins = {item.start: item for item in attachments}
    digest = hashlib.blake2b(identity.canonical() + lineage, digest_size=8)
    for at, token in enumerate(ids):
        digest.update(int(token).to_bytes(4, "little"))
        if at in begins:
            digest.update(begins[at].digest + begins[at].length.to_bytes(8, "little"))
        seeds[at] = int.from_bytes(digest.copy().digest(), "little")

    def make(index: int, spec: PlaneSpec) -> bytes:
        size = row_bytes(spec.format, spec.row_shape)
        words = np.arange(-(-size // 8), dtype=np.uint64) + np.uint64((index * 16 + spec.role) << 32)
        return np.ascontiguousarray(_mix(seeds[:, None] ^ _mix(words)[None, :]).view(np.uint8)[:, :size]).tobytes()

    return _rows(identity, make)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finisher of splitmix64: neighbours become unrelated."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _rows(identity: Identity, make: Callable[[int, PlaneSpec], bytes]) -> list[LayerRows]:
    records = []
    for index, layer in enumerate(identity.layers):
        if layer.shared_with < 0:
            planes = tuple(
                PlaneRows(s.role, s.format, np.frombuffer(make(index, s), DTYPES[s.format]).reshape(-1, *s.row_shape))
                for s in layer.planes
            )
            records.append(LayerRows(index, planes))
    return records
