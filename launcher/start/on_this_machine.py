"""Starts a planned run on this machine: its check, its directory, and the supervisor of its attempt."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.doctor.preflight import collect_local, findings, problems
from launcher.errors import BadInput, Failed
from launcher.fetch.needs import export_packages
from launcher.job.directories import RUNS, run_directory
from launcher.job.lesson import LessonCheck
from launcher.job.notifications import refusals as notification_refusals
from launcher.job.run_directory import OpenedRun, prepare
from launcher.plan.sizes import Sizes
from launcher.plan.summary import make_plan
from launcher.recipe.load import Recipe, refusal
from launcher.start.request import PlannedRun, Request
from megatron_rl.contract.paths import Attempt, RunDir

if TYPE_CHECKING:  # slow to import, and not needed for a dry run
    from launcher.backends.local import Supervisor
    from megatron_rl.contract.attempt_records import AttemptStart

START_TICK = 0.05  # seconds between two reads of the run directory until the attempt has begun
START_LIMIT = 60.0  # seconds for the supervisor to write its first line


class NoSupervisor(Failed):
    """The attempt can no longer be followed."""


@dataclass(frozen=True, slots=True)
class LocalCheck:
    """Result of the checks that precede a start on this machine."""

    refused: tuple[str, ...]
    packages_missing: bool
    """Whether the refusals concern this machine's packages, so that nothing else about the run is known."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Preparation:
    """Run directory whose next attempt is ready to start."""

    recipe: Recipe
    sizes: Sizes
    opened: OpenedRun


@dataclass(frozen=True, slots=True)
class Supervised:
    """An attempt on this machine, and its supervisor."""

    run: RunDir
    attempt: Attempt
    supervisor: Supervisor
    drain_limit_s: float
    """Seconds for the ranks to save after they are asked to leave."""


def check_here(planned: PlannedRun, request: Request) -> LocalCheck:
    """Check everything that this machine, the recipe and its first rows decide. Writes nothing."""
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
    found = findings(facts, recipe.config)
    warned = tuple(f"{one.text}; {one.fix}" for one in found if one.level == "warning")
    return LocalCheck(tuple(refused), bool(facts.refusals), tuple(verdict.notes), warned)


def prepare_here(planned: PlannedRun, request: Request, checked: LocalCheck) -> Preparation:
    """Make the run directory and its next attempt, unless the run is finished. Raises BadInput."""
    if checked.refused:
        raise BadInput(checked.refused)
    recipe = planned.recipe
    sizes = make_plan(recipe, None).sizes
    export_packages(recipe.config, None)
    with run_directory(planned.given, planned.name, Path(RUNS)) as root:
        return Preparation(recipe, sizes, prepare(recipe, root, request.change))


def supervise(prepared: Preparation, attempt: Attempt, owner: int | None) -> Supervised:
    """Start the supervisor of a prepared attempt. `owner`: process whose death drains the run; None: the run outlives
    its starter. Raises Failed."""
    # A dry run does not need these, and they are slow to import.
    from launcher.backends.local import Supervisor, supervisor_command
    from launcher.runs.control import DRAIN_MARGIN_S

    config, run = prepared.recipe.config, prepared.opened.run
    drain_limit_s = config.save.timeout_s + DRAIN_MARGIN_S
    notify = config.notify.model_dump_json() if config.notify else None
    command = supervisor_command(run, attempt, config, prepared.sizes, drain_limit_s, owner, notify)
    return Supervised(run, attempt, Supervisor(command), drain_limit_s)


def wait_for_start(started: Supervised) -> AttemptStart:
    """Wait for an attempt to start; return its line in the ledger. Raises NoSupervisor."""
    from launcher.runs.state import line_of
    from megatron_rl.contract.attempt_records import AttemptStart

    supervisor, give_up = started.supervisor, time.monotonic() + START_LIMIT
    while True:
        gone = supervisor.ended()
        line = line_of(started.run, started.attempt.number, AttemptStart)
        if line is not None:
            return line
        if gone:
            raise NoSupervisor(f"the supervisor did not start: {supervisor.complaint() or 'it gave no reason'}")
        if time.monotonic() > give_up:
            raise NoSupervisor(f"the supervisor, pid {supervisor.pid}, did not start within {START_LIMIT:.0f} s")
        time.sleep(START_TICK)
