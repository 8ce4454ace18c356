"""plan.json: which nodes of a run do what.

It holds a rule for any number of nodes, so its size does not depend on that number. For example, on five nodes

    PlanRole("train", first=0, behind=3, gpus=None, tasks_per_node=8)    train: nodes 0 and 1
    PlanRole("infer", first=-3, behind=1, gpus=4, tasks_per_node=4)      infer-0, infer-1: node 2; infer-2, infer-3: 3
    PlanRole("teacher", first=-1, behind=0, gpus=8, tasks_per_node=8)    teacher-0: node 4

are the steps of three roles; on six nodes the step that trains has one more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from megatron_rl.contract.shapes import record


@record(version=None, rest="rest")
class PlanStep(NamedTuple):
    """The processes that one srun of the script starts."""

    name: str  # train, infer-0, ...
    nodes: list[int]  # indices into the plan's nodes
    tasks_per_node: int
    gpus_per_node: int
    of: str = ""  # paths.OF_REPLICAS if it runs in the image of the replicas with vLLM
    shares_devices: bool = False  # whether its GPUs are those of training ranks, with which it takes turns
    rest: dict[str, Any] = {}


@record(version=None, least={"gpus": 1})
class PlanRole(NamedTuple):
    """Steps that do the same: the one that trains, or all replicas of a kind."""

    name: str  # of its step; infer for infer-0, infer-1, ...
    first: int  # index of its first node; negative: counted from the end of the plan's nodes
    behind: int  # number of the plan's last nodes, behind its own, that it has no part in
    gpus: int | None  # GPUs of one replica, a share of a node or whole nodes; on CPUs processes; None: a single step
    tasks_per_node: int
    of: str = ""  # as in PlanStep
    shares_devices: bool = False  # as in PlanStep


@record(version=None, rest="rest")
class SmallerPlan(NamedTuple):
    """Steps on fewer nodes of a range `job.nodes`, as an older mrl lists them."""

    nodes: int
    steps: list[PlanStep]
    rest: dict[str, Any] = {}


@record(version=None, rest="rest")
class CheckpointPlan(NamedTuple):
    seconds: float | None = None  # to write one; None: the profile does not give the speed of the file system
    rest: dict[str, Any] = {}  # sizes in bytes


@record(rest="rest", least={"gpus_per_node": 1})
class PlanRecord(NamedTuple):
    """plan.json: the assignment of work to nodes and ranks. Written by mrl-submit; read by the batch host, rank 0,
    `mrl attach` and `mrl status`. `rest` is only for people and `mrl plan`."""

    nodes: int  # excluding spare nodes
    gpus_per_node: int
    spare_nodes: int
    roles: list[PlanRole] = []
    smaller: list[int] = []  # numbers of nodes of a range that have a layout too, the largest first
    checkpoint: CheckpointPlan = CheckpointPlan()
    container: list[str] = []  # options of pyxis for each step; empty: no container
    environment: dict[str, str] = {}  # exported by the script for all processes
    rank_environment: dict[str, str] = {}  # for the ranks only, set inside the container
    steps: list[PlanStep] | None = None
    """All steps and their nodes, in place of `roles`, for code of an older mrl, which refuses a plan without them."""
    alternatives: list[SmallerPlan] | None = None  # likewise, in place of `smaller`
    rest: dict[str, Any] = {}


def counts_of(plan: PlanRecord) -> list[int]:
    """Numbers of nodes that the run can have, the largest first."""
    return [plan.nodes, *plan.smaller, *(each.nodes for each in plan.alternatives or [])]


def steps_of(plan: PlanRecord, nodes: int) -> list[PlanStep]:
    """Steps of a run on one of `counts_of` nodes."""
    if plan.steps is None:
        return steps_of_roles(plan.roles, nodes, plan.gpus_per_node)
    listed = {each.nodes: each.steps for each in plan.alternatives or []}
    return {plan.nodes: plan.steps, **listed}[nodes]


def steps_of_roles(roles: Sequence[PlanRole], nodes: int, gpus_per_node: int) -> list[PlanStep]:
    return [step for role in roles for step in _steps(role, nodes, gpus_per_node)]


def _steps(role: PlanRole, nodes: int, gpus_per_node: int) -> Iterator[PlanStep]:
    # GPUs are counted through from the first node, so one division gives the node of a replica. With 8 GPUs a node and
    # the first replica on node 2:
    #
    #     4 GPUs    replica 0: node 2     replica 1: node 2     replica 2: node 3
    #     16 GPUs   replica 0: nodes 2 and 3     replica 1: nodes 4 and 5
    #
    # No layout leaves a replica on parts of two nodes.
    own = range(nodes)[role.first : nodes - role.behind]
    step = PlanStep(role.name, list(own), role.tasks_per_node, gpus_per_node, role.of, role.shares_devices)
    if role.gpus is None:
        yield step
        return
    each = min(role.gpus, gpus_per_node)
    for replica in range(len(own) * gpus_per_node // role.gpus):
        first = replica * role.gpus // gpus_per_node
        its_nodes = list(own[first : first + role.gpus // each])
        yield step._replace(name=f"{role.name}-{replica}", nodes=its_nodes, gpus_per_node=each)


def listed(plan: PlanRecord) -> PlanRecord:
    """Return a plan in the form that an older mrl reads."""
    others = [SmallerPlan(nodes, steps_of(plan, nodes)) for nodes in plan.smaller]
    return plan._replace(roles=[], smaller=[], steps=steps_of(plan, plan.nodes), alternatives=others)
