"""The group of verbs, and the one place where errors become words and exit statuses."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from warmkv.daemon.cli import exits, output
from warmkv.schema.errors import WarmKVError

VERBS = (
    "serve", "status", "health", "ls", "show", "stats", "export", "import", "pin", "unpin", "clear", "forget", "evict", "verify",
    "scrub", "compact", "backup", "watch", "reload", "units", "doctor", "completion",
)  # fmt: skip
#: Where a verb's module has another name: Python keeps the verb for itself.
_MODULES = {"import": "import_"}
INTERRUPTED = 130
COMPLETE = "_WARMKV_COMPLETE"

HELP = """A persistent prefix cache for local LLM agents.

\b
Start the daemon, look at it, look into it:
  warmkv serve
  warmkv status
  warmkv ls

Every verb takes --json and then prints exactly one JSON value, errors included.

\b
Exit status:
  0 done              1 failure           2 wrong usage
  3 no daemon         4 nothing found     5 corruption found
  6 store in use      7 store is of a newer format
"""


class Verbs(click.Group):
    """Loads a verb's module when it is called or described."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        module = _MODULES.get(name, name)
        command = getattr(importlib.import_module(f"warmkv.daemon.cli.{module}"), module)
        assert isinstance(command, click.Command)
        return command


@click.command("warmkv", cls=Verbs, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, help="Print the version and exit.")
def warmkv() -> None:
    """Replaced by HELP."""


def run(arguments: Sequence[str]) -> int:
    """Run a command line; its exit status. Never raises."""
    as_json = "--json" in arguments
    try:
        return _invoke(list(arguments))
    except BrokenPipeError:
        output.discard()
        return exits.OK
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort) as exc:
        return _failed(exc, "interrupted", INTERRUPTED, as_json)
    except click.UsageError as exc:
        return _usage(exc, as_json)
    except click.ClickException as exc:
        return _failed(exc, exc.format_message(), exits.FAILURE, as_json)
    except (WarmKVError, OSError) as exc:
        return _failed(exc, str(exc), exits.status_of(exc), as_json)


def _invoke(arguments: list[str]) -> int:
    """What click's own main does, except that a closed pipe is left to `run`."""
    completing = os.environ.get(COMPLETE)
    if completing:  # set by the shell while it completes
        return shell_complete(warmkv, {}, "warmkv", COMPLETE, completing)
    with warmkv.make_context("warmkv", arguments) as context:
        status = warmkv.invoke(context)
        return status if isinstance(status, int) else exits.OK


def _usage(exc: click.UsageError, as_json: bool) -> int:
    if as_json:
        return _failed(exc, exc.format_message(), exits.USAGE, as_json)
    exc.show()
    return exits.USAGE


def _failed(exc: BaseException, message: str, status: int, as_json: bool) -> int:
    code = exc.code if isinstance(exc, WarmKVError) else status
    name = "UsageError" if isinstance(exc, click.UsageError) else type(exc).__name__
    try:
        if as_json:
            output.emit_json({"error": {"code": code, "class": name, "message": message}})
        else:
            print(f"warmkv: {output.clean(message)}", file=sys.stderr)
    except BrokenPipeError:
        output.discard()
    except OSError as error:  # nowhere to put it, such as a full disk
        output.discard()
        print(f"warmkv: {output.clean(message)}; standard output cannot be written: {error.strerror}", file=sys.stderr)
    return status
