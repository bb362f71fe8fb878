"""The spool: whole files only, of permitted users only, each once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.watching import spool as module
from warmkv.daemon.watching.spool import Spool
from warmkv.kvstore.store.importing import ImportResult
from warmkv.schema.errors import Busy, ClosedError, ColdFull, FormatError

UID = os.geteuid()
INTERVAL_S = 30.0


class Store:
    """Takes files, or does with them what a test says."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int, bytes]] = []
        self.error: Exception | None = None
        self.refused = 0
        self.meanwhile: Callable[[Path], object] = lambda path: None

    def __call__(self, path: Path, uid: int) -> ImportResult:
        self.taken.append((path.name, uid, path.read_bytes()))
        self.meanwhile(path)
        if self.error is not None:
            raise self.error
        return ImportResult(1, 0, 10, self.refused, ("too large",) * self.refused)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.taken]


class Box:
    """A spool with its folder, its store and its clock."""

    def __init__(self, folder: Path, time: Any) -> None:
        self.folder = folder
        self.time = time
        self.store = Store()
        self.uids = frozenset({UID})
        self.spool = self.anew()
        self.begun = False

    def anew(self) -> Spool:
        return Spool(lambda: self.folder, self.store, lambda uid: uid in self.uids, lambda: INTERVAL_S, self.time)

    def drop(self, name: str, data: bytes = b"data", *, closed: bool = True) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        if closed:
            self.spool.hint(path, True)
        return path

    def look(self, after_s: float = 0.0) -> list[str]:
        """Let time pass and look; what was taken then."""
        self.time.sleep(after_s)
        before = len(self.store.taken)
        self.spool.look(lambda: True)
        return self.store.names[before:]

    def listed(self) -> dict[str, set[str]]:
        """Files by folder, without empty ones."""
        names = {where: {item.name for item in (self.folder / where).iterdir() if item.is_file()} for where in (".", *_BELOW)}
        return {where: found for where, found in names.items() if found}


_BELOW = ("working", "done", "failed")


@pytest.fixture
def box(tmp_path: Path, time: Any) -> Box:
    folder = tmp_path / "spool"
    folder.mkdir(mode=0o700)
    made = Box(folder, time)
    assert made.look() == [] and made.spool.problem() == ""
    return made


def test_a_file_its_writer_closed_is_taken_at_once(box: Box) -> None:
    box.drop("a.warmkv")
    assert box.look() == ["a.warmkv"]
    assert box.store.taken == [("a.warmkv", UID, b"data")]
    assert box.listed() == {"done": {"a.warmkv"}}
    assert box.look(INTERVAL_S) == []
    assert (box.spool.imported, box.spool.failed) == (1, 0)


def test_without_events_it_is_taken_once_it_did_not_change_for_an_interval(box: Box) -> None:
    path = box.drop("a.warmkv", closed=False)
    assert box.look() == []
    assert box.look(INTERVAL_S / 2) == []
    path.write_bytes(b"data and more")
    assert box.look(INTERVAL_S / 2) == []
    assert box.look(INTERVAL_S - 1) == []
    assert box.look(1) == ["a.warmkv"]
    assert box.store.taken[0][2] == b"data and more"


def test_a_file_of_the_same_name_begins_anew(box: Box) -> None:
    box.drop("a.warmkv", closed=False)
    box.look()
    (box.folder / "a.warmkv").unlink()
    box.look(INTERVAL_S)
    box.drop("a.warmkv", closed=False)
    assert box.look() == []
    assert box.look(INTERVAL_S) == ["a.warmkv"]


@pytest.mark.parametrize("name", ["a.txt", ".a.warmkv", "a.warmkv.part", "warmkv", "a.toml"])
def test_other_names_are_left_alone(box: Box, name: str) -> None:
    box.drop(name)
    assert box.look(INTERVAL_S) == [] and box.look(INTERVAL_S) == []
    assert box.listed() == {".": {name}}


def test_a_bad_file_is_put_aside_with_the_reason(box: Box) -> None:
    box.store.error = FormatError("not a pack")
    box.drop("a.warmkv")
    assert box.look() == ["a.warmkv"]
    assert box.listed() == {"failed": {"a.warmkv", "a.warmkv.reason"}}
    assert (box.folder / "failed" / "a.warmkv.reason").read_text() == "not a pack\n"
    box.drop("a.warmkv", b"the same name")
    box.look()
    assert box.listed()["failed"] == {"a.warmkv", "a.warmkv.reason", "a-1.warmkv", "a-1.warmkv.reason"}
    assert box.spool.failed == 2


def test_an_error_nobody_thought_of_stops_that_file_only(box: Box) -> None:
    box.store.error = RuntimeError("secret")
    box.drop("a.warmkv")
    box.drop("b.warmkv")
    assert box.look() == ["a.warmkv", "b.warmkv"]
    assert "secret" not in (box.folder / "failed" / "a.warmkv.reason").read_text()


