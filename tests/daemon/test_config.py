from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmkv.daemon import config
from warmkv.schema.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", 'warm_bytes = "3MiB"\ncold_bytes = "3MiB"\nmax_connections = 3\n')
    env = {"WARMKV_WARM_BYTES": "2MiB", "WARMKV_COLD_BYTES": "2MiB"}
    loaded = config.load({"warm_bytes": "1MiB", "cold_bytes": None}, file, env)
    assert (loaded.warm_bytes, loaded.cold_bytes, loaded.max_connections) == (1 << 20, 2 << 20, 3)
    assert (loaded.frame_timeout_s, loaded.anchors) == (30.0, 0)
    assert config.load({"anchors": "7"}, file, {}).anchors == 7
    assert loaded.source == file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        (17, 17),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5MiB", 3 << 19),
        ("5MB", 5_000_000),
        ("7k", 7 << 10),
        ("8b", 8),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert config.parse_size(text) == expected


@pytest.mark.parametrize("text", ["-1", -1, "", "GiB", "1XB", "1e9", "nan", None, True, 1.5, "9999999TiB", "1 2", "0x10"])
def test_sizes_that_are_none_are_refused(text: object) -> None:
    with pytest.raises(ValueError):
        config.parse_size(text)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary(), st.lists(st.integers())))
def test_any_value_of_any_setting_is_taken_or_refused_as_config_error(value: object) -> None:
    for name in config.SETTINGS:
        try:
            config.load({name: value}, None, {"XDG_CONFIG_HOME": "/nonexistent"})
        except ConfigError as exc:
            assert name.replace("_", "-") in str(exc)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("warm_bytes", "-5"),
        ("cold_bytes", "-1GiB"),
        ("max_connections", "0"),
        ("max_connections", "many"),
        ("anchors", "-1"),
        ("anchors", "1.5"),
        ("anchors", "all"),
        ("anchors", "1048577"),
        ("frame_timeout_s", "0"),
        ("frame_timeout_s", "-1"),
        ("lease_ttl_s", "inf"),
        ("lease_ttl_s", "nan"),
        ("log_level", "loud"),
        ("allow_uids", "no-such-user"),
        ("allow_uids", "-1"),
        ("allow_uids", "4294967295"),
    ],
)
def test_a_rejection_names_its_source(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"option --{name.replace('_', '-')}"):
        config.load({name: value}, None, {})
    with pytest.raises(ConfigError, match=f"environment variable WARMKV_{name.upper()}"):
        config.load({}, None, {f"WARMKV_{name.upper()}": value})
    file = write(tmp_path / "c.toml", f'{name} = "{value}"\n')
    with pytest.raises(ConfigError, match=f"key {name} of {file}"):
        config.load({}, file, {})


def test_unknown_key_is_refused_and_named(tmp_path: Path) -> None:
    file = write(tmp_path / "c.toml", "warm_byte = 5\n")
    with pytest.raises(ConfigError, match="unknown key 'warm_byte'"):
        config.load({}, file, {})


@pytest.mark.parametrize("data", [b"warm_bytes = ", b"\xff\xfe", b"[", b"a = 1\na = 2\n"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load({}, file, {})


def test_a_named_file_must_exist_and_the_default_one_need_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        config.load({}, tmp_path / "absent.toml", {})
    with pytest.raises(ConfigError, match="does not exist"):
        config.load({}, None, {"WARMKV_CONFIG": str(tmp_path / "absent.toml")})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load({}, tmp_path, {})


def test_lists_of_uids_come_as_text_or_list(tmp_path: Path) -> None:
    assert config.load({"allow_uids": "0, 1000 0"}, None, {}).allow_uids == (0, 1000)
    file = write(tmp_path / "c.toml", "allow_uids = [0, 7]\n")
    assert config.load({}, file, {}).allow_uids == (0, 7)


def test_variables_nobody_reads_are_reported() -> None:
    env = {"WARMKV_WARM_BYTE": "1", "WARMKV_DISABLE": "1", "WARMKV_SOCKET": "/x/s", "WARMKV_KV_KEYS": "fp8"}
    assert config.load({}, None, env).unknown_variables == ("WARMKV_WARM_BYTE",)


def test_auto_budget_is_the_stores_own_default() -> None:
    assert config.load({"warm_bytes": "auto"}, None, {}).warm_bytes is None


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        config.load({}, tmp_path / "config.toml", {})


def test_a_time_that_may_be_never_says_so() -> None:
    assert [config.load({"ttl_s": given}).ttl_s for given in ("0", "0.0", "60")] == [0, 0, 60]
    with pytest.raises(ConfigError, match="expected 0, or at most"):
        config.load({"ttl_s": "soon"})


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ({}, 1.0),
        ({"allow_uids": str(os.geteuid())}, 1.0),
        ({"allow_uids": "4242"}, 0.5),
        ({"allow_gids": "4242"}, 0.5),
        ({"allow_uids": "4242", "uid_share": "0.9"}, 0.9),
    ],
)
def test_one_of_several_users_cannot_take_everything_unless_that_was_said(
    tmp_path: Path, given: dict[str, object], share: float
) -> None:
    (tmp_path / "empty.toml").touch()
    assert config.load(given, tmp_path / "empty.toml", {}).uid_share == share
