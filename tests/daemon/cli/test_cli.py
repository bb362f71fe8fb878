"""The command line as scripts see it: statuses, one JSON value, quiet pipes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from warmkv import __version__, connect
from warmkv.daemon.cli import doctor
from warmkv.daemon.cli.group import VERBS, run
from warmkv.daemon.testing import PATIENCE_S, DaemonProcess, child_environ
from warmkv.kvstore import paths
from warmkv.kvstore.rows import LayerRows
from warmkv.schema.errors import ConfigError
from warmkv.schema.identity import Identity

Rows = Callable[[int], list[LayerRows]]
TOKENS = list(range(100, 140))


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def value(self) -> Any:
        """The one JSON value on standard output."""
        return json.loads(self.out)


def warmkv(*arguments: str, given: str = "", **environ: str) -> Ran:
    command = [sys.executable, "-m", "warmkv.daemon.cli", *arguments]
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(**environ), check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    arguments = ("--warm-bytes", "64MiB", "--cold-bytes", "64MiB")
    with DaemonProcess(tmp_path_factory.mktemp("cli"), *arguments) as running:
        yield running


@pytest.fixture
def ask(daemon: DaemonProcess) -> Callable[..., Ran]:
    return lambda verb, *more, **given: warmkv(verb, "--socket", str(daemon.socket), *more, **given)


@pytest.fixture
def stored(daemon: DaemonProcess, identity: Identity, rows: Rows) -> str:
    """Something to look at; the hex key of its namespace."""
    with connect(daemon.socket, strict=True) as client:
        client.clear()
        assert client.save(identity, TOKENS, rows(len(TOKENS)), ack="disk").durable
        listed: Any = client.report("ls")["rows"]
        return str(listed[0]["namespace"])


# -- verbs that answer ---------------------------------------------------------------------


def test_version() -> None:
    assert warmkv("--version") == Ran(0, f"warmkv {__version__}\n", "")
    assert warmkv("--version", "--json").value == {"version": __version__}


def test_version_loads_next_to_nothing() -> None:
    code = "import sys; from warmkv.daemon.cli import main; main(['--version']); print({'click', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environ(), check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_every_verb_has_an_example_and_the_json_option(verb: str) -> None:
    ran = warmkv(verb, "--help")
    assert ran.status == 0 and "Examples:" in ran.out and f"warmkv {verb}" in ran.out and "--json" in ran.out


def test_status(ask: Callable[..., Ran], daemon: DaemonProcess) -> None:
    ran = ask("status", "--json")
    assert ran.status == 0 and ran.value["socket"] == str(daemon.socket) and ran.value["epoch"]
    assert "warm_budget_bytes" in ask("status").out


def test_the_socket_may_come_from_the_environment(daemon: DaemonProcess) -> None:
    assert warmkv("status", "--json", WARMKV_SOCKET=str(daemon.socket)).status == 0
    ran = warmkv("status", "--json", XDG_RUNTIME_DIR="/nonexistent")
    assert ran.status == 3 and "/nonexistent/warmkv/warmkv.sock" in ran.value["error"]["message"]


def test_ls_and_show(ask: Callable[..., Ran], stored: str) -> None:
    assert [row["namespace"] for row in ask("ls", "--json").value["rows"]] == [stored]
    assert stored in ask("ls").out and "sample" in ask("ls").out
    listed = ask("ls", "--json", stored[:6]).value
    (prefix,) = listed["rows"]
    assert (listed["kind"], prefix["end"]) == ("prefixes", len(TOKENS))
    assert prefix["id"] in ask("ls", stored).out
    shown = ask("show", "--json", prefix["id"][:8])
    assert shown.status == 0 and [link["id"] for link in shown.value["chain"]] == [prefix["id"]]
    assert shown.value["warm_bytes"] > 0 and shown.value["cold_bytes"] > 0
    assert "chain" not in ask("show", prefix["id"]).err and prefix["id"] in ask("show", prefix["id"]).out


def test_output_that_cannot_be_written_is_a_sentence() -> None:
    for more in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "warmkv.daemon.cli", "units", *more]
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, env=child_environ(), timeout=PATIENCE_S
            )  # fmt: skip
        assert (done.returncode, "Traceback" in done.stderr) == (1, False) and "No space left" in done.stderr


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> Path:
        raise RuntimeError("no home")

    for answer in (none, lambda *_, **__: Path("~/.config/warmkv")):
        monkeypatch.setattr("platformdirs.user_config_path", answer)
        monkeypatch.setattr("platformdirs.user_data_path", answer)
        for default in (paths.default_config_path, paths.default_store_path):
            with pytest.raises(ConfigError, match="set HOME"):
                default()
        assert [(check.name, check.state) for check in doctor.checks(None, None)] == [("configuration", "fail")]


def test_stats(ask: Callable[..., Ran], stored: str) -> None:
    assert ask("stats", "--json").value["cold"]["entries"] == 1
    assert "warm.bytes" in ask("stats").out


def test_verify_finds_nothing_wrong(ask: Callable[..., Ran], stored: str) -> None:
    ran = ask("verify", "--json")
    assert (ran.status, ran.value["checked"], ran.value["bad"]) == (0, 1, [])
    assert ask("verify").out.startswith("checked 1 records")


def test_forget_from_file_and_from_standard_input(ask: Callable[..., Ran], stored: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(TOKENS))
    ran = ask("forget", "--json", "--namespace", stored, str(tmp_path / "ids.json"))
    assert ran.status == 0 and ran.value["records"] == 1 and ran.value["bytes"] > 0
    assert ask("forget", "--json", "--namespace", stored, given=json.dumps(TOKENS)).status == 4


def test_clear_of_one_namespace_and_of_all(ask: Callable[..., Ran], stored: str) -> None:
    assert ask("clear", "--json", "--yes", "--namespace", stored[:5]).value["records"] == 1
    assert ask("clear", "--json", "--yes", "--all").value == {"records": 0, "bytes": 0}
    assert ask("clear", "--yes", "--all").out == "dropped 0 records, 0 B\n"


def test_clear_asks_and_takes_no_for_an_answer(daemon: DaemonProcess, stored: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "warmkv.daemon.cli", "clear", "--all", "--socket", str(daemon.socket)]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=child_environ()) as running:
        os.write(ours, b"n\n")
        out, _ = running.communicate(timeout=PATIENCE_S)
    os.close(ours)
    os.close(theirs)
    assert running.returncode != 0 and b"Drop everything you stored?" in out
    assert warmkv("ls", "--json", "--socket", str(daemon.socket)).value["total"] == 1


def test_a_terminal_gets_a_table(daemon: DaemonProcess, stored: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "warmkv.daemon.cli", "ls", "--socket", str(daemon.socket)]
    subprocess.run(command, stdout=theirs, env=child_environ(COLUMNS="200"), timeout=PATIENCE_S, check=True)
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:
        pass  # the terminal is gone once nobody has its other end
    os.close(ours)
    assert "│" in text.decode() and stored.encode()[:8] in text


def test_doctor(ask: Callable[..., Ran], tmp_path: Path) -> None:
    ran = ask("doctor", "--json", XDG_DATA_HOME=str(tmp_path))
    states = {item["name"]: item["state"] for item in ran.value["checks"]}
    assert ran.status == 0 and ran.value["ok"]
    assert states["kernel"] == states["daemon"] == states["socket"] == "ok"
    assert "CHECK" in ask("doctor").out


def test_doctor_finds_what_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "s").write_text("a file")
    ran = warmkv("doctor", "--json", "--socket", str(tmp_path / "open" / "s"), WARMKV_WARM_BYTE="1")
    failed = [item["name"] for item in ran.value["checks"] if item["state"] == "fail"]
    assert ran.status == 1 and failed == ["runtime directory", "socket"]
    assert [item["name"] for item in ran.value["checks"] if "WARMKV_WARM_BYTE" in item["detail"]] == ["environment"]
    assert warmkv("doctor", "--json", WARMKV_WARM_BYTES="-1").status == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    assert "_WARMKV_COMPLETE" in warmkv("completion", shell).out
    assert warmkv("completion", shell, "--json").value["shell"] == shell


def test_completion_completes() -> None:
    ran = warmkv(_WARMKV_COMPLETE="bash_complete", COMP_WORDS="warmkv st", COMP_CWORD="1")
    assert {line.split(",")[1] for line in ran.out.split()} == {"status", "stats"}


# -- statuses and errors -------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("bogus",),
        ("status", "--bogus"),
        ("show",),
        ("show", "xy"),
        ("show", "12"),
        ("ls", "no-hex"),
        ("clear", "--yes"),
        ("clear", "--all"),
        ("clear", "--all", "--namespace", "12", "--yes"),
        ("forget",),
        ("forget", "--namespace", "12", "--lineage", "zz"),
        ("completion", "tcsh"),
        ("serve", "--warm-bytes", "-3"),
        ("serve", "--cold-bytes", "plenty"),
        ("serve", "--config", "/nonexistent.toml"),
        ("stats", "--store", "/x", "--socket", "/y"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_and_one_json_value(daemon: DaemonProcess, arguments: tuple[str, ...]) -> None:
    ran = warmkv(*arguments, "--json", given="[1]", WARMKV_SOCKET=str(daemon.socket))
    assert ran.status == 2, ran
    assert set(ran.value["error"]) == {"code", "class", "message"}
    plain = warmkv(*arguments, given="[1]", WARMKV_SOCKET=str(daemon.socket))
    assert (plain.status, plain.out) == (2, "") and plain.err


@pytest.mark.parametrize("given", ["", "{}", "[1, -1]", "[1.5]", "[true]", "[4294967296]", "[]", '["1"]', "[1", "\0"])
def test_token_lists_that_are_none_are_wrong_usage(daemon: DaemonProcess, given: str) -> None:
    ran = warmkv("forget", "--json", "--namespace", "12", "--socket", str(daemon.socket), given=given)
    assert ran.status == 2 and ran.value["error"]["class"] == "UsageError"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("ls",),
        ("show", "abcdef"),
        ("stats",),
        ("clear", "--all", "--yes"),
        ("forget", "--namespace", "12"),
        ("verify",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_daemon_is_status_3(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    ran = warmkv(*arguments, "--json", "--socket", str(tmp_path / "s"), given="[1]")
    assert ran.status == 3 and ran.value["error"]["class"] == "DaemonUnavailable"
    plain = warmkv(*arguments, "--socket", str(tmp_path / "s"), given="[1]")
    assert (plain.status, plain.out) == (3, "") and plain.err.startswith("warmkv: no daemon at")


def test_nothing_found_is_status_4(ask: Callable[..., Ran], stored: str) -> None:
    absent = "0000" if not stored.startswith("0000") else "ffff"
    assert ask("show", "--json", "000000000000").status == 4
    assert ask("show", "000000000000").err
    for ran in (ask("ls", "--json", absent), ask("clear", "--json", "--yes", "--namespace", absent)):
        assert ran.status == 4 and ran.value["error"]["class"] == "UnknownNamespace"
    assert ask("forget", "--json", "--namespace", stored, given="[9, 9]").status == 4


def test_corruption_is_status_5(tmp_path: Path, identity: Identity, rows: Rows) -> None:
    daemon = DaemonProcess(tmp_path, "--cold-bytes", "64MiB")
    with daemon, connect(daemon.socket, strict=True) as client:
        assert client.save(identity, TOKENS, rows(len(TOKENS)), ack="disk").durable
        daemon.stop()
    flip_a_stored_byte(daemon.store)
    ran = warmkv("verify", "--json", "--store", str(daemon.store))
    assert ran.status == 5 and len(ran.value["bad"]) == 1
    assert warmkv("verify", "--json", "--store", str(daemon.store)).status == 0  # put aside, and not found again


def flip_a_stored_byte(store: Path) -> None:
    with lmdb.open(str(store), max_dbs=16, map_size=1 << 30) as env:
        chunks = env.open_db(b"chunks", create=False)
        with env.begin(write=True, db=chunks) as txn:
            key, value = next(iter(txn.cursor()))
            damaged = np.frombuffer(value, np.uint8).copy()
            damaged[7] ^= 1
            txn.put(key, damaged.tobytes())


def test_a_store_in_use_is_status_6(daemon: DaemonProcess, tmp_path: Path) -> None:
    for arguments in (("stats",), ("ls",), ("verify",)):
        ran = warmkv(*arguments, "--json", "--store", str(daemon.store))
        assert ran.status == 6 and ran.value["error"]["class"] == "StoreInUse"
    for arguments in (("--socket", str(daemon.socket)), ("--socket", str(tmp_path / "r" / "s"), "--store", str(daemon.store))):
        ran = warmkv("serve", "--json", *arguments)
        assert ran.status == 6 and set(ran.value) == {"error"}


def test_a_newer_store_is_status_7(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, "--cold-bytes", "16MiB") as daemon:
        daemon.stop()
    with lmdb.open(str(daemon.store), max_dbs=16, map_size=1 << 30) as env:
        meta = env.open_db(b"meta", create=False)
        with env.begin(write=True, db=meta) as txn:
            found = bytes(txn.get(b"format"))
            txn.put(b"format", (200).to_bytes(2, "little") + found[2:])
    for arguments in (("serve", "--socket", str(daemon.socket)), ("stats",)):
        ran = warmkv(*arguments, "--json", "--store", str(daemon.store))
        assert ran.status == 7 and ran.value["error"]["class"] == "StoreTooNew"


def test_no_store_there_is_a_failure_and_makes_none(tmp_path: Path) -> None:
    ran = warmkv("ls", "--json", "--store", str(tmp_path / "absent"))
    assert ran.status == 1 and ran.value["error"]["class"] == "StoreError"
    assert not (tmp_path / "absent").exists()


def test_a_path_that_cannot_be_used_is_one_json_value(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    arguments = ("serve", "--json", "--socket", str(tmp_path / "r" / "s"), "--store", str(tmp_path / "file" / "x"))
    ran = warmkv(*arguments)
    assert ran.status == 1 and set(ran.value) == {"error"}


def test_a_store_looked_at_without_a_daemon(tmp_path: Path, identity: Identity, rows: Rows) -> None:
    with DaemonProcess(tmp_path, "--cold-bytes", "64MiB") as daemon, connect(daemon.socket, strict=True) as client:
        client.save(identity, TOKENS, rows(len(TOKENS)))
        daemon.stop()
    assert warmkv("ls", "--json", "--store", str(daemon.store)).value["total"] == 1
    assert warmkv("stats", "--json", "--store", str(daemon.store)).value["cold"]["entries"] == 1


@pytest.mark.parametrize("arguments", [("stats",), ("stats", "--json"), ("doctor",), ("--help",)], ids=" ".join)
def test_a_reader_that_leaves_early_is_met_in_silence(daemon: DaemonProcess, arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "warmkv.daemon.cli", *arguments]
    environ = child_environ(WARMKV_SOCKET=str(daemon.socket))
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environ, timeout=PATIENCE_S, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_names_from_the_store_cannot_move_the_cursor(ask: Callable[..., Ran], daemon: DaemonProcess, rows: Rows) -> None:
    from warmkv.schema.identity import SINGLE, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime

    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (2, 8)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    hostile = Identity(
        architecture="\x1b[2J[bold]x\n", parameters=bytes(32), settings=b"none", adapters=(), runtime="t", tenant=b"none",
        layers=(LayerSpec(LayerKind.FULL, planes),) * 2, compute_dtype="float32", attention="a", layout="l", tokenizer=bytes(32),
        rope=RopeRegime("default", 1e4, 1.0, 8, 2048, b"none"), runtime_state_version="1", topology=SINGLE,
    )  # fmt: skip
    with connect(daemon.socket, strict=True) as client:
        client.save(hostile, TOKENS, rows(len(TOKENS)))
        out = ask("ls").out
        client.clear(hostile)
    assert "\x1b" not in out and "[bold]x" in out


def test_a_socket_that_goes_while_it_is_looked_at_is_no_wrong_usage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two starters one may remove a stale socket just then."""
    (tmp_path / "s").touch(mode=0o600)
    monkeypatch.setattr(os, "access", lambda *about, **how: False)
    assert run(["status", "--socket", str(tmp_path / "s")]) == 3
