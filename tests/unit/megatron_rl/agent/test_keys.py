"""Keys of random numbers: pinned, separated by purpose, and distinct."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.keys import group_key, stable_key, turn_key

seeds = st.integers(0, 2**64)


@given(st.lists(st.tuples(seeds, *[st.integers(0, 10**6)] * 3), min_size=2, unique=True))
def test_different_groups_have_different_keys(groups: list[tuple[int, int, int, int]]) -> None:
    keys = [group_key(*group) for group in groups]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_keys_are_pinned_and_separated_by_purpose() -> None:
    assert group_key(seed=1, ordinal=2, try_=3, policy_version=4) == 8600276718950797447
    assert stable_key("evaluation", 1, 2) != stable_key("group", 1, 2)
    assert stable_key("group", 1, 23) != stable_key("group", 12, 3)


def test_later_turns_have_their_own_keys() -> None:
    group = group_key(0, 0, 0, 0)
    keys = {turn_key(group, sample, turn) for sample in range(20) for turn in range(1, 20)} | {group}
    assert len(keys) == 20 * 19 + 1
