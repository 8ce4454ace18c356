"""Have a job start again, as the ledger says it should: by requeueing it, or by submitting another one in its place.

The ledger's line of the end is the intention. `Attempt.requeued` confirms it, or holds what went wrong. What is not
confirmed when the run starts again was cut short, and is done then.
"""

import os
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from launcher.host.attempt.avoid import excluded_since, nodes_to_avoid
from launcher.host.attempt.context import Here
from launcher.host.judge.policy import BY_SLURM, BY_US, SUCCESSOR
from launcher.host.record import submissions
from launcher.host.slurm import client
from megatron_rl.contract.paths import Attempt
from megatron_rl.run_dir import read_json, write_json

OUTAGE = 1800.0  # seconds: a controller that starts again or is updated; meanwhile nobody else gets the nodes either
LIMIT = 25.0  # seconds: what a script has left after its own requeue is KillWait, 30 by default
AGAIN = 0.5  # seconds between tries
SOON = 5.0  # seconds for which nobody is sent back into the queue


def bring_back(here: Here, attempt: Attempt, end: Dict[str, Any], returning: bool = False) -> None:
    """Start the job again if the end of its attempt says that this is ours to do, and note what came of it. Never
    raises for Slurm or the disk: the script has to end either way.

    Args:
        end: the ledger's line.
        returning: Slurm has requeued the job already, which can be kept from nodes then.
    """
    if end["then"] not in (BY_US, SUCCESSOR) and not (end["then"] == BY_SLURM and returning):
        return
    told = start_again(here, end)
    try:
        write_json(attempt.requeued, dict(told, at=time.time()))
    except OSError as error:
        print(error, file=sys.stderr)


def start_again(here: Here, end: Dict[str, Any]) -> Dict[str, Any]:
    """Have the job start again; the nodes that it avoids then (None: undecided), and what Slurm refused of all this."""
    avoid = None  # type: Optional[List[str]]
    problems = []  # type: List[Optional[str]]
    try:
        if end["then"] == SUCCESSOR:
            _submit_successor(here, end)
        else:
            # First, for once the job is requeued this script has seconds: Slurm sends SIGTERM to everything here, which
            # we ignore, and then SIGKILL.
            try:
                listed, avoid = _nodes_to_avoid(here, end)
            except (client.SlurmRefused, OSError) as error:  # it starts again all the same
                problems.append(str(error))
            if end["then"] == BY_US:
                client.patiently(lambda: client.requeue(here.job_id), OUTAGE)
            limit = time.monotonic() + LIMIT
            if end["not_before"]:
                problems.append(_until(limit, lambda: client.postpone(here.job_id, end["not_before"])))
            if avoid is not None and set(avoid) != set(listed):
                problems.append(_until(limit, lambda: client.exclude(here.job_id, avoid)))
    except (client.SlurmRefused, OSError) as error:
        problems.append(str(error))
    refused = [problem for problem in problems if problem]
    for problem in refused:
        print("the job could not be sent back as intended: {}".format(problem), file=sys.stderr)
    return {"avoided": avoid, "problem": "; ".join(refused) or None}


def _nodes_to_avoid(here: Here, end: Dict[str, Any]) -> Tuple[List[str], List[str]]:
    """Those that the job avoids as it is, and those that it is to avoid from now on. Raises SlurmRefused, OSError."""
    if not end["excluded"] and not excluded_since(here.run):
        return [], []
    patience = LIMIT if end["then"] == BY_US else 0.0  # not for long: the job may be short of time
    listed = client.patiently(lambda: client.avoided(client.show_job(here.job_id)), patience)
    return listed, client.patiently(lambda: nodes_to_avoid(here.run, end, listed, time.time()), patience)


def _until(limit: float, act: Callable[[], None]) -> Optional[str]:
    """The last refusal, if the time was over before it was accepted: a job on its way back is not pending yet."""
    while True:
        try:
            act()
            return None
        except client.SlurmRefused as error:
            if time.monotonic() + AGAIN >= limit:
                return str(error)
        time.sleep(AGAIN)


def _submit_successor(here: Here, end: Dict[str, Any]) -> None:
    """Raises SlurmRefused."""
    run = here.run
    job = client.patiently(lambda: client.show_job(here.job_id), OUTAGE)
    name = job.get("JobName") or os.environ.get("SLURM_JOB_NAME", run.root.name)
    avoid = client.patiently(lambda: nodes_to_avoid(run, end, client.avoided(job), time.time()), OUTAGE)
    before = set(client.waiting_for(here.job_id, name))  # those of a sweep, perhaps
    try:
        job_id = client.succeed(here.job_id, str(run.script), name, end["not_before"], avoid)
    except client.SlurmSilent:
        fresh = sorted(set(client.patiently(lambda: client.waiting_for(here.job_id, name))) - before)
        if len(fresh) != 1:
            raise
        job_id = fresh[0]  # Slurm has taken it, and its answer was lost
    print("job {} goes on with the run".format(job_id))
    write_owner(here, job_id, succeeds=here.job_id)


def write_owner(here: Here, job_id: str, **more: Any) -> None:
    """Enter a job as the one that owns the run, and in the user's index."""
    owner = {
        "job_id": job_id,
        "cluster": here.cluster,
        "slurm_cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "submitted_at": time.time(),
        "by": os.environ.get("USER", ""),
    }
    write_json(here.run.job, dict(owner, **more))
    submissions.note(here.run, here.cluster, job_id)


def is_too_early(here: Here, attempt: Attempt, end: Dict[str, Any]) -> bool:
    """Whether this job started before its back-off was over because the script was killed before it could say so. Not
    when it did say so, and somebody then wanted it sooner."""
    waits = end.get("then") == BY_US and end.get("job_id") == here.job_id and end.get("not_before")
    return bool(waits and end["not_before"] > time.time() + SOON and read_json(attempt.requeued) is None)
