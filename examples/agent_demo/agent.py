"""One agent process of the demo: loads the model, talks, writes what it measured as JSON.

Roles: `first` asks without and with warmkv and talks several turns; `resume` is a later
process that continues the conversation from what the store kept. Both use plain transformers
as the reference: a cache that never left the process, fed the same ids in the same pieces.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LogitsProcessor, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

import warmkv
from warmkv.kvstore.integrations.transformers import PromptCache

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 32
Messages = list[dict[str, str]]


@dataclass
class Turn:
    """One answer: what was known, what was computed, how long until its first token."""

    process: str
    turn: int
    mode: str
    prompt_tokens: int
    suffix_tokens: int
    matched: int
    usable: int
    tier: str
    restore_ms: float
    first_token_s: float
    total_s: float
    text: str
    ids_digest: str
    logits_digest: str
    save_ms: float = 0.0
    durable: bool = False
    first_token_cold_s: float = 0.0
    extra: dict[str, object] = field(default_factory=dict)


class Clock(TextStreamer):
    """Streams the answer to the terminal and remembers when its first token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.began = time.perf_counter()
        self.first: float | None = None
        self.show = show
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen and self.first is None:
            self.first = time.perf_counter() - self.began
            if self.show:
                print(f"    [{self.first:6.2f} s] ", end="", flush=True)
        self._prompt_seen = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.show:
            print(text, end="\n" if stream_end else "", flush=True)


