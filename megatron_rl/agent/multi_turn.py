"""Multi-turn tasks: the environment replies to the model until the conversation is over."""

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
    """An environment of problems, a `get_observation` and a `get_trajectory_reward`.

    A conversation ends when the observation is None, after `max_turns`, or when another turn does not fit; it is then
    scored as it is. Only the tokens that the model sampled are trained on.
    """

    several_turns = True

    max_turns: int = 8
    """Largest number of turns of the model."""

    @abstractmethod
    def get_observation(
        self, responses: Sequence[str], golden: Mapping[str, Any]
    ) -> str | Awaitable[str | None] | None:
        """Return the text between the model's last response and its next one, including the chat template's markup (see
        `agent.prompts.next_turn`); None if the conversation is over.

        responses: the model's responses so far, without special tokens. An exception loses this conversation only.
        """

    @abstractmethod
    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        """Return the finite score of a conversation: see `RewardOnlyAgent.get_reward`. finish_reason: of the last
        response."""

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float | Awaitable[float]:
        return self.get_trajectory_reward([response], golden, finish_reason)

    def tool_calls(self, responses: Sequence[str]) -> int | None:
        """Return the number of tool calls in these responses; None if no tools are offered."""
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
        """Continue the conversation to its end; return it with its score, or the reason why it is lost."""
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
            next_request = GenerationRequest(list(conversation.tokens), 1, request.sampling, key, request.ordinal)
            try:
                [completion] = await inference.generate(next_request)
            except PromptTooLong:
                completion = conversation.cut_off()
                break
        score = partial(self.get_trajectory_reward, responses, problem.golden, completion.finish_reason)
        found = await score_answer(score, limits)
        if isinstance(found, Exception):
            return self._reason("get_trajectory_reward", found, problem, responses[-1])
        calls = self.tool_calls(responses)
        return conversation.scored("\n".join(responses), found.reward, calls, found.components)
