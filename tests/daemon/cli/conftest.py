"""The command line inside this process, against an engine served by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.cli.group import run
from warmkv.daemon.testing import PATIENCE_S, ServedEngine, child_environ
from warmkv.kvstore.store import Store
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions


@dataclass(frozen=True)
class Ran:
    """What a command line came to."""

    status: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The one JSON value on standard output."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """Name of the error's class."""
        return str(self.value["error"]["class"])


Warmkv = Callable[..., Ran]


@pytest.fixture
def warmkv(capfd: pytest.CaptureFixture[str]) -> Warmkv:
    """Run a command line in this process."""

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        status = run([str(item) for item in arguments])
        return Ran(status, *capfd.readouterr())

    return call


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a disk, for which the daemon of `ask` serves."""
    options = StoreOptions(tmp_path / "store", warm_bytes=16 << 20, cold_bytes=64 << 20, busy_timeout_s=0.2)
    with Store(Engine.open(options)) as opened:
        yield opened


@pytest.fixture
def ask(warmkv: Warmkv, store: Store, tmp_path: Path) -> Iterator[Warmkv]:
    """Run a verb against a daemon that serves `store`."""
    with ServedEngine(tmp_path / "run" / "s", store.engine) as served:
        yield lambda verb, *more: warmkv(*verb.split(), *more, "--socket", served.socket)


OTHER = 54321
#: Runs a command line as somebody else, all of whose modules are loaded by then.
AS_ANOTHER = """
import importlib, os, sys
from warmkv.daemon.cli.group import VERBS, run, warmkv
for verb in VERBS:
    warmkv.get_command(None, verb)
for name in ("daemon.config", "kvstore.client.session", "kvstore.store.engine", "kvstore.store.exporting"):
    importlib.import_module("warmkv." + name)
os.setgroups([])
os.setresgid(*[{uid}] * 3)
os.setresuid(*[{uid}] * 3)
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def ask_as_another(store: Store) -> Iterator[Warmkv]:
    """Run a verb as another user, whom the daemon serves; skips where we cannot be another."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        where = Path(folder) / "run" / "s"
        with ServedEngine(where, store.engine, uids=frozenset({0, OTHER})):
            os.chmod(where.parent, 0o711)
            os.chmod(where, 0o666)

            def call(verb: str, *more: object) -> Ran:
                command = [sys.executable, "-c", AS_ANOTHER.format(uid=OTHER), *verb.split(), *(str(item) for item in more)]
                command += ["--socket", str(where)]
                done = subprocess.run(command, capture_output=True, text=True, env=child_environ(), timeout=PATIENCE_S)
                return Ran(done.returncode, done.stdout, done.stderr)

            yield call
