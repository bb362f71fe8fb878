"""A conversation edited in its middle, in a fresh process after the daemon was killed and started
again: every kind of model resumes at the anchor before the edit, with the answer of a cold run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, child_environ

TINY = Path(__file__).with_name("tiny_models.py")
TURNS = (20, 45, 75)
EDIT = 60

SCRIPT = """
import importlib.util, json, sys, torch, warmkv
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from warmkv.kvstore.integrations.transformers import PromptCache

role, socket, tiny, turns, edit = sys.argv[1:]
turns, edit = json.loads(turns), int(edit)
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("tiny_models", tiny)
tiny_models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tiny_models)
words = {f"w{index}": index for index in range(tiny_models.VOCABULARY)}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
ids = torch.randint(2, 90, (80,), generator=torch.Generator().manual_seed(11)).tolist()
found = {}
with warmkv.connect(socket, timeout_s=60, strict=True) as client:
    for kind in tiny_models.MODELS:
        model = tiny_models.make(kind)
        prompts = PromptCache(model, tokenizer, client, ack="disk")
        if role == "talk":
            got = prompts.generate(ids, anchors=turns, max_new_tokens=4, do_sample=False)
            found[kind] = [got.usable, got.saved.result(60).durable]
            assert client.flush(60)
            continue
        changed = [*ids[:edit], (ids[edit] + 1) % 90, *ids[edit + 1 :]]
        got = prompts.generate(changed, max_new_tokens=4, do_sample=False)
        got.saved.result(60)
        prompt = torch.tensor([changed])
        cold = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        found[kind] = [got.source, got.matched, got.usable, got.ids == tuple(cold[0].tolist())]
        prompts.release()
        again = prompts.generate(changed, max_new_tokens=4, do_sample=False)
        found[kind] += [again.usable, again.ids == got.ids]
print(json.dumps(found))
"""


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path_factory.mktemp("d")).start()
    try:
        yield daemon
    finally:
        daemon.kill()


def process(role: str, daemon: DaemonProcess) -> dict[str, list[object]]:
    command = [sys.executable, "-c", SCRIPT, role, str(daemon.socket), str(TINY), json.dumps(TURNS), str(EDIT)]
    done = subprocess.run(command, env=child_environ(), capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_edited_conversation_resumes_after_a_restart(served: DaemonProcess) -> None:
    talked = process("talk", served)
    assert set(map(tuple, talked.values())) == {(0, True)}
    served.kill()
    served.start()
    resumed = process("edit", served)
    assert resumed.keys() == talked.keys()
    for kind, found in resumed.items():
        # At the edit itself only models that keep all rows resume; where a chunk of 16 begins, one of chunks needs none.
        expected = {"llama": EDIT, "deepseek_v32": EDIT, "llama4": 48}.get(kind, 45)
        assert found == ["cold", EDIT, expected, True, 79, True], kind
