"""Exchange of groups between the drivers that rolled them out and the training replicas that train on them.

    every driver -> every rank              position and cost of each of its groups
    every rank                              computes the same assignment, by `algorithms.balance`
    driver -> one rank of another replica   a group assigned to that replica
    that rank, or the driver                -> the other ranks of the replica

A rank connects to those that it sends groups to, for this exchange. If each replica is one rank, its own driver, most
groups stay where they are and cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.balance import balance
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.packing import Packing
from megatron_rl.learn.rollout.encoding import decode_group, encode_group, joined, parted
from megatron_rl.learn.rollout.step_advantages import of_positions
from megatron_rl.rank.control import Control
from megatron_rl.rank.groups import Groups, TrainingReplicas
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import training_flops

NEGLIGIBLE_FLOPS = 2e9
"""Floating-point operations that the slowest replica must save before any group moves. They are 30 ms of a CPU core,
where messages take one or two; on a GPU they are negligible, as are steps that short."""
_OFFER = np.dtype([("position", "<i4"), ("driver", "<i4"), ("cost", "<f8")])


@dataclass(frozen=True, slots=True)
class Offers:
    """The drivers' groups, by position in the global batch."""

    positions: Sequence[int]  # ascending
    drivers: Sequence[int]  # rank of each group's driver
    costs: Sequence[float]  # floating-point operations of a training pass over each group


def exchange(
    finished: Mapping[int, TrajectoryGroup],
    config: RunConfig,
    groups: Groups,
    problem: Callable[[int], Problem],
    advantages: Mapping[int, Tensor] | None = None,
) -> dict[int, TrajectoryGroup]:
    """Return the groups that this rank's training replica trains on, by position, ascending. Collective over all ranks.

    Every group is on exactly one replica, on all ranks of it. The assignment depends only on the groups of all drivers.
    If a step has several updates, the replicas have equal work in all updates together, not in each.

    Args:
        finished: groups of this rank's driver, by position in the global batch; empty on a rank that does not drive.
        problem: returns the problem of an ordinal.
        advantages: those of all groups of the step, by position, if they depend on one another.
    """
    costs = [0.0] * len(finished)
    ranks = groups.replicas
    if ranks.count > 1:
        # The slowest replica may have only groups of one rank. Balanced, it would keep its share of them and lose
        # (replicas - 1) / replicas, so below this sum no move saves NEGLIGIBLE_FLOPS.
        negligible = NEGLIGIBLE_FLOPS * ranks.count / (ranks.count - 1)
        costs = group_costs([*finished.values()], config, of_positions(advantages, finished), negligible=negligible)
    offers = _offers(finished, costs, groups.control)
    homes = [ranks.of(driver) for driver in offers.drivers]
    assigned = balance(offers.costs, homes, ranks.count, negligible=NEGLIGIBLE_FLOPS)
    routes = _routes(offers, homes, assigned, ranks, groups.control.rank)
    held = {**finished} | _send_along(routes, finished, groups.control, problem)
    own = ranks.of(groups.control.rank)
    return {position: held[position] for position, its in zip(offers.positions, assigned, strict=True) if its == own}


def group_costs(
    groups: Sequence[TrajectoryGroup],
    config: RunConfig,
    known: Tensor | None = None,
    *,
    negligible: float = 0.0,
) -> list[float]:
    """Return the floating-point operations of a training pass over each group. A shared prefix counts once, because it
    is computed once; an answer without a gradient is not run and counts nothing.

    If the sum is at most `negligible`, return upper bounds instead, which cost less to compute. The output layer counts
    only if the recipe says how many rows it has.

    known: as for `assign_credit`.
    """
    at_most = [_sharing_prompts_only(group, config) for group in groups]
    if sum(at_most) <= negligible:
        return at_most
    has_gradient = iter(assign_credit(groups, config, known).has_gradient)
    costs = []
    for group in groups:
        run = [sequence for each in compress(group.trajectories, has_gradient) for sequence in each.sequences]
        masks = [each.loss_mask for each in run]
        trees = Packing([each.tokens for each in run], masks, range(len(run))).trees
        tokens, pairs = sum(tree.tokens for tree in trees), sum(tree.pairs for tree in trees)
        costs.append(_flops(config, tokens, pairs, sum(map(sum, masks))))
    return costs


