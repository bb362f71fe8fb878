"""From start to clean stop: the order in which a daemon takes and lets go of things."""

from __future__ import annotations

import gc
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from warmkv.daemon import activation, watchdog
from warmkv.daemon.activation import Inherited
from warmkv.daemon.config import Config, forget_manager
from warmkv.daemon.fdstore import DescriptorStore
from warmkv.daemon.listener import Listener
from warmkv.daemon.notify import Notifier
from warmkv.daemon.peer import Admission
from warmkv.daemon.server import Server
from warmkv.daemon.services import STATUS_EVERY_S, Repeating, Service, StatusText, running
from warmkv.daemon.session import Limits
from warmkv.daemon.signals import Signals
from warmkv.daemon.watching import Watching
from warmkv.daemon.watching.settings import store_options
from warmkv.kvstore.channel import close_all
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.long_lived import long_lived

log = logging.getLogger("warmkv.daemon")
#: Checking a store of terabytes, and descriptors that came back, takes no longer.
MAX_START_S = 3600.0
#: What closing the store may take after everything was written, or the time for that was over.
MAX_CLOSE_S = 60.0
ADMISSION_SETTINGS = ("max_connections", "allow_uids", "allow_gids", "uid_share", "copy_foreign")
LIMIT_SETTINGS = ("frame_timeout_s", "send_timeout_s")


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that now takes connections."""

    socket: Path
    store: Path
    pid: int
    epoch: str


def serve(config: Config, ready: Callable[[Started], None] | None = None) -> None:
    """Run a daemon on the main thread until SIGTERM or SIGINT, then flush and return.

    The socket is claimed before the store is opened, so the later of two starters touches
    nothing, and listens only once the store can answer. A second signal ends the process at
    once with status 1; what was acknowledged as durable is on disk by then. Descriptors that
    ``config`` inherited are taken over or closed.

    Raises AlreadyRunning, SocketPathError, StoreInUse, StoreTooNew, BudgetError or another
    StoreError."""
    os.umask(0o077)
    forget_manager()
    _raise_descriptor_limit()
    for name in config.unknown_variables:
        log.warning("environment variable %s is set, nothing reads it", name)
    notifier = Notifier(config.notify_socket)
    passed = activation.claim(config.inherited)
    with Signals() as signals, _closing(passed):
        socket = activation.take_socket(passed, config.socket)
        listener = Listener(config.socket, gid=config.socket_gid, inherited=socket)
        try:
            in_force = [config]
            with _opened(in_force, notifier) as engine:
                _run(in_force, notifier, listener, engine, passed, signals, ready)
        finally:
            listener.close()


def _run(
    in_force: list[Config], notifier: Notifier, listener: Listener, engine: Engine, passed: list[Inherited], signals: Signals,
    ready: Callable[[Started], None] | None,
) -> None:  # fmt: skip
    """Serve until stopped. ``in_force`` gets every configuration that takes the place of the first."""
    (config,) = in_force
    keeping = _keeping(config, notifier, engine, passed)
    server = Server(listener.listen(), engine, admission(config), limits(config))
    watching = Watching(config, engine)
    watching.settings.on(ADMISSION_SETTINGS, lambda new: setattr(server, "admission", admission(new)))
    watching.settings.on(LIMIT_SETTINGS, lambda new: setattr(server, "limits", limits(new)))
    watching.settings.on(("flush_timeout_s",), in_force.append)
    reloads = Repeating("reload", lambda: _reload(notifier, watching))
    services: list[Service] = [watching, reloads, *_signs_of_life(config, notifier, engine, server)]
    with running(keeping):  # to the end: what requests drop while they are drained must not be kept
        try:
            with running(services):
                gc.collect()
                gc.freeze()  # the index lives as long as we do; collections need not walk it
                signals.then(server.stop, reloads.ask)
                log.info("serving %s at %s, epoch %016x", config.store, listener.path, engine.epoch)
                notifier.ready(f"serving at {listener.path}")
                if ready is not None:
                    ready(Started(listener.path, config.store, os.getpid(), f"{engine.epoch:016x}"))
                server.serve(signals.descriptor)
                log.info("stopping")
                notifier.stopping()
        finally:
            listener.stop()
            timeout_s = watching.settings.config.stop_timeout_s
            with notifier.extending("ending connections", timeout_s):
                server.close(timeout_s)


def admission(config: Config) -> Admission:
    """Who may connect: our own user besides those that were named."""
    uids, gids = frozenset({os.geteuid(), *config.allow_uids}), frozenset(config.allow_gids)
    return Admission(uids, config.max_connections, gids, config.uid_share, config.copy_foreign)


def limits(config: Config) -> Limits:
    return Limits(config.frame_timeout_s, config.send_timeout_s)


def _keeping(config: Config, notifier: Notifier, engine: Engine, passed: list[Inherited]) -> list[Service]:
    """Take back what the service manager kept, and let it keep what is warm from now on."""
    assert engine.options.warm_bytes is not None
    max_bytes = engine.options.warm_bytes if config.fd_store_bytes is None else config.fd_store_bytes
    keeping = DescriptorStore(notifier.address, engine.index, engine.warm.ledger, max_bytes, config.fd_store_max)
    if passed:
        with notifier.extending(f"checking {len(passed)} descriptors", MAX_START_S):
            ours, passed[:] = passed[:], []
            log.info("%d of %d descriptors the service manager kept are warm again", keeping.adopt(engine, ours), len(ours))
    if not notifier or not max_bytes:
        return []
    engine.warm.listeners.append(keeping)
    engine.health.watch("descriptor store", keeping.problem, vital=True)
    engine.figures["descriptor_store"] = lambda: {"descriptors": len(keeping.kept), "bytes": keeping.kept_bytes}
    return [keeping]


def _signs_of_life(config: Config, notifier: Notifier, engine: Engine, server: Server) -> Iterator[Service]:
    if not notifier:
        return
    yield Repeating("status", StatusText(notifier, engine, lambda: server.connections), STATUS_EVERY_S)
    if config.watchdog_s:
        yield watchdog.Watchdog(notifier, config.watchdog_s, watchdog.proofs(server, engine, config.watchdog_s))


def _reload(notifier: Notifier, watching: Watching) -> None:
    with notifier.reloading():
        watching.settings.reload("SIGHUP")


@contextmanager
def _opened(in_force: list[Config], notifier: Notifier) -> Iterator[Engine]:
    (config,) = in_force
    with notifier.extending("opening the store", MAX_START_S), long_lived(freeze=True):
        engine = Engine.open(replace(store_options(config), path=config.store))
    try:
        yield engine
    finally:
        timeout_s = in_force[-1].flush_timeout_s
        with notifier.extending("writing out", timeout_s + MAX_CLOSE_S):
            if not engine.flush(timeout_s):
                log.warning("not everything could be written within %.0f s", timeout_s)
            engine.close()
        log.info("store closed")


@contextmanager
def _closing(passed: list[Inherited]) -> Iterator[None]:
    """Close what is still in ``passed`` at the end: nobody had a use for it."""
    try:
        yield
    finally:
        close_all([item.fd for item in passed])


def _raise_descriptor_limit() -> None:
    """Warm segments and connections are descriptors: take as many as the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as exc:
            log.warning("descriptor limit stays at %d: %s", soft, exc)
