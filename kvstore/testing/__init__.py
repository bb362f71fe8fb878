"""Contract suites others can run against their own store or client, and what they are made of.

Subclass `StoreContract`, override its fixture ``opened``, and every promise the verbs make is
tried. Rows come from `model_rows`, a stand-in for a causal model; `NaiveStore` is the twin to
compare with.
"""

from __future__ import annotations

import pytest

_PARTS = ("anchors", "attachments", "comparison", "keeping", "matching", "numbers", "opened", "refusals", "saving")
# Assertions of the suite explain themselves as those of a test module do.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from warmkv.kvstore.testing.comparison import Rows, assert_rows, row_bits  # noqa: E402
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
    model_rows,
    random_identity,
    random_rows,
)

__all__ = [
    "FOLDED", "IMAGE", "LATE_IMAGE", "NEAR_IMAGE", "OTHER_IMAGE", "TOKENS", "Expected", "NaiveStore", "Opened", "Rows",
    "StoreContract", "assert_rows", "check_restore", "common_prefix", "entries", "model_rows", "random_identity",
    "random_rows", "row_bits", "save",
]  # fmt: skip
