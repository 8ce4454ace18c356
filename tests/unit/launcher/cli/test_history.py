"""History of a run: lines as they are written, removed on resume, and the values derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cli.show.ending import result_lines
from launcher.cli.show.history import History, HistoryReader, clock
from launcher.cli.show.progress_lines import evaluation_line
from launcher.runs.step_record import newest_line
from megatron_rl.contract.attempt_records import MetricsLine, Progress
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, append, write


def test_complete_lines_are_read_as_they_are_written(tmp_path: Path):
    run = RunDir(tmp_path)
    reader = HistoryReader(run, run.attempt(1), steps=10)
    assert reader.poll().lines == []
    append(run.metrics, MetricsLine(1, {}))
    with run.metrics.open("a") as file:
        file.write('{"step"')
    assert [line.step for line in reader.poll().lines] == [1]
    with run.metrics.open("a") as file:
        file.write(": 2}\n")
    assert [line.step for line in reader.poll().lines] == [1, 2]


def test_lines_that_a_resume_removes_disappear(tmp_path: Path):
    run = RunDir(tmp_path)
    reader = HistoryReader(run, run.attempt(1), steps=10)
    for step in range(1, 6):
        append(run.metrics, MetricsLine(step, {}))
    assert reader.poll().step == 5
    write_atomic(run.metrics, '{"step": 1}\n{"step": 2}\n')
    append(run.metrics, MetricsLine(3, {}))
    assert [line.step for line in reader.poll().lines] == [1, 2, 3]


def test_the_phase_is_the_last_one_of_rank_0(tmp_path: Path):
    run = RunDir(tmp_path)
    attempt = run.attempt(1)
    reader = HistoryReader(run, attempt, steps=10)
    assert reader.poll().phase == "starting"
    attempt.folder.mkdir(parents=True)
    write(attempt.progress, Progress("evaluating", 0))
    assert reader.poll().phase == "evaluating"


@pytest.mark.parametrize(
    "damage", ["{\n", "5\n", "\n", '{"loss": 1}\n', '{"step": "x"}\n', '{"step": 2, "mean_reward": NaN}\n']
)
def test_a_damaged_line_is_skipped(tmp_path: Path, damage):
    run = RunDir(tmp_path)
    reader = HistoryReader(run, run.attempt(1), steps=10)
    run.metrics.write_text('{"step": 1, "mean_reward": "high"}\n' + damage)
    history = reader.poll()
    assert ([line.step for line in history.lines], history.rewards) == ([1], [])
    assert newest_line(run.metrics).step == 1
    run.attempt(1).folder.mkdir(parents=True)
    run.attempt(1).progress.write_text(damage)
    assert reader.poll().phase == "starting"
    assert isinstance(newest_line(tmp_path), Unreadable), "a folder"


def test_the_time_left_follows_the_recent_pace():
    slow = [MetricsLine(step, {"time/step_s": 100.0}) for step in range(1, 11)]
    quick = [MetricsLine(step, {"time/step_s": 2.0}) for step in range(11, 31)]
    assert History(steps=40, lines=(slow + quick)[-20:]).eta_s() == pytest.approx(20.0)
    assert History(steps=40).eta_s() is None


def test_results_compare_the_first_steps_with_the_last():
    rewards = [step / 100 for step in range(1, 101)]
    before = MetricsLine(0, {"eval/sums/held_out/greedy_accuracy": 0.1, "eval/trained/greedy_accuracy": 0.2})
    after = MetricsLine(100, {"eval/sums/held_out/greedy_accuracy": 0.8, "eval/trained/greedy_accuracy": 0.9})
    assert result_lines(History(steps=100, rewards=rewards, evaluations=[before, after])) == [
        "mean reward:     0.055 (first 10 steps) -> 0.905 (last 20)",
        "greedy accuracy: 0.100 -> 0.800 on sums/held_out",
        "greedy accuracy: 0.200 -> 0.900 on trained",
    ]
    assert "0.100 before training on sums/held_out" in result_lines(History(steps=100, evaluations=[before]))[0]


def test_the_line_of_an_evaluation_has_its_lost_answers():
    found = {"eval/a/greedy_accuracy": 0.5, "eval/a/failed_rollouts": 3, "eval/b/failed_rollouts": 4}
    said = evaluation_line(MetricsLine(7, {**found, "eval/c/d/greedy_accuracy": 1.0}))
    unknown = "b unknown (no answer has a reward) (4 answers lost)"
    assert said == f"evaluation after step 7: greedy accuracy a 0.500 (3 answers lost)  {unknown}  c/d 1.000"
    assert evaluation_line(MetricsLine(7, {})) == "", "no set, nothing to say"


def test_scores_of_sampled_answers_are_shown_with_their_intervals():
    share = {"eval/a/pass@8": 0.5, "eval/a/pass@8_low": 0.4, "eval/a/pass@8_high": 0.625}
    late = {name.replace("@8", "@16"): value for name, value in share.items()}
    before = MetricsLine(0, {"eval/b/greedy_accuracy": 0.25, **share, "eval/a/tokens": 3.0})
    said = "evaluation after step 0: greedy accuracy b 0.250; pass@8 a 0.500 (0.400 to 0.625)"
    assert evaluation_line(before) == said
    assert evaluation_line(MetricsLine(0, {**late, **share})).index("pass@8") < 40, "before pass@16"
    after = MetricsLine(9, {**share, "eval/a/pass@8": 0.6})
    assert result_lines(History(steps=9, evaluations=[before, after]))[-1] == "pass@8:          0.500 -> 0.600 on a"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.9, "1:05"), (7389, "2:03:09")])
def test_durations_are_formatted_like_a_clock(seconds, text):
    assert clock(seconds) == text
