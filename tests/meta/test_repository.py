"""The repository as others find it: nothing of the machine it was written on, a licence, words."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from pathlib import Path

import pytest

GENERATED = Path("schema/generated")
PACKAGES = ("daemon", "kvstore", "schema", "kernels", "systemd")
#: SHA-256 of the licence text as the Apache Software Foundation publishes it.
APACHE_2_0 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
#: First parts of paths that exist on build machines only; put together here, so that this file
#: does not contain them.
HOSTS = [f"/{name}/" for name in ("wo" + "rk", "fa" + "rm", "ro" + "ot")]


def test_no_file_names_a_path_of_a_build_machine(root: Path, repository_files: list[Path]) -> None:
    # A path begins where no other path goes on: "docs/<name>/x" is no absolute path.
    pattern = re.compile(rb"(?<![\w.~$})-])(?:" + b"|".join(re.escape(host.encode()) for host in HOSTS) + rb")")
    assert pattern.search(b'open("' + HOSTS[0].encode() + b'x")')
    found = []
    for name in repository_files:
        path = root / name
        data = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes()
        found += [f"{name}: {match.group().decode()}" for match in pattern.finditer(data)]
    assert found == []


def test_links_stay_inside(root: Path, repository_files: list[Path]) -> None:
    links = [name for name in repository_files if (root / name).is_symlink()]
    assert links
    for name in links:
        assert not (root / name).readlink().is_absolute()
        assert (root / name).resolve().is_relative_to(root)
        assert (root / name).exists()


def test_no_build_product_is_checked_in(repository_files: list[Path]) -> None:
    unwanted = {"__pycache__", ".venv", "build", "dist", ".demo", ".hypothesis", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    assert [name for name in repository_files if unwanted & set(name.parts) or name.suffix in (".pyc", ".so", ".whl")] == []


def test_the_licence_is_apache_2_0(root: Path) -> None:
    assert hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest() == APACHE_2_0
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["license-files"] == ["LICENSE"]


def test_helpers_of_tests_are_found_by_names_of_their_own(root: Path, repository_files: list[Path]) -> None:
    """Their folders lie on one path: of two modules of one name a test would get whichever was imported first."""
    helpers: dict[str, list[str]] = {}
    for name in repository_files:
        if name.parts[0] == "tests" and name.suffix == ".py" and "_ns" not in name.parts and not name.name.startswith("test_"):
            # A package goes by its folder's name, what lies in it by that.
            package = (root / name).parent / "__init__.py"
            if name.name == "conftest.py" or (package.exists() and name.name != "__init__.py"):
                continue
            helpers.setdefault(name.parent.name if name.name == "__init__.py" else name.stem, []).append(str(name))
        if name.parts[0] == "tests" and name.suffix == ".py":
            imported = re.findall(r"^\s*(?:from|import) conftest\b", (root / name).read_text(), re.MULTILINE)
            assert imported == [], f"{name} imports a conftest, of which there are many"
    assert {stem: files for stem, files in helpers.items() if len(files) > 1} == {}


def says_something(path: Path) -> bool:
    return bool((ast.get_docstring(ast.parse(path.read_text())) or "").strip())


def test_every_public_module_says_why_it_exists(root: Path, repository_files: list[Path]) -> None:
    ours = [name for name in repository_files if name.suffix == ".py" and name.parts[0] in PACKAGES]
    assert len(ours) > 20
    assert [name for name in ours if name.parent != GENERATED and not says_something(root / name)] == []


def test_every_package_is_typed(root: Path) -> None:
    for package in ("daemon", "kvstore", "kvstore/_top", "schema", "kernels"):
        assert (root / package / "py.typed").is_file(), package


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml"])
def test_the_usual_files_are_there(root: Path, name: str) -> None:
    assert (root / name).stat().st_size > 0
