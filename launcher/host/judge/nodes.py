"""Pure: unfit nodes of an allocation, the largest plan that fits the others, and the host of each step."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron_rl.contract.attempt_records import FabricReport, NodeAssignment, NodeHealth
from megatron_rl.contract.paths import TRAIN
from megatron_rl.contract.plan_records import PlanRecord, counts_of, steps_of

ABSENT_FROM_FABRIC = "did not come to the all-reduce between the nodes (see fabric.*.log)"
NOT_UNPACKED = "the image could not be unpacked: "
DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class NotEnoughNodes(Exception):
    """Too few nodes are fit for the run."""


class NodeReports(NamedTuple):
    nodes: dict[str, NodeHealth]  # host -> its report
    unreadable: dict[str, str] = {}  # host -> why its report cannot be read
    fabric: FabricReport | None = None  # report of the all-reduce between them, if there was one


def unfit_nodes(reports: NodeReports, expected_hosts: Sequence[str]) -> dict[str, str]:
    """Unfit host -> why it must not be used."""
    unfit = {}
    fabric = reports.fabric
    networks = [report.network_gbps for report in reports.nodes.values() if report.network_gbps is not None]
    usual = statistics.median(networks) if networks else 0.0
    if 4 * sum(gbps < usual for gbps in networks) > len(networks):
        usual = 0.0  # more than a quarter are slower, so the nodes differ by design
    for host in expected_hosts:
        report = reports.nodes.get(host)
        if host in reports.unreadable:
            unfit[host] = f"its report {reports.unreadable[host]}"
        elif report is None:
            unfit[host] = (
                "no report: its Python, the network or the shared file system is out of order (see health.*.log)"
            )
        elif not report.ok:
            unfit[host] = "; ".join(report.problems)
        elif report.network_gbps is not None and report.network_gbps < usual:
            unfit[host] = f"its network has {report.network_gbps:g} Gb/s, most nodes have {usual:g}"
        elif fabric is not None and host in fabric.bad:
            unfit[host] = fabric.bad[host]
        elif fabric is not None and host not in fabric.hosts:
            unfit[host] = ABSENT_FROM_FABRIC
    return unfit


def not_unpacked(hosts: Sequence[str], unpacked: Collection[str], reasons: dict[str, str]) -> dict[str, str]:
    """Host on which the image could not be unpacked -> why. Its disk is full or broken. Empty where all hosts failed,
    since then no node is to blame."""
    if not set(unpacked) & set(hosts):
        return {}
    silent = "its node does not say why (see unpack.*.log)"
    return {host: NOT_UNPACKED + reasons.get(host, silent) for host in hosts if host not in unpacked}


def to_exclude(unfit: dict[str, str], before: Collection[str]) -> list[str]:
    """Unfit nodes that the job should avoid for a day. A fault that may pass (`_may_pass`) excludes a node only the
    second time in a row: where the previous attempt had it among its unfit ones, `before`."""
    return sorted(host for host, why in unfit.items() if host in before or not _may_pass(why))


def _may_pass(why: str) -> bool:
    """Whether the reason may be something else's fault: a slow file system, or a process that was killed as it unpacked
    the image. A disk that is full stays full."""
    return why == ABSENT_FROM_FABRIC or (why.startswith(NOT_UNPACKED) and not DISK_FULL.search(why))


def suffice(plan: PlanRecord, hosts: Collection[str]) -> bool:
    return len(hosts) >= counts_of(plan)[-1]


def assign(plan: PlanRecord, hosts: Sequence[str], unfit: dict[str, str], given: int = 0) -> NodeAssignment:
    """Assign the first fit hosts of the allocation to the plan's nodes, in Slurm's order, which follows the topology.

    Where `job.nodes` is a range, all nodes except the spare ones work, as far as there is a layout for that number. A
    spare node replaces a bad one; the run gets smaller only when none is left. Raises NotEnoughNodes.

    given: number of hosts before some died; 0: none has.
    """
    counts = counts_of(plan)
    fewest = counts[-1]
    fit = [host for host in hosts if host not in unfit]
    if len(fit) < fewest:
        found = "; ".join(f"{host}: {unfit[host]}" for host in hosts if host in unfit) or "none is bad"
        raise NotEnoughNodes(f"{fewest} nodes are needed, {len(fit)} of {len(hosts)} are fit ({found})")
    room = min(len(fit), max(fewest, (given or len(hosts)) - plan.spare_nodes))
    chosen = next(count for count in counts if count <= room)
    steps = {step.name: [fit[node] for node in step.nodes] for step in steps_of(plan, chosen)}
    return NodeAssignment(chosen, steps, fit[chosen:], unfit)


def replaced(assignment: NodeAssignment, step: str, dead: Collection[str]) -> NodeAssignment:
    """Return the assignment with spare nodes for a step's dead ones; unchanged where there are too few, and where ranks
    train on them too: the attempt ends with those."""
    spare = [host for host in assignment.spare if host not in dead]
    lost = [host for host in assignment.steps[step] if host in dead]
    if not lost or len(spare) < len(lost) or set(lost) & set(assignment.steps.get(TRAIN, ())):
        return assignment
    stands_in = dict(zip(lost, spare))
    hosts = [stands_in.get(host, host) for host in assignment.steps[step]]
    bad = dict(assignment.bad, **dict.fromkeys(lost, "died in the attempt"))
    return assignment._replace(steps=dict(assignment.steps, **{step: hosts}), spare=spare[len(lost) :], bad=bad)
