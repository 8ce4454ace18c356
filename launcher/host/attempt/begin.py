"""The first half of the batch script's host side: own the run, make its directory, begin an attempt."""

import argparse
import errno
import fcntl
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional

from launcher.host.attempt.close import read_record
from launcher.host.attempt.conclude import conclude_lost
from launcher.host.attempt.context import Here, Refused, ask_to_leave
from launcher.host.attempt.start_again import bring_back, is_too_early, start_again, write_owner
from launcher.host.code import snapshot
from launcher.host.code.sources import moved_sources, read_sources
from launcher.host.judge.policy import HELD, HERE, OVER, Facts, who_starts_it
from launcher.host.judge.sentence import in_words
from launcher.host.record import ledger
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json, read_json_lines

EXIT_NOTHING_TO_DO = 3  # between this and the batch script

LEFTOVERS = 60.0  # seconds
COMPLETING = 300.0  # seconds: an epilog, or a process that does not die
LOOK = 5.0  # seconds between questions to Slurm
ROOM_AGAIN = 900.0  # seconds after which a job looks again whether the disk has room
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # file systems mounted without flock


def own(here: Here, options: argparse.Namespace) -> int:
    """Take the run, or refuse it, or find that there is nothing to do."""
    run = here.run
    _lock(here, options.lock)
    if run.done.exists():
        print("{}: finished already, nothing to do".format(run.root))
        return EXIT_NOTHING_TO_DO
    _refuse_foreign(run)
    owner = read_json(run.job)
    _let_go(here, owner)
    mine = owner is not None and owner["job_id"] == here.job_id
    if owner is not None and not mine:
        if here.succeeds is not None and owner["job_id"] != here.succeeds:
            print("{}: belongs to job {} by now, nothing to do".format(run.root, owner["job_id"]))
            return EXIT_NOTHING_TO_DO
        if not _has_ended(owner):
            raise Refused("{}: belongs to job {}, which is not known to have ended".format(run.root, owner["job_id"]))
    if _settle(here):
        return EXIT_NOTHING_TO_DO
    if not mine:
        write_owner(here, here.job_id)  # submitted by plain sbatch: mrl-submit does it itself
    return EXIT_FINISHED


def _settle(here: Here) -> bool:
    """Conclude what an earlier start of the run could not, and do what is left to be done of it; whether this start has
    nothing to do. Raises Refused where somebody has to look at the run first."""
    run = here.run
    conclude_lost(run, time.time(), here)
    if run.done.exists():
        print("{}: had finished, nothing to do".format(run.root))
        return True
    lines = read_json_lines(run.attempts_ledger)
    if not lines or lines[-1]["event"] != "end" or here.job_id != lines[-1].get("job_id"):
        return False  # a new job is somebody's wish to go on
    end = lines[-1]
    began = [line for line in lines if line["event"] == "start" and line["attempt"] == end["attempt"]]
    if not began or here.restarts <= began[-1].get("restart", 0):
        return False  # the same allocation once more
    if end.get("then") == HELD:
        raise Refused("{}: {}; mrl resume goes on with it".format(run.root, in_words(end, time.time())))
    if end.get("then") == OVER:
        print("{}: was stopped on request; mrl resume goes on with it".format(run.root))
        return True
    attempt = run.attempt(end["attempt"])
    if is_too_early(here, attempt, end):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the requeue itself
        bring_back(here, attempt, end)
        return True
    return False


def create(here: Here, options: argparse.Namespace) -> int:
    """Make the run directory from what the script carries, or finish what an earlier start of it began."""
    run = here.run
    sources = read_sources(Path(options.sources).read_text())
    for line in moved_sources(sources):
        print("code: {}; the job runs what is there now".format(line))
    snapshot.take(sources, run.code)
    files = (
        (run.script, options.script),
        (run.recipe, options.recipe),
        (run.plan, options.plan),
        (run.resolved, options.resolved),  # last: with it the directory is a run's
    )
    for file, text in files:
        if not file.exists():
            write_atomic(file, Path(text).read_text())
    return EXIT_FINISHED


def open_attempt(here: Here, options: argparse.Namespace) -> int:
    """Begin an attempt and print its number."""
    attempt = here.run.attempt(here.run.last_attempt() + 1)
    attempt.folder.mkdir(parents=True)
    try:
        _begin(here, attempt)
    except OSError:
        shutil.rmtree(str(attempt.folder), ignore_errors=True)  # it has not begun
        shutil.rmtree(str(attempt.logs), ignore_errors=True)
        raise
    ledger.point_latest(attempt, here.job_id)
    print(attempt.number)
    return EXIT_FINISHED


