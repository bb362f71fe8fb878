"""Admission: what measured speeds decide."""

from __future__ import annotations

import threading

import pytest

from warmkv.kvstore.admission import MEASURABLE_TOKENS, Admission
from warmkv.schema.errors import RecordError


@pytest.mark.parametrize(("tps", "trip_s", "least"), [(1000, 0.005, 5), (1000, 0.05, 50), (40_000, 0.005, 200), (100, 0.001, 1)])
def test_the_threshold_is_what_a_round_trip_could_compute(tps: float, trip_s: float, least: int) -> None:
    admission = Admission(prefill_tps=tps, round_trip_s=trip_s)
    assert admission.least_tokens == least
    assert admission.bypasses(least - 1) and not admission.bypasses(least)


def test_while_the_speed_is_unknown_everything_is_asked() -> None:
    admission = Admission()
    assert admission.prefill_tps == 0 and not admission.bypasses(1)


def test_the_first_measurement_counts_whole_and_later_ones_in_part() -> None:
    admission = Admission()
    admission.note_prefill(1000, 2.0)
    assert admission.prefill_tps == 500
    admission.note_prefill(1000, 1.0)
    assert 500 < admission.prefill_tps < 1000
    for _ in range(50):
        admission.note_prefill(1000, 1.0)
    assert admission.prefill_tps == pytest.approx(1000, rel=1e-4)


@pytest.mark.parametrize(("tokens", "seconds"), [(MEASURABLE_TOKENS - 1, 1.0), (1, 0.001), (1000, 0.0), (1000, -1.0)])
def test_what_says_nothing_about_the_speed_is_passed_over(tokens: int, seconds: float) -> None:
    admission = Admission()
    admission.note_prefill(tokens, seconds)
    assert admission.prefill_tps == 0


def test_a_slower_store_raises_the_threshold_again_and_again() -> None:
    admission = Admission(prefill_tps=10_000, round_trip_s=0.001)
    seen = [admission.least_tokens]
    for _ in range(40):
        admission.note_round_trip(0.02)
        seen.append(admission.least_tokens)
    assert seen == sorted(seen) and 190 <= seen[-1] <= 200
    admission.note_round_trip(0.0)
    assert admission.least_tokens == seen[-1]


def test_measurements_from_many_threads_are_all_counted() -> None:
    admission = Admission(prefill_tps=1.0)
    threads = [threading.Thread(target=lambda: [admission.note_prefill(64, 1.0) for _ in range(500)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert admission.prefill_tps == pytest.approx(64)


@pytest.mark.parametrize("options", [{"prefill_tps": -1.0}, {"round_trip_s": -0.1}])
def test_speeds_below_zero_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(RecordError, match="expected at least 0"):
        Admission(**options)
