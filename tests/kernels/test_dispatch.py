"""Which backend is had, and what is loaded for it."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from warmkv.kernels import dispatch
from warmkv.kernels.dispatch import REFERENCE, kernels
from warmkv.kernels.errors import BackendMissing


@pytest.fixture
def undecided() -> Iterator[None]:
    """Nobody has asked for a backend yet, and nobody remembers afterwards which it was."""
    for cached in (dispatch._best, dispatch._fast):
        cached.cache_clear()
    yield
    for cached in (dispatch._best, dispatch._fast):
        cached.cache_clear()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch, undecided: None) -> None:
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)


def test_reference_is_there_whatever_is_installed(without_numba: None) -> None:
    assert kernels("reference") is REFERENCE and REFERENCE.name == "reference"


def test_a_backend_asked_for_by_name_is_missing_rather_than_replaced(without_numba: None) -> None:
    with pytest.raises(BackendMissing, match="needs numba"):
        kernels("fast")
    with pytest.raises(BackendMissing, match="no backend is called 'cuda'"):
        kernels("cuda")  # type: ignore[arg-type]


def test_auto_falls_back_and_says_so_once(without_numba: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, dispatch.log.name):
        assert kernels() is REFERENCE and kernels("auto") is REFERENCE
    assert [record.message.count("reference computes instead") for record in caplog.records] == [1]


def test_fast_has_a_twin_of_every_operation() -> None:
    pytest.importorskip("numba")
    table = kernels("fast")
    assert table.name == "fast" and kernels() is table
    for field in dataclasses.fields(table):
        assert getattr(table, field.name) is not getattr(REFERENCE, field.name), field.name


def test_a_numba_that_cannot_be_loaded_is_missing_with_its_reason() -> None:
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from importlib.machinery import ModuleSpec\n"
        "from warmkv.kernels import dispatch\n"
        "dispatch.find_spec = lambda name: ModuleSpec(name, None)\n"
        "try: dispatch.kernels('fast')\n"
        "except dispatch.BackendMissing as exc: print(exc)\n"
        "print(dispatch.kernels('auto').name)"
    )
    said = _python(program).splitlines()
    assert said[0].startswith("backend 'fast' cannot be loaded: ") and "numba" in said[0] and said[1] == "reference"


def test_a_numba_that_is_too_old_is_missing(monkeypatch: pytest.MonkeyPatch, undecided: None) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(numba, "version_info", SimpleNamespace(short=(0, 61)))
    with pytest.raises(BackendMissing, match=r"cannot be loaded: numba .* is older than 0\.62"):
        kernels("fast")
    assert kernels() is REFERENCE


def test_nothing_compiled_is_loaded_before_it_is_asked_for() -> None:
    program = (
        "import sys, warmkv; from warmkv.kernels import dispatch; dispatch.kernels('reference'); print('numba' in sys.modules)"
    )
    assert _python(program) == "False"


def _python(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
