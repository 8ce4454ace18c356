"""Pure: the srun that opens a shell beside the ranks of a running job, in the container that they run in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.contract.attempt_records import NodeAssignment, ReplicaState
from megatron_rl.contract.paths import Attempt
from megatron_rl.contract.records import if_readable, read
from megatron_rl.contract.run_records import PlanRecord

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""Not every image has bash."""

IGNORING_DRAIN = 'trap "" USR1 USR2; exec "$@"'
"""A drain signals every step of the job, and only the ranks know what to do about it."""


def host_of(rank: int, role: str, plan: PlanRecord, nodes: NodeAssignment) -> str:
    """The node of one rank of a step.

    Args:
        rank: within the step.
        role: the step's name: train, infer-0, ...
        nodes: of the attempt: which host plays which node.

    Raises:
        LookupError: no such step or rank; its text says which there are.
    """
    steps = {step.name: step for step in plan.steps}
    if role not in steps or role not in nodes.steps:
        raise LookupError(f"no step is called {role}; there are {', '.join(steps)}")
    hosts, tasks = nodes.steps[role], steps[role].tasks_per_node
    if rank >= len(hosts) * tasks:
        raise LookupError(f"{role} has {len(hosts) * tasks} ranks, from 0 on")
    return hosts[rank // tasks]


def harvested(role: str, attempt: Attempt) -> ReplicaState | None:
    """Record of a replica that runs in a job of its own; None: the role is not one of those."""
    kind, _, number = role.partition("-")
    if kind != "infer" or not number.isdecimal():
        return None
    state = if_readable(read(ReplicaState, attempt.replica(int(number)).state))
    return state if state is not None and state.job is not None and state.hosts else None


def completed(options: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Options of srun with what an attempt knows.

    Args:
        values: placeholder -> what stands in its place where it is the whole value of an option.
    """
    parts = (option.partition("=") for option in options)
    return [name + equals + values.get(value, value) for name, equals, value in parts]


def command_line(
    job_id: str,
    host: str,
    container: Sequence[str],
    variables: Mapping[str, str],
    command: Sequence[str],
    terminal: bool,
) -> list[str]:
    """The argv of srun.

    Args:
        container: its options, completed.
        variables: that only the ranks have.
        command: what to run there; empty: a shell.
        terminal: whether there is somebody at a terminal.
    """
    inside = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    shell = ["sh", "-c", IGNORING_DRAIN, "attach", *inside, *(command or SHELL)]
    where = [f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mem=0"]
    return ["srun", *where, "--job-name=attach", *(["--pty"] if terminal else []), *container, *shell]