@pytest.mark.parametrize("refusal", ["busy", "disk full", "refused"])
def test_what_a_full_store_refuses_is_tried_again_and_not_for_ever(box: Box, refusal: str) -> None:
    box.store.error = {"busy": Busy("full"), "disk full": ColdFull("full")}.get(refusal)
    box.store.refused = 2 if refusal == "refused" else 0
    box.drop("a.warmkv")
    assert box.look() == ["a.warmkv"] and box.look() == []
    assert box.look(INTERVAL_S) == ["a.warmkv"]
    box.store.error, box.store.refused = None, 0
    assert box.look(INTERVAL_S) == ["a.warmkv"]
    assert box.listed() == {"done": {"a.warmkv"}}
    box.store.error = Busy("full")
    box.drop("b.warmkv")
    tries = sum(len(box.look(INTERVAL_S)) for _ in range(3 * module.ATTEMPTS))
    assert tries == module.ATTEMPTS
    assert box.listed()["failed"] == {"b.warmkv", "b.warmkv.reason"}


@pytest.mark.parametrize("error", [None, FormatError("half a pack")])
def test_a_file_that_changes_while_it_is_imported_is_imported_again(box: Box, error: Exception | None) -> None:
    box.store.error = error
    box.store.meanwhile = lambda path: path.write_bytes(b"now it is whole")
    box.drop("a.warmkv", b"half")
    assert box.look() == ["a.warmkv"]
    assert box.listed() == {"working": {"a.warmkv"}}
    box.store.error, box.store.meanwhile = None, lambda path: None
    assert box.look(INTERVAL_S) == ["a.warmkv"]
    assert box.store.taken[-1][2] == b"now it is whole"
    assert box.listed() == {"done": {"a.warmkv"}}


def test_what_a_crash_left_in_the_middle_is_imported_again(box: Box) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        raise Killed

    box.store.meanwhile = killed
    box.drop("a.warmkv")
    with pytest.raises(Killed):
        box.look()
    box.spool, box.store.meanwhile = box.anew(), lambda path: None
    assert box.look() == ["a.warmkv"]
    assert box.listed() == {"done": {"a.warmkv"}}


def test_a_store_that_is_closed_in_the_middle_leaves_the_file_for_the_next_one(box: Box) -> None:
    going: list[int] = []
    box.store.meanwhile = lambda path: going.append(1)
    box.store.error = ClosedError("the store is being closed")
    box.drop("a.warmkv")
    box.spool.look(lambda: not going)
    assert box.listed() == {"working": {"a.warmkv"}}
    box.spool = box.anew()
    box.store.error = None
    assert box.look() == ["a.warmkv"] and box.listed() == {"done": {"a.warmkv"}}


def test_a_name_that_waits_already_comes_first(box: Box) -> None:
    box.store.error = Busy("full")
    box.drop("a.warmkv", b"first")
    box.look()
    box.drop("a.warmkv", b"second")
    box.look()
    box.store.error = None
    assert box.look(INTERVAL_S) == ["a.warmkv"]
    box.look(INTERVAL_S)
    assert [data for _, _, data in box.store.taken if data != b"first"] == [b"second"]
    assert box.listed() == {"done": {"a.warmkv", "a-1.warmkv"}}


# -- a file and its description ------------------------------------------------------------------


def test_a_kvcache_file_waits_for_its_description_and_takes_it_along(box: Box) -> None:
    box.drop("a.kvcache")
    assert box.look() == [] and box.look(INTERVAL_S) == []
    box.drop("a.kvcache.toml")
    box.store.meanwhile = lambda path: (path.parent / "a.kvcache.toml").read_bytes()
    assert box.look(INTERVAL_S) == ["a.kvcache"]
    assert box.listed() == {"done": {"a.kvcache", "a.kvcache.toml"}}


def test_a_description_that_is_still_written_is_waited_for(box: Box) -> None:
    box.drop("a.kvcache")
    box.drop("a.kvcache.toml", b"half", closed=False)
    assert box.look() == []
    box.drop("a.kvcache.toml", b"whole", closed=False)
    assert box.look(INTERVAL_S) == []
    box.store.meanwhile = lambda path: (path.parent / "a.kvcache.toml").read_bytes()
    assert box.look(INTERVAL_S) == ["a.kvcache"]


def test_a_kvcache_file_without_description_fails_in_the_end(box: Box) -> None:
    box.drop("a.kvcache")
    assert box.look() == []
    assert box.look(module.SIDECAR_PATIENCE_S) == []
    assert "a.kvcache.toml is missing" in (box.folder / "failed" / "a.kvcache.reason").read_text()


# -- whose file, and what kind -------------------------------------------------------------------