def come_back_later(here: Here, error: OSError) -> int:
    """Leave a disk that is full before an attempt has begun: nothing is lost by then, and nobody may be there to resume
    the run once there is room."""
    job = read_record(here)
    facts = Facts(can_return=job.get("BatchFlag", "1") == "1", requeueable=job.get("Requeue", "1") == "1")
    then, at = who_starts_it(None, facts), time.time() + ROOM_AGAIN
    what = "mrl resume goes on" if then == OVER else "the job comes back in {:.0f} min".format(ROOM_AGAIN / 60)
    said = "error: {}: {}; nothing is lost: make room, {}"
    print(said.format(here.run.root, error.strerror, what), file=sys.stderr)
    if then != OVER:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the requeue itself
        start_again(here, {"attempt": here.run.last_attempt() + 1, "then": then, "not_before": at, "excluded": []})
    return EXIT_DRAINED


def _begin(here: Here, attempt: Attempt) -> None:
    run, now = here.run, time.time()
    attempt.logs.mkdir(parents=True, exist_ok=True)
    hosts = client.hostnames(here.nodelist)
    submitted_at = (read_json(run.job) or {}).get("submitted_at", now)
    facts = {
        "job_id": here.job_id,
        "cluster": here.cluster,
        "restart": here.restarts,
        "nodes": hosts,
        "gpus": len(hosts) * int((read_json(run.plan) or {}).get("gpus_per_node", 0)),
        "submitted_at": submitted_at,
        # Slurm says so from 23.02 on; somebody's own allocation began before it had anything to do with this run.
        "held_since": max(submitted_at, float(os.environ.get("SLURM_JOB_START_TIME", now))),
    }
    _take_over_request(run, attempt)
    ledger.record(run, attempt.number, "start", now, **facts)


def _take_over_request(run: RunDir, attempt: Attempt) -> None:
    """Somebody who asked the attempt before to leave, after its end, meant this one: it begins in the same job."""
    end = (read_json_lines(run.attempts_ledger) or [{}])[-1]
    request = read_json(run.attempt(attempt.number - 1).drain)
    if request is not None and end.get("event") == "end" and end.get("then") == HERE and request["at"] > end["at"]:
        ask_to_leave(attempt, request["cause"], request["by"])


def pythonpath(here: Here, options: argparse.Namespace) -> int:
    """Print the PYTHONPATH of the steps: the snapshot by its own name, which no later --update-code moves."""
    code = here.run.code
    # Not by realpath: containers mount the run under the name it was given.
    root = here.run.root / os.readlink(str(code)) if code.is_symlink() else code
    record = read_json(here.run.code_record) or {}
    print(":".join(os.path.normpath(os.path.join(str(root), part)) for part in record["pythonpath"]))
    return EXIT_FINISHED


def _lock(here: Here, descriptor: int) -> None:
    """Lock the open file that the batch script holds, so that the lock ends with the script and all it started."""
    owner = (read_json(here.run.job) or {}).get("job_id", "another one")
    # What this very job left behind when it was requeued, or the one before it, may take a moment to go.
    last = (read_json_lines(here.run.attempts_ledger) or [{}])[-1].get("job_id", here.job_id)
    expected = here.succeeds is not None or (owner == here.job_id and (here.restarts or last != owner))
    give_up = time.monotonic() + (LEFTOVERS if expected else 0.0)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    said = "{}: belongs to job {}, whose script is running".format(here.run.root, owner)
                    raise Refused(said) from None
                time.sleep(0.5)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            "{}: this file system has no locks; job.json alone tells the owner".format(here.run.root), file=sys.stderr
        )


def _let_go(here: Here, owner: Optional[Dict[str, Any]]) -> None:
    """Wait for the jobs before this one as long as Slurm is busy ending them: on some node a rank of theirs may still
    write into the run directory."""
    last = (read_json_lines(here.run.attempts_ledger) or [{}])[-1]
    before = {str(line["job_id"]) for line in (owner or {}, last) if line.get("job_id")} - {here.job_id}
    give_up = time.monotonic() + COMPLETING
    for job_id in sorted(before):
        if client.is_completing(job_id):
            print("waiting for job {} to be gone from its nodes".format(job_id))
        while client.is_completing(job_id) and time.monotonic() < give_up:
            time.sleep(LOOK)


def _has_ended(owner: Dict[str, Any]) -> bool:
    """Whether the job of job.json is known to be over; one of another Slurm is unknown here, whatever its number."""
    theirs, ours = owner.get("slurm_cluster"), os.environ.get("SLURM_CLUSTER_NAME")
    return (not theirs or not ours or theirs == ours) and client.alive(owner["job_id"]) is False


def _refuse_foreign(run: RunDir) -> None:
    """A directory with anything in it is ours if it is a run, or if an earlier start got as far as owning it."""
    ours = run.resolved.exists() or run.job.exists()
    strange = [name for name in os.listdir(str(run.root)) if name not in (run.lock.name, run.job_lock.name)]
    if strange and not ours:
        run.job_lock.unlink()
        raise Refused("{}: is not empty and not a run directory".format(run.root))
