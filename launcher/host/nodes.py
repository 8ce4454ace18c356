"""Pure: which host of an allocation does which step of the plan."""

from typing import Any, Dict, List, NamedTuple, Sequence


class NotEnoughNodes(Exception):
    """More nodes are unfit than there are spare ones."""


class Assignment(NamedTuple):
    steps: Dict[str, List[str]]  # step -> its hosts, in the order of the plan's nodes
    spare: List[str]  # fit and idle
    bad: Dict[str, str]  # host -> why it is not used


def assign(plan: Dict[str, Any], hosts: Sequence[str], bad: Dict[str, str]) -> Assignment:
    """The plan's nodes are the first fit hosts of the allocation, in Slurm's order, which follows the topology.

    Args:
        plan: plan.json.
        hosts: all hosts of the allocation.
        bad: host -> what is wrong with it.

    Raises:
        NotEnoughNodes: naming the bad ones.
    """
    fit = [host for host in hosts if host not in bad]
    if len(fit) < plan["nodes"]:
        found = "; ".join("{}: {}".format(host, bad[host]) for host in hosts if host in bad) or "none is bad"
        raise NotEnoughNodes(
            "{} nodes are needed, {} of {} are fit ({})".format(plan["nodes"], len(fit), len(hosts), found)
        )
    steps = {step["name"]: [fit[node] for node in step["nodes"]] for step in plan["steps"]}
    return Assignment(steps, fit[plan["nodes"] :], bad)
