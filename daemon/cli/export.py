"""``warmkv export``: a prompt, or a namespace, as one file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, output
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.store.exporting import new_file
from warmkv.schema import messages as m
from warmkv.schema.errors import StoreError


@click.command()
@click.argument("file", type=command.PLACE)
@click.option("--namespace", metavar="HEX", default="", help="All of this namespace; its key, or the beginning of it.")
@click.option("--id", "id_", metavar="HEX", default="", help="The prompt of this record; its id, or at least 4 digits of it.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@command.store_option
@command.common
def export(
    as_json: bool, socket: Path | None, store: Path | None, file: Path, namespace: str, id_: str, force: bool
) -> int:  # fmt: skip
    """Write a stored prompt, its rows, states and anchors, or a whole namespace to FILE.

    The file is yours alone (mode 0600), appears only once it is whole, and holds the prompt's tokens:
    treat it like the prompt. `warmkv import` takes it in on this machine or another, for the same
    model as loaded. Exit status 4 when there is nothing of that name.

    \b
    Examples:
      warmkv export --id 5b21c0 agent.warmkv
      warmkv export --namespace 3f9a model.warmkv
    """
    if bool(namespace) == bool(id_):
        raise click.UsageError("exactly one of --namespace HEX and --id HEX is needed")
    wanted = (namespace or id_).lower()
    if len(wanted) < 4 or set(wanted) - set("0123456789abcdef"):
        raise click.UsageError(f"{wanted!r} is not at least 4 hex digits")
    if file.exists() and not force:
        raise StoreError(f"{file} exists; --force replaces it")
    arguments = json.dumps({"namespace": wanted} if namespace else {"id": wanted}).encode()
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, new_file(file) as fd:
        with waiting("exporting", lambda: output.size(os.fstat(fd).st_size), quiet=as_json):
            report: dict[str, Any] = json.loads(session.report(m.Report("export", arguments), fd).json)
    if as_json:
        output.emit_json({"path": str(file), **report})
    else:
        left = f"; {report['skipped']} were dropped meanwhile" if report["skipped"] else ""
        output.emit_text(f"wrote {report['records']} records, {output.size(report['total_bytes'])} to {file}{left}")
    return 0
