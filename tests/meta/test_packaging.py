"""The wheel: everything that belongs to warmkv, nothing else, and usable where nothing else is."""

from __future__ import annotations

import configparser
import email
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PROJECT["tool"]["setuptools"]
VERSION: str = PROJECT["project"]["version"]
#: Not of this process: what would leak this checkout, its settings or its coverage into a child.
LEAKS = ("PYTHON", "WARMKV_", "COV_", "COVERAGE_", "VIRTUAL_ENV")


def folder_of(package: str) -> Path:
    """Folder of a package, by the longest entry of package-dir that begins its name."""
    homes: Mapping[str, str] = SETUPTOOLS["package-dir"]
    parts = package.split(".")
    for at in range(len(parts), 0, -1):
        home = homes.get(".".join(parts[:at]))
        if home is not None and (at == len(parts) or at > 1):
            return Path(home, *parts[at:])
    raise AssertionError(f"{package} lies in no folder of package-dir")


def package_of(folder: Path) -> str:
    return "warmkv" if folder == Path("kvstore/_top") else ".".join(("warmkv", *folder.parts))


def packages_of(files: list[Path]) -> set[str]:
    """Packages of the tree: every folder with an __init__.py outside tests."""
    return {package_of(name.parent) for name in files if name.name == "__init__.py" and name.parts[0] != "tests"}


def data_of(package: str) -> set[str]:
    """Names in the wheel of the data files of a package, as the tree has them."""
    folder = folder_of(package)
    patterns = SETUPTOOLS["package-data"].get(package, [])
    found = [path.relative_to(ROOT / folder) for pattern in patterns for path in (ROOT / folder).glob(pattern)]
    return {f"{package.replace('.', '/')}/{path.as_posix()}" for path in found}


def outside() -> dict[str, str]:
    """An environment in which nothing points back to this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LEAKS)}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=outside(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# -- the list and the tree --------------------------------------------------------------------


def test_the_package_list_is_the_tree(repository_files: list[Path]) -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_of(repository_files))
    assert len(set(SETUPTOOLS["packages"])) == len(SETUPTOOLS["packages"])


def test_every_listed_package_is_where_it_should_be() -> None:
    for package in SETUPTOOLS["packages"]:
        assert (ROOT / folder_of(package) / "__init__.py").is_file(), package


def test_every_data_pattern_finds_something() -> None:
    for package, patterns in SETUPTOOLS["package-data"].items():
        for pattern in patterns:
            assert list((ROOT / folder_of(package)).glob(pattern)), f"{package}: {pattern}"


def test_every_data_file_belongs_to_a_pattern(repository_files: list[Path]) -> None:
    folders = {folder_of(package): package for package in SETUPTOOLS["packages"]}
    wanted = {name for package in SETUPTOOLS["packages"] for name in data_of(package)}
    for name in repository_files:
        home = next((folder for folder in [name.parent, *name.parents] if folder in folders), None)
        if home is not None and name.suffix != ".py":
            assert f"{folders[home].replace('.', '/')}/{name.relative_to(home).as_posix()}" in wanted, name


def test_one_version_everywhere() -> None:
    import warmkv

    assert warmkv.__version__ == VERSION


# -- the wheel --------------------------------------------------------------------------------


def can_build_here() -> bool:
    """Whether this environment has the setuptools of pyproject; else the build fetches its own."""
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository_files: list[Path]) -> Path:
    """A wheel built from a copy of the repository's files, as a clone would have them."""
    source, out = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("dist")
    for name in repository_files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    isolation = ["--no-isolation"] if can_build_here() else []
    run(sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a fresh environment that holds the wheel and what it depends on."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", home, cwd=wheel.parent)
    run(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=wheel.parent)
    return home / "bin"


@pytest.mark.wheel
def test_the_wheel_holds_every_file_and_no_other(wheel: Path, repository_files: list[Path]) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = f"warmkv-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in names} == {"warmkv", info}
    expected = {name for package in SETUPTOOLS["packages"] for name in data_of(package)}
    for name in repository_files:
        if name.suffix == ".py" and package_of(name.parent) in SETUPTOOLS["packages"]:
            expected.add(f"{package_of(name.parent).replace('.', '/')}/{name.name}")
    assert {name for name in names if name.startswith("warmkv/")} == expected
    assert {"warmkv/schema/fbs/wire.fbs", "warmkv/schema/fbs/container.fbs", "warmkv/schema/generated/VERSION"} <= names
    assert {"warmkv/py.typed", "warmkv/kvstore/py.typed", "warmkv/daemon/py.typed", "warmkv/schema/py.typed"} <= names


@pytest.mark.wheel
def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive, info = zipfile.ZipFile(wheel), f"warmkv-{VERSION}.dist-info"
    assert wheel.name == f"warmkv-{VERSION}-py3-none-any.whl"
    metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == ("warmkv", VERSION, "Apache-2.0")
    assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    scripts = configparser.ConfigParser()
    scripts.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert dict(scripts["console_scripts"]) == PROJECT["project"]["scripts"]


@pytest.mark.wheel
def test_the_console_script_runs(installed: Path, tmp_path: Path) -> None:
    assert VERSION in run(installed / "warmkv", "--version", cwd=tmp_path)
    assert "serve" in run(installed / "warmkv", "--help", cwd=tmp_path)


@pytest.mark.wheel
def test_the_installed_package_is_light_and_whole(installed: Path, tmp_path: Path) -> None:
    # The contract suites are for those who test, and need pytest.
    names = [name for name in SETUPTOOLS["packages"] if name != "warmkv" and not name.endswith(".testing")]
    program = f"""
import importlib, json, pathlib, sys
import warmkv
light = sorted(sys.modules)
where = pathlib.Path(warmkv.__file__).resolve()
for name in {names!r}:
    importlib.import_module(name)
from importlib.resources import files
print(json.dumps({{
    "light": light,
    "inside": where.is_relative_to(pathlib.Path(sys.prefix).resolve()),
    "source": files("warmkv.schema").joinpath("fbs", "wire.fbs").read_text(),
    "torch": "torch" in sys.modules,
    "names": [name for name in warmkv.__all__ if getattr(warmkv, name) is None],
}}))
"""
    told = json.loads(run(installed / "python", "-c", program, cwd=tmp_path))
    assert set(told["light"]) & {"lmdb", "torch", "rich", "numpy", "transformers", "click"} == set()
    assert told["inside"] and not told["torch"] and told["names"] == []
    assert told["source"] == (ROOT / "schema" / "fbs" / "wire.fbs").read_text()


@pytest.mark.wheel
def test_no_foreign_module_is_importable_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    names = ("daemon", "kvstore", "schema", "kernels", "systemd")
    program = f"import importlib.util as u; print([name for name in {names} if u.find_spec(name)])"
    assert run(installed / "python", "-c", program, cwd=tmp_path).strip() == "[]"


@pytest.mark.wheel
def test_the_installed_store_works(installed: Path, tmp_path: Path) -> None:
    """A round trip of bytes through the installed schema, with the runtime pip has chosen."""
    program = """
import numpy as np
from warmkv.schema import messages as m
_, back = m.decode(m.encode(m.Match(bytes(16), bytes(16), np.arange(9, dtype="<u4")), 1))
assert back.tokens.tolist() == list(range(9))
print("ok")
"""
    assert run(installed / "python", "-c", program, cwd=tmp_path).strip() == "ok"
