"""A real daemon that keeps an eye on its surroundings, once for each of them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from warmkv import connect
from warmkv.daemon.testing import DaemonProcess, eventually
from warmkv.kvstore.store import Store, StoreOptions
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.exporting import export
from warmkv.kvstore.testing import TOKENS, random_identity, save
from warmkv.schema import ids

MIB = 1 << 20
#: So long that only a hint can make the daemon look.
HINTS_ONLY = ("--watch-interval-s", "86400")
IDENTITY = random_identity()
#: Its rows of nine tokens are half a megabyte.
WIDE = random_identity(layers=2, heads=8, dim=256)


def key_of(uid: int = os.geteuid()) -> str:
    return ids.namespace_key(uid, "", ids.fingerprint(IDENTITY)).hex()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("max_connections = 5\n")
    return path


@pytest.fixture
def start(tmp_path: Path, file: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts a daemon with these options and variables."""
    started: list[DaemonProcess] = []

    def make(*arguments: str, preexec: Callable[[], None] | None = None, **environ: str) -> DaemonProcess:
        common = ("--config", str(file), "--cold-bytes", "64MiB", *arguments)
        started.append(DaemonProcess(tmp_path, *common, environ=environ))
        return started[-1].start(preexec)

    yield make
    for item in started:
        item.kill()


def report(daemon: DaemonProcess, verb: str, **arguments: object) -> dict[str, Any]:
    with connect(daemon.socket, strict=True) as client:
        return dict(client.report(verb, **arguments))


def problems(daemon: DaemonProcess) -> dict[str, str]:
    return dict(report(daemon, "health")["problems"])


def test_a_changed_file_is_taken_at_once_and_a_bad_one_is_not(start: Callable[..., DaemonProcess], file: Path) -> None:
    daemon = start(*HINTS_ONLY, "--warm-bytes", "8MiB")
    assert problems(daemon) == {}
    beside = file.with_name("beside")
    beside.write_text("max_connections = 9\nanchors = 3\nsocket = '/tmp/elsewhere'\n")
    os.replace(beside, file)
    assert eventually(lambda: "in force now: anchors, max_connections" in daemon.log)
    assert report(daemon, "stats")["configuration"]["applied"] == ["anchors", "max_connections"]
    file.write_text("max_connections = many\n")
    assert eventually(lambda: "configuration" in problems(daemon))
    file.write_text("max_connections = 9\nanchors = 3\n")
    assert eventually(lambda: problems(daemon) == {})
    assert report(daemon, "stats")["configuration"]["ok"]
    assert daemon.stop() == 0


