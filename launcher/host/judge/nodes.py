"""Pure: which nodes of an allocation are unfit, which plan the others suffice for, and which host does which step."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron_rl.contract.attempt_records import FabricReport, NodeAssignment, NodeHealth
from megatron_rl.contract.run_records import PlanRecord, SmallerPlan

ABSENT_FROM_FABRIC = "did not come to the all-reduce between the nodes (see fabric.*.log)"


NOT_UNPACKED = "the image could not be unpacked: "

CLOCK_S = 10.0  # by which clocks may differ without a word


class NotEnoughNodes(Exception):
    """More nodes are unfit than the run can do without."""


class NodeReports(NamedTuple):
    """What was found out about the nodes of one attempt."""

    nodes: dict[str, NodeHealth]  # host -> its report
    unreadable: dict[str, str] = {}  # host -> what is wrong with its report
    fabric: FabricReport | None = None  # of the all-reduce between them, where there was one


def unfit_nodes(reports: NodeReports, expected_hosts: Sequence[str]) -> dict[str, str]:
    """host -> why it must not be used, of those that must not."""
    unfit = {}
    fabric = reports.fabric
    networks = [report.network_gbps for report in reports.nodes.values() if report.network_gbps is not None]
    usual = statistics.median(networks) if networks else 0.0
    if 4 * sum(gbps < usual for gbps in networks) > len(networks):
        usual = 0.0  # so many are no accident: the nodes differ
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
    """host -> why it must not be used, of those on which the image could not be unpacked while it could on others:
    their disks are full or broken. Where it could on none, no node is to blame.

    Args:
        unpacked: hosts that have said that it was.
        reasons: host -> what its log says.
    """
    if not set(unpacked) & set(hosts):
        return {}
    silent = "its node does not say why (see unpack.*.log)"
    return {host: NOT_UNPACKED + reasons.get(host, silent) for host in hosts if host not in unpacked}


def skewed_clocks(reports: NodeReports, began: float, now: float) -> list[str]:
    """A sentence for each node whose clock is not that of this host. Nothing is judged by it; but logs are hard
    to read, and munge and TLS refuse what is minutes off.

    Args:
        began: unix time at which the check was started.
        now: unix time at which it had ended.
    """
    said = []
    for host, report in sorted(reports.nodes.items()):
        off = max(began - report.at, report.at - now)
        if off > CLOCK_S:
            side = "behind" if report.at < began else "ahead of"
            said.append(f"the clock of {host} is {off:.0f} s {side} this host's")
    return said


def to_exclude(unfit: dict[str, str], before: Collection[str]) -> list[str]:
    """Those of the unfit nodes that the job is to avoid from now on. A node that is absent from the all-reduce is not
    used, but slow containers and a slow file system are no fault of its own: only the second time in a row counts.

    Args:
        before: hosts that were unfit in the attempt before.
    """
    return sorted(host for host, why in unfit.items() if why != ABSENT_FROM_FABRIC or host in before)


def suffice(plan: PlanRecord, hosts: Collection[str]) -> bool:
    """Whether these hosts, all of them fit, are enough for the smallest plan."""
    return len(hosts) >= _plans(plan)[-1].nodes


def assign(plan: PlanRecord, hosts: Sequence[str], unfit: dict[str, str], given: int = 0) -> NodeAssignment:
    """The plan's nodes are the first fit hosts of the allocation, in Slurm's order, which follows the topology.

    Where `job.nodes` is a range, all but the spare nodes work, as far as there is a layout for that many; a bad node is
    replaced by a spare one first, and makes the run smaller only when there is none left.

    Args:
        hosts: all hosts of the allocation.
        unfit: host -> what is wrong with it.
        given: how many hosts there were before some died, where that has happened.

    Raises:
        NotEnoughNodes: naming the unfit ones.
    """
    plans = _plans(plan)
    fewest = plans[-1].nodes
    fit = [host for host in hosts if host not in unfit]
    if len(fit) < fewest:
        found = "; ".join(f"{host}: {unfit[host]}" for host in hosts if host in unfit) or "none is bad"
        raise NotEnoughNodes(f"{fewest} nodes are needed, {len(fit)} of {len(hosts)} are fit ({found})")
    room = min(len(fit), max(fewest, (given or len(hosts)) - plan.spare_nodes))
    chosen = next(each for each in plans if each.nodes <= room)
    steps = {step.name: [fit[node] for node in step.nodes] for step in chosen.steps}
    return NodeAssignment(chosen.nodes, steps, fit[chosen.nodes :], unfit)


def replaced(assignment: NodeAssignment, step: str, dead: Collection[str]) -> NodeAssignment:
    """The assignment with spare nodes in the place of a step's dead ones; as it was where there are too few.

    Args:
        dead: hosts of the step that have died since.
    """
    spare = [host for host in assignment.spare if host not in dead]
    lost = [host for host in assignment.steps[step] if host in dead]
    if not lost or len(spare) < len(lost):
        return assignment
    stands_in = dict(zip(lost, spare))
    hosts = [stands_in.get(host, host) for host in assignment.steps[step]]
    bad = dict(assignment.bad, **dict.fromkeys(lost, "died in the attempt"))
    return assignment._replace(steps=dict(assignment.steps, **{step: hosts}), spare=spare[len(lost) :], bad=bad)


def _plans(plan: PlanRecord) -> list[PlanRecord | SmallerPlan]:
    """All plans, the largest first."""
    return [plan, *plan.alternatives]
