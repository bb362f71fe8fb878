"""Compiled functions kept on disk: read again where they are whole, compiled again where anything is wrong."""

from __future__ import annotations

import errno
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.core import config
from numba.core.caching import IndexDataCacheFile

PROGRAM = """
from numba import types
from warmkv.kernels.compiled.caching import compiled

@compiled({signature})
def plus(x):
    return x + {added}
"""


@pytest.fixture(autouse=True)
def beside_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "CACHE_DIR", "")


def _loaded(folder: Path, added: int = 1, signature: str = "") -> Any:
    """The function of a module, as a new process would have it."""
    path = folder / "words.py"
    path.write_text(PROGRAM.format(added=added, signature=signature))
    os.utime(path, (1e9, 1e9))
    spec = importlib.util.spec_from_file_location("words", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.plus


def _hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


@pytest.mark.parametrize("signature", ["", "types.int64(types.int64)"])
def test_what_was_compiled_once_is_read_the_next_time(tmp_path: Path, signature: str) -> None:
    first = _loaded(tmp_path, signature=signature)
    assert first(41) == 42 and _hits(first) == 0
    again = _loaded(tmp_path, signature=signature)
    assert again(41) == 42 and _hits(again) == 1


def test_other_words_are_other_code_whatever_the_age_and_size_of_the_file(tmp_path: Path) -> None:
    assert _loaded(tmp_path, added=1)(1) == 2
    assert _loaded(tmp_path, added=2)(1) == 3
    back = _loaded(tmp_path, added=1)
    assert back(1) == 2 and _hits(back) == 1


@pytest.mark.parametrize("part", [0.0, 0.5])
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_half_a_file_is_no_file_and_is_written_anew(tmp_path: Path, suffix: str, part: float) -> None:
    assert _loaded(tmp_path)(41) == 42
    (kept,) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    kept.write_bytes(kept.read_bytes()[: int(part * kept.stat().st_size)])
    assert _loaded(tmp_path)(41) == 42
    healed = _loaded(tmp_path)
    assert healed(41) == 42 and _hits(healed) == 1


def test_an_index_whose_code_was_never_written_means_nothing(tmp_path: Path) -> None:
    assert _loaded(tmp_path)(41) == 42
    (code,) = (tmp_path / "__pycache__").glob("*.nbc")
    code.unlink()
    assert _loaded(tmp_path)(41) == 42


def test_a_full_disk_is_no_reason_not_to_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert _loaded(tmp_path, signature="types.int64(types.int64)")(41) == 42 and _loaded(tmp_path)(np.int64(41)) == 42


def test_where_no_folder_can_be_written_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__pycache__").write_bytes(b"in the way")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "/dev/null/nowhere")
    assert _loaded(tmp_path, signature="types.int64(types.int64)")(41) == 42 and _loaded(tmp_path)(41) == 42
