"""Rewards by turn, from the value that scoring returns to the turns of the answer; errors name their entry."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from agent_helpers import LIMITS
from endpoint_helpers import USER, Opened, with_session
from words import Words

from megatron_rl.agent.api import GroupRolloutRequest
from megatron_rl.agent.environments.program.reward_line import NoReward, reward_in
from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.reward_value import TurnScore, WrongReward
from megatron_rl.agent.scoring import CheckedReward
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.generate.engine.scripted import ScriptedInference
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling
from megatron_rl.recipe.section import Section

LONG = "x" * 65


def test_entries_are_numbers_or_have_a_key_and_an_agent() -> None:
    found = CheckedReward.of({"reward": 2.0, "style": 0.5, "turn_rewards": [True, {"reward": 0.25, "key": 7}]})
    assert (found.reward, found.components) == (2.0, {"style": 0.5})
    assert found.turns == (TurnScore(1.0, None, "", 0), TurnScore(0.25, "7", "", 1))
    named = CheckedReward.of({"turn_rewards": [{"reward": 1, "agent": "a"}, {"reward": 0, "agent": "b", "key": LONG}]})
    assert [each.agent for each in named.turns] == ["a", "b"]
    assert len(named.turns[1].key or "") == 16, "a long key becomes a digest"


def test_the_reward_is_the_sum_of_those_of_the_turns_unless_it_is_given() -> None:
    assert CheckedReward.of({"turn_rewards": [0.5, -0.25], "style": 9.0}).reward == 0.25
    assert CheckedReward.of({"turn_rewards": [0.5, -0.25], "reward": 9.0}).reward == 9.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (1.0, r"turn_rewards 1.0: give a list with an entry for each turn"),
        ([], r"turn_rewards \[\] \(list\): give a list"),
        ([0, "1"], r"turn_rewards\[1\] = '1' \(str\): return a number"),
        ([0, float("nan")], r"turn_rewards\[1\] = nan"),
        ([{"key": "a"}], r"turn_rewards\[0\].reward = None"),
        ([{"reward": 1, "agnt": "a"}], r"turn_rewards\[0\] with 'agnt' \(str\): a turn has reward, key, agent"),
        ([{"reward": 1, "key": 1.5}], r"turn_rewards\[0\].key = 1.5: give a text or an integer"),
        ([{"reward": 1, "agent": "a b"}], r"turn_rewards\[0\].agent = 'a b' \(str\): a name consists of letters"),
        ([{"reward": 1, "agent": "a"}, 0], r"turn_rewards\[1\] without an agent, where other turns have one"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(given: Any, message: str) -> None:
    with pytest.raises(WrongReward, match=message):
        CheckedReward.of({"reward": 1.0, "turn_rewards": given})


class Twice(MultiTurnAgent):
    """Asks twice, and rewards each response that is right."""

    Config = Section

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("?", {"rewards": None})]

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        return {}

    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        return "again" if len(responses) == 1 else None

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> dict[str, Any]:
        return {"turn_rewards": golden["rewards"] or [float(each == "5") for each in responses]}


def converse(golden: Mapping[str, Any]) -> list[Trajectory]:
    engine = ScriptedInference(Words(), lambda prompt, sample: "5" if "again" in prompt else "4")
    request = GroupRolloutRequest(7, Problem("?", golden), 1, Sampling(max_new_tokens=4), 3, engine, LIMITS)
    return asyncio.run(Twice(Section(), Words()).group_rollout(request)).trajectories


def test_a_conversation_of_ours_reports_rewards_by_turn() -> None:
    [one] = converse({"rewards": None})
    assert one.reward == 1.0 and len(one.turns) == 2
    assert one.turn_scores == (TurnScore(0.0, number=0), TurnScore(1.0, number=1))


def test_another_number_of_rewards_than_turns_ends_the_run_with_the_place_of_the_method() -> None:
    message = r"test_turn_rewards.py:\d+: get_trajectory_reward returned turn_rewards of 3 entries for 2 turns"
    with pytest.raises(ConfigurationError, match=message):
        converse({"rewards": [0, 0, 1]})


def test_a_token_outside_of_the_turns_cannot_be_trained_by_turn() -> None:
    part = Branch([1, 2, 3], [False, True, True], [0.0] * 3, [0] * 3, [range(1, 2)])
    with pytest.raises(ValueError, match="a token is trained on that belongs to no turn"):
        Trajectory.of_sequences([part], "", 0.0, "stop").with_turn_scores((TurnScore(1.0),))


# Programs


def test_a_programs_line_has_the_rewards_of_its_turns() -> None:
    assert reward_in('{"reward": 1, "turn_rewards": [0, 1], "note": "x"}') == {"reward": 1.0, "turn_rewards": [0, 1]}
    assert reward_in('{"turn_rewards": [{"reward": 1, "key": "a"}]}') == {"turn_rewards": [{"reward": 1, "key": "a"}]}
    with pytest.raises(NoReward, match=r"no reward: the reward is turn_rewards\[1\] = None"):
        reward_in('{"reward": 1, "turn_rewards": [0, null]}')
    with pytest.raises(NoReward, match="two rewards"):
        reward_in('{"turn_rewards": [0, 1]}\n{"turn_rewards": [1, 0]}')
    with pytest.raises(NoReward, match="its last line must be"):
        reward_in('{"reward": "1", "turn_rewards": [0]}')


def test_rewards_follow_the_programs_calls_into_the_branches_that_train_them() -> None:
    """The helper's conversation, which is another branch, comes between two calls of the main one."""

    async def program(one: Opened) -> None:
        async def ask(*messages: Any) -> Any:
            response = await one.openai.chat.completions.create(model="policy", messages=[*messages])
            return response.choices[0].message

        first = await ask(USER)
        helper = await ask({"role": "user", "content": "help"})
        await ask(USER, first, {"role": "user", "content": helper.content or ""})
        await ask({"role": "user", "content": "in short"})
        given = [{"reward": at, "agent": "main" if at % 2 == 0 else "helper"} for at in range(4)]
        found = one.session.trajectory(CheckedReward.of({"turn_rewards": given}))
        trained = [
            one.tokenizer.decode(sequence.tokens[turn.start : turn.stop])
            for sequence in found.sequences
            for turn in sequence.turns
        ]
        assert dict(zip(trained, found.turn_scores, strict=True)) == {
            "one": TurnScore(0.0, None, "main", 0),
            "two": TurnScore(1.0, None, "helper", 1),
            "three": TurnScore(2.0, None, "main", 2),
            "four": TurnScore(3.0, None, "helper", 3),
        }
        assert trained != ["one", "two", "three", "four"], "branches are not in the order of time"
        with pytest.raises(WrongReward, match="turn_rewards of 1 entry for 4 turns of the model"):
            one.session.trajectory(CheckedReward.of({"turn_rewards": [1]}))

    left = iter(("one", "two", "three", "four"))
    with_session(program, lambda prompt, sample: next(left))


def test_checked_rewards_are_json_for_the_process_that_scores() -> None:
    from megatron_rl.agent.reward_value import checked_reward

    given = {"reward": 1, "turn_rewards": [0, {"reward": 1, "key": LONG, "agent": "a"}][1:]}
    once = json.loads(json.dumps(checked_reward(given)))
    assert checked_reward(once) == once
    assert CheckedReward.of(once) == CheckedReward.of(given)
