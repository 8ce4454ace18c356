"""The groups of a batch are shuffled over the optimizer steps of a pass, evenly and identically on every layout."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_rl.algorithms.balance import update_plan

COUNTS = st.integers(0, 200)
UPDATES = st.integers(1, 16)
SEEDS = st.integers(0, 2**63)
STEPS = st.integers(0, 10**6)


@given(COUNTS, UPDATES, SEEDS, STEPS)
def test_every_update_gets_floor_or_ceil_of_the_groups(num_groups, updates, seed, step):
    plan = update_plan(num_groups, updates, seed, step, 0)
    counts = Counter(plan)
    assert len(plan) == num_groups
    assert set(counts) <= set(range(updates))
    floor = num_groups // updates
    assert {counts[update] for update in range(updates)} <= (
        {floor} if num_groups % updates == 0 else {floor, floor + 1}
    )


@given(COUNTS, UPDATES, SEEDS, STEPS, st.data())
def test_every_contiguous_share_spreads_over_the_updates_to_within_two_groups(num_groups, updates, seed, step, data):
    start = data.draw(st.integers(0, num_groups))
    stop = data.draw(st.integers(start, num_groups))
    counts = Counter(update_plan(num_groups, updates, seed, step, 0)[start:stop])
    per_update = [counts[update] for update in range(updates)]
    assert max(per_update) - min(per_update) <= 2


@given(COUNTS, COUNTS, UPDATES, SEEDS)
def test_group_keeps_its_update_when_the_batch_grows(few, more, updates, seed):
    assume(few <= more)
    assert update_plan(more, updates, seed, 3, 0)[:few] == update_plan(few, updates, seed, 3, 0)


def test_fewer_groups_than_updates_go_into_distinct_updates():
    plan = update_plan(3, 8, 7, 1, 0)
    assert len(set(plan)) == 3


def test_plan_is_pinned():
    """A resumed run must follow the same plan, on any machine and with any Python version."""
    assert update_plan(11, 4, seed=0, step=1, pass_=0) == [3, 2, 1, 0, 3, 2, 0, 1, 3, 0, 2]


def test_zero_updates_are_rejected():
    with pytest.raises(ValueError, match="at least one optimizer step"):
        update_plan(4, 0, 0, 0, 0)
