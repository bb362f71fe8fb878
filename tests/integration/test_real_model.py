"""A real model through a real daemon: restored rows bitwise, continuation bit for bit.

Two prefills of about 3,600 tokens in all; everything else is suffixes.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import warmkv
from warmkv.daemon.testing import DaemonProcess
from warmkv.kvstore.integrations.transformers import PromptCache

pytestmark = pytest.mark.real_model
DEMO = Path(__file__).resolve().parents[2] / "examples" / "agent_demo"
STEPS = 8


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> tuple[Any, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(model_dir)


def conversation(tokenizer: Any, question: int) -> list[int]:
    questions = json.loads((DEMO / "questions.json").read_text())
    messages = [
        {"role": "system", "content": (DEMO / "system_prompt.md").read_text()},
        {"role": "user", "content": questions[question]},
    ]
    return [int(i) for i in tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)]


def go_on(model: Any, cache: DynamicCache, suffix: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy ids and the logits of each step after feeding ``suffix`` to ``cache``."""
    ids, logits, feed = [], [], torch.tensor([suffix])
    with torch.inference_mode():
        for _ in range(STEPS):
            last = model(input_ids=feed, cache=cache, logits_to_keep=1).logits[0, -1]
            logits.append(last)
            ids.append(int(last.argmax()))
            feed = torch.tensor([[ids[-1]]])
    return ids, torch.stack(logits)


def assert_same_rows(ours: DynamicCache, theirs: DynamicCache, length: int) -> None:
    for mine, live in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, live.keys[:, :, :length])
        assert torch.equal(mine.values, live.values[:, :, :length])


def test_a_real_prompt_outlives_its_process(
    served: DaemonProcess, loaded: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = loaded
    first, second = conversation(tokenizer, 0), conversation(tokenizer, 1)
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert len(first) >= 3500 and len(second) - shared <= 32
    live = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([first]), cache=live, logits_to_keep=1)
    with warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
        agent = PromptCache(model, tokenizer, client, ack="disk")
        assert agent.store(first, live).durable
    twin = copy.deepcopy(live)
    twin.crop(shared - len(first))
    expected_ids, expected_logits = go_on(model, twin, second[shared:])

    served.kill()
    served.start()
    with warmkv.connect(str(served.socket), timeout_s=60, strict=True) as client:
        agent = PromptCache(model, tokenizer, client)
        for tier in ("cold", "warm"):
            assert client.match(agent.identity(), second).tier == tier
            cache = agent.load(second)
            assert cache.get_seq_length() == shared
            assert_same_rows(cache, live, shared)
            ids, logits = go_on(model, cache, second[shared:])
            assert ids == expected_ids and torch.equal(logits, expected_logits)
        # An exact retry leaves one token to feed.
        assert agent.load(first).get_seq_length() == len(first) - 1
        weight = model.model.norm.weight
        with torch.no_grad():
            kept = weight[0].clone()
            weight[0] += 1e-3
            assert client.match(agent.identity(), second).usable == 0
            weight[0] = kept
        assert client.match(agent.identity(), second).usable == shared
    cold = DynamicCache(config=model.config)
    cold_ids, cold_logits = go_on(model, cold, second)
    difference = float((cold_logits[0] - expected_logits[0]).abs().max())
    with capsys.disabled():
        same = cold_ids == expected_ids
        print(f"\nagainst one full cold prefill: same ids {same}, first logits differ by at most {difference:.2e}")
    assert np.isfinite(difference)
