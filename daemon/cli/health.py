"""``warmkv health``: does everything run that must?"""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, exits, output


@click.command()
@command.store_option
@command.common
def health(as_json: bool, socket: Path | None, store: Path | None) -> int:
    """Say what is not as it must be: a store folder that is gone, a watcher that died.

    Exit status 0 when all is well, 1 when something is wrong, 3 when no daemon answers. For the
    user the daemon runs as, and for root.

    \b
    Examples:
      warmkv health
      warmkv health --json || systemctl --user restart warmkv
    """
    with command.daemon_or_store(socket, store) as session:
        report = command.ask(session, "health")
    if as_json:
        output.emit_json(report)
    elif report["problems"]:
        output.table("problems", ("part", "problem"), sorted(report["problems"].items()))
    else:
        output.emit_text("all is well")
    return exits.OK if report["healthy"] else exits.FAILURE
