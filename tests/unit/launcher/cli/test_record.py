"""What the live view knows: rows as they are written, cut back at a resume, and what is derived from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.show.ending import results
from launcher.cli.show.progress import BARS, Reader, Status, clock, sparkline
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import append_json_line, write_json


def test_rows_are_read_as_they_come_and_a_torn_line_waits(tmp_path: Path):
    run = RunDir(tmp_path)
    reader = Reader(run, run.attempt(1), steps=10)
    assert reader.poll().rows == []
    append_json_line(run.metrics, {"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step"')
    assert [row["step"] for row in reader.poll().rows] == [1]
    with run.metrics.open("a") as file:
        file.write(": 2}\n")
    assert [row["step"] for row in reader.poll().rows] == [1, 2]


def test_rows_that_a_resume_takes_back_disappear(tmp_path: Path):
    run = RunDir(tmp_path)
    reader = Reader(run, run.attempt(1), steps=10)
    for step in range(1, 6):
        append_json_line(run.metrics, {"step": step})
    assert reader.poll().step == 5
    write_atomic(run.metrics, '{"step": 1}\n{"step": 2}\n')
    append_json_line(run.metrics, {"step": 3})
    assert [row["step"] for row in reader.poll().rows] == [1, 2, 3]


def test_the_phase_is_what_rank_0_last_said(tmp_path: Path):
    run = RunDir(tmp_path)
    attempt = run.attempt(1)
    reader = Reader(run, attempt, steps=10)
    assert reader.poll().phase == "starting"
    attempt.folder.mkdir(parents=True)
    write_json(attempt.progress, {"phase": "evaluating", "step": 0})
    assert reader.poll().phase == "evaluating"


def test_the_time_left_follows_the_recent_pace():
    slow = [{"step": step, "time/step_s": 100.0} for step in range(1, 11)]
    quick = [{"step": step, "time/step_s": 2.0} for step in range(11, 31)]
    assert Status(steps=40, rows=slow + quick).eta_s() == pytest.approx(20.0)
    assert Status(steps=40).eta_s() is None


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), width=st.integers(1, 60))
def test_a_sparkline_fits_its_width(values, width):
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BARS)


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BARS
    assert sparkline([3, 3]) == BARS[0] * 2


def test_results_compare_the_beginning_with_the_end():
    rows = [{"step": step, "mean_reward": step / 100} for step in range(1, 101)]
    before = {"step": 0, "eval/held_out/greedy_accuracy": 0.1, "eval/trained/greedy_accuracy": 0.2}
    after = {"step": 100, "eval/held_out/greedy_accuracy": 0.8, "eval/trained/greedy_accuracy": 0.9}
    assert results(Status(steps=100, rows=rows, evaluations=[before, after])) == [
        "mean reward:     0.055 (first 10 steps) -> 0.905 (last 20)",
        "greedy accuracy: 0.100 -> 0.800 on held_out",
        "greedy accuracy: 0.200 -> 0.900 on trained",
    ]
    assert "0.100 before training on held_out" in results(Status(steps=100, evaluations=[before]))[0]


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (65.9, "1:05"), (7389, "2:03:09")])
def test_durations_read_like_a_clock(seconds, text):
    assert clock(seconds) == text