def test_links_and_pipes_are_never_opened(box: Box, tmp_path: Path) -> None:
    (tmp_path / "private").write_bytes(b"private")
    (box.folder / "link.warmkv").symlink_to(tmp_path / "private")
    os.link(tmp_path / "private", box.folder / "hard.warmkv")
    os.mkfifo(box.folder / "pipe.warmkv")
    (box.folder / "folder.warmkv").mkdir()
    box.look()
    assert box.look(INTERVAL_S) == []
    for name in ("link", "hard", "pipe", "folder"):
        assert "no regular file" in (box.folder / "failed" / f"{name}.warmkv.reason").read_text()
    assert (tmp_path / "private").read_bytes() == b"private"


@pytest.mark.skipif(UID != 0, reason="only root gives files away")
def test_the_owner_of_a_file_must_be_permitted_and_owns_what_is_imported(box: Box) -> None:
    box.uids = frozenset({UID, 4321})
    os.chown(box.drop("theirs.warmkv"), 4321, 0)
    os.chown(box.drop("strange.warmkv"), 1234, 0)
    os.chown(box.drop("pair.kvcache"), 4321, 0)
    box.drop("pair.kvcache.toml")
    box.look()
    assert box.look(INTERVAL_S) == []
    assert box.store.taken == [("theirs.warmkv", 4321, b"data")]
    assert "uid 1234" in (box.folder / "failed" / "strange.warmkv.reason").read_text()
    assert "different users" in (box.folder / "failed" / "pair.kvcache.reason").read_text()


def test_a_folder_others_may_write_is_a_problem_and_nothing_is_taken(box: Box) -> None:
    box.folder.chmod(0o777)
    box.drop("a.warmkv")
    assert box.look() == [] and "writable by others" in box.spool.problem()
    box.folder.chmod(0o1777)
    assert box.look(INTERVAL_S) == [] and box.look(INTERVAL_S) == ["a.warmkv"]
    assert box.spool.problem() == ""


def test_a_folder_below_that_others_may_write_is_a_problem(box: Box) -> None:
    (box.folder / "working").chmod(0o777)
    box.look()
    assert "working" in box.spool.problem()


@pytest.mark.parametrize("there", ["nothing", "file", "link"])
def test_a_spool_that_is_no_folder_is_a_problem_until_it_is_one(box: Box, tmp_path: Path, there: str) -> None:
    box.folder = tmp_path / "other"
    if there == "file":
        box.folder.write_bytes(b"")
    elif there == "link":
        box.folder.symlink_to(tmp_path / "spool")
    assert box.look() == [] and str(box.folder) in box.spool.problem()
    box.folder.unlink(missing_ok=True)
    box.folder.mkdir(mode=0o700)
    assert box.look() == [] and box.spool.problem() == ""


def test_files_that_cannot_be_filed_away_do_not_end_the_service(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.drop("a.warmkv")
    real = os.rename

    def refused(source: Path, target: Path) -> None:
        if "done" in str(target):
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "rename", refused)
        assert box.look() == ["a.warmkv"]
    assert box.look() == ["a.warmkv"]
    assert box.listed() == {"done": {"a.warmkv"}}


def test_hints_are_bounded(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HINTS", 3)
    for number in range(5):
        box.drop(f"{number}.warmkv")
    box.spool.hint(box.folder / "elsewhere", False)
    assert len(box.look()) == 3
    assert len(box.look(INTERVAL_S)) == 2


def test_without_a_spool_nothing_is_looked_at(time: Any) -> None:
    spool = Spool(lambda: None, Store(), lambda uid: False, lambda: 1.0, time)
    spool.look(lambda: True)
    assert spool.folders() == {} and spool.problem() == ""


def test_what_cannot_be_taken_does_not_keep_the_others_waiting(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a folder of somebody else, which only its owner may move, and a name that leaves no room for
    that of a description."""
    real = os.rename

    def refused(source: Path, target: Path) -> None:
        if source.name == "a.warmkv":
            raise PermissionError(13, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "rename", refused)
    (box.folder / "a.warmkv").mkdir()
    box.drop(f"{'b' * 247}.kvcache")
    box.look()
    box.time.sleep(module.SIDECAR_PATIENCE_S)
    box.drop("z.warmkv")
    caplog.clear()
    assert box.look() == ["z.warmkv"]
    assert sum("cannot be taken" in said for said in caplog.messages) == 2
    box.drop("y.warmkv")
    assert box.look() == ["y.warmkv"]
    assert sum("cannot be taken" in said for said in caplog.messages) == 2


def test_names_as_long_as_names_may_be_are_filed_away(box: Box) -> None:
    name = f"{'b' * 248}.warmkv"
    for _ in range(2):
        box.drop(name)
        assert box.look() == [name]
    assert len(box.listed()["done"]) == 2
    box.store.error = FormatError("no")
    box.drop(name)
    assert box.look() == [name]
    assert box.look() == []
    assert box.listed()["failed"] == {name}
