"""Tiny random models: small enough for seconds, real enough to have every moving part."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from warmkv.kvstore.admission import Admission
from warmkv.kvstore.integrations.hf_cache import forward_argument, new_cache
from warmkv.kvstore.integrations.hf_feed import feed as feed_as_generate_does
from warmkv.kvstore.integrations.hf_geometry import Geometry
from warmkv.kvstore.restored import Restored, RestoredLayer, RestoredPlane
from warmkv.kvstore.results import Match, Saved
from warmkv.kvstore.resume import row_need
from warmkv.kvstore.rows import LayerRows, LayerState, PlaneRows
from warmkv.kvstore.store import Store, open_store
from warmkv.schema.errors import StoreError
from warmkv.schema.identity import Identity

VOCABULARY = 96
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if tools %}t{{ tools|length }} {% endif %}{% if add_generation_prompt %}w1 {% endif %}"
)

MakeModel = Callable[..., LlamaForCausalLM]


def _tiny_models() -> ModuleType:
    path = Path(__file__).with_name("tiny_models.py")
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("tiny_models", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


tiny_models = _tiny_models()


@pytest.fixture(autouse=True)
def every_prompt_is_asked_about(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than any store answers; what follows from that has tests of its
    own, which ask for the fixture ``measured``."""
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(Admission, "note_prefill", lambda *_: None)


@pytest.fixture
def measured() -> None:
    """Speeds count in this test."""


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)  # tiny models gain nothing from two, and wait for each other on a busy machine


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
def make_tiny() -> Callable[..., PreTrainedModel]:
    """Makes a tiny model of the kind named, see `tiny_models`."""
    make: Callable[..., PreTrainedModel] = tiny_models.make
    return make


@pytest.fixture(params=list(tiny_models.MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of model in turn."""
    return str(request.param)


@pytest.fixture
def tiny(kind: str) -> PreTrainedModel:
    model: PreTrainedModel = tiny_models.make(kind)
    return model


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


@pytest.fixture
def logits_of() -> Callable[..., torch.Tensor]:
    """Logits [tokens, vocabulary] of ids fed on top of a cache that holds ``start`` tokens, in
    pieces of ``step``; of one full forward pass without a cache where none is given."""

    def run(
        model: torch.nn.Module, ids: Sequence[int], cache: DynamicCache | None = None, start: int = 0, step: int = 1 << 20
    ) -> torch.Tensor:
        found = []
        with torch.no_grad():
            if cache is None:
                return torch.Tensor(model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0])
            for at in range(0, len(ids), step):
                piece = torch.tensor([list(ids[at : at + step])])
                output = feed_as_generate_does(model, cache, piece, start + at, logits=piece.shape[1])
                found.append(output.logits[0])  # type: ignore[attr-defined]
        return torch.cat(found)

    return run


@pytest.fixture
def as_restored() -> Callable[..., Restored]:
    """What a store hands back for records of ``length`` tokens, blocks split at ``cuts``: of each
    layer no more rows than it needs."""

    def restored_plane(plane: PlaneRows, pieces: Sequence[tuple[int, np.ndarray]]) -> RestoredPlane:
        starts, blocks = tuple(start for start, _ in pieces), tuple(np.array(block) for _, block in pieces)
        return RestoredPlane(plane.role, plane.format, plane.rows.shape[1:], blocks, starts)

    def make(geometry: Geometry, records: Sequence[LayerRows | LayerState], length: int, *cuts: int) -> Restored:
        layers = [RestoredLayer(index, {}, {}) for index in range(len(geometry.layers))]
        for record in records:
            layer, spec = layers[record.layer], geometry.layers[record.layer]
            for plane in record.planes:
                if isinstance(record, LayerState):
                    layer.states[plane.role] = restored_plane(plane, [(0, plane.rows)])
                    continue
                need = row_need(spec)
                assert need is not None
                edges = [sorted({*span, *(cut for cut in cuts if span[0] < cut < span[1])}) for span in need.required(length)]
                pairs = [pair for edge in edges for pair in pairwise(edge)]
                held = [(start, plane.rows[start - record.first : end - record.first]) for start, end in pairs]
                layer.planes[plane.role] = restored_plane(plane, held)
        return Restored(Match(identity=None, matched=length, usable=length), tuple(layers))  # type: ignore[arg-type]

    return make


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
