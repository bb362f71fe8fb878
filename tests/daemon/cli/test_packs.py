"""export and import as a user sees them: files, statuses, rights."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.testing import eventually
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.testing import TOKENS, check_restore, mixed_identity, save
from warmkv.kvstore.testing.samples import CONV, FULL
from warmkv.kvstore.verbs import Verbs
from warmkv.schema import messages as m
from warmkv.schema.errors import RecordError, WarmKVError
from warmkv.schema.records import Anchor

Warmkv = Callable[..., Any]
HYBRID = mixed_identity(FULL, CONV)
BRANCH = [*TOKENS[:4], 50, 51]


class Agent(Verbs):
    """The verbs of any user."""

    def __init__(self, store: Store, uid: int) -> None:
        super().__init__(store.engine.session(uid))

    def _failed(self, exc: WarmKVError) -> str:
        raise exc


@pytest.fixture
def pack(ask: Warmkv, store: Store, tmp_path: Path) -> Path:
    """A whole namespace as a file."""
    save(store, HYBRID, TOKENS, anchors=[Anchor(4)])
    save(store, HYBRID, BRANCH)
    (row,) = ask("ls --json").value["rows"]
    ran = ask("export --json --namespace", row["namespace"][:8], tmp_path / "x.warmkv")
    assert ran.status == 0 and ran.value["records"] == len(store.engine.index.records)
    return tmp_path / "x.warmkv"


def both_prompts(opened: Store) -> None:
    check_restore(opened, HYBRID, [*TOKENS, 1], len(TOKENS))
    check_restore(opened, HYBRID, [*BRANCH, 1], len(BRANCH))


def test_a_namespace_goes_out_and_comes_back(ask: Warmkv, store: Store, pack: Path) -> None:
    count = len(store.engine.index.records)
    assert stat.S_IMODE(pack.stat().st_mode) == 0o600
    there = ask("import --json", pack)
    assert (there.status, there.value["records"], there.value["duplicates"]) == (0, 0, count)
    assert store.clear(HYBRID).records == count
    ran = ask("import --json", pack)
    assert (ran.status, ran.value["records"], ran.value["written"]) == (0, count, True)
    both_prompts(store)
    assert store.match(HYBRID, TOKENS).anchors == (Anchor(4),)
    assert "took in 0 records" in ask("import", pack).out


def test_one_prompt_by_the_id_of_its_record(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    save(store, HYBRID, TOKENS)
    branch = save(store, HYBRID, BRANCH)
    assert branch.id is not None
    ran = ask("export --id", branch.id.hex()[:12], tmp_path / "x")
    assert ran.status == 0 and ran.out.startswith("wrote ") and str(tmp_path / "x") in ran.out
    store.clear(HYBRID)
    assert ask("import", tmp_path / "x").status == 0
    check_restore(store, HYBRID, [*BRANCH, 1], len(BRANCH))


def test_stores_without_daemon_export_and_import(warmkv: Warmkv, pack: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "other", cold_bytes=64 << 20):
        pass
    assert warmkv("import", "--json", "--store", tmp_path / "other", pack).status == 0
    with open_store(tmp_path / "other", cold_bytes=64 << 20) as other:
        both_prompts(other)
        namespace = other.report("ls")["rows"][0]["namespace"]  # type: ignore[index]
    again = warmkv("export", "--json", "--store", tmp_path / "other", "--namespace", namespace, tmp_path / "y.warmkv")
    assert again.status == 0 and (tmp_path / "y.warmkv").stat().st_size == pack.stat().st_size


def test_a_store_without_daemon_is_cleared(warmkv: Warmkv, pack: Path, tmp_path: Path) -> None:
    with open_store(tmp_path / "other", cold_bytes=64 << 20):
        pass
    assert warmkv("import", "--store", tmp_path / "other", pack).status == 0
    assert warmkv("clear", "--json", "--yes", "--all", "--store", tmp_path / "other").value["records"] > 0
    assert warmkv("ls", "--json", "--store", tmp_path / "other").value["total"] == 0


def test_a_file_is_replaced_only_when_told_so(ask: Warmkv, store: Store, pack: Path) -> None:
    (row,) = ask("ls --json").value["rows"]
    before = pack.read_bytes()
    assert ask("export --json --namespace", row["namespace"], pack).status == 1
    assert pack.read_bytes() == before
    assert ask("export --json --force --namespace", row["namespace"], pack).status == 0
    assert len(pack.read_bytes()) == len(before) and os.listdir(pack.parent).count("x.warmkv") == 1


@pytest.mark.parametrize("end", [0, 63, 500, -1])
def test_a_cut_file_is_a_failure_and_enters_nothing_behind_the_cut(ask: Warmkv, store: Store, pack: Path, end: int) -> None:
    store.clear(HYBRID)
    pack.write_bytes(pack.read_bytes()[:end])
    ran = ask("import --json", pack)
    assert (ran.status, ran.error) == (1, "FormatError")
    if end >= 0:
        assert not store.engine.index.records


def test_a_flipped_byte_is_status_5(ask: Warmkv, store: Store, pack: Path) -> None:
    store.clear(HYBRID)
    raw = bytearray(pack.read_bytes())
    raw[len(raw) // 2] ^= 1
    pack.write_bytes(raw)
    ran = ask("import --json", pack)
    assert (ran.status, ran.error) == (5, "DigestError")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("export", "--json", "x"), 2), (("export", "--json", "--id", "abcd", "--namespace", "abcd", "x"), 2),
        (("export", "--json", "--id", "xyz0", "x"), 2), (("export", "--json", "--id", "abc", "x"), 2),
        (("export", "--json", "--id", "abcdabcd", "x"), 4), (("export", "--json", "--namespace", "abcdabcd", "x"), 4),
        (("import", "--json", "missing"), 1), (("import", "--json", "."), 1),
        (("import", "--json", "--share", "no", "x.warmkv"), 1),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_with_its_status(
    ask: Warmkv, pack: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], status: int
) -> None:
    monkeypatch.chdir(pack.parent)
    ran = ask(*arguments)
    assert ran.status == status and "error" in ran.value
    assert not (pack.parent / "x").exists()


def test_a_kvcache_file_needs_its_sidecar(ask: Warmkv, tmp_path: Path) -> None:
    (tmp_path / "x.kvcache").write_bytes(bytes(100))
    missing = ask("import --json", tmp_path / "x.kvcache")
    assert (missing.status, missing.error) == (1, "RecordError") and "x.kvcache.toml" in missing.value["error"]["message"]
    (tmp_path / "x.kvcache.toml").write_text("namespace = 'abcdabcd'\n")
    assert ask("import --json", tmp_path / "x.kvcache").error == "FormatError"


def test_descriptors_come_back(ask: Warmkv, served_descriptors: Callable[[], int], pack: Path, store: Store) -> None:
    before = served_descriptors()
    for _ in range(3):
        ask("import --json", pack)
        ask("import --json", pack.parent)
    assert served_descriptors() == before


@pytest.fixture
def served_descriptors(ask: Warmkv) -> Callable[[], int]:
    """Descriptors of this process, the daemon's among them, once no connection is left."""

    def count() -> int:
        counts: list[int] = []

        def settled() -> bool:
            counts.append(len(os.listdir("/proc/self/fd")))
            return len(counts) > 20 and len(set(counts[-20:])) == 1

        assert eventually(settled)
        return counts[-1]

    return count


