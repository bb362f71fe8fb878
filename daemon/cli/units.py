"""``warmkv units``: the systemd units, with the path of this installation in them."""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from warmkv.daemon.cli import command, output

#: What the units of the package name, as a distribution would install it.
PACKAGED = "/usr/bin/warmkv"
KINDS = (".service", ".socket", ".timer", ".conf")
#: Below these a system service sees nothing by default.
HOMES = ("/home", "/root", "/run/user")


@click.command()
@click.option("--user", is_flag=True, help="Units for one user's own manager instead of the system's.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write them into this folder.")
@click.option("--program", metavar="COMMAND", help="What starts warmkv. Default: the program that runs now.")
@command.as_json
def units(as_json: bool, user: bool, out: Path | None, program: str | None) -> int:
    """Print the systemd units, or write them into a folder.

    \b
    Examples:
      warmkv units --user --out ~/.config/systemd/user
      systemctl --user daemon-reload
      systemctl --user enable --now warmkv.socket warmkv-evict.timer
    \b
      warmkv units --out /etc/systemd/system
      mkdir -p /etc/sysusers.d
      mv /etc/systemd/system/warmkv-sysusers.conf /etc/sysusers.d/warmkv.conf
      systemd-sysusers && systemctl daemon-reload
      systemctl enable --now warmkv.socket warmkv-evict.timer
    """
    started = program or running_program()
    made = rendered(user=user, program=started)
    for path in () if user else out_of_reach([shlex.split(started)[0], *([] if program else [sys.executable])]):
        click.echo(f"warmkv: the system service cannot run {path}: install warmkv elsewhere, such as in /opt/warmkv", err=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (out / name).write_text(text)
    if as_json:
        output.emit_json({"written": [str(out / name) for name in made]} if out is not None else {"units": made})
    elif out is not None:
        output.emit_text("\n".join(str(out / name) for name in made))
    else:
        output.emit_text("\n".join(f"# {name}\n{text}" for name, text in made.items()).rstrip())
    return 0


def rendered(*, user: bool, program: str) -> Mapping[str, str]:
    """Name and text of every unit, started by ``program`` (a command line as a shell would read it)."""
    folder: Traversable = files("warmkv.systemd")
    if user:
        folder = folder / "user"
    found = {item.name: item.read_text("utf-8") for item in folder.iterdir() if item.name.endswith(KINDS)}
    return {name: _starting(found[name], program, user=user) for name in sorted(found)}


def running_program() -> str:
    """What starts the program that runs now, wherever somebody stands."""
    script = Path(sys.argv[0])
    if script.name != "warmkv":
        script = Path(sys.executable).parent / "warmkv"
    if os.access(script, os.X_OK) and script.is_file():
        return str(script.absolute())
    return shutil.which("warmkv") or f"{sys.executable} -m warmkv.daemon.cli"


def out_of_reach(programs: Iterable[str]) -> list[str]:
    """Those of ``programs``, links followed, that another user may not run or that lie in a private
    /tmp once it is a service. What is not there is left to systemd."""
    found = []
    for path in dict.fromkeys(path for name in programs for path in (Path(name), Path(name).resolve()) if path.exists()):
        modes = [os.stat(step).st_mode for step in (path, *path.parents)]
        hidden = any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp"))
        if hidden or not all(mode & stat.S_IXOTH for mode in modes):
            found.append(str(path))
    return found


def _starting(text: str, program: str, *, user: bool) -> str:
    words = shlex.split(program)
    if not words or not os.path.isabs(words[0]):
        raise click.UsageError(f"program {program!r} does not begin with an absolute path")
    text = text.replace(f"ExecStart={PACKAGED} ", f"ExecStart={' '.join(map(_word, words))} ")
    if not user and any(Path(words[0]).is_relative_to(home) for home in HOMES):
        text = text.replace("ProtectHome=yes", "ProtectHome=read-only")
    return text


def _word(word: str) -> str:
    """A word of a command line as systemd reads it: % and $ stand for themselves."""
    word = word.replace("%", "%%").replace("$", "$$").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{word}"' if any(char in word for char in " \t'\"\\;") else word
