"""The main job, on a real model: a prompt's state outlives process, crash and page cache.

Process A asks without and with warmkv and exits. The daemon is killed (SIGKILL), its data file
dropped from the page cache, the daemon started again. Process B continues the conversation
from disk, process C from memory. Ends with a table, one sentence, a JSON report and a plot;
non-zero when a restored answer differs from its live twin's or a restore was no hit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plot import bar_chart
from rich.console import Console
from rich.table import Table

from warmkv.daemon.testing import DaemonProcess

HERE = Path(__file__).resolve().parent
AGENT = HERE / "agent.py"
#: Narrower than this the table would be cut.
TABLE_COLUMNS = 128
Rows = list[dict[str, Any]]


def resident_share(path: Path) -> float:
    """Share of a file's pages that lie in the page cache (mincore)."""
    size = path.stat().st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        vector = (ctypes.c_ubyte * pages)()
        anchor = ctypes.c_char.from_buffer(mapped)
        address = ctypes.addressof(anchor)
        del anchor
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(item & 1 for item in vector) / pages


def drop_from_page_cache(path: Path) -> float:
    """Ask the kernel to forget a file's pages; the share that stayed."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return resident_share(path)


def run_agent(role: str, process: str, model: Path, socket: Path, work: Path, answers: list[str]) -> dict[str, Any]:
    out, said = work / f"{process}.json", work / "answers.json"
    said.write_text(json.dumps(answers))
    command = [
        sys.executable, str(AGENT), role, "--process", process, "--model", str(model), "--socket", str(socket),
        "--out", str(out), "--answers", str(said),
    ]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def compare(first: Rows, later: Rows) -> Rows:
    """One row per answer that came through warmkv, beside its live twin of process A."""
    twins = {row["turn"]: row for row in first if row["mode"].startswith("plain")}
    cold_first = next(row for row in first if row["mode"] == "plain cold")
    table: Rows = []
    for row in [*first, *later]:
        if row["mode"] != "warmkv":
            continue
        twin = twins[row["turn"]]
        cold_s = row["first_token_cold_s"] or (cold_first["first_token_s"] if row["turn"] == 1 else 0.0)
        table.append(
            {
                **row,
                "first_token_cold_s": cold_s,
                "speedup": cold_s / row["first_token_s"] if cold_s and row["tier"] in ("warm", "cold") else 0.0,
                "same_answer": row["ids_digest"] == twin["ids_digest"],
                "same_logits": row["logits_digest"] == twin["logits_digest"],
            }
        )
    return table


def problems(table: Rows, control: dict[str, Any]) -> list[str]:
    """What went wrong, in words; empty when the demo shows what it promises."""
    found = []
    for row in table:
        name = f"process {row['process']}, turn {row['turn']}"
        if not row["same_answer"] or not row["same_logits"]:
            found.append(f"{name}: the answer or its logits differ from the live twin's")
        if not row["durable"]:
            found.append(f"{name}: the state was not acknowledged as on disk ({row['extra'].get('reason')})")
        expected = {"B": "cold", "C": "warm"}.get(row["process"])
        if expected and (row["tier"] != expected or row["usable"] < 3500):
            found.append(f"{name}: restored {row['usable']} tokens from {row['tier']}, expected at least 3500 from {expected}")
    if control["usable_changed"] or not control["usable_before"] or control["usable_before"] != control["usable_after"]:
        found.append(f"control: a changed model must miss, an unchanged one hit: {control}")
    return found


def show(console: Console, table: Rows) -> None:
    view = Table(title="Answers through warmkv; anew: first token when all of the prompt is computed")
    for name in ("process", "turn", "prompt", "suffix", "matched", "usable", "from"):
        view.add_column(name, justify="left" if name in ("process", "from") else "right")
    for name in ("restore ms", "anew s", "first token s", "speed-up", "same as twin"):
        view.add_column(name, justify="right")
    for row in table:
        restored = row["tier"] in ("warm", "cold")
        view.add_row(
            row["process"], str(row["turn"]), str(row["prompt_tokens"]), str(row["suffix_tokens"]), str(row["matched"]),
            str(row["usable"]), row["tier"], f"{row['restore_ms']:.1f}" if restored else "-",
            f"{row['first_token_cold_s']:.2f}" if row["first_token_cold_s"] else "-", f"{row['first_token_s']:.3f}",
            f"{row['speedup']:.1f} x" if row["speedup"] else "-",
            "bit for bit" if row["same_answer"] and row["same_logits"] else "NO",
        )  # fmt: skip
    console.print(view)


def sentence(table: Rows) -> str:
    by_process = {row["process"]: row for row in table}
    cold, warm = by_process["B"], by_process["C"]
    return (
        f"A new process that continues a {warm['usable']}-token prefix (suffix {warm['suffix_tokens']}) had its first token "
        f"after {warm['first_token_s']:.2f} s from memory instead of {warm['first_token_cold_s']:.2f} s "
        f"({warm['speedup']:.0f} x), and after a crash of the daemon from disk after {cold['first_token_s']:.2f} s "
        f"(suffix {cold['suffix_tokens']}) instead of {cold['first_token_cold_s']:.2f} s ({cold['speedup']:.0f} x)."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder made by fetch_model.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    given = parser.parse_args()
    console = Console(highlight=False)
    console.width = max(console.width, TABLE_COLUMNS)
    began = time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=given.out))
    runtime = Path(tempfile.mkdtemp(prefix="warmkv-demo-"))
    daemon = DaemonProcess(runtime, "--log-level", "warning", store=work / "store")
    try:
        console.rule("Process A")
        daemon.start()
        first = run_agent("first", "A", given.model, daemon.socket, work, [])
        console.rule("The daemon is killed, its file dropped from memory, and started again")
        daemon.kill()
        resident = drop_from_page_cache(daemon.store / "data.mdb")
        console.print(
            f"  {(daemon.store / 'data.mdb').stat().st_size / 1e6:.0f} MB on disk, {resident:.2%} of it in the page cache"
        )
        daemon.start()
        console.rule("Process B, from disk")
        second = run_agent("resume", "B", given.model, daemon.socket, work, first["answers"])
        console.rule("Process C, from memory")
        third = run_agent("resume", "C", given.model, daemon.socket, work, second["answers"])
        daemon.stop()
    finally:
        daemon.kill()
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)
    table = compare(first["rows"], [*second["rows"], *third["rows"]])
    wrong = problems(table, first["control"])
    console.rule("Result")
    show(console, table)
    same_cold = {row["process"]: row["extra"]["same_ids_as_cold"] for row in table if "same_ids_as_cold" in row["extra"]}
    console.print(f"Same ids as one full cold prefill (other batch shapes, reported apart): {same_cold}")
    console.print(
        f"Control, one weight changed: usable {first['control']['usable_changed']} ({first['control']['reason_changed']})"
    )
    console.print(sentence(table))
    report = {
        "table": table, "rows": first["rows"] + second["rows"] + third["rows"], "control": first["control"],
        "page_cache_share_after_drop": resident, "sentence": sentence(table), "problems": wrong,
        "elapsed_s": round(time.monotonic() - began, 1),
    }  # fmt: skip
    (given.out / "demo.json").write_text(json.dumps(report, indent=1))
    (given.out / "demo.svg").write_text(plot(table))
    console.print(f"Took {report['elapsed_s']} s. Report: {given.out}/demo.json and {given.out}/demo.svg")
    for line in wrong:
        console.print(f"FAILED: {line}")
    return 1 if wrong else 0


def plot(table: Rows) -> str:
    bars = []
    for row in table:
        if row["speedup"]:
            where = {"cold": "restored from disk", "warm": "restored from memory"}[row["tier"]]
            bars.append((f"process {row['process']}, computed anew", "cold", row["first_token_cold_s"]))
            bars.append((f"process {row['process']}, {where}", "restored", row["first_token_s"]))
    tokens = table[-1]["prompt_tokens"]
    return bar_chart(
        "Time to first token", f"SmolLM2-135M on CPU, prompt of about {tokens} tokens; every answer bit for bit equal", bars
    )


if __name__ == "__main__":
    sys.exit(main())
