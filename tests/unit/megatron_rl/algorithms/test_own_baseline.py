"""Advantages of the user's: the checks that their function must pass, and its place in a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import random_groups, tiny_run
from torch import Tensor

from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.credit import estimate, reads_batch
from megatron_rl.algorithms.own_functions import check_baseline, own_baseline, sample_answers
from megatron_rl.learn.rollout.step_advantages import step_advantages
from megatron_rl.rank.control import Control
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.grpo import GrpoConfig

OPO = """
import torch

def advantages(answers, config):
    '''Rewards less the mean reward of the group's tokens (OPO, arXiv 2505.23585).'''
    zeros = torch.zeros(answers.num_groups)
    total = zeros.index_add(0, answers.group, answers.rewards * answers.tokens)
    tokens = zeros.index_add(0, answers.group, answers.tokens.float())
    return answers.rewards - (total / tokens.clamp(min=1))[answers.group]
"""
GOOD: dict[str, Callable[[Any, Any], Any]] = {
    "rewards": lambda answers, config: answers.rewards - 0.5,
    "whole numbers": lambda answers, config: answers.tokens - 3,
    "components": lambda answers, config: (
        sum(its.nan_to_num() for its in answers.components.values()) if answers.components else answers.rewards
    ),
}


def raises(answers: ScoredAnswers, config: GrpoConfig) -> Tensor:
    raise KeyError("nothing")


BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "too few parameters": (lambda answers: answers.rewards, "cannot be called as def advantages"),
    "an error": (raises, r"KeyError: 'nothing' \(for a step of 6 answers\)"),
    "an error for no answers": (lambda answers, config: answers.rewards / max(answers.rewards), "step of 0 answers"),
    "a list": (lambda answers, config: answers.rewards.tolist(), "must be a tensor.*type list"),
    "one for each group": (lambda answers, config: torch.zeros(answers.num_groups), r"each of 6 answers.*shape \[4\]"),
    "not finite": (lambda answers, config: answers.rewards / answers.rewards, "not finite"),
    "a missing component": (lambda answers, config: answers.components["right"], "not finite"),
}


@pytest.mark.parametrize("baseline", GOOD.values(), ids=GOOD)
def test_usable_function_passes_the_check(baseline: Callable[..., Any]) -> None:
    check_baseline(baseline, GrpoConfig())


@pytest.mark.parametrize(("baseline", "why"), BAD.values(), ids=BAD)
def test_unusable_function_is_refused_with_the_reason(baseline: Callable[..., Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_baseline(baseline, GrpoConfig())


def test_unusable_function_of_a_recipe_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def advantages(answers):\n    return answers.rewards\n")
    with pytest.raises(ConfigurationError, match=r"grpo\.baseline: the function cannot be called"):
        own_baseline(GrpoConfig(baseline=f"{tmp_path}/mine.py:advantages"))


def test_one_of_ours_is_no_own_function_and_an_unknown_name_is_refused() -> None:
    assert own_baseline(GrpoConfig(baseline="batch")) is None
    with pytest.raises(ValueError, match="did you mean 'leave_one_out'"):
        GrpoConfig(baseline="leave_one")


def test_own_function_sees_the_answers_of_the_whole_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OPO)
    config = tiny_run(grpo={"baseline": f"{tmp_path}/mine.py:advantages", "prompts_per_step": 3, "group_size": 4})
    assert reads_batch(config.grpo)
    groups = random_groups(3, 4, seed=5)
    found = step_advantages(dict(enumerate(groups)), config, Control(0, 1))
    for group, advantages in zip(groups, found.values(), strict=True):
        rewards = [answer.reward for answer in group.trajectories]
        tokens = [answer.answer_length for answer in group.trajectories]
        mean = sum(r * t for r, t in zip(rewards, tokens, strict=True)) / sum(tokens)
        assert advantages.tolist() == pytest.approx([reward - mean for reward in rewards], abs=1e-6)


def test_own_function_may_read_every_key_of_the_section(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def advantages(answers, config):\n    return answers.rewards * config.pass_k\n")
    config = GrpoConfig(baseline=f"{tmp_path}/mine.py:advantages", pass_k=3, batch_over="tokens")
    assert torch.equal(estimate(sample_answers(), config), 3 * sample_answers().rewards)
