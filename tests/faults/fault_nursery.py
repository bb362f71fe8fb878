"""The process that all others are forked from, so that each costs milliseconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from warmkv.daemon.testing import child_environ


class Nursery:
    """Speaks with `fault_child`, run as a program."""

    def __init__(self, **environ: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fault_child.py"))]
        environ = child_environ(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", **environ)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)

    def do(self, what: str, **about: Any) -> tuple[int, list[str]]:
        """Exit status of the child that did it, and its lines."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": what, **about}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["status"], answer["lines"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()
