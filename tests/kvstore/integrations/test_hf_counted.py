"""A cache without rows counts its tokens, however they are fed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from warmkv.kvstore.integrations.hf_cache import new_cache
from warmkv.kvstore.integrations.hf_counted import CountedCache

MakeTiny = Callable[..., PreTrainedModel]


@pytest.fixture(params=["mamba", "mamba2"])
def linear(request: pytest.FixtureRequest, make_tiny: MakeTiny) -> PreTrainedModel:
    return make_tiny(request.param)


def feed(model: PreTrainedModel, cache: CountedCache, tokens: int) -> None:
    with torch.no_grad():
        model(input_ids=torch.ones((1, tokens), dtype=torch.long), use_cache=True, cache=cache)


@pytest.mark.parametrize("pieces", [(1,), (3,), (4,), (9,), (1, 1, 1), (5, 1, 1, 4, 1), (1, 2, 2, 1)])
def test_pieces_of_any_size_are_counted(linear: PreTrainedModel, pieces: tuple[int, ...]) -> None:
    cache = new_cache(linear)
    assert isinstance(cache, CountedCache) and cache.get_seq_length() == 0
    for number, piece in enumerate(pieces):
        feed(linear, cache, piece)
        assert cache.tokens == cache.get_seq_length() == sum(pieces[: number + 1])


def test_what_generate_feeds_is_counted(linear: PreTrainedModel) -> None:
    cache = new_cache(linear)
    ids = torch.arange(2, 12).unsqueeze(0)
    linear.generate(ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=5, do_sample=False)
    assert cache.tokens == 14


def test_copies_count_on_their_own(linear: PreTrainedModel) -> None:
    cache = new_cache(linear)
    feed(linear, cache, 5)
    twin = copy.deepcopy(cache)
    feed(linear, twin, 2)
    assert (cache.tokens, twin.tokens) == (5, 7)
    cache.reset()
    assert cache.tokens == 0


def test_other_models_get_the_librarys_own_cache(make_tiny: MakeTiny) -> None:
    for kind in ("llama", "lfm2", "nemotron_h", "falcon_h1", "gemma3n"):
        assert not isinstance(new_cache(make_tiny(kind)), CountedCache)
