"""Environments of gymnasium: observed as text, controlled by the last named action, rewarded with the return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from agent_helpers import rolled_out
from optional import needs
from words import Words

from megatron_rl.agent.environments.gym import GymConfig, GymEnvironment
from megatron_rl.generate.engine.scripted import ScriptedInference

pytestmark = needs("gymnasium")

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": MOVES, "episodes": 2, "held_out": 1}


class Lines(Words):
    """Prompt without a chat template: observations are separate lines."""

    def conversation(self, messages: Any, tools: Any = None, variables: Any = None) -> None:
        return None


def build(**arguments: Any) -> GymEnvironment:
    return GymEnvironment(GymConfig.model_validate({**LAKE, **arguments}), Lines())


def play(environment: GymEnvironment, *moves: str) -> Any:
    said = iter(moves)
    [one] = rolled_out(environment, ScriptedInference(Lines(), lambda prompt, sample: next(said))).trajectories
    return one


def test_reaching_the_goal_is_rewarded() -> None:
    environment = build(instruction="Walk!")
    assert environment.training_problems()[0].prompt == "Walk!\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    one = play(environment, "I go down.", "down", "not down but Right", "right", "down", "right")
    assert (one.reward, len(one.turns)) == (1.0, 6)
    assert "(Right)\nSFFF\nFHFH\nF[F]FH\nHFFG\n" in Lines().decode(one.tokens)


def test_without_an_instruction_the_model_is_asked_for_what_is_read() -> None:
    (words, *_), (numbers, *_) = (each.training_problems() for each in (build(), build(actions={})))
    assert words.prompt.startswith("Answer with your next action: left, down, right, up.\n[S]")
    assert numbers.prompt.startswith("Answer with the number of your next action.\n[S]")


def test_turns_have_their_rewards_and_the_observation_before_them_as_key() -> None:
    first, second, third = play(build(invalid_action_reward=-2.5), "down", "left", "swim").turn_scores
    assert [each.reward for each in (first, second, third)] == [0.0, 0.0, -2.5]
    assert first.key == "[S]FFF\nFHFH\nFFFH\nHFFG"
    assert second.key == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG" and third.key == second.key.replace("Down", "Left")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("<v>^", ["v", "I go v", ">", "v>", "not < but v", "3>2"]),
        ("←↓→↑", ["↓", "go↓", "→", "→", "↓", "→"]),
        (["-1", "0", "1", "2"], ["-1", "0", "0.", "1", "not -1 but 1", "0", "1"]),
    ],
)
def test_action_names_may_be_symbols(names: Sequence[str], said: list[str]) -> None:
    assert play(build(actions=dict(zip(names, range(4), strict=True))), *said).reward == 1.0


@pytest.mark.parametrize(
    ("moves", "reward", "turns"),
    [(["down", "right", "up"], 0.0, 2), (["left", "swim", "down"], -2.5, 2), (["left"] * 9, 0.0, 5)],
)
def test_episode_ends_in_a_hole_without_an_action_and_at_the_turn_limit(
    moves: list[str], reward: float, turns: int
) -> None:
    one = play(build(max_turns=5, invalid_action_reward=-2.5), *moves)
    assert (one.reward, len(one.turns)) == (reward, turns)


def test_random_actions_teach_the_format_without_a_chat_template() -> None:
    environment = build(instruction="", kwargs={"is_slippery": False, "render_mode": None}, max_turns=3)
    pairs = environment.demonstrations()
    assert {word for _, word in pairs} <= {*MOVES} and len({word for _, word in pairs}) > 1
    first, second = pairs[:2]
    assert first[0] == "0\n" and second[0].startswith(f"0\n{first[1]}\n") and second[0].endswith("\n")


def test_same_seed_and_actions_are_the_same_episode_and_no_seed_is_in_both_sets() -> None:
    environment = build(kwargs={"is_slippery": True})
    paths = [environment._play(seed, ["down"]) for seed in (*range(9), *range(9))]
    assert paths[:9] == paths[9:] and len({*paths}) > 1
    [held_out] = environment.evaluation_problems()["held_out"]
    assert held_out.golden not in [problem.golden for problem in environment.training_problems()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"id": "FrozenPond-v1"}, "environment.args.id: .*FrozenPond"),
        ({"kwargs": {"slippery": True}}, "gymnasium cannot make FrozenLake-v1: .*slippery"),
        ({"actions": {"up": 3, "Up": 1}}, "give distinct names, not up, Up"),
        ({"actions": {"": 0, "up": 3}}, "an action needs a name"),
        ({"actions": {"jump": 4}}, "environment.args.actions: FrozenLake-v1 has 0 to 3"),
        ({"id": "Pendulum-v1", "kwargs": {}, "actions": {}}, "the actions of Pendulum-v1 are not numbered"),
    ],
)
def test_unknown_environment_or_action_is_rejected(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**arguments)
