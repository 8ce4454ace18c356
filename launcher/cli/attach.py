"""mrl attach: a shell next to the ranks of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from launcher.cli.arguments import RUN
from launcher.errors import BadInput, Failed
from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.records import ABSENT, Absent, Found, Unreadable, read

if TYPE_CHECKING:
    from launcher.backends.slurm.jobs import JobState
    from launcher.runs.state import RunStatus
    from megatron_rl.contract.attempt_records import NodeAssignment
    from megatron_rl.contract.plan_records import PlanStep

T = TypeVar("T")

COMMAND = "mrl.attach.command"

SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
"""A shell; not every image has bash."""

IGNORING_DRAIN = 'trap "" USR1 USR2; exec "$@"'
"""Shell code that ignores the signals of a drain, which reach every step of the job."""


class _BeforeTheDashes(click.Command):
    """Command that sets the words after `--` aside; click would use the first of them as RUN if none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command("attach", cls=_BeforeTheDashes)
@RUN
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Rank of the role.")
@click.option("--role", default="train", show_default=True, help="Step of the job: train, infer-0, teacher-0, ...")
@click.option("--json", "as_json", is_flag=True, help="Only print the command, as {run, job_id, host, command}.")
@click.pass_context
def command(context: click.Context, run: str | None, rank: int, role: str, as_json: bool) -> None:
    """Open a shell, or run COMMAND, on a node of RUN's job: in the ranks' container image, with their GPUs, files and
    environment, except for what the profile's prolog sets.

    If containers have names (named: in the profile), it runs in the ranks' own container, as long as they run. It is a
    separate step that overlaps with theirs (srun --overlap) and ends with the job.

    \b
    Exit codes: those of the shell or COMMAND  1 the run has no ranks now  2 bad usage
    """
    from launcher.host.slurm.call import submitting_environment
    from launcher.runs.find import find
    from launcher.runs.state import read_statuses
    from megatron_rl.contract.codes import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, STEP_VARIABLE
    from megatron_rl.contract.plan_records import PlanRecord, steps_of
    from megatron_rl.contract.run_records import CODE, CONTAINER, IMAGE, CodeSnapshot, container_name

    (status,) = read_statuses([find(run)])
    found, attempt = status.run, status.run.attempt(status.attempt)
    job, assignment = _running(status)
    plan = _known(read(PlanRecord, found.plan), status.name)
    snapshot = _known(read(CodeSnapshot, found.code_record), status.name)
    steps = {step.name: step for step in steps_of(plan, plan.nodes)}
    of = steps[role].of if role in steps and attempt.replica_image.exists() else ""
    try:
        host = host_of(rank, role, steps, assignment)
    except LookupError as error:
        raise BadInput(f"--role {role} --rank {rank}: {error}") from error
    try:
        # Under the script's name for the run directory: a container may not see it under another.
        code = Path(plan.environment.get(RUN_DIR_VARIABLE, found.root.absolute())) / found.code.readlink()
        image_file = attempt.replica_image if of else attempt.image
        image = read_bytes(image_file).decode("utf-8", "replace").strip() if image_file.exists() else ""
    except OSError as error:
        raise Failed(f"{status.name}: {error.filename}: {error.strerror}") from error
    name = container_name(job.job_id, str(attempt.number), of) + ":exec"
    container = completed(plan.container, {IMAGE: image, CODE: str(code), CONTAINER: name})
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = command_line(job.job_id, host, container, plan.rank_environment, context.meta[COMMAND], terminal)
    if as_json:
        click.echo(json.dumps({"run": status.name, "job_id": job.job_id, "host": host, "command": line}))
        return
    variables = {
        **plan.environment,
        ATTEMPT_VARIABLE: str(attempt.number),
        STEP_VARIABLE: role,
        "PYTHONPATH": ":".join(os.path.normpath(code / part) for part in snapshot.pythonpath),
    }
    click.echo(f"{host}, job {job.job_id}: next to rank {rank} of {role}", err=True)
    try:
        os.chdir(code)
        os.execvpe(line[0], line, {**submitting_environment(""), **variables})
    except OSError as error:
        raise Failed(f"{status.name}: {error.filename}: {error.strerror}") from error


def _running(status: RunStatus) -> tuple[JobState, NodeAssignment]:
    from launcher.runs.state import UNSURE
    from megatron_rl.contract.attempt_records import NodeAssignment

    job = status.job
    if status.state in UNSURE:
        raise Failed(f"{status.name}: {status.reason}")
    if job is None:
        raise Failed(f"{status.name} is a local run: its ranks are processes on this machine")
    nodes = read(NodeAssignment, status.run.attempt(status.attempt).nodes)
    if job.kind != "running" or nodes is ABSENT:
        waits = f", waiting for {status.waits_for}" if status.waits_for else ""
        raise Failed(f"{status.name} has no running ranks: job {job.job_id} is {status.state}{waits}")
    return job, _known(nodes, status.name)


def _known(found: Found[T], run: str) -> T:
    if isinstance(found, Absent):
        raise Failed(f"{run}: the record of its plan or its code is missing")
    if isinstance(found, Unreadable):
        raise Failed(f"{run}: {found}")
    return found


def host_of(rank: int, role: str, steps: Mapping[str, PlanStep], nodes: NodeAssignment) -> str:
    """Node of one rank of the step `role`, such as infer-0. Raises LookupError, with those that there are."""
    if role not in steps or role not in nodes.steps:
        raise LookupError(f"no step is called {role}; there are {', '.join(steps)}")
    hosts, tasks = nodes.steps[role], steps[role].tasks_per_node
    if rank >= len(hosts) * tasks:
        raise LookupError(f"{role} has {len(hosts) * tasks} ranks, from 0 on")
    return hosts[rank // tasks]


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
