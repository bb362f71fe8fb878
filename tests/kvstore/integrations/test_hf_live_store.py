"""Live caches of a model saved to a store and found again: they go on bit for bit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers as t

from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.integrations.hf_live import LiveCache, attend_with_live
from warmkv.kvstore.integrations.hf_live_store import LiveStore
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.plan import NystromPlan, TurboQuantPlan, modes
from warmkv.kvstore.store import Store
from warmkv.schema.errors import RecordError


def _live_models() -> ModuleType:
    path = Path(__file__).with_name("live_models.py")
    spec = importlib.util.spec_from_file_location("live_models", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("live_models", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


live_models = _live_models()
IDS = torch.randint(2, live_models.VOCABULARY, (1, 100), generator=torch.Generator().manual_seed(5))
HELD = 80


def made(kind: str) -> t.PreTrainedModel:
    model: t.PreTrainedModel = attend_with_live(live_models.make(kind))
    return model


def feed(model: t.PreTrainedModel, cache: LiveCache, first: int, last: int, step: int = 100) -> torch.Tensor:
    found = []
    with torch.no_grad():
        for at in range(first, last, step):
            found.append(model(input_ids=IDS[:, at : min(at + step, last)], cache=cache).logits[0])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("llama", name) for name, _, _ in modes(rotated=True)), ("gemma3", "f32"), ("gpt_oss", "q8"), ("qwen3", "q8")],
)
@pytest.mark.parametrize("copy", [False, True], ids=["mapped", "copied"])
def test_a_loaded_cache_goes_on_as_the_live_one_did(
    kind: str, mode: str, copy: bool, store: Store, tokenizer: t.PreTrainedTokenizerFast
) -> None:
    model = made(kind)
    lives = LiveStore(model, tokenizer, store, mode)
    cache = lives.load(IDS)
    assert cache.get_seq_length() == 0
    feed(model, cache, 0, HELD, step=27)
    assert lives.save(IDS[:, : HELD + 1], cache)
    again = LiveStore(made(kind), tokenizer, store, mode).load(IDS, copy=copy)
    assert again.get_seq_length() == HELD
    assert (again.memory().mapped > 0) != copy
    assert torch.equal(feed(model, again, HELD, 100, step=3), feed(model, cache, HELD, 100, step=3))


def test_a_prefix_of_what_was_saved_is_found(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    model = made("llama")
    lives = LiveStore(model, tokenizer, store)
    cache = lives.new()
    feed(model, cache, 0, HELD)
    lives.save(IDS[:, :HELD], cache)
    other = torch.cat([IDS[:, :30], IDS[:, :10]], dim=1)
    assert lives.load(other).get_seq_length() == 30
    assert lives.load(IDS.flip(1)).get_seq_length() == 0


def test_modes_do_not_find_each_others_rows(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    model = made("llama")
    lives = LiveStore(model, tokenizer, store, "f32")
    cache = lives.new()
    feed(model, cache, 0, HELD)
    lives.save(IDS[:, :HELD], cache)
    assert LiveStore(model, tokenizer, store, "q8").load(IDS).get_seq_length() == 0


def test_rotated_rows_are_found_under_their_seed_and_estimator(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    """Rows of deeper layers depend on how the signs of keys below them counted."""
    model, plan = made("llama"), TurboQuantPlan(seed=7)
    cache = (lives := LiveStore(model, tokenizer, store, "turboquant", turboquant=plan)).new()
    feed(model, cache, 0, HELD)
    lives.save(IDS[:, :HELD], cache)
    for mode, other, held in (
        ("turboquant", plan, HELD), ("turboquant", TurboQuantPlan(seed=8), 0), ("turboquant", None, 0), ("tqk", plan, 0),
        ("turboquant", TurboQuantPlan(7, Estimator.MINIMUM_MSE), 0), ("tq3", plan, 0), ("f32", None, 0),
    ):  # fmt: skip
        assert LiveStore(model, tokenizer, store, mode, turboquant=other).load(IDS).get_seq_length() == held


def test_a_sealed_cache_is_found_under_its_lineage(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    model, plan = made("llama"), NystromPlan(landmarks=8, window=16, sinks=2, boundary=48)
    lives = LiveStore(model, tokenizer, store, nystrom=plan)
    cache = lives.new()
    feed(model, cache, 0, HELD)
    lives.save(IDS[:, :HELD], cache)
    assert lives.load(IDS).get_seq_length() == 0
    again = lives.load(IDS, lineage=cache.live.lineage)
    assert again.get_seq_length() == HELD
    assert torch.equal(feed(model, again, HELD, 100), feed(model, cache, HELD, 100))


@pytest.mark.parametrize("policy", [Recent(), Mass(sinks=2)], ids=lambda policy: str(policy.name))
def test_an_evicted_cache_is_found_at_its_own_end(
    policy: Recent | Mass, store: Store, tokenizer: t.PreTrainedTokenizerFast
) -> None:
    model = made("llama")
    lives = LiveStore(model, tokenizer, store, "q8", policy=policy, max_rows=40, keep_rows=32)
    cache = lives.new()
    feed(model, cache, 0, HELD, step=8)
    lives.save(IDS[:, :HELD], cache)
    again = lives.load(IDS, lineage=cache.live.lineage, gaps=True)
    assert again.get_seq_length() == HELD
    assert torch.equal(feed(model, again, HELD, 100, step=5), feed(model, cache, HELD, 100, step=5))
    assert lives.load(IDS[:, :60], lineage=cache.live.lineage, gaps=True).get_seq_length() == 0


def test_a_cache_of_other_tokens_or_another_plan_is_not_saved(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    model = made("llama")
    lives = LiveStore(model, tokenizer, store)
    cache = lives.new()
    feed(model, cache, 0, HELD)
    with pytest.raises(RecordError, match="80 tokens, 82 ids"):
        lives.save(IDS[:, : HELD + 2], cache)
    with pytest.raises(RecordError, match="another plan"):
        LiveStore(model, tokenizer, store, "q8").save(IDS[:, :HELD], cache)
    with pytest.raises(RecordError, match="another model's"):
        LiveStore(made("llama"), tokenizer, store).save(IDS[:, :HELD], cache)


def test_rows_of_another_backend_are_not_found(store: Store, tokenizer: t.PreTrainedTokenizerFast) -> None:
    """Backends round otherwise, and so do all rows behind the first layer."""
    pytest.importorskip("numba")
    model = made("llama")
    lives = LiveStore(model, tokenizer, store, backend="reference")
    cache = lives.new()
    feed(model, cache, 0, HELD)
    lives.save(IDS[:, :HELD], cache)
    assert LiveStore(model, tokenizer, store, backend="fast").load(IDS).get_seq_length() == 0
    assert LiveStore(model, tokenizer, store, backend="reference").load(IDS).get_seq_length() == HELD
