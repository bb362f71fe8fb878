"""``warmkv ls``: what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, output


@click.command()
@click.argument("namespace", required=False, default="")
@command.store_option
@command.common
def ls(as_json: bool, socket: Path | None, store: Path | None, namespace: str) -> int:
    """List your namespaces, or the prefixes of one.

    A namespace holds the state of one model as loaded: its weights, adapters, types and options.
    NAMESPACE is its hex key or the beginning of it. Tokens are never shown. A prefix is listed by its
    last segment, the one used last first; `warmkv show ID` prints those before it.

    \b
    Examples:
      warmkv ls
      warmkv ls 3f9a
      warmkv ls --json | head -c 300
    """
    with command.daemon_or_store(socket, store) as session:
        key = command.namespace_key(session, namespace).hex() if namespace else ""
        report = command.ask(session, "ls", namespace=key) if key else command.ask(session, "ls")
    if as_json:
        output.emit_json(report)
    elif namespace:
        output.table(f"prefixes of {key}", PREFIX_COLUMNS, [prefix_row(row) for row in report["rows"]])
    else:
        columns = ("namespace", "architecture", "layers", "dtype", "records", "states", "tokens", "warm", "cold", "share")
        output.table("namespaces", columns, [_namespace_row(row) for row in report["rows"]])
    if not as_json and report["total"] > len(report["rows"]):
        click.echo(f"warmkv: {report['total'] - len(report['rows'])} more are not listed", err=True)
    return 0


PREFIX_COLUMNS = ("id", "start", "end", "bytes", "warm", "cold", "hits", "pinned")


def prefix_row(row: dict[str, Any]) -> tuple[object, ...]:
    """The columns of one segment record of a report."""
    warm, pinned = ("yes" if row[name] else "no" for name in ("warm", "pinned"))
    return (row["id"], row["start"], row["end"], output.size(row["bytes"]), warm, row["cold"], row["hits"], pinned)


def _namespace_row(row: dict[str, Any]) -> tuple[object, ...]:
    sizes = (output.size(row["warm_bytes"]), output.size(row["cold_bytes"]))
    counts = (row["records"], row["states"], row["tokens"])
    return (row["namespace"], row["architecture"], row["layers"], row["compute_dtype"], *counts, *sizes, row["share"] or "-")
