"""Which nodes a job stays away from when it starts again: those it was submitted to avoid, and those that failed it.

A node that failed the run comes back after a day, by when it is repaired or fails again. And it stays away only as long
as Slurm has enough others: a job that excludes too many waits for ever (seen on 22.05, as BadConstraints), with nobody
there to change its mind.
"""

from __future__ import annotations

from launcher.host.judge import policy
from launcher.host.record.ledger import ends_in, read_ledger_or_complain
from launcher.host.slurm import ask
from megatron_rl.contract.attempt_records import AttemptEnd, LedgerLine
from megatron_rl.contract.paths import RunDir

EXCLUDED_FOR_S = 86400.0


def nodes_to_avoid(run: RunDir, end: AttemptEnd, listed: list[str], now: float) -> list[str]:
    """All nodes that the job is to avoid from now on. Raises SlurmRefused.

    Args:
        end: of the attempt that has ended.
        listed: nodes that the job avoids as it is.
    """
    history = read_ledger_or_complain(run)
    fresh = just_excluded(history, end)
    since = dict(excluded_since(history), **dict.fromkeys(fresh, now))
    theirs = [host for host in listed if host not in since]
    # One of ours that is not listed was taken off by somebody.
    ours = [host for host in since if host in fresh or (host in listed and now < since[host] + EXCLUDED_FOR_S)]
    if ours:
        known = ask.node_states(theirs + ours)  # one that the cluster has no more makes Slurm refuse them all
        theirs, ours, fresh = ([host for host in hosts if host in known] for hosts in (theirs, ours, fresh))
    for avoided in (ours, fresh, []):
        if not avoided or ask.could_start(str(run.script), theirs + avoided):
            break
    dropped = sorted(set(ours) - set(avoided))
    if dropped:
        print("not avoided, because without them too few nodes are left: {}".format(", ".join(dropped)))
    return sorted(set(theirs + avoided))


def just_excluded(history: list[LedgerLine], end: AttemptEnd) -> list[str]:
    """Nodes that failed the run since Slurm last chose its nodes: where the next attempt began in the same allocation,
    Slurm was not told of them.

    Args:
        end: of the attempt that has ended.
    """
    hosts = list(end.excluded)
    for earlier in reversed([line for line in ends_in(history) if line.attempt < end.attempt]):
        if earlier.then != policy.STAYS:
            break
        hosts += earlier.excluded
    return sorted(set(hosts))


def excluded_since(history: list[LedgerLine]) -> dict[str, float]:
    """Node -> when the run was last excluded from it, since somebody last had a look at the run."""
    return {host: end.at for end in policy.since_held(history) for host in end.excluded}
