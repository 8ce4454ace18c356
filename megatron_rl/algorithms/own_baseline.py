"""An advantage estimator of the user's, which `grpo.baseline` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.answers import ScoredAnswers
from megatron_rl.algorithms.config import GrpoConfig
from megatron_rl.algorithms.own_function import called, check_signature, own_function

OwnBaseline = Callable[[ScoredAnswers, GrpoConfig], Tensor]
"""Answers of the whole step -> [answers] their advantages."""

SIGNATURE = "def advantages(answers: ScoredAnswers, config: GrpoConfig) -> Tensor"


def own_baseline(config: GrpoConfig) -> OwnBaseline | None:
    """Return the function of the user's that `grpo.baseline` names, checked by `check`; None if the baseline is one of
    ours. Raises ConfigurationError."""
    return own_function("baseline", config.baseline, check, config)


def check(baseline: Callable[..., Any], config: GrpoConfig) -> None:
    """Call a function of the user's with a few answers and with none. Raises ValueError if it does not accept the
    arguments, raises an error, or returns something other than [answers] finite values."""
    check_signature(baseline, config, SIGNATURE)
    for answers in (sample_answers(), no_answers()):
        found = called(baseline, answers, config, f"a step of {len(answers.rewards)} answers")
        as_advantages(found, answers)


def as_advantages(found: Any, answers: ScoredAnswers) -> Tensor:
    """Return the result of a function of the user's in fp32, without gradient. Raises ValueError if it is not one
    finite value for each answer."""
    count = len(answers.rewards)
    if not isinstance(found, Tensor):
        raise ValueError(f"the advantages must be a tensor [answers], and are of type {type(found).__name__}")
    if found.shape != (count,):
        raise ValueError(
            f"the advantages must have one value for each of {count} answers, and have the shape {[*found.shape]}"
        )
    advantages = found.detach().float()
    if not advantages.isfinite().all():
        raise ValueError(f"the advantages of some answers are not finite: {advantages[~advantages.isfinite()][:4]}")
    return advantages


def sample_answers() -> ScoredAnswers:
    """Return answers to four prompts: some are right, all are wrong, one is left, none is left. The first two are of an
    environment whose reward has components."""
    rewards = torch.tensor([1.25, 0.0, 0.25, 0.0, 0.0, 1.0])
    named = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, torch.nan])
    return ScoredAnswers(
        group=torch.tensor([0, 0, 0, 1, 1, 2]),
        num_groups=4,
        scored=rewards,
        rewards=rewards,
        accuracy=named.nan_to_num(1.0),
        tokens=torch.tensor([3, 12, 5, 7, 1, 4]),
        components={"right": named, "style": rewards - named},
        component_weights={"right": torch.tensor([1.0] * 5 + [0.0]), "style": torch.tensor([1.0] * 5 + [0.0])},
    )


def no_answers() -> ScoredAnswers:
    nothing = torch.zeros(0)
    none = torch.zeros(0, dtype=torch.long)
    return ScoredAnswers(none, 2, nothing, nothing, nothing, none, {}, {})
