"""Daemons to test against: a real process that may be killed, and one inside this process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import warmkv
from warmkv.daemon.listener import Listener
from warmkv.daemon.peer import Admission
from warmkv.daemon.server import Engine, Server
from warmkv.daemon.session import Limits

#: Longer than any start, stop or answer takes on a busy machine; only a hang reaches it.
PATIENCE_S = 60.0
#: Puts the descriptors named in its first argument from 3 on, says so to whom it becomes.
_LAUNCHER = """
import fcntl, os, sys
given = [int(number) for number in sys.argv[1].split(",") if number]
above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 3 + len(given)) for fd in given]
for number, fd in enumerate(above, 3):
    os.dup2(fd, number)
for fd in set(above) | {fd for fd in given if fd >= 3 + len(given)}:
    os.close(fd)
os.environ.setdefault("LISTEN_PID", str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""


def child_environ(**more: str) -> dict[str, str]:
    """This process's environment, in which a child finds the same warmkv, and no settings of ours."""
    where = str(Path(warmkv.__file__).absolute().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WARMKV_")}
    return {**environ, "PYTHONPATH": f"{where}{os.pathsep}{inherited}" if inherited else where, **more}


class DaemonProcess:
    """``warmkv serve`` as a child process, with socket, log and, unless ``store`` says otherwise,
    store below ``directory``.

    ``start`` returns once connections are taken; the same object may be started again after
    `stop` or `kill`, on the same store."""

    def __init__(
        self, directory: Path, *arguments: str, store: Path | None = None, environ: dict[str, str] | None = None
    ) -> None:
        self.socket = directory / "run" / "warmkv.sock"
        self.store = store or directory / "store"
        self.log_path = directory / "daemon.log"
        self.arguments = arguments
        self._environ = child_environ(**(environ or {}))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def descriptors(self) -> int:
        """Descriptors the daemon has open at this moment."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def start(self, preexec: Callable[[], None] | None = None, passed: Iterable[tuple[str, int]] = ()) -> DaemonProcess:
        """``passed`` are named descriptors to hand over as a service manager does. Raises RuntimeError
        with the log if the daemon ends instead of getting ready."""
        command = [sys.executable, "-m", "warmkv.daemon.cli", "serve", "--json"]
        command += ["--socket", str(self.socket), "--store", str(self.store), *self.arguments]
        environ, inherited = self._environ, list[int]()
        if items := list(passed):
            command, environ, inherited = handing(items, command, environ)
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=environ, preexec_fn=preexec, pass_fds=inherited
            )  # fmt: skip
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        line = self._process.stdout.readline() if ready else b""
        if not line or "error" in json.loads(line):
            self.kill()
            raise RuntimeError(f"daemon did not get ready: {line.decode()} {self.log}")
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to stop and wait; the exit status."""
        return self._end(number)

    def kill(self) -> int:
        """SIGKILL and wait."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def __enter__(self) -> DaemonProcess:
        return self if self._process is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def handing(
    passed: Sequence[tuple[str, int]], command: Sequence[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str], list[int]]:
    """A command line that becomes ``command`` with these named descriptors passed to it as by a service
    manager, the environment for it, and the descriptors it must inherit."""
    numbers = ",".join(str(fd) for _, fd in passed)
    told = {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join(name for name, _ in passed)}
    return [sys.executable, "-c", _LAUNCHER, numbers, *command], {**environ, **told}, [fd for _, fd in passed]


class ServedEngine:
    """An engine, or a stand-in for one, served by a thread of this process at ``socket``.

    Leaves closing the engine to whoever made it."""

    def __init__(
        self,
        socket: Path,
        engine: Engine,
        *,
        uids: frozenset[int] | None = None,
        max_connections: int = 64,
        frame_timeout_s: float = PATIENCE_S,
        send_timeout_s: float = PATIENCE_S,
    ) -> None:
        self.socket = socket
        admission = Admission(frozenset({os.geteuid()}) if uids is None else uids, max_connections)
        self._listener = Listener(socket)
        self.server = Server(self._listener.listen(), engine, admission, Limits(frame_timeout_s, send_timeout_s))
        self._thread = threading.Thread(target=self.server.serve, name="warmkv-accept")

    def __enter__(self) -> ServedEngine:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self, timeout_s: float = PATIENCE_S) -> None:
        """Clean stop, as the daemon does it. Idempotent."""
        if self._thread.is_alive():
            self.server.stop()
            self._thread.join(PATIENCE_S)
            self._listener.stop()
            self.server.close(timeout_s)
            self._listener.close()


def eventually(holds: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether ``holds`` becomes true; asks again until it does or the time is up."""
    pause, waited = threading.Event(), 0.0
    while not holds():
        if waited > timeout_s:
            return False
        pause.wait(0.005)
        waited += 0.005
    return True
