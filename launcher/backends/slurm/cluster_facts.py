"""Output of Slurm's commands on this login node, and pure parsers of it, for 22.05 to 25.11, whose keys differ but not
their form.

Slurm writes "nothing" as `(null)`, `N/A`, `NONE` or an empty word, and "no limit" as UNLIMITED or INFINITE: keys with
such values are absent from the result.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

from launcher.backends.probe.command import CommandAnswer, ask
from launcher.host.slurm.formats import NOTHING, parse_config, parse_fields
from megatron_rl.contract.text import whole_number

Fields = dict[str, str]


@dataclass(frozen=True, slots=True)
class Gres:
    """A generic resource of a node: `gpu:h100:8(S:0-1)`."""

    name: str
    type: str | None
    count: int


def settings(text: str) -> Fields:
    """`scontrol show config`: one `Key = value` a line."""
    return _present(parse_config(text).items())


def oneliners(text: str) -> list[Fields]:
    """`scontrol --oneliner show ...`: a record a line."""
    return [_present(parse_fields(line).items()) for line in text.splitlines() if "=" in line]


def table(text: str) -> list[Fields]:
    """`sacctmgr --parsable2 show ...`: a line of column names, then rows."""
    lines = [line.split("|") for line in text.splitlines() if "|" in line]
    return [_present(zip(lines[0], row, strict=True)) for row in lines[1:] if len(row) == len(lines[0])]


def number(text: str | None, default: int = 0) -> int:
    """The number that starts `30 sec`, `20` or `5`."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text or "")
    return int(found.group()) if found else default


def options(text: str | None) -> dict[str, str]:
    """`a,b=2` -> {a: "", b: "2"}, as in SchedulerParameters."""
    pairs = (part.partition("=") for part in (text or "").split(",") if part)
    return {key.strip(): value.strip() for key, _, value in pairs}


def tres(text: str | None) -> dict[str, int]:
    """`node=2,gres/gpu=16` -> counts; values that are not plain numbers, such as memory with its unit, are omitted."""
    counts = ((key, whole_number(value)) for key, value in options(text).items())
    return {key: count for key, count in counts if count is not None}


def gres(text: str | None) -> list[Gres]:
    """`gpu:h100:8(S:0-1),nic:2` -> its parts; socket affinities are dropped."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", text or "").split(","):
        name, *rest = part.split(":")
        count = whole_number(rest[-1]) if rest else None
        if count is not None:
            found.append(Gres(name, rest[0] if len(rest) > 1 else None, count))
    return found


def version(text: str) -> tuple[int, int, int] | None:
    """`slurm-wlm 22.05.8` -> (22, 5, 8)."""
    found = re.search(r"\b([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _present(pairs: Iterable[tuple[str, str]]) -> Fields:
    return {key: value for key, value in pairs if value not in NOTHING}


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
    sacct: CommandAnswer  # sacct of the jobs that started just now: only whether it works matters
    srun_help: CommandAnswer  # srun --help, in which loaded plug-ins list their options


def collect() -> SlurmFacts:
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
        "srun_help": ["srun", "--help"],
    }
    assert set(commands) == {field.name for field in fields(SlurmFacts)}
    with ThreadPoolExecutor(len(commands)) as pool:
        answers = dict(zip(commands, pool.map(ask, commands.values()), strict=True))
    return SlurmFacts(**answers)
