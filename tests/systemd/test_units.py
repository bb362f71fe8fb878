"""The units as systemd reads them, and as ``warmkv units`` hands them out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from warmkv.daemon import config
from warmkv.daemon.cli.exits import TOO_NEW, USAGE
from warmkv.daemon.cli.group import VERBS
from warmkv.daemon.cli.units import out_of_reach, rendered
from warmkv.daemon.testing import PATIENCE_S, child_environ

SYSTEM = {"warmkv.service", "warmkv.socket", "warmkv-evict.service", "warmkv-evict.timer", "warmkv-sysusers.conf"}
USER = SYSTEM - {"warmkv-sysusers.conf"}
analyzes = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
both = pytest.mark.parametrize("user", [False, True], ids=["system", "user"])
Write = Callable[[bool], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the units, started by a program that exists, into a folder."""
    program = tmp_path / "warmkv"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)

    def written(user: bool) -> Path:
        folder = tmp_path / "units"
        folder.mkdir()
        for name, text in rendered(user=user, program=str(program)).items():
            (folder / name).write_text(text)
        return folder

    return written


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    command = ["systemd-analyze", *arguments]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@analyzes
@both
def test_systemd_finds_nothing_to_complain_about(write: Write, user: bool) -> None:
    folder = write(user)
    units = [f"./{name}" for name in (USER if user else SYSTEM) if not name.endswith(".conf")]
    done = analyze(folder, *(["--user"] if user else []), "verify", *units)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@analyzes
def test_systemd_would_complain_about_a_unit_that_is_wrong(write: Write) -> None:
    folder = write(False)
    unit = folder / "warmkv.service"
    unit.write_text(unit.read_text().replace("KillMode=mixed", "KillMod=mixed"))
    assert "KillMod" in analyze(folder, "verify", "./warmkv.service").stderr


@analyzes
@pytest.mark.parametrize("name", ["warmkv.service", "warmkv-evict.service"])
def test_system_services_are_exposed_to_1_at_most(write: Write, name: str) -> None:
    done = analyze(write(False), "security", "--offline=yes", f"./{name}")
    level = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) <= 1.0


@both
def test_what_the_daemon_needs_of_its_unit(user: bool) -> None:
    unit = settings(rendered(user=user, program="/opt/warmkv serve")["warmkv.service"])
    assert unit["Type"] == ["notify"] and unit["NotifyAccess"] == ["main"]
    assert "PrivateUsers" not in unit, "peers would all look like nobody"
    assert int(unit["FileDescriptorStoreMax"][0]) == config.FD_STORE_MAX
    assert int(unit["LimitNOFILE"][0]) > 2 * config.FD_STORE_MAX
    assert unit["RestartPreventExitStatus"] == [f"{USAGE} {TOO_NEW}"]
    assert {"RestartSec", "StartLimitIntervalSec", "StartLimitBurst", "WatchdogSec", "KillMode", "ExecReload"} <= unit.keys()
    assert "MemoryAccounting" in unit


def test_the_directory_of_the_socket_outlives_the_service() -> None:
    units = rendered(user=False, program="/usr/bin/warmkv")
    service, socket = settings(units["warmkv.service"]), settings(units["warmkv.socket"])
    (path,) = socket["ListenStream"]
    assert path == f"/run/{service['RuntimeDirectory'][0]}/warmkv.sock"
    assert service["RuntimeDirectoryPreserve"] == ["yes"] and service["RuntimeDirectoryMode"] == ["0750"]
    assert f"WARMKV_SOCKET={path}" in service["Environment"]
    assert socket["SocketMode"] == ["0660"] and socket["SocketGroup"] == service["Group"]
    assert "SocketUser" not in socket  # clients accept sockets of root and of their own user only
    # Else the manager chowns the folder, and what is in it, when the service starts.
    (made,) = socket["ExecStartPre"]
    user, mode, folder = service["User"][0], service["RuntimeDirectoryMode"][0], Path(path).parent
    assert made.split()[1:] == ["-d", "-o", user, "-g", user, "-m", mode, str(folder)]


@both
def test_settings_in_units_are_settings_of_the_daemon(user: bool) -> None:
    for name, text in rendered(user=user, program="/usr/bin/warmkv").items():
        given = [value.partition("=")[0] for value in settings(text).get("Environment", [])]
        known = {config.variable(item) for item in config.SETTINGS}
        assert {item for item in given if item.startswith("WARMKV_")} <= known, name


@both
def test_every_program_line_is_a_verb_of_this_program(user: bool) -> None:
    lines = [line for text in rendered(user=user, program="/x/y").values() for line in settings(text).get("ExecStart", [])]
    assert sorted(lines) == ["/x/y evict", "/x/y serve"]
    assert {line.split()[1] for line in lines} <= set(VERBS)


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("/usr/bin/python3 -m warmkv.daemon.cli", "/usr/bin/python3 -m warmkv.daemon.cli serve"),
        ("'/opt/my tools/warmkv'", '"/opt/my tools/warmkv" serve'),
        ("/opt/50%/$x/warmkv", "/opt/50%%/$$x/warmkv serve"),
    ],
)
def test_programs_are_named_as_systemd_reads_them(program: str, line: str) -> None:
    assert settings(rendered(user=False, program=program)["warmkv.service"])["ExecStart"] == [line]


@pytest.mark.parametrize("program", ["warmkv", "", "./warmkv", "~/bin/warmkv"])
def test_a_program_without_an_absolute_path_is_refused(program: str) -> None:
    with pytest.raises(click.UsageError, match="absolute path"):
        rendered(user=True, program=program)


def test_a_program_below_a_home_can_be_seen_by_the_system_service() -> None:
    for program, expected in (("/home/ann/.venv/bin/warmkv", "read-only"), ("/usr/bin/warmkv", "yes")):
        units = rendered(user=False, program=program)
        assert settings(units["warmkv.service"])["ProtectHome"] == [expected]


def test_programs_that_another_user_cannot_run_are_named(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    program = tmp_path / "closed" / "warmkv"
    program.write_text("")
    program.chmod(0o755)
    assert out_of_reach([str(program)]) == [str(program)]
    assert out_of_reach(["/bin/sh", "/nonexistent/warmkv"]) == []


@both
def test_the_verb_writes_what_it_prints(tmp_path: Path, user: bool) -> None:
    command = [sys.executable, "-m", "warmkv.daemon.cli", "units", "--json", *(["--user"] if user else [])]
    ran = [
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE_S, env=child_environ(), check=True)
        for more in ([], ["--out", str(tmp_path / "a" / "b")])
    ]
    printed, written = json.loads(ran[0].stdout)["units"], json.loads(ran[1].stdout)["written"]
    assert {Path(path).name: Path(path).read_text() for path in written} == printed
    assert set(printed) == (USER if user else SYSTEM)
    (line,) = settings(printed["warmkv.service"])["ExecStart"]
    assert os.access(line.split()[0].strip('"'), os.X_OK)
