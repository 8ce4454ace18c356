"""An evaluation job shows its scores with its state, and does not count as unfinished training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_helpers import begin, end, make_run, submitted

from launcher.cli.main import main
from launcher.cli.show.ending import ending_lines
from launcher.cli.show.history import History
from launcher.cli.show.scores import EvaluationProgress
from launcher.runs.state import result_file
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.contract.evaluation_records import EvaluationResult, MeanScore, SetResult
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write

SETTINGS = {
    "checkpoint": {"path": "/runs/a/checkpoints/step-000040", "name": "a", "step": 40},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_new_tokens": 8},
    "environment": {"name": "arithmetic"},
    "prompt_format": "",
    "k": 4,
    "seed": 0,
}
SCORES = {
    "greedy": MeanScore(0.975, 0.02, 40),
    "pass@1": MeanScore(0.9512, 0.01, 40),
    "pass@4": MeanScore(0.99, 0.01, 40),
}


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = submitted(tmp_path / "evaluate-a")
    begin(run, 1)
    end(run, 1, FINISHED)
    run.done.touch()
    run.evaluation_request.write_text('{"out": null}')
    write(run.evaluation, EvaluationResult(SETTINGS, {"held_out": SetResult(40, 160, {}, {}, SCORES)}, "a.jsonl"))
    return run


def test_the_job_ends_with_its_table(evaluated: RunDir) -> None:
    lines = ending_lines(evaluated, evaluated.attempt(1), AttemptEnd(1, 0.0, FINISHED), History(1), "mrl resume it")
    assert lines[:2] == ["finished", "a after step 40 on arithmetic"]
    assert "  pass@1                 0.951 ± 0.010" in lines
    assert lines[-1] == str(evaluated.evaluation)
    left = ending_lines(evaluated, evaluated.attempt(1), AttemptEnd(1, 0.0, DRAINED), History(1), "mrl resume it")
    assert left[-1] == "resume:      mrl resume it", "it goes on with the answers that are missing"


def test_status_and_ls_show_the_scores_and_do_not_suggest_resuming(evaluated: RunDir) -> None:
    said = CliRunner().invoke(main, ["status", "evaluate-a"]).stdout
    assert "  result     held_out: greedy 0.975, pass@1 0.951\n" in said
    assert "resume" not in said
    said = json.loads(CliRunner().invoke(main, ["status", "evaluate-a", "--json"]).stdout)
    assert said["evaluation"] == {"held_out": {name: score.value for name, score in SCORES.items()}}
    assert "greedy 0.975, pass@1 0.951" in CliRunner().invoke(main, ["ls"]).stdout
    [row] = json.loads(CliRunner().invoke(main, ["ls", "--json"]).stdout)["runs"]
    assert row["evaluation"]["held_out"]["pass@1"] == 0.9512


def test_the_result_file_is_the_requested_one_and_a_training_run_has_none(tmp_path: Path) -> None:
    assert result_file(make_run(tmp_path / "trains")) is None
    asked = make_run(tmp_path / "asked")
    asked.evaluation_request.write_text(json.dumps({"out": str(tmp_path / "r.json")}))
    assert result_file(asked) == tmp_path / "r.json"


def test_progress_is_a_line_now_and_then_and_when_something_else_begins(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    line = EvaluationProgress()
    answering = {"set": "test", "mode": "greedy", "done": 3, "of": 40, "waits_for": ""}
    line.report({**answering, "waits_for": "reading the weights"})
    for seconds in (4, 10, 34, 35, 40, 41):
        now = 100.0 + seconds
        line.report({**answering, "waits_for": f"starting vLLM for {seconds} s"} if seconds < 40 else answering)
    assert capsys.readouterr().err.splitlines() == [
        "[0:00] reading the weights",
        "[0:04] starting vLLM for 4 s",
        "[0:34] starting vLLM for 34 s",
        "[0:40] 3 of 40 problems answered  test greedy",
    ]
