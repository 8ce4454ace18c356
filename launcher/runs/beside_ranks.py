"""Pure: the srun that opens a shell beside the ranks of a running job, in their container."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_rl.contract.attempt_records import NodeAssignment
from megatron_rl.contract.run_records import PlanRecord

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""A shell; not every image has bash."""

IGNORING_DRAIN = 'trap "" USR1 USR2; exec "$@"'
"""Shell code that ignores the signals of a drain, which reach every step of the job."""


def host_of(rank: int, role: str, plan: PlanRecord, nodes: NodeAssignment) -> str:
    """Node of one rank of the step `role`, such as infer-0. Raises LookupError, with those that there are."""
    steps = {step.name: step for step in plan.steps}
    if role not in steps or role not in nodes.steps:
        raise LookupError(f"no step is called {role}; there are {', '.join(steps)}")
    hosts, tasks = nodes.steps[role], steps[role].tasks_per_node
    if rank >= len(hosts) * tasks:
        raise LookupError(f"{role} has {len(hosts) * tasks} ranks, from 0 on")
    return hosts[rank // tasks]


def of_step(role: str, plan: PlanRecord) -> str:
    """OF_REPLICAS for a step in the image of the replicas with vLLM, else ""."""
    return next((step.of for step in plan.steps if step.name == role), "")


def completed(options: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Complete options of srun. `values` maps placeholders, each the whole value of an option."""
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
    """argv of srun. The command runs with `variables`, which only the ranks have; an empty one is a shell."""
    inside = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    shell = ["sh", "-c", IGNORING_DRAIN, "attach", *inside, *(command or SHELL)]
    where = [f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mem=0"]
    return ["srun", *where, "--job-name=attach", *(["--pty"] if terminal else []), *container, *shell]
