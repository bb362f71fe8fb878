"""Hints: what the file system tells, and that its silence is noticed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmkv.daemon.testing import eventually
from warmkv.daemon.watching import folders as module
from warmkv.daemon.watching.folders import Folders


class Heard:
    """Hints that came, as (name, whole)."""

    def __init__(self) -> None:
        self.hints: list[tuple[str, bool]] = []
        self._lock = threading.Lock()

    def __call__(self, path: Path, whole: bool) -> None:
        with self._lock:
            self.hints.append((path.name, whole))

    def names(self) -> set[str]:
        with self._lock:
            return {name for name, _ in self.hints}


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def folders(heard: Heard, observers) -> Iterator[Folders]:  # type: ignore[no-untyped-def]
    made = Folders(heard, observers)
    yield made
    made.stop()


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    path = tmp_path / "watched"
    path.mkdir()
    return path


def settle(folder: Path, heard: Heard) -> None:
    """Everything that happened before this has been told when it returns."""
    beside = folder / "settled"
    beside.write_bytes(b"x")
    assert eventually(lambda: ("settled", True) in heard.hints)
    heard.hints.clear()


def test_a_write_is_told_and_when_its_writer_is_done(folders: Folders, heard: Heard, watched: Path) -> None:
    folders.follow({watched: None})
    with open(watched / "file", "wb") as file:
        file.write(b"half")
        file.flush()
        assert eventually(lambda: ("file", False) in heard.hints)
        settle(watched, heard)
        assert ("file", True) not in heard.hints
    assert eventually(lambda: ("file", True) in heard.hints)
    assert folders.problem() == ""


def test_a_file_that_was_renamed_over_another_is_told_by_its_new_name(folders: Folders, heard: Heard, watched: Path) -> None:
    folders.follow({watched: frozenset({"target"})})
    (watched / "beside").write_bytes(b"x")
    os.replace(watched / "beside", watched / "target")
    assert eventually(lambda: ("target", True) in heard.hints)
    assert heard.names() == {"target"}


def test_a_file_moved_in_from_elsewhere_is_told(folders: Folders, heard: Heard, watched: Path, tmp_path: Path) -> None:
    folders.follow({watched: None})
    (tmp_path / "outside").write_bytes(b"x")
    os.rename(tmp_path / "outside", watched / "inside")
    assert eventually(lambda: "inside" in heard.names())


def test_reading_and_other_names_are_not_told(folders: Folders, heard: Heard, watched: Path) -> None:
    (watched / "file").write_bytes(b"x")
    folders.follow({watched: frozenset({"file", "settled"})})
    settle(watched, heard)
    (watched / "file").read_bytes()
    (watched / "other").write_bytes(b"x")
    beside = watched / "settled"
    beside.write_bytes(b"y")
    assert eventually(lambda: ("settled", True) in heard.hints)
    assert heard.names() == {"settled"}


def test_a_folder_that_is_deleted_and_made_anew_is_observed_again(folders: Folders, heard: Heard, watched: Path) -> None:
    folders.follow({watched: None})
    for round_ in range(3):
        shutil.rmtree(watched)
        assert eventually(lambda: "watched" in heard.names())
        folders.follow({watched: None})
        assert folders.problem() == ""
        watched.mkdir()
        folders.follow({watched: None})
        heard.hints.clear()
        (watched / f"file-{round_}").write_bytes(b"x")
        assert eventually(lambda name=f"file-{round_}": (name, True) in heard.hints)  # type: ignore[misc]


def test_a_new_folder_with_the_inode_of_the_deleted_one_is_still_another(
    folders: Folders, heard: Heard, watched: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_identity", lambda path: (1, 1) if path.is_dir() else None)
    folders.follow({watched: None})
    shutil.rmtree(watched)
    watched.mkdir()
    assert eventually(lambda: "watched" in heard.names())
    folders.follow({watched: None})
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_a_folder_that_was_replaced_is_observed_in_its_place(
    folders: Folders, heard: Heard, watched: Path, tmp_path: Path
) -> None:
    folders.follow({watched: None})
    os.rename(watched, tmp_path / "old")
    watched.mkdir()
    folders.follow({watched: None})
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_what_happens_behind_a_link_is_told_by_the_name_that_was_wanted(heard: Heard, watched: Path, tmp_path: Path) -> None:
    paths: list[Path] = []

    def hint(path: Path, whole: bool) -> None:
        paths.append(path)
        heard(path, whole)

    link, other = tmp_path / "link", tmp_path / "other"
    link.symlink_to(watched)
    other.mkdir()
    made = Folders(hint)
    made.follow({link: None})
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)
    assert set(paths) == {link / "file"}
    link.unlink()
    link.symlink_to(other)
    made.follow({link: None})
    (other / "another").write_bytes(b"x")
    assert eventually(lambda: ("another", True) in heard.hints)
    made.stop()


def test_a_folder_that_is_not_there_yet_is_no_problem(folders: Folders, heard: Heard, tmp_path: Path) -> None:
    later = tmp_path / "later"
    folders.follow({later: None})
    assert folders.problem() == ""
    later.mkdir()
    folders.follow({later: None})
    (later / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_a_folder_no_longer_wanted_is_left(folders: Folders, heard: Heard, watched: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    folders.follow({watched: None, other: None})
    folders.follow({other: None})
    (watched / "file").write_bytes(b"x")
    settle(other, heard)
    assert "file" not in heard.names()


def test_a_dead_observer_is_a_problem_until_it_is_started_anew(  # type: ignore[no-untyped-def]
    folders: Folders, heard: Heard, watched: Path, observers
) -> None:
    folders.follow({watched: None})
    observers.kill()
    assert "died" in folders.problem()
    folders.follow({watched: None})
    assert folders.problem() == ""
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_a_dead_reader_below_a_living_observer_is_a_problem_as_well(  # type: ignore[no-untyped-def]
    folders: Folders, heard: Heard, watched: Path, observers
) -> None:
    folders.follow({watched: None})
    reader = getattr(observers.made[0], "_inotify_fd", None)
    if not isinstance(reader, threading.Thread):
        pytest.skip("this version of the library reads otherwise")
    reader.stop()  # type: ignore[attr-defined]
    reader.join()
    assert "died" in folders.problem()
    folders.follow({watched: None})
    assert folders.problem() == ""
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_a_dead_watcher_of_one_folder_is_a_problem_until_it_is_started_anew(  # type: ignore[no-untyped-def]
    folders: Folders, heard: Heard, watched: Path, observers
) -> None:
    folders.follow({watched: None})
    (emitter,) = observers.made[0].emitters
    emitter.stop()
    emitter.join()
    assert str(watched) in folders.problem()
    folders.follow({watched: None})
    assert folders.problem() == ""
    (watched / "file").write_bytes(b"x")
    assert eventually(lambda: ("file", True) in heard.hints)


def test_a_system_without_room_for_an_observer_is_a_problem_only(folders: Folders, watched: Path, observers) -> None:  # type: ignore[no-untyped-def]
    observers.error = OSError(errno.EMFILE, "inotify instance limit reached")
    folders.follow({watched: None})
    assert "inotify instance limit reached" in folders.problem()
    observers.error = None
    folders.follow({watched: None})
    assert folders.problem() == ""


def test_no_more_folders_are_observed_than_there_are_threads_for(  # type: ignore[no-untyped-def]
    folders: Folders, tmp_path: Path, observers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FOLDERS", 3)
    many = [tmp_path / f"folder-{number}" for number in range(8)]
    for path in many:
        path.mkdir()
    folders.follow(dict.fromkeys(many))
    folders.follow(dict.fromkeys(many))
    assert len(observers.made[0].emitters) == 3


def test_a_folder_in_which_too_much_happens_is_left_and_one_that_is_busy_now_and_then_is_not(  # type: ignore[no-untyped-def]
    heard: Heard, watched: Path, observers, time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOISY_EVENTS", 50)
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    folders = Folders(heard, observers, time)
    wanted = {watched: frozenset({"nothing"}), quiet: None}
    folders.follow(wanted)
    for number in range(20):
        time.sleep(module.NOISY_S + 1)
        (quiet / f"file-{number}").write_bytes(b"x")
        assert eventually(lambda number=number: (f"file-{number}", True) in heard.hints)  # type: ignore[misc]
    assert len(observers.made[0].emitters) == 2
    for number in range(50):
        (watched / f"file-{number}").write_bytes(b"x")
    assert eventually(lambda: ("watched", False) in heard.hints)
    folders.follow(wanted)
    assert [emitter.watch.path for emitter in observers.made[0].emitters] == [str(quiet)]
    assert folders.problem() == ""
    folders.stop()


def test_stopping_before_starting_and_twice_is_harmless(folders: Folders, watched: Path) -> None:
    folders.stop()
    folders.follow({watched: None})
    folders.stop()
    folders.stop()
    assert "not started" in folders.problem()
