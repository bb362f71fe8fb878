"""Contract suites others can run against their own store or client, and what they are made of.

Subclass `StoreContract`, override its fixture ``opened``, and every promise the verbs make is
tried. Rows and states come from `model_rows`, `model_states` and `records_at`, a stand-in for a
causal model of any layer kinds; `NaiveStore` is the twin to compare with. `indexed` and `mirrored`
put a twin beside an index and beside an embedded store; import them from their modules.
"""

from __future__ import annotations

import pytest

_PARTS = (
    "anchors", "attachments", "comparison", "hybrids", "indexed", "keeping", "matching", "mirrored", "numbers", "opened",
    "refusals", "saving",
)  # fmt: skip
# Assertions of the suite explain themselves as those of a test module do.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from warmkv.kvstore.testing.comparison import (  # noqa: E402
    Rows,
    assert_contents,
    assert_rows,
    assert_states,
    plane_bits,
    positions,
    row_bits,
)
from warmkv.kvstore.testing.contract import StoreContract  # noqa: E402
from warmkv.kvstore.testing.naive import Expected, NaiveStore, common_prefix  # noqa: E402
from warmkv.kvstore.testing.opened import Opened, check_restore, entries, save  # noqa: E402
from warmkv.kvstore.testing.samples import (  # noqa: E402
    FOLDED,
    IMAGE,
    LATE_IMAGE,
    NEAR_IMAGE,
    OTHER_IMAGE,
    TOKENS,
    layer_of,
    mixed_identity,
    model_logits,
    model_rows,
    model_states,
    random_identity,
    random_mixture,
    random_prompt,
    random_rows,
    records_at,
)

__all__ = [
    "FOLDED", "IMAGE", "LATE_IMAGE", "NEAR_IMAGE", "OTHER_IMAGE", "TOKENS", "Expected", "NaiveStore", "Opened", "Rows",
    "StoreContract", "assert_contents", "assert_rows", "assert_states", "check_restore", "common_prefix", "entries", "layer_of",
    "mixed_identity", "model_logits", "model_rows", "model_states", "plane_bits", "positions", "random_identity",
    "random_mixture", "random_prompt", "random_rows", "records_at", "row_bits", "save",
]  # fmt: skip
