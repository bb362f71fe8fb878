"""What every part of the contract stands on: an opened store, a model, and the two steps that
nearly every test takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from warmkv.kvstore.results import Saved
from warmkv.kvstore.testing.comparison import assert_rows
from warmkv.kvstore.testing.samples import model_rows, random_identity
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN


def save(opened: Verbs, identity: Identity, ids: Sequence[int], **options: Any) -> Saved:
    """Save the rows `model_rows` gives for these ids."""
    rows = model_rows(identity, ids, options.get("attachments", ()), options.get("lineage", CLEAN))
    return opened.save(identity, ids, rows, **options)


def check_restore(opened: Verbs, identity: Identity, ids: Sequence[int], usable: int, **options: Any) -> None:
    """Match and restore agree on ``usable``, and its rows are those of these ids."""
    rows = model_rows(identity, ids, options.get("attachments", ()), options.get("lineage", CLEAN))
    asked = {name: value for name, value in options.items() if name not in ("verify", "writable")}
    assert opened.match(identity, ids, **asked).usable == usable
    with opened.restore(identity, ids, **options) as restored:
        assert restored.usable == usable
        assert bool(restored) == (usable > 0)
        if usable:
            assert_rows(restored, rows)
        else:
            assert restored.layers == () and restored.reason


def entries(opened: Verbs) -> object:
    return opened.stats()["entries"]


class Opened:
    """The fixtures of the contract. ``cold`` says whether disk acknowledgements are possible."""

    cold: ClassVar[bool] = True

    @pytest.fixture
    def opened(self) -> Iterator[Verbs]:
        """An empty store, closed afterwards. A client must be strict."""
        raise NotImplementedError("override the fixture `opened`")

    @pytest.fixture
    def identity(self) -> Identity:
        return random_identity()
