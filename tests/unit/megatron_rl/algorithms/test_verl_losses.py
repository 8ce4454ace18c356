"""Losses and gradients equal those that verl's own functions returned for the same log-probs and advantages. They were
recorded with verl 0.9.1 by tests/helpers/record_verl_losses.py of commit d143081d."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.algorithms.loss import grpo_loss
from megatron_rl.algorithms.reduction import local_normaliser, token_weights
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.recipe.grpo import GrpoConfig

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "verl_losses.json").read_text())

OURS: dict[str, dict[str, Any]] = {
    "vanilla": {"policy_loss": "clip", "eps_low": 0.2, "eps_high": 0.28, "dual_clip": 10.0},
    "vanilla dual clip": {"policy_loss": "clip", "eps_low": 0.2, "eps_high": 0.2, "dual_clip": 1.5},
    "gspo": {"policy_loss": "gspo_token", "eps_low": 0.03, "eps_high": 0.04, "reduction": "sequence"},
    "sapo": {"policy_loss": "sapo", "reduction": "sequence"},
    "cispo": {"policy_loss": "cispo", "eps_low": 0.1, "eps_high": 0.2},
    "dppo_tv": {"policy_loss": "dppo", "eps_low": 0.04, "eps_high": 0.05},
    "dppo_kl": {"policy_loss": "dppo", "dppo_divergence": "kl", "eps_low": 0.001, "eps_high": 0.1},
}
"""verl's name of a loss, and a remark -> our keys."""


def test_every_recorded_loss_is_compared() -> None:
    assert OURS.keys() == RECORDED["losses"].keys()


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradient_equal_those_of_verl(name: str) -> None:
    theirs, config = RECORDED["losses"][name], GrpoConfig(**OURS[name])
    given = {key: torch.tensor(values, dtype=torch.float64) for key, values in RECORDED["inputs"].items()}
    lengths, mask = torch.tensor(RECORDED["lengths"]), given["response_mask"].bool()
    ones = torch.ones(len(lengths))
    weights = token_weights(lengths, ones, config.reduction, local_normaliser(lengths, ones, config.reduction))
    logprobs = given["log_prob"].requires_grad_()
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = TrainedTokens(
        logprobs=logprobs[mask],
        old_logprobs=given["old_log_prob"][mask],
        inference_logprobs=given["old_log_prob"][mask],
        entropy=torch.zeros(len(sequence), dtype=torch.float64),
        advantages=given["advantages"][mask],
        weights=weights.double()[sequence],
        sequence=sequence,
        sequences=len(lengths),
    )
    loss, _ = grpo_loss(tokens, config)
    loss.backward()
    assert loss.item() == pytest.approx(theirs["loss"], rel=1e-6)  # our weights are fp32
    gradient = torch.tensor(theirs["gradient"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient, rtol=1e-6, atol=1e-9)
    assert gradient.count_nonzero() > 4
