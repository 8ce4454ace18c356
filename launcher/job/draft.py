"""Draft of a job from a recipe: place it, render the script, find obstacles. Writes nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from launcher.cluster.profile import Profile
from launcher.cluster.software import rank_image
from launcher.doctor.fetched import fetched
from launcher.doctor.node_files import on_nodes, run_directory, to_mount
from launcher.doctor.preflight import problems
from launcher.doctor.vllm_python import quantised_findings
from launcher.errors import BadInput
from launcher.host.code.listing import SnapshotError
from launcher.host.code.snapshot import plan_sources
from launcher.host.slurm.formats import time_limit_s
from launcher.job.admission import corrections, keys_file, with_date
from launcher.job.code_sources import code_sources, importable_code
from launcher.job.lesson import LessonCheck
from launcher.job.notifications import notes as notification_notes
from launcher.job.notifications import refusals as notification_refusals
from launcher.job.script import PlannedJob, render
from launcher.job.steps import with_surroundings
from launcher.job.tracker_notes import tracker_notes
from launcher.plan.summary import make_plan, plan_json, with_offload
from launcher.recipe.load import Recipe, dump_resolved, refusal
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import ABSENT, Unreadable, read
from megatron_rl.contract.run_records import CodeSnapshot, CodeSource
from megatron_rl.contract.shapes import from_json, to_json


@dataclass(frozen=True, slots=True)
class Draft:
    job: PlannedJob
    notes: tuple[str, ...]
    obstacles: tuple[str, ...]
    script: str


def draft(
    recipe: Recipe, cluster: str, profile: Profile, root: Path, update_code: bool = False, change: bool = False
) -> Draft:
    """Do everything that a submission to `cluster` does before it writes anything. Raises BadInput: the recipe does not
    fit the cluster, or cannot be put into a script.

    Args:
        recipe: its `config.cluster` is `cluster`.
        root: run directory, absolute.
        update_code: whether to replace an existing snapshot of the code.
        change: whether an existing run is to take other values and files.
    """
    if not root.name:
        raise BadInput(f"--run-dir {root}: a run needs its own directory")
    if root.exists() and not root.is_dir():
        raise BadInput(f"{root}: is a file, not a directory")
    run = RunDir(root)
    recipe = with_date(recipe, run)
    sources = _sources(recipe, run, update_code)
    included = _import_paths(run, sources, update_code)
    with LessonCheck(recipe, profile, included=included, run=run, change=change) as lesson:
        job = _planned(recipe, cluster, profile, root, sources)
        resumes = bool(run.checkpoint_steps())
        needed = [*fetched(recipe, profile, resumes)]
        notes = [
            *_notes(job, update_code),
            *(f"{one.text}; {one.fix}".removesuffix("; ") for one in needed if one.level == "note"),
        ]
        obstacles = [*_obstacles(job, resumes), *problems(needed), *_newer_keys(job, run, update_code)]
        script = render(job)
        verdict = lesson.verdict()
    return Draft(job, (*notes, *verdict.notes), (*obstacles, *verdict.problems), script)


def _planned(recipe: Recipe, cluster: str, profile: Profile, root: Path, sources: Sequence[CodeSource]) -> PlannedJob:
    plan = make_plan(recipe, profile)
    job = PlannedJob(
        recipe=replace(recipe, config=with_offload(recipe.config, plan, profile)),
        plan=plan,
        plan_json={},
        cluster=cluster,
        profile=profile,
        run_dir=root,
        sources=sources,
        seen=(),
        version=version("mrl"),
    )
    return in_directory(job, root)


def in_directory(job: PlannedJob, root: Path) -> PlannedJob:
    """Return the job for another run directory, whose name is part of the plan too."""
    config, profile = job.recipe.config, job.profile
    seen = to_mount(job.recipe, profile, root)
    record = with_surroundings(plan_json(config, job.plan, profile), config, profile, job.cluster, root, seen)
    return replace(job, run_dir=root, seen=seen, plan_json=to_json(from_json(PlanRecord, record)))


def _sources(recipe: Recipe, run: RunDir, update_code: bool) -> list[CodeSource]:
    """Sources of the code. A run that has a snapshot keeps what it includes, wherever it is resumed from."""
    taken = read(CodeSnapshot, run.code_record)
    if taken is ABSENT or corrections(run, recipe):
        return code_sources(recipe, Path.cwd())
    if isinstance(taken, Unreadable):
        raise BadInput(f"{taken}, so the run's code is unknown")
    if not update_code:
        return taken.sources
    # The packages of the mrl that runs now, which may lie elsewhere: it writes the recipe, in the keys of its own code.
    included = [source.path for source in taken.sources if source.kind not in ("package", "metadata")]
    packages = importable_code(recipe.config, [Path(path) for path in included])
    try:
        return plan_sources([str(path) for path in packages], included)
    except SnapshotError as error:
        raise BadInput(f"--update-code: {error}") from error


def _newer_keys(job: PlannedJob, run: RunDir, update_code: bool) -> list[str]:
    """Return why the code of the run's snapshot cannot read the recipe."""
    if update_code or (keys_of := keys_file(run)) is None or corrections(run, job.recipe):
        return []
    try:
        dump_resolved(job.recipe.config, keys_of)
    except BadInput as error:
        return [*refusal(job.recipe, error.problems).problems]
    return []


