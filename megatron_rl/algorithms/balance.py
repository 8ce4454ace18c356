"""Which data-parallel replica trains on which group: none takes much longer than another, and few groups move. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MEASURABLE = 0.02
"""Share of its work that the slowest replica must lose before any group moves: what is less, no clock would tell."""
STEP = 0.005
"""Limits to a replica's work are tried in steps of this share."""


def balance(costs: Sequence[float], homes: Sequence[int], replicas: int, *, negligible: float = 0.0) -> list[int]:
    """The replica of each group.

    The least limit to a replica's work is looked for, from a lower bound of the best on, under which all can be placed:
    first the groups at home, the costliest first, as long as they are within it; then the others, the costliest first,
    each on the replica that has least to do. So no group moves that could have stayed within that limit. Where groups
    stay because it would not be measurable, the slowest replica has at most (1 + MEASURABLE) times the limit tried, or
    `negligible` more.

    At the latest at 4/3 of the best possible all can be placed, in the second of two ways: each of the groups, the
    costliest first, at home or else where least is. (A group that does not fit even there, and is at most a third of
    the best, finds all replicas beyond the best, which cannot be. If it is more than a third, the best has at most two
    of those so far on a replica, and those that are alone here, since two would be too much, are alone there too.)

    Args:
        costs: of each group, not negative.
        homes: the replica of the driver that has the group.
        replicas: how many there are.
        negligible: what the slowest replica loses, in units of `costs`, must be more to be worth a message.
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
    """The replica of each group where none has more to do than `limit`; None where that was not found.

    home_first: place all that can stay at home before any that cannot.
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
