"""The soak in small: clients of every kind beside background services, everything they get compared.

No figure of time is asserted: only counts, budgets, and that nothing is wrong or left behind.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warmkv
from warmkv.daemon.testing import child_environ

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
SECONDS, CLIENTS, PATIENCE_S = 20, 8, 600


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a soak of a few seconds tells, its daemon killed and started again in the middle."""
    where = tmp_path_factory.mktemp("soak")
    command = [sys.executable, str(SOAK), "--minutes", str(SECONDS / 60), "--clients", str(CLIENTS), "--kills", "1"]
    command += ["--json", str(where / "told.json")]
    done = subprocess.run(command, cwd=where, env=child_environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert (where / "told.json").exists(), done.stderr
    told: dict[str, Any] = json.loads((where / "told.json").read_text())
    told["exit status"], told["output"] = done.returncode, done.stdout
    return told


def test_every_answer_is_right_and_every_error_planned(result: dict[str, Any]) -> None:
    for kind, counts in result["counts"].items():
        assert counts["wrong"] == counts["unexpected"] == 0, (kind, result["reasons"])


def test_every_kind_of_client_did_what_it_is_for(result: dict[str, Any]) -> None:
    counts = result["counts"]
    assert set(counts) == {"agents", "savers", "readers", "breakers"}
    assert all(of["hits"] and of["saves"] and of["verified bytes"] for of in counts.values())
    assert counts["savers"]["durable"] and counts["readers"]["held again"]
    assert counts["breakers"]["killed"] and counts["breakers"]["half frames"]
    assert result["started"] > CLIENTS


def test_no_budget_is_exceeded_at_any_sample(result: dict[str, Any]) -> None:
    assert result["samples"] and result["exceeded"] == []
    assert max(sample["used"] for sample in result["samples"]) > 0


def test_nothing_is_left_when_all_clients_are_gone(result: dict[str, Any]) -> None:
    assert result["left"] == {} and result["problems"] == [] and result["status"] == 0


def test_the_soak_passes_and_leaves_no_files(result: dict[str, Any]) -> None:
    assert result["exit status"] == 0, result["output"]
    assert result["failures"] == []


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SOAK.parent))
    return importlib.import_module("soak_sampler")


@pytest.fixture
def clients(soak: Any) -> Any:
    return importlib.import_module("soak_clients")


def samples(soak: Any, **leak: float) -> list[dict[str, float]]:
    """A minute of numbers that swing around a level, and rise by what is leaked a second."""
    return [
        {
            "t": float(at),
            **{name: 1000.0 + at % 7 + at * leak.get(name, 0.0) for name in ("entries", *(f.name for f in soak.FLAT))},
        }
        for at in range(60)
    ]


def test_numbers_that_swing_around_a_level_are_flat(soak: Any) -> None:
    found = soak.rises(samples(soak))
    assert [name for name, _, _ in found] == [flat.name for flat in soak.FLAT]
    assert all(rise <= most for _, rise, most in found)


@pytest.mark.parametrize(("name", "a_second"), [("descriptors", 20.0), ("threads", 10.0), ("rss", 1 << 20)])
def test_a_leak_a_step_is_no_flat_number(soak: Any, name: str, a_second: float) -> None:
    rising = [found for found, rise, most in soak.rises(samples(soak, **{name: a_second})) if rise > most]
    assert rising == [name]


def test_what_is_above_its_budget_is_named(soak: Any) -> None:
    names = (
        "used",
        "peak",
        "held",
        "lent",
        "descriptors",
        "cold",
        "file",
        "map",
        "warm entries",
        "warm entries budget",
        "connections",
    )
    sample = dict.fromkeys(names, 0.0)
    assert soak.exceeded(sample) == []
    over = soak.exceeded({**sample, "used": soak.WARM_BYTES + 1.0, "connections": soak.CONNECTIONS + 5.0})
    assert [name for name, _, _ in over] == ["warm bytes in use", "connections"]


def test_contents_of_other_tokens_are_wrong(clients: Any) -> None:
    ids = clients.shared_tokens(1, 40)
    other = np.concatenate([clients.shared_tokens(2, 1), ids[1:]])
    for model in (clients.PLAIN, clients.MIXED, clients.BIG):
        with warmkv.open_store(None, warm_bytes=16 << 20) as store:
            store.save(model, ids, clients.records_of(model, ids))
            asked = np.append(ids, np.uint32(1))
            with store.restore(model, asked) as found:
                assert found.usable == len(ids) and clients.compare(found, asked) > 0
                with pytest.raises(clients.Wrong):
                    clients.compare(found, other)
