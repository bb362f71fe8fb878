"""The modes of the quality harness: how a cache is made, over which windows, what of them is scored.

A later storage format becomes a mode by appearing in `plan.modes`; anything else that makes a LiveCache
is one more entry of `suite`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from warmkv.kernels.dispatch import Backend
from warmkv.kernels.nystrom.reference import Rectifier
from warmkv.kernels.turboquant.reference import Estimator
from warmkv.kvstore.integrations.hf_live import LiveCache, plan_of
from warmkv.kvstore.live.evict import Mass, Policy, Recent
from warmkv.kvstore.live.plan import NystromPlan, TurboQuantPlan, modes

SUITES = ("formats", "blocks", "turboquant", "eviction", "nystrom")
#: The mode all others are compared with.
BASELINE = "f32"


@dataclass(frozen=True, slots=True)
class Setting:
    """How caches compute."""

    backend: Backend = "auto"
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode. ``scored_from`` is the first position whose next token is scored; ``baseline`` that it is
    what the others are compared with, which runs anyway."""

    name: str
    make: Callable[[torch.nn.Module, Setting], LiveCache] = field(compare=False)
    scored_from: int = 0
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Suite:
    """Modes over windows of the same size, fed in the same chunks."""

    name: str
    tokens: int
    chunk: int
    modes: tuple[Mode, ...]


def suite(name: str, *, tokens: int = 0, chunk: int = 0) -> Suite:
    """One of `SUITES`, its sizes as given or its own."""
    if name == "formats":
        tokens, chunk = tokens or 8192, chunk or 512
        return Suite(name, tokens, chunk, tuple(Mode(mode, _stored(mode), baseline=mode == BASELINE) for mode, _, _ in modes()))
    if name == "blocks":
        stored = (BASELINE, "f16", "q8", "fp8", *(mode for mode, _, _ in modes(blocked=True)[len(modes()) :]))
        return Suite(
            name, tokens or 2048, chunk or 512, tuple(Mode(mode, _stored(mode), baseline=mode == BASELINE) for mode in stored)
        )
    if name == "turboquant":
        return Suite(name, tokens or 8192, chunk or 512, tuple(_rotations()))
    tokens, chunk = tokens or 2048, chunk or 64
    if name == "eviction":
        return Suite(name, tokens, chunk, (Mode("full", _stored(BASELINE), baseline=True), *_evictions(tokens, chunk)))
    if name == "nystrom":
        return Suite(name, tokens, chunk, tuple(_constant(tokens)))
    raise ValueError(f"no suite is called {name!r}; expected one of {', '.join(SUITES)}")


def _stored(mode: str) -> Callable[[torch.nn.Module, Setting], LiveCache]:
    def make(model: torch.nn.Module, setting: Setting) -> LiveCache:
        return LiveCache(model, mode, backend=setting.backend, threads=setting.threads)

    return make


def _rotations() -> list[Mode]:
    """TurboQuant with each weight of its signs, one side only, and keys of three bits, beside two others."""
    found = [Mode(BASELINE, _stored(BASELINE), baseline=True), *(Mode(name, _stored(name)) for name in ("f16", "q8"))]
    for name, _, _ in modes(rotated=True)[len(modes()) :]:
        if name in ("turboquant", "tqk"):
            found += [Mode(f"{name} {estimator.value}", _turned(name, estimator)) for estimator in Estimator]
        else:
            found.append(Mode(name, _stored(name)))
    return found


def _turned(mode: str, estimator: Estimator) -> Callable[[torch.nn.Module, Setting], LiveCache]:
    def make(model: torch.nn.Module, setting: Setting) -> LiveCache:
        plan = plan_of(model, mode, turboquant=TurboQuantPlan(estimator=estimator))
        return LiveCache(model, plan=plan, backend=setting.backend, threads=setting.threads)

    return make


def _evictions(tokens: int, chunk: int) -> list[Mode]:
    """Each policy at half and at a quarter of the window: never more rows than the budget are seen."""
    found = []
    for share, part in (("1/2", 2), ("1/4", 4)):
        for policy in (Recent(), Mass()):
            found.append(Mode(f"{policy.name} {share}", _evicting(policy, tokens // part, chunk)))
    return found


def _evicting(policy: Policy, budget: int, chunk: int) -> Callable[[torch.nn.Module, Setting], LiveCache]:
    def make(model: torch.nn.Module, setting: Setting) -> LiveCache:
        return LiveCache(
            model, policy=policy, max_rows=budget, keep_rows=budget - chunk, backend=setting.backend, threads=setting.threads
        )  # fmt: skip

    return make


def _constant(tokens: int) -> list[Mode]:
    """Both rectifiers behind an exact half of the window; only what comes after the seal is scored."""
    return [
        Mode(f"nystrom {rectifier.name.lower()}", _sealing(rectifier, tokens // 2), scored_from=tokens // 2)
        for rectifier in (Rectifier.AGGREGATE, Rectifier.FM)
    ]


def _sealing(rectifier: Rectifier, boundary: int) -> Callable[[torch.nn.Module, Setting], LiveCache]:
    def make(model: torch.nn.Module, setting: Setting) -> LiveCache:
        plan = NystromPlan(rectifier=rectifier, boundary=boundary)
        return LiveCache(model, nystrom=plan, backend=setting.backend, threads=setting.threads)

    return make
