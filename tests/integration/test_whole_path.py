"""What the product promises, through a real daemon: deltas, one promotion, clean accounts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import warmkv
from warmkv import SINGLE, Client, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime
from warmkv.daemon.testing import DaemonProcess, child_environ, eventually
from warmkv.kvstore.rows import LayerRows

LAYERS, HEADS, SIZE = 6, 2, 32
ROW_BYTES = LAYERS * 2 * HEADS * SIZE * 4
HEAD_ALLOWANCE = 16_384


def connect(served: DaemonProcess) -> Client:
    return warmkv.connect(str(served.socket), timeout_s=60, strict=True)


def identity_for(name: str = "test") -> Identity:
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (HEADS, SIZE)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    return Identity(
        architecture=name, parameters=b"0123456789abcdef", settings=b"none", adapters=(),
        layers=(LayerSpec(LayerKind.FULL, planes),) * LAYERS, compute_dtype="float32", attention="none", layout="token-major",
        rope=RopeRegime("none", 0.0, 1.0, 0, 0, b"none"), tokenizer=b"none", runtime="test", runtime_state_version="1",
        topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def rows_of(ids: npt.NDArray[np.uint32]) -> list[LayerRows]:
    """Rows that are a function of the whole prefix, so that a wrong row cannot go unnoticed."""
    mixed = np.cumsum(ids.astype(np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 20)
    base = mixed.astype(np.float32)[:, None, None] + np.arange(HEADS * SIZE, dtype=np.float32).reshape(HEADS, SIZE) / 128
    return [LayerRows.kv(layer, base + layer, -base - layer) for layer in range(LAYERS)]


def saved(client: Client, identity: Identity, ids: npt.NDArray[np.uint32], **options: Any) -> Any:
    result = client.save(identity, ids, rows_of(ids), **options)
    assert result.stored, result.reason
    return result


def assert_restores(client: Client, identity: Identity, ids: npt.NDArray[np.uint32], usable: int, tier: str) -> None:
    with client.restore(identity, ids, verify=True) as restored:
        assert (restored.usable, restored.tier) == (usable, tier), restored.match
        for layer, record in zip(restored.layers, rows_of(ids), strict=True):
            assert np.array_equal(layer.keys, record.planes[0].rows[:usable])
            assert np.array_equal(layer.values, record.planes[1].rows[:usable])


def prompt(length: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 2**32, length, dtype=np.uint32)


def test_second_turn_sends_and_stores_only_its_rows(served: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    identity, ids = identity_for(), prompt(2200)
    with connect(served) as client:
        first = saved(client, identity, ids[:2000], ack="disk")
        before = client.stats()
        second = saved(client, identity, ids, ack="disk")
        after = client.stats()
    grown = {tier: after[tier]["bytes"] - before[tier]["bytes"] for tier in ("warm", "cold")}
    written = after["cold"]["bytes_written"] - before["cold"]["bytes_written"]
    with capsys.disabled():
        print(
            f"\nfirst turn sent {first.sent_bytes}, second turn {second.sent_bytes} for {200 * ROW_BYTES} bytes of rows; {grown=}"
        )
    assert second.start == 2000
    assert 200 * ROW_BYTES <= second.sent_bytes <= 200 * ROW_BYTES + HEAD_ALLOWANCE
    assert grown["warm"] == second.sent_bytes
    assert 200 * ROW_BYTES <= grown["cold"] <= 200 * ROW_BYTES + 2 * HEAD_ALLOWANCE
    assert 200 * ROW_BYTES <= written <= 200 * ROW_BYTES + 2 * HEAD_ALLOWANCE


def test_state_survives_sigkill_and_comes_back_bitwise(served: DaemonProcess) -> None:
    identity, ids = identity_for(), prompt(1500)
    with connect(served) as client:
        for end in (500, 501, 1499, 1500):
            assert saved(client, identity, ids[:end], ack="disk").durable
        assert_restores(client, identity, ids, 1499, "warm")
    served.kill()
    served.start()
    with connect(served) as client:
        assert_restores(client, identity, ids, 1499, "cold")
        assert_restores(client, identity, ids, 1499, "warm")
        assert_restores(client, identity, ids[:700], 699, "warm")
        other = replace(identity, compute_dtype="bfloat16")
        assert client.match(other, ids).usable == 0
        found = client.report("verify")
        assert (found["checked"], found["bad"], found["problems"]) == (4, [], [])


RESTORER = """
import sys, numpy, warmkv
from warmkv import Identity
identity = Identity.from_canonical(bytes.fromhex(sys.argv[2]))
ids = numpy.load(sys.argv[3])
client = warmkv.connect(sys.argv[1], timeout_s=60, strict=True)
client.stats()
print("ready", flush=True)
sys.stdin.readline()
with client.restore(identity, ids, verify=True) as restored:
    print(restored.usable, restored.promoted_bytes, flush=True)
