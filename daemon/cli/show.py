"""``warmkv show``: one stored prefix, its chain, anchors and place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.ls import PREFIX_COLUMNS, prefix_row

STATE_COLUMNS = ("id", "position", "provides", "bytes", "warm", "cold", "hits", "pinned")


@click.command()
@click.argument("id_", metavar="ID")
@command.store_option
@command.common
def show(as_json: bool, socket: Path | None, store: Path | None, id_: str) -> int:
    """Show a stored prefix: the chain of segments behind it, the states kept along it, its
    anchors, its bytes per tier.

    ID is the hex id of a segment or state as `warmkv ls NAMESPACE` prints it, or at least 4 digits of its
    beginning. Exit status 4 when there is none.

    \b
    Examples:
      warmkv show 5b21c0
      warmkv show 5b21c0 --json
    """
    if len(id_) < 4 or set(id_.lower()) - set("0123456789abcdef"):
        raise click.UsageError(f"id {id_!r} is not at least 4 hex digits")
    with command.daemon_or_store(socket, store) as session:
        report = command.ask(session, "show", id=id_.lower())
    if report["found"] > 1:
        raise click.UsageError(f"id {id_} is ambiguous: {', '.join(report['ids'])}")
    if as_json:
        output.emit_json(report)
    elif report["found"]:
        _print(report)
    else:
        click.echo(f"warmkv: nothing of yours is stored under {id_}", err=True)
    return exits.OK if report["found"] else exits.MISS


def _print(report: dict[str, object]) -> None:
    chain, states, anchors = report.pop("chain"), report.pop("states"), report.pop("anchors")
    assert isinstance(chain, list) and isinstance(states, list) and isinstance(anchors, list)
    report["provides"] = ", ".join(cast(list[str], report["provides"])) or "rows"
    output.pairs(f"prefix {report['id']}", report)
    output.table("chain, root first", PREFIX_COLUMNS, [prefix_row(row) for row in chain])
    if states:
        output.table("states along it", STATE_COLUMNS, [_state_row(row) for row in states])
    if anchors:
        columns = ("position", "kind", "depth", "semantic_hash")
        output.table("anchors", columns, [[row[name] for name in columns] for row in anchors])


def _state_row(row: dict[str, Any]) -> tuple[object, ...]:
    id_, _, position, *rest = prefix_row(row)
    return (id_, position, " ".join(row["provides"]), *rest)
