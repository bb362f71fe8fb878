"""Reloading: a bad configuration changes nothing, a good one what can be changed."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from warmkv.daemon import config as configuration
from warmkv.daemon.config import Config
from warmkv.daemon.watching.config_file import ConfigFile
from warmkv.daemon.watching.settings import Settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('max_connections = 5\nlease_ttl_s = 10\nsocket = "/tmp/a"\n')
    return path


@pytest.fixture
def settings(file: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in [name for name in os.environ if name.startswith("WARMKV_")]:
        monkeypatch.delenv(name)
    return Settings(configuration.load({"ttl_s": "7"}, file), wall_s=lambda: 12.5)


class Taken:
    def __init__(self, answer: bool | None = None) -> None:
        self.configs: list[Config] = []
        self.answer = answer

    def __call__(self, new: Config) -> bool | None:
        self.configs.append(new)
        return self.answer


def test_what_somebody_applies_is_in_force_and_the_rest_is_named(
    settings: Settings, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connections, leases = Taken(), Taken()
    settings.on(("max_connections",), connections)
    settings.on(("lease_ttl_s",), leases)
    file.write_text('max_connections = 9\nlease_ttl_s = 10\nsocket = "/tmp/b"\n')
    with caplog.at_level(logging.INFO, "warmkv"):
        result = settings.reload("SIGHUP")
    assert (result.ok, result.applied, result.needs_restart) == (True, ("max_connections",), ("socket",))
    assert [item.max_connections for item in connections.configs] == [9] and leases.configs == []
    assert (settings.config.max_connections, settings.config.socket, settings.config.ttl_s) == (9, Path("/tmp/a"), 7.0)
    assert "restart only: socket" in caplog.text
    assert settings.reload("again").needs_restart == ("socket",)
    assert len(connections.configs) == 1


@pytest.mark.parametrize(
    "text",
    [
        "max_connections = 0\n",
        "max_connections = \n",
        "unknown = 1\n",
        "low_watermark = 0.9\nhigh_watermark = 0.5\n",
        "\udcff",
        None,
    ],
)
def test_an_invalid_configuration_changes_nothing_and_is_a_problem_until_it_is_valid(
    settings: Settings, file: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    taken = Taken()
    settings.on(configuration.SETTINGS, taken)
    before, good = settings.config, file.read_text()
    if text is None:
        file.unlink()
    else:
        file.write_text("lease_ttl_s = 99\n" + text, "utf-8", "surrogateescape")
    result = settings.reload("SIGHUP")
    assert not result.ok and settings.config is before and taken.configs == []
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    assert result.error in settings.problem()
    file.write_text(good)
    assert settings.reload("SIGHUP").ok and settings.problem() == ""
    assert settings.config == before


def test_a_setting_that_could_not_be_applied_waits_for_a_restart(settings: Settings, file: Path) -> None:
    def failing(new: Config) -> None:
        raise ValueError("no")

    settings.on(("max_connections",), failing)
    settings.on(("lease_ttl_s", "ttl_s"), Taken(False))
    settings.on(("lease_ttl_s", "anchors"), other := Taken(True))
    file.write_text('max_connections = 9\nlease_ttl_s = 20\nanchors = 3\nsocket = "/tmp/a"\n')
    result = settings.reload("SIGHUP")
    assert (result.applied, result.needs_restart) == (("anchors",), ("max_connections", "lease_ttl_s"))
    assert len(other.configs) == 1
    assert (settings.config.anchors, settings.config.max_connections) == (3, 5)


def test_options_and_environment_still_come_first(settings: Settings, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.on(configuration.SETTINGS, Taken())
    monkeypatch.setenv("WARMKV_LEASE_TTL_S", "33")
    file.write_text('max_connections = 5\nlease_ttl_s = 44\nttl_s = 55\nsocket = "/tmp/a"\n')
    assert settings.reload("SIGHUP").applied == ("lease_ttl_s",)
    assert (settings.config.lease_ttl_s, settings.config.ttl_s) == (33.0, 7.0)


def test_an_error_nobody_thought_of_is_reported_and_not_raised(file: Path) -> None:
    def broken(config: Config) -> Config:
        raise RuntimeError("secret")

    settings = Settings(configuration.load({}, file, {}), broken)
    assert settings.reload("SIGHUP").error == "reading the configuration failed with RuntimeError"


def test_the_last_reload_is_told(settings: Settings, file: Path) -> None:
    assert settings.status() == {"reloads": 0}
    file.write_text("nonsense")
    result = settings.reload("SIGHUP")
    expected = {
        "reloads": 1,
        "at_s": 12.5,
        "ok": False,
        "reason": "SIGHUP",
        "error": result.error,
        "applied": (),
        "needs_restart": (),
    }
    assert settings.status() == expected


# -- the file ----------------------------------------------------------------------------------


class Looks:
    """The looks of a `ConfigFile` an hour after all that was written."""

    def __init__(self, path: Path) -> None:
        self.told: list[str] = []
        self.asked = 0
        self.late_s = 3600.0
        self.file = ConfigFile(path, self.told.append, self._again, lambda: time.time() + self.late_s)

    def _again(self) -> None:
        self.asked += 1

    def look(self) -> int:
        """Look three times; what was told then."""
        before = len(self.told)
        for _ in range(3):
            self.file.look(lambda: True)
        return len(self.told) - before


def test_each_change_of_the_file_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    looks = Looks(path)
    assert looks.file.folders() == {tmp_path: frozenset({"config.toml"})}
    assert looks.look() == 1 and looks.told == ["start"]
    path.write_text("a = 1")
    assert looks.look() == 1
    beside = tmp_path / "beside"
    beside.write_text("a = 2")
    os.utime(beside, ns=(0, path.stat().st_mtime_ns))
    os.replace(beside, path)
    assert looks.look() == 1
    path.unlink()
    assert looks.look() == 1
    assert looks.look() == 0
    assert set(looks.told[1:]) == {"configuration file changed"}


def test_a_file_that_was_emptied_just_now_is_left_to_another_look(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("a = 1")
    looks = Looks(path)
    looks.look()
    path.write_text("")
    looks.late_s = path.stat().st_ctime - time.time()
    looks.file.look(lambda: True)
    assert looks.asked == 1
    looks.late_s = -7.0  # a clock that was set back, or another machine's
    path.write_text("a = 2")
    assert looks.look() == 1


def test_the_target_of_a_link_is_what_counts(tmp_path: Path) -> None:
    """As mounted configurations of container managers are made."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(name)
    (tmp_path / "data").symlink_to("one")
    looks = Looks(tmp_path / "data" / "config.toml")
    assert looks.look() == 1
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert looks.look() == 1
