"""mrl-submit on this machine: start the attempt and watch it until its end."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.show.terminal import Interruptions, echo
from launcher.cli.submit.request import PlannedRun, Request
from launcher.cluster.choice import LOCAL
from launcher.doctor.preflight import collect_local, findings, problems
from launcher.errors import BadInput
from launcher.fetch.needs import export_packages
from launcher.job.admission import check
from launcher.job.directories import run_directory
from launcher.job.lesson import LessonCheck
from launcher.job.notifications import refusals as notification_refusals
from launcher.job.run_directory import OpenedRun, prepare
from launcher.plan.sizes import Sizes
from launcher.plan.summary import make_plan
from launcher.recipe.changes import as_json
from launcher.recipe.load import Recipe, dump_resolved, origins, refusal
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

RUNS = "runs"
"""Folder of runs without --run-dir, in the current directory."""


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
    included = [Path(path) for path in recipe.config.code.include or ()]
    run = None if planned.given is None else RunDir(planned.given)
    with LessonCheck(recipe, included=included, run=run, change=request.change) as lesson:
        facts = collect_local(recipe, resumes=run is not None and bool(run.checkpoint_steps()))
        refused = list(problems(findings(facts, recipe.config)))
        verdict = lesson.verdict()
    refused += verdict.problems
    refused += refusal(recipe, notification_refusals(recipe.config.notify, os.environ)).problems
    if recipe.config.harvest is not None:
        refused += refusal(recipe, ["harvest.partition needs Slurm, but this run is local: remove harvest"]).problems
    if request.dry_run and not facts.refusals:
        _show(recipe, planned.given, request)
        for note in verdict.notes:
            click.echo(f"note: {note}", err=True)
        for one in refused:
            click.echo(f"would be refused: {one}", err=True)
        return EXIT_USAGE if refused else EXIT_FINISHED
    if refused:
        raise BadInput(refused)
    for found in findings(facts, recipe.config):
        if found.level == "warning":
            click.echo(f"warning: {found.text}; {found.fix}", err=True)
    for note in verdict.notes:
        click.echo(f"note: {note}", err=True)
    sizes = make_plan(recipe, None).sizes
    export_packages(recipe.config, None)
    with run_directory(planned.given, planned.name, Path(RUNS)) as root:
        prepared = prepare(recipe, root, request.change)
    if prepared.attempt is None:
        return _report_finished(recipe.config, prepared.run)
    return _start(recipe, sizes, prepared, prepared.attempt, request)


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


def _start(recipe: Recipe, sizes: Sizes, prepared: OpenedRun, attempt: Attempt, request: Request) -> int:
    # A dry run does not need these, and they are slow to import.
    from launcher.backends.local import Supervisor, supervisor_command
    from launcher.host.record.identity import note_submission
    from launcher.runs.control import DRAIN_MARGIN_S

    run, config = prepared.run, recipe.config
    resume = _resume_command(recipe, run)
    if prepared.corrected:
        echo(f"nothing was trained in {run.root} yet, so it starts with the current recipe", err=request.as_json)
    for one in prepared.changes:
        echo(f"changed: {one}", err=request.as_json)
    number = "" if attempt.number == 1 else f", attempt {attempt.number}"
    echo(f"starting {_in_brief(config)} in {run.root}{number}", err=request.as_json)
    if complaint := note_submission(run, LOCAL, None):
        echo(f"note: {complaint}", err=True)
    drain_limit_s = config.save.timeout_s + DRAIN_MARGIN_S
    owner = None if request.detach else os.getpid()
    interruptions = Interruptions()
    with interruptions.caught():
        notify = config.notify.model_dump_json() if config.notify else None
        command = supervisor_command(run, attempt, config, sizes, drain_limit_s, owner, notify)
        supervisor = Supervisor(command)
        from launcher.cli.submit.follow import Follower, NoSupervisor  # while the supervisor starts

        follower = Follower(run, attempt, supervisor, drain_limit_s)
        try:
            started = follower.wait_for_start()
            if request.detach:
                _report_detached(run, attempt, started, resume, request.as_json)
                return EXIT_FINISHED
            return _follow(config, run, attempt, follower, interruptions, resume)
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
