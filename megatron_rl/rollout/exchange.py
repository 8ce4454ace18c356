"""Groups on their way from the drivers that made them to the training replicas that train on them.

    every driver -> everyone    position and cost of each of its groups
    everyone                    computes the same assignment: see `algorithms.balance`
    driver -> one rank          of another replica that is to train on it, a group
    that rank, or the driver    -> the other ranks of the replica

What goes from one rank to another goes in one message of bytes, over gloo. Where a replica is one rank, which is its
own driver, most of it stays, and costs nothing.
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
from megatron_rl.algorithms.advantages import RewardMoments
from megatron_rl.algorithms.balance import balance
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.algorithms.packing import Packing
from megatron_rl.config import RunConfig
from megatron_rl.model.flops import training_flops
from megatron_rl.rank.groups import Groups
from megatron_rl.rollout.encoding import decode_group, encode_group, joined, parted

NEGLIGIBLE_FLOPS = 2e9
"""Work that the slowest replica must lose at least before any group moves: 30 ms of a CPU core, where messages take one
or two; on a GPU it is next to nothing, and so are steps that are that short."""

Gather = Callable[[Tensor], list[Tensor]]
"""What this rank tells all ranks -> [ranks] what each tells: see `gathered`."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A group that some rank's driver has made."""

    position: int
    """In the global batch; no two have the same."""
    cost: float
    """Floating-point operations of a training pass over it."""
    driver: int
    """Rank."""


def exchange(
    made: Mapping[int, TrajectoryGroup],
    config: RunConfig,
    groups: Groups,
    problem: Callable[[int], Problem],
    gather: Gather,
    batch: RewardMoments | None = None,
) -> dict[int, TrajectoryGroup]:
    """The groups that this rank's training replica trains on, in the order of their positions. Collective over all
    ranks.

    Every group is on exactly one replica, and there on all ranks. Which, follows from all drivers' groups alone. Where
    a step has several updates, replicas have as much to do in all of them together.

    Args:
        made: by this rank's driver, by position in the global batch; nothing on a rank that is no driver.
        problem: of an ordinal: see `Mixture.problem`.
        gather: over all ranks.
        batch: see `assign_credit`.
    """
    costs = [0.0] * len(made)
    if (replicas := groups.data.size()) > 1:
        # The slowest replica may be one rank's groups alone, and would keep its share of them.
        negligible = NEGLIGIBLE_FLOPS * replicas / (replicas - 1)
        costs = group_costs([*made.values()], config, batch, negligible=negligible)
    offers, replica_of = _offers(made, costs, gather, config.grpo.prompts_per_step, groups.data.rank())
    members = [[rank for rank, its in enumerate(replica_of) if its == number] for number in range(1 + max(replica_of))]
    homes = [replica_of[offer.driver] for offer in offers]
    assigned = balance([offer.cost for offer in offers], homes, len(members), negligible=NEGLIGIBLE_FLOPS)
    routes = _routes(offers, [members[replica] for replica in assigned])
    held = {**made}
    if any(routes):
        held |= _travel(routes, made, groups.control, 1 + max(offer.position for offer in offers), problem)
    own = replica_of[dist.get_rank(groups.control)]
    return {offer.position: held[offer.position] for offer, its in zip(offers, assigned, strict=True) if its == own}


def group_costs(
    groups: Sequence[TrajectoryGroup],
    config: RunConfig,
    batch: RewardMoments | None = None,
    *,
    negligible: float = 0.0,
) -> list[float]:
    """Floating-point operations of a training pass over each group: what answers share counts once, as it is computed,
    and an answer without a gradient, which is not run, not at all. Where all of it is `negligible`, an upper bound,
    which is had for less.

    The output layer counts where the recipe says how many rows it has."""
    at_most = [_answers_apart(group, config) for group in groups]
    if sum(at_most) <= negligible:
        return at_most
    has_gradient = iter(assign_credit(groups, config, batch).has_gradient)
    costs = []
    for group in groups:
        run = [*compress(group.trajectories, has_gradient)]
        masks = [each.loss_mask for each in run]
        trees = Packing([each.tokens for each in run], masks, range(len(run))).trees
        tokens, pairs = sum(tree.tokens for tree in trees), sum(tree.pairs for tree in trees)
        costs.append(_flops(config, tokens, pairs, sum(map(sum, masks))))
    return costs


