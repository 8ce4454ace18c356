"""mrl-submit on this machine: start the attempt and watch it until its end."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.show.terminal import Interruptions, echo
from launcher.cluster.choice import LOCAL
from launcher.errors import BadInput
from launcher.job.admission import check
from launcher.job.directories import RUNS
from launcher.recipe.changes import as_json
from launcher.recipe.load import Recipe, dump_resolved, origins
from launcher.start.on_this_machine import (
    NoSupervisor,
    Preparation,
    check_here,
    prepare_here,
    supervise,
    wait_for_start,
)
from launcher.start.request import PlannedRun, Request
from megatron_rl.contract.codes import (
    CRASHED,
    EXIT_CRASHED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    LOST,
    MISCONFIGURED,
)
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.recipe.config import RunConfig

if TYPE_CHECKING:  # slow to import, and not needed for a dry run
    from launcher.cli.submit.follow import Follower
    from megatron_rl.contract.attempt_records import AttemptStart


def refuse_slurm_only(request: Request, count: int) -> None:
    slurm_only = ("script", "follow", "after", "max_running", "in_allocation", "update_code")
    given = [f"--{name.replace('_', '-')}" for name in slurm_only if getattr(request, name)]
    if given:
        raise BadInput(
            f"{', '.join(given)}: only for Slurm clusters, but this run is local (choose one with --cluster)"
        )
    if count > 1:
        raise BadInput(f"a sweep of {count} runs needs a Slurm cluster; quote a comma that belongs to a value")
    if request.as_json and not (request.dry_run or request.detach):
        raise BadInput("--json: for a local run, add --dry-run or --detach")


def run_on_this_machine(planned: PlannedRun, request: Request) -> int:
    recipe = planned.recipe
    checked = check_here(planned, request)
    if request.dry_run and not checked.packages_missing:
        _show(recipe, planned.given, request)
        for note in checked.notes:
            click.echo(f"note: {note}", err=True)
        for one in checked.refused:
            click.echo(f"would be refused: {one}", err=True)
        return EXIT_USAGE if checked.refused else EXIT_FINISHED
    if not checked.refused:
        for warning in checked.warnings:
            click.echo(f"warning: {warning}", err=True)
        for note in checked.notes:
            click.echo(f"note: {note}", err=True)
    prepared = prepare_here(planned, request, checked)
    if prepared.opened.attempt is None:
        return _report_finished(recipe.config, prepared.opened.run)
    return _start(prepared, prepared.opened.attempt, request)


def _show(recipe: Recipe, root: Path | None, request: Request) -> None:
    """Show the dry run: the resolved recipe on stdout, everything else on stderr."""
    config = recipe.config
    changed = check(recipe, root, request.change) if root else []
    target = root or Path(RUNS) / f"{config.name}-DATE-TIME"
    if request.as_json:
        values = {"cluster": LOCAL, "run_dir": str(target), "resolved": config.model_dump(mode="json")}
        found = {key: str(origin) for key, origin in origins(recipe).items()}
        click.echo(json.dumps({**values, "origins": found, "changes": as_json(changed)}))
        return
    for one in changed:
        click.echo(f"change: {one}", err=True)
    click.echo(f"would start {_in_brief(config)} in {target}", err=True)
    click.echo(dump_resolved(config).encode(), nl=False)  # UTF-8, independent of the terminal


def _in_brief(config: RunConfig) -> str:
    ranks, cpu = config.job.world_size, config.job.device == "cpu"
    kind = ("CPU process" + "es" * (ranks > 1)) if cpu else ("GPU" + "s" * (ranks > 1))
    apart = ", partitioned" if config.placement.mode == "partitioned" else ""
    beside = f" with {config.inference.engine} beside {'them' if ranks > 1 else 'it'}" if config.shares_devices else ""
    return f"{config.name} on {ranks} {kind} of this machine{apart}{beside}"


def _report_finished(config: RunConfig, run: RunDir) -> int:
    from launcher.cli.show.ending import result_lines
    from launcher.cli.show.history import HistoryReader

    reader = HistoryReader(run, run.attempt(run.last_attempt()), config.training.steps)
    for line in [f"{run.root}: already finished, nothing to do", *result_lines(reader.poll())]:
        click.echo(line)
    return EXIT_FINISHED


def _resume_command(recipe: Recipe, run: RunDir) -> str:
    from launcher.runs.find import pasteable_command

    if Path(recipe.asked) == run.resolved:
        return pasteable_command("resume", str(run.root))
    return shlex.join(["mrl-submit", recipe.asked, *recipe.overrides, "--run-dir", str(run.root)])


def _start(prepared: Preparation, attempt: Attempt, request: Request) -> int:
    from launcher.host.record.identity import note_submission  # a dry run does not need it

    recipe, opened, run = prepared.recipe, prepared.opened, prepared.opened.run
    resume = _resume_command(recipe, run)
    if opened.corrected:
        echo(f"nothing was trained in {run.root} yet, so it starts with the current recipe", err=request.as_json)
    for one in opened.changes:
        echo(f"changed: {one}", err=request.as_json)
    number = "" if attempt.number == 1 else f", attempt {attempt.number}"
    echo(f"starting {_in_brief(recipe.config)} in {run.root}{number}", err=request.as_json)
    if complaint := note_submission(run, LOCAL, None):
        echo(f"note: {complaint}", err=True)
    interruptions = Interruptions()
    with interruptions.caught():
        started = supervise(prepared, attempt, None if request.detach else os.getpid())
        from launcher.cli.submit.follow import Follower  # while the supervisor starts

        follower = Follower(run, attempt, started.supervisor, started.drain_limit_s)
        try:
            begun = wait_for_start(started)
            if request.detach:
                _report_detached(run, attempt, begun, resume, request.as_json)
                return EXIT_FINISHED
            return _follow(recipe.config, run, attempt, follower, interruptions, resume)
        except NoSupervisor as error:
            echo(f"failed: {error}\nlogs: {attempt.logs}\nresume:      {resume}", err=True)
            return EXIT_CRASHED


def _report_detached(run: RunDir, attempt: Attempt, started: AttemptStart, resume: str, as_json: bool) -> None:
    if as_json:
        where = {"cluster": LOCAL, "run_dir": str(run.root.absolute()), "job_id": None}
        click.echo(json.dumps({**where, "attempt": attempt.number, "pid": started.pid}))
        return
    echo(f"running. To save and stop it: kill {started.pid}\nlogs: {attempt.latest_logs}\nresume:      {resume}")


def _follow(
    config: RunConfig, run: RunDir, attempt: Attempt, follower: Follower, interruptions: Interruptions, resume: str
) -> int:
    from launcher.cli.show.ending import EXIT_CODES, ending_lines
    from launcher.cli.show.history import HistoryReader
    from launcher.cli.show.progress_lines import ProgressLines

    reader = HistoryReader(run, attempt, config.training.steps)
    view = ProgressLines()
    end = follower.wait_for_end(reader, view, interruptions)
    view.show(reader.poll())
    for line in ending_lines(run, attempt, end, reader.history, resume):
        echo(line, err=end.outcome in (CRASHED, MISCONFIGURED))
    if end.outcome in (CRASHED, LOST) and len(interruptions.names) > 1:
        return EXIT_INTERRUPTED  # killed, as the user asked
    return EXIT_CODES.get(end.outcome, EXIT_CRASHED)
