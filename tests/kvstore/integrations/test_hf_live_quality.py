"""The quality harness on a tiny model: its sums against plain torch, its pieces against being stopped."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from warmkv.kernels.formats import RowFormat
from warmkv.kvstore.integrations.hf_live import attend_with_live

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

import quality  # noqa: E402
import quality_modes  # noqa: E402
import quality_pieces  # noqa: E402
from quality_modes import Mode, Setting, suite  # noqa: E402
from quality_pieces import Key, Piece, Pieces, total  # noqa: E402


def _live_models() -> ModuleType:
    path = Path(__file__).with_name("live_models.py")
    spec = importlib.util.spec_from_file_location("live_models", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules.setdefault("live_models", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


live_models = _live_models()
IDS = torch.randint(2, live_models.VOCABULARY, (200,), generator=torch.Generator().manual_seed(2))
KEY = Key("model", "text", "formats q8", 0, 48, 16, 0, "code")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    model: torch.nn.Module = attend_with_live(live_models.make("llama"))
    return model


def log_probabilities(ids: torch.Tensor) -> torch.Tensor:
    twin = live_models.make("llama")
    twin.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.log_softmax(twin(input_ids=ids[None], use_cache=False).logits[0].double(), dim=-1)


def test_sums_are_those_of_one_pass_of_the_librarys_own_attention(model: torch.nn.Module) -> None:
    modes = [mode for mode in suite("formats").modes if mode.name in ("f32", "q8")]
    (f32, _), (q8, _) = quality.measure(model, IDS[:51], modes, 16, Setting())
    expected = -log_probabilities(IDS[:50])[torch.arange(50), IDS[1:51]].sum()
    assert f32.scored == q8.scored == 50
    assert f32.nll == pytest.approx(float(expected), rel=1e-5)
    assert (f32.nll_f32, f32.kl, f32.agreed) == (f32.nll, 0.0, 50)
    assert q8.nll_f32 == f32.nll and 0 < q8.kl < 0.5 and q8.agreed > 25


def test_divergence_and_choices_are_those_of_the_definition() -> None:
    expected = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    found = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]]))
    sums = quality.Sums()
    sums.add(expected, found, torch.tensor([1, 1]))
    by_hand = 0.5 * torch.tensor(2.0).log() + 0.25 * torch.tensor(0.5).log()
    by_hand += 0.2 * torch.tensor(0.5).log() + 0.8 * torch.tensor(0.8 / 0.6).log()
    assert sums.kl == pytest.approx(float(by_hand), rel=1e-5)
    assert (sums.agreed, sums.scored) == (1, 2)
    assert sums.nll == pytest.approx(-float(torch.tensor([0.5, 0.6]).log().sum()), rel=1e-5)


@pytest.mark.parametrize("name", ["eviction", "nystrom"])
def test_suites_bound_what_they_say_and_score_behind_it(name: str, model: torch.nn.Module) -> None:
    chosen = suite(name, tokens=320, chunk=8)
    ids = IDS.repeat(2)[:321]
    budgets = {"full": 320, "nystrom": 0, "1/2": 160, "1/4": 80}
    for mode, (sums, cache) in zip(chosen.modes, quality.measure(model, ids, chosen.modes, 8, Setting()), strict=True):
        rows = max(layer.rows for layer in cache.live.layers)
        budget = next(most for part, most in budgets.items() if part in mode.name)
        assert rows <= budget and cache.get_seq_length() == 320
        assert sums.scored == 320 - mode.scored_from and sums.nll > 0
        assert (sums.kl == 0) == mode.baseline


def test_finished_pieces_are_not_measured_again(model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(suite("formats", tokens=48, chunk=16), modes=suite("formats").modes[:2])
    keys = {mode.name: [replace(KEY, mode=mode.name, window=window) for window in range(2)] for mode in chosen.modes}
    path = tmp_path / "pieces.jsonl"
    measured: list[tuple[str, int]] = []
    spied = quality.measure

    def measure(model: torch.nn.Module, ids: torch.Tensor, modes: list[Mode], chunk: int, setting: Setting) -> object:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.extend((mode.name, len(ids)) for mode in modes)
        return spied(model, ids, modes, chunk, setting)

    monkeypatch.setattr(quality, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        quality.run(model, IDS, chosen, keys, Pieces(path), Setting())
    monkeypatch.setattr(quality, "measure", spied)
    quality.run(model, IDS, chosen, keys, Pieces(path), Setting())
    monkeypatch.setattr(quality, "measure", lambda *_: pytest.fail("measured again"))
    pieces = Pieces(path)
    quality.run(model, IDS, chosen, keys, pieces, Setting())
    assert [found.key.window for found in pieces.of(keys["f16"])] == [0, 1]
    table = quality.report(chosen, keys, pieces)
    assert table.row_count == 2 and [column._cells[1] for column in table.columns][:2] == ["f16", "96"]


def test_a_torn_line_and_other_keys_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "pieces.jsonl"
    first, second = Piece(KEY, 10, 1.0, 2.0, 3.0, 4, 5, 6, 7.0), Piece(replace(KEY, window=1), 10, 1.0, 2.0, 3.0, 4, 5, 6, 7.0)
    Pieces(path).add(first)
    with path.open("a") as file:
        file.write('{"key": {"model": "mo')
    pieces = Pieces(path)
    pieces.add(second)
    again = Pieces(path)
    assert again.of([KEY, second.key]) == [first, second]
    assert replace(KEY, code="other") not in again and replace(KEY, text="other") not in again
    summed = total([first, second])
    assert summed is not None and (summed.scored, summed.nll, summed.agreed, summed.rows) == (20, 2.0, 8, 6)
    assert not Pieces(path, fresh=True).of([KEY]) and not path.exists()


def test_the_code_version_follows_the_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quality_pieces, "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "one.py"
    source.write_text("1")
    before = quality_pieces.code_version()
    source.write_text("2")
    assert quality_pieces.code_version() != before


def test_rotated_modes_are_compared_with_each_weight_of_their_signs() -> None:
    names = [mode.name for mode in suite("turboquant").modes]
    assert names[:3] == ["f32", "f16", "q8"] and len(set(names)) == len(names)
    for name, keys, values in quality_modes.modes(rotated=True):
        if keys.rotated or values.rotated:
            found = [mode for mode in names if mode.split()[0] == name]
            assert len(found) == (3 if keys is RowFormat.TQ_KEY else 1)


def test_every_storage_mode_of_the_plans_is_a_mode() -> None:
    plain = [name for name, _, _ in quality_modes.modes()]
    assert [mode.name for mode in suite("formats").modes] == plain
    blocks = [mode.name for mode in suite("blocks").modes]
    assert set(blocks) - set(plain) == {name for name, _, _ in quality_modes.modes(blocked=True)} - set(plain)
    assert len(set(blocks)) == len(blocks)
    with pytest.raises(ValueError, match="no suite"):
        suite("speed")
