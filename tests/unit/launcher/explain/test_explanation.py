"""Explanations of a run that failed, of a young one, and of one that learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.explain.explanation import RULES, explain
from launcher.explain.record import Record, read_record
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, MetricsLine, RankError
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, write


def crashed(folder: Path) -> RunDir:
    run = RunDir(folder)
    append(run.attempts_ledger, AttemptStart(1, 1e9))
    append(run.attempts_ledger, AttemptEnd(1, 2e9, "crashed", step=4, rank=1, error="ValueError: no column answer"))
    run.attempt(1).folder.mkdir(parents=True)
    trace = 'Traceback (most recent call last):\n  File "reward.py", line 3\nValueError: no column answer'
    write(run.attempt(1).error(1), RankError(1, "n1", 4, "reward", "ValueError: no column answer", trace))
    return run


def test_a_crashed_run_has_its_reason_first_and_is_not_called_too_early(tmp_path: Path):
    explanation = explain(crashed(tmp_path), Record({}, [MetricsLine(1, {})]))
    assert explanation.failure is not None
    assert explanation.failure.message == "failed: rank 1 in step 4 (reward): ValueError: no column answer"
    assert explanation.failure.shown[1] == '  File "reward.py", line 3'
    assert (explanation.heading, explanation.remark) == ("Why it ended", "")
    append(RunDir(tmp_path).attempts_ledger, AttemptStart(2, 3e9))
    assert explain(RunDir(tmp_path), Record({}, [])).failure is None, "it has started again"


def test_a_young_run_is_said_to_be_young(tmp_path: Path):
    explanation = explain(RunDir(tmp_path), Record({}, [MetricsLine(1, {})]))
    assert "the run has made 1" in explanation.remark


def test_a_run_without_findings_says_so_under_a_heading_that_asks_nothing(tmp_path: Path):
    explanation = explain(RunDir(tmp_path), Record({}, [MetricsLine(step, {}) for step in range(1, 20)]))
    assert explanation.heading == "Findings"
    assert explanation.remark == f"None of {len(RULES)} rules finds anything that keeps this run from learning."


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.resolved.write_text(dump_resolved(load_recipe("demo", []).config), encoding="utf-8")
    return found


def test_damaged_lines_and_those_out_of_order_are_left_out_and_named(run: RunDir):
    run.metrics.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"step": 5}\n{"step": 3}\n{"step": 6}\n', "utf-8")
    record = read_record(run)
    assert [line.step for line in record.lines] == [1, 5, 6]
    assert record.left_out == [
        f"{run.metrics}: 1 lines are left out: line 2 is torn or not JSON (NaN is not finite)",
        f"{run.metrics}: 1 lines are left out, because they do not follow the previous step",
    ]


def test_a_last_line_that_is_being_written_is_no_damage(run: RunDir):
    run.metrics.write_text('{"step": 1}\n{"step": 2, "lo', "utf-8")
    record = read_record(run)
    assert ([line.step for line in record.lines], record.left_out) == ([1], [])
