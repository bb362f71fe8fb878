"""``warmkv reload``: let the daemon read its settings again."""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, exits, output


@click.command()
@command.common
def reload(as_json: bool, socket: Path | None) -> int:
    """Let the daemon read its configuration again, and say what changed.

    Where the new one is not valid the old one stays in force, and the exit status is 1. For the user
    the daemon runs as, and for root.

    \b
    Examples:
      warmkv reload
      warmkv reload --json
    """
    with command.daemon(socket, command.LONG_TIMEOUT_S) as session:
        report = command.ask(session, "reload")
    if as_json:
        output.emit_json(report)
    else:
        output.pairs("settings", report)
    return exits.OK if report["ok"] else exits.FAILURE
