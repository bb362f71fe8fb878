"""A real model on the live cache: the library's own choices, in floats and in eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from warmkv.kvstore.integrations.hf_live import LiveCache, attend_with_live

pytestmark = pytest.mark.real_model
TEXT = "The old harbour had been quiet since the ferry stopped. " * 12


def greedy(model: Any, ids: torch.Tensor, cache: LiveCache | None = None) -> list[int]:
    arguments = {} if cache is None else {"cache": cache}
    with torch.inference_mode():
        return [int(at) for at in model.generate(ids, max_new_tokens=12, do_sample=False, **arguments)[0, ids.shape[1] :]]


def logits(model: Any, ids: torch.Tensor, cache: LiveCache | None = None, size: int = 10_000) -> torch.Tensor:
    """Of every token, fed in pieces of ``size``."""
    with torch.inference_mode():
        if cache is None:
            return model(ids).logits[0]
        return torch.cat([model(part, cache=cache).logits[0] for part in ids.split(size, dim=1)])


def test_a_real_model_chooses_the_same_tokens_on_a_live_cache(model_dir: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model_dir)(TEXT, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    expected, exact = greedy(model, ids), logits(model, ids)
    attend_with_live(model)
    assert greedy(model, ids, LiveCache(model)) == expected
    assert (logits(model, ids, LiveCache(model), size=50) - exact).abs().max() < 1e-3
    assert (logits(model, ids, LiveCache(model, "q8")) - exact).abs().mean() < 0.1
