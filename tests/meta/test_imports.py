"""Imports run down only: daemon, kvstore, then schema and kernels (docs/architecture.md).

Read from the syntax trees of all modules, so that an import inside a function or under
TYPE_CHECKING counts as much as one at the top; what a process really loads is then looked at in
fresh interpreters.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import warmkv

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("daemon", "kvstore", "schema", "kernels", "systemd")
#: Package to the packages of ours it may import.
ALLOWED = {
    "daemon": {"daemon", "kvstore", "schema", "kernels"},
    "kvstore": {"kvstore", "schema", "kernels"},
    "schema": {"schema"},
    "kernels": {"kernels"},
    "systemd": {"systemd"},
}
#: Third-party modules that are dear or optional, and the only packages that may name them.
ONLY_IN = {
    "torch": ("warmkv.kvstore.integrations",),
    "transformers": ("warmkv.kvstore.integrations",),
    "peft": ("warmkv.kvstore.integrations",),
    "numba": ("warmkv.kernels",),
    "cupy": ("warmkv.kernels", "warmkv.kvstore.live.devices"),
}


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Import:
    """``target`` as a full dotted name; ``typing`` under ``if TYPE_CHECKING``."""

    target: str
    line: int
    typing: bool


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file of every module below the packages, the facade apart."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] == ("kvstore", "_top"):
                continue
            name = ".".join(("warmkv", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def facade() -> dict[str, str]:
    """Name to home of what ``from warmkv import`` hands out lazily."""
    return dict(warmkv._HOME)


def is_typing(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "t.TYPE_CHECKING")


def walk(node: ast.AST, typing: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below, and whether only a type checker sees them."""
    for child in ast.iter_child_nodes(node):
        yield child, typing
        if isinstance(child, ast.If) and is_typing(child.test):
            for inner in child.body:
                yield inner, True
                yield from walk(inner, True)
            for inner in child.orelse:
                yield inner, typing
                yield from walk(inner, typing)
        else:
            yield from walk(child, typing)


