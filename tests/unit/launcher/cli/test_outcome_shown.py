"""Scores of an evaluation, warnings of a run, and what to do next: in its status, while it runs, and at its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_helpers import begin, end, make_run, submitted

from launcher.cli.main import main
from launcher.cli.show.ending import ending_lines
from launcher.cli.show.history import History, HistoryReader
from launcher.cli.show.progress_lines import ProgressLines
from launcher.cli.show.scores import ProgressLine
from launcher.cli.show.status_rows import status_json, status_lines
from launcher.runs.state import read_status, result_file
from megatron_rl.contract.attempt_records import AttemptEnd, MetricsLine
from megatron_rl.contract.codes import CRASHED, DRAINED, FINISHED, MISCONFIGURED
from megatron_rl.contract.evaluation_records import EvaluationResult, MeanScore, SetResult
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, encode_line, write

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
    line = ProgressLine()
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


CUT = "90% of the answers of the last 3 steps were cut at the limit of new tokens (since step 1). Raise sampling.max_"


def step(number: int, truncated: float) -> MetricsLine:
    return MetricsLine(number, {"mean_reward": 0.5, "reward_std": 0.5, "truncated_ratio": truncated})


def cut_run(folder: Path) -> tuple[RunDir, HistoryReader]:
    """A run whose answers are cut at their limit."""
    run = make_run(folder / "run")
    for number in (1, 2, 3):
        append(run.metrics, step(number, 0.9))
    return run, HistoryReader(run, run.attempt(1), steps=10)


def test_a_reader_follows_the_record_across_a_resume(tmp_path: Path) -> None:
    run, reader = cut_run(tmp_path)
    assert [warning.name for warning in reader.poll().warnings] == ["truncated"]
    assert [warning.name for warning in reader.poll().warnings] == ["truncated"], "no line is counted twice"
    write_atomic(run.metrics, encode_line(step(1, 0.9)) + "\n")
    assert reader.poll().warnings == []
    for number in (2, 3):
        append(run.metrics, step(number, 0.1))
    assert reader.poll().warnings == []


def test_the_lines_of_a_run_warn_once(tmp_path: Path, capsys) -> None:
    run, reader = cut_run(tmp_path)
    view = ProgressLines()
    view.show(reader.poll())
    append(run.metrics, step(4, 0.9))
    view.show(reader.poll())
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert said.startswith(f"warning: {CUT}")


def test_the_status_has_the_warning_as_text_and_json(tmp_path: Path) -> None:
    run, _ = cut_run(tmp_path)
    told = status_json(read_status(run, None))
    (warning,) = told["warnings"]
    assert (warning["name"], warning["since"]) == ("truncated", 1)
    assert warning["advice"].startswith("Raise sampling.max_new_tokens")
    (said,) = [line for line in status_lines(told) if line.startswith("  warning ")]
    assert CUT in said


def test_the_summary_has_the_warning_of_a_finished_run(tmp_path: Path) -> None:
    run, reader = cut_run(tmp_path)
    lines = ending_lines(run, run.attempt(1), AttemptEnd(1, 0.0, FINISHED), reader.poll(), "mrl resume run")
    assert lines[0] == "finished: 3 steps"
    (said,) = [line for line in lines if line.startswith("warning: ")]
    assert CUT in said


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
