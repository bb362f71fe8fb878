"""`make fuzz`: every target under atheris, one after the other, each in a process of its own.

    python tests/fuzz/run_fuzz.py [TARGET ...]

WARMKV_FUZZ_RUNS is the number of inputs for each target (1,000,000), WARMKV_FUZZ_DIR the folder of
corpora, logs and failing inputs (.fuzz), WARMKV_FUZZ_TREE another checkout to fuzz. A failing input
belongs into tests/fuzz/regressions/TARGET/ once its defect is mended.
"""

from __future__ import annotations

import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TREE = Path(os.environ.get("WARMKV_FUZZ_TREE", ROOT))
sys.path[:0] = [str(HERE), str(TREE / "tests" / "_ns")]

DEFAULT_RUNS = 1_000_000
#: One input may take so long on a busy machine; only a hang takes longer.
HANG_S = 60
RSS_LIMIT_MB = 2048
#: Measuring memory takes three times as long as running; the address space is bounded for all inputs.
MEASURE_EVERY = 8
ADDRESS_SPACE_BYTES = 1 << 30
PROGRESS_S = 30.0
_DONE = re.compile(rb"Done (\d+) runs? in (\d+) second")


class Fuzzing:
    """One target in this process: mutation, measurement, progress."""

    def __init__(self, name: str, runs: int, folder: Path) -> None:
        import atheris

        with atheris.instrument_imports(include=["warmkv", "tomllib", "json"]):
            import fuzz_mutation
            import fuzz_targets

        self._atheris, self._mutation, self._attempt = atheris, fuzz_mutation, fuzz_targets.attempt
        self._target = fuzz_targets.TARGETS[name]
        self._samples = self._target.samples()
        self._count, self._said = 0, time.monotonic()
        corpus = folder / "corpus"
        corpus.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(self._samples):
            (corpus / f"sample-{number}").write_bytes(data)
        fuzz_targets.prepare(self._target)
        limits = [f"-max_len={fuzz_mutation.MAX_BYTES}", f"-timeout={HANG_S}", f"-rss_limit_mb={RSS_LIMIT_MB}"]
        arguments = [name, f"-runs={runs}", *limits, f"-artifact_prefix={folder}/", str(corpus)]
        atheris.Setup(arguments, self.one, custom_mutator=self.mutated)

    def run(self) -> None:
        """Ends the process."""
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + ADDRESS_SPACE_BYTES,) * 2)
        self._atheris.Fuzz()

    def one(self, data: bytes) -> None:
        self._count += 1
        self._attempt(self._target, data, measured=self._count % MEASURE_EVERY == 0)
        if time.monotonic() - self._said > PROGRESS_S:
            self._said = time.monotonic()
            print(f"  {self._target.name}: {self._count} inputs", flush=True)

    def mutated(self, data: bytes, max_bytes: int, seed: int) -> bytes:
        """A sample or an input that led somewhere new, changed by our edits or by the fuzzer's own,
        and mostly repaired so that it is read on."""
        rng = random.Random(seed)
        if rng.random() < 0.25:
            data = self._atheris.Mutate(data, max_bytes)
        else:
            data = rng.choice(self._samples) if rng.random() < 0.25 else data
            data = self._mutation.edited(data, self._mutation.random_edits(rng), self._samples)
        return (self._target.repair(data) if rng.random() < 0.9 else data)[:max_bytes]


def all_targets(names: list[str], runs: int, folder: Path) -> int:
    """Fuzz each in a child of its own; 1 if one failed or ended early."""
    failed = 0
    print(f"{'target':12} {'inputs':>10} {'seconds':>8}  outcome", flush=True)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        log, began = folder / name / "log", time.monotonic()
        with open(log, "wb") as errors:
            status = subprocess.run([sys.executable, __file__, "--one", name], stderr=errors, check=False).returncode
        found: list[Any] = _DONE.findall(log.read_bytes())
        done = int(found[-1][0]) if found else 0
        good = status == 0 and done >= runs
        outcome = "passed" if good else f"FAILED: see {log} and the inputs beside it"
        failed |= not good
        print(f"{name:12} {done:10} {time.monotonic() - began:8.0f}  {outcome}", flush=True)
    return int(failed)


def main(arguments: list[str]) -> int:
    runs = int(os.environ.get("WARMKV_FUZZ_RUNS", DEFAULT_RUNS))
    folder = Path(os.environ.get("WARMKV_FUZZ_DIR", ROOT / ".fuzz"))
    if arguments[:1] == ["--one"]:
        Fuzzing(arguments[1], runs, folder / arguments[1]).run()
        return 0
    if not arguments:
        from fuzz_targets import TARGETS

        arguments = list(TARGETS)
    return all_targets(arguments, runs, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