def _notes(job: PlannedJob, update_code: bool) -> list[str]:
    unset = [name for name in job.profile.secrets if not os.environ.get(name)]
    notes = [f"{name} is not set here, so the job will not have it (secrets of {job.cluster})" for name in unset]
    notes += tracker_notes(job.recipe.config.logging, job.profile, job.cluster, os.environ)
    notes += notification_notes(job.recipe.config.notify, job.profile, job.cluster)
    image = rank_image(job.recipe.config, job.profile)
    if image and re.match(r"(?:docker://)?(?:[^@#/]+@)?nvcr\.io[#/]nvidia/pytorch:", image):
        notes.append(
            f"image: {image} is NVIDIA's own, which has no megatron-core: the ranks would end at their first import; "
            "build your own from it (containers/README.md) and name it in container.image"
        )
    notes += ["; ".join(filter(None, (one.text, one.fix))) for one in quantised_findings(job.recipe.config)]
    fresh = update_code or read(CodeSnapshot, RunDir(job.run_dir).code_record) is ABSENT
    for source in job.sources if fresh else ():
        if source.dirty:
            notes.append(f"code: {source.path} has uncommitted changes; they are part of the snapshot")
    return notes


def _import_paths(run: RunDir, sources: Sequence[CodeSource], update_code: bool) -> list[Path]:
    taken = read(CodeSnapshot, run.code_record)
    if isinstance(taken, CodeSnapshot) and not update_code:
        return [run.code / part for part in taken.pythonpath]
    return [Path(source.path) for source in sources if source.kind not in ("package", "metadata")]


def _obstacles(job: PlannedJob, resumes: bool) -> list[str]:
    found = problems([*run_directory(job.run_dir, job.profile), *on_nodes(job.recipe, job.profile, resumes)])
    config, profile = job.recipe.config.job, job.profile
    limit = time_limit_s(config.time_limit or profile.time_limit)
    if limit is not None and limit <= profile.signal_s:
        found.append(
            f"job.time_limit {limit} s: the run begins to save {profile.signal_s} s before it (signal_s of "
            f"{job.cluster}), which leaves no time to train; give a longer limit or a smaller signal_s"
        )
    log = RunDir(job.run_dir).batch_log
    place = log if log.exists() else log.parent
    if place.exists() and not os.access(place, os.W_OK):
        found.append(
            f"you may not write to {place}, where Slurm writes the job's log ({log.name}) before it starts anything; "
            "give a --run-dir in your own folder"
        )
    return [*found, *refusal(job.recipe, notification_refusals(job.recipe.config.notify, None)).problems]
