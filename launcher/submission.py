"""From a recipe to a Slurm job: place, render, prepare the run directory, submit. Nothing is left half-done."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

from launcher import __file__ as launcher_file
from launcher import prefetch, runs
from launcher.backends.slurm_call import SlurmSilent
from launcher.backends.slurm_refusal import translate
from launcher.changes import Change
from launcher.errors import BadInput
from launcher.host import snapshot
from launcher.host.listing import SnapshotError
from launcher.plan import make_plan, plan_json
from launcher.preparation import new_run_dir, opened
from launcher.profiles import Profile
from launcher.recipe import Recipe
from launcher.script import Job, header, render
from launcher.sources import code_sources
from megatron_rl.run_dir import RunDir, read_json, write_atomic, write_json
from megatron_rl.supported import not_yet


@dataclass(frozen=True, slots=True)
class Draft:
    """A job that could be submitted."""

    job: Job
    notes: tuple[str, ...]
    """What the user should know and does not stop the job."""
    obstacles: tuple[str, ...]
    """What a submission is refused for; a dry run shows them."""
    script: str


@dataclass(frozen=True, slots=True)
class Submission:
    run: RunDir
    job_id: str | None
    """None: the run is finished and there was nothing to submit."""
    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def draft(recipe: Recipe, cluster: str, profile: Profile, root: Path, update_code: bool = False) -> Draft:
    """Everything that a submission to `cluster` does before it writes anything.

    Args:
        recipe: with `config.cluster` already `cluster`.
        root: the run directory, absolute.
        update_code: take a new snapshot of the code where there is one already.

    Raises:
        BadInput: the recipe does not fit the cluster, or cannot be put into a script.
    """
    config = recipe.config
    plan = make_plan(recipe, profile)
    job = Job(
        recipe=recipe,
        plan=plan,
        plan_json=plan_json(config, plan, profile),
        cluster=cluster,
        profile=profile,
        run_dir=root,
        sources=_sources(recipe, RunDir(root), update_code),
        installed=Path(launcher_file).absolute().parents[1],
        version=version("mrl"),
    )
    return Draft(job, tuple(_notes(job, update_code)), tuple(_obstacles(job)), render(job))


def _sources(recipe: Recipe, run: RunDir, update_code: bool) -> list[dict[str, Any]]:
    """Where the code comes from; for a run that has a snapshot, the same places, wherever it is resumed from."""
    record = read_json(run.code_record)
    if record is None:
        file = Path(recipe.asked)
        return code_sources(recipe.config, file if file.exists() else None, Path.cwd())
    before = record["sources"]
    if not update_code:
        return [{key: source[key] for key in ("path", "name", "kind", "commit", "dirty")} for source in before]
    ours = [source["path"] for source in before if source["kind"] in ("package", "metadata")]
    included = [source["path"] for source in before if source["path"] not in ours]
    try:
        return snapshot.plan_sources(ours, included)
    except SnapshotError as error:
        raise BadInput(f"--update-code: {error}") from error


def _notes(job: Job, update_code: bool) -> list[str]:
    unset = [name for name in job.profile.secrets if not os.environ.get(name)]
    notes = [f"{name} is not set here, so the job will not have it (secrets of {job.cluster})" for name in unset]
    if not job.run_dir.parent.is_dir():
        notes.append(f"{job.run_dir.parent} does not exist here; Slurm writes the job's log there before it starts")
    fresh = update_code or read_json(RunDir(job.run_dir).code_record) is None
    for source in job.sources if fresh else ():
        if source["dirty"]:
            notes.append(f"code: {source['path']} has uncommitted changes; they are part of the snapshot")
    return [*notes, *prefetch.missing(job.recipe.config, job.profile)]


def _obstacles(job: Job) -> list[str]:
    found = not_yet(job.recipe.config)
    container = job.profile.container
    image = job.recipe.config.image.reference or (container.image if container else None)
    if container and image and image.startswith("/") and not Path(image).is_file():
        found.append(
            f"image: {image} does not exist (image.reference of the recipe, or container.image of {job.cluster})"
        )
    return found


def submit(
    drafted: Draft,
    *,
    given: Path | None,
    change: bool = False,
    after: Sequence[str] = (),
    update_code: bool = False,
) -> Submission:
    """Prepare the run directory and hand its script to sbatch.

    Args:
        given: the run directory that the user named; None: a new one of the draft's name.
        change: accept other values than those of a run that has begun.
        after: ids of jobs that must have ended before this one starts.
        update_code: take a new snapshot of the code where there is one already.

    Raises:
        BadInput: anything, Slurm included, does not accept it; the disk is as it was before.
    """
    from launcher.backends import slurm  # submitit is slow to import, and a dry run does without

    if drafted.obstacles:
        raise BadInput(drafted.obstacles)
    if which("sbatch") is None:
        raise BadInput(f"cluster {drafted.job.cluster}: no sbatch on PATH: this is not a login node of a Slurm cluster")
    prefetch.import_image_here(drafted.job.recipe.config, drafted.job.profile)
    root = given or new_run_dir(drafted.job.run_dir.name, drafted.job.run_dir.parent)
    job = replace(drafted.job, run_dir=root.absolute())
    with opened(job.recipe, job.run_dir, change) as (run, finished, altered):
        if finished:
            return Submission(run, None, (), drafted.notes)
        write_files(run, job, update_code)
        request = flags_by_name(header(job))
        flags = [f"--dependency=afterany:{':'.join(after)}"] if after else []
        try:
            job_id = slurm.submit(run.script, flags).job_id
        except slurm.SubmissionRefused as error:
            raise BadInput(f"cluster {job.cluster}: {translate(str(error), request)}") from error
        except SlurmSilent as error:
            unsure = f"{error}; whether it took the job is not known, see `squeue --me` before you try again"
            raise BadInput(f"cluster {job.cluster}: {unsure}") from error
        write_json(
            run.job,
            {"job_id": job_id, "cluster": job.cluster, "submitted_at": time.time(), "by": os.environ.get("USER", "")},
        )
    complaint = runs.note(run, job.cluster, job_id)
    return Submission(run, job_id, altered, (*drafted.notes, *([complaint] if complaint else [])))


def write_files(run: RunDir, job: Job, update_code: bool) -> None:
    """All that the job's first attempt would otherwise make from its script."""
    write_json(run.plan, job.plan_json)
    write_atomic(run.script, render(job))
    try:
        if update_code and read_json(run.code_record) is not None:
            snapshot.update(list(job.sources), run.code)
        else:
            snapshot.take(list(job.sources), run.code)
    except SnapshotError as error:
        raise BadInput(str(error)) from error


