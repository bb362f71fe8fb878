"""What the tests about the repository itself share: where it is, and which files belong to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "wheel: builds the wheel and installs it into a fresh environment")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def repository_files() -> list[Path]:
    """Files of the repository, relative to its root: tracked, and new ones that are not ignored."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = sorted({name for name in done.stdout.decode().split("\0") if name})
    return [Path(name) for name in names if (ROOT / name).is_symlink() or (ROOT / name).is_file()]
