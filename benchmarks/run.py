"""Run benchmarks by name, by default all but those that need a file: `python benchmarks/run.py [NAME[=FILE] ...]`.

`eviction=TRACE` replays a trace, see its module.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = [
    "first", "endurance", "index", "dedup", "serving", "memory", "attention", "turboquant", "shared_prefix", "cuda_rows",
    "restore_device",
]  # fmt: skip


def main() -> int:
    wanted = sys.argv[1:] or NAMES
    unknown = [name for name in wanted if name not in NAMES and not name.startswith("eviction=")]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; there are: {', '.join(NAMES)}, eviction=TRACE", file=sys.stderr)
        return 2
    commands = [[sys.executable, str(HERE / f"{name}.py"), *given] for name, *given in (name.split("=", 1) for name in wanted)]
    return max(subprocess.run(command).returncode for command in commands)


if __name__ == "__main__":
    sys.exit(main())
