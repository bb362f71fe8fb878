"""The examples of a guide run, one after the other, as somebody who reads it would have them run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", ["resident.md"])
def test_examples_of_a_guide_run_and_hold_what_they_assert(name: str) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 3
    names: dict[str, object] = {"__name__": name}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{name}, example {number + 1}", "exec"), names)
