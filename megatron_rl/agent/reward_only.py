"""Single-turn tasks: answer the prompt, then score each answer with one function."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping
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
from megatron_rl.agent.scoring import Patience, scored
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.inference.api import FinishReason, GenerationRequest, InferenceInterface, PromptTooLong
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

        Where this raises it is called again, `environment.reward_retries` times; whatever it raises then costs that one
        answer: it is left out of its group and counted among the failures.
        """

    def gold_response(self, problem: Problem) -> str:
        """The answer under `answer` in what the verifier needs, where it is there."""
        return str(problem.golden["answer"]) if "answer" in problem.golden else super().gold_response(problem)

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
            request.patience,
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
                answers, lost = await self._answer(problem, asked, request.inference, request.patience)
            except PromptTooLong as error:
                logger.warning("problem %d of an evaluation counts as lost: %s", index, error)
                answers, lost = [], Counter({"the prompt is too long": request.samples_per_problem})
            failures.update(lost)
            return answers

        answers = await asyncio.gather(*map(answer, count(), request.problems))
        return EvaluationResponse(answers, failures)

    async def _answer(
        self, problem: Problem, request: GenerationRequest, inference: InferenceInterface, patience: Patience
    ) -> tuple[list[Trajectory], Counter[str]]:
        """Scored answers in sample order, and the number of those lost, by reason."""
        completions = await inference.generate(request)
        texts = [self.tokenizer.decode(completion.tokens) for completion in completions]
        scores = [
            scored(partial(self.get_reward, text, problem.golden, completion.finish_reason), patience)
            for text, completion in zip(texts, completions, strict=True)
        ]
        if iscoroutinefunction(self.get_reward):
            import asyncio  # as above

            results = await asyncio.gather(*scores)
        else:
            results = [await score for score in scores]  # nothing to wait for: no task for each
        trajectories: list[Trajectory] = []
        failures: Counter[str] = Counter()
        for text, completion, result in zip(texts, completions, results, strict=True):
            if isinstance(result, Exception):
                failures[self._reason("get_reward", result, problem, text)] += 1
            else:
                trajectories.append(Trajectory.single(request.prompt_tokens, completion, text, result))
        return trajectories, failures

    def _reason(self, method: str, error: Exception, problem: Problem, text: str) -> str:
        """Short reason for the record; the first error of each type is logged with its traceback."""
        if type(error) not in self._explained:
            self._explained.add(type(error))
            logger.error("%s failed on the answer %r to %r", method, text, problem.prompt, exc_info=error)
        first_line = str(error).partition("\n")[0]
        return f"{method}: {type(error).__name__}: {first_line}"[:200]
