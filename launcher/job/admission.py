"""Checks whether a directory can hold the requested run. They write nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from launcher.errors import BadInput
from launcher.job.directories import disk_errors
from launcher.recipe.changes import CHANGEABLE, Change, changes, differing, with_remarks
from launcher.recipe.load import Recipe, read_resolved, recorded_evaluation
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Unreadable
from megatron_rl.recipe.section import flat


def check(recipe: Recipe, root: Path, change: bool) -> list[Change]:
    """Changes that `run_directory.opened` would make, for a dry run. Raises BadInput where it would refuse."""
    run = RunDir(root)
    refuse_foreign(run)
    with disk_errors(root):
        # The templates slurm/*.sbatch call mrl-submit from inside the job that owns the run.
        refuse_owned(run, os.environ.get("SLURM_JOB_ID"))
        return accepted_changes(run, with_date(recipe, run), change) if run.resolved.exists() else []


def refuse_foreign(run: RunDir) -> None:
    with disk_errors(run.root):
        if run.root.exists() and not run.root.is_dir():
            raise BadInput(f"{run.root}: is a file, not a directory")
        ours = any(path.exists() for path in (run.lock, run.resolved, run.job, run.identity))
        if run.root.is_dir() and any(run.root.iterdir()) and not ours:
            raise BadInput(f"{run.root}: is not empty and not a run directory; give a new or an empty one")


def refuse_owned(run: RunDir, my_job: str | None) -> None:
    """Raise BadInput where another Slurm job owns the run, or may. A job owns its run until Slurm says that it has
    ended. `my_job`: Slurm job of this process, which may own the run."""
    if not run.job.exists():
        return
    from launcher.backends.slurm.jobs import read_owners  # imported late: a new run does not need it
    from launcher.runs.owner import Copy, recorded_owner
    from launcher.runs.state import has_left, last_line

    owner = recorded_owner(run)
    if isinstance(owner, Unreadable):
        raise BadInput(f"{owner}, so the run's job is unknown; remove the file if the run has none (squeue --me)")
    if isinstance(owner, Copy) or owner is ABSENT or owner.job_id == my_job:
        return
    (job,) = read_owners([owner])
    if has_left(job, last_line(run)):
        return
    if job.kind == "unknown":
        raise BadInput(f"{run.root}: belongs to job {job.job_id}, and Slurm does not answer about it: {job.reason}")
    if job.owns:
        nodes = f" on {job.nodes}" if job.nodes else ""
        what = f"see it with mrl status {run.root.name}, end it with mrl cancel --drain {run.root.name}"
        if job.word == "COMPLETING":
            what = "Slurm is ending it; try again in a moment"
        raise BadInput(f"{run.root}: belongs to job {job.job_id}, which is {job.word.lower()}{nodes}; {what}")


def with_date(recipe: Recipe, run: RunDir) -> Recipe:
    """Fix the date that the run's chat template shows as today, where the recipe leaves it open: the recorded date of
    the run, or today if it is new. By the clock the template would write other prompts on another day, and a run can
    only resume with the same ones."""
    tokenizer = recipe.config.tokenizer
    if tokenizer.type == "characters" or tokenizer.date:
        return recipe
    with disk_errors(run.root):
        day = read_resolved(run.resolved).tokenizer.date if run.resolved.exists() else None
    tokenizer = tokenizer.model_copy(update={"date": day or date.today().isoformat()})
    return replace(recipe, config=recipe.config.model_copy(update={"tokenizer": tokenizer}))


def corrections(run: RunDir, recipe: Recipe) -> list[Change]:
    """Changes of `recipe` to a run in which nothing was trained yet. Such a run may start over with any values. Empty
    for other runs."""
    if not run.resolved.exists() or has_work(run):
        return []
    return _changes(run, recipe)


def _changes(run: RunDir, recipe: Recipe) -> list[Change]:
    found = changes(read_resolved(run.resolved), recipe.config)
    before, after = (flat(one.model_dump()) if one else {} for one in (recorded_evaluation(run), recipe.evaluation))
    known = {one.key for one in found}  # the environment, which both have
    return [*found, *(one for one in differing(before, after) if one.key not in known)]


def has_work(run: RunDir) -> bool:
    if any(path.exists() for path in (run.done, run.fork)) or any(run.root.glob(f"{run.evaluation.stem}.*")):
        return True
    try:
        if run.metrics.stat().st_size:
            return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:  # what cannot be read counts as work
        return True
    return any(step > 0 for step in run.checkpoint_steps())


def accepted_changes(run: RunDir, recipe: Recipe, change: bool) -> list[Change]:
    """Differences between `recipe` and the run's recipe. Raises BadInput where they are not allowed."""
    if corrected := corrections(run, recipe):
        return corrected
    before, config = read_resolved(run.resolved), recipe.config
    found = _changes(run, recipe)
    refused = [one for one in found if not one.allowed]
    if not change:
        or_else = "start a new run, or fork this one" if refused else "give --change"
        _refuse(run, found, f"continue with the earlier values, or {or_else}")
    _refuse(run, refused, f"a run that has begun can change only {', '.join(CHANGEABLE)}; start a new one instead")
    reached = max(run.checkpoint_steps(), default=0)
    if found and config.training.steps < reached:
        raise BadInput(
            f"{run.root}: training.steps {config.training.steps}: the run has already reached step {reached}"
        )
    return with_remarks(found, before, config, reached)


def keys_file(code_of: RunDir) -> Path | None:
    """File with the recipe keys that a run's snapshot of the code knows; None if it has no snapshot."""
    return code_of.resolved if code_of.code_record.exists() and code_of.resolved.exists() else None


def _refuse(run: RunDir, found: Sequence[Change], advice: str) -> None:
    if found:
        raise BadInput([f"{run.root}: this run has other values: {one}" for one in found] + [advice])
