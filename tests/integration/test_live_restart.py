"""Live caches of every kind through a daemon that is killed, and through the hands of other processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import warmkv
from warmkv import Client
from warmkv.daemon.testing import DaemonProcess, child_environ
from warmkv.kernels.rope.reference import Pairs, Rope
from warmkv.kvstore.bridge import anchor_of, field_digests, on_prefix, restore_into
from warmkv.kvstore.live.evict import Mass, Recent
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.live.plan import ModelPlan
from warmkv.kvstore.live.shift import shift
from warmkv.kvstore.testing.live import PLANS, contents, feed, fill, identity_of, prompt, save
from warmkv.schema.records import AnchorKind

LENGTH, STEPS = 75, 16
Ids = npt.NDArray[np.uint32]
#: Caches of which rows were evicted.
EVICTED = {
    "q8 with gaps": "q8", "importance with gaps": "importance", "tq3 with gaps": "tq3", "blocks with gaps": "blocks"
}  # fmt: skip
#: Caches of which tokens were taken out, as a model that rotates its keys has them.
SHIFTED = {"f32 shifted": ("f32", Pairs.NEOX), "f16 shifted": ("f16", Pairs.NORM), "q8v shifted": ("q8v", Pairs.NEOX)}
KEEP, GONE = 5, 9


def connect(served: DaemonProcess) -> Client:
    return warmkv.connect(str(served.socket), timeout_s=60, strict=True)


def more(ids: Ids) -> list[int]:
    return [*ids.tolist(), 60_000]


def cache_of(name: str) -> ModelCache:
    """A cache as it was before the daemon was killed."""
    base, pairs = SHIFTED.get(name, (EVICTED.get(name, name), None))
    policy = Mass() if name == "importance with gaps" else Recent()
    cache = ModelCache(PLANS[base], backend="reference", policy=policy)
    fill(cache, LENGTH)
    if name in EVICTED:
        cache.evict(30)
    if pairs is not None:
        shift(cache, KEEP, GONE, Rope(40, 10_000.0, pairs), gone=prompt(LENGTH)[KEEP : KEEP + GONE])
    return cache


def ids_of(name: str) -> Ids:
    """The tokens `cache_of` a name is the state of."""
    return np.delete(prompt(LENGTH), np.arange(KEEP, KEEP + GONE)) if name in SHIFTED else prompt(LENGTH)


@pytest.fixture(scope="module")
def killed() -> Iterator[DaemonProcess]:
    """A daemon that was killed after caches of every kind were on disk, and started again."""
    directory = Path(tempfile.mkdtemp(prefix="warmkv-"))
    daemon = DaemonProcess(directory).start()
    try:
        with connect(daemon) as client:
            for name in (*PLANS, *EVICTED, *SHIFTED):
                cache = cache_of(name)
                identity = identity_of(cache.plan, gaps=name in EVICTED)
                anchors = [anchor_of(cache, AnchorKind.TURN)]
                assert save(client, identity, ids_of(name), cache, ack="disk", anchors=anchors).durable
        daemon.kill()
        daemon.start()
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("name", [*PLANS, *EVICTED, *SHIFTED])
def test_every_kind_comes_back_cold_into_a_used_cache(killed: DaemonProcess, name: str) -> None:
    original, ids = cache_of(name), ids_of(name)
    used = ModelCache(original.plan, backend="reference")
    fill(used, 50, seed=11)
    identity = identity_of(original.plan, gaps=name in EVICTED)
    with connect(killed) as client, client.restore(identity, more(ids), lineage=original.lineage, verify=True) as found:
        assert (found.usable, found.tier) == (len(ids), "cold")
        assert restore_into(used, found) == len(ids)
    assert contents(used) == contents(original) and used.lineage == original.lineage
    assert used.shift_offset == original.shift_offset == (GONE if name in SHIFTED else 0)
    assert feed(used, STEPS) == feed(original, STEPS)
    assert contents(used) == contents(original)


@pytest.mark.parametrize("name", SHIFTED)
def test_shifted_rows_are_never_found_by_their_tokens_alone(killed: DaemonProcess, name: str) -> None:
    """Of a plan that is on the disk unshifted as well, under the whole prompt."""
    with connect(killed) as client:
        match = client.match(identity_of(cache_of(name).plan), more(ids_of(name)))
        assert match.usable == KEEP, "what the two prompts begin with, of the unshifted rows"
        assert client.match(identity_of(cache_of(name).plan), more(prompt(LENGTH)), lineage=cache_of(name).lineage).usable == KEEP


CHILD = """
import sys, warmkv
from warmkv.kvstore.bridge import on_prefix, restore_into
from warmkv.kvstore.live.model import ModelCache
from warmkv.kvstore.testing.live import PLANS, fill, identity_of, prompt, save
with warmkv.connect(sys.argv[1], timeout_s=60, strict=True) as client:
    plan, restore = PLANS[sys.argv[2]], {"copied": restore_into, "mapped": on_prefix}[sys.argv[3]]
    for parent in map(int, sys.argv[4:]):
        identity, cache = identity_of(plan, seed=parent), ModelCache(plan, backend="reference")
        with client.restore(identity, prompt(parent + 1)) as restored:
            taken = restore(cache, restored)
        fill(cache, 130 - taken)
        saved = save(client, identity, prompt(130), cache)
        print(parent, taken, saved.start, flush=True)
