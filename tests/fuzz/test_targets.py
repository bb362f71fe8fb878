"""The targets of `make fuzz` under Hypothesis: fewer inputs, in every test run.

They are valid samples after a few edits (`fuzz_mutation`), and some noise; what was found once is in
``regressions`` and stays tried.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_mutation import edited, spelled
from fuzz_targets import TARGETS, Excess, Target, attempt, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmkv.schema import segment
from warmkv.schema.errors import ConfigError, FormatError

#: Of all targets together.
EXAMPLES = 20_000
NOISE = EXAMPLES // len(TARGETS) // 10
EDITED = EXAMPLES // len(TARGETS) - NOISE
REGRESSIONS = sorted(path for path in (Path(__file__).parent / "regressions").rglob("*") if path.is_file())
#: Up to five edits of a sample, see `spelled`.
_PROGRAMS = st.binary(min_size=7, max_size=27)
_settings = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Target:
    made: Target = TARGETS[request.param]
    prepare(made)
    return made


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_samples_are_good(target: Target) -> None:
    """Mutation starts from what is accepted: else it would try the first check only."""
    refused = [attempt(target, data) for data in target.samples()]
    accepted = refused.count(None)
    assert accepted >= 1 and 2 * accepted >= min(len(refused), 6), refused


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_found_once_is_taken_or_refused_by_name(path: Path) -> None:
    target = TARGETS[path.parent.name]
    prepare(target)
    attempt(target, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@settings(_settings, max_examples=EDITED)
@given(program=_PROGRAMS)
def test_almost_right_input_is_taken_or_refused_by_name(target: Target, program: bytes) -> None:
    (which, repaired, edits), samples = spelled(program), _samples(target)
    data = edited(samples[which % len(samples)], edits, samples)
    attempt(target, target.repair(data) if repaired else data)


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@settings(_settings, max_examples=NOISE)
@given(data=st.binary(max_size=300))
def test_noise_is_refused_by_name(target: Target, data: bytes) -> None:
    attempt(target, data)


_made: dict[str, list[bytes]] = {}


def _samples(target: Target) -> list[bytes]:
    if target.name not in _made:
        _made[target.name] = target.samples()
    return _made[target.name]


# -- the measuring itself ------------------------------------------------------------------


def raising(error: type[Exception]) -> Target:
    def run(data: bytes) -> None:
        raise error("so it is")

    return Target("raising", run, lambda: [], (FormatError,), 1, 0)


def test_documented_errors_are_told_and_others_raised() -> None:
    assert isinstance(attempt(raising(FormatError), bytes(1 << 16)), FormatError)
    for other in (KeyError, MemoryError, RecursionError, ConfigError, AssertionError):
        with pytest.raises(other):
            attempt(raising(other), b"")


def test_memory_beyond_the_cap_is_seen_though_it_was_given_back() -> None:
    spender = Target("spender", lambda data: [bytes(1 << 20)].clear(), lambda: [], (FormatError,), 2, 4096)
    with pytest.raises(Excess, match="for 100 of input, the cap is 4296"):
        attempt(spender, bytes(100))
    assert attempt(spender, bytes(1 << 20)) is None


def test_a_table_as_long_as_may_be_costs_no_more_than_its_share() -> None:
    """The inputs above are short; the caps hold for long ones as well."""
    target = TARGETS["head"]
    data = target.samples()[0]
    head = segment.decode_head(data)
    planes = head.header.planes[:1] * (1 << 14)
    packed = segment.encode_head(replace(head.header, planes=planes), head.payload_bytes)
    assert isinstance(attempt(target, packed), FormatError)
