"""Gemma 3 270M, whose windows of 512 tokens cannot be taken back: computed, killed, resumed elsewhere.

Process A answers a prompt of about 1,500 tokens and exits. The daemon is killed (SIGKILL) and started
again. Process B asks the same prompt, a follow-up, and the prompt with its last question changed; each
answer is compared with one that transformers alone computes from nothing, token by token and logit by
logit. Exits with 1 if a token differs, a logit differs by more than TOLERANCE, or nothing was resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from warmkv.daemon.testing import DaemonProcess  # noqa: E402 - after the environment

TEXT = Path(__file__).resolve().parents[1] / "agent_demo" / "system_prompt.md"
QUESTIONS = ("\n\nQuestion: which tool reads a file?\nAnswer:", "\n\nQuestion: which tool writes a file?\nAnswer:")
FOLLOW_UP = "\nQuestion: and which one lists a folder?\nAnswer:"
NEW_TOKENS = 16
#: Greatest difference of two logits in float32; the prefill in pieces rounds otherwise than one in a single pass.
TOLERANCE = 1e-3


@dataclass
class Run:
    """One answer. Times in seconds from the call to the first token."""

    what: str
    prompt_tokens: int
    source: str
    usable: int
    computed: int
    first_token_s: float
    cold_s: float = 0.0
    same_tokens: bool = True
    difference: float = 0.0


def load(model_dir: Path):  # type: ignore[no-untyped-def]
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_dir)


def prompts(tokenizer, tokens: int) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """The prompt with either question: `tokens` of text, then the question."""
    text = tokenizer(TEXT.read_text())["input_ids"][:tokens]
    return [[*text, *tokenizer(question, add_special_tokens=False)["input_ids"]] for question in QUESTIONS]


def timed(generate) -> tuple[float, object, object]:  # type: ignore[no-untyped-def]
    """Seconds to the first token, what `generate` returned, and the logits of each step."""
    import torch
    from transformers import LogitsProcessor, LogitsProcessorList

    class Recorder(LogitsProcessor):
        def __init__(self) -> None:
            self.first, self.scores = 0.0, []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.first = self.first or time.perf_counter() - began
            self.scores.append(scores[0].clone())
            return scores

    recorder = Recorder()
    began = time.perf_counter()
    found = generate(logits_processor=LogitsProcessorList([recorder]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return recorder.first, found, torch.stack(recorder.scores)


def ask(agent, what: str, ids: list[int]):  # type: ignore[no-untyped-def]
    first, answer, logits = timed(lambda **options: agent.generate(ids, **options))
    answer.saved.result(300)
    computed = answer.prompt_tokens - answer.usable
    return Run(what, answer.prompt_tokens, answer.source, answer.usable, computed, first), answer, logits


def compare(model, run: Run, ids: list[int], answer, logits) -> Run:  # type: ignore[no-untyped-def]
    """The same from nothing, by transformers alone."""
    import torch

    prompt = torch.tensor([ids])
    run.cold_s, cold, expected = timed(
        lambda **options: model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    )
    run.same_tokens = tuple(cold[0].tolist()) == answer.ids
    run.difference = float((logits - expected).abs().max())
    return run


def compute(given: argparse.Namespace) -> list[Run]:
    import warmkv
    from warmkv.kvstore.integrations.transformers import PromptCache

    model, tokenizer = load(given.model)
    with warmkv.connect(str(given.socket), timeout_s=60, strict=True) as client:
        ids = prompts(tokenizer, given.tokens)[0]
        text_tokens = given.tokens
        agent = PromptCache(model, tokenizer, client, ack="disk", anchors=lambda ids, *_: (text_tokens, len(ids) - 1))
        run, answer, _ = ask(agent, "process A, computed", ids)
        client.flush(300)
    (given.work / "answer.json").write_text(json.dumps(answer.ids))
    run.cold_s = run.first_token_s
    return [run]


def resume(given: argparse.Namespace) -> list[Run]:
    import warmkv
    from warmkv.kvstore.integrations.transformers import PromptCache

    model, tokenizer = load(given.model)
    one, other = prompts(tokenizer, given.tokens)
    before = json.loads((given.work / "answer.json").read_text())
    longer = [*before, *tokenizer(FOLLOW_UP, add_special_tokens=False)["input_ids"]]
    runs = []
    with warmkv.connect(str(given.socket), timeout_s=60, strict=True) as client:
        agent = PromptCache(model, tokenizer, client)
        for what, ids in (("the same prompt", one), ("a follow-up", longer), ("another question", other)):
            agent.release()
            run, answer, logits = ask(agent, f"process B, {what}", ids)
            runs.append(compare(model, run, ids, answer, logits))
        client.flush(300)
    return runs


def child(given: argparse.Namespace, role: str, daemon: DaemonProcess, work: Path) -> list[Run]:
    """Runs ``role`` in a process of its own."""
    command = [sys.executable, __file__, "--role", role, "--model", str(given.model), "--tokens", str(given.tokens)]
    done = subprocess.run(
        [*command, "--socket", str(daemon.socket), "--work", str(work)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    return [Run(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="what fetch_gemma.py made")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of text before the question")
    parser.add_argument("--role", choices=["compute", "resume"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        print(json.dumps([asdict(run) for run in (compute if given.role == "compute" else resume)(given)]))
        return 0
    with tempfile.TemporaryDirectory(prefix="warmkv-") as name:
        work = Path(name)
        with DaemonProcess(work, "--log-level", "warning") as daemon:
            runs = child(given, "compute", daemon, work)
            daemon.kill()
            daemon.start()
            runs += child(given, "resume", daemon, work)
            size = (daemon.store / "data.mdb").stat().st_size
    print(f"{'':36}{'prompt':>8}{'from':>6}{'usable':>8}{'computed':>10}{'TTFT':>9}{'cold':>9}  {'tokens':8}{'logits differ by'}")
    for run in runs:
        same = "" if run.what.startswith("process A") else f"{'same' if run.same_tokens else 'DIFFER':8}{run.difference:.1e}"
        print(
            f"{run.what:36}{run.prompt_tokens:8}{run.source:>6}{run.usable:8}{run.computed:10}"
            f"{run.first_token_s:8.2f}s{run.cold_s:8.2f}s  {same}"
        )
    print(f"{size / 1e6:.0f} MB on disk; the daemon was killed between A and B")
    resumed = runs[1:]
    return 0 if all(run.same_tokens and run.usable and run.difference <= TOLERANCE for run in resumed) else 1


if __name__ == "__main__":
    sys.exit(main())
