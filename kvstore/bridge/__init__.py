"""Live caches to and from records: the only place that knows both.

`layer_specs` says what a plan's layers keep, as an identity has it; `records_of` what a cache holds, for
a save; `restore_into` fills a cache from what was restored, and `on_prefix` has it attend over the
restored rows where they were mapped. A cache whose rows have gaps (`has_gaps`) is another identity's.
"""

from __future__ import annotations

from warmkv.kvstore.bridge.restoring import on_prefix, restore_into
from warmkv.kvstore.bridge.saving import field_digests, has_gaps, records_of
from warmkv.kvstore.bridge.specs import layer_specs

__all__ = ["field_digests", "has_gaps", "layer_specs", "on_prefix", "records_of", "restore_into"]
