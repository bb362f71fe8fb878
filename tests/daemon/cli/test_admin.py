"""Verbs that run a store: what they do, for whom, and with which status they end."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon.cli import waiting as progress
from warmkv.daemon.cli.waiting import waiting
from warmkv.kvstore.store import Store, open_store
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.testing import TOKENS, check_restore, random_identity, save
from warmkv.schema import lmdb_records
from warmkv.schema.identity import Identity
from warmkv.schema.records import RecordId

Warmkv = Callable[..., Any]
LONG = list(range(1000, 1400))
WIDE = random_identity(layers=1, heads=1, dim=256)


@pytest.fixture
def identity() -> Identity:
    return random_identity()


def fill(store: Store, count: int = 4) -> None:
    """Prompts of about 200 KiB each, on disk."""
    for number in range(count):
        save(store, WIDE, [number, *LONG[:99]], ack="disk")


def warm_bytes(store: Store) -> int:
    return store.engine.warm.ledger.resident_bytes


# -- evict -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "most"), [("500KiB", 500 << 10), ("2%", (16 << 20) // 50), ("0", 0)])
def test_evict_brings_memory_down_and_loses_nothing(ask: Warmkv, store: Store, to: str, most: int) -> None:
    fill(store)
    before = warm_bytes(store)
    told = ask("evict --json --tier warm --dry-run --to", to)
    assert told.status == 0 and warm_bytes(store) == before
    done = ask("evict --json --tier warm --to", to)
    assert done.status == 0 and done.value == told.value and sum(done.value.values()) > 0
    assert warm_bytes(store) <= most
    for number in range(4):
        check_restore(store, WIDE, [number, *LONG[:99], 7], 100)


def test_evict_of_both_tiers_and_without_a_size(ask: Warmkv, store: Store) -> None:
    fill(store)
    nothing = ask("evict", "--json")
    assert nothing.status == 0 and not any(nothing.value.values())
    assert ask("evict --json --to 0").status == 0
    assert (store.stats()["entries"], warm_bytes(store)) == (0, 0)
    assert ask("evict").out == "gone from memory: 0 records, 0 B\ngone from disk: 0 records, 0 B\n"
    assert ask("evict --tier warm --dry-run").out == "would go from memory: 0 records, 0 B\n"


def test_evict_of_a_store_without_daemon(warmkv: Warmkv, tmp_path: Path) -> None:
    with open_store(tmp_path / "store", cold_bytes=64 << 20, warm_bytes=4 << 20) as opened:
        fill(opened)
    ran = warmkv("evict", "--json", "--store", tmp_path / "store", "--tier", "cold", "--to", "300KiB")
    assert ran.status == 0
    with open_store(tmp_path / "store", cold_bytes=64 << 20, warm_bytes=4 << 20) as opened:
        assert opened.stats()["entries"] == 1


@pytest.mark.parametrize("to", ["", "-1", "101%", "-1%", "x%", "nan%", "many", "1e9"])
def test_sizes_that_are_none_are_wrong_usage(warmkv: Warmkv, to: str) -> None:
    assert warmkv("evict", "--json", f"--to={to}").status == 2


# -- compact, backup, scrub, verify ------------------------------------------------------------


def test_compact_gives_room_back_and_keeps_what_is_stored(ask: Warmkv, store: Store, identity: Identity) -> None:
    save(store, identity, TOKENS, ack="disk")
    fill(store, 20)
    store.clear(WIDE)
    ran = ask("compact --json")
    assert ran.status == 0 and ran.value["after_bytes"] < ran.value["before_bytes"]
    ask("evict --tier warm --to 0")
    check_restore(store, identity, [*TOKENS, 1], 9)
    assert ask("verify --json").value["bad"] == []


def test_a_backup_opens_as_a_store(ask: Warmkv, store: Store, identity: Identity, tmp_path: Path) -> None:
    save(store, identity, TOKENS, ack="disk")
    assert ask("backup --json", tmp_path / "copy").status == 0
    save(store, identity, [*TOKENS, 5], ack="disk")
    with open_store(tmp_path / "copy", cold_bytes=64 << 20) as copy:
        check_restore(copy, identity, [*TOKENS, 5], 9)
    again = ask("backup --json", tmp_path / "copy")
    assert again.status == 1 and "error" in again.value


def test_a_backup_path_is_ours_not_the_daemons(ask: Warmkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ask("backup --json copy").status == 0
    assert (tmp_path / "here" / "copy" / "data.mdb").is_file()


def damage(store: Store, id_: RecordId) -> None:
    assert store.engine.cold is not None
    env, key = store.engine.cold._env, lmdb_records.chunk_key(id_, 0)
    with env.begin(write=True) as txn:
        value = bytearray(txn.get(key, db=env.db[b"chunks"]) or b"")
        value[3] ^= 1
        txn.put(key, bytes(value), db=env.db[b"chunks"])


def test_scrub_finds_what_is_damaged_with_status_5(ask: Warmkv, store: Store, identity: Identity) -> None:
    save(store, identity, TOKENS, ack="disk")
    bad = save(store, WIDE, LONG[:50], ack="disk")
    assert bad.id is not None and ask("scrub --json").status == 0
    ask("evict --tier warm --to 0")
    damage(store, bad.id)
    ran = ask("scrub --json")
    assert (ran.status, ran.value["found_bad"], ran.value["running"]) == (5, 1, False)
    assert store.match(WIDE, LONG).matched == 0 and store.match(identity, TOKENS).matched == 9
    assert ask("scrub --progress --json").value["passes"] == 2
    assert ask("scrub").status == 0


def test_scrub_in_the_background_comes_back_at_once(ask: Warmkv, store: Store) -> None:
    fill(store, 1)
    assert ask("scrub --background --json").status == 0
    assert ask("scrub --json").value["passes"] >= 1
    assert ask("scrub --json --background --progress").status == 2


def test_scrub_of_a_store_without_daemon(warmkv: Warmkv, tmp_path: Path, identity: Identity) -> None:
    with open_store(tmp_path / "store", cold_bytes=64 << 20) as opened:
        save(opened, identity, TOKENS)
    ran = warmkv("scrub", "--json", "--store", tmp_path / "store")
    assert (ran.status, ran.value["passes"], ran.value["found_bad"]) == (0, 1, 0)


def test_looking_into_a_store_that_is_larger_than_our_settings_allow_evicts_nothing(
    warmkv: Warmkv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(tmp_path / "store", cold_bytes=64 << 20, warm_bytes=4 << 20) as opened:
        fill(opened)
    for budget in ("300KiB", "0"):
        monkeypatch.setenv("WARMKV_COLD_BYTES", budget)
        assert warmkv("stats", "--json", "--store", tmp_path / "store").value["entries"] == 4
        assert warmkv("verify", "--json", "--store", tmp_path / "store").value["checked"] == 4


# -- health, reload, watch ---------------------------------------------------------------------


def test_health_names_what_is_wrong(ask: Warmkv, store: Store) -> None:
    well = ask("health --json")
    assert (well.status, well.value["healthy"], well.value["problems"]) == (0, True, {})
    assert ask("health").out == "all is well\n"
    store.engine.health.watch("a part", lambda: "it does not run")
    ill = ask("health --json")
    assert (ill.status, ill.value["problems"]) == (1, {"a part": "it does not run"})
    assert "it does not run" in ask("health").out
    status = ask("status --json").value
    assert status["healthy"] is False and status["problems"] == ill.value["problems"]


def test_reload_asks_whoever_read_the_settings(ask: Warmkv, store: Store) -> None:
    refused = ask("reload --json")
    assert (refused.status, refused.error) == (1, "UnsupportedError")
    for report, status in (({"ok": True, "applied": ["log_level"]}, 0), ({"ok": False, "error": "wrong"}, 1)):
        store.engine.reload = lambda report=report: report
        told = ask("reload --json")
        assert (told.value, told.status) == (report, status)


def test_watched_files(ask: Warmkv, store: Store, identity: Identity, tmp_path: Path) -> None:
    save(store, identity, TOKENS)
    (tmp_path / "weights").write_bytes(b"w" * 100)
    (row,) = ask("ls --json").value["rows"]
    added = ask("watch add --json", row["namespace"][:6], tmp_path / "weights")
    assert (added.status, added.value) == (0, {"namespace": row["namespace"], "files": 1})
    (listed,) = ask("watch ls --json").value["rows"]
    assert [item["path"] for item in listed["files"]] == [str(tmp_path / "weights")]
    assert str(tmp_path / "weights") in ask("watch ls").out
    assert ask("watch rm --json", row["namespace"]).value["removed"] == 1
    assert ask("watch rm", row["namespace"]).status == 4
    assert ask("watch add --json", row["namespace"], tmp_path / "missing").status != 0
    assert ask("watch add --json", row["namespace"]).status == 2


# -- pin ---------------------------------------------------------------------------------------


def test_pins_hold_until_they_are_ended(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    fill(store, 2)
    (tmp_path / "ids").write_text(json.dumps([0, *LONG[:99]]))
    (row,) = ask("ls --json").value["rows"]
    pinned = ask("pin --json --ttl 3600 --namespace", row["namespace"], tmp_path / "ids")
    assert (pinned.status, pinned.value) == (0, {"held": 100, "tokens": 100})
    ask("evict --to 0")
    assert store.match(WIDE, [0, *LONG]).usable == 100 and store.match(WIDE, [1, *LONG]).matched <= 1
    assert ask("unpin --json --namespace", row["namespace"], tmp_path / "ids").value["held"] == 100
    ask("evict --to 0")
    assert store.match(WIDE, [0, *LONG]).usable == 0


def test_pinning_what_is_not_stored_is_status_4(ask: Warmkv, store: Store, tmp_path: Path) -> None:
    fill(store, 1)
    (row,) = ask("ls --json").value["rows"]
    (tmp_path / "ids").write_text("[9, 9, 9]")
    for verb in ("pin", "unpin"):
        assert ask(f"{verb} --json --namespace", row["namespace"], tmp_path / "ids").status == 4
        assert ask(f"{verb} --json --namespace 00000000", tmp_path / "ids").error == "UnknownNamespace"
    for ttl in ("0", "-1", "nan", "inf", "1e30"):
        assert ask(f"pin --json --ttl {ttl} --namespace", row["namespace"], tmp_path / "ids").status == 2


# -- for whom ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["evict", "compact", "backup /tmp/nowhere", "scrub", "health", "reload"])
def test_another_user_administers_nothing(ask_as_another: Warmkv, store: Store, verb: str) -> None:
    """A child that gave up being root: the kernel says so to the daemon, nothing here does."""
    ran = ask_as_another(f"{verb} --json")
    assert (ran.status, ran.error) == (1, "AccessRefused"), ran


def test_another_user_sees_and_takes_nothing_of_ours(
    ask_as_another: Warmkv, ask: Warmkv, store: Store, identity: Identity
) -> None:
    saved = save(store, identity, TOKENS, ack="disk")
    assert saved.id is not None
    (row,) = ask("ls --json").value["rows"]
    assert ask_as_another("ls --json").value["rows"] == []
    stats = ask_as_another("stats --json").value
    assert (stats["entries"], stats["warm"]["bytes"], stats["cold"]["bytes"]) == (0, 0, 0)
    for what in (("--id", saved.id.hex()), ("--namespace", row["namespace"])):
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            ran = ask_as_another("export --json", *what, Path(folder) / "x.warmkv")
            assert (ran.status, ran.error) == (4, "UnknownNamespace")
            assert os.listdir(folder) == []
    assert ask_as_another("clear --all --yes --json").value["records"] == 0
    assert store.match(identity, TOKENS).matched == len(TOKENS)


def test_another_user_reads_the_share_it_was_given_and_drops_nothing(
    ask_as_another: Warmkv, store: Store, identity: Identity
) -> None:
    """What the declaration says, by the uid the kernel tells."""
    store.engine.options = replace(store.engine.options, shares={"team": Share(frozenset({54321}), frozenset())})
    ours = Store(store.engine, share="team")
    save(ours, identity, TOKENS, ack="disk")
    (row,) = ask_as_another("ls --json").value["rows"]
    assert (row["share"], row["records"]) == ("team", 1)
    assert ask_as_another("verify --json").value["checked"] == 1
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o777)
        assert ask_as_another("export --json --namespace", row["namespace"], Path(folder) / "x.warmkv").status == 0
        assert ask_as_another("import --json --share team", Path(folder) / "x.warmkv").error == "AccessRefused"
        (Path(folder) / "ids").write_text(json.dumps(TOKENS))
        for verb in ("clear --json --yes --namespace", "forget --json --namespace"):
            more = [Path(folder) / "ids"] if verb.startswith("forget") else []
            refused = ask_as_another(verb, row["namespace"], *more)
            assert (refused.status, refused.error) == (1, "AccessRefused"), refused
    assert ours.match(identity, TOKENS).matched == len(TOKENS)


# -- on a terminal -----------------------------------------------------------------------------


def test_waiting_shows_how_far_it_is_and_says_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(progress, "TELL_INTERVAL_S", 0.01)

    def tell() -> str:
        asked.set()
        return "half way"

    with waiting("working", tell):
        pass
    assert not asked.is_set() and capfd.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with waiting("working", tell, quiet=True):
        pass
    assert not asked.is_set()
    with waiting("working", tell):
        assert asked.wait(30)
    assert "warmkv-progress" not in [thread.name for thread in threading.enumerate()]
    assert capfd.readouterr().out == ""