"""


def test_twenty_processes_that_ask_at_once_cause_one_promotion(served: DaemonProcess, tmp_path: Path) -> None:
    identity, ids = identity_for(), prompt(3000)
    with connect(served) as client:
        saved(client, identity, ids, ack="disk")
    served.stop()
    served.start()
    np.save(tmp_path / "ids.npy", ids)
    command = [sys.executable, "-c", RESTORER, str(served.socket), identity.canonical().hex(), str(tmp_path / "ids.npy")]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environ())
        for _ in range(20)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=60)[0].split() for child in children]
    assert [answer[0] for answer in answers] == ["2999"] * 20
    assert sum(int(answer[1]) > 0 for answer in answers) == 1
    with connect(served) as client:
        assert client.stats()["promotions"] == 1


UPLOADER = """
import sys, numpy, warmkv
from warmkv import Identity
from warmkv.schema import messages as m
identity = Identity.from_canonical(bytes.fromhex(sys.argv[2]))
client = warmkv.connect(sys.argv[1], timeout_s=60, strict=True)
ids = numpy.arange(1, 5001, dtype=numpy.uint32)
query = client._query(identity, ids, (), warmkv.CLEAN)
held = []
for _ in range(3):
    offer = m.Offer(client._namespace(identity), query.lineage, query.tokens, query.packed, row_bytes=40_000)
    reply = client._session.offer(offer)
    held.append(reply)
    with client.restore(identity, numpy.load(sys.argv[3])) as restored:
        held.append(restored)
        restored._release = None
print(client.stats()["warm"]["reserved_bytes"], client.stats()["leases"], flush=True)
sys.stdin.readline()
"""


def test_client_killed_in_the_middle_of_a_save_leaves_nothing(
    served: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity, ids = identity_for(), prompt(100)
    np.save(tmp_path / "ids.npy", ids)
    with connect(served) as client:
        saved(client, identity, ids, ack="disk")
        client.stats()
        baseline = accounts(client), descriptors(served.pid)
        command = [sys.executable, "-c", UPLOADER, str(served.socket), identity.canonical().hex(), str(tmp_path / "ids.npy")]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environ())
        assert child.stdout is not None
        reserved, leases = child.stdout.readline().split()
        assert int(reserved) >= 3 * 5000 * 40_000 and int(leases) == 3
        child.kill()
        child.wait(10)
        began = time.monotonic()
        assert eventually(lambda: (accounts(client), descriptors(served.pid)) == baseline, 10)
        took = time.monotonic() - began
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
    with capsys.disabled():
        print(f"\naccounts and descriptors back at the baseline {took * 1e3:.0f} ms after the kill")


def test_restores_leave_descriptors_and_leases_flat(served: DaemonProcess) -> None:
    identity, ids = identity_for(), prompt(301)
    with connect(served) as client:
        saved(client, identity, ids[:150], ack="disk")
        saved(client, identity, ids[:300], ack="disk")
        for _ in range(20):
            client.restore(identity, ids).close()
        client.stats()  # by now the daemon has closed what it sent
        before = descriptors(os.getpid()), descriptors(served.pid)
        for _ in range(400):
            client.restore(identity, ids).close()
        assert client.stats()["leases"] == 0
        assert (descriptors(os.getpid()), descriptors(served.pid)) == before


def test_clean_stop_flushes_what_was_acknowledged_in_memory(served: DaemonProcess) -> None:
    identity, ids = identity_for(), prompt(800)
    with connect(served) as client:
        saved(client, identity, ids, ack="memory")
    assert served.stop() == 0
    served.start()
    with connect(served) as client:
        assert_restores(client, identity, ids, 799, "cold")


def accounts(client: Client) -> tuple[object, ...]:
    stats: Any = client.stats()
    warm = stats["warm"]
    return warm["bytes"], warm["reserved_bytes"], warm["promoting_bytes"], warm["lent_bytes"], stats["leases"], stats["entries"]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
