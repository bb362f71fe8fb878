"""What the verbs share: their common options and the session they ask."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from warmkv.kvstore.client import environment
from warmkv.kvstore.client.session import RemoteSession
from warmkv.kvstore.session import Session
from warmkv.schema import messages as m
from warmkv.schema.errors import StoreError, UnknownNamespace
from warmkv.schema.records import NamespaceKey

F = TypeVar("F", bound=Callable[..., Any])
TIMEOUT_S = 5.0
#: A long report may read the whole store.
LONG_TIMEOUT_S = 600.0

#: Whether something lies there, and may be opened, is asked by who opens it: it may be gone in between.
PLACE = click.Path(path_type=Path, readable=False)

as_json = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON value, errors included.")
socket_option = click.option(
    "--socket", type=PLACE, metavar="PATH",
    help="The daemon's socket. Default: $WARMKV_SOCKET, else warmkv/warmkv.sock in the runtime directory.",
)  # fmt: skip
store_option = click.option(
    "--store", type=PLACE, metavar="PATH",
    help="Open this store directly instead of asking a daemon; no daemon may be using it.",
)  # fmt: skip


def common(function: F) -> F:
    """``--json`` and ``--socket``, as every verb that asks the daemon takes them."""
    return as_json(socket_option(function))


def socket_path(given: Path | None) -> Path:
    return given if given is not None else environment.socket_path()


@contextmanager
def daemon(given: Path | None, timeout_s: float = TIMEOUT_S) -> Iterator[RemoteSession]:
    """A session with the daemon. Raises DaemonUnavailable where there is none."""
    session = RemoteSession(socket_path(given), timeout_s=timeout_s, backoff=False)
    try:
        session.greet()
        yield session
    finally:
        session.close()


@contextmanager
def daemon_or_store(
    given: Path | None, store: Path | None, timeout_s: float = TIMEOUT_S, *, warm_bytes: int | None = 0
) -> Iterator[Session]:  # fmt: skip
    """A session with the daemon, or with the store at ``store`` opened in this process, where
    ``warm_bytes`` of memory may be used (None: as much as by default).

    Raises DaemonUnavailable, StoreInUse, StoreError."""
    if store is None:
        with daemon(given, timeout_s) as session:
            yield session
        return
    if given is not None:
        raise click.UsageError("--socket and --store exclude each other")
    if not (store / "data.mdb").is_file():
        raise StoreError(f"there is no store in {store}; `warmkv serve --store` makes one")
    from warmkv.kvstore.store.engine import Engine
    from warmkv.kvstore.store.options import StoreOptions

    engine = Engine.open(StoreOptions(path=store, warm_bytes=warm_bytes, cold_bytes=_roomy(store)))
    try:
        local = engine.session(os.geteuid(), every_share=True)
        try:
            yield local
        finally:
            local.close()
    finally:
        engine.close()


def _roomy(store: Path) -> int:
    """The cold budget of our settings, or what ``store`` takes already if that is more: they may be
    those of another store, and looking at one evicts nothing."""
    from warmkv.daemon import config
    from warmkv.kvstore.store.options import default_cold_bytes

    configured = config.load({}).cold_bytes
    return max(default_cold_bytes(store) if configured is None else configured, (store / "data.mdb").stat().st_size)


def ask(session: Session, verb: str, **arguments: object) -> dict[str, Any]:
    """A report of the store."""
    import json

    document: dict[str, Any] = json.loads(session.report(m.Report(verb, json.dumps(arguments).encode())).json)
    return document


def namespace_key(session: Session, given: str) -> NamespaceKey:
    """The one namespace of ours whose hex key begins with ``given``.

    Raises UnknownNamespace for none, click.UsageError for several or for no hex digits."""
    wanted = given.lower()
    if not wanted or set(wanted) - set("0123456789abcdef") or len(wanted) > 32:
        raise click.UsageError(f"namespace {given!r} is not the beginning of 32 hex digits")
    rows: list[dict[str, object]] = ask(session, "ls")["rows"]
    found = sorted(name for name in (str(row["namespace"]) for row in rows) if name.startswith(wanted))
    if not found:
        raise UnknownNamespace(f"no namespace of yours begins with {wanted}")
    if len(found) > 1:
        raise click.UsageError(f"namespace {wanted} is ambiguous: {', '.join(found)}")
    return NamespaceKey(bytes.fromhex(found[0]))
