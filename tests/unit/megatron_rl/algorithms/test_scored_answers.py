"""The reward of an answer for its advantage: components by weight, then the penalties on its length; and which groups
dynamic sampling keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import tiny_run, trajectory
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.answers import scored_answers, usable, with_components, with_turn_rewards
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.rewards import has_signal, length_rewards
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.training.training_batch import batch_stats, training_batch
from megatron_rl.recipe.config import RunConfig

PENALTY = {"overlong": {"mode": "penalty", "buffer": 4, "penalty": 1.0}}
COMPONENTS = {"right": 1.0, "style": 0.25, "chatter": 7.0}


def configured(environment: dict[str, Any] | None = None, **grpo: Any) -> RunConfig:
    return tiny_run(
        environment={"name": "arithmetic", "args": {"draws": 10}} | (environment or {}),
        grpo={"prompts_per_step": 4, "group_size": 4} | grpo,
        sampling={"max_new_tokens": 8},
    )


def groups(*rewards: list[float], lengths: list[int] | None = None) -> list[TrajectoryGroup]:
    made = []
    for ordinal, of_group in enumerate(rewards):
        answers = [trajectory([1], [2] * length, r) for r, length in zip(of_group, lengths or [3] * 99, strict=False)]
        made.append(TrajectoryGroup(ordinal, Problem("", {}), answers, {}))
    return made


def with_parts(*components: dict[str, float], environment: str = "") -> TrajectoryGroup:
    answers = [replace(trajectory([1], [2], sum(its.values())), components=its) for its in components]
    return TrajectoryGroup(0, Problem("", {}, environment), answers, {})


def signal(of: list[TrajectoryGroup], **grpo: Any) -> list[bool]:
    answers = scored_answers(of, configured(**grpo))
    return has_signal(answers.rewards, answers.group, len(of)).tolist()


def test_the_table_has_a_row_for_each_answer_and_counts_groups_without_answers() -> None:
    first, lost, last = groups([1.0, 0.0], [], [0.5], lengths=[3, 2])
    answers = scored_answers([first, lost, last], configured())
    assert answers.group.tolist() == [0, 0, 2] and answers.num_groups == 3
    assert answers.scored.tolist() == answers.rewards.tolist() == answers.accuracy.tolist() == [1.0, 0.0, 0.5]
    assert answers.tokens.tolist() == [3, 2, 3]
    assert answers.components == answers.component_weights == {}


def test_tokens_are_those_of_the_loss_masks_of_all_sequences() -> None:
    branch = Branch([1, 2, 3], [False, False, True], [0.0, 0.0, -1.0], [-1, -1, 0], [range(2, 3)])
    one = replace(trajectory([1], [2, 2]), branches=(branch,))
    assert scored_answers([TrajectoryGroup(0, Problem("", {}), [one], {})], configured()).tokens.tolist() == [3]


def test_a_penalty_can_create_and_remove_signal() -> None:
    equal, unequal = groups([1.0, 1.0], lengths=[3, 8]), groups([1.0, 0.5], lengths=[6, 4])
    assert signal(equal) == [False] and signal(equal, **PENALTY) == [True]
    assert signal(unequal) == [True] and signal(unequal, **PENALTY) == [False]


def test_the_penalty_depends_on_the_last_turn() -> None:
    (group,) = groups([1.0, 1.0], lengths=[8, 8])
    first, second = group.trajectories
    tokens = [1, *[2] * 7, 9, 2]
    turns = [range(1, 8), range(9, 10)]
    several = replace(first, tokens=tokens, loss_mask=[False] * 10, logprobs=[0.0] * 10, versions=[0] * 10, turns=turns)
    mixed = TrajectoryGroup(0, group.problem, [several, second], {})
    assert scored_answers([mixed], configured(**PENALTY)).rewards.tolist() == [1.0, 0.0]


# Components


def test_the_reward_is_the_weighted_sum_of_the_components_that_have_a_weight() -> None:
    config = configured({"reward_weights": {"right": 1.0, "style": -2.0}})
    answers = scored_answers([with_parts(COMPONENTS)], config)
    assert answers.scored.tolist() == [8.25]
    assert answers.rewards.tolist() == [0.5]
    assert {name: its.tolist() for name, its in answers.components.items()} == {k: [v] for k, v in COMPONENTS.items()}
    assert {name: its.tolist() for name, its in answers.component_weights.items()} == {"right": [1.0], "style": [-2.0]}


def test_accuracy_is_the_component_that_the_recipe_names() -> None:
    assert scored_answers([with_parts(COMPONENTS)], configured({"accuracy": "right"})).accuracy.tolist() == [1.0]


def test_without_a_named_component_accuracy_is_the_reward_that_is_trained_on() -> None:
    right = [{"right": 1.0, "words": words} for words in (10.0, 12.0, 20.0, 11.0)]
    wrong = [{"right": 0.0, "words": words} for words in (5.0, 40.0, 40.0, 40.0)]
    weighted = {"reward_weights": {"right": 1.0}}
    assert scored_answers([with_parts(*right, *wrong)], configured(weighted)).accuracy.tolist() == [1.0] * 4 + [0.0] * 4
    assert not kept(with_parts(*right), weighted), "no answer teaches anything, however many words it has"
    assert kept(with_parts(*right)), "without weights the whole reward counts"


@pytest.mark.parametrize("weights", [[0.01, 0.29, 0.7], [0.01, 0.42, 0.57], [0.5, 0.5, 0.0]])
def test_weights_whose_sum_is_rounded_make_a_right_answer_right(weights: list[float]) -> None:
    parts = dict.fromkeys("abc", 1.0)
    config = configured({"reward_weights": dict(zip(parts, weights, strict=True))})
    assert scored_answers([with_parts(parts)], config).accuracy.tolist() == [1.0]


def test_a_right_answer_by_weight_is_counted_as_one_of_the_step() -> None:
    config = configured({"reward_weights": {"right": 1.0}})
    group = with_parts({"right": 1.0, "words": 9.0}, {"right": 0.0, "words": 1.0}, {"right": 0.0, "words": 1.0})
    batch = training_batch([group], assign_credit([group], config), config, 0, torch.device("cpu"))
    assert batch_stats(batch, RolloutBatch([group], [0], 0, 1), 0, 0).right == 1


@pytest.mark.parametrize("own", [True, False])
def test_members_of_a_combined_environment_have_their_own_components_or_those_of_the_whole(own: bool) -> None:
    keys = {"accuracy": "right"}
    members = [{"name": "arithmetic", "id": "sums", "args": {"draws": 10}, **(keys if own else {})}]
    combined = {"name": "multi-task", "args": {"environments": members}, **({} if own else keys)}
    assert scored_answers([with_parts(COMPONENTS, environment="sums")], configured(combined)).accuracy.tolist() == [1.0]


def test_each_environment_has_its_own_components() -> None:
    listed = [
        {"name": "arithmetic", "id": "sums", "args": {"draws": 10}, "reward_weights": {"right": 2.0}},
        {"name": "arithmetic", "id": "plain", "args": {"draws": 10}},
    ]
    recipe = configured().model_dump() | {"environment": None, "environments": listed}
    own, other = with_parts(COMPONENTS, environment="sums"), groups([0.5])[0]
    other = replace(other, problem=replace(other.problem, environment="plain"))
    answers = scored_answers([own, other], RunConfig.model_validate(recipe))
    assert answers.rewards.tolist() == [2.0, 0.5]
    assert answers.component_weights["right"].tolist() == [2.0, 0.0]
    assert answers.components["right"][0] == 1.0 and math.isnan(answers.components["right"][1])


def test_an_answer_without_rewards_by_turn_is_lost_and_counted() -> None:
    (group,) = groups([1.0, 0.0, 0.5])
    first, second, third = group.trajectories
    scored = [one.with_turn_scores((TurnScore(one.reward),)) for one in (first, third)]
    whole = replace(group, trajectories=scored)
    assert with_turn_rewards(whole) is whole
    found = with_turn_rewards(replace(group, trajectories=[scored[0], second, scored[1]], failures={"timeout": 1}))
    assert found.trajectories == scored
    assert found.failures == {"timeout": 1, "the reward has no turn_rewards (grpo.turn_discount)": 1}
    assert (found.lost, found.samples) == ((1,), [0, 2]), "each answer keeps the number of its sample"
    assert with_turn_rewards(replace(group, lost=(0,))).lost == (0, 1, 2, 3)


def test_an_answer_without_a_component_that_is_read_is_lost_and_counted() -> None:
    whole, partial = COMPONENTS, {"right": 1.0}
    group = replace(with_parts(whole, partial, whole), failures={"timeout": 1})
    assert with_components(group, {"right"}) is group
    kept = with_components(group, {"right", "style"})
    assert [each.components for each in kept.trajectories] == [whole, whole]
    reason = "the reward has no component style (environment.reward_weights, accuracy)"
    assert kept.failures == {"timeout": 1, reason: 1}


# Length


def test_right_answers_earn_by_being_short_and_wrong_ones_only_lose_by_being_long() -> None:
    lengths, right = torch.tensor([10, 20, 30, 10, 20, 30]), torch.tensor([True] * 3 + [False] * 3)
    found = length_rewards(lengths, right, torch.zeros(6, dtype=torch.long), 1)
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5]


@given(st.lists(st.tuples(st.integers(0, 50_000), st.booleans(), st.integers(0, 2)), max_size=12))
def test_the_length_reward_equals_kimis_definition_in_float64(rows: list[tuple[int, bool, int]]) -> None:
    lengths, right, group = (torch.tensor([row[i] for row in rows]) for i in range(3))
    expected = []
    for length, is_right, its in rows:
        of_group = [row[0] for row in rows if row[2] == its]
        shortest, longest = min(of_group), max(of_group)
        share = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
        expected.append(share if is_right else min(0.0, share))
    found = length_rewards(lengths.long(), right.bool(), group.long(), 3)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_length_penalty_is_added_by_its_weight_and_reads_the_accuracy() -> None:
    long, short = groups([1.0, 0.5], lengths=[6, 2])[0].trajectories
    parts: list[Trajectory] = [replace(long, components={"right": 0.0}), replace(short, components={"right": 1.0})]
    group = TrajectoryGroup(0, Problem("", {}), parts, {})
    by_reward = scored_answers([group], configured(length_penalty=0.2)).rewards
    by_component = scored_answers([group], configured({"accuracy": "right"}, length_penalty=0.2)).rewards
    torch.testing.assert_close(by_reward, torch.tensor([0.9, 0.5], dtype=torch.float64))
    torch.testing.assert_close(by_component, torch.tensor([0.9, 0.6], dtype=torch.float64))


# Dynamic sampling


def kept(group: TrajectoryGroup, environment: dict[str, Any] | None = None, **grpo: Any) -> bool:
    dynamic = {"enabled": True} | grpo.pop("dynamic_sampling", {})
    return usable(group, configured(environment, dynamic_sampling=dynamic, **grpo))


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    assert all(usable(group, configured()) for group in groups([0.0, 0.0], []))


def test_groups_are_kept_by_accuracy_whatever_penalties_make_of_their_rewards() -> None:
    (wrong,) = groups([0.0, 0.0], lengths=[3, 8])
    assert signal([wrong], **PENALTY) == [True]
    assert not kept(wrong, **PENALTY)
    (cancelled,) = groups([1.0, 0.5], lengths=[6, 4])
    assert signal([cancelled], **PENALTY) == [False]
    assert kept(cancelled, **PENALTY)


def test_groups_are_kept_by_the_component_that_says_how_right_they_are() -> None:
    styled = with_parts({"right": 0.0, "style": 0.5}, {"right": 0.0, "style": 0.0})
    assert kept(styled)
    assert not kept(styled, {"accuracy": "right"})


@pytest.mark.parametrize(
    ("rewards", "expected"), [([0, 0, 0, 1], False), ([0, 0, 1, 1], True), ([0, 1, 1, 1], True), ([1, 1, 1, 1], False)]
)
def test_limits_of_the_mean_accuracy_are_inclusive(rewards: list[float], expected: bool) -> None:
    (group,) = groups(rewards)
    assert kept(group, dynamic_sampling={"min_accuracy": 0.5, "max_accuracy": 0.75}) == expected


# Recipes that contradict themselves


@pytest.mark.parametrize(
    ("grpo", "message"),
    [
        ({"baseline": "maxrl"}, "divides by the mean of the group, and advantage_std is population: set it to none"),
        ({"baseline": "pass_at_k"}, "needs pass_k from 2 to group_size 4; it is None"),
        ({"baseline": "pass_at_k", "pass_k": 5}, "needs pass_k from 2 to group_size 4; it is 5"),
        ({"baseline": "pass_at_k", "pass_k": 2, "advantage_std": "sample"}, "set it to population or none"),
        ({"pass_k": 2}, "baseline group does not read it"),
        ({"baseline": "per_reward", "advantage_std": "none"}, "set it to population or sample"),
        ({"baseline": "per_reward"}, "needs reward_weights of environment 'arithmetic'"),
        ({"baseline": "maxrl", "advantage_std": "none", "length_penalty": 0.1}, "length_penalty would spoil"),
        ({"baseline": "maxrl", "advantage_std": "none", **PENALTY}, "overlong.mode penalty would spoil"),
        ({"baseline": "batch", "advantage_std_of": "batch"}, "normalises over the step already"),
        ({"advantage_std": "none", "advantage_std_of": "batch"}, "nothing divides"),
        ({"batch_over": "tokens"}, "nothing is taken over the step"),
        ({"advantage_std": False}, "false of earlier recipes is none"),
        ({"dynamic_sampling": {"min_accuracy": 0.2}}, "min_accuracy is set, and enabled is false"),
        (
            {"dynamic_sampling": {"enabled": True, "min_accuracy": 0.8, "max_accuracy": 0.2}},
            "min_accuracy 0.8 is above max_accuracy 0.2",
        ),
    ],
)
def test_contradictions_are_refused_with_the_key(grpo: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        configured(**grpo)


@pytest.mark.parametrize("keys", [{"reward_weights": {"right": 0.0}}, {"reward_weights": {}}, {"accuracy": "reward"}])
def test_component_names_that_say_nothing_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="leave the key out"):
        configured(keys)