class Recorder(LogitsProcessor):
    """Digests the logits of every step, bit for bit."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.digest.update(scores.detach().contiguous().numpy().tobytes())
        return scores


class Plain:
    """The reference: transformers alone, with one cache that lives as long as the process."""

    def __init__(self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.cache = DynamicCache(config=model.config)
        self.ids: list[int] = []

    def ask(self, prompt: list[int], process: str, turn: int, show: bool) -> tuple[Turn, list[int]]:
        common = next(
            (i for i, (a, b) in enumerate(zip(self.ids, prompt, strict=False)) if a != b), min(len(self.ids), len(prompt))
        )
        common = min(common, len(prompt) - 1)
        if common < len(self.ids):
            if common:
                self.cache.crop(common - len(self.ids))
            else:
                self.cache = DynamicCache(config=self.model.config)
        clock, recorder = Clock(self.tokenizer, show), Recorder()
        ids = torch.tensor([prompt])
        output = self.model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), cache=self.cache, max_new_tokens=NEW_TOKENS, do_sample=False,
            streamer=clock, logits_processor=[recorder],
        )  # fmt: skip
        total = time.perf_counter() - clock.began
        sequence = output[0].tolist()
        self.ids = sequence[: self.cache.get_seq_length()]
        new = sequence[len(prompt) :]
        mode = "live" if common else "cold"
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        row = Turn(
            process, turn, f"plain {mode}", len(prompt), len(prompt) - common, common, common, mode, 0.0, clock.first or 0.0,
            total, text, ids_digest(new), recorder.digest.hexdigest(),
        )  # fmt: skip
        return row, new


def ids_digest(ids: list[int]) -> str:
    return hashlib.sha256(b",".join(str(i).encode() for i in ids)).hexdigest()


def ask_cached(
    agent: PromptCache, messages: Messages, tokenizer: PreTrainedTokenizerBase, process: str, turn: int
) -> tuple[Turn, str]:
    """Ask through warmkv and wait until the new state is on disk (after the answer)."""
    clock, recorder = Clock(tokenizer, True), Recorder()
    answer = agent.generate(messages, max_new_tokens=NEW_TOKENS, do_sample=False, streamer=clock, logits_processor=[recorder])
    total = time.perf_counter() - clock.began
    saved = answer.saved.result(timeout=300)
    save_ms = (time.perf_counter() - clock.began - total) * 1e3
    row = Turn(
        process, turn, "warmkv", answer.prompt_tokens, answer.suffix_tokens, answer.matched, answer.usable, answer.source,
        answer.restore_s * 1e3, clock.first or 0.0, total, answer.text, ids_digest(list(answer.new_ids)),
        recorder.digest.hexdigest(), save_ms, saved.durable,
        extra={"sent_bytes": saved.sent_bytes, "stored": saved.stored, "reason": saved.reason},
    )  # fmt: skip
    return row, answer.text


def warm_up(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """One short answer nobody sees: pages the weights in, compiles the chat template, starts
    threads. A runtime does this once, before it takes its first request, and keeps the garbage
    collector from walking what it loaded: that takes a quarter of a second in mid-answer."""
    ids = torch.tensor([render(tokenizer, [{"role": "user", "content": "Hello"}])])
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)  # type: ignore[operator]
    gc.collect()
    gc.freeze()


def load(model_dir: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    warm_up(model, tokenizer)
    print(f"  model loaded in {time.perf_counter() - began:.1f} s", flush=True)
    return model, tokenizer


def conversation(answers: list[str], question: int) -> Messages:
    """The messages up to and with question number ``question``, given the answers before it."""
    questions = json.loads((HERE / "questions.json").read_text())
    messages = [{"role": "system", "content": (HERE / "system_prompt.md").read_text()}]
    for index in range(question):
        messages.append({"role": "user", "content": questions[index]})
        messages.append({"role": "assistant", "content": answers[index]})
    return [*messages, {"role": "user", "content": questions[question]}]


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(i) for i in ids]


def first(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, client: warmkv.Client, turns: int, later: int
) -> dict[str, object]:
    """Ask without and with warmkv; then go on without it, as the twin of the later processes."""
    rows: list[Turn] = []
    print("  WITHOUT warmkv: the runtime has lost its cache, all of the prompt is computed", flush=True)
    plain = Plain(model, tokenizer)
    row, _ = plain.ask(render(tokenizer, conversation([], 0)), "A", 1, True)
    rows.append(row)
    print("  WITH warmkv: nothing is stored yet; computed once more, and kept", flush=True)
    agent = PromptCache(model, tokenizer, client, ack="disk")
    answers: list[str] = []
    for turn in range(turns):
        if turn:
            print(f"  turn {turn + 1}, from the live cache", flush=True)
        messages = conversation(answers, turn)
        cached, text = ask_cached(agent, messages, tokenizer, "A", turn + 1)
        rows.append(cached)
        if turn:
            row, _ = plain.ask(render(tokenizer, messages), "A", turn + 1, False)
            rows.append(row)
        answers.append(text)
    print("  the twin: the same conversation goes on in this process, without warmkv", flush=True)
    twins = list(answers)
    for turn in range(turns, turns + later):
        row, new = plain.ask(render(tokenizer, conversation(twins, turn)), "A", turn + 1, False)
        rows.append(row)
        twins.append(tokenizer.decode(new, skip_special_tokens=True))
    return {
        "rows": [asdict(row) for row in rows],
        "answers": answers,
        "control": control(model, tokenizer, client, agent, answers),
    }


def control(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, client: warmkv.Client, agent: PromptCache, answers: list[str]
) -> dict[str, object]:
    """Another model must miss: one weight changed in memory, then changed back."""
    ids = render(tokenizer, conversation(answers[:-1], len(answers) - 1))
    before = client.match(agent.identity(), ids).usable
    weight = next(model.parameters())
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] += 1e-3
        changed = client.match(agent.identity(), ids)
        weight[0, 0] = kept
    after = client.match(agent.identity(), ids).usable
    return {"usable_before": before, "usable_changed": changed.usable, "reason_changed": changed.reason, "usable_after": after}


def resume(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, client: warmkv.Client, process: str, answers: list[str]
) -> dict[str, object]:
    """Continue the conversation from the store; then prefill the same prompt cold, for comparison."""
    turn = len(answers)
    messages = conversation(answers, turn)
    agent = PromptCache(model, tokenizer, client, ack="disk")
    print("  WITH warmkv: continues where the other process stopped", flush=True)
    row, text = ask_cached(agent, messages, tokenizer, process, turn + 1)
    print("  WITHOUT warmkv, the same question: all of the prompt again", flush=True)
    cold, _ = Plain(model, tokenizer).ask(render(tokenizer, messages), process, turn + 1, True)
    row.first_token_cold_s = cold.first_token_s
    row.extra["same_ids_as_cold"] = row.ids_digest == cold.ids_digest
    return {"rows": [asdict(row), asdict(cold)], "answers": [*answers, text]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["first", "resume"])
    parser.add_argument("--process", default="A")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--later", type=int, default=2)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load(given.model)
    with warmkv.connect(given.socket, timeout_s=60.0, strict=True) as client, torch.inference_mode():
        if given.role == "first":
            result = first(model, tokenizer, client, given.turns, given.later)
        else:
            result = resume(model, tokenizer, client, given.process, json.loads(given.answers.read_text()))
    given.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
