"""``warmkv doctor``: what of this machine, and of this set-up, would get in the way?"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import click

from warmkv.daemon import config
from warmkv.daemon.cli import command, exits, output
from warmkv.kvstore import memfd, paths
from warmkv.kvstore.store import filesystem
from warmkv.schema import protocol
from warmkv.schema.errors import WarmKVError

State = Literal["ok", "warn", "fail"]
LIBRARIES = ("warmkv", "numpy", "flatbuffers", "lmdb", "xxhash", "click", "rich", "platformdirs", "watchdog")
FEW_DESCRIPTORS = 4096
LITTLE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: fine, doubtful, or in the way."""

    name: str
    state: State
    detail: str


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), metavar="PATH", help="Configuration file to look at.")
@command.common
def doctor(as_json: bool, socket: Path | None, config_path: Path | None) -> int:
    """Check this machine and this set-up: kernel, limits, directories, libraries, daemon.

    Exit status 1 when something would keep the daemon from working; doubts alone are 0.

    \b
    Examples:
      warmkv doctor
      warmkv doctor --json
    """
    found = list(checks(socket, config_path))
    failed = any(item.state == "fail" for item in found)
    if as_json:
        output.emit_json({"ok": not failed, "checks": [asdict(item) for item in found]})
    else:
        output.table("warmkv doctor", ("check", "state", "detail"), [(item.name, item.state, item.detail) for item in found])
    return exits.FAILURE if failed else exits.OK


def checks(socket: Path | None, config_path: Path | None) -> Iterator[Check]:
    """Every check; one that itself fails is reported as such."""
    settings = None
    try:
        settings = config.load({"socket": socket}, config_path)
        yield Check("configuration", "ok", str(settings.source or "defaults, no file"))
    except WarmKVError as exc:
        yield Check("configuration", "fail", str(exc))
    where = settings.socket if settings else command.socket_path(socket)
    try:
        store = settings.store if settings else paths.default_store_path()
    except WarmKVError:  # no home: said above
        return
    looked: list[tuple[str, Callable[[], Check]]] = [
        ("kernel", _kernel),
        ("descriptors", _descriptors),
        ("runtime directory", lambda: _directory(where.parent)),
        ("socket", lambda: _socket(where, settings.socket_gid if settings else -1)),
        ("store directory", lambda: _store(store)),
        ("file system", lambda: _file_system(store)),
        ("free space", lambda: _free(store)),
        ("libraries", _libraries),
        ("daemon", lambda: _daemon(where)),
    ]
    for name, look in looked:
        try:
            yield look()
        except (OSError, WarmKVError) as exc:
            yield Check(name, "fail", str(exc))
    for unknown in settings.unknown_variables if settings else ():
        yield Check("environment", "warn", f"{unknown} is set, nothing reads it")


def _kernel() -> Check:
    """Sealed memory, for real: made, filled, sealed, proven unwritable, mapped."""
    fd = memfd.create("warmkv:doctor", 4096)
    try:
        memfd.write(fd, bytes(4096), 0)
        memfd.seal(fd)
        memfd.check_sealed(fd, 4096)
        memfd.map_private(fd, 4096).close()
        try:
            os.pwrite(fd, b"x", 0)
        except PermissionError:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            return Check("kernel", "ok", f"Linux {platform.release()}, sealed memory works (seals {seals:#x})")
    finally:
        os.close(fd)
    return Check("kernel", "fail", "sealed memory could still be written")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    state: State = "ok" if hard == resource.RLIM_INFINITY or hard >= FEW_DESCRIPTORS else "warn"
    return Check("descriptors", state, f"limit {soft}, the daemon raises its own to {hard}; each warm segment takes one")


def _directory(path: Path) -> Check:
    if not path.exists():
        return Check("runtime directory", "ok", f"{path} does not exist yet; the daemon creates it with mode 0700")
    found = path.stat()
    detail = f"{path}, mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}"
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return Check("runtime directory", "ok" if private else "fail", detail if private else f"{detail}; must be yours alone")


def _socket(path: Path, group: int) -> Check:
    """``group`` may open the socket; -1: nobody else may."""
    paths.check_socket_path(path)
    if not os.path.lexists(path):
        return Check("socket", "ok", f"{path} is free")
    found = os.lstat(path)
    if not stat.S_ISSOCK(found.st_mode):
        return Check("socket", "fail", f"{path} is no socket ({stat.filemode(found.st_mode)})")
    shared = f", group {found.st_gid}" if found.st_mode & 0o070 else ""
    meant = not found.st_mode & 0o007 and (not shared or found.st_gid == group)
    return Check("socket", "ok" if meant else "warn", f"{path}, mode {stat.S_IMODE(found.st_mode):04o}{shared}")


def _store(path: Path) -> Check:
    place = _existing(path)
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("store directory", "fail", f"{place} is not writable")
    if place != path:
        return Check("store directory", "ok", f"{path} does not exist yet")
    mode = stat.S_IMODE(path.stat().st_mode)
    return Check("store directory", "warn" if mode & 0o077 else "ok", f"{path}, mode {mode:04o}")


def _file_system(path: Path) -> Check:
    kind = filesystem.kind(path)
    doubt = filesystem.doubt(kind)
    return Check("file system", "warn" if doubt else "ok", f"{kind}, {doubt}" if doubt else kind)


def _free(path: Path) -> Check:
    free = shutil.disk_usage(_existing(path)).free
    return Check("free space", "warn" if free < LITTLE_BYTES else "ok", f"{output.size(free)} at {_existing(path)}")


def _libraries() -> Check:
    found, missing = [f"Python {sys.version.split()[0]}"], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    lacking = f"; not installed as distributions: {', '.join(missing)}" if missing else ""
    return Check("libraries", "warn" if missing else "ok", ", ".join(found) + lacking)


def _daemon(path: Path) -> Check:
    try:
        with command.daemon(path) as session:
            epoch = session.greet()
    except WarmKVError as exc:
        return Check("daemon", "warn", str(exc))
    return Check("daemon", "ok", f"answers at {path}, protocol {protocol.VERSION_MAX}, epoch {epoch:016x}")


def _existing(path: Path) -> Path:
    return next(item for item in (path, *path.parents) if item.exists())
