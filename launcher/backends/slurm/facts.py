"""Facts about the Slurm of this login node: the unparsed output of its commands."""

from __future__ import annotations

import getpass
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

from launcher.backends.probe.command import CommandAnswer, ask

QOS_COLUMNS = (
    "Name,GraceTime,Preempt,PreemptMode,PreemptExemptTime,Flags,MaxWall,GrpTRES,MaxTRES,MaxTRESPU,MaxTRESPA,"
    "MaxJobsPU,MaxSubmitPU"
)
ASSOCIATION_COLUMNS = "Cluster,Account,User,Partition,QOS,DefaultQOS,MaxWall,GrpTRES,MaxTRES,MaxJobs"
NODE_COLUMNS = (
    "%N|%R|%T|%G|%c|%f"  # node, partition, state, gres, CPUs, features: a line for each partition of each node
)


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    version: CommandAnswer
    config: CommandAnswer
    partitions: CommandAnswer
    nodes: CommandAnswer
    qos: CommandAnswer
    associations: CommandAnswer
    sacct: CommandAnswer
    """sacct of the jobs that started just now: only whether it works matters"""
    reservations: CommandAnswer
    srun_help: CommandAnswer
    """srun --help, in which loaded plug-ins list their options"""


def collect() -> SlurmFacts:
    """Run all commands at once, each with its own time limit."""
    commands = {
        "version": ["sinfo", "--version"],
        "config": ["scontrol", "show", "config"],
        "partitions": ["scontrol", "--all", "--oneliner", "show", "partition"],
        "nodes": ["sinfo", "--all", "--noheader", "--Node", "--format", NODE_COLUMNS],
        "qos": ["sacctmgr", "--parsable2", "show", "qos", f"format={QOS_COLUMNS}"],
        "associations": [
            *("sacctmgr", "--parsable2", "show", "associations"),
            *("where", f"user={getpass.getuser()}", f"format={ASSOCIATION_COLUMNS}"),
        ],
        "sacct": ["sacct", "--allocations", "--noheader", "--parsable2", "--starttime", "now", "--format", "JobID"],
        "reservations": ["scontrol", "--all", "--oneliner", "show", "reservation"],
        "srun_help": ["srun", "--help"],
    }
    assert set(commands) == {field.name for field in fields(SlurmFacts)}
    with ThreadPoolExecutor(len(commands)) as pool:
        answers = dict(zip(commands, pool.map(ask, commands.values()), strict=True))
    return SlurmFacts(**answers)
