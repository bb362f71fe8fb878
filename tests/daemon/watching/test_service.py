"""All of it around an engine in this process: what a reload changes in an open store."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from warmkv.daemon import config as configuration
from warmkv.daemon.pressure import Source
from warmkv.daemon.watching import Watching, service
from warmkv.kvstore.store import Store, StoreOptions, cgroup, reconfigure
from warmkv.kvstore.store.check import check
from warmkv.kvstore.store.engine import Engine
from warmkv.kvstore.store.index import Cold
from warmkv.kvstore.store.options import Share
from warmkv.kvstore.testing import TOKENS, random_identity, save
from warmkv.schema.errors import BudgetError

MIB = 1 << 20
WIDE = random_identity(layers=1, heads=4, dim=1024)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("WARMKV_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "config.toml"
    path.write_text("")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    options = StoreOptions(tmp_path / "store", warm_bytes=8 * MIB, cold_bytes=16 * MIB, evict_interval_s=3600.0)
    opened = Store(Engine.open(options))
    yield opened
    problems = check(opened.engine)
    opened.close()
    assert problems == []


@pytest.fixture
def begin(store: Store, file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Watching]]:
    """Makes the service; a test calls its parts, or `start`."""
    monkeypatch.setattr(cgroup, "limit_bytes", lambda: None)
    level = logging.getLogger("warmkv").level
    made: list[Watching] = []

    def make(**settings: object) -> Watching:
        config = configuration.load({"warm_bytes": str(8 * MIB), "cold_bytes": str(16 * MIB), **settings}, file)
        # As if the values of these options had come from the file.
        made.append(Watching(replace(config, given={}), store.engine))
        return made[-1]

    yield make
    for item in made:
        item.stop()
    logging.getLogger("warmkv").setLevel(level)


def changed(watching: Watching, file: Path, **values: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Reload with these values instead; what was applied, and what was not."""
    common = {"warm_bytes": 8 * MIB, "cold_bytes": 16 * MIB, **values}
    file.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in common.items()))
    result = watching.settings.reload("test")
    assert result.ok, result.error
    return result.applied, result.needs_restart


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def test_what_the_store_reads_where_it_is_used_is_in_force_at_once(
    begin: Callable[..., Watching], store: Store, file: Path
) -> None:
    watching, engine = begin(), store.engine
    new = {
        "anchors": 7, "reservation_ttl_s": 11.0, "lease_ttl_s": 12.0, "busy_timeout_s": 0.5, "high_watermark": 0.5,
        "low_watermark": 0.25, "evict_interval_s": 77.0, "ttl_s": 99.0, "uid_share": 0.5, "namespace_floor_bytes": 5,
        "max_tokens": 1000, "max_dirty_bytes": 4096, "shares": {"team": {"readers": [7], "writers": [8]}},
        "scrub_interval_s": 3600.0, "scrub_bytes_per_s": 4321,
    }  # fmt: skip
    assert set(new) == set(reconfigure.LIVE)
    applied, waiting = changed(watching, file, **new)
    assert (set(applied), waiting) == (set(reconfigure.LIVE), ())
    told = {name: getattr(engine.options, name) for name in reconfigure.LIVE}
    assert told == {**new, "shares": {"team": Share(frozenset({7, 8}), frozenset({8}))}}
    for part in (engine.intake, engine.acquisition, engine.eviction):
        assert part._options is engine.options
    assert engine.scrubber is not None and engine.scrubber.problem() == ""
    assert (engine.scrubber.progress()["interval_s"], engine.scrubber._bytes_per_s) == (3600.0, 4321)
    assert (engine.options.warm_bytes, engine.options.path) == (8 * MIB, store.engine.options.path)


def test_options_that_do_not_fit_each_other_change_nothing(store: Store) -> None:
    before = store.engine.options
    with pytest.raises(BudgetError):
        reconfigure.reconfigure(store.engine, replace(before, low_watermark=0.9, high_watermark=0.1))
    assert store.engine.options is before


