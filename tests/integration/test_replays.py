"""Whole conversations replayed against a store: how much of each prompt is computed again?

A made-up hybrid model (full attention beside a recurrent layer) answers through the chat templates
of public families. Its prefill runs in pieces that end at planned anchors, and its state is kept at
each; nothing else can be resumed from. Clients do what clients do: strip thinking, turn JSON keys,
change an image, edit a message, come back in another process.

The oracle knows the conversation and the family's tags, and nothing of the planner: every tag and
every message begins and ends at a boundary, so does every image and every answer. On each turn
tokens recomputed <= distance to the last boundary shared with any earlier prompt + 8.
`pytest -s` prints a table.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from warmkv.kvstore.planning import Plan, encode, live_length, plan
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing.comparison import assert_rows, assert_states
from warmkv.kvstore.testing.samples import FULL, RECURRENT, mixed_identity, model_rows, model_states, records_at
from warmkv.schema.identity import Identity
from warmkv.schema.records import Attachment

FAMILIES = Path(__file__).resolve().parents[1] / "templates" / "families.py"
TURNS = 12
#: Positions each image takes.
IMAGE_ROWS = 16
#: States kept of one prompt at most: a few where conversations only grow, or all that are planned.
FEW, ALL_PLANNED = 2, 1000
SLACK = 8
MIB = 1 << 20
Message = dict[str, Any]


@pytest.fixture(scope="module")
def families() -> Any:
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    name = "warmkv_template_families"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAMILIES)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


# -- the oracle -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A sequence whose state was computed: what each position stands for, and true boundaries."""

    keys: np.ndarray
    boundaries: list[int]


def keys_of(ids: Sequence[int], images: Sequence[Attachment]) -> np.ndarray:
    """One number a position; those of an image follow from its digest and its place."""
    keys = np.array(ids, np.int64)
    for item in images:
        seed = int.from_bytes(hashlib.sha256(item.digest).digest()[:6], "little") + 2**40
        keys[item.start : item.start + item.length] = seed + np.arange(item.length)
    return keys


def agreeing(one: np.ndarray, other: np.ndarray) -> int:
    length = min(len(one), len(other))
    return int(np.argmin(np.append(one[:length] == other[:length], False)))


def boundaries_of(text: str, offsets: np.ndarray, messages: list[Message], special: Sequence[str]) -> set[int]:
    """Positions around every tag, and around what every message says, found by looking for it."""
    edges = {0}
    for tag in re.finditer("|".join(map(re.escape, special)), text):
        edges |= {tag.start(), tag.end()}
    at = 0
    for message in messages:
        for said in sayings(message):
            whole = text.find(said, at)
            found = whole if whole >= 0 else text.find(said.strip(), at)  # some templates trim
            if found >= 0:
                at = found + len(said if whole >= 0 else said.strip())
                edges |= {found, at}
    ends = offsets[:, 1]
    return {int(np.count_nonzero(ends <= edge)) for edge in edges}


