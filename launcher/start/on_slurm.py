"""Submission of planned runs to a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.job.directories import disk_errors
from launcher.job.draft import Draft, draft
from launcher.start.request import PlannedRun, Request

if TYPE_CHECKING:
    from launcher.job.submit import SubmittedJob


@dataclass(frozen=True, slots=True)
class Submission:
    job: SubmittedJob
    draft: Draft
    waits: Sequence[str]
    """Ids of the jobs after which it starts."""


def draft_of(planned: PlannedRun, profile: Profile, request: Request) -> Draft:
    """Draft the job of a run. Writes nothing. Raises BadInput."""
    cluster = str(planned.recipe.config.cluster)
    # Directly below the run root, which exists: Slurm opens the job's log there before the job starts.
    root = planned.given.absolute() if planned.given else Path(profile.run_root) / planned.name
    with disk_errors(root, "nothing was submitted"):
        return draft(planned.recipe, cluster, profile, root, request.update_code, request.change)


def submissions(planned: Sequence[PlannedRun], drafts: Sequence[Draft], request: Request) -> Iterator[Submission]:
    """Submit the runs in turn. If Slurm refuses one of a sweep, those before it stay, and the error names the rest.
    Raises BadInput or Unsure as `launcher.job.submit.submit`."""
    from launcher.job.code_sources import left_out
    from launcher.job.submit import refuse_unfit, submit
    from launcher.recipe.sweep import chains

    after = list(dict.fromkeys(_job_to_wait_for(text) for text in request.after))
    refuse_unfit(drafts)
    done: list[SubmittedJob] = []
    for one, drafted in zip(planned, drafts, strict=True):
        waits = [*after, *chains([before.job_id for before in done if before.job_id], request.max_running)]
        try:
            submitted = submit(
                drafted, given=one.given, change=request.change, after=waits, update_code=request.update_code
            )
        except BadInput as error:
            if not done:
                raise
            left = f"{len(done)} of {len(planned)} jobs are submitted (`mrl ls`), but not these:"
            names = [f"  {draft.job.run_dir.name}" for draft in drafts[len(done) :]]
            raise type(error)([*error.problems, "\n".join([left, *names])]) from error
        if submitted.fresh_code and not done and (note := left_out(submitted.run)):
            submitted = replace(submitted, notes=(*submitted.notes, note))
        done.append(submitted)
        yield Submission(submitted, drafted, waits)


def _job_to_wait_for(text: str) -> str:
    """Return the job id that --after means. Slurm must know it: it treats a dependency on an unknown job as
    fulfilled."""
    from launcher.backends.slurm.jobs import read_jobs
    from launcher.runs.find import find, is_run
    from launcher.runs.owner import job_id_of

    try:
        job_id = text if text.isdigit() and not is_run(text) else job_id_of(find(text))
    except BadInput as error:
        raise BadInput(f"--after {text}: {problem}" for problem in error.problems) from error
    if job_id is None:
        raise BadInput(f"--after {text}: this is a local run, which Slurm cannot wait for")
    job = read_jobs([job_id])[job_id]
    if job.kind == "gone":
        raise BadInput(f"--after {text}: Slurm does not know job {job_id}; leave --after out if the job ended long ago")
    return job_id
