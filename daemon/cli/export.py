"""``warmkv export``: a prompt, or a namespace, as one file, or as `.kvcache` files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, kvcache_files, output
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.store.exporting import new_file
from warmkv.schema import messages as m
from warmkv.schema.errors import StoreError


@click.command()
@click.argument("file", type=command.PLACE)
@click.option("--namespace", metavar="HEX", default="", help="All of this namespace; its key, or the beginning of it.")
@click.option("--id", "id_", metavar="HEX", default="", help="The prompt of this record; its id, or at least 4 digits of it.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["pack", "kvcache", "identity"]),
    default="pack",
    show_default=True,
    help="A pack of ours, cera's files, or only the model's identity.",
)
@click.option("--identity", type=command.PLACE, metavar="TABLE", help="TOML file that describes the model for `.kvcache` files.")
@click.option("--force", is_flag=True, help="Replace what exists.")
@command.store_option
@command.common
def export(
    as_json: bool,
    socket: Path | None,
    store: Path | None,
    file: Path,
    namespace: str,
    id_: str,
    format_: str,
    identity: Path | None,
    force: bool,
) -> int:
    """Write a stored prompt, its rows, states and anchors, or a whole namespace to FILE.

    The file is yours alone (mode 0600), appears only once it is whole, and holds the prompt's tokens:
    treat it like the prompt. `warmkv import` takes it in on this machine or another, for the same
    model as loaded. Exit status 4 when there is nothing of that name.

    With --format kvcache, FILE is a folder that gets a file for every prompt, or for --id may be one file;
    TABLE is that of `warmkv import`. Prompts that such a file cannot tell (shifted or evicted rows, images)
    are left out with the reason, and the exit status is 1. A prompt ends where one was saved; of models with
    states, where a state is held.

    \b
    Examples:
      warmkv export --id 5b21c0 agent.warmkv
      warmkv export --namespace 3f9a model.warmkv
      warmkv export --format kvcache --identity lfm2.toml --namespace 3f9a ~/.cache/cera
      warmkv export --format identity --namespace 3f9a lfm2.identity
    """
    if bool(namespace) == bool(id_):
        raise click.UsageError("exactly one of --namespace HEX and --id HEX is needed")
    wanted = (namespace or id_).lower()
    if len(wanted) < 4 or set(wanted) - set("0123456789abcdef"):
        raise click.UsageError(f"{wanted!r} is not at least 4 hex digits")
    if identity is not None and format_ != "kvcache":
        raise click.UsageError("--identity is for --format kvcache")
    if format_ == "identity" and id_:
        raise click.UsageError("--format identity is of a --namespace HEX")
    chosen = {"namespace": wanted} if namespace else {"id": wanted}
    if format_ == "kvcache":
        table, progress = kvcache_files.require_table(identity), kvcache_files.Progress()
        with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session:
            with waiting("exporting", progress.words, quiet=as_json):
                outcome = kvcache_files.write_out(session, table, chosen, file, progress, force=force)
        return kvcache_files.said(outcome, file, "wrote", as_json=as_json)
    if file.exists() and not force:
        raise StoreError(f"{file} exists; --force replaces it")
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, new_file(file) as fd:
        if format_ == "identity":
            report = kvcache_files.write_identity(session, wanted, fd)
        else:
            with waiting("exporting", lambda: output.size(os.fstat(fd).st_size), quiet=as_json):
                report = json.loads(session.report(m.Report("export", json.dumps(chosen).encode()), fd).json)
    _say(report, file, as_json=as_json)
    return 0


def _say(report: dict[str, Any], file: Path, *, as_json: bool) -> None:
    if as_json:
        output.emit_json({"path": str(file), **report})
    elif "records" not in report:
        output.emit_text(f"wrote {output.size(report['total_bytes'])} to {file}")
    else:
        left = f"; {report['skipped']} were dropped meanwhile" if report["skipped"] else ""
        output.emit_text(f"wrote {report['records']} records, {output.size(report['total_bytes'])} to {file}{left}")
