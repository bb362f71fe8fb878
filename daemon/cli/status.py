"""``warmkv status``: is a daemon there, and how full is it?"""

from __future__ import annotations

from pathlib import Path

import click

from warmkv.daemon.cli import command, output


@click.command()
@command.common
def status(as_json: bool, socket: Path | None) -> int:
    """Say whether a daemon answers, and how full its tiers are.

    Exit status 3 when no daemon answers.

    \b
    Examples:
      warmkv status
      warmkv status --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["warm_bytes"])'
    """
    with command.daemon(socket) as session:
        report = {"socket": str(session.path), **command.ask(session, "status")}
    if as_json:
        output.emit_json(report)
    else:
        output.pairs("warmkv daemon", report)
    return 0
