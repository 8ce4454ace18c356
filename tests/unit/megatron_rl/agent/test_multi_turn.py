"""Conversations between a model and an environment: their end, their trained tokens, and errors that lose one of
them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agent_helpers import LIMITS, rolled_out
from chat_templates import CHATML, tokenizer_of
from words import Words

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.multi_turn import MultiTurnAgent, Reply
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import Section


class Guess(MultiTurnAgent):
    """Replies higher or lower until the number is found."""

    Config = Section
    max_turns = 3

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("?", {"number": 5})]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    async def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        guess = int(responses[-1])
        return None if guess == golden["number"] else "higher" if guess < golden["number"] else "lower"

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float:
        return float(responses[-1] == "5" and finish_reason == "stop") / len(responses)


def converse(agent: Guess, answers: Mapping[str, str], size: int = 1, longest: int | None = None) -> TrajectoryGroup:
    """answers: answer to each text of the conversation so far; sample i answers `start` + i first."""
    engine = ScriptedInference(
        Words(), lambda prompt, sample: answers.get(f"{prompt}{sample}", answers.get(prompt, "5")), longest
    )
    request = GroupRolloutRequest(7, *agent.training_problems(), size, Sampling(max_new_tokens=4), 3, engine, LIMITS)
    return asyncio.run(agent.group_rollout(request))


AGENT = Guess(Section(), Words())
END = "\0"


def test_conversation_ends_without_observation_and_trains_only_on_the_models_tokens() -> None:
    [one] = converse(AGENT, {"?": "2", "?2higher": "8", "?2higher8lower": "5"}).trajectories
    assert Words().decode(one.tokens) == "?2higher8lower5"
    sampled = [token for token, trained in zip(one.tokens, one.loss_mask, strict=True) if trained]
    assert "".join(map(chr, sampled)) == f"2{END}8{END}5{END}"
    assert (len(one.turns), one.text, one.reward) == (3, "2\n8\n5", pytest.approx(1 / 3))


def test_samples_diverge_and_keep_the_order_of_the_first_turn() -> None:
    group = converse(AGENT, {"?0": "5", "?1": "9", "?9lower": "5"}, size=2)
    assert [(one.text, one.reward) for one in group.trajectories] == [("5", 1.0), ("9\n5", 0.5)]


def test_number_and_length_of_turns_are_limited() -> None:
    [one] = converse(AGENT, dict.fromkeys(["?", "?2higher", "?2higher2higher"], "2")).trajectories
    assert (one.text, one.reward, one.finish_reason) == ("2\n2\n2", 0.0, "stop")
    [one] = converse(AGENT, {"?": "2", "?2higher": "55555"}).trajectories
    assert (one.text, one.finish_reason) == ("2\n5555", "length")


def test_conversation_without_room_for_another_turn_is_scored_as_it_is() -> None:
    [one] = converse(AGENT, {"?": "2"}, longest=8).trajectories
    assert (one.text, one.reward, one.finish_reason) == ("2", 0.0, "length"), "it counts as cut off"


def test_error_of_the_environment_loses_one_conversation() -> None:
    group = converse(AGENT, {"?0": "no", "?1": "5"}, size=2)
    assert [one.reward for one in group.trajectories] == [1.0]
    ((reason, lost),) = group.failures.items()
    assert reason.startswith("get_observation at test_multi_turn.py:") and lost == 1
    assert reason.endswith(": ValueError: invalid literal for int() with base 10: 'no'")


def test_conversation_over_its_limit_restarts_alone_from_its_first_turn() -> None:
    stuck: list[str] = []

    class Stuck(Guess):
        async def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
            said = await super().get_observation(responses, golden)
            if responses == ["2"] and not stuck:
                stuck.append(responses[0])
                await asyncio.Event().wait()
            return said

    agent = Stuck(Section(), Words())
    engine = ScriptedInference(Words(), lambda prompt, sample: "5" if "2" in prompt else "25"[sample])
    group = rolled_out(agent, engine, 2, limits=RolloutLimits(30.0, 1, rollout_s=0.5))
    assert [one.text for one in group.trajectories] == ["2\n5", "5"] and not group.failures
    assert len(engine.requests) == 2, "the first turn is had once"


class Asking(Guess):
    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> Reply:  # type: ignore[override]
        return [{"role": "user", "content": "higher<|im_end|>"}] if len(responses) == 1 else None


def test_a_reply_in_messages_continues_the_tokens_of_the_conversation() -> None:
    tokenizer = tokenizer_of(CHATML)
    agent = Asking(Section(), tokenizer)
    engine = ScriptedInference(tokenizer, lambda prompt, sample: "5" if "higher" in prompt else "<think>2</think>")
    [one] = rolled_out(agent, engine).trajectories
    first, second = one.turns
    between = tokenizer.decode(one.tokens[first.stop : second.start], special=True)
    assert between == "\n<|im_start|>user\nhigher<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert one.tokens[first.stop : second.start].count(tokenizer.eos_id) == 1, "text of the environment stays text"
    assert (one.text, one.reward, one.tool_calls) == ("<think>2</think>\n5", 0.5, None)


def test_a_reply_that_the_template_refuses_loses_one_conversation() -> None:
    refuses = CHATML.replace("<|im_start|>{{", "{{ raise_exception('no') if message.content != '?' }}{{")
    agent = Asking(Section(), tokenizer_of(refuses))
    group = rolled_out(agent, ScriptedInference(agent.tokenizer, ["2"]))
    assert not group.trajectories and "the model's chat template refuses the messages: no" in next(iter(group.failures))
