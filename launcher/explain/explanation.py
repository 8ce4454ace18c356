"""The explanation of a run, by `mrl explain` and on the page: how it failed, then what the rules find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.explain.record import Record
from launcher.explain.rules import RULES, Finding, findings
from launcher.runs.failure import Failure, failure_of_run
from megatron_rl.contract.learning import RULES as WARNING_RULES
from megatron_rl.contract.learning import WINDOW
from megatron_rl.contract.paths import RunDir


@dataclass(frozen=True, slots=True)
class Explanation:
    """Texts are those of the run: a view makes them printable."""

    steps: int
    failure: Failure | None
    """How the newest attempt failed; None if it did not."""
    findings: Sequence[Finding]
    quiet: Sequence[str]
    """Names of the rules that find nothing."""

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
        return f"None of {len(self.quiet)} rules finds anything that keeps this run from learning."


def explain(run: RunDir, record: Record) -> Explanation:
    """Explain a run by its ledger and its record."""
    found = findings(record)
    named = {one.rule for one in found}
    quiet = [name for name in rule_names() if name not in named]
    return Explanation(len(record.lines), failure_of_run(run), found, quiet)


def rule_names() -> list[str]:
    """Return the names of all rules."""
    return [*(rule.name for rule in WARNING_RULES), *(rule.name for rule in RULES)]
