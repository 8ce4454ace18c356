"""A probe compares an engine's log-probs with the trainer's."""

from __future__ import annotations

import json
import math

import pytest

from megatron_rl.generate.refit.probe import EngineProbes, Probe, ProbeFailed

PROBE = Probe((5, 6, 7, 8), (-1.0, -2.0, -3.0), 0.01)


def test_log_probs_within_the_tolerance_pass() -> None:
    PROBE.check([-1.0, -2.0, -3.0])
    PROBE.check([-1.02, -2.0, -3.0])
    assert PROBE.difference([-1.02, -2.01, -3.0]) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([-1.01, -2.5, -3.0], r"0\.17 in the mean, where 0\.01 .* token 7 at 2: -2\.5000 instead of -2\.0000"),
        ([math.nan, -2.5, -3.0], "token 6 at 1: nan"),
        ([-1.0, -2.0], "reports 2 log-probs of a probe with 3"),
    ],
)
def test_failure_names_the_largest_difference_and_its_token(found: list[float], said: str) -> None:
    with pytest.raises(ProbeFailed, match=said):
        PROBE.check(found)


def test_probe_survives_the_protocol() -> None:
    assert Probe.decode(json.loads(json.dumps(PROBE.encode()))) == PROBE


@pytest.mark.parametrize(
    "content",
    [
        {"tokens": [1], "logprobs": [], "tolerance": 1.0},
        {"tokens": [1, 2], "logprobs": [-1.0, -1.0], "tolerance": 1.0},
        {"tokens": [1, 2], "logprobs": [math.nan], "tolerance": 1.0},
        {"tokens": [1, 2], "logprobs": ["x"], "tolerance": 1.0},
    ],
)
def test_other_content_is_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Probe.decode(content)


def test_engine_that_reports_the_very_same_numbers_keeps_its_old_weights() -> None:
    engine, next_version = EngineProbes(), Probe(PROBE.tokens, (-1.001, -2.001, -3.001), 0.01)
    engine.check(PROBE, [-1.0, -2.0, -3.0])
    engine.check(PROBE, [-1.0, -2.0, -3.0])  # again, for an engine that comes late
    for _ in range(2):  # a second try finds the same
        with pytest.raises(ProbeFailed, match="exactly those of the previous version, while 3 of the trainer's"):
            engine.check(next_version, [-1.0, -2.0, -3.0])
    engine.check(next_version, [-1.0, -2.0, -3.0001])


def test_engine_may_report_the_same_numbers_where_hardly_any_weight_has_changed() -> None:
    engine = EngineProbes()
    tokens = tuple(range(9))
    engine.check(Probe(tokens, (-1.0,) * 8, 0.01), [-1.0] * 8)
    engine.check(Probe(tokens, (-1.0,) * 6 + (-1.001,) * 2, 0.01), [-1.0] * 8)
