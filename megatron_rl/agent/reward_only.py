"""Single-turn tasks: answer the prompt, then score each answer with one function."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping
from inspect import isawaitable, iscoroutinefunction
from typing import Any

from megatron_rl.agent.api import (
    Environment,
    EvaluationRequest,
    EvaluationResponse,
    GroupRolloutRequest,
)
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.inference.api import Completion, FinishReason, GenerationRequest, InferenceInterface
from megatron_rl.inference.config import Sampling
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rollout.stream import stable_key

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
        once. The engine generates in the same event loop, so a plain one must be quick.

        Whatever this raises costs that one answer: it is left out of its group and counted among the failures.
        """

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        trajectories, failures = await self._answer(
            request.problem, request.group_size, request.sampling, request.key, request.inference
        )
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, failures)

    async def evaluate(self, request: EvaluationRequest) -> EvaluationResponse:
        """All problems are handed to the engine at once; it decides how many it answers together."""
        import asyncio  # slow, and the launcher imports this module to check a recipe

        answered = await asyncio.gather(
            *(
                self._answer(
                    problem,
                    request.samples_per_problem,
                    request.sampling,
                    stable_key("evaluation", request.key, index),
                    request.inference,
                )
                for index, problem in enumerate(request.problems)
            )
        )
        return EvaluationResponse([trajectories for trajectories, _ in answered])

    async def _answer(
        self, problem: Problem, samples: int, sampling: Sampling, key: int, inference: InferenceInterface
    ) -> tuple[list[Trajectory], Counter[str]]:
        """Scored answers in sample order, and the number of those lost, by reason."""
        prompt_tokens = self.tokenizer.encode(problem.prompt)
        completions = await inference.generate(GenerationRequest(prompt_tokens, samples, sampling, key))
        scored = [
            self._score(problem, self.tokenizer.decode(completion.tokens), completion) for completion in completions
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
                trajectories.append(Trajectory.single(prompt_tokens, completion, text, result))
        return trajectories, failures

    async def _score(self, problem: Problem, text: str, completion: Completion) -> tuple[str, float | Exception]:
        """The answer's text and its reward, or what scoring it raised."""
        try:
            score = self.get_reward(text, problem.golden, completion.finish_reason)
            reward = float(await score if isawaitable(score) else score)
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
