"""Assignment of groups to data-parallel replicas: nearly even, with few moves, and no move without gain."""

from __future__ import annotations

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithms.balance import MEASURABLE, STEP, balance

REPLICAS = st.integers(1, 5)


def loads(costs: list[float], assigned: list[int], replicas: int) -> list[float]:
    return [sum(cost for cost, its in zip(costs, assigned, strict=True) if its == each) for each in range(replicas)]


@st.composite
def problems(draw: st.DrawFn, largest: int = 12) -> tuple[list[float], list[int], int]:
    replicas = draw(REPLICAS)
    costs = draw(st.lists(st.integers(0, 60).map(float), max_size=largest))
    homes = draw(st.lists(st.integers(0, replicas - 1), min_size=len(costs), max_size=len(costs)))
    return costs, homes, replicas


@given(problems())
def test_slowest_replica_gets_faster_or_nothing_moves(problem: tuple[list[float], list[int], int]) -> None:
    costs, homes, replicas = problem
    assigned = balance(costs, homes, replicas)
    assert len(assigned) == len(costs)
    assert {*assigned} <= {*range(replicas)}
    before, after = max(loads(costs, homes, replicas)), max(loads(costs, assigned, replicas))
    assert assigned == homes or after * (1 + MEASURABLE) < before


@examples(30)
@given(problems(largest=6))
def test_load_is_within_four_thirds_of_the_optimum(problem: tuple[list[float], list[int], int]) -> None:
    """Apart from the share that is not measurable and the steps between limits."""
    costs, homes, replicas = problem
    reached = {(0.0,) * replicas}  # what replicas, in whatever order, may have been given so far
    for cost in costs:
        reached = {
            tuple(sorted(load + cost * (each == its) for each, load in enumerate(given)))
            for given in reached
            for its in range(replicas)
        }
    best = min(map(max, reached))
    found = max(loads(costs, balance(costs, homes, replicas), replicas))
    assert found <= best * 4 / 3 * (1 + MEASURABLE) * (1 + STEP) + 1e-9


@given(problems(largest=40))
def test_no_group_moves_that_could_have_stayed(problem: tuple[list[float], list[int], int]) -> None:
    """Staying would not have made its replica the slowest."""
    costs, homes, replicas = problem
    assigned = balance(costs, homes, replicas)
    after = loads(costs, assigned, replicas)
    for cost, home, its in zip(costs, homes, assigned, strict=True):
        assert its == home or after[home] + cost > max(after) / (1 + STEP)


@given(problems())
def test_negligible_difference_moves_nothing(problem: tuple[list[float], list[int], int]) -> None:
    costs, homes, replicas = problem
    assert balance(costs, homes, replicas, negligible=sum(costs)) == homes


def test_only_the_groups_that_even_the_load_move() -> None:
    """Twelve groups on two replicas, eight and four: two groups move."""
    homes = [0] * 8 + [1] * 4
    assigned = balance([1.0] * 12, homes, 2)
    assert [before == after for before, after in zip(homes, assigned, strict=True)].count(False) == 2
    assert loads([1.0] * 12, assigned, 2) == [6, 6]


def test_small_groups_leave_to_make_room_for_a_large_one() -> None:
    """If all groups that fit stayed at home, one replica would have a load of twelve."""
    costs = [6.0, 6.0, *[1.0] * 6]
    assert loads(costs, balance(costs, [0, 0, *[1] * 6], 2), 2) == [9, 9]