def _sharing_prompts_only(group: TrajectoryGroup, config: RunConfig) -> float:
    """Operations for all answers of a group, if they share no more than the prompt."""
    sequences = group.sequences
    prompts = {tuple(each.tokens[: each.prompt_length]) for each in sequences}
    shared = len(prompts.pop()) if len(prompts) == 1 else 0
    lengths = [len(each.tokens) for each in sequences]
    tokens = shared + sum(length - shared for length in lengths)
    pairs = _pairs(shared) + sum(_pairs(length) - _pairs(shared) for length in lengths)
    return _flops(config, tokens, pairs, tokens - shared)


def _pairs(length: int) -> int:
    """Pairs of an attending and an attended token in a sequence."""
    return length * (length + 1) // 2


def _flops(config: RunConfig, tokens: int, pairs: int, predictions: int) -> float:
    return training_flops(
        config.model, config.model.vocab_size or 0, tokens=tokens, pairs=pairs, predictions=predictions
    )


def _offers(positions: Collection[int], costs: Sequence[float], control: Control) -> Offers:
    """Return all drivers' groups. Collective.

    Args:
        positions: positions of this driver's groups.
        costs: their costs.
    """
    own = np.empty(len(costs), _OFFER)
    own["position"], own["driver"], own["cost"] = [*positions], control.rank, costs
    table = np.frombuffer(control.join(own.tobytes()), _OFFER)
    table = table[table["position"].argsort()]
    return Offers(*(table[column].tolist() for column in ("position", "driver", "cost")))


@dataclass(frozen=True, slots=True)
class GroupRoutes:
    """Positions of the groups that one rank sends and receives, ascending."""

    outgoing: defaultdict[int, list[int]]  # by destination
    incoming: defaultdict[int, list[int]]  # by source

    @classmethod
    def empty(cls) -> GroupRoutes:
        return cls(defaultdict(list), defaultdict(list))


def _routes(
    offers: Offers, homes: Sequence[int], assigned: Sequence[int], ranks: TrainingReplicas, rank: int
) -> tuple[GroupRoutes, GroupRoutes]:
    """Return a rank's routes between replicas, and those within its replica that follow.

    homes, assigned: training replica of each group's driver, and that which trains on the group.
    """
    between, within = GroupRoutes.empty(), GroupRoutes.empty()
    own = ranks.of(rank)
    members = ranks.members(own)
    for position, driver, home, replica in zip(offers.positions, offers.drivers, homes, assigned, strict=True):
        if driver == rank and replica != home:
            between.outgoing[ranks.members(replica)[0]].append(position)
        if replica != own:
            continue
        holder = driver if home == own else members[0]
        if holder != rank:
            within.incoming[holder].append(position)
            continue
        if home != own:
            between.incoming[driver].append(position)
        for other in members:
            if other != rank:
                within.outgoing[other].append(position)
    return between, within


def _send_along(
    routes: Sequence[GroupRoutes],
    finished: Mapping[int, TrajectoryGroup],
    control: Control,
    problem: Callable[[int], Problem],
) -> dict[int, TrajectoryGroup]:
    """Send groups along one set of routes after the other, and return those that arrive here, by position. Collective.

    finished: groups of this rank's driver, by position.
    """
    messages: dict[int, bytes] = {}
    arrived: dict[int, bytes] = {}
    for each in routes:
        for position in chain.from_iterable(each.outgoing.values()):
            if position not in messages:
                messages[position] = joined(*encode_group(finished[position]))
        sent = {rank: [messages[position] for position in positions] for rank, positions in each.outgoing.items()}
        try:
            received = control.exchange(sent, {rank: len(positions) for rank, positions in each.incoming.items()})
        except RuntimeError as error:
            error.add_note("during the exchange of the step's groups")
            raise
        for rank, contents in received.items():
            arrived |= zip(each.incoming[rank], contents, strict=True)
        messages |= arrived
    found = {}
    for position, message in arrived.items():
        head, body = parted(message)
        found[position] = decode_group(head, body, problem(head["ordinal"]))
    return found
