"""From start to clean stop: the order in which a daemon takes and lets go of things."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from warmkv.daemon.config import Config
from warmkv.daemon.listener import Listener
from warmkv.daemon.notify import notify
from warmkv.daemon.server import Admission, Server
from warmkv.daemon.session import Limits
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions

log = logging.getLogger("warmkv.daemon")


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
    once with status 1; what was acknowledged as durable is on disk by then.

    Raises AlreadyRunning, SocketPathError, StoreInUse, StoreTooNew, BudgetError or another
    StoreError."""
    os.umask(0o077)
    _raise_descriptor_limit()
    for name in config.unknown_variables:
        log.warning("environment variable %s is set, nothing reads it", name)
    with _Signals() as signals:
        listener = Listener(config.socket)
        try:
            with _opened(config) as engine:
                _run(config, listener, engine, signals, ready)
        finally:
            listener.close()


def _run(config: Config, listener: Listener, engine: Engine, signals: _Signals, ready: Callable[[Started], None] | None) -> None:
    admission = Admission(frozenset({os.geteuid(), *config.allow_uids}), config.max_connections)
    server = Server(listener.listen(), engine, admission, Limits(config.frame_timeout_s, config.send_timeout_s))
    try:
        gc.collect()
        gc.freeze()  # the index lives as long as we do; collections need not walk it
        signals.then(server.stop)
        log.info("serving %s at %s, epoch %d", config.store, config.socket, engine.epoch)
        notify(config.notify_socket, "READY=1")
        if ready is not None:
            ready(Started(config.socket, config.store, os.getpid(), f"{engine.epoch:016x}"))
        server.serve(signals.descriptor)
        log.info("stopping")
        notify(config.notify_socket, "STOPPING=1")
    finally:
        listener.stop()
        server.close(config.stop_timeout_s)


@contextmanager
def _opened(config: Config) -> Iterator[Engine]:
    options = StoreOptions(
        path=config.store,
        warm_bytes=config.warm_bytes,
        cold_bytes=config.cold_bytes,
        anchors=config.anchors,
        reservation_ttl_s=config.reservation_ttl_s,
        lease_ttl_s=config.lease_ttl_s,
        busy_timeout_s=config.busy_timeout_s,
    )
    engine = Engine.open(options)
    try:
        yield engine
    finally:
        if not engine.flush(config.flush_timeout_s):
            log.warning("not everything could be written within %.0f s", config.flush_timeout_s)
        engine.close()
        log.info("store closed")


class _Signals:
    """SIGTERM and SIGINT while a daemon runs: the first asks it to stop, the second ends it.

    The kernel may deliver a signal to any thread. Python runs handlers on the main one, which would
    not notice while it waits for connections: ``descriptor`` becomes readable then."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._sender = -1
        self._wakeup_before = -1
        self._asked = False
        self._stop: Callable[[], None] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._on_signal)
            self.descriptor, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._wakeup_before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._sender >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._sender)
            os.close(self.descriptor)

    def then(self, stop: Callable[[], None]) -> None:
        """Call ``stop`` on the first signal, at once if that has come already."""
        self._stop = stop
        if self._asked:
            stop()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            os._exit(1)
        self._asked = True
        if self._stop is not None:
            self._stop()


def _raise_descriptor_limit() -> None:
    """Warm segments and connections are descriptors: take as many as the system grants."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as exc:
            log.warning("descriptor limit stays at %d: %s", soft, exc)
