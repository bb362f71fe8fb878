"""The table of families that go on with several tokens at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from warmkv.kvstore.integrations import hf_versions
from warmkv.kvstore.integrations.hf_cache import new_cache
from warmkv.kvstore.integrations.hf_versions import CONTINUES, continues_at_once


@pytest.mark.parametrize(
    ("family", "version", "expected"),
    [
        ("lfm2", "5.14.9", False), ("lfm2", "5.15.0", True), ("lfm2", "5.15.0.dev0", True), ("lfm2", "6.0", True),
        ("qwen3_next", "5.7.1", False), ("qwen3_next", "5.8", True), ("mamba2", "5.23.0", False), ("mamba2", "5.24.0", True),
        ("mamba", "5.24.0", False), ("falcon_mamba", "99.0", False), ("jamba", "99.0", False), ("of tomorrow", "99.0", False),
        ("lfm2", "unknown", False),
    ],
)  # fmt: skip
def test_a_family_goes_on_from_its_floor(monkeypatch: pytest.MonkeyPatch, family: str, version: str, expected: bool) -> None:
    monkeypatch.setattr(hf_versions.transformers, "__version__", version)
    assert continues_at_once(family) == expected


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next", "mamba2", "falcon_h1", "nemotron_h", "inkling"], indirect=True)
def test_what_the_table_says_of_this_version_is_so(
    tiny: PreTrainedModel, prompt: list[int], logits_of: Callable[..., torch.Tensor]
) -> None:
    """Several tokens on a state are right, and would not be without it."""
    assert tiny.config.model_type in CONTINUES
    full = logits_of(tiny, prompt)[20:27]
    cache, emptied = new_cache(tiny), new_cache(tiny)
    logits_of(tiny, prompt[:20], cache)
    assert float((logits_of(tiny, prompt[20:27], cache, 20) - full).abs().max()) < 1e-5
    logits_of(tiny, prompt[:20], emptied)
    for layer in emptied.layers:
        for tensor in (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()):
            if tensor is not None:
                tensor.zero_()
    assert float((logits_of(tiny, prompt[20:27], emptied, 20) - full).abs().max()) > 1e-4
