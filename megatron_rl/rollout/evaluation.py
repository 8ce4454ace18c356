"""Greedy accuracy on the environment's evaluation sets."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from megatron_rl.agent.api import EvaluationAgent, EvaluationRequest
from megatron_rl.agent.scoring import Patience
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import ResumableInference
from megatron_rl.inference.config import Sampling
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.generation import AgentLoop


def evaluate(
    agent: EvaluationAgent,
    inference: ResumableInference,
    config: RunConfig,
    groups: Groups,
    safe_points: SafePoints,
    loop: AgentLoop,
) -> dict[str, float]:
    """`eval/SET/greedy_accuracy`: share of each set's problems whose likeliest answer has reward 1. Collective.
    Raises LeaveAgreed where a rank was asked to leave."""
    asked = config.sampling
    greedy = Sampling(
        temperature=0.0, max_new_tokens=asked.max_new_tokens, stop=asked.stop, stop_tokens=asked.stop_tokens
    )
    sets = {name: problems[: config.evaluation.prompts] for name, problems in agent.evaluation_problems().items()}
    right = torch.zeros(len(sets), dtype=torch.float64)
    for index, problems in enumerate(sets.values()):
        request = EvaluationRequest(
            problems=[problems[i] for i in loop.share(0, len(problems))],
            sampling=greedy,
            samples_per_problem=1,
            key=0,
            inference=inference,
            patience=Patience.of(config.task),
        )
        response = loop.run(partial(agent.evaluate, request), sign_of_life=lambda: inference.busy_s)
        if response is not None:
            right[index] = sum(reward == 1.0 for reward in response.rewards)
        safe_points.agree()
    dist.all_reduce(right, group=groups.control)
    return {
        f"eval/{name}/greedy_accuracy": right[index].item() / len(problems)
        for index, (name, problems) in enumerate(sets.items())
    }