def test_a_signal_and_a_report_reload_as_well(start: Callable[..., DaemonProcess], file: Path, tmp_path: Path) -> None:
    daemon = start("--warm-bytes", "8MiB", WARMKV_WATCH_INTERVAL_S="86400")
    with connect(daemon.socket, strict=True) as client:
        assert client.report("health")["healthy"]
        file.write_text("max_connections = 1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert eventually(lambda: client.report("stats")["configuration"]["applied"] == ["max_connections"])
        assert eventually(lambda: client.report("reload")["applied"] == [])
    assert daemon.stop() == 0


def test_changed_weights_retire_their_namespace(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    weights = tmp_path / "model" / "weights.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"old" * 1000)
    daemon = start(*HINTS_ONLY, "--warm-bytes", "8MiB")
    with connect(daemon.socket, strict=True) as client:
        save(client, IDENTITY, TOKENS, ack="disk")
        link = tmp_path / "link"
        link.symlink_to(weights)
        assert client.watch_weights(IDENTITY, [link]) == 1
        assert client.report("watch", action="add", namespace=key_of(), paths=[str(weights)])["files"] == 1

        def watched() -> list[dict[str, Any]]:
            return list(client.report("watch", action="ls")["rows"])

        assert eventually(lambda: watched()[0]["files"][0]["digest"] != "")
        os.utime(weights)
        assert client.match(IDENTITY, TOKENS).matched == len(TOKENS)
        beside = weights.with_suffix(".new")
        beside.write_bytes(b"new" * 1000)
        os.replace(beside, weights)
        assert eventually(lambda: client.match(IDENTITY, TOKENS).matched == 0)
        assert eventually(lambda: watched() == [])
        assert client.report("stats")["weights"] == {"retired": 1}
    assert daemon.stop() == 0


def test_weights_that_changed_while_no_daemon_ran_retire_too(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"old" * 1000)
    daemon = start(*HINTS_ONLY, "--warm-bytes", "8MiB")
    with connect(daemon.socket, strict=True) as client:
        save(client, IDENTITY, TOKENS, ack="disk")
        client.report("watch", action="add", namespace=key_of(), paths=[str(weights)])
        assert eventually(lambda: client.report("watch")["rows"][0]["files"][0]["digest"] != "")
    daemon.kill()
    weights.write_bytes(b"new" * 1000)
    daemon.start()
    with connect(daemon.socket, strict=True) as client:
        assert eventually(lambda: client.match(IDENTITY, TOKENS).matched == 0)


def test_a_pack_dropped_into_the_spool_can_be_resumed_from(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    store = Store(Engine.open(StoreOptions(None, warm_bytes=16 * MIB)))
    save(store, IDENTITY, TOKENS)
    (namespace,) = store.engine.index.namespaces.values()
    with open(tmp_path / "prompt.warmkv", "wb") as pack:
        assert export(store.engine, namespace, lambda: list(namespace.records), pack.fileno()).records == 1
    store.close()
    daemon = start("--watch-interval-s", "0.2", "--warm-bytes", "8MiB", "--spool", str(spool))
    with connect(daemon.socket, strict=True) as client:
        (spool / "broken.warmkv").write_bytes(b"not a pack")
        (spool / "prompt.warmkv").write_bytes((tmp_path / "prompt.warmkv").read_bytes())
        assert eventually(lambda: client.match(IDENTITY, TOKENS).matched == len(TOKENS))
        assert eventually(lambda: (spool / "done" / "prompt.warmkv").exists())
        assert eventually(lambda: (spool / "failed" / "broken.warmkv.reason").exists())
        assert eventually(lambda: client.report("stats")["spool"] == {"imported": 1, "failed": 1})
        with client.restore(IDENTITY, [*TOKENS, 1], verify=True) as restored:
            assert restored.usable == len(TOKENS)
    assert daemon.stop() == 0


def test_memory_pressure_shrinks_the_warm_tier(start: Callable[..., DaemonProcess], tmp_path: Path) -> None:
    pipe = tmp_path / "pressure"
    os.mkfifo(pipe)
    daemon = start("--warm-bytes", "64MiB", MEMORY_PRESSURE_WATCH=str(pipe))
    with connect(daemon.socket, strict=True) as client:
        for number in range(8):
            save(client, WIDE, [number, *TOKENS], ack="disk")
        before = client.report("stats")
        assert before["pressure"]["watching"] == str(pipe)
        with open(pipe, "wb", buffering=0) as writer:
            writer.write(b"!")
        assert eventually(lambda: client.report("stats")["pressure"]["freed_bytes"] > 0)
        after = client.report("stats")
        assert after["warm"]["bytes"] <= before["warm"]["bytes"] * 3 // 4
        assert [client.match(WIDE, [number, *TOKENS]).matched for number in range(8)] == [len(TOKENS) + 1] * 8
    assert daemon.stop() == 0


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory control group of the test's own with a limit of 512 MiB."""
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    path = Path("/sys/fs/cgroup/memory") / line.rpartition(":")[2].lstrip("/") / f"warmkv-{os.getpid()}"
    try:
        if not line:
            raise OSError("no memory controller of version 1")
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(512 * MIB))
    except OSError as exc:
        pytest.skip(f"cannot make a control group: {exc}")
    yield path
    assert eventually(lambda: not (path / "cgroup.procs").read_text())
    path.rmdir()


@pytest.mark.parametrize("configured", ["auto", "1GiB"])
def test_the_warm_budget_follows_the_limit_of_the_control_group(
    start: Callable[..., DaemonProcess], group: Path, configured: str
) -> None:
    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    part = 4 if configured == "auto" else 1
    daemon = start("--watch-interval-s", "0.05", "--warm-bytes", configured, preexec=enter)
    with connect(daemon.socket, strict=True) as client:

        def budget() -> int:
            return int(client.report("stats")["warm"]["budget_bytes"])

        assert budget() == (128 * MIB if part == 4 else 384 * MIB)
        assert ("more than fits" in daemon.log) == (part == 1)
        save(client, WIDE, TOKENS)
        told = client.report("stats")["cgroup"]
        assert told["limit_bytes"] == 512 * MIB and told["used_bytes"] > 0
        assert {"shmem_bytes", "file_bytes"} <= set(told)
        (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
        assert eventually(lambda: budget() == (64 * MIB if part == 4 else 192 * MIB))
        (group / "memory.limit_in_bytes").write_text(str(512 * MIB))
        assert eventually(lambda: budget() == (128 * MIB if part == 4 else 384 * MIB))
    assert daemon.stop() == 0


def test_threads_and_descriptors_stay_flat_while_everything_changes(
    start: Callable[..., DaemonProcess], file: Path, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    weights = tmp_path / "weights"
    daemon = start("--watch-interval-s", "0.02", "--warm-bytes", "8MiB", "--spool", str(spool))

    def held() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{daemon.pid}/task")), daemon.descriptors

    with connect(daemon.socket, strict=True) as client:
        before: tuple[int, int] | None = None
        for number in range(12):
            weights.write_bytes(b"%d" % number)
            client.report("watch", action="add", namespace="ab" * 16, paths=[str(weights)])
            file.write_text(f"max_connections = {number + 5}\n" if number % 3 else "nonsense")
            (spool / "broken.warmkv").write_bytes(b"not a pack")
            assert eventually(lambda: not (spool / "broken.warmkv").exists() and not list((spool / "working").iterdir()))
            weights.write_bytes(b"other")
            assert eventually(lambda: client.report("watch")["total"] == 0)
            before = held() if number == 3 else before
        assert before is not None
        assert eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
        assert json.loads(json.dumps(client.report("stats")))["spool"]["failed"] == 12
    assert daemon.stop() == 0
