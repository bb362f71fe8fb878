"""Tiny random models: small enough for seconds, real enough to have every moving part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from warmkv.kvstore.integrations.hf_cache import forward_argument, new_cache
from warmkv.kvstore.restored import Restored
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.store import Store, open_store
from warmkv.schema.errors import StoreError
from warmkv.schema.identity import Identity

VOCABULARY = 96
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if tools %}t{{ tools|length }} {% endif %}{% if add_generation_prompt %}w1 {% endif %}"
)

MakeModel = Callable[..., LlamaForCausalLM]


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def make_model() -> MakeModel:
    """A model of 3 layers from a seed; keyword arguments override the configuration."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object) -> LlamaForCausalLM:
        settings: dict[str, object] = dict(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).to(dtype).eval()

    return make


@pytest.fixture
def model(make_model: MakeModel) -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Words "w0" to "w95" with a chat template."""

    def make(template: str = TEMPLATE, **special: str) -> PreTrainedTokenizerFast:
        words = {f"w{index}": index for index in range(VOCABULARY - 1)} | {"t1": VOCABULARY - 1}
        backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(2, VOCABULARY - 2, (40,), generator=generator).tolist()


@pytest.fixture
def feed() -> Callable[..., torch.Tensor]:
    """Feeds ids in the given pieces into a cache; the last position's logits."""

    def run(model: torch.nn.Module, cache: DynamicCache, *pieces: list[int]) -> torch.Tensor:
        with torch.no_grad():
            for piece in pieces:
                logits = model(input_ids=torch.tensor([piece]), use_cache=True, **{forward_argument(model): cache}).logits
        return logits[0, -1]

    return run


@pytest.fixture
def filled(feed: Callable[..., torch.Tensor]) -> Callable[..., DynamicCache]:
    """A cache that was fed ids in the given pieces."""

    def run(model: torch.nn.Module, *pieces: list[int]) -> DynamicCache:
        cache = new_cache(model)
        feed(model, cache, *pieces)
        return cache

    return run


class BrokenStore:
    """Every verb fails, in a way of the caller's choice; ``late`` misses, and fails in the future
    of a save only."""

    def __init__(self, error: Exception | None = None, late: bool = False) -> None:
        self.error = error or StoreError("the store is broken")
        self.late = late

    def match(self, *_: object, **__: object) -> Match:
        raise self.error

    def restore(self, target: Identity, *_: object, **__: object) -> Restored:
        if self.late:
            return Restored(Match(target))
        raise self.error

    def save(self, *_: object, **__: object) -> Saved:
        raise self.error

    def save_async(self, *_: object, **__: object) -> Future[Saved]:
        if not self.late:
            raise self.error
        future: Future[Saved] = Future()
        future.set_exception(self.error)
        return future


@pytest.fixture
def broken_store() -> type[BrokenStore]:
    return BrokenStore
