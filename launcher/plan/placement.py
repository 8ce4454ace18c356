"""Placement: the role, node, GPU and parallel coordinates of every rank. Pure.

Ranks are numbered node by node. Coordinates in the training world are those of megatron-core (rank order
tp-cp-ep-dp-pp): tensor-parallel neighbours are adjacent ranks, pipeline stages are furthest apart. An inference replica
is `placement.inference.tp` x `pp` x `dp` adjacent ranks.

    colocated     all ranks train, and generate in between. One step. Or they train in turns with a vLLM on the same
                  GPUs: each replica is a separate step beside them, on `placement.inference.tp` GPUs of their node.
    partitioned   the first nodes train, the last `placement.inference.nodes` generate. Each inference replica is a
                  world and a separate Slurm step, so that losing one does not affect the others. A replica is
                  whole nodes, or one of several that share a node.

In both modes, the last `reward.replicas.nodes` hold replicas of the reward model, and the `distill.replicas.nodes` in
front of them those of the teacher, likewise a step each.

Spare nodes have no ranks: they replace other nodes when an attempt starts.

If `job.nodes` is a range, each count in it with a valid layout has a plan; an attempt uses the largest that its nodes
suffice for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from launcher.plan.sizes import LayoutError, Sizes, check
from megatron_rl.contract.paths import INFER, TRAIN
from megatron_rl.contract.plan_records import PlanRole, PlanStep, steps_of_roles
from megatron_rl.recipe.fixed_models import FixedModel
from megatron_rl.recipe.job import JobConfig, PlacementConfig
from megatron_rl.recipe.model import ModelConfig

Role = Literal["colocated", "training", "inference", "teacher", "reward"]
"""The last two are kinds of replicas with another model than the policy."""


@dataclass(frozen=True, slots=True)
class Train:
    rank: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int


@dataclass(frozen=True, slots=True)
class Infer:
    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One process, on its own GPU or on CPUs."""

    rank: int
    node: int
    gpu: int
    role: Role
    train: Train | None
    infer: Infer | None


@dataclass(frozen=True, slots=True)
class Plan:
    mode: Literal["colocated", "partitioned"]
    nodes: int
    """Nodes with ranks, without the spare ones."""
    gpus_per_node: int
    spare_nodes: int
    sizes: Sizes
    smaller: tuple[Plan, ...] = ()
    """Plans for the lower counts of a range `job.nodes`, largest first, as far as they have a valid layout."""

    @property
    def roles(self) -> list[PlanRole]:
        """Roles of the nodes, for each number of nodes that the plan and the smaller ones have."""
        sizes = self.sizes
        found = [PlanRole(TRAIN, 0, sizes.nodes - sizes.training_nodes, None, sizes.gpus_per_node)]
        if sizes.has_replicas:
            first = 0 if sizes.shares_devices else -(sizes.inference_nodes + sizes.fixed_nodes)
            tasks = sizes.replica_processes // sizes.replica_nodes
            behind, shares = sizes.fixed_nodes, sizes.shares_devices
            found.append(PlanRole(INFER, first, behind, sizes.replica_gpus, tasks, shares_devices=shares))
        for one in sizes.fixed:
            its = sizes.nodes_of_fixed[one.kind]
            found.append(PlanRole(one.kind, its.start - sizes.nodes, sizes.nodes - its.stop, one.tp, one.processes))
        return found

    @property
    def steps(self) -> list[PlanStep]:
        return steps_of_roles(self.roles, self.nodes, self.gpus_per_node)

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(_ranks(self.sizes, range(self.nodes)))

    def ranks_of(self, node: int) -> tuple[Rank, ...]:
        return tuple(_ranks(self.sizes, range(node, node + 1)))


