"""The explanation of a run, by `mrl explain` and on the page: how it failed, then what the rules find.

A rule speaks only of what the record shows: the evidence has the numbers, and what to try names keys of the recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.explain import curve_rules, lesson_rules
from launcher.explain.record import Record
from launcher.runs.failure import RunFailure, failure_of_run
from megatron_rl.contract import window_rules
from megatron_rl.contract.learning import WINDOW, Hindrance, Rule
from megatron_rl.contract.paths import RunDir

OF_RECORD = {**curve_rules.RULES, **lesson_rules.RULES}
RULES: dict[str, Rule[Any]] = {**window_rules.RULES, **OF_RECORD}
"""All rules by name, the warnings of a run first."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Texts are those of the run: a view makes them printable."""

    steps: int
    failure: RunFailure | None
    """How the newest attempt failed; None if it did not."""
    findings: Sequence[Hindrance]

    @property
    def heading(self) -> str:
        return "Findings" if self.failure is None else "Why it ended"

    @property
    def remark(self) -> str:
        """Sentence about findings that are missing; empty if the findings speak for themselves."""
        if self.steps < WINDOW and self.failure is None:
            return (
                f"Too early for most rules: they compare {WINDOW} steps, and the run has made {self.steps}; so far "
                "little can be said about learning."
            )
        if self.findings or self.failure is not None:
            return ""
        return f"None of {len(RULES)} rules finds anything that keeps this run from learning."


def findings(record: Record) -> list[Hindrance]:
    found = {name: rule.find(record) for name, rule in OF_RECORD.items()}
    more = [Hindrance(name, seen.since, seen.text, RULES[name].advice) for name, seen in found.items() if seen]
    return [*record.warnings, *more]


def explain(run: RunDir, record: Record) -> Explanation:
    return Explanation(len(record.lines), failure_of_run(run), findings(record))
