"""Starts one run without a word, for `launcher.api`: remarks are returned."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from launcher.cluster.choice import LOCAL, load_clusters
from launcher.cluster.profile import Profile
from launcher.errors import BadInput
from launcher.recipe.sweep import count
from launcher.start.planned import check_directories, remarks_of
from launcher.start.request import PlannedRun, Request, plan_runs
from megatron_rl.contract.files import only_owner_writes


class Started(NamedTuple):
    root: Path
    notes: tuple[str, ...]


@only_owner_writes()
def start_quietly(request: Request) -> Started:
    """Submit a run, or start it on this machine, where it outlives this process. Raises BadInput, Unsure or Failed."""
    if (runs := count(request.overrides)) > 1:
        raise BadInput(f"a sweep of {runs} runs: submit each in a loop, or quote a comma that belongs to a value")
    clusters = load_clusters()
    cluster, (planned,) = plan_runs(request, clusters)
    remarks = remarks_of([planned])
    notes = (*remarks.notes, *remarks.warnings, *check_directories([planned], request, clusters, cluster))
    if cluster == LOCAL:
        return _start_here(planned, request, notes)
    return submit_quietly(planned, request, clusters.profile(cluster), notes)


@only_owner_writes()
def submit_quietly(planned: PlannedRun, request: Request, profile: Profile, notes: tuple[str, ...]) -> Started:
    """Submit a planned run. `notes`: earlier remarks. Raises BadInput or Unsure."""
    from launcher.start.on_slurm import draft_of, submissions

    drafted = draft_of(planned, profile, request)
    (done,) = submissions([planned], [drafted], request)
    return Started(done.job.run.root, (*notes, *done.job.notes))


def _start_here(planned: PlannedRun, request: Request, notes: tuple[str, ...]) -> Started:
    from launcher.host.record.identity import note_submission
    from launcher.start.on_this_machine import check_here, prepare_here, supervise, wait_for_start

    if request.after:
        raise BadInput("after: only for Slurm clusters, but this run is local; wait() for the other run first")
    checked = check_here(planned, request)
    prepared = prepare_here(planned, request, checked)
    run, attempt = prepared.opened.run, prepared.opened.attempt
    notes = (*notes, *checked.warnings, *checked.notes)
    if attempt is not None:  # otherwise it is finished
        complaint = note_submission(run, LOCAL, None)
        notes = (*notes, *filter(None, [complaint]))
        wait_for_start(supervise(prepared, attempt, owner=None))
    return Started(run.root, notes)
