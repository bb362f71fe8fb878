"""``warmkv scrub``: check everything now, or see how far the check is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.session import Session

ASK_INTERVAL_S = 0.2


@click.command()
@click.option("--progress", is_flag=True, help="Only say how far the one under way is.")
@click.option("--background", is_flag=True, help="Begin, and do not wait for the end.")
@command.store_option
@command.common
def scrub(as_json: bool, socket: Path | None, store: Path | None, progress: bool, background: bool) -> int:
    """Let the daemon read all records again now, instead of when their time comes.

    At full speed. What is damaged is put aside and never served again; exit status 5 when something
    was. For the user the daemon runs as, and for root; `warmkv verify` checks what belongs to you.

    \b
    Examples:
      warmkv scrub
      warmkv scrub --background
      warmkv scrub --progress --json
    """
    if progress and background or background and store is not None:
        raise click.UsageError("--background goes with neither --progress nor --store")
    with command.daemon_or_store(socket, store, command.LONG_TIMEOUT_S) as session:
        before = _progress(session)
        report = before if progress else command.ask(session, "scrub")
        if not progress and not background:
            with waiting("scrubbing", lambda: _shown(_progress(session)), quiet=as_json):
                # A pass that was under way has not read what was damaged since.
                report = _wait(session, int(before["passes"]) + (2 if before["running"] else 1))
    if as_json:
        output.emit_json(report)
    else:
        output.pairs("scrub", report)
    return exits.CORRUPTION if report["found_bad"] > before["found_bad"] else exits.OK


def _wait(session: Session, passes: int) -> dict[str, Any]:
    """The report once so many passes are done in all, or none is under way."""
    while (report := _progress(session))["passes"] < passes and report["running"]:
        time.sleep(ASK_INTERVAL_S)
    return report


def _progress(session: Session) -> dict[str, Any]:
    return command.ask(session, "scrub", progress=True)


def _shown(report: dict[str, Any]) -> str:
    return f"{report['checked']} of {report['records']} records, {output.size(report['checked_bytes'])}"
