"""A record that is read from its index on says the same as one that is read whole, whatever became of the index."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.contract import metrics_index
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.files import append_line
from megatron_rl.contract.metrics_index import MetricsIndex, Summary, WatchedRecord, look_up, not_indexed
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import encode_line, read_lines
from megatron_rl.rank.metrics.cut_back import resume_record

VALUES = st.fixed_dictionaries(
    {},
    optional={
        "mean_reward": st.floats(0, 1) | st.integers(0, 1),
        "reward_std": st.sampled_from([0.0, 0.5]),
        "truncated_ratio": st.sampled_from([0.0, 0.9]),
        "time/save_s": st.floats(0, 9),
    },
)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_index, "EVERY", 3)


class Writing:
    """The record of a run as rank 0 writes it. No two lines are equal, since the seconds of no two steps are."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.index = MetricsIndex(self.run, not_indexed())
        self.step = 0
        self._seconds = count(1.0)

    def add(self, values: dict[str, Any]) -> None:
        self.step += 1
        line = MetricsLine(self.step, {**values, "time/step_s": next(self._seconds)})
        append_line(self.run.metrics, encode_line(line))
        self._index(line, len(encode_line(line)) + 1)

    def resume(self, last_step: int) -> None:
        self.index, lines = resume_record(self.run, last_step)
        for line, size in lines:
            self._index(line, size)
        self.step = last_step

    def _index(self, line: MetricsLine, size: int) -> None:
        self.index.add(line, size)
        self.index.write()


def said(summary: Summary) -> tuple[Any, ...]:
    recent = summary.watch.recent
    return (
        [*summary.lines],
        summary.watch.warnings,
        summary.save_s,
        [*recent.lines],
        recent.rewards,
        recent.best,
        recent.varied,
        [recent.rewards_of(end) for end in range(10, len(recent.rewards) + 1)],
    )


def of_all_lines(run: RunDir) -> Summary:
    summary = Summary()
    found = read_lines(MetricsLine, run.metrics)
    for line in found.records:
        summary.add(line)
    return summary


def read(run: RunDir) -> Summary:
    record = WatchedRecord(run)
    record.new()
    return record.summary


@examples(60)
@given(
    first=st.lists(VALUES, max_size=70),
    last_step=st.integers(0, 70),
    second=st.lists(VALUES, max_size=40),
    hurt=st.sampled_from(["", "removed", "cut", "zeros"]),
    at=st.floats(0, 1),
)
def test_a_record_says_the_same_with_any_index(tmp_path_factory, first, last_step, second, hurt, at):
    writing = Writing(tmp_path_factory.mktemp("run"))
    index, reader = writing.run.metrics_index, WatchedRecord(writing.run)
    for values in first:
        writing.add(values)
    reader.new()
    assert said(reader.summary) == said(read(writing.run)) == said(of_all_lines(writing.run))
    rows = index.read_bytes() if index.exists() else b""
    place = int(at * len(rows))
    if hurt == "removed":
        index.unlink(missing_ok=True)
    elif hurt and rows:
        index.write_bytes(rows[:place] + (bytes(len(rows) - place) if hurt == "zeros" else b""))
    assert said(read(writing.run)) == said(of_all_lines(writing.run))
    writing.resume(min(last_step, len(first)))
    assert said(read(writing.run)) == said(of_all_lines(writing.run))
    for values in second:
        writing.add(values)
    steps = [line.step for line in read_lines(MetricsLine, writing.run.metrics).records]
    assert steps == [*range(1, writing.step + 1)]
    reader.new()
    assert said(reader.summary) == said(read(writing.run)) == said(of_all_lines(writing.run))


def test_only_the_end_of_a_long_record_is_read(tmp_path: Path):
    writing = Writing(tmp_path)
    for step in range(1, 101):
        writing.add({"mean_reward": step / 100, "time/step_s": 1.0})
    record = WatchedRecord(writing.run)
    assert [line.step for line in record.new()] == [100], "after the row of 99 steps"
    assert len(record.summary.lines) == metrics_index.KEPT
    assert look_up(writing.run, last_step=50).summary.step == 48


def test_a_run_of_an_older_mrl_gets_an_index_when_it_resumes(tmp_path: Path):
    writing = Writing(tmp_path)
    for step in range(1, 31):
        append_line(writing.run.metrics, encode_line(MetricsLine(step, {"mean_reward": step / 30})))
    writing.resume(20)
    assert look_up(writing.run).summary.step == 18
    assert said(read(writing.run)) == said(of_all_lines(writing.run))


def test_a_torn_line_between_others_is_not_indexed_and_goes_when_the_run_resumes(tmp_path: Path):
    writing = Writing(tmp_path)
    for step in range(1, 21):
        writing.add({"mean_reward": step / 20})
        if step == 10:
            append_line(writing.run.metrics, '{"step": 11, "mea')
    record = WatchedRecord(writing.run)
    record.new()
    assert (record.summary.step, record.tail.damaged, look_up(writing.run).summary.step) == (20, 1, 9)
    writing.resume(20)
    assert read_lines(MetricsLine, writing.run.metrics).damaged == []
    assert look_up(writing.run).summary.step == 18
    assert said(read(writing.run)) == said(of_all_lines(writing.run))


def test_rewards_whose_sum_is_not_finite_do_not_count(tmp_path: Path):
    writing = Writing(tmp_path)
    for step in range(1, 31):
        writing.add({"mean_reward": 1e308 if step < 12 else 0.5})
    assert (look_up(writing.run).summary.step, len(look_up(writing.run).summary.watch.recent.rewards)) == (30, 19)
    assert said(read(writing.run))[2:5] == said(of_all_lines(writing.run))[2:5]