def called_import(node: ast.AST) -> str | None:
    """Target of import_module("...") or __import__("...") with a literal name."""
    if not (isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    value = node.args[0].value
    return value if name in ("import_module", "__import__") and isinstance(value, str) else None


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import of a module, relative ones resolved, lazy names of the facade at their home."""
    found = []
    for node, typing in walk(ast.parse(source)):
        targets: list[str] = []
        called = called_import(node)
        if called:
            targets = [called]
        elif isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]
            if base == "warmkv":
                targets = [facade().get(alias.name, target) for alias, target in zip(node.names, targets, strict=True)]
        found += [Import(target, getattr(node, "lineno", 0), typing) for target in targets]
    return found


@cache
def imports(name: str) -> list[Import]:
    path = modules()[name]
    return imports_of(path.read_text(), name, path.name == "__init__.py")


def inside(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


def violations(source_package: str, *targets: str) -> list[str]:
    """Where modules of one package import what they must not."""
    return [
        f"{name}:{item.line} imports {item.target}"
        for name in modules()
        if inside(name, source_package)
        for item in imports(name)
        if any(inside(item.target, target) for target in targets)
    ]


def reached_from(package: str) -> set[str]:
    """Our modules that a process may come to load through a package, lazily or not."""
    waiting = [name for name in modules() if inside(name, package)]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        targets = {item.target for item in imports(name) if not item.typing}
        for target in targets:
            steps = target.split(".")
            waiting += [step for at in range(1, len(steps) + 1) if (step := ".".join(steps[:at])) in modules()]
    return seen


# -- the reader itself ------------------------------------------------------------------------


def test_the_reader_sees_every_way_to_import() -> None:
    source = """
import a.b, c
from warmkv.kvstore import store
from warmkv import Client, __version__
from . import sibling
from ..kvstore.store import options
if TYPE_CHECKING:
    import d
else:
    import e
def late():
    if True:
        import f
    importlib.import_module("g")
    __import__("h")
class C:
    from i import j
try:
    import k
except ImportError:
    pass
"""
    found = {(item.target, item.typing) for item in imports_of(source, "warmkv.daemon.module", False)}
    plain = {"a.b", "c", "warmkv.kvstore.store", "warmkv.kvstore.client", "warmkv", "warmkv.daemon"}
    plain |= {"warmkv.kvstore.store.options", "e", "f", "g", "h", "i", "k"}
    assert found == {(name, False) for name in plain} | {("d", True)}


def test_the_reader_finds_the_modules() -> None:
    names = set(modules())
    assert {"warmkv.schema.segment", "warmkv.kvstore.store", "warmkv.kvstore.store.engine", "warmkv.daemon.server"} <= names
    assert "warmkv.schema.errors" in {item.target for item in imports("warmkv.schema.canonical")}


# -- directions -------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_down_only(package: str) -> None:
    forbidden = [f"warmkv.{other}" for other in PACKAGES if other not in ALLOWED[package]]
    assert violations(f"warmkv.{package}", *forbidden) == []


@pytest.mark.parametrize("package", ["schema", "kernels", "systemd"])
def test_the_lowest_packages_do_not_know_the_facade(package: str) -> None:
    names = [name for name in modules() if inside(name, f"warmkv.{package}")]
    assert [name for name in names for item in imports(name) if item.target == "warmkv"] == []


@pytest.mark.parametrize("inference", ["client", "live"])
def test_what_an_inference_process_embeds_and_the_store_do_not_know_each_other(inference: str) -> None:
    assert violations(f"warmkv.kvstore.{inference}", "warmkv.kvstore.store") == []
    assert violations("warmkv.kvstore.store", f"warmkv.kvstore.{inference}") == []


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("warmkv.kvstore.client", "warmkv.kvstore.store"),
        ("warmkv.kvstore.live", "warmkv.kvstore.store"),
        ("warmkv.kvstore.store", "warmkv.kvstore.client"),
        ("warmkv.kvstore.live", "warmkv.kvstore.bridge"),
        ("warmkv.kvstore.bridge", "warmkv.kvstore.store"),
        ("warmkv.kvstore.bridge", "warmkv.kvstore.client"),
        ("warmkv.kvstore.store", "warmkv.kvstore.bridge"),
        ("warmkv.kvstore.store", "warmkv.kvstore.live"),
        ("warmkv.kvstore.store", "warmkv.kvstore.integrations"),
        ("warmkv.daemon", "warmkv.kvstore.integrations"),
    ],
)
def test_not_even_by_a_detour(package: str, never: str) -> None:
    assert sorted(name for name in reached_from(package) if inside(name, never)) == []


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_dear_libraries_are_named_where_they_belong_only(library: str) -> None:
    at_home = tuple(f"{home}." for home in ONLY_IN[library])
    assert [place for place in violations("warmkv", library) if not place.startswith(at_home)] == []


def test_modules_do_not_import_in_circles() -> None:
    """Imports at the top of a module; between modules of the store, types may look back."""
    graph: dict[str, set[str]] = {}
    for name, path in modules().items():
        tree = ast.parse(path.read_text())
        late = {id(node) for part in ast.walk(tree) if isinstance(part, FUNCTIONS) for node in ast.walk(part)}
        lines = {getattr(node, "lineno", 0) for node in ast.walk(tree) if id(node) not in late}
        store = inside(name, "warmkv.kvstore.store")
        targets = {item.target for item in imports(name) if item.line in lines and not (store and item.typing)}
        # A package's own __init__ gathers its modules; a module does not thereby depend on it.
        graph[name] = {target for target in targets if target in modules() and target != name and not inside(name, target)}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name in graph:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            del graph[name]

    for name in list(graph):
        visit(name, ())


# -- what a process really loads --------------------------------------------------------------


def loaded_by(directory: Path, *statements: str) -> set[str]:
    """Top-level and warmkv modules loaded after statements, in an interpreter of its own."""
    program = "\n".join([*statements, "import json, sys", "print(json.dumps(sorted(sys.modules)))"])
    where = str(Path(warmkv.__file__).absolute().parent.parent)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WARMKV_", "COV_", "COVERAGE_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env={**environ, "PYTHONPATH": where},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_warmkv_is_light(tmp_path: Path) -> None:
    loaded = loaded_by(tmp_path, "import warmkv", "assert warmkv.__version__")
    assert loaded & {"lmdb", "torch", "rich", "numpy", "transformers", "click", "xxhash", "flatbuffers", "watchdog"} == set()
    assert {name for name in loaded if inside(name, "warmkv")} == {"warmkv"}


def test_the_client_pays_for_what_it_uses_only(tmp_path: Path) -> None:
    names = [name for name in modules() if inside(name, "warmkv.kvstore.client")]
    loaded = loaded_by(tmp_path, *(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert loaded & {"lmdb", "torch", "rich", "click", "watchdog", "transformers", "numba", "cupy"} == set()
    assert {name for name in loaded if inside(name, "warmkv.kvstore.store") or inside(name, "warmkv.daemon")} == set()


def test_the_store_needs_no_inference_library(tmp_path: Path) -> None:
    loaded = loaded_by(tmp_path, "import warmkv.kvstore.store")
    assert loaded & {"torch", "rich", "click", "watchdog", "transformers", "numba", "cupy"} == set()


def test_the_daemon_needs_no_inference_library(tmp_path: Path) -> None:
    names = [name for name in modules() if inside(name, "warmkv.daemon") and not name.endswith("__main__")]
    loaded = loaded_by(tmp_path, *(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert loaded & {"torch", "numba", "cupy", "transformers"} == set()


def test_every_lazy_name_has_its_home() -> None:
    tree = ast.parse((ROOT / "kvstore" / "_top" / "__init__.py").read_text())
    told = {
        alias.name: node.module
        for node, typing in walk(tree)
        if typing and isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == facade()
    for name in warmkv.__all__:
        assert getattr(warmkv, name) is not None
    assert set(dir(warmkv)) == set(warmkv.__all__)
    with pytest.raises(AttributeError):
        warmkv.no_such_name  # noqa: B018


# -- sizes ------------------------------------------------------------------------------------


def test_module_sizes_are_reported(record_property: Callable[[str, object], None]) -> None:
    """Shown by `pytest -rP`. A module over 300 lines owes a reason; no number here fails."""
    sizes = {name: len(path.read_text().splitlines()) for name, path in modules().items() if "generated" not in name}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    print(f"{len(sizes)} modules, {sum(sizes.values())} lines; median {ordered[len(ordered) // 2][1]}, largest:")
    for name, size in ordered[:12]:
        print(f"{size:6d} {name}")
    record_property("modules", len(sizes))
    record_property("lines", sum(sizes.values()))
