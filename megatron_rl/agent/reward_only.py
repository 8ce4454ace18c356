"""Single-turn tasks: answer the prompt, then score each answer with one function."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping
from inspect import isawaitable, iscoroutinefunction
from itertools import count
from typing import Any

from megatron_rl.agent.api import (
    Environment,
    EvaluationRequest,
    EvaluationResponse,
    GroupRolloutRequest,
)
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.inference.api import Completion, FinishReason, GenerationRequest, InferenceInterface, PromptTooLong
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class RewardOnlyAgent(Environment):
    """An environment that is a set of problems and a `get_reward`."""

    def __init__(self, config: Any, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._explained: set[type[Exception]] = set()

    @abstractmethod
    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        """Finite score of one answer; `response` is its text without special tokens.

        `async def` where scoring waits, for another process for example: all answers of a group are then scored at
        once, and `environment.reward_timeout_s` ends the wait. The engine generates in the same event loop, so a plain
        one must be quick.

        Whatever this raises costs that one answer: it is left out of its group and counted among the failures.
        """

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
            request.reward_timeout_s,
        )
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, failures)

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """All problems are handed to the engine at once; it decides how many it answers together."""
        import asyncio  # slow, and the launcher imports this module to check a recipe

        failures: Counter[str] = Counter()

        async def answer(index: int, problem: Problem) -> list[Trajectory]:
            prompt, key = self.tokenizer.encode(problem.prompt), stable_key("evaluation", request.key, index)
            asked = GenerationRequest(prompt, request.samples_per_problem, request.sampling, key)
            try:
                answers, lost = await self._answer(problem, asked, request.inference, request.reward_timeout_s)
            except PromptTooLong as error:
                logger.warning("problem %d of an evaluation counts as lost: %s", index, error)
                answers, lost = [], Counter({"the prompt is too long": request.samples_per_problem})
            failures.update(lost)
            return answers

        answers = await asyncio.gather(*map(answer, count(), request.problems))
        return EvaluationResponse(answers, failures)

    async def _answer(
        self, problem: Problem, request: GenerationRequest, inference: InferenceInterface, timeout_s: float
    ) -> tuple[list[Trajectory], Counter[str]]:
        """Scored answers in sample order, and the number of those lost, by reason."""
        completions = await inference.generate(request)
        scored = [
            self._score(problem, self.tokenizer.decode(completion.tokens), completion, timeout_s)
            for completion in completions
        ]
        if iscoroutinefunction(self.get_reward):
            import asyncio  # as above

            results = await asyncio.gather(*scored)
        else:
            results = [await score for score in scored]  # nothing to wait for: no task for each
        trajectories: list[Trajectory] = []
        failures: Counter[str] = Counter()
        for completion, (text, result) in zip(completions, results, strict=True):
            if isinstance(result, Exception):
                failures[self._reason(result, problem, text)] += 1
            else:
                trajectories.append(Trajectory.single(request.prompt_tokens, completion, text, result))
        return trajectories, failures

    async def _score(
        self, problem: Problem, text: str, completion: Completion, timeout_s: float
    ) -> tuple[str, float | Exception]:
        """The answer's text and its reward, or what scoring it raised."""
        try:
            score = self.get_reward(text, problem.golden, completion.finish_reason)
            reward = float(await _within(timeout_s, score) if isawaitable(score) else score)
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
        except Exception as error:  # noqa: BLE001 - a task's scoring may raise anything; one odd answer ends no run
            return text, error
        return text, reward

    def _reason(self, error: Exception, problem: Problem, text: str) -> str:
        """Short reason for the record; the first error of each type is logged with its traceback."""
        if type(error) not in self._explained:
            self._explained.add(type(error))
            logger.error("get_reward failed on the answer %r to %r", text, problem.prompt, exc_info=error)
        first_line = str(error).partition("\n")[0]
        return f"get_reward: {type(error).__name__}: {first_line}"[:200]


async def _within(timeout_s: float, score: Awaitable[float]) -> float:
    """What is awaited. Raises TimeoutError where that takes too long."""
    import asyncio  # as above

    try:
        async with asyncio.timeout(timeout_s) as clock:
            return await score
    except TimeoutError as error:
        if not clock.expired():
            raise
        raise TimeoutError(f"no score within {timeout_s:g} s (environment.reward_timeout_s)") from error
