"""A folder of `.kvcache` files: whole or not at all, told apart by tokens, swept of what was left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvcache_samples import file_of, planes_of

from warmkv.kvstore.kvcache import folder
from warmkv.schema import kvcache_file
from warmkv.schema.errors import FormatError, RecordError, StoreError

PROMPT = [7, 8, 9]
FILE = file_of(PROMPT, "f32", depth=2, kind=2, hash_=0xDEADBEEF)
TOKENS = FILE.tokens
#: Both hash to zero.
TRAP = [1404660693, 906528578]


def dead_pid() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return child.pid


def test_what_is_written_is_found_again_under_the_name_of_its_home(tmp_path: Path) -> None:
    assert folder.write(tmp_path, FILE)
    name = f"{FILE.fingerprint:016x}_{kvcache_file.fnv1a(TOKENS.tobytes()):016x}.kvcache"
    assert os.listdir(tmp_path) == [name] and stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    found = folder.find(tmp_path, FILE.fingerprint, TOKENS)
    assert found.file is not None and planes_of(found.file) == planes_of(FILE)
    named = (found.file.anchor_depth, found.file.boundary_kind, found.file.semantic_hash, found.file.shift_offset)
    assert named == (2, 2, 0xDEADBEEF, 0)


def test_another_model_or_prompt_is_a_miss(tmp_path: Path) -> None:
    folder.write(tmp_path, FILE)
    for fingerprint, tokens in ((FILE.fingerprint + 1, TOKENS), (FILE.fingerprint, TOKENS[:2]), (FILE.fingerprint, TOKENS[::-1])):
        found = folder.find(tmp_path, fingerprint, np.ascontiguousarray(tokens))
        assert found.file is None and "No such file" in found.reason


def test_prompts_with_one_hash_are_told_apart_and_never_overwritten(tmp_path: Path) -> None:
    one, other = file_of(TRAP, "f32"), file_of([*TRAP, 0], "f32")
    folder.write(tmp_path, one)
    found = folder.find(tmp_path, other.fingerprint, other.tokens)
    assert found.file is None and "another prompt of 2 tokens" in found.reason
    for force in (False, True):
        with pytest.raises(StoreError, match="another prompt of 2 tokens"):
            folder.write(tmp_path, other, replace=force)
    kept = folder.find(tmp_path, one.fingerprint, one.tokens).file
    assert kept is not None and planes_of(kept) == planes_of(one)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (b"", "0 bytes"), (b"x" * 100, "not a readable FlatBuffer"), (kvcache_file.encode(FILE)[:150], ""),
        (kvcache_file.encode(replace(FILE, fingerprint=5)), "is of model 0000000000000005"),
        (kvcache_file.encode(replace(FILE, tokens=TOKENS[::-1].copy())), "another prompt of 3 tokens"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_a_miss_with_its_reason(tmp_path: Path, bad: bytes, words: str) -> None:
    folder.write(tmp_path, FILE)
    (path,) = tmp_path.iterdir()
    path.write_bytes(bad)
    found = folder.find(tmp_path, FILE.fingerprint, TOKENS)
    assert found.file is None and found.reason and words in found.reason


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.kvcache")
    (tmp_path / "link.kvcache").symlink_to("/etc/passwd")
    with pytest.raises(RecordError, match="expected a plain file"):
        folder.read(tmp_path / "pipe.kvcache")
    with pytest.raises(StoreError, match="symbolic"):
        folder.read(tmp_path / "link.kvcache")
    with open(tmp_path / "large.kvcache", "wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(FormatError, match="are possible"):
        folder.read(tmp_path / "large.kvcache")


def test_a_file_that_is_there_is_replaced_only_when_told_so(tmp_path: Path) -> None:
    folder.write(tmp_path, FILE)
    assert not folder.write(tmp_path, FILE)
    other = replace(FILE, anchor_depth=3)
    with pytest.raises(StoreError, match="exists"):
        folder.write(tmp_path, other)
    assert folder.write(tmp_path, other, replace=True)
    found = folder.find(tmp_path, FILE.fingerprint, TOKENS).file
    assert found is not None and found.anchor_depth == 3


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    folder.write(tmp_path, FILE)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        for file in (replace(FILE, anchor_depth=9), file_of([1, 2], "f32")):
            with pytest.raises(StoreError, match="No space left"):
                folder.write(tmp_path, file, replace=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_file_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        sync(fd)

    def renamed(old: Path, new: Path) -> None:
        done.append(f"rename {Path(old).name} {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    folder.write(tmp_path, FILE)
    (name,) = os.listdir(tmp_path)
    temporary = f"{name}.tmp.{os.getpid()}"
    assert done == [f"sync {temporary}", f"rename {temporary} {name}", f"sync {tmp_path.name}"]


def test_only_what_ended_writers_left_behind_is_swept(tmp_path: Path) -> None:
    dead = dead_pid()
    stale, ours, not_ours = f"a.kvcache.tmp.{dead}", f"b.kvcache.tmp.{os.getpid()}", f"c.tmp.{dead}"
    for name in (stale, ours, not_ours, "d.kvcache", "e.kvcache.tmp.99999999999999", "f.kvcache.tmp.x"):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / f"g.kvcache.tmp.{dead}").mkdir()
    assert folder.sweep(tmp_path) == [stale]
    now = (tmp_path / ours).stat().st_mtime + folder.STALE_S + 1
    assert folder.sweep(tmp_path, now) == [ours]
    assert len(os.listdir(tmp_path)) == 5


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert folder.sweep(tmp_path / "nowhere") == []
    with pytest.raises(StoreError, match="cannot be read"):
        folder.files_in(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="cannot be written"):
        folder.write(tmp_path / "nowhere", FILE)