def sayings(message: Message) -> list[str]:
    """What a message says: thinking apart from the rest."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    split = [piece for part in parts for piece in re.split("</?think>", part)]
    return [piece for piece in split if piece.strip()]


# -- the model and its cache ------------------------------------------------------------------


@dataclass
class Replay:
    """A conversation as client and model see it, and what came of each turn."""

    renderer: Any
    special: Sequence[str]
    store: Store
    identity: Identity = field(default_factory=lambda: mixed_identity(FULL, RECURRENT))
    known: list[Known] = field(default_factory=list)
    table: list[tuple[int, ...]] = field(default_factory=list)
    marker: int = -1
    snapshots: int = ALL_PLANNED
    kept: int = 0

    def ask(self, messages: list[Message], said: str, answer: Message, digests: Sequence[bytes] = ()) -> None:
        """One turn: restore, compute the rest in pieces, answer ``said``; history keeps ``answer``."""
        encoded = encode(self.renderer, messages)
        ids, images = self.fed(encoded.ids, digests)
        usable = self.restored(ids, images)
        anchored = self.last_common(keys_of(ids, images))
        self.table.append((len(messages), len(ids), anchored, usable, len(ids) - usable, len(ids) - anchored))
        assert len(ids) - usable <= len(ids) - anchored + SLACK
        planned = plan(self.renderer, messages, ids, attachments=images, beyond=usable, encoded=encoded)
        self.keep(planned, ids, images)
        # The answer: its own boundaries (a call begins, a thought ends), and its end if it is alive.
        sampled = self.renderer.tokenize(said)
        whole = [*ids, *sampled[0].tolist()]
        history = [*messages, answer]
        answered = plan(self.renderer, history, whole, attachments=images, beyond=len(ids), generation=False)
        self.keep(answered, whole, images)
        if live_length(self.renderer, messages, whole, answer, attachments=images) == len(whole):
            self.save(whole, images)
        self.remember(encoded, messages, ids, images)
        inside = boundaries_of(said, sampled[1], [answer], self.special)
        self.known.append(Known(keys_of(whole, images), sorted(len(ids) + edge for edge in {*inside, len(sampled[0])})))

    def keep(self, planned: Plan, ids: Sequence[int], images: Sequence[Attachment]) -> None:
        """A state at each of the best anchors, as a prefill in pieces leaves them."""
        for anchor in planned.best(self.snapshots):
            self.save(ids[: anchor.position], images, (anchor,))
            self.kept += 1

    def fed(self, written: np.ndarray, digests: Sequence[bytes]) -> tuple[list[int], list[Attachment]]:
        """Ids as fed: every image marker grown, its attachment beside it."""
        ids: list[int] = []
        images: list[Attachment] = []
        for item in written.tolist():
            if item == self.marker:
                images.append(Attachment(len(ids), IMAGE_ROWS, digests[len(images)]))
            ids += [item] * (IMAGE_ROWS if item == self.marker else 1)
        return ids, images

    def restored(self, ids: list[int], images: list[Attachment]) -> int:
        """Tokens resumed from; their rows and states are those of exactly this prefix."""
        with self.store.restore(self.identity, ids, attachments=images) as restored:
            usable = restored.usable
            assert usable < len(ids)
            if usable:
                before = tuple(item for item in images if item.end <= usable)
                assert all(item.start >= usable for item in images if item not in before)
                assert_rows(restored, model_rows(self.identity, ids[:usable], before))
                assert_states(restored, model_states(self.identity, ids[:usable], before))
            return usable

    def save(self, ids: Sequence[int], images: Sequence[Attachment], anchors: Sequence[Any] = ()) -> None:
        before = tuple(item for item in images if item.end <= len(ids))
        records = records_at(self.identity, ids, before)
        self.store.save(self.identity, ids, records, anchors=anchors, attachments=before)

    def last_common(self, keys: np.ndarray) -> int:
        """The last boundary shared with anything computed before, one token left to feed."""
        shared = [(agreeing(item.keys, keys), item.boundaries) for item in self.known]
        reachable = [edge for length, edges in shared for edge in edges if edge <= min(length, len(keys) - 1)]
        return max(reachable, default=0)

    def remember(self, encoded: Any, messages: list[Message], ids: list[int], images: list[Attachment]) -> None:
        text = boundaries_of(encoded.text, encoded.offsets, messages, self.special)
        grown = {edge + sum(item.length - 1 for item in self.before(encoded.ids, edge, images)) for edge in text}
        grown |= {edge for item in images for edge in (item.start, item.end)}
        inside = {edge for item in images for edge in range(item.start + 1, item.end)}
        self.known.append(Known(keys_of(ids, images), sorted(grown - inside)))

    def before(self, written: np.ndarray, edge: int, images: list[Attachment]) -> list[Attachment]:
        return images[: int(np.count_nonzero(written[:edge] == self.marker))]

    def report(self, title: str) -> None:
        print(f"\n{title}\n  turn  messages  tokens  last anchor  resumed at  recomputed  distance")
        for turn, row in enumerate(self.table, 1):
            print(f"  {turn:4d}  {row[0]:8d}  {row[1]:6d}  {row[2]:11d}  {row[3]:10d}  {row[4]:10d}  {row[5]:8d}")
        tokens, again = (sum(row[column] for row in self.table) for column in (1, 4))
        print(f"  {again} of {tokens} tokens computed, {self.kept} states kept at anchors, at most {self.snapshots} a prompt")


@pytest.fixture
def replaying(families: Any, tmp_path: Path) -> Iterator[Callable[..., Replay]]:
    """Makes replays over one store, and prints their tables."""
    made: list[Replay] = []
    store = open_store(tmp_path / "store", warm_bytes=256 * MIB, cold_bytes=512 * MIB)

    def make(renderer: Any, snapshots: int = ALL_PLANNED) -> Replay:
        marker = families.tokenizer().token_to_id("<|image_pad|>")
        made.append(Replay(renderer, families.SPECIAL, store, marker=marker, snapshots=snapshots))
        return made[-1]

    yield make
    for replay in made:
        replay.report(replay.renderer.family.name)
        replay.store.close()
    store.close()


# -- conversations ----------------------------------------------------------------------------

SYSTEM = "You look after a garden. Answer briefly, name plants in Latin, and never invent a date. " * 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use it to {name} what grows there.",
            "parameters": {"type": "object", "properties": {"bed": {"type": "string"}, "row": {"type": "integer"}}},
        },
    }
    for name in ("water", "inspect", "harvest")
]
CLOSING = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3-nothink": "<|im_end|>", "llama3": "<|eot_id|>"}
CLOSING |= {
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "plain": "\n",
    "vision": "<|im_end|>",
}
ALL = ("chatml", "qwen3", "qwen3-nothink", "llama3", "gemma", "mistral", "deepseek-r1", "plain")


def opening(family: Any) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}] if family.system else []


#: How messages begin: what merges with the newline or the space a template puts before them.
LEADS = ("", "\n", "\n\n", "  ", "\n  ", '"')


def question(turn: int) -> Message:
    return {"role": "user", "content": f"{LEADS[turn % 6]}Question {turn}: how are the beans in bed {turn * 7 % 11}?"}


def answer(turn: int, thought: str = "") -> str:
    said = f"Answer {turn}: Phaseolus vulgaris, {turn * 13 % 29} plants, all well.\nNext week more."
    return f"{thought}{LEADS[turn * 5 % 6]}{said}"


def spoken(family: Any, text: str) -> str:
    """What the model samples to say ``text``, with its closing tag."""
    lead = {"mistral": " ", "plain": " "}.get(family.name, "")
    return f"{lead}{text}{CLOSING[family.name]}"


def thinking(turn: int) -> str:
    return f"<think>\nTurn {turn}. Beans want water, and bed {turn % 5} is dry; the frost comes late this year.\n</think>\n\n"


def turned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(value)}
    return [turned(item) for item in value] if isinstance(value, list) else value


# -- replays ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_plain_chat(families: Any, replaying: Callable[..., Replay], name: str) -> None:
    family = families.FAMILIES[name]
    replay = replaying(family.renderer(), FEW)
    messages = opening(family)
    for turn in range(TURNS):
        messages = [*messages, question(turn)]
        said = answer(turn, "A thought first.\n</think>\n\n" if name == "deepseek-r1" else "")
        reply = {"role": "assistant", "content": said}
        replay.ask(messages, spoken(family, said), reply)
        messages = [*messages, reply]
    # An answer and a question at most, and the system prompt where a template moves it along.
    assert all(row[4] <= (400 if name == "mistral" else 100) for row in replay.table[1:])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-nothink", "deepseek-r1", "chatml"])
def test_thinking_stripped_from_history(families: Any, replaying: Callable[..., Replay], name: str) -> None:
    family = families.FAMILIES[name]
    replay = replaying(family.renderer(), FEW)
    messages = opening(family)
    for turn in range(TURNS):
        messages = [*messages, question(turn)]
        thought = thinking(turn) if name != "qwen3-nothink" else ""
        said = answer(turn, thought)
        opened = encode(replay.renderer, messages).text.endswith("<think>\n")
        reply = {"role": "assistant", "content": said}
        replay.ask(messages, spoken(family, said.removeprefix("<think>\n") if opened else said), reply)
        messages = [*messages, reply]
    assert all(row[3] > 100 for row in replay.table[1:])


def call(family: Any, turn: int, step: int, rng: random.Random) -> tuple[Message, str]:
    """A message with a call, and what the model samples to make it. Clients decode and encode
    arguments again: the order of their keys is nobody's in particular."""
    name = ("water", "inspect", "harvest")[(turn + step) % 3]
    arguments: dict[str, Any] = {"bed": f"bed {turn}.{step}", "row": turn * 3 + step, "depth": "as deep as the roots go"}
    keys = list(arguments)
    rng.shuffle(keys)
    made = {key: arguments[key] for key in keys}
    id_ = f"call{turn:03d}{step:02d}"
    thought = thinking(turn * 10 + step).removeprefix("<think>\n").removesuffix("\n</think>\n\n")
    body = json.dumps(arguments)
    samples = {
        "qwen3": f'<think>\n{thought}\n</think>\n\n<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {body}}}',
        "mistral": f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {body}, "id": "{id_}"}}]',
        "deepseek-r1": f"{thought}\n</think>\n\n<｜tool▁calls▁begin｜>function {name}\n{body}<｜tool▁calls▁end｜>",
    }
    samples["qwen3-nothink"] = samples["qwen3"].partition("</think>\n\n")[2]
    function = {"name": name, "arguments": json.dumps(made) if family.argument_text else made}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "type": "function", "function": function}]}
    if family.name == "qwen3":
        message["reasoning_content"] = thought
    return message, samples[family.name] + CLOSING[family.name]


