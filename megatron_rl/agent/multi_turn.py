"""Tasks of several turns: the environment answers what the model says, until it has nothing more to say."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from inspect import isawaitable
from typing import Any

from megatron_rl.agent.keys import turn_key
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.scoring import RolloutLimits, as_task_error, await_score, score_answer
from megatron_rl.agent.trajectories import Conversation, Problem, Trajectory
from megatron_rl.inference.api import Completion, FinishReason, GenerationRequest, InferenceInterface, PromptTooLong


class MultiTurnAgent(RewardOnlyAgent):
    """An environment that is a set of problems, a `get_observation` and a `get_trajectory_reward`.

    A conversation ends with an observation that is None, after `max_turns`, or where no room is left for another turn:
    then its reward is what it deserves so far. Only what the model sampled is trained on.
    """

    max_turns: int = 8
    """Of the model."""

    @abstractmethod
    def get_observation(
        self, responses: Sequence[str], golden: Mapping[str, Any]
    ) -> str | Awaitable[str | None] | None:
        """What comes between the model's last response and its next one, markup of the chat template included (see
        `agent.prompts.next_turn`); None where the conversation is over.

        responses: of the model so far, without special tokens. Whatever this raises costs that one conversation.
        """

    @abstractmethod
    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        """Finite score of a conversation, as `RewardOnlyAgent.get_reward`. finish_reason: of the last response."""

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        """Of a conversation of one response."""
        return self.get_trajectory_reward([response], golden, finish_reason)

    def tool_calls(self, responses: Sequence[str]) -> int | None:
        """How often these responses call tools; None where none are offered."""
        return None

    def _waits(self) -> bool:
        return True

    async def _rollout(
        self,
        problem: Problem,
        request: GenerationRequest,
        sample: int,
        completion: Completion,
        inference: InferenceInterface,
        limits: RolloutLimits,
    ) -> Trajectory | str:
        """A scored conversation, or why it was lost."""
        conversation = Conversation(request.prompt_tokens)
        responses: list[str] = []
        while True:
            conversation.add_turn(completion)
            responses.append(self.tokenizer.decode(completion.tokens))
            if completion.finish_reason == "length" or len(responses) == self.max_turns:
                break
            try:
                observation = self.get_observation(responses, problem.golden)
                if isawaitable(observation):
                    observation = await await_score(limits.timeout_s, observation, limits)
                if observation is None:
                    break
                conversation.add_observation(self.tokenizer.encode(observation))
            except BaseException as error:  # noqa: BLE001 - a task's own code may raise anything; it ends no run
                return self._reason("get_observation", as_task_error(error), problem, responses[-1])
            key = turn_key(request.key, sample, len(responses))
            asked = GenerationRequest(list(conversation.tokens), 1, request.sampling, key, request.ordinal)
            try:
                [completion] = await inference.generate(asked)
            except PromptTooLong:
                completion = conversation.cut_off()
                break
        score = partial(self.get_trajectory_reward, responses, problem.golden, completion.finish_reason)
        found = await score_answer(score, limits)
        if isinstance(found, Exception):
            return self._reason("get_trajectory_reward", found, problem, responses[-1])
        said, calls = "\n".join(responses), self.tool_calls(responses)
        return conversation.scored(said, found.reward, calls, found.components)
