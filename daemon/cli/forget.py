"""``warmkv forget``: drop one prefix."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.daemon.cli.prompt import ids_of, lineage_of, prompt
from warmkv.schema import messages as m


@click.command()
@prompt
@command.store_option
@command.common
def forget(
    as_json: bool, socket: Path | None, store: Path | None, namespace: str, lineage: str, tokens: IO[bytes]
) -> int:  # fmt: skip
    """Drop, from both tiers, what is stored of one prompt and no other prompt needs.

    TOKENS is a file with the prompt's token ids as one JSON list, or - for standard input.
    Exit status 4 when nothing was dropped.

    \b
    Examples:
      warmkv forget --namespace 3f9a prompt.json
      echo '[1, 4093, 338]' | warmkv forget --namespace 3f9a -
    """
    ids, line = ids_of(tokens), lineage_of(lineage)
    with command.daemon_or_store(socket, store) as session:
        key = command.namespace_key(session, namespace)
        done = session.forget(m.Forget(key, line, ids))
    if as_json:
        output.emit_json({"records": done.records, "bytes": done.total_bytes})
    else:
        output.emit_text(f"dropped {done.records} records, {output.size(done.total_bytes)}")
    return exits.OK if done.records else exits.MISS
