"""Statistics of the loss where environments have their own algorithms: each mean is over the tokens of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_helpers import tiny_run

from megatron_rl.algorithms.loss_terms import kl_penalty
from megatron_rl.algorithms.trained_tokens import TrainedTokens
from megatron_rl.learn.training.objective import Grpo, Scores
from megatron_rl.rank.metrics.stats import BY_ENVIRONMENT
from megatron_rl.recipe.config import RunConfig


def two_environments(**keys: Any) -> RunConfig:
    listed = [{"name": "arithmetic", "id": "own", "grpo": keys}, {"name": "arithmetic", "id": "plain"}]
    return RunConfig.model_validate(tiny_run().model_dump() | {"environment": None, "environments": listed})


def test_tokens_without_a_penalty_or_weights_have_their_part_in_the_means() -> None:
    config = two_environments(kl_beta=0.1, importance={"upper": 2.0})
    reference: Any = object()
    policy: Any = SimpleNamespace(device="cpu")
    generator = torch.Generator().manual_seed(0)
    old, inference, ref = -torch.rand(3, 8, generator=generator) - 0.5
    weights = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    tokens = TrainedTokens(
        logprobs=old.clone().requires_grad_(),
        old_logprobs=old,
        inference_logprobs=inference,
        entropy=torch.ones(8),
        advantages=torch.ones(8),
        weights=weights,
        ref_logprobs=ref,
        environment=torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]),
        environments=2,
    )
    _, stats = Grpo(config, policy, reference).loss(tokens, Scores())
    trained = weights != 0
    assert stats.tokens == 7 and stats.kl is not None and stats.importance_weight is not None
    assert float(stats.kl) == pytest.approx(float(kl_penalty(old, ref, config.grpo.kl_estimator)[trained].sum()))
    ratios = torch.where(tokens.environment == 0, (old - inference).exp().clamp(max=2.0), 1.0)
    assert float(stats.importance_weight) == pytest.approx(float(ratios[trained].sum()))
    kl_of_environments = stats.by_environment[:, BY_ENVIRONMENT.index("kl")].tolist()  # type: ignore[index]
    assert kl_of_environments[0] > 0 and kl_of_environments[1] == 0, "recorded where there is a penalty"
