"""mrl attach: a shell where the ranks run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TypeVar

import click

from launcher.cli.completion import complete_run
from launcher.errors import BadInput, Failed
from megatron_rl.contract.records import ABSENT, Absent, Found, Unreadable, read

T = TypeVar("T")

COMMAND = "mrl.attach.command"


class _BeforeTheDashes(click.Command):
    """Keeps what follows `--` apart: click would take its first word for RUN where none is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[COMMAND] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


@click.command("attach", short_help="Open a shell where the ranks of a run are.", cls=_BeforeTheDashes)
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Beside which rank of the role.")
@click.option("--role", default="train", show_default=True, help="Step of the job: train, infer-0, ...")
@click.option("--json", "as_json", is_flag=True, help="Only say what would be run: {run, job_id, host, command}.")
@click.pass_context
def command(context: click.Context, run: str | None, rank: int, role: str, as_json: bool) -> None:
    """Open a shell, or run COMMAND, on a node of RUN's job: in the ranks' container image, with their GPUs, files and
    environment but for what the profile's prolog sets.

    Where containers have names (named: of the profile), it is the ranks' own container, as long as they run.
    It is a step of its own that overlaps with theirs (srun --overlap) and ends with the job.

    \b
    Exit codes: those of the shell or COMMAND  1 the run has no ranks now  2 bad usage
    """
    from launcher.host.slurm.call import submitting_environment
    from launcher.runs.attach import command_line, completed, harvested, host_of
    from launcher.runs.find import find
    from launcher.runs.state import UNSURE, read_statuses
    from megatron_rl.contract.attempt_records import NodeAssignment
    from megatron_rl.contract.codes import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, STEP_VARIABLE
    from megatron_rl.contract.run_records import CODE, CONTAINER, IMAGE, CodeSnapshot, PlanRecord, container_name

    (status,) = read_statuses([find(run)])
    job, found, attempt = status.job, status.run, status.run.attempt(status.attempt)
    if status.state in UNSURE:
        raise Failed(f"{status.name}: {status.reason}")
    if job is None:
        raise Failed(f"{status.name}: is a local run: its ranks are processes of this machine")
    nodes = read(NodeAssignment, attempt.nodes)
    if job.kind != "running" or nodes is ABSENT:
        waits = f", waits for {status.waits_for}" if status.waits_for else ""
        raise Failed(f"{status.name}: no ranks run now: job {job.job_id} is {status.state}{waits}")
    assignment, plan = _known(nodes, status.name), _known(read(PlanRecord, found.plan), status.name)
    snapshot = _known(read(CodeSnapshot, found.code_record), status.name)
    apart = harvested(role, attempt)
    job_id = str(apart.job) if apart is not None else job.job_id
    try:
        host = apart.hosts[0] if apart is not None else host_of(rank, role, plan, assignment)
    except LookupError as error:
        raise BadInput(f"--role {role} --rank {rank}: {error}") from error
    try:
        # By the name that the script knows the run by: a container may have no other for it.
        code = Path(plan.environment.get(RUN_DIR_VARIABLE, found.root.absolute())) / found.code.readlink()
        image = attempt.image.read_text(encoding="utf-8").strip() if attempt.image.exists() else ""
    except OSError as error:
        raise Failed(f"{status.name}: {error.filename}: {error.strerror}") from error
    name = container_name(job.job_id, str(attempt.number)) + ":exec"
    # A harvested replica's container has no name to enter it by: this is another one of its image.
    asked = [option for option in plan.container if apart is None or not option.startswith("--container-name=")]
    container = completed(asked, {IMAGE: image, CODE: str(code), CONTAINER: name})
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    line = command_line(job_id, host, container, plan.rank_environment, context.meta[COMMAND], terminal)
    if as_json:
        click.echo(json.dumps({"run": status.name, "job_id": job_id, "host": host, "command": line}))
        return
    variables = {
        **plan.environment,
        ATTEMPT_VARIABLE: str(attempt.number),
        STEP_VARIABLE: role,
        "PYTHONPATH": ":".join(os.path.normpath(code / part) for part in snapshot.pythonpath),
    }
    click.echo(f"{host}, job {job_id}: beside rank {rank} of {role}", err=True)
    try:
        os.chdir(code)
        os.execvpe(line[0], line, {**submitting_environment(""), **variables})
    except OSError as error:
        raise Failed(f"{status.name}: {error.filename}: {error.strerror}") from error


def _known(found: Found[T], run: str) -> T:
    """The record, without which nobody can tell where the ranks are. Raises Failed."""
    if isinstance(found, Absent):
        raise Failed(f"{run}: its plan or its code is gone")
    if isinstance(found, Unreadable):
        raise Failed(f"{run}: {found}")
    return found