def _answers_apart(group: TrajectoryGroup, config: RunConfig) -> float:
    """Operations for all answers of a group where they share the prompt alone."""
    prompts = {tuple(each.tokens[: each.prompt_length]) for each in group.trajectories}
    shared = len(prompts.pop()) if len(prompts) == 1 else 0
    lengths = [len(each.tokens) for each in group.trajectories]
    tokens = shared + sum(length - shared for length in lengths)
    pairs = _pairs(shared) + sum(_pairs(length) - _pairs(shared) for length in lengths)
    return _flops(config, tokens, pairs, tokens - shared)


def _pairs(length: int) -> int:
    """Of tokens that attend and are attended to, in a sequence."""
    return length * (length + 1) // 2


def _flops(config: RunConfig, tokens: int, pairs: int, predictions: int) -> float:
    return training_flops(
        config.model, config.model.vocab_size or 0, tokens=tokens, pairs=pairs, predictions=predictions
    )


def _offers(
    positions: Collection[int], costs: Sequence[float], gather: Gather, most: int, replica: int
) -> tuple[list[Offer], list[int]]:
    """All drivers' groups in the order of their positions, and the training replica of every rank. Collective.

    Args:
        positions: of this driver's groups, which have these costs.
        most: groups of the global batch.
        replica: that this rank trains in.
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
"""(source, destination) -> positions of the groups that go there, ascending."""


def _routes(offers: Sequence[Offer], trained_on: Sequence[Sequence[int]]) -> tuple[Routes, Routes]:
    """Between replicas, and then within them.

    trained_on: for each group the ranks that are to have it.
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


def _travel(
    routes: Sequence[Routes],
    made: Mapping[int, TrajectoryGroup],
    control: dist.ProcessGroup,
    positions: int,
    problem: Callable[[int], Problem],
) -> dict[int, TrajectoryGroup]:
    """What arrives on this rank along the routes, one set of them after the other. Collective.

    made: by this rank's driver, by position.
    positions: one more than the last.
    """
    travelling = {position for each in routes for moved in each.values() for position in moved}
    messages = {position: joined(*encode_group(made[position])) for position in sorted(travelling & made.keys())}
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
    """Send what this rank has to send, and return what it gets, by position."""
    rank = dist.get_rank(control)
    outgoing = {destination: positions for (source, destination), positions in routes.items() if source == rank}
    incoming = {source: positions for (source, destination), positions in routes.items() if destination == rank}
    sent = {
        destination: torch.frombuffer(bytearray(b"".join(messages[each] for each in positions)), dtype=torch.uint8)
        for destination, positions in outgoing.items()
    }
    got = {
        source: torch.empty(sum(sizes[each] for each in positions), dtype=torch.uint8)
        for source, positions in incoming.items()
    }
    under_way = [(f"to rank {other}", dist.isend(buffer, other, group=control)) for other, buffer in sent.items()]
    under_way += [(f"from rank {other}", dist.irecv(buffer, other, group=control)) for other, buffer in got.items()]
    for where, work in under_way:
        assert work is not None, "all ranks are in the control group"
        try:
            work.wait()
        except RuntimeError as error:
            error.add_note(f"while groups of the step were under way {where}")
            raise
    return {
        position: message.numpy().tobytes()
        for source, positions in incoming.items()
        for position, message in zip(positions, got[source].split([sizes[each] for each in positions]), strict=True)
    }
