"""Live caches to and from records: the only place that knows both.

`layer_specs` says what a plan's layers keep, as an identity has it, `attention_of` how they are read;
`records_of` what a cache holds, for a save; `restore_into` fills a cache from what was restored, and
`on_prefix` has it attend over the restored rows where they were mapped. A cache whose rows have gaps
(`has_gaps`) is another identity's. `anchor_of` names the position a cache is at, with how far its rows were
shifted. `blobs_of` and `prepare_blobs` are for files of the CERA runtime. Caches on devices are filled and
saved like others; those over ranks have a module of their own, `bridge.ranks`.
"""

from __future__ import annotations

from warmkv.kvstore.bridge.anchors import anchor_of, shift_offset_of
from warmkv.kvstore.bridge.blobs import blobs_of, prepare_blobs
from warmkv.kvstore.bridge.restoring import on_prefix, restore_into
from warmkv.kvstore.bridge.saving import field_digests, has_gaps, records_of
from warmkv.kvstore.bridge.specs import attention_of, layer_specs

__all__ = [
    "anchor_of", "attention_of", "blobs_of", "field_digests", "has_gaps", "layer_specs", "on_prefix", "prepare_blobs",
    "records_of", "restore_into", "shift_offset_of",
]  # fmt: skip
