"""Nodes of a plan as lines: the groups of ranks on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from launcher.plan.placement import Plan, Rank
from megatron_rl.contract.paths import REWARD, TEACHER

FOLD = 8
"""Number of similar lines above which most are left out."""
MARGIN = 11
LETTERS = {TEACHER: "t", REWARD: "m"}
"""Kind of replicas with another model than the policy -> letter of one of them."""


def node_lines(plan: Plan) -> Iterator[str]:
    """Yield `node 3 dp6 p1 | dp7 p1` for each node, with a label for each tensor-parallel group of its GPUs, and after
    `with` the replicas on the same GPUs. Of many nodes with one role the first three and the last are shown."""
    sizes = plan.sizes
    generating = range(sizes.training_nodes, plan.nodes - sizes.fixed_nodes)
    for nodes in (range(sizes.training_nodes), generating, *sizes.nodes_of_fixed.values()):
        folded = len(nodes) > FOLD
        for node in [*nodes[:3], nodes[-1]] if folded else nodes:
            if folded and node == nodes[-1]:
                yield f"{'...':>{MARGIN - 1}} {len(nodes) - 4} more nodes like these"
            ranks = plan.ranks_of(node)
            line = f"{f'node {node}':>{MARGIN - 1}} {_labels(_label(plan, rank) for rank in ranks)}"
            if sizes.shares_devices and ranks[0].role == "colocated":
                line += f" with {_labels(_replica_label(rank) for rank in ranks)}"
            yield line
    if plan.spare_nodes:
        yield f"{'spare':>{MARGIN - 1}} {plan.spare_nodes} more node{'s' * (plan.spare_nodes > 1)}, to replace others"


def _labels(labels: Iterable[str]) -> str:
    return " | ".join(label for label, _ in groupby(labels))


def _replica_label(rank: Rank) -> str:
    assert rank.infer is not None  # every rank trains or belongs to a replica
    return f"{LETTERS.get(rank.role, 'r')}{rank.infer.replica}"


def _label(plan: Plan, rank: Rank) -> str:
    if rank.train is None:
        return _replica_label(rank)
    parts = [("p", rank.train.pp, plan.sizes.pp), ("c", rank.train.cp, plan.sizes.cp)]
    return " ".join([f"dp{rank.train.dp}", *(f"{letter}{number}" for letter, number, of in parts if of > 1)])


def legend(plan: Plan) -> str:
    sizes = plan.sizes
    what = ["dp: data-parallel replica"]
    if sizes.has_replicas:
        what.append("r: inference replica" + ", in turns on the same GPUs" * sizes.shares_devices)
    what += [f"{LETTERS[one.kind]}: replica of the {one.name}" for one in sizes.fixed]
    if sizes.pp > 1:
        what.append("p: pipeline stage")
    if sizes.cp > 1:
        what.append("c: context-parallel part")
    return ", ".join(what)
