"""Histograms and sample texts of a batch."""

from __future__ import annotations

from dataclasses import replace

from core_helpers import trajectory

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.learn.rollout.batch import RolloutBatch

ANSWERS = [trajectory([1], [2, 3], reward, text=text) for reward, text in [(1.0, "5"), (0.0, "-1")]]
GROUPS = [
    TrajectoryGroup(6, Problem("0+0=", {}), [], {"timeout": 2}),
    TrajectoryGroup(7, Problem("2+3=", {}), ANSWERS, {}),
    TrajectoryGroup(8, Problem("1+1=", {}), ANSWERS[:1], {}),
]
BATCH = RolloutBatch(GROUPS, [0, 1, 2], 6, 9)


def test_samples_are_whole_groups_as_text() -> None:
    assert BATCH.texts(1) == ["prompt 7: '2+3='\n  reward 1  stop  '5'\n  reward 0  stop  '-1'\n\n"]
    assert len(BATCH.texts(9)) == 2


def test_samples_show_what_a_program_printed() -> None:
    group = TrajectoryGroup(7, Problem("2+3=", {}), [replace(ANSWERS[0], output="calls: 2\n")], {})
    assert "'5'\n    output 'calls: 2\\n'\n" in RolloutBatch([group], [0], 7, 8).texts(1)[0]


def test_groups_that_lost_all_answers_have_no_mean() -> None:
    assert BATCH.histograms() == {
        "histograms/rewards": [1.0, 0.0, 1.0],
        "histograms/group_means": [0.5, 1.0],
        "histograms/answer_lengths": [2, 2, 2],
    }
