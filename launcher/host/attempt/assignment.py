"""Pure: which plan the nodes of an allocation suffice for, and which host does which step of it."""

from typing import Any, Collection, Dict, List, NamedTuple, Sequence


class NotEnoughNodes(Exception):
    """More nodes are unfit than the run can do without."""


class Assignment(NamedTuple):
    working: int  # nodes of the plan that this attempt follows
    steps: Dict[str, List[str]]  # step -> its hosts, in the order of the plan's nodes
    spare: List[str]  # fit and idle
    bad: Dict[str, str]  # host -> why it is not used


def is_dead(state: str) -> bool:
    """Whether Slurm's word for a node means that no step can start there."""
    return state.endswith("*") or state.startswith(("down", "unknown"))


def suffice(plan: Dict[str, Any], hosts: Collection[str]) -> bool:
    """Whether these hosts, all of them fit, are enough for the smallest plan.

    Args:
        plan: plan.json.
    """
    return len(hosts) >= _plans(plan)[-1]["nodes"]


def assign(plan: Dict[str, Any], hosts: Sequence[str], bad: Dict[str, str], given: int = 0) -> Assignment:
    """The plan's nodes are the first fit hosts of the allocation, in Slurm's order, which follows the topology.

    Where `job.nodes` is a range, all but the spare nodes work, as far as there is a layout for that many; a bad node is
    replaced by a spare one first, and makes the run smaller only when there is none left.

    Args:
        plan: plan.json.
        hosts: all hosts of the allocation.
        bad: host -> what is wrong with it.
        given: how many hosts there were before some died, where that has happened.

    Raises:
        NotEnoughNodes: naming the bad ones.
    """
    plans = _plans(plan)
    fewest = plans[-1]["nodes"]
    fit = [host for host in hosts if host not in bad]
    if len(fit) < fewest:
        found = "; ".join("{}: {}".format(host, bad[host]) for host in hosts if host in bad) or "none is bad"
        raise NotEnoughNodes("{} nodes are needed, {} of {} are fit ({})".format(fewest, len(fit), len(hosts), found))
    room = min(len(fit), max(fewest, (given or len(hosts)) - plan["spare_nodes"]))
    chosen = next(each for each in plans if each["nodes"] <= room)
    working = chosen["nodes"]
    steps = {step["name"]: [fit[node] for node in step["nodes"]] for step in chosen["steps"]}
    return Assignment(working, steps, fit[working:], bad)


def _plans(plan: Dict[str, Any]) -> List[Dict[str, Any]]:
    """All plans of plan.json, the largest first."""
    return [plan] + plan.get("alternatives", [])
