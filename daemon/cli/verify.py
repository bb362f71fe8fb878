"""``warmkv verify``: read everything again and compare it with its digests."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.waiting import waiting


@click.command()
@command.store_option
@command.common
def verify(as_json: bool, socket: Path | None, store: Path | None) -> int:
    """Read every stored byte again, compare it with its digest, and check the index.

    What is damaged is put aside and never served again. Takes as long as reading the store does.
    Exit status 5 when something was damaged.

    \b
    Examples:
      warmkv verify
      warmkv verify --store ~/.local/share/warmkv/store
    """
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session, waiting("reading", quiet=as_json):
        report = command.ask(session, "verify")
    if as_json:
        output.emit_json(report)
    else:
        output.emit_text(f"checked {report['checked']} records, {output.size(report['total_bytes'])}")
        if report["bad"]:
            output.table("damaged", ("id", "reason"), [(item["id"], item["reason"]) for item in report["bad"]])
        for problem in report["problems"]:
            output.emit_text(f"index: {output.clean(problem)}")
    return exits.CORRUPTION if report["bad"] or report["problems"] else exits.OK