@pytest.mark.parametrize("turning", [False, True], ids=["as it was", "turned JSON"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-nothink", "llama3", "mistral", "deepseek-r1"])
def test_agent_with_tools(families: Any, replaying: Callable[..., Replay], name: str, turning: bool) -> None:
    """Two calls a question. With ``turning``, the keys of an earlier call change their order from
    prompt to prompt, and halfway those of the first tool's schema."""
    family, rng = families.FAMILIES[name], random.Random(7)
    replay = replaying(family.renderer(TOOLS), ALL_PLANNED if turning else FEW)
    messages = opening(family)
    for turn in range(5):
        if turning and turn == 3:
            replay.renderer = family.renderer([turned(TOOLS[0]), *TOOLS[1:]])
        messages = [*messages, question(turn)]
        for step in range(2):
            made, sampled = call(family, turn, step, rng)
            replay.ask(messages, sampled, made)
            result = {
                "role": "tool",
                "tool_call_id": f"call{turn:03d}{step:02d}",
                "content": f"Bed {turn}.{step}: done,\n{turn} l",
            }
            messages = [*messages, made, result]
            if turning:
                messages = with_turned_call(family, messages, rng)
        said = answer(turn, "Enough.\n</think>\n\n" if name == "deepseek-r1" else "")
        reply = {"role": "assistant", "content": said}
        replay.ask(messages, spoken(family, said), reply)
        messages = [*messages, reply]
    assert len(replay.table) == 15
    if not turning and name not in ("mistral", "deepseek-r1"):
        assert all(row[4] <= 250 for row in replay.table[1:])


def with_turned_call(family: Any, messages: list[Message], rng: random.Random) -> list[Message]:
    """The conversation with the arguments of one of its last three calls turned."""
    calls = [at for at, item in enumerate(messages) if item.get("tool_calls")][-3:]
    at = rng.choice(calls)
    made = messages[at]["tool_calls"][0]
    arguments = made["function"]["arguments"]
    other = json.dumps(turned(json.loads(arguments))) if family.argument_text else turned(arguments)
    changed = {**messages[at], "tool_calls": [{**made, "function": {**made["function"], "arguments": other}}]}
    return [*messages[:at], changed, *messages[at + 1 :]]


def test_image_changed_in_the_third_message(families: Any, replaying: Callable[..., Replay]) -> None:
    """Two images, in messages 1 and 3; at turn 6 the second one is another, and stays it. Then
    another conversation asks something else about the first image."""
    family = families.VISION
    replay = replaying(family.renderer(), 2 * FEW)
    digests = [bytes([1]) * 32, bytes([2]) * 32]
    image, messages = {"type": "image"}, []
    for turn in range(TURNS):
        text = {"type": "text", "text": f"Look at picture {turn}: which plant, and is it well?"}
        parts = {0: [image, text], 1: [text, image, {"type": "text", "text": "Compare."}]}.get(turn, [text])
        messages = [*messages, {"role": "user", "content": parts}]
        if turn == 6:
            digests[1] = bytes([2]) * 31 + bytes([3])
        reply = {"role": "assistant", "content": [{"type": "text", "text": answer(turn)}]}
        replay.ask(messages, spoken(family, answer(turn)), reply, digests)
        messages = [*messages, reply]
    changed = replay.table[6]
    assert 0 < changed[3] <= changed[2] and changed[4] > 200  # not behind the image, and not from the start
    assert all(row[4] < 100 for turn, row in enumerate(replay.table) if turn not in (0, 6))
    other = [{"role": "user", "content": [image, {"type": "text", "text": "What colour has it?"}]}]
    replay.ask(other, spoken(family, "Green."), {"role": "assistant", "content": "Green."}, digests[:1])
    assert replay.table[-1][3] > IMAGE_ROWS


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "gemma", "plain"])
def test_edit_in_the_middle_after_a_restart(families: Any, replaying: Callable[..., Replay], tmp_path: Path, name: str) -> None:
    """At turn 8 the store was closed and opened again, and the fourth question is another one."""
    family = families.FAMILIES[name]
    replay = replaying(family.renderer())
    messages = opening(family)
    for turn in range(TURNS):
        if turn == 8:
            replay.store.close()
            replay.store = open_store(tmp_path / "store", warm_bytes=256 * MIB, cold_bytes=512 * MIB)
            at = next(index for index, item in enumerate(messages) if item["content"].endswith("in bed 6?"))
            messages = [*messages[:at], {"role": "user", "content": "\n\n\nAnd the peas?"}, *messages[at + 1 :]]
        messages = [*messages, question(turn)]
        reply = {"role": "assistant", "content": answer(turn)}
        replay.ask(messages, spoken(family, answer(turn)), reply)
        messages = [*messages, reply]
    edited, after = replay.table[8], replay.table[9]
    assert edited[4] > 100 and edited[3] > 100 and after[4] < 100


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3", "mistral", "deepseek-r1", "plain"])
def test_twenty_agents_share_the_system_prompt(families: Any, replaying: Callable[..., Replay], name: str) -> None:
    family = families.FAMILIES[name]
    replay = replaying(family.renderer(TOOLS if family.tools else None), FEW)
    for agent in range(20):
        asked = {"role": "user", "content": f"{LEADS[agent % 6]}{chr(65 + agent)}{' and the weeds' * (agent * agent % 23)}?"}
        said = answer(agent)
        replay.ask([*opening(family), asked], spoken(family, said), {"role": "assistant", "content": said})
    assert all(row[3] > 150 for row in replay.table[1:])


def test_replayed_prompt_is_a_hit(families: Any, replaying: Callable[..., Replay]) -> None:
    """An exact retry computes no more than a few tokens, on every family."""
    for name, tools in itertools.product(ALL, (None, TOOLS)):
        family = families.FAMILIES[name]
        if tools and not family.tools:
            continue
        replay = replaying(family.renderer(tools))
        messages = [*opening(family), question(1)]
        reply = {"role": "assistant", "content": answer(1)}
        for _ in range(2):
            replay.ask(messages, spoken(family, answer(1)), reply)
        assert replay.table[1][4] <= SLACK + 1
