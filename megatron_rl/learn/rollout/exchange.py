"""Exchange of groups between the drivers that rolled them out and the training replicas that train on them.

    every driver -> every rank              position and cost of each of its groups
    every rank                              computes the same assignment, by `algorithms.balance`
    driver -> one rank of another replica   a group assigned to that replica
    that rank, or the driver                -> the other ranks of the replica

All groups that one rank sends to another travel in one message of bytes, over gloo. If each replica is one rank, its
own driver, most groups stay where they are and cost nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.balance import balance
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.packing import Packing
from megatron_rl.learn.rollout.encoding import decode_group, encode_group, joined, parted
from megatron_rl.learn.rollout.step_advantages import Gather, of_positions
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import training_flops

NEGLIGIBLE_FLOPS = 2e9
"""Floating-point operations that the slowest replica must save before any group moves. They are 30 ms of a CPU core,
where messages take one or two; on a GPU they are negligible, as are steps that short."""


@dataclass(frozen=True, slots=True)
class Offer:
    position: int
    cost: float  # floating-point operations of a training pass over it
    driver: int  # rank of the driver


def exchange(
    finished: Mapping[int, TrajectoryGroup],
    config: RunConfig,
    groups: Groups,
    problem: Callable[[int], Problem],
    gather: Gather,
    advantages: Mapping[int, Tensor] | None = None,
) -> dict[int, TrajectoryGroup]:
    """Return the groups that this rank's training replica trains on, by position, ascending. Collective over all ranks.

    Every group is on exactly one replica, on all ranks of it. The assignment depends only on the groups of all drivers.
    If a step has several updates, the replicas have equal work in all updates together, not in each.

    Args:
        finished: groups of this rank's driver, by position in the global batch; empty on a rank that does not drive.
        problem: returns the problem of an ordinal.
        gather: gathers a tensor over all ranks.
        advantages: those of all groups of the step, by position, if they depend on one another.
    """
    costs = [0.0] * len(finished)
    if (replicas := groups.data.size()) > 1:
        # The slowest replica may have only groups of one rank. Balanced, it would keep its share of them and lose
        # (replicas - 1) / replicas, so below this sum no move saves NEGLIGIBLE_FLOPS.
        negligible = NEGLIGIBLE_FLOPS * replicas / (replicas - 1)
        costs = group_costs([*finished.values()], config, of_positions(advantages, finished), negligible=negligible)
    offers, replica_of = _offers(finished, costs, gather, config.grpo.prompts_per_step, groups.data.rank())
    members = [[rank for rank, its in enumerate(replica_of) if its == number] for number in range(1 + max(replica_of))]
    homes = [replica_of[offer.driver] for offer in offers]
    assigned = balance([offer.cost for offer in offers], homes, len(members), negligible=NEGLIGIBLE_FLOPS)
    routes = _routes(offers, [members[replica] for replica in assigned])
    held = {**finished}
    if any(routes):
        held |= _send_along(routes, finished, groups.control, 1 + max(offer.position for offer in offers), problem)
    own = replica_of[dist.get_rank(groups.control)]
    return {offer.position: held[offer.position] for offer, its in zip(offers, assigned, strict=True) if its == own}


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
    sequences = [sequence for each in group.trajectories for sequence in each.sequences]
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


def _offers(
    positions: Collection[int], costs: Sequence[float], gather: Gather, most: int, replica: int
) -> tuple[list[Offer], list[int]]:
    """Return all drivers' groups by position, ascending, and the training replica of every rank. Collective.

    Args:
        positions: positions of this driver's groups.
        costs: their costs.
        most: largest number of groups in the global batch.
        replica: number of this rank's training replica.
    """
    mine = torch.zeros(1 + most, 2, dtype=torch.float64)
    rows = [(replica, len(costs)), *zip(positions, costs, strict=True)]
    mine[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
    offers, replica_of = [], []
    for rank, ((its_replica, count), *its) in enumerate(table.tolist() for table in gather(mine)):
        replica_of.append(int(its_replica))
        offers += [Offer(int(position), cost, rank) for position, cost in its[: int(count)]]
    return sorted(offers, key=lambda offer: offer.position), replica_of


Routes = Mapping[tuple[int, int], Sequence[int]]
"""(source rank, destination rank) -> positions of the groups sent, ascending."""


def _routes(offers: Sequence[Offer], trained_on: Sequence[Sequence[int]]) -> tuple[Routes, Routes]:
    """Return the routes between replicas, and the routes within them that follow.

    trained_on: ranks of each group's training replica.
    """
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    within: dict[tuple[int, int], list[int]] = defaultdict(list)
    for offer, ranks in zip(offers, trained_on, strict=True):
        holder = offer.driver
        if holder not in ranks:
            holder = ranks[0]
            between[offer.driver, holder].append(offer.position)
        for rank in ranks:
            if rank != holder:
                within[holder, rank].append(offer.position)
    return between, within


def _send_along(
    routes: Sequence[Routes],
    finished: Mapping[int, TrajectoryGroup],
    control: dist.ProcessGroup,
    positions: int,
    problem: Callable[[int], Problem],
) -> dict[int, TrajectoryGroup]:
    """Send groups along one set of routes after the other, and return those that arrive here, by position. Collective.

    finished: groups of this rank's driver, by position.
    positions: number of positions in the global batch.
    """
    moving = {position for each in routes for moved in each.values() for position in moved}
    messages = {position: joined(*encode_group(finished[position])) for position in sorted(moving & finished.keys())}
    sizes = torch.zeros(positions, dtype=torch.int64)
    for position, message in messages.items():
        sizes[position] = len(message)
    dist.all_reduce(sizes, group=control)
    arrived: dict[int, bytes] = {}
    for each in routes:
        arrived |= _deliver(each, messages | arrived, sizes.tolist(), control)
    found = {}
    for position, message in arrived.items():
        head, body = parted(message)
        found[position] = decode_group(head, body, problem(head["ordinal"]))
    return found


def _deliver(
    routes: Routes, messages: Mapping[int, bytes], sizes: Sequence[int], control: dist.ProcessGroup
) -> dict[int, bytes]:
    rank = dist.get_rank(control)
    outgoing = {destination: positions for (source, destination), positions in routes.items() if source == rank}
    incoming = {source: positions for (source, destination), positions in routes.items() if destination == rank}
    sent = {
        destination: torch.frombuffer(bytearray(b"".join(messages[each] for each in positions)), dtype=torch.uint8)
        for destination, positions in outgoing.items()
    }
    received = {
        source: torch.empty(sum(sizes[each] for each in positions), dtype=torch.uint8)
        for source, positions in incoming.items()
    }
    transfers = [(f"to rank {other}", dist.isend(buffer, other, group=control)) for other, buffer in sent.items()]
    transfers += [
        (f"from rank {other}", dist.irecv(buffer, other, group=control)) for other, buffer in received.items()
    ]
    for where, work in transfers:
        assert work is not None, "all ranks are in the control group"
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"during the exchange of the step's groups, {where}")
            raise
    return {
        position: message.numpy().tobytes()
        for source, positions in incoming.items()
        for position, message in zip(
            positions, received[source].split([sizes[each] for each in positions]), strict=True
        )
    }
