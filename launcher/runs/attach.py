"""Pure: the srun that opens a shell beside the ranks of a running job, in the container that they run in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""Not every image has bash."""

DEAF = 'trap "" USR1 USR2; exec "$@"'
"""A drain signals every step of the job, and only the ranks know what to do about it."""

_EXPORT = re.compile(r"""^export (\w+)=((?:'[^']*'|"[^"]*"|[^\s'"])*)\n""", re.MULTILINE)
_STEP = re.compile(r"^train\(\) \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)


class Place(NamedTuple):
    step: str
    host: str


def place_of(rank: int, role: str, plan: dict[str, Any], nodes: dict[str, Any]) -> Place:
    """The node of one rank of a step.

    Args:
        rank: within the step.
        role: the step's name: train, infer-0, ...
        plan: plan.json.
        nodes: nodes.json of the attempt: which host plays which node.

    Raises:
        LookupError: no such step or rank; its text says which there are.
    """
    steps = {step["name"]: step for step in plan["steps"]}
    if role not in steps or role not in nodes["steps"]:
        raise LookupError(f"no step is called {role}; there are {', '.join(steps)}")
    hosts, tasks = nodes["steps"][role], steps[role]["tasks_per_node"]
    if rank >= len(hosts) * tasks:
        raise LookupError(f"{role} has {len(hosts) * tasks} ranks, from 0 on")
    return Place(role, hosts[rank // tasks])


def exports(script: str) -> dict[str, str]:
    """The variables that the script exports for everything it starts; its first lines of that kind, without a gap.

    Args:
        script: text of the job's script.
    """
    found = {}
    line = _EXPORT.search(script)
    while line:
        name, value = line.groups()
        if not value.startswith("${"):  # MRL_HOST_PYTHON, which is for the batch host
            found[name] = "".join(shlex.split(value))
        line = _EXPORT.match(script, line.end())
    return found


def container_flags(script: str, image: str | None, workdir: str) -> list[str]:
    """The container options of the training step as the script has them; empty where it has none.

    Args:
        script: text of the job's script.
        image: what its variable `image` held.
        workdir: directory that its steps start in.
    """
    found = _STEP.search(script)
    lines = [line.strip() for line in found[1].splitlines()] if found else []
    text = " ".join(line.removesuffix("\\") for line in lines if re.match(r"--(no-)?container-", line))
    text = text.replace('"$image"', shlex.quote(image or "")).replace('"$PWD"', shlex.quote(workdir))
    return shlex.split(text)


def command_line(
    job_id: str, place: Place, container: Sequence[str], command: Sequence[str], terminal: bool
) -> list[str]:
    """
    Args:
        command: what to run there; empty: a shell.
        terminal: whether there is somebody at a terminal.
    """
    deaf = ["sh", "-c", DEAF, "attach", *(command or SHELL)]
    where = [f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={place.host}", "--mem=0"]
    return ["srun", *where, "--job-name=attach", *(["--pty"] if terminal else []), *container, *deaf]
