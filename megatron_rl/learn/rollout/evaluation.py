"""Greedy accuracy on the environment's evaluation sets."""

from __future__ import annotations

import logging
from functools import partial
from operator import itemgetter

import torch

from megatron_rl.agent.api import EvaluationAgent, EvaluationRequest, ScoringAgent
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.generate.engine.interface import ResumableInference
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.inference import Sampling

logger = logging.getLogger("megatron_rl")


def evaluate(
    agent: EvaluationAgent,
    inference: ResumableInference,
    config: RunConfig,
    groups: Groups,
    loop: AgentLoop,
) -> dict[str, float]:
    """Answer each evaluation set greedily, and return its metrics. Collective.

    `eval/SET/greedy_accuracy`: share of answers with reward 1; absent without answers.
    `eval/SET/failed_rollouts`: number of lost answers, which no share includes; absent if none is lost.

    Raises LeaveAgreed if a rank is asked to leave.
    """
    sampling = config.sampling
    greedy = Sampling(
        temperature=0.0, max_new_tokens=sampling.max_new_tokens, stop=sampling.stop, stop_tokens=sampling.stop_tokens
    )
    sets = {name: problems[: config.evaluation.prompts] for name, problems in agent.evaluation_problems().items()}
    counts = torch.zeros(len(sets), 2, dtype=torch.float64)  # right answers, all answers
    role = loop.role
    for index, (name, problems) in enumerate(sets.items()):
        own = shares(0, len(problems), role.count)[role.index] if role.drives else range(0)
        request = EvaluationRequest(
            problems=[problems[i] for i in own],
            sampling=greedy,
            samples_per_problem=1,
            key=0,
            inference=inference,
            limits=RolloutLimits.of(config.task),
        )
        response = loop.run(partial(agent.evaluate, request), partial(scoring_progress, agent, len(problems)))
        if response is not None:
            rewards = response.rewards
            counts[index] = torch.tensor([rewards.count(1.0), len(rewards)])
            for reason, lost in sorted(filter(itemgetter(1), response.failures.items())):
                logger.warning("evaluation on %s: %d answers lost: %s", name, lost, reason)
    found: dict[str, float] = {}
    for (name, problems), (right, answers) in zip(sets.items(), groups.control.reduce(counts).tolist(), strict=True):
        if answers:
            found[f"eval/{name}/greedy_accuracy"] = right / answers
        if lost := len(problems) - int(answers):
            found[f"eval/{name}/failed_rollouts"] = lost
    return found


def scoring_progress(agent: ScoringAgent, answers: int, per: str = "") -> tuple[int, str]:
    """Return how many answers the agent has scored, and a note about a slow function; see `AgentLoop.run`.

    answers, per: number to score, such as 512 " a step".
    """
    found = agent.scoring()
    return (found.answers, found.note(f"{answers:,} answers{per}")) if found is not None else (0, "")
