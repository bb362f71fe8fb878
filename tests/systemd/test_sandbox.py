"""A whole daemon under the system calls and memory rules its unit leaves it, set up here as systemd does."""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from warmkv import connect
from warmkv.daemon.cli.units import rendered
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, eventually
from warmkv.daemon.testing_manager import ServiceManager, listening
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.testing.bounds import bounded
from warmkv.schema.identity import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime

NUMBERS = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
PR_SET_NO_NEW_PRIVS, PR_SET_MDWE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 65, 22, 2
LOAD_NUMBER, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE_EPERM = 0x7FFF0000, 0x00050001
TOKENS = list(range(1, 65))

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not NUMBERS.exists() or shutil.which("systemd-analyze") is None,
    reason="needs an x86-64 with kernel headers and systemd-analyze",
)


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    with bounded(150):
        yield


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def calls(group: str) -> set[str]:
    """System calls of one of systemd's groups."""
    command = ["systemd-analyze", "syscall-filter", group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    found: set[str] = set()
    for line in done.stdout.splitlines()[1:]:
        word = line.strip()
        if word and not word.startswith("#"):
            found |= calls(word) if word.startswith("@") else {word}
    return found


def left_by(unit: str) -> set[str]:
    """What the SystemCallFilter lines of a unit allow."""
    allowed: set[str] = set()
    for value in re.findall(r"^SystemCallFilter=(.*)$", unit, re.MULTILINE):
        named: set[str] = set().union(*(calls(group) for group in value.removeprefix("~").split()))
        allowed = allowed - named if value.startswith("~") else allowed | named
    return allowed


def confinement(allowed: set[str]) -> Callable[[], None]:
    """Confines the process that calls it, and what it becomes: other system calls fail with EPERM,
    and no memory is both written and executed."""
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)", NUMBERS.read_text())}
    steps = [(LOAD_NUMBER, 0, 0, 0)]
    for name in sorted(allowed & numbers.keys()):
        steps += [(IF_EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, ALLOW)]
    steps.append((RETURN, 0, 0, REFUSE_EPERM))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    prctl = ctypes.CDLL(None).prctl

    def confine() -> None:
        held = code  # the kernel reads it now, in a child that must not lose it
        prctl(PR_SET_MDWE, 1, 0, 0, 0)  # a kernel before 6.3 has none
        if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
            raise OSError(f"{len(held)} bytes of filter were refused")

    return confine


def identity() -> Identity:
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (2, 8)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    return Identity(
        architecture="sample", parameters=bytes(32), settings=b"none", adapters=(), layers=(LayerSpec(LayerKind.FULL, planes),),
        compute_dtype="float32", attention="eager", layout="bhtd", tokenizer=bytes(32), runtime="test",
        rope=RopeRegime("default", 1e4, 1.0, 8, 2048, b"none"), runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def kept_records(manager: ServiceManager) -> list[str]:
    return [name for name in list(manager.kept) if not name.startswith("warmkv-ns-")]


def test_the_filter_refuses_what_the_unit_does_not_allow() -> None:
    allowed = left_by(rendered(user=False, program="/x/y")["warmkv.service"])
    assert {"memfd_create", "recvmsg", "flock", "fdatasync", "execve", "inotify_add_watch"} <= allowed
    assert not allowed & {"mount", "setuid", "chown", "sched_setaffinity", "ptrace", "bpf", "init_module", "reboot"}
    confine = confinement(allowed)
    done = subprocess.run(["chown", "0:0", "/dev/null"], preexec_fn=confine, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode != 0 and "not permitted" in done.stderr


@pytest.mark.parametrize("user", [False, True], ids=["system", "user"])
def test_a_daemon_does_all_it_does_under_the_rules_of_its_unit(tmp_path: Path, user: bool) -> None:
    """Saves, serves from either tier, evicts, compacts, verifies, reloads, watches, is watched, hands descriptors over, stops."""
    confine = confinement(left_by(rendered(user=user, program="/x/y")["warmkv.service"]))
    count = len(TOKENS) * 16
    keys = np.arange(count, dtype="<f4").reshape(-1, 2, 8)
    spool = tmp_path / "spool"
    spool.mkdir(mode=0o700)
    arguments = ("--warm-bytes", "8MiB", "--cold-bytes", "64MiB", "--spool", str(spool))
    with ServiceManager(tmp_path / "notify") as manager:
        daemon = DaemonProcess(tmp_path, *arguments, environ={**manager.environ, "WATCHDOG_USEC": "1000000"})
        with listening(daemon.socket) as passed, daemon.start(confine, [("warmkv", passed.fileno())]):
            with connect(daemon.socket, strict=True) as client:
                assert client.save(identity(), TOKENS, [LayerRows.kv(0, keys, -keys)], ack="disk").durable
                assert manager.keeps(lambda names: len(names) == 2)
                for tier in ("warm", "cold"):
                    with client.restore(identity(), [*TOKENS, 1]) as restored:
                        assert (restored.usable, restored.tier) == (len(TOKENS), tier)
                        np.testing.assert_array_equal(restored.layers[0].keys, keys)
                    # What was restored is leased for a moment longer.
                    assert eventually(lambda: bool(client.report("evict", tier="warm", to_bytes=0)) and not kept_records(manager))
                assert client.report("compact") and client.report("reload")
                assert client.report("verify")["bad"] == []
                assert client.report("health")["problems"] == {}
            assert manager.hears("WATCHDOG", 3)
            assert daemon.stop() == 0
        assert "EPERM" not in daemon.log and "not permitted" not in daemon.log and "Traceback" not in daemon.log
