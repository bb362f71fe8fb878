"""Verbs about one prompt: which namespace, which tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import IO, Any, TypeVar

import click

from warmkv.schema.errors import RecordError
from warmkv.schema.records import CLEAN, Lineage, Tokens, as_tokens

F = TypeVar("F", bound=Callable[..., Any])


def prompt(function: F) -> F:
    """``--namespace``, ``--lineage`` and TOKENS."""
    function = click.argument("tokens", type=click.File("rb"), default="-")(function)
    function = click.option(
        "--lineage", metavar="HEX", default=CLEAN.hex(), show_default=False, help="Lineage of the rows; default: clean."
    )(function)
    named = click.option("--namespace", metavar="HEX", required=True, help="The namespace's key, or the beginning of it.")
    return named(function)


def lineage_of(given: str) -> Lineage:
    """Raises click.UsageError."""
    try:
        line = bytes.fromhex(given)
    except ValueError:
        line = b""
    if len(line) != len(CLEAN):
        raise click.UsageError(f"lineage {given!r} is not {2 * len(CLEAN)} hex digits")
    return Lineage(line)


def ids_of(tokens: IO[bytes]) -> Tokens:
    """Token ids of a file with one JSON list. Raises click.UsageError."""
    try:
        value = json.loads(tokens.read())
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"the token ids are not JSON: {exc}") from exc
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**32 for item in value):
        raise click.UsageError("the token ids are not one JSON list of whole numbers from 0 to 4294967295")
    try:
        return as_tokens(value)
    except RecordError as exc:
        raise click.UsageError(str(exc)) from exc