def test_a_smaller_warm_budget_evicts_and_what_is_on_disk_stays(begin: Callable[..., Watching], store: Store, file: Path) -> None:
    watching = begin()
    for number in range(8):
        save(store, WIDE, [number, *TOKENS], ack="disk")
    held = store.engine.warm.ledger.resident_bytes
    assert changed(watching, file, warm_bytes=held // 2) == (("warm_bytes",), ())
    watching.look()
    assert 0 < store.engine.warm.ledger.used_bytes <= held // 2
    assert [store.match(WIDE, [number, *TOKENS]).matched for number in range(8)] == [len(TOKENS) + 1] * 8


@pytest.mark.parametrize(
    ("values", "applied"),
    [
        ({"cold_bytes": 8 * MIB}, True),
        ({"cold_bytes": 32 * MIB}, False),
        ({"cold_bytes": 0}, False),
        ({"cold_bytes": "auto"}, False),
        ({"evict_interval_s": 0}, False),
        ({"evict_interval_s": 60}, True),
        ({"watch_interval_s": 5}, True),
        ({"log_level": "debug"}, True),
        ({"policy": "lru"}, False),
        ({"allow_network_store": True}, False),
        ({"socket": "/run/other"}, False),
    ],
)
def test_what_can_change_does_and_what_cannot_is_named(
    begin: Callable[..., Watching], file: Path, values: dict[str, Any], applied: bool
) -> None:
    names = tuple(values)
    assert changed(begin(), file, **values) == ((names, ()) if applied else ((), names))


def test_a_cold_tier_that_is_turned_off_keeps_what_it_holds(begin: Callable[..., Watching], store: Store, file: Path) -> None:
    save(store, WIDE, TOKENS, ack="disk")
    assert changed(begin(), file, cold_bytes=0) == ((), ("cold_bytes",))
    store.flush()
    assert sum(record.cold == Cold.STORED for record in store.engine.index.records.values()) == 1


def test_the_spool_takes_files_of_those_who_may_connect(begin: Callable[..., Watching], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {7: {70, 71}, 8: {80}}
    monkeypatch.setattr(service, "groups_of", lambda uid: groups.get(uid, set()))
    watching = begin(allow_uids="9", allow_gids="71,72")
    assert [uid for uid in (os.geteuid(), 7, 8, 9, 10) if watching._permitted(uid)] == [os.geteuid(), 7, 9]


def test_an_eviction_service_is_not_ended_by_an_interval_of_0(begin: Callable[..., Watching], store: Store, file: Path) -> None:
    """It would look without a pause."""
    assert changed(begin(), file, evict_interval_s=0, anchors=3) == (("anchors",), ("evict_interval_s",))
    assert (store.engine.options.anchors, store.engine.options.evict_interval_s) == (3, 3600.0)
    assert store.engine.eviction._options is store.engine.options and store.engine.eviction.runs == 0


def test_the_pressure_watch_comes_and_goes_with_its_setting(begin: Callable[..., Watching], file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    watching = begin()
    watching.pressure._told = Source(tmp_path / "pipe", b"")
    watching.start()
    assert watching.pressure.figures()["watching"] is not None
    changed(watching, file, pressure=False)
    assert watching.pressure.figures()["watching"] is None
    changed(watching, file, pressure=True)
    assert watching.pressure.figures()["watching"] is not None


def test_without_a_single_hint_one_look_does_everything(
    store: Store, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a queue that ran over, on a system without room for an observer."""

    def none() -> Any:
        raise OSError("no instance left")

    spool, weights = tmp_path / "spool", tmp_path / "weights"
    spool.mkdir(mode=0o700)
    weights.write_bytes(b"old")
    monkeypatch.setattr(cgroup, "limit_bytes", lambda: 4 * MIB)
    settings = {"warm_bytes": str(8 * MIB), "cold_bytes": str(16 * MIB), "spool": str(spool), "watch_interval_s": "0.001"}
    watching = Watching(configuration.load(settings, file), store.engine, observer=none)
    save(store, WIDE, TOKENS)
    (key,) = store.engine.index.namespaces
    store.engine.weights.register(os.geteuid(), key, [str(weights)])
    watching.look()
    (spool / "bad.warmkv").write_bytes(b"no pack")
    weights.write_bytes(b"other")
    file.write_text("anchors = 5")
    os.utime(file, ns=(0, 0))
    threading.Event().wait(0.25)  # what was written just now is left to the next look
    watching.look()
    threading.Event().wait(0.002)
    watching.look()
    assert watching.settings.config.anchors == 5
    assert store.match(WIDE, TOKENS).matched == 0
    assert (spool / "failed" / "bad.warmkv.reason").exists()
    assert store.engine.warm.ledger.budget_bytes == 3 * MIB
    assert "no instance left" in store.engine.health.problems()["watching"]
    watching.stop()


def test_nothing_is_reloaded_once_it_stops(begin: Callable[..., Watching], store: Store, file: Path) -> None:
    watching = begin()
    watching.start()
    watching.stop()
    file.write_text("anchors = 5")
    assert watching.settings.reload("late").error == "the daemon is stopping"
    assert watching.settings.config.anchors == 0 and watching.pressure.figures()["watching"] is None


def test_health_and_figures_end_with_the_service(begin: Callable[..., Watching], store: Store) -> None:
    watching = begin()
    watching.start()
    assert {"watching", "configuration", "spool", "pressure"} <= set(store.engine.health.names())
    assert store.engine.reload is not None and store.engine.reload()["ok"]
    watching.stop()
    watching.stop()
    assert not {"watching", "configuration", "spool", "pressure"} & set(store.engine.health.names())
