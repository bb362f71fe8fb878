"""A HuggingFace model whose cache is ours: generate, save, stop, and go on in another process.

    python examples/agent_demo/fetch_model.py --help            # a small model, once
    python examples/live_cache/chat.py FOLDER --store /tmp/live
    python examples/live_cache/chat.py FOLDER --store /tmp/live # the prompt is not computed again
    python examples/live_cache/chat.py FOLDER --both            # both, in two processes, and compared

The model is loaded as always. Two things are different: it attends with our kernels, and its cache is a
LiveCache, here in 8 bits. What the cache holds is kept in a folder (a daemon would do as well:
`warmkv.connect()` in place of `open_store`), under the identity of exactly this model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT = (
    "Here is the log book of a small harbour, kept by its master over one autumn.\n"
    + "".join(
        f"Day {day}: wind from the {wind}, {boats} boats in, the ferry {ferry}.\n"
        for day, (wind, boats, ferry) in enumerate(
            [("west", 12, "on time"), ("north", 4, "cancelled"), ("south", 9, "late"), ("east", 7, "on time")] * 12, start=1
        )
    )
    + "Question: what can be said about the ferry on days with wind from the north?\nAnswer:"
)


def run(folder: Path, store_folder: Path, mode: str, tokens: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from warmkv import open_store
    from warmkv.kvstore.integrations.hf_live import attend_with_live
    from warmkv.kvstore.integrations.hf_live_store import LiveStore

    model = attend_with_live(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids

    with open_store(store_folder) as store:
        caches = LiveStore(model, tokenizer, store, mode)
        began = time.perf_counter()
        cache = caches.load(ids)
        found = cache.get_seq_length()
        print(f"{found} of {ids.shape[1]} tokens were stored, loaded in {time.perf_counter() - began:.3f} s")

        began = time.perf_counter()
        answer = model.generate(ids, cache=cache, max_new_tokens=tokens, do_sample=False)
        print(f"{answer.shape[1] - ids.shape[1]} tokens generated in {time.perf_counter() - began:.2f} s, prompt included")

        held = cache.memory()
        rows = cache.get_seq_length()
        print(f"{mode}: {held.stored + held.mapped:,} bytes of {rows} tokens, of these {held.mapped:,} where the store has them")
        saved = caches.save(answer, cache, ack="disk")
        print(
            f"saved: rows from token {saved.start} on, {saved.sent_bytes:,} bytes"
            if saved.stored
            else f"not saved: {saved.reason}"
        )
    text: str = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
    return text


def both(options: argparse.Namespace) -> None:
    """Two processes, one after the other; the second must find the first one's prompt and answer alike."""
    with tempfile.TemporaryDirectory(prefix="live-cache-") as folder:
        command = [sys.executable, __file__, str(options.model), "--store", folder, "--mode", options.mode]
        command += ["--tokens", str(options.tokens)]
        answers = []
        for name in ("first process", "second process"):
            print(f"--- {name}", flush=True)
            output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
            print(output, end="", flush=True)
            answers.append(output.partition("answer: ")[2])
    if answers[0] != answers[1]:
        raise SystemExit("the two processes answered differently")
    print("--- both answered the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a model that transformers loads")
    parser.add_argument("--store", type=Path, default=Path("live-cache"), help="folder of the store")
    parser.add_argument("--mode", default="q8", help="f32, f16, bf16, q8, q8k or q8v")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    parser.add_argument("--both", action="store_true", help="run twice, in two processes, with a store of their own")
    options = parser.parse_args()
    if options.both:
        both(options)
    else:
        print("answer:", run(options.model, options.store, options.mode, options.tokens))


if __name__ == "__main__":
    main()
