"""Assignment of groups to data-parallel replicas that balances the work and moves few groups. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

MEASURABLE = 0.02
"""Smallest excess of the slowest replica, as a share of its work, that justifies moving groups. Less is not
measurable."""
STEP = 0.005


def balance(costs: Sequence[float], homes: Sequence[int], replicas: int, *, negligible: float = 0.0) -> list[int]:
    """Return the replica of each group.

    Limits to a replica's work are tried upwards from a lower bound of the optimum, until all groups can be placed:
    first the groups that stay at home, most expensive first, as long as they fit the limit; then the others, most
    expensive first, each on the least loaded replica. So no group moves that could have stayed within that limit. If
    groups stay because the gain is not measurable, the slowest replica has at most (1 + MEASURABLE) times the limit, or
    `negligible` more.

    At the latest at 4/3 of the optimum all groups can be placed, in the second of two ways: each group, most expensive
    first, at home or else on the least loaded replica. (Suppose a group does not fit even there. If its cost is at most
    a third of the optimum, all replicas exceed the optimum, which is impossible. If it is more, the optimum has at most
    two of the groups placed so far on any replica, and those that are alone here, because two would exceed the limit,
    are alone there too.)

    Args:
        costs: cost of each group, not negative.
        homes: replica of the driver that holds the group.
        replicas: number of replicas.
        negligible: excess of the slowest replica, in units of `costs`, that is not worth a message.
    """
    slowest = max(_loads(costs, homes, replicas))
    limit = max(sum(costs) / replicas, *costs, 0.0)
    while slowest > (1 + MEASURABLE) * limit and slowest - limit > negligible:
        for home_first in (True, False):
            found = _within(limit, costs, homes, replicas, home_first=home_first)
            if found is not None:
                return found
        limit *= 1 + STEP
    return list(homes)


def _within(
    limit: float, costs: Sequence[float], homes: Sequence[int], replicas: int, *, home_first: bool
) -> list[int] | None:
    """Return the replica of each group with no load above `limit`; None if no such assignment was found.

    home_first: place all groups that can stay at home before any that cannot.
    """
    loads = [0.0] * replicas
    assigned = list(homes)
    leaving = []

    def place(group: int, replica: int) -> None:
        loads[replica] += costs[group]
        assigned[group] = replica

    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        if loads[homes[group]] + costs[group] <= limit:
            place(group, homes[group])
        elif home_first:
            leaving.append(group)
        else:
            place(group, min(range(replicas), key=loads.__getitem__))
    for group in leaving:
        place(group, min(range(replicas), key=loads.__getitem__))
    return assigned if max(loads) <= limit else None


def _loads(costs: Sequence[float], homes: Sequence[int], replicas: int) -> list[float]:
    loads = [0.0] * replicas
    for cost, home in zip(costs, homes, strict=True):
        loads[home] += cost
    return loads


def update_plan(num_groups: int, updates: int, seed: int, step: int, pass_: int) -> list[int]:
    """Shuffle the groups of a batch over the optimizer steps of one pass.

    Each block of `updates` consecutive groups puts one group into every update, in a random order. So every update gets
    floor or ceil of num_groups / updates groups, and any contiguous share of the groups, which is what a data-parallel
    rank holds, spreads over the updates evenly to within two groups. The plan is the same on every layout.

    Args:
        num_groups: groups of the global batch, in ordinal order.
        updates: optimizer steps of the pass.
        seed: of the run.
        step: of the run.
        pass_: index of the pass over the batch, from 0.

    Returns:
        The index of each group's update, 0..updates-1. With fewer groups than updates some updates are empty.

    Raises:
        ValueError: `updates` is below 1.
    """
    if updates < 1:
        raise ValueError(f"a pass needs at least one optimizer step, not {updates}")

    def order(block: int) -> list[int]:
        # Sorting by hashes gives the same permutation on every machine and Python version.
        return sorted(range(updates), key=lambda update: _hash(seed, step, pass_, block, update))

    blocks = range(-(-num_groups // updates))
    return [update for block in blocks for update in order(block)][:num_groups]


def _hash(*parts: int) -> bytes:
    return blake2b(" ".join(map(str, parts)).encode(), digest_size=16).digest()
