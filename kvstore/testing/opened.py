"""What every part of the contract stands on: an opened store, a model, and the two steps that
nearly every test takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from warmkv.kvstore.results import Saved
from warmkv.kvstore.testing.comparison import assert_rows, assert_states
from warmkv.kvstore.testing.samples import model_logits, model_rows, model_states, random_identity, records_at
from warmkv.kvstore.verbs import Verbs
from warmkv.schema.identity import Identity
from warmkv.schema.records import CLEAN


def save(opened: Verbs, identity: Identity, ids: Sequence[int], *, spare: int = 0, **options: Any) -> Saved:
    """Save what a runtime has after these ids, see `records_at`."""
    records = records_at(identity, ids, options.get("attachments", ()), options.get("lineage", CLEAN), spare=spare)
    return opened.save(identity, ids, records, **options)


def check_restore(opened: Verbs, identity: Identity, ids: Sequence[int], usable: int, **options: Any) -> None:
    """Match and restore agree on ``usable``; rows, states and logits are those of these ids."""
    about = options.get("attachments", ()), options.get("lineage", CLEAN)
    asked = {name: value for name, value in options.items() if name not in ("verify", "writable")}
    assert opened.match(identity, ids, **asked).usable == usable
    with opened.restore(identity, ids, **options) as restored:
        assert restored.usable == usable
        assert bool(restored) == (usable > 0)
        assert (restored.logits is not None) == (usable == len(ids))
        if usable:
            assert_rows(restored, model_rows(identity, ids, *about))
            before = tuple(item for item in about[0] if item.end <= usable)
            assert_states(restored, model_states(identity, ids[:usable], before, about[1]))
        else:
            assert restored.layers == () and restored.reason
        if restored.logits is not None:
            assert restored.logits.tobytes() == model_logits(identity, ids, *about).tobytes()


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
