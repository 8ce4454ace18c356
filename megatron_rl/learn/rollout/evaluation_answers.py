"""Scored answers to the problems of an evaluation, in a run and in `mrl evaluate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.agent.api import EvaluationAgent, EvaluationRequest, EvaluationResponse
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.scoring import RolloutLimits, all_of
from megatron_rl.agent.trajectories import Problem, Trajectory
from megatron_rl.algorithms.answers import accuracy_of, reason_to_lose
from megatron_rl.contract.evaluation_records import GREEDY, ProblemAnswers, ProblemKey, ScoredAnswer
from megatron_rl.generate.engine.interface import InferenceInterface, WeightsGone
from megatron_rl.recipe.environment_section import EnvironmentConfig, member_of
from megatron_rl.recipe.inference import Sampling

UNEXPLAINED = "the environment does not say why"


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How each problem of a set is answered in one mode."""

    set: str
    mode: str
    """GREEDY or SAMPLED, of `evaluation_records`."""
    samples: int
    sampling: Sampling
    """Sampling of sampled answers; greedy ones have its limits and stops alone."""
    seed: int


async def answer_problems(
    agent: EvaluationAgent,
    problems: Mapping[int, Problem],
    plan: AnswerPlan,
    inference: InferenceInterface,
    task: EnvironmentConfig,
) -> list[ProblemAnswers]:
    """Answer problems, given by their numbers in the set. Each has a request, so that its random numbers depend only on
    its place in the set.

    task: the environment of the problems, or several combined into one.
    """
    sampling, limits = plan.sampling, RolloutLimits.of(task)
    if plan.mode == GREEDY:
        sampling = sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0})
    requests = [
        EvaluationRequest(
            problems=[problem],
            sampling=sampling,
            samples_per_problem=plan.samples,
            key=stable_key(f"evaluate:{plan.set}:{plan.mode}", plan.seed, number),
            inference=inference,
            limits=limits,
        )
        for number, problem in problems.items()
    ]
    responses = await all_of(_response(agent, request) for request in requests)
    environments = {id: member_of(task, id) for id in {problem.environment for problem in problems.values()}}
    return [
        _line(
            (plan.set, plan.mode, number),
            response,
            plan.samples,
            agent.agent_of(problem),
            environments[problem.environment],
        )
        for (number, problem), response in zip(problems.items(), responses, strict=True)
    ]


async def _response(agent: EvaluationAgent, request: EvaluationRequest) -> EvaluationResponse:
    try:
        return await agent.evaluate(request)
    except WeightsGone as error:
        return EvaluationResponse([[]], {str(error): request.samples_per_problem})


def _line(
    key: ProblemKey,
    response: EvaluationResponse,
    samples: int,
    agent: EvaluationAgent,
    environment: EnvironmentConfig,
) -> ProblemAnswers:
    (trajectories,) = response.trajectories
    failures = Counter(response.failures)
    if unexplained := samples - len(trajectories) - sum(failures.values()):
        failures[UNEXPLAINED] = unexplained
    finals: Sequence[str | None] = response.final_answers.get(0) or [
        agent.final_answer(answer.text) if agent.compares_answers else None for answer in trajectories
    ]
    names = environment.components_of_accuracy
    reasons = [reason_to_lose(answer, names) for answer in trajectories]
    answers = [
        _scored(answer, final, accuracy_of(answer, environment))
        for answer, final, reason in zip(trajectories, finals, reasons, strict=True)
        if reason is None
    ]
    return ProblemAnswers(*key, answers, dict(failures + Counter(filter(None, reasons))))


def _scored(answer: Trajectory, final_answer: str | None, accuracy: float) -> ScoredAnswer:
    return ScoredAnswer(
        reward=answer.reward,
        tokens=answer.answer_length,
        finish_reason=answer.finish_reason,
        text=answer.text,
        vote=final_answer,
        accuracy=accuracy,
    )
