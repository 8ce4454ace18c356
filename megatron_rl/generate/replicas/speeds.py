"""Metrics of what replicas have computed between two of their reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from megatron_rl.generate.replicas.wire import About


class Report(NamedTuple):
    at: float
    """Seconds of a monotonic clock."""
    about: About


@dataclass(frozen=True, slots=True)
class ReportSpan:
    """Two reports of one start of a replica."""

    before: Report
    now: Report

    @property
    def awake_s(self) -> float:
        """Seconds in which it was awake: a replica that takes turns with training on its device does not idle while
        it is asleep."""
        return self.now.at - self.before.at - self._more("rested_s")

    @property
    def busy_s(self) -> float:
        return self._more("busy_s")

    @property
    def sampled(self) -> int:
        return round(self._more("sampled"))

    @property
    def drafted(self) -> int:
        return round(self._more("drafted"))

    @property
    def accepted(self) -> int:
        return round(self._more("accepted"))

    def _more(self, name: str) -> float:
        return float(getattr(self.now.about, name) - getattr(self.before.about, name))


def speeds(spans: Sequence[ReportSpan]) -> dict[str, float]:
    """Return the metrics that the spans determine."""
    found: dict[str, float] = {}
    if awake := [span for span in spans if span.awake_s > 0]:
        found["system/replica_busy_mean"] = fmean(min(1.0, span.busy_s / span.awake_s) for span in awake)
    if (busy_s := sum(span.busy_s for span in spans)) > 0:
        found["system/replica_tokens_per_s"] = sum(span.sampled for span in spans) / busy_s
    if drafted := sum(span.drafted for span in spans):
        found["system/replica_draft_acceptance"] = sum(span.accepted for span in spans) / drafted
    return found
