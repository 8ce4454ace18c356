"""A trajectory records of every token whether it was sampled and with which weights; wrong lists are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.agent.trajectories import Branch, Problem, Trajectory, TrajectoryBuilder, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion


def conversation(**changed: Any) -> Trajectory:
    """Two turns of two tokens, with one token of the environment between them."""
    fields: dict[str, Any] = {
        "tokens": [1, 4, 0, 9, 5, 0],
        "loss_mask": [False, True, True, False, True, True],
        "logprobs": [0.0, -1.0, -1.0, 0.0, -1.0, -1.0],
        "versions": [-1, 3, 3, -1, 4, 4],
        "turns": [range(1, 3), range(4, 6)],
        "reward": 0.0,
    }
    return Trajectory(**(fields | changed), text="45", finish_reason="stop")


def test_answer_length_is_the_sum_of_all_turns() -> None:
    assert (conversation().prompt_length, conversation().answer_length) == (1, 4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"versions": [-1, 3, 3]}, "a trajectory of 6 tokens has .* 3 versions"),
        ({"loss_mask": [True] * 7}, "7 loss mask entries"),
        ({"turns": []}, "at least one turn"),
        ({"reward": float("nan")}, "the reward is nan: it must be a number of magnitude 1e.18 at most"),
        ({"loss_mask": [True] * 6}, "the first token of a trajectory cannot be trained on"),
        ({"output": "." * 4001}, "an output of 4001 characters: a trajectory keeps 4000 at most"),
    ],
)
def test_inconsistent_lists_are_rejected(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        conversation(**changed)


def test_a_rollout_counts_the_tokens_that_the_model_sampled_in_all_sequences() -> None:
    """The branch begins with a turn of the first sequence, which is context there."""
    retried = Branch(
        tokens=[1, 4, 0, 8, 6],
        loss_mask=[False, False, False, False, True],
        logprobs=[0.0, 0.0, 0.0, 0.0, -2.0],
        versions=[-1, -1, -1, -1, 5],
        turns=[range(4, 5)],
    )
    one = conversation(branches=(retried,))
    assert one.sequences == (one, retried)
    assert (one.sampled_length, retried.sampled_length, one.answer_length) == (4, 1, 5)
    assert max(TrajectoryGroup(0, PROBLEM, [one], {}).versions) == 5
    assert Trajectory.of_sequences(one.sequences, one.text, one.reward, one.finish_reason).branches == (retried,)


def test_a_rollout_without_a_sequence_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        Trajectory.of_sequences([], "", 0.0, "stop")


PROBLEM = Problem("7=", {})


def test_a_turn_adds_choices_of_tokens_that_have_none_and_changes_no_others() -> None:
    builder = TrajectoryBuilder([1])
    builder.add_turn(Completion([4, 0], [-1.0, -1.0], "stop", [3, 3], choices=[b"a", b"b"]))
    builder.add_observation([9])
    second = [b"A", b"B", b"c", b"d", b"e"]  # a pass over all tokens before, under newer weights
    builder.add_turn(Completion([5, 0], [-1.0, -1.0], "stop", [4, 4], choices=second))
    assert builder.branch().choices == [b"a", b"b", b"c", b"d", b"e"]


def test_choices_of_more_tokens_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="a trajectory of 6 tokens has choices of 7"):
        conversation(choices=[b"a"] * 7)
