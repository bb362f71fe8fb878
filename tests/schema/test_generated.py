"""The committed FlatBuffers code: made from these sources, fit for the installed runtime."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import flatbuffers
import numpy as np
import pytest

import warmkv.schema
from warmkv.schema.generated import container_generated, wire_generated

SCHEMA = Path(warmkv.schema.__file__).resolve().parent
SOURCES = sorted((SCHEMA / "fbs").glob("*.fbs"))
MODULES = (container_generated, wire_generated)


def regenerate() -> ModuleType:
    """The script by its path, as a person runs it: outside the package."""
    spec = importlib.util.spec_from_file_location("regenerate_script", SCHEMA / "regenerate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded() -> tuple[str, str]:
    """Compiler version and source digest of the committed output."""
    text = (SCHEMA / "generated" / "VERSION").read_text()
    match = re.fullmatch(r"flatc version (\S+)\nsources sha256 ([0-9a-f]{64})\n", text)
    assert match is not None, text
    return match[1], match[2]


def test_the_output_was_made_from_these_sources() -> None:
    assert recorded()[1] == regenerate().source_digest(), "run `make schema` and commit its output"


def test_every_source_has_its_module_and_no_module_lacks_a_source() -> None:
    assert [source.stem for source in SOURCES] == ["container", "kvcache", "wire"]
    made = sorted(path.name for path in (SCHEMA / "generated").glob("*_generated.py"))
    assert made == [f"{source.stem}_generated.py" for source in SOURCES]


def test_the_compiler_makes_the_same_again(tmp_path: Path) -> None:
    flatc = shutil.which("flatc")
    if flatc is None:
        pytest.skip("flatc is not installed")
    version = subprocess.run([flatc, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if version != f"flatc version {recorded()[0]}":
        pytest.skip(f"{version} is installed, the output was made by {recorded()[0]}")
    for source in SOURCES:
        subprocess.run([flatc, "--python", "--gen-onefile", "-o", str(tmp_path), str(source)], check=True)
        name = f"{source.stem}_generated.py"
        assert (tmp_path / name).read_text() == (SCHEMA / "generated" / name).read_text()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rsplit(".", 1)[-1])
def test_every_call_into_the_runtime_exists(module: ModuleType) -> None:
    """Compiler and runtime of different ages disagree at the first write, unless looked at before."""
    text = Path(module.__file__ or "").read_text()
    called = set(re.findall(r"builder\.(\w+)\(", text))
    assert called
    assert [name for name in called if not hasattr(flatbuffers.Builder, name)] == []
    used = set(re.findall(r"self\._tab\.(\w+)\(", text))
    assert used
    assert [name for name in used if not hasattr(flatbuffers.table.Table, name)] == []
    flags = set(re.findall(r"flatbuffers\.number_types\.(\w+)", text))
    assert [name for name in flags if not hasattr(flatbuffers.number_types, name)] == []


def test_the_runtime_reads_what_it_wrote() -> None:
    builder = flatbuffers.Builder(64)
    tokens = builder.CreateNumpyVector(np.arange(3, dtype="<u4"))
    container_generated.SegmentHeaderStart(builder)
    container_generated.SegmentHeaderAddTokens(builder, tokens)
    container_generated.SegmentHeaderAddEnd(builder, 2**64 - 1)
    builder.Finish(container_generated.SegmentHeaderEnd(builder))
    table = container_generated.SegmentHeader.GetRootAs(bytes(builder.Output()), 0)
    assert table.TokensAsNumpy().tolist() == [0, 1, 2]
    assert table.End() == 2**64 - 1
    assert table.PlanesAsNumpy() == 0, "an absent vector is the integer 0; schema/flat.py makes it an empty array"


def test_no_object_interface_was_generated() -> None:
    """Its writers go byte by byte."""
    for module in MODULES:
        assert [name for name in vars(module) if name.endswith("T") and isinstance(vars(module)[name], type)] == []


def test_the_script_needs_nothing_but_python() -> None:
    program = f"import runpy, sys; runpy.run_path({str(SCHEMA / 'regenerate.py')!r}, run_name='other')"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
