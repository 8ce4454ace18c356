"""The last line about an attempt that did not finish: how to go on. It never advises what fails again."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_helpers import begin, end, make_run

from launcher.cli.show.ending import ending_lines
from launcher.cli.show.history import History
from launcher.cli.show.status_rows import status_json
from launcher.runs.state import read_status
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.codes import CRASHED, DRAINED, MISCONFIGURED


@pytest.mark.parametrize(
    ("outcome", "resume", "said"),
    [
        (DRAINED, "mrl resume run", "resume:      mrl resume run"),
        (CRASHED, "mrl resume run", "resume:      mrl resume run"),
        (MISCONFIGURED, "mrl resume run", "next:        correct it, then mrl-submit RECIPE --run-dir {root}"),
        (MISCONFIGURED, "mrl-submit demo --run-dir r", "next:        correct it, then mrl-submit demo --run-dir r"),
    ],
)
def test_run_that_has_not_trained(tmp_path: Path, outcome: str, resume: str, said: str) -> None:
    run = make_run(tmp_path / "run")
    lines = ending_lines(run, run.attempt(1), AttemptEnd(1, 0.0, outcome), History(1), resume)
    assert lines[-1] == said.format(root=run.root)


def test_run_that_has_trained_resumes_once_its_configuration_is_corrected(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.checkpoints / "step-000003").mkdir(parents=True)
    lines = ending_lines(run, run.attempt(1), AttemptEnd(1, 0.0, MISCONFIGURED), History(1), "mrl resume run")
    assert lines[-1] == "next:        correct it, then mrl resume run"


@pytest.mark.parametrize(
    ("outcome", "said"),
    [(CRASHED, "mrl resume run"), (MISCONFIGURED, "correct it, then mrl-submit RECIPE --run-dir {run}")],
)
def test_status_says_the_same(tmp_path: Path, outcome: str, said: str) -> None:
    run = make_run(tmp_path / "run")
    begin(run, 1)
    end(run, 1, outcome)
    found = status_json(read_status(run, None))
    assert (found["state"], found["next"]) == ("failed", said.format(run=run.root))
