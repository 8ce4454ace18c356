"""Advantages that depend on the whole step are the same, bit for bit, however its groups are split over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import random_groups, tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import scored_answers
from megatron_rl.algorithms.credit import estimate
from megatron_rl.learn.rollout.step_advantages import Table, of_positions, of_tables
from megatron_rl.recipe.config import RunConfig

STYLE = {"name": "arithmetic", "reward_weights": {"right": 1.0, "length": -0.1}}
GROUPS = [
    replace(
        group, trajectories=[replace(t, components={"right": t.reward, "length": float(len(t.tokens))}) for t in its]
    )
    for group in random_groups(6, 5, seed=3)
    for its in [group.trajectories[: 5 - group.ordinal % 3]]
]
RECIPES: list[dict[str, Any]] = [
    {"baseline": "batch"},
    {"baseline": "batch", "batch_over": "tokens", "advantage_std": "sample"},
    {"advantage_std_of": "advantages"},
    {"baseline": "leave_one_out", "advantage_std_of": "batch"},
    {"baseline": "per_reward"},
]


def configured(grpo: dict[str, Any]) -> RunConfig:
    return tiny_run(environment=STYLE, grpo={"prompts_per_step": 6, "group_size": 5} | grpo)


def table(groups: dict[int, TrajectoryGroup], config: RunConfig) -> Table:
    own = Table.of(groups, config)
    return Table.decoded(own.encoded())


@pytest.mark.parametrize("grpo", RECIPES, ids=str)
@given(owners=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_the_split_over_ranks_changes_no_bit(grpo: dict[str, Any], owners: list[int]) -> None:
    config = configured(grpo)
    parts = [
        table({position: GROUPS[position] for position in range(6) if owners[position] == rank}, config)
        for rank in range(4)
    ]
    split = of_tables(parts, config.algorithms.each)
    whole = estimate(scored_answers(GROUPS, config), config.grpo)
    assert [*split] == [*range(6)]
    assert torch.equal(torch.cat([*split.values()]), whole)
    assert whole.any()


def test_a_group_without_answers_has_no_advantages_but_its_place() -> None:
    config = configured({"baseline": "batch"})
    lost = replace(GROUPS[1], trajectories=[])
    found = of_tables([table({1: lost, 0: GROUPS[0]}, config)], config.algorithms.each)
    assert [len(found[position]) for position in (0, 1)] == [len(GROUPS[0].trajectories), 0]


def test_advantages_are_taken_by_position_and_absent_if_each_group_has_its_own() -> None:
    advantages = {0: torch.tensor([1.0]), 1: torch.tensor([2.0, 3.0])}
    found = of_positions(advantages, [1, 0])
    assert found is not None and found.tolist() == [2.0, 3.0, 1.0]
    assert of_positions(advantages, []) is not None
    assert of_positions(None, [0]) is None
