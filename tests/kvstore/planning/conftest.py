"""What the tests of planning share: the template families and conversations in their shapes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAMILIES = Path(__file__).resolve().parents[2] / "templates" / "families.py"


@pytest.fixture(scope="session")
def families() -> Any:
    """The module tests/templates/families.py; skips where its libraries are not installed."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    name = "warmkv_template_families"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, FAMILIES)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def decode(families: Any) -> Callable[[Any], str]:
    """Ids to text, special tokens included."""
    return lambda ids: families.tokenizer().decode([int(item) for item in ids], skip_special_tokens=False)
