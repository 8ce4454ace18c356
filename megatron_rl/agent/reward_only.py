"""Single-turn tasks: the model answers a prompt, and one function scores each answer."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from inspect import iscoroutinefunction
from itertools import count
from typing import Any

from megatron_rl.agent.api import (
    Environment,
    EvaluationRequest,
    EvaluationResponse,
    GroupRolloutRequest,
)
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.scoring import Reward, RolloutLimits, RolloutTimeout, run_within_limit, score_answer
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.errors import task_location, task_traceback
from megatron_rl.inference.api import Completion, FinishReason, GenerationRequest, InferenceInterface, PromptTooLong
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
        """Return the finite score of one answer, or the components of which it is the sum; each is a metric
        reward/NAME. `response` is the answer's text without special tokens.

        Make it an `async def` if scoring waits, for example for another process: all answers of a group are then scored
        concurrently, and `environment.reward_timeout_s` limits the wait. A plain function must be quick, because the
        engine generates in the same event loop.

        If it raises, it is called again up to `environment.reward_retries` times. After that, any exception loses this
        one answer: it is excluded from its group and counted among the failures.
        """

    def gold_response(self, problem: Problem) -> str:
        """Return the problem's `answer`, if its verifier data has one."""
        answer = problem.golden.get("answer")
        return super().gold_response(problem) if answer is None else str(answer)

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        trajectories, failures = await self._answer(
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
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, failures)

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """Submit all problems to the engine at once; it decides how many to answer concurrently."""
        import asyncio  # slow import; the launcher imports this module to check a recipe

        failures: Counter[str] = Counter()

        async def answer(index: int, problem: Problem) -> list[Trajectory]:
            prompt, key = self.tokenizer.encode(problem.prompt), stable_key("evaluation", request.key, index)
            generation = GenerationRequest(prompt, request.samples_per_problem, request.sampling, key)
            try:
                answers, lost = await self._answer(problem, generation, request.inference, request.limits)
            except PromptTooLong as error:
                logger.warning("problem %d of an evaluation is lost: %s", index, error)
                answers, lost = [], Counter({"the prompt is too long": request.samples_per_problem})
            failures.update(lost)
            return answers

        answers = await asyncio.gather(*map(answer, count(), request.problems))
        return EvaluationResponse(answers, failures)

    async def _answer(
        self, problem: Problem, request: GenerationRequest, inference: InferenceInterface, limits: RolloutLimits
    ) -> tuple[list[Trajectory], Counter[str]]:
        """Return the scored answers in sample order, and the number of lost answers by reason. The first turns of all
        samples share one request."""
        began = time.monotonic()
        try:
            completions = await run_within_limit(lambda: inference.generate(request.again()), limits)
        except RolloutTimeout as error:
            return [], Counter({str(error): request.num_samples})
        spent_s = time.monotonic() - began
        rollouts = [
            partial(self._rollout, problem, request, sample, completion, inference, limits)
            for sample, completion in enumerate(completions)
        ]
        if self._waits():
            import asyncio  # slow import, as above

            results = await asyncio.gather(*(_or_why_not(rollout, limits, spent_s) for rollout in rollouts))
        else:
            results = [await rollout() for rollout in rollouts]  # scoring is synchronous: tasks would only cost time
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        return trajectories, Counter(result for result in results if isinstance(result, str))

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
        """Score a sample whose first turn is complete; return the reason if it is lost."""
        text = self.tokenizer.decode(completion.tokens)
        score = await score_answer(partial(self.get_reward, text, problem.golden, completion.finish_reason), limits)
        if isinstance(score, Exception):
            return self._reason("get_reward", score, problem, text)
        return Trajectory.single(request.prompt_tokens, completion, text, score.reward, score.components)

    def _reason(self, method: str, error: Exception, problem: Problem, text: str) -> str:
        """Return a short reason for the record, with the location in the task's code. The first error at each location
        is logged with its traceback."""
        place = task_location(error).partition(": ")[0]
        kind = f"{method} at {place}: " if place else f"{method}: "
        kind += type(error).__name__
        if kind not in self._traces:
            self._traces[kind] = task_traceback(error)
            logger.error("%s failed on the answer %r to %r", method, text, problem.prompt, exc_info=error)
        first_line = str(error).partition("\n")[0]
        return f"{kind}: {first_line}"[:200]

    def tracebacks(self) -> Mapping[str, str]:
        return self._traces


async def _or_why_not(
    rollout: Callable[[], Awaitable[Trajectory | str]], limits: RolloutLimits, spent_s: float
) -> Trajectory | str:
    try:
        return await run_within_limit(rollout, limits, spent_s)
    except RolloutTimeout as error:
        return str(error)
