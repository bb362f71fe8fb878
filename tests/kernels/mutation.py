"""Whether the tests notice planted faults: `python tests/kernels/mutation.py [WORD ...]`, not part of pytest.

The tree is copied to a temporary folder and first tested as it is. Then each fault of `mutants` whose
name has one of the words (all by default) is planted there alone, and its tests run: they must fail.
Exits 1 if a fault survives, or if one cannot be tried because its code is no longer what it was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("__pycache__", ".*", "build", "dist", "docs", "examples")
#: For the tests of one fault, and of all on a machine that is busy.
TEST_S, ALL_TESTS_S = 600, 3600
#: What pytest exits with when tests failed, and not for want of them or a file that does not load.
PASSED, FAILED, TOO_LONG = 0, 1, 124


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="try faults whose name has one of these")
    words = parser.parse_args(argv).words
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    if not chosen:
        parser.error(f"no fault is called like {' or '.join(words)}")
    with tempfile.TemporaryDirectory(prefix="warmkv-mutants-") as folder:
        tree, caches = Path(folder) / "tree", Path(folder) / "compiled"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        outcomes = {mutant.name: wanting(tree, mutant) for mutant in chosen}
        if not any(outcomes.values()):
            tests = sorted({test for mutant in chosen for test in mutant.tests})
            print(f"as it is: {len(tests)} files of tests", flush=True)
            if run(tree, tests, caches, ALL_TESTS_S, aloud=True) != PASSED:
                print("tests fail, or take too long, without a fault", file=sys.stderr)
                return 1
        return report([(mutant, *tried(tree, mutant, caches, outcomes[mutant.name])) for mutant in chosen])


def wanting(tree: Path, mutant: Mutant) -> str:
    """Why a fault cannot be planted; empty if it can."""
    path = tree / mutant.file
    if not path.is_file():
        return f"there is no {mutant.file}"
    found = path.read_text().count(mutant.right)
    if found != 1:
        return f"{found} places in {mutant.file} look like it, expected 1"
    missing = [test for test in mutant.tests if not (tree / "tests" / test).is_file()]
    return f"there is no tests/{missing[0]}" if missing else ""


def tried(tree: Path, mutant: Mutant, caches: Path, why: str) -> tuple[str, float]:
    """What became of a fault, and the seconds it took."""
    if why:
        return f"ERROR: {why}", 0.0
    path, began = tree / mutant.file, time.monotonic()
    text = path.read_text()
    path.write_text(text.replace(mutant.right, mutant.wrong))
    try:
        code = run(tree, mutant.tests, caches)
    finally:
        path.write_text(text)
    outcome = {FAILED: "caught", PASSED: "SURVIVED"}.get(code, f"ERROR: tests ended with {code}")
    print(f"{outcome:10} {mutant.name}", flush=True)
    return outcome, time.monotonic() - began


def run(tree: Path, tests: Sequence[str], caches: Path, most_s: float = TEST_S, *, aloud: bool = False) -> int:
    """Exit status of pytest up to the first failure, TOO_LONG after ``most_s``. Bytecode is not kept: its age is
    told to the second only. What numba compiled is kept, by what it is made of."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": str(caches), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=most_s)
    except subprocess.TimeoutExpired:
        return TOO_LONG
    if done.returncode not in (PASSED, FAILED) or (aloud and done.returncode):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def report(tries: Sequence[tuple[Mutant, str, float]]) -> int:
    width = max(len(mutant.name) for mutant, _, _ in tries)
    print(f"\n{'planted fault':{width}}  {'in':36}  outcome")
    for mutant, outcome, seconds in tries:
        print(f"{mutant.name:{width}}  {mutant.file:36}  {outcome} ({seconds:.0f} s)")
    caught = sum(outcome == "caught" for _, outcome, _ in tries)
    print(f"{caught} of {len(tries)} caught")
    return 0 if caught == len(tries) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
