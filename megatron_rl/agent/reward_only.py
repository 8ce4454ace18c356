"""Single-turn tasks: the model answers a prompt, and one function scores each answer."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from megatron_rl.agent.api import Environment, GroupRolloutRequest
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.reward_value import Reward, WrongReward
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits, RolloutTimeout, run_within_limit, score_answer
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest, InferenceInterface
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.errors import ConfigurationError, task_location, task_traceback
from megatron_rl.recipe.own_code import where_defined

logger = logging.getLogger(__name__)

SHOWN = 200


class RewardOnlyAgent(Environment):
    """An environment of problems and a `get_reward`."""

    def __init__(self, config: Any, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._traces: dict[str, str] = {}

    @abstractmethod
    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> Reward | Awaitable[Reward]:
        """Return the finite score of one answer, or the components that add up to it; each is a metric
        reward/NAME. `response` is the answer's text without special tokens.

        Make it an `async def` if scoring waits, for example for another process: all answers of a group are then scored
        concurrently, and `environment.reward_timeout_s` limits the wait. A plain function must be quick, because the
        engine generates in the same event loop.

        If it raises, it is called again up to `environment.reward_retries` times. After that, any exception loses this
        one answer: it is excluded from its group and counted among the failures. What is not a reward, such as None or
        NaN, ends the run.
        """

    def gold_response(self, problem: Problem) -> str:
        """Return the problem's `answer`, if its verifier data has one."""
        answer = problem.golden.get("answer")
        return super().gold_response(problem) if answer is None else str(answer)

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        results = await self._answer(
            request.problem,
            GenerationRequest(
                self.tokenizer.encode(request.problem.prompt),
                request.group_size,
                request.sampling,
                request.key,
                request.ordinal,
            ),
            request.inference,
            request.limits,
        )
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        failures = Counter(result for result in results if isinstance(result, str))
        lost = tuple(sample for sample, result in enumerate(results) if isinstance(result, str))
        return TrajectoryGroup(request.ordinal or 0, request.problem, trajectories, failures, lost=lost)

    async def _answer(
        self, problem: Problem, request: GenerationRequest, inference: InferenceInterface, limits: RolloutLimits
    ) -> list[Trajectory | str]:
        """Return each sample's scored answer, or the reason why it is lost. The first turns of all samples share one
        request."""
        began = time.monotonic()
        try:
            completions = await run_within_limit(lambda: inference.generate(request.again()), limits)
        except RolloutTimeout as error:
            return [str(error)] * request.num_samples
        spent_s = time.monotonic() - began
        return await self._results(problem, request, completions, inference, limits, spent_s)

    async def _results(
        self,
        problem: Problem,
        request: GenerationRequest,
        completions: Sequence[Completion],
        inference: InferenceInterface,
        limits: RolloutLimits,
        spent_s: float,
    ) -> list[Trajectory | str]:
        """Return each answer with its score, or the reason why it is lost. spent_s: seconds of its limit that are spent
        already."""
        rollouts = [
            partial(self._rollout, problem, request, sample, completion, inference, limits)
            for sample, completion in enumerate(completions)
        ]
        if not self._waits():
            return [await rollout() for rollout in rollouts]  # scoring is synchronous: tasks would only cost time
        import asyncio  # slow import; the launcher imports this module to check a recipe

        return await asyncio.gather(*(or_why_not(rollout, limits, spent_s) for rollout in rollouts))

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        return await self._answer_score(problem, answer.responses[-1], answer.finish_reason, limits)

    def _waits(self) -> bool:
        """Whether a rollout awaits anything after its first turn."""
        return iscoroutinefunction(self.get_reward)

    async def _rollout(
        self,
        problem: Problem,
        request: GenerationRequest,
        sample: int,
        completion: Completion,
        inference: InferenceInterface,
        limits: RolloutLimits,
    ) -> Trajectory | str:
        text = self.tokenizer.decode(completion.tokens)
        found = await self._answer_score(problem, text, completion.finish_reason, limits)
        if isinstance(found, str):
            return found
        of_score = (found.reward, found.components, found.output)
        try:
            single = Trajectory.single(request.prompt_tokens, completion, text, *of_score)
            return single.with_turn_scores(found.turns)
        except WrongReward as error:
            raise self._wrong(error, self.get_reward, problem, text) from error

    async def _answer_score(
        self, problem: Problem, text: str, finish_reason: FinishReason, limits: RolloutLimits
    ) -> CheckedReward | str:
        """Return the score of one answer, or the reason if it is lost. Raises ConfigurationError."""
        return await self._scored(partial(self.get_reward, text, problem.golden, finish_reason), problem, text, limits)

    async def _scored(
        self, score: partial[Any], problem: Problem, text: str, limits: RolloutLimits
    ) -> CheckedReward | str:
        """Return what a method returns for an answer, or the reason if it is lost. Raises ConfigurationError if the
        method returns something that is not a reward."""
        method = score.func
        try:
            found = await score_answer(score, limits)
        except WrongReward as error:
            raise self._wrong(error, method, problem, text) from error
        return self._reason(method.__name__, found, problem, text) if isinstance(found, Exception) else found

    def _wrong(self, error: WrongReward, method: Callable[..., Any], problem: Problem, text: str) -> ConfigurationError:
        """Return the error for what a method returned that is not a reward, with the method's place."""
        returned = f"{method.__name__} returned {error}"
        return ConfigurationError(f"{where_defined(method)}: {returned} {of_answer(problem, text)}")

    def _reason(self, method: str, error: Exception, problem: Problem, text: str) -> str:
        """Return a short reason for the record, with the location in the task's code. The first error at each location
        is logged with its traceback."""
        place = task_location(error).partition(": ")[0]
        kind = f"{method} at {place}: " if place else f"{method}: "
        kind += type(error).__name__
        return self._lost(kind, f"{kind}: {error}", task_traceback(error), problem, text, error)

    def _lost(
        self, kind: str, reason: str, trace: str, problem: Problem, text: str, error: Exception | None = None
    ) -> str:
        """Return a short reason for the record. The first loss of each kind is logged with its traceback.

        Args:
            kind: beginning of the reason, the same for all answers with the same fault.
            error: what was raised, if it was raised in this process.
        """
        if kind not in self._traces:
            self._traces[kind] = trace
            below = f"\n{trace}" if error is None and trace else ""
            logger.error("no score for the answer %r to %r: %s%s", text, problem.prompt, reason, below, exc_info=error)
        return reason.partition("\n")[0][:200]

    def tracebacks(self) -> Mapping[str, str]:
        return self._traces


def of_answer(problem: Problem, text: str) -> str:
    return f"(for the answer {text!r:.{SHOWN}} to {problem.prompt!r:.{SHOWN}})"


async def or_why_not(
    rollout: Callable[[], Awaitable[Trajectory | str]], limits: RolloutLimits, spent_s: float
) -> Trajectory | str:
    try:
        return await run_within_limit(rollout, limits, spent_s)
    except RolloutTimeout as error:
        return str(error)
