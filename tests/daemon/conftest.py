"""What the daemon's tests share: time bounds, engines, raw peers."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from warmkv.daemon.testing import PATIENCE_S, ServedEngine
from warmkv.kvstore.rows import LayerRows
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.options import StoreOptions
from warmkv.kvstore.testing.bounds import bounded
from warmkv.schema import frame, protocol
from warmkv.schema import messages as m
from warmkv.schema.identity import SINGLE, Identity, LayerKind, LayerSpec, PlaneFormat, PlaneRole, PlaneSpec, RopeRegime


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """A test that hangs fails instead."""
    with bounded(150):
        yield


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine.open(StoreOptions(warm_bytes=64 << 20, busy_timeout_s=0.2))
    yield opened
    opened.close()


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "s"


@pytest.fixture
def served(socket_path: Path, engine: Engine) -> Iterator[ServedEngine]:
    with ServedEngine(socket_path, engine) as running:
        yield running


class RawPeer:
    """A peer that may say anything: bytes in, messages or the end out."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))

    def send(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while data:
            data = data[self.socket.sendmsg([data], control, socket.MSG_NOSIGNAL) :]
            control = []

    def say(self, message: m.Message, fds: tuple[int, ...] = (), request_id: int = 7) -> None:
        self.send(frame.frame(m.encode(message, request_id)), fds)

    def hear(self) -> tuple[int, m.Message] | None:
        """The next message, None at the end of the connection."""
        head = self._exactly(frame.LENGTH.size)
        if not head:
            return None
        return m.decode(self._exactly(frame.LENGTH.unpack(head)[0]))

    def ask(self, message: m.Message, fds: tuple[int, ...] = ()) -> m.Message:
        self.say(message, fds)
        heard = self.hear()
        assert heard is not None and heard[0] == 7
        return heard[1]

    def greet(self) -> RawPeer:
        assert isinstance(self.ask(m.Hello(protocol.VERSION_MIN, protocol.VERSION_MAX, "raw", os.getpid())), m.Welcome)
        return self

    def hears_fault_and_end(self) -> int:
        """Code of the fault that comes, after which the connection must end."""
        heard = self.hear()
        assert heard is not None and isinstance(heard[1], m.Fault), heard
        assert self.hear() is None
        return heard[1].code

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                part = self.socket.recv(count - len(data))
            except ConnectionResetError:
                part = b""
            if not part:
                assert not data, "the connection ended inside a frame"
                return b""
            data += part
        return data


@pytest.fixture
def peers() -> Iterator[type[RawPeer]]:
    """The class of raw peers; whichever a test made are closed after it."""
    made: list[RawPeer] = []

    class Remembered(RawPeer):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            made.append(self)

    yield Remembered
    for item in made:
        item.close()


@pytest.fixture(scope="module")
def any_peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], RawPeer]]:
    """Makes peers of one server that lives as long as the module's tests."""
    opened = Engine.open(StoreOptions(warm_bytes=1 << 20))
    with ServedEngine(tmp_path_factory.mktemp("any") / "run" / "s", opened) as running:
        yield lambda: RawPeer(running.socket)
    opened.close()


@pytest.fixture
def descriptors() -> Callable[[], int]:
    """Counts this process's open descriptors when called."""
    return lambda: len(os.listdir("/proc/self/fd"))


def sample_identity(name: str = "sample", layers: int = 2) -> Identity:
    """A small model of full attention layers: 2 heads of 8 f32 numbers."""
    planes = tuple(PlaneSpec(role, PlaneFormat.F32, (2, 8)) for role in (PlaneRole.KEY, PlaneRole.VALUE))
    full = LayerSpec(LayerKind.FULL, planes)
    return Identity(
        architecture=name, parameters=bytes(32), settings=b"none", adapters=(), layers=(full,) * layers,
        compute_dtype="float32", attention="eager", layout="bhtd", tokenizer=bytes(32), runtime="test",
        rope=RopeRegime("default", 1e4, 1.0, 8, 2048, b"none"), runtime_state_version="1", topology=SINGLE, tenant=b"none",
    )  # fmt: skip


def sample_rows(tokens: int, layers: int = 2) -> list[LayerRows]:
    """Rows of ``tokens`` positions, every number different."""
    count = tokens * 16
    return [
        LayerRows.kv(
            layer,
            np.arange(count, dtype="<f4").reshape(tokens, 2, 8) + layer * 1e6,
            -np.arange(count, dtype="<f4").reshape(tokens, 2, 8) - layer * 1e6,
        )
        for layer in range(layers)
    ]


@pytest.fixture
def identity() -> Identity:
    return sample_identity()


@pytest.fixture
def rows() -> Callable[[int], list[LayerRows]]:
    return sample_rows
