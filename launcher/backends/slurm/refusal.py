"""Pure: sbatch's refusal of a job -> one sentence that says what to change."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

NOISE = re.compile(r"^(sbatch|slurm_[a-z_]+)( error)?: (error: )?(fatal: )?")
HEADLINE = re.compile(r"^(Batch job submission failed|allocation failure): ")

ADVICE = {
    r"invalid partition": "this cluster has no partition {partition}; `sinfo -s` lists them",
    r"invalid account|association": (
        "account {account} is not yours on partition {partition}; `sacctmgr show assoc user=$USER` lists yours"
    ),
    r"invalid qos": "qos {qos} is not for this account or partition; `sacctmgr show qos format=name` lists them",
    r"violates accounting|QOS\w*Limit|Assoc\w*Limit": (
        "a limit of your account or QOS does not allow this job: fewer nodes, a shorter job.time_limit or fewer jobs "
        "at once; `mrl doctor` shows the limits"
    ),
    r"--time specification": "time limit {time} is not one that Slurm reads, such as 4:00:00 or 1-00:00:00",
    r"time limit": "time limit {time} is more than partition {partition} allows; `sinfo -o '%P %l'` shows how much",
    r"more processors|node count|node configuration": (
        "partition {partition} has no {nodes} nodes with {gpus-per-node} GPUs each; check job.nodes, gpus_per_node and "
        "gres against `sinfo -o '%P %D %G'`"
    ),
    r"memory specification": "no node has the memory that --mem asks for",
    r"invalid feature": "no node has the feature {constraint} (constraint); `sinfo -o '%N %f'` lists them",
    r"reservation": "you may use no reservation {reservation} now; see `scontrol show reservation`",
    r"invalid node name": "a node that the profile's sbatch flags name does not exist",
    r"(unrecognized|invalid|unknown|ambiguous) option": "this sbatch does not know one of the profile's sbatch flags",
    r"dependency": "--after: Slurm does not accept {dependency}",
    r"access denied|permission denied": "you may not submit to partition {partition}",
    r"unable to contact|connect failure|timed out|zero bytes": "Slurm's controller does not answer; try again later",
    r"process configuration file|cannot stat file|ClusterName needs": (
        "Slurm is not set up on this machine; is it a login node, and SLURM_CONF right?"
    ),
}
"""Pattern of sbatch's error (22.05 and later) -> what to do; {name} is the value of that option of the job."""


class _Request(dict[str, str]):
    def __missing__(self, option: str) -> str:
        return "(none given)"


def translate(said: str, request: Mapping[str, str]) -> str:
    """One line for a job that sbatch refused: what to change, and Slurm's own lines, each once.

    Args:
        said: sbatch's stderr.
        request: long option of sbatch -> value, of the refused job.
    """
    lines = [HEADLINE.sub("", NOISE.sub("", line.strip())).rstrip(".") for line in said.splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and not line.startswith("Try ")]
    reason = "; ".join(lines) or "no reason given"
    for pattern, advice in ADVICE.items():
        if re.search(pattern, said, re.IGNORECASE):
            return f"{advice.format_map(_Request(request))} (sbatch: {reason})"
    return f"sbatch refused the job: {reason}"


def no_partition(name: str, partitions: Collection[str]) -> tuple[str, str | None]:
    """Message about an unknown partition that lists the known ones, and a suggestion of a similar name."""
    names = sorted(partitions)
    close = difflib.get_close_matches(name, names, n=1)
    text = f"there is none called {name}; there are: {', '.join(names) or 'none that you may see'}"
    return text, f"did you mean {close[0]}?" if close else None
