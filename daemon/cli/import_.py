"""``warmkv import``: take a file in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.store.kvcache_import import SIDECAR_SUFFIX
from warmkv.schema import kvcache_file
from warmkv.schema import messages as m
from warmkv.schema.errors import RecordError, StoreError


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--share", metavar="NAME", default="", help="Into this share, which you may write, instead of your own namespace.")
@command.store_option
@command.common
def import_(as_json: bool, socket: Path | None, store: Path | None, file: Path, share: str) -> int:
    """Take in FILE: a pack that `warmkv export` wrote, or a `.kvcache` file.

    Every byte is checked before it counts; what was damaged, and all behind it, is left out (exit
    status 5). A file that is cut short or no pack ends with 1. Importing again is harmless.

    A `.kvcache` file needs FILE.toml beside it with the keys namespace, model_id, architecture,
    hidden_size and n_heads: it names no weights itself.

    Exit status 1 when there was no room for all of it. When this ends with 0 all is on disk.

    \b
    Examples:
      warmkv import agent.warmkv
      warmkv import --share team agent.warmkv
      warmkv import 91d1c8f2a0b3e4d5_0c1d2e3f40516273.kvcache
    """
    given = {"share": share, "sidecar": _sidecar(file)}
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        raise StoreError(f"{file} cannot be read: {exc.strerror}") from exc
    try:
        size = output.size(os.fstat(fd).st_size)
        with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S, warm_bytes=None) as session:
            with waiting(f"importing {size}", quiet=as_json):
                report: dict[str, Any] = json.loads(session.report(m.Report("import", json.dumps(given).encode()), fd).json)
    finally:
        os.close(fd)
    if as_json:
        output.emit_json({"path": str(file), **report})
    else:
        output.emit_text(
            f"took in {report['records']} records, {output.size(report['total_bytes'])}; {report['duplicates']} were there"
        )
        for reason in report["reasons"]:
            output.emit_text(f"left out: {output.clean(reason)}")
    return exits.OK if report["written"] and not report["refused"] else exits.FAILURE


def _sidecar(file: Path) -> str:
    """Text of what describes a `.kvcache` file, empty for any other."""
    if file.suffix != kvcache_file.SUFFIX:
        return ""
    beside = file.with_name(file.name + SIDECAR_SUFFIX)
    try:
        return beside.read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise RecordError(f"{file.name} names no weights; {beside.name} must say whose rows it holds") from exc
    except UnicodeDecodeError as exc:
        raise RecordError(f"{beside.name} is not UTF-8") from exc
