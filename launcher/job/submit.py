"""Submission of a draft: prepare the run directory, hand the script to sbatch. A failure leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which

from launcher.backends.slurm import sbatch as sbatch
from launcher.backends.slurm.jobs import cluster_name
from launcher.backends.slurm.reasons import no_partition, translate
from launcher.cluster.profile import RUN_MODES
from launcher.errors import BadInput, Unsure
from launcher.fetch import needs
from launcher.host.code import snapshot
from launcher.host.code.listing import SnapshotError
from launcher.host.record.identity import comment_of, note_submission
from launcher.host.slurm import queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent
from launcher.job.directories import run_directory
from launcher.job.draft import Draft, in_directory
from launcher.job.run_directory import opened
from launcher.job.script import PlannedJob, header, render
from launcher.recipe.changes import Change
from launcher.recipe.load import refusal
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord, listed
from megatron_rl.contract.records import LOOK_S, PATIENCE_S, read, write
from megatron_rl.contract.run_records import CodeSnapshot, Owner
from megatron_rl.contract.shapes import from_json

PLAN_RECORDS = "megatron_rl/contract/plan_records.py"


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    run: RunDir
    job_id: str | None  # None: the run is finished, so nothing was submitted
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    fresh_code: bool


def refuse_unfit(drafts: Sequence[Draft]) -> None:
    if obstacles := dict.fromkeys(obstacle for drafted in drafts for obstacle in drafted.obstacles):
        raise BadInput([*obstacles])
    if which("sbatch") is None:
        cluster = drafts[0].job.cluster
        raise BadInput(f"cluster {cluster}: no sbatch on PATH: this is not a login node of a Slurm cluster")
    refuse_unknown_partitions([drafted.job for drafted in drafts])


def submit(
    drafted: Draft,
    *,
    given: Path | None,
    change: bool = False,
    after: Sequence[str] = (),
    update_code: bool = False,
) -> SubmittedJob:
    """Prepare the run directory and submit its script. The draft has passed `refuse_unfit`.

    Args:
        given: run directory that the user named; None: a new one of the draft's name.
        change: whether a run that has begun may get other values.
        after: ids of jobs that must have ended before this one starts.
        update_code: whether to replace an existing snapshot of the code.

    Raises:
        BadInput: Slurm or a check refuses it; the disk is as before.
        Unsure: Slurm did not say whether it accepted the job.
    """
    needs.export_packages(drafted.job.recipe.config, drafted.job.profile)
    needs.import_image_on_login(drafted.job.recipe.config, drafted.job.profile)
    name, parent = drafted.job.run_dir.name, drafted.job.run_dir.parent
    with run_directory(given, name, parent) as root:
        job = in_directory(drafted.job, root.absolute())
        code_of = None if update_code else RunDir(job.run_dir)
        with opened(job.recipe, job.run_dir, change, code_of=code_of) as found:
            run = found.run
            if found.finished:
                return SubmittedJob(run, None, (), drafted.notes, False)
            before = read(CodeSnapshot, run.code_record)
            write_files(run, job, update_code)
            fresh = read(CodeSnapshot, run.code_record) != before
            # sbatch has three outcomes. It refuses: no job exists, and the directory is restored. It answers with an
            # id. Or it says nothing, or nothing clear, such as after a time limit: the controller may have queued the
            # job. Then the directory stays, because a job without its files would fail hours later, and the user is
            # asked to look (Unsure). So the default is "handed over", and only a refusal takes it back.
            found.handed_over = True
            try:
                job_id = _hand_over(job, run, found.run_id, after)
            except sbatch.SubmissionRefused as error:
                found.handed_over = False
                reason = translate(str(error), flags_by_name(header(job)))
                raise BadInput(f"cluster {job.cluster}: {reason}") from error
            except OSError as error:
                found.handed_over = False
                raise BadInput(f"{error.filename}: {error.strerror}; nothing was submitted") from error
    complaint = note_submission(run, job.cluster, job_id)
    notes = (*drafted.notes, *([complaint] if complaint else []))
    if found.corrected:
        notes = (*notes, f"nothing was trained in {run.root} yet: it starts over with the present recipe")
    return SubmittedJob(run, job_id, found.changes, notes, fresh)


def _hand_over(job: PlannedJob, run: RunDir, run_id: str, after: Sequence[str]) -> str:
    """Submit the script and record its job. Returns the job's id.

    Raises:
        SubmissionRefused, OSError: no job exists.
        Unsure: there may be a job, or there is one that could not be recorded.
    """
    flags = [f"--dependency=afterany:{':'.join(after)}"] if after else []
    flags.append(f"--comment={comment_of(run_id, flags_by_name(header(job)).get('comment', ''))}")
    by, slurm_cluster = os.environ.get("USER", ""), cluster_name()
    try:
        job_id = sbatch.submit(run.script, flags)
    except (SlurmSilent, KeyboardInterrupt) as error:
        raise Unsure(
            f"cluster {job.cluster}: {str(error) or 'interrupted'}; Slurm may have accepted the job: see "
            f"`squeue --me` before you try again; the job would run {run.root}, which stays"
        ) from error
    _record(run, Owner(job_id, job.cluster, time.time(), by, slurm_cluster, run_id=run_id, name=job.run_dir.name))
    return job_id


def _record(run: RunDir, owner: Owner) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return write(run.job, owner)
        except (OSError, KeyboardInterrupt) as error:
            if time.monotonic() < give_up and isinstance(error, OSError):
                time.sleep(LOOK_S)
                continue
            why = error.strerror if isinstance(error, OSError) else "interrupted"
            raise Unsure(
                f"job {owner.job_id} is submitted, but {run.job} could not be written: {why}; the job writes it when "
                f"it starts. Until then mrl does not know it: `scancel {owner.job_id}` ends it, and {run.root} stays"
            ) from error


def write_files(run: RunDir, job: PlannedJob, update_code: bool) -> None:
    """Write the files that the job needs: the snapshot of the code, its plan and its script."""
    if not run.script.exists() and job.profile.readable_by != "me":
        run.root.chmod(RUN_MODES[job.profile.readable_by])
    try:
        if update_code and run.code_record.exists():
            snapshot.update(list(job.sources), run.code)
        else:
            snapshot.take(list(job.sources), run.code)
    except SnapshotError as error:
        raise BadInput(str(error)) from error
    plan = from_json(PlanRecord, job.plan_json)
    knows_roles = (run.code / PLAN_RECORDS).exists()  # the code of a run that an older mrl began may not
    write(run.plan, plan if knows_roles else listed(plan))
    write_atomic(run.script, render(replace(job, inode=run.root.stat().st_ino)))


def flags_by_name(options: Sequence[str]) -> dict[str, str]:
    parts = (option.removeprefix("--").partition("=") for option in options)
    return {name: value for name, _, value in parts}


def refuse_unknown_partitions(jobs: Sequence[PlannedJob]) -> None:
    """Raise BadInput where Slurm has no partition of a recipe's `harvest.partition`. The run itself submits those jobs,
    when it is on its nodes: a wrong name would only show in its log. A silent Slurm is not an error here."""
    harvesting = [(job.recipe, job.recipe.config.harvest) for job in jobs if job.recipe.config.harvest]
    if not harvesting:
        return
    try:
        known = queries.partitions()
    except SlurmRefused:
        return
    for recipe, harvest in harvesting:
        for name in harvest.partition.split(","):  # the job starts in the first partition that has room
            if name not in known:
                text, hint = no_partition(name, known)
                raise refusal(recipe, [f"harvest.partition: {text}{f'; {hint}' if hint else ''}"])
