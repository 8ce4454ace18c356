"""Scores on the environment's evaluation sets during training."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megatron_rl.agent.api import EvaluationAgent, ScoringAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.algorithms.evaluation_scores import (
    OF_ANSWERS,
    average,
    interval,
    mean_over_problems,
    powers_up_to,
    problem_scores,
    score_names,
)
from megatron_rl.contract.evaluation_records import GREEDY, SAMPLED, ProblemAnswers
from megatron_rl.generate.engine.interface import InferenceInterface
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.evaluation_answers import AnswerPlan, answer_problems
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.rank.control import Control
from megatron_rl.recipe.config import RunConfig

logger = logging.getLogger("megatron_rl")


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """The problems of a set in one evaluation, and how they are answered."""

    name: str
    problems: Sequence[Problem]
    plans: Sequence[AnswerPlan]
    counts: Sequence[int]
    """Values of k for pass@k of the sampled answers."""

    @property
    def answers(self) -> int:
        return len(self.problems) * sum(plan.samples for plan in self.plans)

    @property
    def samples(self) -> int:
        return sum(plan.samples for plan in self.plans if plan.mode == SAMPLED)

    def share(self, index: int, count: int) -> dict[int, Problem]:
        """Return the problems that one of `count` drivers answers, by their number in the set."""
        return {number: self.problems[number] for number in shares(0, len(self.problems), count)[index]}


def sets_after(agent: EvaluationAgent, config: RunConfig, step: int) -> list[EvaluatedSet]:
    """Return the sets that are evaluated after a step."""
    found = []
    for name, problems in agent.evaluation_problems().items():
        asked = config.evaluation.of(name)
        if not asked.due(step, config.training.steps):
            continue
        modes = {GREEDY: int(asked.greedy), SAMPLED: asked.samples}
        sampling, seed = asked.sampling(config.sampling), config.training.seed
        plans = [AnswerPlan(name, mode, count, sampling, seed) for mode, count in modes.items() if count]
        counts = asked.pass_at or powers_up_to(asked.samples)
        found.append(EvaluatedSet(name, problems[: asked.prompts], plans, counts))
    return found


def evaluate(
    agent: EvaluationAgent,
    inference: InferenceInterface,
    config: RunConfig,
    control: Control,
    loop: AgentLoop,
    step: int,
) -> dict[str, float]:
    """Answer the sets that are due after a step, and return their metrics: see `set_metrics`. Collective.

    Raises LeaveAgreed if a rank is asked to leave.
    """
    found: dict[str, float] = {}
    task = config.task
    for one in sets_after(agent, config, step):
        own = one.share(loop.role.index, loop.role.count) if loop.role.drives else {}
        lines: list[ProblemAnswers] = []
        for plan in one.plans:
            work = partial(answer_problems, agent, own, plan, inference, task)
            lines += loop.run(work, partial(scoring_progress, agent, one.answers)) or ()
        found |= set_metrics(agent, one, lines, control)
    return found


def set_metrics(
    agent: EvaluationAgent, one: EvaluatedSet, lines: Sequence[ProblemAnswers], control: Control
) -> dict[str, float]:
    """Return the metrics of a set from the answers of all drivers. Collective.

    `eval/SET/greedy_accuracy`: share of greedy answers that are right. Of sampled answers the scores of
    `problem_scores`, shares with the bounds of their `interval`. `eval/SET/failed_rollouts`: number of lost answers,
    which no score includes. A value that does not exist is absent.

    lines: answers of this rank's driver.
    """
    lost: Counter[str] = Counter()
    for line in lines:
        lost.update(line.failures)
    for reason, count in sorted(lost.items()):
        logger.warning("evaluation on %s: %d answers lost: %s", one.name, count, reason)
    names = ["answers", GREEDY, *score_names(one.counts, one.samples)]
    # Each problem has one driver, so the sum over drivers rounds nothing, and all layouts get the same scores.
    table = torch.zeros(len(one.problems), len(names), 2, dtype=torch.float64)  # value, and whether there is one
    for line in lines:
        for name, value in _scores(agent.agent_of(one.problems[line.problem]), one, line):
            table[line.problem, names.index(name)] += torch.tensor([value, 1.0], dtype=torch.float64)
    columns = control.reduce(table).transpose(0, 1).tolist() if len(one.problems) else []
    found: dict[str, float] = {}
    answered = 0
    for name, column in zip(names, columns, strict=False):
        values = [value for value, known in column if known]
        if name == "answers":
            answered = int(sum(values))
        elif score := mean_over_problems(values):
            shown = f"eval/{one.name}/{'greedy_accuracy' if name == GREEDY else name}"
            found[shown] = score.value
            if name != GREEDY and name not in OF_ANSWERS:
                found[f"{shown}_low"], found[f"{shown}_high"] = interval(score)
    if missing := one.answers - answered:
        found[f"eval/{one.name}/failed_rollouts"] = missing
    return found


def _scores(agent: EvaluationAgent, one: EvaluatedSet, line: ProblemAnswers) -> Iterator[tuple[str, float]]:
    yield "answers", len(line.answers)
    if line.mode == SAMPLED:
        yield from problem_scores(line.answers, one.counts, one.samples, agent.compares_answers).items()
    elif greedy := average([line.answers]):
        yield GREEDY, greedy.value


def scoring_progress(agent: ScoringAgent, answers: int, per: str = "") -> tuple[int, str]:
    """Return how many answers the agent has scored, and a note about a slow function; see `AgentLoop.run`.

    answers, per: number to score, such as 512 " a step".
    """
    found = agent.scoring()
    return (found.answers, found.note(f"{answers:,} answers{per}")) if found is not None else (0, "")
