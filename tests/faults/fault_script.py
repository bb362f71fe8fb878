"""What a store lives through before it is killed: a seed decides every step of it.

Whoever knows the seed knows every prompt, its rows and states, and the order of the verbs, so
what a dead process acknowledged can be told from what it only began, and every byte compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from warmkv.kvstore.testing.samples import FULL, OPAQUE, RECURRENT, mixed_identity, random_identity, sliding
from warmkv.schema.identity import Identity

#: Half a KiB a token, hence several chunks a record; and a model whose states hang on positions.
IDENTITIES = (random_identity(layers=1, heads=1, dim=64), mixed_identity(FULL, sliding(4), RECURRENT, OPAQUE))
LONGEST = 60
#: An id that no prompt holds: what is asked for leaves every stored prompt where it ends.
STRANGER = 7
#: How often each verb comes, in a store where nothing has to be lost ...
AMPLE = {
    "durable": 10, "save": 6, "copied": 2, "restore": 8, "forget": 2, "flush": 2, "pin": 1, "demote": 2, "restart": 2,
    "compact": 1, "backup": 1,
}  # fmt: skip
#: ... and in one whose budgets are too small for it.
TIGHT = {**AMPLE, "durable": 14, "evict": 2, "backup": 0}
#: By the tier of a store; one that is ``damaged`` loses all it holds with every restart.
WEIGHTS = {"ample": AMPLE, "tight": TIGHT, "damaged": AMPLE}


@dataclass(frozen=True, slots=True)
class Prompt:
    model: int
    ids: tuple[int, ...]

    @property
    def identity(self) -> Identity:
        return IDENTITIES[self.model]

    def begins(self, other: Prompt) -> bool:
        """Whether the other one goes on from this one, or is it."""
        return self.model == other.model and other.ids[: len(self.ids)] == self.ids


@dataclass(frozen=True, slots=True)
class Step:
    """A verb, and the number of the prompt it is about."""

    verb: str
    prompt: int = 0


@dataclass(frozen=True, slots=True)
class Script:
    """``prompts`` grow, branch or begin anew; ``steps`` save, read and drop them."""

    seed: int
    prompts: tuple[Prompt, ...]
    steps: tuple[Step, ...]


def script(seed: int, weights: dict[str, int], steps: int = 45) -> Script:
    """The script of a seed. Two seeds share no prompt, their first ids are their own."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    verbs = rng.choices(list(weights), list(weights.values()), k=steps)
    made = list(_steps(rng, seed, prompts, ["durable", *verbs]))
    return Script(seed, tuple(prompts), tuple(made))


def _steps(rng: random.Random, seed: int, prompts: list[Prompt], verbs: Iterable[str]) -> Iterator[Step]:
    for verb in verbs:
        if verb in ("durable", "save", "copied"):
            if not prompts or rng.random() < 0.9:
                prompts.append(_prompt(rng, seed, prompts))
                yield Step(verb, len(prompts) - 1)
            else:  # again, or for the first time since it was dropped
                yield Step(verb, rng.randrange(len(prompts)))
        else:
            yield Step(verb, rng.randrange(len(prompts)))


def _prompt(rng: random.Random, seed: int, others: list[Prompt]) -> Prompt:
    kind = rng.random()
    if not others or kind < 0.25:
        model, ids = rng.randrange(len(IDENTITIES)), [1000 + seed, 1_000_000 + len(others)]
    else:
        parent = rng.choice(others[-6:])
        cut = len(parent.ids) if kind < 0.8 else rng.randint(2, len(parent.ids))
        model, ids = parent.model, list(parent.ids[:cut])
    while len(ids) >= LONGEST - 1:
        ids = [1000 + seed, 1_000_000 + len(others)]
    for _ in range(rng.randint(1, min(30, LONGEST - len(ids)))):
        ids.append(rng.randrange(1000, 2**31))
    return Prompt(model, tuple(ids))


@dataclass
class Promises:
    """What a store must still hold, by what was reported of it before each blow. Prompts are
    known by the seed of their script and their number."""

    weights: dict[str, int]
    required: set[tuple[int, int]] = field(default_factory=set)
    backups: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    _memory: set[tuple[int, int]] = field(default_factory=set)

    def hear(self, seed: int, lines: Iterable[str]) -> None:
        """Take the reports of one life of the store, see `fault_child`."""
        prompts = script(seed, self.weights).prompts
        self._memory.clear()
        for line in lines:
            what, _, about = line.partition(" ")
            if what == "durable":
                self.required.add((seed, int(about)))
            elif what == "memory":
                self._memory.add((seed, int(about)))
            elif what == "written":  # everything that was in memory only until then
                self.required |= self._memory
            elif what == "forgetting":
                gone = prompts[int(about)]
                going = {(seed, number) for number, prompt in enumerate(prompts) if prompt.begins(gone)}
                self.required -= going
                self._memory -= going
            elif what == "backup":
                self.backups[about] = sorted(self.required)
