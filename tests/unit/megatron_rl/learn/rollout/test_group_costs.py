"""Cost of a group: the floating-point operations of training on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_helpers import random_groups, tiny_model, tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.trajectories import Branch, TrajectoryGroup
from megatron_rl.algorithms.packing import pack
from megatron_rl.learn.rollout.exchange import group_costs
from megatron_rl.recipe.flops import training_flops

VOCABULARY = 16
SIZED = tiny_model(vocab_size=VOCABULARY).model_dump()
CONFIG = tiny_run(model=SIZED)
GROUPS = st.builds(random_groups, st.integers(1, 3), st.integers(1, 6), st.integers(0, 99), st.integers(1, 40))


def of_micro_batch(group: TrajectoryGroup) -> float:
    """Floating-point operations of all answers of a group, counted on the packed tokens."""
    sequences = [sequence for each in group.trajectories for sequence in each.sequences]
    tokens, masks = [each.tokens for each in sequences], [each.loss_mask for each in sequences]
    (micro,) = pack(tokens, masks, range(len(tokens)), limit=10**9)
    pairs = int((micro.positions + 1).sum())
    return training_flops(
        CONFIG.model, VOCABULARY, tokens=len(micro.tokens), pairs=pairs, predictions=len(micro.targets)
    )


@given(GROUPS)
def test_cost_is_that_of_the_packed_group_if_every_answer_has_a_gradient(groups: list[TrajectoryGroup]) -> None:
    penalised = tiny_run(model=SIZED, grpo={"kl_beta": 0.1})
    assert group_costs(groups, penalised) == pytest.approx([*map(of_micro_batch, groups)])


def test_answers_without_a_gradient_cost_nothing() -> None:
    equal, differing, lost = random_groups(3, 4)
    alike = [replace(each, reward=1.0) for each in equal.trajectories]
    # Advantages of -1, 1 and, at the mean, 0.
    rewards = [replace(each, reward=r) for each, r in zip(differing.trajectories, (0.0, 1.0, 0.5), strict=False)]
    groups = [replace(equal, trajectories=alike), replace(differing, trajectories=rewards)]
    run = replace(differing, trajectories=rewards[:2])
    assert group_costs([*groups, replace(lost, trajectories=[])], CONFIG) == pytest.approx([0, of_micro_batch(run), 0])


def test_branches_of_a_rollout_cost_what_they_add() -> None:
    (group,) = random_groups(1, 4)
    penalised = tiny_run(model=SIZED, grpo={"kl_beta": 0.1})
    branch = Branch([1, 2, 3], [False, False, True], [0.0, 0.0, -1.0], [-1, -1, 0], [range(2, 3)])
    branched = replace(group, trajectories=[replace(each, branches=(branch,)) for each in group.trajectories])
    [cost] = group_costs([branched], penalised)
    assert cost == pytest.approx(of_micro_batch(branched))
    assert cost > of_micro_batch(group)


@given(GROUPS)
def test_negligible_costs_are_upper_bounds(groups: list[TrajectoryGroup]) -> None:
    bounds = group_costs(groups, CONFIG, negligible=1e18)
    assert all(bound >= of_micro_batch(group) for bound, group in zip(bounds, groups, strict=True))
