"""Run benchmarks by name, all of them by default: `python benchmarks/run.py [NAME ...]`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ["first", "endurance", "index", "dedup"]


def main() -> int:
    wanted = sys.argv[1:] or NAMES
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    return max(subprocess.run([sys.executable, str(HERE / f"{name}.py")]).returncode for name in wanted)


if __name__ == "__main__":
    sys.exit(main())