"""


@pytest.mark.parametrize("how", ["copied", "mapped"])
@pytest.mark.parametrize("name", ["q8", "turboquant", "one side rotated"])
def test_whoever_goes_on_writes_the_same_rows(served: DaemonProcess, name: str, how: str) -> None:
    plan, parents = PLANS[name], (60, 63, 64, 65, 66, 100) if name == "q8" else (1, 64, 100)
    with connect(served) as client:
        for parent in parents:
            cache = ModelCache(plan, backend="reference")
            fill(cache, parent)
            save(client, identity_of(plan, seed=parent), prompt(parent), cache)
        command = [sys.executable, "-c", CHILD, str(served.socket), name, how, *map(str, parents)]
        done = subprocess.run(command, env=child_environ(), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
        # Rows of an open field are written anew: what a child shares with its parent begins behind them.
        stable = {parent: parent > 64 or name != "q8" for parent in parents}
        assert told == [(parent, parent, parent if stable[parent] else 0) for parent in parents]
        for parent in parents:
            check_child(client, plan, parent)


def check_child(client: Client, plan: ModelPlan, parent: int) -> None:
    identity = identity_of(plan, seed=parent)
    alone, found, lent = (ModelCache(plan, backend="reference") for _ in range(3))
    fill(alone, 130)
    with client.restore(identity, prompt(131), verify=True) as restored:
        assert restore_into(found, restored) == on_prefix(lent, restored) == 130
    assert contents(found) == contents(lent) == contents(alone)
    assert field_digests(found) == field_digests(alone)
    assert feed(found, 3) == feed(alone, 3)
    for position in (59, 61, 64, 65, 99, 129):
        with client.restore(identity, [*prompt(position).tolist(), 60_000]) as restored:
            cache = ModelCache(plan, backend="reference")
            taken = restore_into(cache, restored)
        assert taken == position or (taken == 0 and position < 64 and field_digests(alone))
        if taken:
            twin = ModelCache(plan, backend="reference")
            fill(twin, taken)
            for one in (cache, twin):
                fill(one, 5, seed=4)
            assert contents(cache) == contents(twin)


@pytest.mark.parametrize("name", ["q8", "window bf16", "importance"])
def test_mapped_rows_stay_when_all_that_gave_them_is_gone(served: DaemonProcess, name: str) -> None:
    """Restored is closed, the prefix forgotten, the client closed, the daemon killed; then a fork reads on."""
    original = cache_of(name)
    identity, ids, lent = identity_of(original.plan), prompt(LENGTH), ModelCache(original.plan, backend="reference")
    with connect(served) as client:
        save(client, identity, ids, original)
        with client.restore(identity, [*ids.tolist(), 1]) as restored:
            assert on_prefix(lent, restored) == LENGTH
        client.forget(identity, ids)
        assert client.restore(identity, [*ids.tolist(), 1]).usable == 0
    served.kill()
    assert lent.memory().mapped and contents(lent) == contents(original)
    child = os.fork()
    if not child:
        os._exit(0 if contents(lent) == contents(original) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fill(lent, STEPS)
    fill(original, STEPS)
    assert contents(lent) == contents(original)
