"""Several algorithms in one step: each environment's answers have the credit that they would have alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import random_groups, tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import usable
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.learn.rollout.step_advantages import Table, of_positions, of_tables
from megatron_rl.recipe.config import RunConfig

OWN: list[dict[str, Any]] = [
    {"baseline": "leave_one_out", "advantage_std": "none"},
    {"baseline": "batch"},
    {"advantage_std_of": "batch", "batch_over": "tokens"},
    {"baseline": "maxrl", "advantage_std": "none"},
    {"length_penalty": 0.5},
    {"overlong": {"mode": "penalty", "buffer": 4, "penalty": 0.5}},
    {"overlong": {"mode": "mask"}},
    {"kl_beta": 0.1},
]
ALGORITHMS = st.lists(st.sampled_from([None, *OWN]), min_size=3, max_size=3)
GROUPS = random_groups(6, 4, seed=2)


def configured(own: list[dict[str, Any] | None], **grpo: Any) -> RunConfig:
    listed = [{"name": "arithmetic", "id": f"e{at}", "grpo": its} for at, its in enumerate(own)]
    base = alone(grpo).model_dump() | {"environment": None, "environments": listed}
    return RunConfig.model_validate(base)


def alone(grpo: dict[str, Any]) -> RunConfig:
    return tiny_run(grpo={"prompts_per_step": 6, "group_size": 4} | grpo, sampling={"max_new_tokens": 7})


def groups_of(ids: list[int]) -> list[TrajectoryGroup]:
    """Groups of these environments."""
    return [
        replace(group, problem=replace(group.problem, environment=f"e{id}"))
        for group, id in zip(GROUPS, ids, strict=True)
    ]


IDS = st.lists(st.integers(0, 2), min_size=6, max_size=6)


@given(own=ALGORITHMS, ids=IDS)
def test_each_environment_has_the_credit_that_it_would_have_alone(
    own: list[dict[str, Any] | None], ids: list[int]
) -> None:
    config = configured(own)
    credit = assign_credit(groups_of(ids), config)
    shared = [at for at, its in enumerate(own) if its is None]  # environments under `grpo` are one
    for at, its in enumerate(own):
        together = [group for group, id in zip(GROUPS, ids, strict=True) if id == at or {at, id} <= {*shared}]
        expected = assign_credit(together, alone(its or {}))
        rows = torch.tensor([id == at or {at, id} <= {*shared} for id in ids])[credit.group]
        assert torch.equal(credit.advantages[rows], expected.advantages)
        assert torch.equal(credit.carries_loss[rows], expected.carries_loss)
        assert [one for one, row in zip(credit.has_gradient, rows, strict=True) if row] == expected.has_gradient


@given(own=ALGORITHMS, ids=IDS, owners=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_the_split_over_drivers_changes_no_bit(
    own: list[dict[str, Any] | None], ids: list[int], owners: list[int]
) -> None:
    config, groups = configured(own), groups_of(ids)
    tables = [
        Table.of({at: group for at, group in enumerate(groups) if owners[at] == driver}, config) for driver in range(3)
    ]
    of_step = of_tables([Table.decoded(each.encoded()) for each in tables], config.algorithms.each)
    known = of_positions(of_step, range(6))
    assert known is not None
    assert torch.equal(assign_credit(groups, config, known).advantages, assign_credit(groups, config).advantages)


def test_credit_by_turn_is_the_same_where_a_group_arrives_from_another_driver() -> None:
    """Its answers come with advantages over the step, since another environment compares over the step."""
    groups = [
        replace(each, trajectories=[one.with_turn_scores((TurnScore(one.reward / 2),)) for one in each.trajectories])
        for each in groups_of([0, 1, 0, 1, 0, 1])
    ]
    config = configured([{"turn_discount": 0.9}, {"baseline": "batch"}, None])
    here = assign_credit(groups, config)
    of_step = of_tables([Table.of(dict(enumerate(groups)), config)], config.algorithms.each)
    for first in range(6):
        known = of_positions(of_step, [first])
        there = assign_credit([groups[first]], config, known)
        assert here.of_spans is not None and (there.of_spans is None) == bool(first % 2)
        rows = here.group == first  # each answer is one turn
        assert torch.equal(there.advantages if there.of_spans is None else there.of_spans, here.of_spans[rows])


def test_dynamic_sampling_keeps_by_the_limits_of_the_environment() -> None:
    easy = replace(GROUPS[0], trajectories=[replace(one, reward=1.0) for one in GROUPS[0].trajectories])
    first = replace(easy.trajectories[0], reward=0.0)
    mixed = replace(easy, trajectories=[first, *easy.trajectories[1:]])
    of = [replace(mixed, problem=replace(mixed.problem, environment=f"e{at}")) for at in range(3)]
    config = configured([{"dynamic_sampling": {"enabled": True}}, {"dynamic_sampling": _BELOW}, None])
    assert [usable(each, config) for each in of] == [True, False, True]
    of = [replace(each, trajectories=easy.trajectories) for each in of]
    assert [usable(each, config) for each in of] == [False, False, True]


_BELOW = {"enabled": True, "max_accuracy": 0.5}


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_bonus_of_one_environment_trains_all_of_its_answers_and_no_others(weight: float) -> None:
    groups = groups_of([0, 1, 0, 1, 0, 1])
    equal = [replace(each, trajectories=[replace(one, reward=1.0) for one in each.trajectories]) for each in groups]
    credit = assign_credit(equal, configured([{"entropy_coefficient": 0.1 * weight}, None]))
    assert credit.has_gradient == [weight > 0 and int(group) % 2 == 0 for group in credit.group]


def test_a_driver_without_groups_has_no_credit() -> None:
    assert assign_credit([], configured([None, {"kl_beta": 0.1}])).has_gradient == []
    assert assign_credit([], alone({})).has_gradient == []
