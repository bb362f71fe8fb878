"""``warmkv forget``: drop one prefix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import click

from warmkv.daemon.cli import command, exits, output
from warmkv.schema import messages as m
from warmkv.schema.errors import RecordError
from warmkv.schema.records import CLEAN, Tokens, as_tokens


@click.command()
@click.option("--namespace", metavar="HEX", required=True, help="The namespace's key, or the beginning of it.")
@click.option("--lineage", metavar="HEX", default=CLEAN.hex(), show_default=False, help="Lineage of the rows; default: clean.")
@click.argument("tokens", type=click.File("rb"), default="-")
@command.common
def forget(as_json: bool, socket: Path | None, namespace: str, lineage: str, tokens: IO[bytes]) -> int:
    """Drop, from both tiers, what is stored of one prompt and no other prompt needs.

    TOKENS is a file with the prompt's token ids as one JSON list, or - for standard input.
    Exit status 4 when nothing was dropped.

    \b
    Examples:
      warmkv forget --namespace 3f9a prompt.json
      echo '[1, 4093, 338]' | warmkv forget --namespace 3f9a -
    """
    ids = _ids(tokens)
    try:
        line = bytes.fromhex(lineage)
    except ValueError:
        line = b""
    if len(line) != len(CLEAN):
        raise click.UsageError(f"lineage {lineage!r} is not {2 * len(CLEAN)} hex digits")
    with command.daemon(socket) as session:
        key = command.namespace_key(session, namespace)
        done = session.forget(m.Forget(key, line, ids))
    if as_json:
        output.emit_json({"records": done.records, "bytes": done.total_bytes})
    else:
        output.emit_text(f"dropped {done.records} records, {output.size(done.total_bytes)}")
    return exits.OK if done.records else exits.MISS


def _ids(tokens: IO[bytes]) -> Tokens:
    try:
        value = json.loads(tokens.read())
    except ValueError as exc:
        raise click.UsageError(f"the token ids are not JSON: {exc}") from exc
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**32 for item in value):
        raise click.UsageError("the token ids are not one JSON list of whole numbers from 0 to 4294967295")
    try:
        return as_tokens(value)
    except RecordError as exc:
        raise click.UsageError(str(exc)) from exc