def estimate(drafted: Draft, after: Sequence[str] = ()) -> tuple[str, str, str]:
    """When Slurm thinks it would start the job: (time, nodes, partition). Submits and keeps nothing.

    Raises:
        BadInput: Slurm would not take it.
    """
    from launcher.backends import slurm

    flags = [f"--dependency=afterany:{':'.join(after)}"] if after else []
    with TemporaryDirectory(prefix="mrl-test-only-") as folder:
        script = Path(folder) / "job.sbatch"
        script.write_text(drafted.script, encoding="utf-8")
        try:
            return slurm.estimate(script, flags)
        except slurm.SubmissionRefused as error:
            text = translate(str(error), flags_by_name(header(drafted.job)))
            raise BadInput(f"cluster {drafted.job.cluster}: {text}") from error
        except SlurmSilent as error:
            raise BadInput(f"cluster {drafted.job.cluster}: {error}") from error


def flags_by_name(options: Sequence[str]) -> dict[str, str]:
    """`--nodes=8` -> {"nodes": "8"}."""
    parts = (option.removeprefix("--").partition("=") for option in options)
    return {name: value for name, _, value in parts}


def default_root(profile: Profile, name: str) -> Path:
    return Path(profile.run_root) / name  # Slurm opens the log beside it, before the job can make a directory
