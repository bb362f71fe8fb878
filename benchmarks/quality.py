"""What a storage mode, an eviction policy or O(1) attention costs in quality, on a real model and text.

    python benchmarks/quality.py --model FOLDER              # all suites, goes on where it was stopped
    python benchmarks/quality.py --model FOLDER --suite formats --window 2

The text is fed in chunks to one cache a mode, f32 and all others in step, so that the logits of a chunk
are compared while they are there. Reported for each mode: perplexity, the divergence of its next-token
distribution from that of f32 (KL, nats), and how often both would choose the same token.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402 - after the environment
from quality_modes import BASELINE, SUITES, Mode, Setting, Suite, suite  # noqa: E402
from quality_pieces import Key, Piece, Pieces, code_version, file_digest, total  # noqa: E402
from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from warmkv.kvstore.integrations.hf_live import LiveCache, attend_with_live  # noqa: E402

console = Console(highlight=False, width=130)


@dataclass(slots=True)
class Sums:
    """What one mode has gathered over a window."""

    nll: float = 0.0
    nll_f32: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    scored: int = 0
    seconds: float = 0.0

    def add(self, expected: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
        """Log-probabilities (tokens, vocabulary) of f32 and of the mode, and the tokens that came."""
        rows = torch.arange(len(targets))
        self.nll -= float(found[rows, targets].double().sum())
        self.nll_f32 -= float(expected[rows, targets].double().sum())
        self.kl += float((expected.exp() * (expected - found)).sum(dim=1).double().sum())
        self.agreed += int((expected.argmax(dim=1) == found.argmax(dim=1)).sum())
        self.scored += len(targets)


def measure(
    model: torch.nn.Module, ids: torch.Tensor, modes: Sequence[Mode], chunk: int, setting: Setting
) -> list[tuple[Sums, LiveCache]]:
    """Run ``modes`` and f32 in step over ``ids``, whose last token is only predicted."""
    base = LiveCache(model, BASELINE, backend=setting.backend, threads=setting.threads)
    runs = [(Sums(), base if mode.baseline else mode.make(model, setting)) for mode in modes]
    last = len(ids) - 1
    for at in range(0, last, chunk):
        piece, targets = ids[at : min(at + chunk, last)], ids[at + 1 : min(at + chunk, last) + 1]
        expected, base_s = _log_probabilities(model, base, piece)
        for mode, (sums, cache) in zip(modes, runs, strict=True):
            found, seconds = (expected, base_s) if mode.baseline else _log_probabilities(model, cache, piece)
            sums.seconds += seconds
            skipped = min(max(mode.scored_from - at, 0), len(piece))
            sums.add(expected[skipped:], found[skipped:], targets[skipped:])
        console.print(f"  {at + len(piece):>6} of {last} tokens", end="\r")
    return runs


def _log_probabilities(model: torch.nn.Module, cache: LiveCache, piece: torch.Tensor) -> tuple[torch.Tensor, float]:
    began = time.perf_counter()
    with torch.inference_mode():
        logits = model(input_ids=piece[None], cache=cache, use_cache=True).logits[0].float()
        seconds = time.perf_counter() - began
        return torch.log_softmax(logits, dim=-1), seconds


def run(
    model: torch.nn.Module, ids: torch.Tensor, chosen: Suite, keys: dict[str, list[Key]], pieces: Pieces, setting: Setting
) -> None:
    """Measure what is missing of a suite, window by window."""
    for window in range(len(next(iter(keys.values())))):
        missing = [mode for mode in chosen.modes if keys[mode.name][window] not in pieces]
        if not missing:
            continue
        part = ids[window * chosen.tokens : (window + 1) * chosen.tokens + 1]
        console.print(f"{chosen.name}, window {window}: {len(part) - 1} tokens, {', '.join(mode.name for mode in missing)}")
        for mode, (sums, cache) in zip(missing, measure(model, part, missing, chosen.chunk, setting), strict=True):
            held = max(getattr(layer, "rows", 0) for layer in cache.live.layers)
            piece = Piece(
                keys[mode.name][window], sums.scored, sums.nll, sums.nll_f32, sums.kl, sums.agreed,
                cache.memory().stored, held, sums.seconds,
            )  # fmt: skip
            pieces.add(piece)


def report(chosen: Suite, keys: dict[str, list[Key]], pieces: Pieces, *, markdown: bool = False) -> Table:
    """The table of a suite, as far as it is measured."""
    title = f"{chosen.name}: windows of {chosen.tokens} tokens in chunks of {chosen.chunk}"
    table = Table(title=title, box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for name in ("mode", "scored tokens", "perplexity", "f32's", "change", "KL, nats", "same choice", "bytes/token", "tokens/s"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode in chosen.modes:
        found = total(pieces.of(keys[mode.name]))
        if found is None:
            table.add_row(mode.name, *["-"] * 8)
            continue
        ours, f32 = exp(found.nll / found.scored), exp(found.nll_f32 / found.scored)
        windows = len(pieces.of(keys[mode.name]))
        table.add_row(
            mode.name, f"{found.scored:,}", f"{ours:.4f}", f"{f32:.4f}", f"{ours / f32 - 1:+.3%}",
            f"{found.kl / found.scored:.2e}", f"{found.agreed / found.scored:.3%}",
            f"{found.stored / found.rows:,.0f}" if found.rows else "-", f"{windows * chosen.tokens / found.seconds:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    options = _arguments()
    torch.set_num_threads(options.threads)
    text = options.text.read_text() if options.text else python_reference()
    text_digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    attend_with_live(model)
    weights = file_digest(sorted(options.model.glob("*.safetensors")))
    code = options.code or code_version()
    setting = Setting(options.backend, options.threads)
    pieces = Pieces(options.pieces, fresh=options.fresh)
    console.print(f"model {weights} text {text_digest} ({len(text):,} characters) code {code}")
    ids = None
    for name in options.suite or SUITES:
        chosen = suite(name, tokens=options.tokens, chunk=options.chunk)
        windows = options.windows or max(1, 8192 // chosen.tokens)
        keys = {
            mode.name: [
                Key(weights, text_digest, f"{name} {mode.name}", window, chosen.tokens, chosen.chunk, mode.scored_from, code)
                for window in range(windows)
            ]
            for mode in chosen.modes
        }
        if not options.table:
            if ids is None:
                ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
                console.print(f"{len(ids):,} tokens")
            if len(ids) < windows * chosen.tokens + 1:
                raise SystemExit(f"{len(ids)} tokens of text, {windows} windows of {chosen.tokens} and one more were asked for")
            run(model, ids, chosen, keys, pieces, setting)
        console.print(report(chosen, keys, pieces, markdown=options.markdown))


def python_reference() -> str:
    """The language reference that comes with Python itself, in the order of its topics."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=os.environ.get("WARMKV_TEST_MODEL"), help="folder that transformers loads")
    parser.add_argument("--text", type=Path, help="text to read (default: Python's own language reference)")
    parser.add_argument("--suite", action="append", choices=SUITES, help="may be repeated (default: all)")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a window (default: 8192 for formats, else 2048)")
    parser.add_argument("--chunk", type=int, default=0, help="tokens fed at once (default: 512 for formats, else 64)")
    parser.add_argument("--windows", type=int, default=0, help="windows of text (default: as many as make 8192 tokens)")
    parser.add_argument("--pieces", type=Path, default=Path(".demo/quality.jsonl"), help="file of finished pieces")
    parser.add_argument("--resume", dest="fresh", action="store_false", help="go on from the file of pieces (the default)")
    parser.add_argument("--fresh", action="store_true", help="forget the pieces there are")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the tables")
    parser.add_argument("--markdown", action="store_true", help="tables as docs/quality.md has them")
    parser.add_argument("--backend", choices=("auto", "fast", "reference"), default="auto")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--code", help="name of the code, where its digest would change for nothing")
    parser.set_defaults(fresh=False)
    options = parser.parse_args()
    if options.model is None:
        parser.error("--model FOLDER, or WARMKV_TEST_MODEL in the environment")
    options.model = Path(options.model)
    return options


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
