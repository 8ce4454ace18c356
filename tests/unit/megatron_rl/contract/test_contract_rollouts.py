"""Files of groups: steps of several attempts, and damaged files."""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import pytest

from megatron_rl.contract.files import append_bytes
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write as write_record
from megatron_rl.contract.rollout_records import (
    AnswerLine,
    GroupLine,
    SequenceLine,
    group_json,
    member,
    read_rollouts,
    rollouts_file,
)
from megatron_rl.contract.run_records import Fork, RunIdentity

SEQUENCE = SequenceLine([1, 2], ["2", "+"], [[1, 2]], [False, True], [0.0, -0.5], [0.0, -0.25], [-1, 3])
ANSWER = AnswerLine("+\ud800<b>", [SEQUENCE], {"right": 1.0}, 2, "calls: 2\n")


def group(step: int, ordinal: int, reward: float = 1.0, **fields: object) -> GroupLine:
    line = GroupLine(step, ordinal, "abc", "2+3=", [reward, 0.0], [0.5, -0.5], [1, 2], ["stop", "length"], 0, 0)
    return line._replace(**fields)


def write(run: RunDir, attempt: int, *groups: GroupLine, rank: int = 0) -> Path:
    """Append a member for each group."""
    path = Path(rollouts_file(run.attempt(attempt), rank, groups[0].step))
    path.parent.mkdir(parents=True, exist_ok=True)
    for line in groups:
        append_bytes(path, member(group_json(line) + "\n"))
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_groups_are_read_as_they_were_written(run: RunDir):
    written = group(
        1, 0, environment="math", failures={"timeout": 2}, passed_over="no signal", answers=[ANSWER, ANSWER]
    )
    write(run, 1, written)
    assert [*read_rollouts(run, 1, 1)] == [written]


def test_groups_of_all_ranks_and_files_come_by_step_and_ordinal(run: RunDir):
    write(run, 1, group(99, 3), rank=1)
    write(run, 1, group(99, 2), group(98, 1))
    write(run, 1, group(100, 4))
    assert [(each.step, each.ordinal) for each in read_rollouts(run, 1, 100)] == [(98, 1), (99, 2), (99, 3), (100, 4)]
    assert [each.step for each in read_rollouts(run, 99, 99)] == [99, 99]


def test_the_newest_attempt_counts_for_steps_that_several_trained(run: RunDir):
    write(run, 1, group(1, 0), group(2, 1, reward=0.1), group(3, 2, reward=0.1))
    write(run, 2, group(2, 1, reward=0.2))
    write(run, 10, group(3, 2, reward=0.3))
    assert [each.rewards[0] for each in read_rollouts(run, 1, 3)] == [1.0, 0.2, 0.3]


def test_a_torn_member_costs_the_groups_in_it(run: RunDir, caplog: pytest.LogCaptureFixture):
    path = write(run, 1, group(1, 0), group(1, 1))
    torn = member("".join(group_json(group(1, ordinal)) + "\n" for ordinal in range(2, 400)))
    path.write_bytes(path.read_bytes() + torn[: len(torn) // 2])
    write(run, 1, group(2, 500))
    ordinals = [each.ordinal for each in read_rollouts(run, 1, 2)]
    assert ordinals[:2] == [0, 1] and ordinals[-1] == 500
    assert ordinals == sorted(ordinals)


def test_foreign_lines_and_unreadable_files_are_logged_and_left_out(run: RunDir, caplog: pytest.LogCaptureFixture):
    path = write(run, 1, group(1, 0))
    path.write_bytes(path.read_bytes() + gzip.compress(b'{"step": 1}\n'))
    (path.parent / "000000.00001.jsonl.gz").mkdir()
    with caplog.at_level(logging.WARNING):
        assert len([*read_rollouts(run, 1, 1)]) == 1
    assert "1 lines are left out: line 2 ordinal is missing" in caplog.text
    assert "00001.jsonl.gz is left out" in caplog.text


@pytest.fixture
def forked(tmp_path: Path) -> RunDir:
    """A run forked after step 2 of one that went on to step 3."""
    source, fork = RunDir(tmp_path / "source"), RunDir(tmp_path / "fork")
    write(source, 1, *(group(step, step, reward=0.1) for step in (1, 2, 3)))
    write(fork, 1, group(3, 3, reward=0.9))
    write_record(fork.fork, Fork(str(source.root), 2, {}, at=50.0))
    return fork


def test_steps_before_a_fork_are_those_of_its_origin(forked: RunDir):
    assert [(each.step, each.rewards[0]) for each in read_rollouts(forked, 1, 3)] == [(1, 0.1), (2, 0.1), (3, 0.9)]
    assert [each.step for each in read_rollouts(forked, 2, 2)] == [2]


def test_a_later_run_in_the_directory_of_the_origin_is_not_taken_for_it(forked: RunDir):
    write_record(forked.root.with_name("source") / "run.json", RunIdentity("id", "/source", 1, at=60.0))
    assert [each.step for each in read_rollouts(forked, 1, 3)] == [3]


def test_forks_that_name_one_another_as_their_origin_end(forked: RunDir):
    write_record(forked.root.with_name("source") / "fork.json", Fork(str(forked.root), 2, {}, at=60.0))
    assert [each.step for each in read_rollouts(forked, 1, 3)] == [3]


@pytest.mark.parametrize(
    "fields",
    [
        {"lengths": [1]},
        {"answers": [ANSWER]},
        {"rewards": [1e90, 1e90]},
        {"answers": [ANSWER, ANSWER._replace(sequences=[SEQUENCE._replace(versions=[3])])]},
        {"answers": [ANSWER, ANSWER._replace(sequences=[SEQUENCE._replace(turns=[[1, 2], [0, 1]])])]},
    ],
)
def test_groups_that_no_run_writes_are_left_out(
    run: RunDir, fields: dict[str, object], caplog: pytest.LogCaptureFixture
):
    write(run, 1, group(1, 0), group(1, 1, **fields))
    with caplog.at_level(logging.WARNING):
        assert [each.ordinal for each in read_rollouts(run, 1, 1)] == [0]
    assert "1 groups are left out: prompt 1 of step 1 has " in caplog.text
