"""What the client's tests share: time bounds, a real server in this process, a scripted one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from warmkv.daemon.testing import PATIENCE_S, ServedEngine
from warmkv.kvstore.channel import Channel, Deadline
from warmkv.kvstore.client import client as client_module
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.testing.bounds import bounded
from warmkv.schema import messages as m
from warmkv.schema import protocol
from warmkv.schema.identity import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A test that hangs fails instead."""
    with bounded(120):
        yield


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, and no warning given before."""
    monkeypatch.delenv("WARMKV_SOCKET", raising=False)
    monkeypatch.delenv("WARMKV_DISABLE", raising=False)
    monkeypatch.setattr(client_module, "_warned", set())


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "s"


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine.open(StoreOptions(warm_bytes=64 << 20))
    yield opened
    opened.close()


@pytest.fixture
def served(socket_path: Path, engine: Engine) -> Iterator[ServedEngine]:
    with ServedEngine(socket_path, engine) as running:
        yield running


@pytest.fixture
def identity() -> Identity:
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (2, 8)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    full = LayerSpec(LayerKind.FULL, planes)
    return Identity(
        architecture="sample", parameters=bytes(32), settings=b"none", adapters=(), layers=(full, full),
        compute_dtype="float32", attention="eager", layout="bhtd", tokenizer=bytes(32), runtime="test",
        rope=RopeRegime("default", 1e4, 1.0, 8, 2048, b"none"), runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


@pytest.fixture
def rows() -> Callable[[int], list[LayerRows]]:
    def make(tokens: int) -> list[LayerRows]:
        numbers = np.arange(tokens * 16, dtype="<f4").reshape(tokens, 2, 8)
        return [LayerRows.kv(layer, numbers + layer * 1e6, -numbers) for layer in range(2)]

    return make


@pytest.fixture
def descriptors() -> Callable[[], int]:
    """Counts this process's open descriptors when called."""
    return lambda: len(os.listdir("/proc/self/fd"))


class Line:
    """The daemon's end of one connection, in the hands of a test."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.channel = Channel(sock)
        self.number = number

    def hear(self) -> m.Message | None:
        """The next request, None at the end; descriptors that came along are closed."""
        try:
            frame = self.channel.receive(Deadline(PATIENCE_S), PATIENCE_S)
        except OSError:
            return None
        if frame is None:
            return None
        frame.close()
        self.asked, message = m.decode(frame.body)
        return message

    def say(self, message: m.Message, *, fds: tuple[int, ...] = (), answering: int | None = None) -> None:
        body = m.encode(message, self.asked if answering is None else answering)
        self.channel.send(body, fds, Deadline(PATIENCE_S))

    def greet(self) -> None:
        assert isinstance(self.hear(), m.Hello)
        self.say(m.Welcome(protocol.VERSION_MAX, 9, "scripted", m.MAX_BODY_BYTES, os.geteuid()))


class ScriptedDaemon:
    """Runs ``script`` on a thread for each connection, then hangs up."""

    def __init__(self, path: Path, script: Callable[[Line], None]) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path = path
        self.connections = 0
        self.failures: list[BaseException] = []
        self._script = script
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(64)
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            line = Line(sock, self.connections)
            self.connections += 1
            thread = threading.Thread(target=self._run, args=(line,))
            self._threads.append(thread)
            thread.start()

    def _run(self, line: Line) -> None:
        try:
            self._script(line)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except BaseException as exc:  # noqa: BLE001 - told to the test when it is over
            self.failures.append(exc)
        finally:
            line.channel.close()

    def __enter__(self) -> ScriptedDaemon:
        self._accepting.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)
        self._accepting.join(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if kind is None and self.failures:
            raise self.failures[0]


@pytest.fixture
def scripted(socket_path: Path) -> Callable[[Callable[[Line], None]], ScriptedDaemon]:
    return lambda script: ScriptedDaemon(socket_path, script)
