"""Record of a rank's groups: every group in short, some with the log-probs of all tokens."""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from core_helpers import ALPHABET, tiny_run, trajectory

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.credit import Credit
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import NOT_FINITE, PROMPT_LIMIT, GroupLine, TurnLine, read_rollouts
from megatron_rl.learn.rollout import record as module
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.config import RunConfig

PLUS = ALPHABET.index("+")
ANSWERS = [trajectory([2, PLUS, 3], [5, 12], 1.0, text="5"), trajectory([2, PLUS, 3], [4], 0.0, text="4")]
GROUPS = [TrajectoryGroup(ordinal, Problem(f"{ordinal}+3=", {}), ANSWERS, {}) for ordinal in (6, 7, 8, 9)]
PASSED_OVER = TrajectoryGroup(5, Problem("0+0=", {}), ANSWERS[:1], {"timeout": 1})
BATCH = RolloutBatch(GROUPS, [0, 1, 2, 3], 5, 10, dropped={5: "no signal"}, passed_over=[PASSED_OVER])
ADVANTAGES = torch.tensor([0.7, -0.7] * 4)
LOGPROBS = -torch.arange(1.0, 13.0)
"""Log-probs of the three trained tokens of each of the four groups."""


def credit(advantages: torch.Tensor, of_spans: torch.Tensor | None = None) -> Credit:
    nothing = torch.zeros(len(advantages))
    return Credit(nothing.long(), nothing, nothing, advantages, nothing.bool(), nothing, [], of_spans)


def recipe(**logging: int) -> RunConfig:
    return tiny_run(logging={"samples": 2, **logging}, grpo={"prompts_per_step": 4}, training={"steps": 25})


def recorder(
    run: RunDir, config: RunConfig | None = None, right: Callable[[Problem], str | None] = lambda problem: None
) -> RolloutRecord:
    return RolloutRecord(run.attempt(1), 0, config or recipe(), CharacterTokenizer(ALPHABET), right)


def recorded(run: RunDir, record: RolloutRecord) -> list[GroupLine]:
    record.flush()
    return [*read_rollouts(run, 1, 10)]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_every_group_of_every_step_is_recorded(run: RunDir):
    record = recorder(run)
    record.add(3, BATCH, credit(ADVANTAGES), None)
    first, *others = recorded(run, record)
    assert (first.ordinal, first.passed_over, first.failures) == (5, "no signal", {"timeout": 1})
    assert [each.ordinal for each in others] == [6, 7, 8, 9]
    assert others[0] == GroupLine(
        3, 6, others[0].problem, "6+3=", [1.0, 0.0], [0.7, -0.7], [2, 1], ["stop", "stop"], 0, 0
    )
    assert len({each.problem for each in others}) == 4


def test_turns_are_recorded_with_their_rewards_keys_and_advantages(run: RunDir):
    first = replace(ANSWERS[0], turn_scores=(TurnScore(0.5, "room", "solver", 0),))
    second = replace(ANSWERS[1], turn_scores=(TurnScore(0.0),))
    group = replace(GROUPS[0], trajectories=[first, second])
    record = recorder(run)
    batch = RolloutBatch([group, GROUPS[1]], [0, 1], 6, 8)
    record.add(3, batch, credit(ADVANTAGES[:4], torch.tensor([1.25, -1.25, 0.7, -0.7])), None)
    record.add(4, batch, credit(ADVANTAGES[:4]), None)
    credited, plain, uncredited, _ = recorded(run, record)
    assert credited.turns == [[TurnLine(0.5, 1.25, "room", "solver", 0)], [TurnLine(0.0, -1.25)]]
    assert plain.turns == [] and [its[0].advantage for its in uncredited.turns] == [0.7, -0.7]


def test_a_problem_has_one_digest_in_all_steps_and_another_in_another_environment(run: RunDir):
    record = recorder(run)
    moved = replace(GROUPS[0], problem=Problem("6+3=", {}, environment="other"))
    for step, group in enumerate([GROUPS[0], GROUPS[0], moved], 1):
        record.add(step, RolloutBatch([group], [0], 6, 7), credit(ADVANTAGES[:2]), None)
    first, second, third = [each.problem for each in recorded(run, record)]
    assert first == second != third


def test_sampled_groups_have_the_log_probs_of_engine_and_trainer_for_each_token(run: RunDir):
    record = recorder(run)
    assert record.is_sampled(10)
    record.add(10, BATCH, credit(ADVANTAGES), LOGPROBS)
    groups = {each.ordinal: each for each in recorded(run, record)}
    assert [ordinal for ordinal, group in groups.items() if group.answers] == [6, 8], "spread over the batch"
    (sequence,) = groups[8].answers[0].sequences
    assert sequence.pieces == ["2", "+", "3", "5", "="]
    assert sequence.trained == [False, False, False, True, True]
    assert sequence.turns == [[3, 5]]
    assert sequence.trained_logprobs == [0.0, 0.0, 0.0, -7.0, -8.0]
    assert groups[8].answers[1].sequences[0].trained_logprobs[-1] == -9.0
    assert groups[8].answers[1].text == "4"


def test_a_rank_that_does_not_report_records_what_it_passed_over(run: RunDir):
    record = recorder(run)
    record.add(1, BATCH, None, LOGPROBS)
    assert [each.ordinal for each in recorded(run, record)] == [5]


def test_rows_of_data_are_recorded_only_where_sampled(run: RunDir):
    config = recipe()
    training = config.training.model_copy(update={"objective": "supervised"})
    record = recorder(run, config.model_copy(update={"training": training}))
    record.add(10, BATCH, credit(ADVANTAGES), LOGPROBS)
    record.add(9, BATCH, credit(ADVANTAGES), None)
    assert [(each.step, each.ordinal) for each in recorded(run, record)] == [(10, 6), (10, 8)]


def test_a_log_prob_that_is_not_finite_is_recorded_as_such(run: RunDir):
    record = recorder(run)
    record.add(10, BATCH, credit(ADVANTAGES), torch.full((12,), math.nan))
    (group, *_) = [each for each in recorded(run, record) if each.answers]
    assert group.answers[0].sequences[0].trained_logprobs[-1] == NOT_FINITE


def test_groups_are_left_out_with_one_warning_while_the_disk_is_full(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def full(path: str, data: bytes, patience: float) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    record = recorder(run)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module, "append_bytes", full)
        for step in (1, 2):
            record.add(step, BATCH, credit(ADVANTAGES), None)
            record.flush()
    record.add(3, BATCH, credit(ADVANTAGES), None)
    assert {each.step for each in recorded(run, record)} == {3}
    assert caplog.text.count("No space left on device") == 1


def test_the_last_step_is_sampled_beside_the_first_and_every_tenth(run: RunDir):
    record = recorder(run)
    assert [step for step in range(1, 26) if record.is_sampled(step)] == [1, 10, 20, 25]
    never = recorder(run, recipe(samples_every=0))
    assert not any(never.is_sampled(step) for step in range(1, 26))


def test_sampled_groups_have_the_right_answer_where_it_is_known(run: RunDir):
    def right(problem: Problem) -> str | None:
        return problem.prompt[0] * 1000 if problem.prompt != "8+3=" else None

    record = recorder(run, recipe(samples=4), right)
    record.add(1, BATCH, credit(ADVANTAGES), LOGPROBS)
    its = {group.ordinal: group.right for group in recorded(run, record)}
    assert its == {5: None, 6: "6" * PROMPT_LIMIT, 7: "7" * PROMPT_LIMIT, 8: None, 9: "9" * PROMPT_LIMIT}