def place(
    job: JobConfig,
    placement: PlacementConfig,
    node_gpus: int | None = None,
    model: ModelConfig | None = None,
    engine: str = "native",
    fixed: tuple[FixedModel, ...] = (),
) -> Plan:
    """Return the plan for `job.nodes`, or for its upper end if it is a range.

    Args:
        node_gpus: GPUs of each node of the cluster; None: unknown.
        model: also refuse sizes that do not divide this model.
        engine: inference.engine of the recipe.
        fixed: models of the recipe that have separate nodes.

    Raises:
        LayoutError: the layout is impossible. The message has the arithmetic and the nearest valid layouts.
    """
    limit = node_gpus if job.device == "cuda" else None
    counts = range(job.most_nodes, job.fewest_nodes - 1, -1)
    sizes = [Sizes.of(job, placement, nodes, engine, fixed) for nodes in counts]
    problems = {each.nodes: check(each, limit, model) for each in sizes}
    possible = [each for each in sizes if not problems[each.nodes]]
    for end in (sizes[0], sizes[-1]):
        if said := problems[end.nodes]:
            raise LayoutError((*said[:-1], f"{said[-1]}; {_advice(job, end, possible, limit, model)}"))
    most, *smaller = (Plan(placement.mode, each.nodes, job.gpus_per_node, job.spare_nodes, each) for each in possible)
    return replace(most, smaller=tuple(smaller))


def _advice(
    job: JobConfig, wrong: Sizes, possible: Sequence[Sizes], node_gpus: int | None, model: ModelConfig | None
) -> str:
    if possible:
        counts = ", ".join(str(each.nodes) for each in reversed(possible))
        return f"job.nodes {job.nodes} must begin and end with a count that works: {counts}"
    from launcher.plan.nearest import nearest  # needed only for an impossible layout

    return "nearest that work: " + ", or ".join(nearest(wrong, node_gpus, model))


def _ranks(sizes: Sizes, nodes: range) -> Iterator[Rank]:
    training = sizes.training_world
    serving = {node: one for one in sizes.fixed for node in sizes.nodes_of_fixed[one.kind]}
    for rank in range(nodes.start * sizes.gpus_per_node, nodes.stop * sizes.gpus_per_node):
        node, gpu = divmod(rank, sizes.gpus_per_node)
        if one := serving.get(node):
            within = rank - sizes.nodes_of_fixed[one.kind].start * sizes.gpus_per_node
            yield Rank(rank, node, gpu, cast(Role, one.kind), None, Infer(*divmod(within, one.tp)))
        elif rank >= training:
            yield Rank(rank, node, gpu, "inference", None, _infer(rank - training, sizes))
        elif sizes.inference_nodes:
            yield Rank(rank, node, gpu, "training", _train(rank, sizes), None)
        else:
            yield Rank(rank, node, gpu, "colocated", _train(rank, sizes), _infer(rank, sizes))


def _train(rank: int, sizes: Sizes) -> Train:
    """Coordinates in megatron-core's orders: tp-cp-dp-pp for dense weights, tp-ep-dp-pp for experts."""
    tp, cp, ep, dp = sizes.tp, sizes.cp, sizes.ep, sizes.dp
    return Train(
        rank=rank,
        tp=rank % tp,
        cp=rank // tp % cp,
        dp=rank // (tp * cp) % dp,
        pp=rank // (tp * cp * dp),
        ep=rank // tp % ep,
    )


def _infer(rank: int, sizes: Sizes) -> Infer:
    replica, within = divmod(rank, sizes.replica_gpus)
    return Infer(replica, within)


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks that hold tensors of the same shapes and do the same work."""

    role: Role
    stage: int | None
    rank: int
    """First rank of this kind within its world: the training world, or a replica."""
    world: int


def rank_kinds(sizes: Sizes) -> list[RankKind]:
    """Return one rank of each kind. All stages between the first and the last are alike, and so are the
    tensor-parallel parts of a stage, the data-parallel replicas, and the replicas of a role."""
    world = sizes.training_world
    role: Role = "training" if sizes.partitioned else "colocated"
    stages = sorted({0, min(1, sizes.pp - 1), sizes.pp - 1})
    kinds = [RankKind(role, stage, stage * (world // sizes.pp), world) for stage in stages]
    kinds += [RankKind("inference", None, 0, sizes.replica_gpus)] * sizes.has_replicas
    return kinds + [RankKind(cast(Role, one.kind), None, 0, one.tp) for one in sizes.fixed]