def test_another_user_exports_and_imports_its_own(ask_as_another: Warmkv, pack: Path) -> None:
    """Its file, its rights, its namespace: the daemon opens nothing by name."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # on a disk: see the test below
        os.chmod(folder, 0o777)
        theirs = Path(folder) / "x.warmkv"
        theirs.write_bytes(pack.read_bytes())
        unreadable = ask_as_another("import --json", pack)
        assert (unreadable.status, unreadable.error) == (1, "StoreError")
        os.chmod(theirs, 0o644)
        ran = ask_as_another("import --json", theirs)
        assert (ran.status, ran.value["duplicates"]) == (0, 0), ran
        (row,) = ask_as_another("ls --json").value["rows"]
        out = ask_as_another("export --json --namespace", row["namespace"], Path(folder) / "y.warmkv")
        assert out.status == 0, out
        assert (Path(folder) / "y.warmkv").stat().st_uid != os.getuid()


def test_memory_of_a_stranger_is_not_written_on_the_daemons_account(store: Store) -> None:
    """Pages belong to whoever touches them first, whoever made the file."""
    saved = save(Agent(store, os.geteuid() + 1), HYBRID, TOKENS)
    mine = save(store, HYBRID, TOKENS)
    assert saved.id is not None and mine.id is not None
    fd = os.memfd_create("somewhere", os.MFD_CLOEXEC)
    try:
        for uid, id_ in ((os.geteuid() + 1, saved.id), (os.geteuid(), mine.id)):
            session, request = store.engine.session(uid), m.Report("export", json.dumps({"id": id_.hex()}).encode())
            if uid == os.geteuid():
                assert json.loads(session.report(request, fd).json)["records"] == len(store.engine.index.records) // 2
            else:
                with pytest.raises(RecordError, match="charged to the daemon"):
                    session.report(request, fd)
                assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)
