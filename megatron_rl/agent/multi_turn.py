"""Multi-turn tasks: the environment replies to the model until the conversation is over."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import isawaitable
from typing import Any

from megatron_rl.agent.keys import turn_key
from megatron_rl.agent.recorded_answers import RecordedAnswer
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.reward_value import Reward, WrongReward
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits, as_task_error, await_score
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryBuilder
from megatron_rl.generate.engine.interface import (
    Completion,
    FinishReason,
    GenerationRequest,
    InferenceInterface,
    PromptTooLong,
)
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import conversation_of
from megatron_rl.model.chat.messages import Message, ToolCall
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.chat_section import ChatConfig

Reply = str | Sequence[Message] | None
"""Messages to the model, which its chat template renders; or a text that is appended as it is, for a model without one;
or None if the conversation is over."""


@dataclass(frozen=True, slots=True)
class Turn:
    text: str
    calls: Sequence[ToolCall] | None = None
    """Tool calls in it; None if no tools are offered."""


class ConversationAgent(RewardOnlyAgent):
    """An environment that replies to the model.

    A conversation ends when `reply` returns None, after `max_turns`, or when another turn does not fit; it is then
    scored as it is. It is one sequence of tokens: what the model sampled stays as it is, earlier reasoning too, and
    only its own tokens are trained on.
    """

    several_turns = True

    max_turns: int = 8

    def __init__(self, config: Any, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.chat = Chat(tokenizer, config.chat_template if isinstance(config, ChatConfig) else None)
        self.chat.check(continues=True)

    @property
    def offers(self) -> Sequence[Mapping[str, Any]]:
        return ()

    @abstractmethod
    def reply(self, turns: Sequence[Turn], golden: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Return the reply to the model's turns so far. An exception loses this conversation only."""

    @abstractmethod
    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> Reward | Awaitable[Reward]:
        """Return the finite score of a conversation: see `RewardOnlyAgent.get_reward`. As `turn_rewards` it may have
        a reward for each response: see `megatron_rl.agent.reward_value`. finish_reason: of the last response."""

    def get_reward(
        self, response: str, golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> Reward | Awaitable[Reward]:
        return self.get_trajectory_reward([response], golden, finish_reason)

    async def rescore(self, problem: Problem, answer: RecordedAnswer, limits: RolloutLimits) -> CheckedReward | str:
        score = partial(self.get_trajectory_reward, answer.responses, problem.golden, answer.finish_reason)
        return await self._scored(score, problem, answer.responses[-1], limits)

    def turn(self, prompt: list[int], answer: list[int]) -> Turn:
        return Turn(self.tokenizer.decode(answer))

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
        builder = TrajectoryBuilder(request.prompt_tokens)
        turns: list[Turn] = []
        while True:
            prompt = list(builder.tokens)
            builder.add_turn(completion)
            turns.append(self.turn(prompt, completion.tokens))
            if completion.finish_reason == "length" or len(turns) == self.max_turns:
                break
            try:
                reply = self.reply(turns, problem.golden)
                if isawaitable(reply):
                    reply = await await_score(limits.timeout_s, reply, limits)
                if reply is None:
                    break
                builder.add_observation(self._tokens_of(reply, prompt, completion.tokens))
            except BaseException as error:  # noqa: BLE001 - a task's own code may raise anything; it ends no run
                return self._reason("get_observation", as_task_error(error), problem, turns[-1].text)
            key = turn_key(request.key, sample, len(turns))
            next_request = GenerationRequest(list(builder.tokens), 1, request.sampling, key, request.ordinal)
            try:
                [completion] = await inference.generate(next_request)
            except PromptTooLong:
                completion = builder.cut_off()
                break
        responses = [turn.text for turn in turns]
        score = partial(self.get_trajectory_reward, responses, problem.golden, completion.finish_reason)
        found = await self._scored(score, problem, responses[-1], limits)
        if isinstance(found, str):
            return found
        calls = [len(turn.calls) for turn in turns if turn.calls is not None]
        text, of_tools = "\n".join(responses), sum(calls) if calls else None
        try:
            return builder.scored(text, found.reward, of_tools, found.components).with_turn_scores(found.turns)
        except WrongReward as error:
            raise self._wrong(error, score.func, problem, text) from error

    def _tokens_of(self, reply: str | Sequence[Message], prompt: list[int], answer: list[int]) -> list[int]:
        if isinstance(reply, str):
            return self.tokenizer.encode(reply)
        said = conversation_of(reply, self.offers, field="observation")
        extended = self.chat.extend(prompt, answer, said, keep_reasoning=True)
        if extended is None:
            why = self.chat.why_not or "the chat template does not append these messages"
            raise ValueError(f"the conversation cannot go on token for token: {why}")
        return extended[len(prompt) + len(answer) :]


class MultiTurnAgent(ConversationAgent):
    """An environment of problems, a `get_observation` and a `get_trajectory_reward`."""

    @abstractmethod
    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        """Return the reply to the model's last response, as messages such as `[{"role": "user", "content":
        "higher"}]`; or, for a model without a chat template, the text between that response and the next one; or None
        if the conversation is over.

        responses: the model's responses so far, without special tokens. An exception loses this conversation only.
        """

    def reply(self, turns: Sequence[Turn], golden: Mapping[str, Any]) -> Reply | Awaitable[Reply]:
        return self.get_observation([turn.text for turn in turns], golden)
