"""``warmkv watch``: weight files whose change retires what was computed with the old ones."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, exits, output


@click.group()
def watch() -> None:
    """Register weight files with a namespace: once one changes, what was computed with the old
    weights is dropped.

    State of other weights is never handed out anyway; this gives its room back. Each of add, ls
    and rm takes --json.

    \b
    Examples:
      warmkv watch add 3f9a ~/models/model.safetensors
      warmkv watch ls --json
      warmkv watch rm 3f9a
    """


@watch.command()
@click.argument("namespace")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="PATH...")
@command.store_option
@command.common
def add(as_json: bool, socket: Path | None, store: Path | None, namespace: str, paths: tuple[Path, ...]) -> int:
    """Watch the files PATH... for NAMESPACE, its hex key or the beginning of it.

    \b
    Examples:
      warmkv watch add 3f9a ~/models/model-00001.safetensors ~/models/model-00002.safetensors
    """
    given = [str(path.absolute()) for path in paths]
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session:
        report = command.ask(session, "watch", action="add", namespace=namespace, paths=given)
    _told(as_json, report, f"{report['files']} files are watched for namespace {report['namespace']}")
    return 0


@watch.command()
@click.argument("namespace")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="[PATH]...")
@command.store_option
@command.common
def rm(as_json: bool, socket: Path | None, store: Path | None, namespace: str, paths: tuple[Path, ...]) -> int:
    """Watch these files of NAMESPACE, or with no PATH all of them, no longer.

    Exit status 4 when none of them was watched.

    \b
    Examples:
      warmkv watch rm 3f9a
    """
    given = [str(path.absolute()) for path in paths] or None
    with command.daemon_or_store(socket, store) as session:
        report = command.ask(session, "watch", action="rm", namespace=namespace, paths=given)
    _told(as_json, report, f"{report['removed']} files are no longer watched for namespace {report['namespace']}")
    return exits.OK if report["removed"] else exits.MISS


@watch.command()
@command.store_option
@command.common
def ls(as_json: bool, socket: Path | None, store: Path | None) -> int:
    """List the files you registered.

    \b
    Examples:
      warmkv watch ls
    """
    with command.daemon_or_store(socket, store) as session:
        report = command.ask(session, "watch", action="ls")
    if as_json:
        output.emit_json(report)
    else:
        listed = [(row["namespace"], item) for row in report["rows"] for item in row["files"]]
        rows = [(key, item["path"], output.size(item["bytes"]), item["digest"]) for key, item in listed]
        output.table("watched", ("namespace", "path", "size", "digest"), rows)
    return 0


def _told(as_json: bool, report: dict[str, object], text: str) -> None:
    if as_json:
        output.emit_json(report)
    else:
        output.emit_text(text)
