"""Metrics of what replicas have computed between two reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.generate.replicas.links import ReplicaLinks
from megatron_rl.generate.replicas.speeds import Report, ReportSpan, speeds
from megatron_rl.generate.replicas.wire import About

PRESENT = About(0, 0, 1, 3, running=0, waiting=0, cache_used=0.0, preemptions=0, busy_s=5.0)


def span(seconds: float, **now: Any) -> ReportSpan:
    """A span that begins with PRESENT. now: fields that have changed at its end."""
    about = About(**{name: now.get(name, getattr(PRESENT, name)) for name in About.__slots__})
    return ReportSpan(Report(100.0, PRESENT), Report(100.0 + seconds, about))


def test_without_two_reports_nothing_is_known() -> None:
    assert speeds([]) == {}


def test_start_of_which_only_one_report_is_known_says_nothing() -> None:
    links = ReplicaLinks(*[None] * 4)  # type: ignore[arg-type]
    reports = {start: SimpleNamespace(report=Report(100.0, PRESENT)) for start in ((0, 0), (1, 0))}
    links._links = dict(reports)  # type: ignore[arg-type]
    assert links.spans() == []
    links._links[1, 1] = links._links.pop((1, 0))
    assert links.spans() == [ReportSpan(reports[0, 0].report, reports[0, 0].report)]


def test_replica_that_computes_nothing_has_a_share_and_no_speed() -> None:
    assert speeds([span(10.0)]) == {"system/replica_busy_mean": 0.0}


def test_tokens_count_per_second_of_computing_and_drafts_over_all_replicas() -> None:
    slow = span(10.0, busy_s=15.0, sampled=100)
    fast = span(10.0, busy_s=10.0, sampled=500, drafted=400, accepted=300)
    assert speeds([slow, fast]) == {
        "system/replica_busy_mean": pytest.approx(0.75),
        "system/replica_tokens_per_s": pytest.approx(40.0),
        "system/replica_draft_acceptance": pytest.approx(0.75),
    }


def test_time_asleep_is_no_idleness() -> None:
    assert speeds([span(10.0, busy_s=9.0, rested_s=6.0)])["system/replica_busy_mean"] == pytest.approx(1.0)
