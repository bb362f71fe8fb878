"""``warmkv import``: take a file in, or a folder of `.kvcache` files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, exits, kvcache_files, output
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.kvcache import about as descriptions
from warmkv.kvstore.kvcache.transfer import Outcome
from warmkv.kvstore.session import Session
from warmkv.kvstore.store.kvcache_import import SIDECAR_SUFFIX
from warmkv.schema import kvcache_file
from warmkv.schema import messages as m
from warmkv.schema.errors import FormatError, RecordError, StoreError, TooLarge, UnsupportedError


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--share", metavar="NAME", default="", help="Into this share, which you may write, instead of your own namespace.")
@click.option("--identity", type=command.PLACE, metavar="TABLE", help="TOML file that describes the model of `.kvcache` files.")
@command.store_option
@command.common
def import_(
    as_json: bool, socket: Path | None, store: Path | None, file: Path, share: str, identity: Path | None
) -> int:  # fmt: skip
    """Take in FILE: a pack that `warmkv export` wrote, a `.kvcache` file, or a folder of those.

    Every byte is checked before it counts; what was damaged, and all behind it, is left out (exit
    status 5). A file that is cut short or no pack ends with 1. Importing again is harmless.

    A `.kvcache` file names no weights itself. TABLE, or FILE.toml beside each file, has the keys model_id,
    architecture, hidden_size and n_heads, and either namespace (the beginning of the key of one that is
    stored) or, in TABLE only, identity (a file of `warmkv export --format identity`, or a pack). Of a folder,
    files that cannot be taken are left out with their reasons.

    Exit status 1 when there was no room for all of it, or files were left out. When this ends with 0 all is
    on disk.

    \b
    Examples:
      warmkv import agent.warmkv
      warmkv import --share team agent.warmkv
      warmkv import --identity lfm2.toml ~/.cache/cera
    """
    folder, ours = os.path.isdir(file), file.suffix != kvcache_file.SUFFIX
    if share and identity is None and (folder or not ours):
        raise click.UsageError("a description beside a file names a namespace, and so its share; --share goes with --identity")
    if identity is None and not folder:
        return _one(as_json, socket, store, file, share)
    if identity is not None and not folder and ours:
        raise click.UsageError(f"{file} is no folder and no .kvcache file, and a pack says itself which model it is of")
    paths, progress = kvcache_files.files_of(file), kvcache_files.Progress()
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S, warm_bytes=None) as session:
        with waiting(f"importing {len(paths)} files", progress.words, quiet=as_json):
            if identity is None:
                outcome = _with_sidecars(session, paths, share, progress)
            else:
                outcome = kvcache_files.take_in(session, identity, paths, share, progress)
    return kvcache_files.said(outcome, file, "took in", as_json=as_json)


def _one(as_json: bool, socket: Path | None, store: Path | None, file: Path, share: str) -> int:
    given = _sidecar(file)
    fd = kvcache_files.descriptor(file)
    try:
        size = output.size(os.fstat(fd).st_size)
        with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S, warm_bytes=None) as session:
            with waiting(f"importing {size}", quiet=as_json):
                report = _report(session, fd, given, share)
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


def _with_sidecars(session: Session, paths: list[Path], share: str, progress: kvcache_files.Progress) -> Outcome:
    """Each file as its own description says."""
    outcome = Outcome()
    for number, path in enumerate(paths):
        progress.tell(number, len(paths))
        try:
            given, fd = _sidecar(path), kvcache_files.descriptor(path, follow=False)
            try:
                report = _report(session, fd, given, share)
            finally:
                os.close(fd)
        except (FormatError, RecordError, UnsupportedError, StoreError, TooLarge) as exc:
            outcome.refused.append((path.name, str(exc)))
            continue
        outcome.files += report["records"]
        outcome.duplicates += report["duplicates"]
        outcome.total_bytes += report["total_bytes"]
        outcome.written &= report["written"]
    return outcome


def _report(session: Session, fd: int, sidecar: str, share: str) -> dict[str, Any]:
    arguments = json.dumps({"share": share, "sidecar": sidecar}).encode()
    report: dict[str, Any] = json.loads(session.report(m.Report("import", arguments), fd).json)
    return report


def _sidecar(file: Path) -> str:
    """Text of what describes a `.kvcache` file, empty for any other."""
    if file.suffix != kvcache_file.SUFFIX:
        return ""
    beside = file.with_name(file.name + SIDECAR_SUFFIX)
    if not os.path.lexists(beside):
        raise RecordError(f"{file.name} names no weights; {beside.name} must say whose rows it holds")
    return descriptions.text(beside)
