"""mrl attach: a shell where the ranks run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from launcher.cli.complete import complete_run

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

    It is a step of its own that overlaps with theirs (srun --overlap) and ends with the job.

    \b
    Exit codes: those of the shell or COMMAND  1 the run has no ranks now  2 bad usage
    """
    from launcher.errors import BadInput
    from launcher.runs.attach import command_line, container_flags, exports, place_of
    from launcher.runs.control import Failed
    from launcher.runs.find import find
    from launcher.runs.state import look_all
    from megatron_rl.run_dir import read_json

    (standing,) = look_all([find(run)])
    job, found = standing.job, standing.run
    if job is None:
        raise Failed(f"{standing.name}: is a local run: its ranks are processes of this machine")
    nodes = read_json(found.attempt(standing.attempt).nodes) if standing.attempt else None
    if job.kind != "running" or nodes is None:
        waits = f", waits for {standing.waits_for}" if standing.waits_for else ""
        raise Failed(f"{standing.name}: no ranks run now: job {job.job_id} is {standing.state}{waits}")
    try:
        place = place_of(rank, role, read_json(found.plan), nodes)
    except LookupError as error:
        raise BadInput(f"--role {role} --rank {rank}: {error}") from error
    image = found.attempt(standing.attempt).image
    reference = image.read_text(encoding="utf-8").strip() if image.exists() else None
    script = found.script.read_text(encoding="utf-8")
    variables = exports(script)
    # By the name that the script knows the run by: a container may have no other for it.
    root = Path(variables["MRL_RUN_DIR"])
    code = root / found.code.readlink()
    flags = container_flags(script, reference, str(code))
    line = command_line(job.job_id, place, flags, context.meta[COMMAND], sys.stdin.isatty() and sys.stdout.isatty())
    if as_json:
        told = {"run": standing.name, "job_id": job.job_id, "host": place.host, "command": line}
        click.echo(json.dumps(told))
        return
    record = read_json(found.code_record) or {"pythonpath": []}
    variables |= {
        "MRL_ATTEMPT": str(standing.attempt),
        "MRL_STEP": role,
        "PYTHONPATH": ":".join(os.path.normpath(code / part) for part in record["pythonpath"]),
    }
    click.echo(f"{place.host}, job {job.job_id}: beside rank {rank} of {role}", err=True)
    os.chdir(code)
    os.execvpe(line[0], line, {**os.environ, **variables})
