"""Which nodes a job stays away from when it starts again: those it was submitted to avoid, and those that failed it.

A node that failed the run comes back after a day, by when it is repaired or fails again. And it stays away only as long
as Slurm has enough others: a job that excludes too many waits for ever (seen on 22.05, as BadConstraints), with nobody
there to change its mind.
"""

from typing import Any, Dict, List

from launcher.host.judge import policy
from launcher.host.slurm import client
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json_lines

EXCLUDED_FOR = 86400.0  # seconds


def nodes_to_avoid(run: RunDir, end: Dict[str, Any], listed: List[str], now: float) -> List[str]:
    """All nodes that the job is to avoid from now on. Raises SlurmRefused.

    Args:
        end: the ledger's line of the attempt that has ended.
        listed: nodes that the job avoids as it is.
    """
    fresh = just_excluded(run, end)
    since = dict(excluded_since(run), **dict.fromkeys(fresh, now))
    theirs = [host for host in listed if host not in since]
    # One of ours that is not listed was taken off by somebody.
    ours = [host for host in since if host in fresh or (host in listed and now < since[host] + EXCLUDED_FOR)]
    if ours:
        known = client.node_states(theirs + ours)  # one that the cluster has no more makes Slurm refuse them all
        theirs, ours, fresh = ([host for host in hosts if host in known] for hosts in (theirs, ours, fresh))
    for kept in (ours, fresh, []):
        if not kept or client.could_start(str(run.script), theirs + kept):
            break
    dropped = sorted(set(ours) - set(kept))
    if dropped:
        print("not avoided, because without them too few nodes are left: {}".format(", ".join(dropped)))
    return sorted(set(theirs + kept))


def just_excluded(run: RunDir, end: Dict[str, Any]) -> List[str]:
    """Nodes that failed the run since Slurm last chose its nodes: where the next attempt began in the same allocation,
    Slurm was not told of them.

    Args:
        end: the ledger's line of the attempt that has ended.
    """
    ends = [line for line in read_json_lines(run.attempts_ledger) if line["event"] == "end"]
    hosts = list(end["excluded"])
    for earlier in reversed([line for line in ends if line["attempt"] < end["attempt"]]):
        if earlier.get("then") != policy.HERE:
            break
        hosts += earlier.get("excluded", [])
    return sorted(set(hosts))


def excluded_since(run: RunDir) -> Dict[str, float]:
    """Node -> when the run was last excluded from it, since somebody last had a look at the run."""
    ends = policy.since_held(read_json_lines(run.attempts_ledger))
    return {host: end["at"] for end in ends for host in end.get("excluded", [])}
