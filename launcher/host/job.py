"""What the batch script does around its steps, one subcommand each:

    python3 -m launcher.host.job create | open | pythonpath | nodes | watch | drain | close

The script exports MRL_RUN_DIR, MRL_CLUSTER and, once `open` has named it, MRL_ATTEMPT. Slurm's own variables say which
job this is. Errors are one line on stderr; exit code 2 ends the job for good, 75 lets it come back.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from launcher.host import health, index, ledger, policy, slurm, snapshot
from launcher.host.nodes import NotEnoughNodes, assign
from launcher.host.verdict import CRASHED, DRAINED, FINISHED, Verdict, in_words, judge
from megatron_rl.run_dir import (
    EXIT_DRAINED,
    EXIT_FINISHED,
    EXIT_USAGE,
    Attempt,
    RunDir,
    read_json,
    write_atomic,
    write_json,
)

TICK = 1.0  # seconds between looks at the run directory
SIGNAL_BASE = 128  # srun reports a task that a signal ended as this plus the signal
REMIND = 5.0  # seconds between signals to steps that were asked to leave


class Refused(Exception):
    """This job cannot run this run; it is not started again."""


class Here:
    """The run and the job that the environment names."""

    def __init__(self, environ: Dict[str, str]) -> None:
        self.run = RunDir(environ["MRL_RUN_DIR"])
        self.cluster = environ.get("MRL_CLUSTER", "")
        self.job_id = environ["SLURM_JOB_ID"]
        self.nodelist = environ.get("SLURM_JOB_NODELIST", "")
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._attempt = environ.get("MRL_ATTEMPT")

    @property
    def attempt(self) -> Attempt:
        return self.run.attempt(int(self._attempt or 0))


def create(here: Here, options: argparse.Namespace) -> int:
    """Make the run directory from what the script carries; whatever is there already stays."""
    run = here.run
    sources = json.loads(Path(options.sources).read_text())
    if run.root.is_dir() and os.listdir(str(run.root)) and not run.resolved.exists():
        raise Refused("{}: is not empty and not a run directory".format(run.root))
    run.root.mkdir(parents=True, exist_ok=True)
    for line in snapshot.compare(sources):
        print("code: {}; the job runs what is there now".format(line))
    snapshot.take(sources, run.code)
    for file, text in ((run.recipe, options.recipe), (run.plan, options.plan), (run.resolved, options.resolved)):
        if not file.exists():
            write_atomic(file, Path(text).read_text())
    if not run.script.exists():
        shutil.copy(options.script, str(run.script))
    return EXIT_FINISHED


def open_attempt(here: Here, options: argparse.Namespace) -> int:
    """Become the owner and begin an attempt: print its number, or nothing where the run is finished."""
    run, now = here.run, time.time()
    if run.done.exists():
        print("{}: finished already, nothing to do".format(run.root), file=sys.stderr)
        return EXIT_FINISHED
    owner = read_json(run.job)
    if owner is not None and owner["job_id"] != here.job_id and slurm.alive(owner["job_id"]) is not False:
        raise Refused("{}: belongs to job {}, which has not ended".format(run.root, owner["job_id"]))
    if owner is None or owner["job_id"] != here.job_id:
        fields = {"job_id": here.job_id, "cluster": here.cluster, "submitted_at": now, "by": os.environ.get("USER", "")}
        write_json(run.job, fields)
        index.note(run, here.cluster, here.job_id)  # by plain sbatch: mrl-submit would have done both
    ledger.close_lost_attempts(run, now, "its batch script was killed")
    attempt = run.attempt(run.last_attempt() + 1)
    attempt.folder.mkdir(parents=True)
    attempt.logs.mkdir(parents=True, exist_ok=True)
    ledger.point_latest(attempt, here.job_id)
    hosts = slurm.hostnames(here.nodelist)
    ledger.record(
        run, attempt.number, "start", now, job_id=here.job_id, cluster=here.cluster, restart=here.restarts, nodes=hosts
    )
    print(attempt.number)
    return EXIT_FINISHED


def pythonpath(here: Here, options: argparse.Namespace) -> int:
    """Print the PYTHONPATH of the steps: the snapshot by its own name, which no later --update-code moves."""
    root = os.path.realpath(str(here.run.code))
    record = read_json(here.run.code_record) or {}
    print(":".join(os.path.normpath(os.path.join(root, part)) for part in record["pythonpath"]))
    return EXIT_FINISHED


def choose_nodes(here: Here, options: argparse.Namespace) -> int:
    """Without a step: judge the health reports and give every step its nodes. With one: print its nodes."""
    attempt = here.attempt
    if options.step == "fit":
        chosen = read_json(attempt.nodes) or {"bad": {}}
        print(",".join(host for host in slurm.hostnames(here.nodelist) if host not in chosen["bad"]))
        return EXIT_FINISHED
    if options.step:
        print(",".join((read_json(attempt.nodes) or {})["steps"][options.step]))
        return EXIT_FINISHED
    plan = read_json(here.run.plan) or {}
    hosts = slurm.hostnames(here.nodelist)
    bad = health.judge(health.read_reports(attempt), hosts) if options.checked else {}
    for host, why in sorted(bad.items()):
        print("node {} is not used: {}".format(host, why))
    try:
        assignment = assign(plan, hosts, bad)
    except NotEnoughNodes as error:
        write_json(attempt.nodes, {"steps": {}, "spare": [], "bad": bad})
        _ask_to_leave(attempt, policy.BAD_NODES, "the health check", None)
        print(error, file=sys.stderr)
        return EXIT_DRAINED
    write_json(attempt.nodes, dict(assignment._asdict()))
    return EXIT_FINISHED


def watch(here: Here, options: argparse.Namespace) -> int:
    """Until the script ends: pass a drain file on to the steps, again and again, until rank 0 has answered."""
    attempt, parent, reminded = here.attempt, os.getppid(), 0.0
    while os.getppid() == parent:
        time.sleep(TICK)
        answered = attempt.outcome.exists() or attempt.errors()
        if attempt.drain.exists() and not answered and time.monotonic() >= reminded + REMIND:
            reminded = time.monotonic()
            try:
                slurm.signal_steps(here.job_id, "USR1")
            except slurm.SlurmRefused as error:
                print("could not tell the steps to leave, trying again: {}".format(error), file=sys.stderr)
    return EXIT_FINISHED


def drain(here: Here, options: argparse.Namespace) -> int:
    """The batch script caught a signal: find out why, and ask the attempt to leave."""
    if here.attempt.drain.exists():
        return EXIT_FINISHED
    try:
        cause = policy.cause_of(slurm.show_job(here.job_id), time.time(), options.notice)
    except slurm.SlurmRefused as error:
        print(error, file=sys.stderr)
        cause = policy.Cause(policy.SIGNALLED, None)
    _ask_to_leave(here.attempt, cause.cause, "SIG{} to the batch script".format(options.signal), cause.deadline)
    return EXIT_FINISHED


def close(here: Here, options: argparse.Namespace) -> int:
    """Judge the attempt, write its end into the ledger, and decide what becomes of the job."""
    run, attempt, now = here.run, here.attempt, time.time()
    if not attempt.drain.exists():
        _ask_slurm_why(here, options, now)
    request = read_json(attempt.drain)
    verdict = _verdict(attempt, request, options)
    decision = policy.decide(verdict, request, _may_requeue(here), slurm.version())
    if decision.outcome == FINISHED:
        write_json(run.done, {"attempt": attempt.number, "step": verdict.step, "at": now})
    ledger.record(
        run,
        attempt.number,
        "end",
        now,
        job_id=here.job_id,
        outcome=decision.outcome,
        step=verdict.step,
        error=verdict.error,
        rank=verdict.rank,
        cause=request["cause"] if request else None,
        seconds=round(now - float(options.began), 3),
    )
    print("attempt {}: {}".format(attempt.number, decision.message))
    if not decision.requeue:
        return decision.exit_code
    # The requeue sends SIGTERM to everything here; with that trapped there are some seconds left to exclude nodes.
    slurm.requeue(here.job_id)
    bad = (read_json(attempt.nodes) or {}).get("bad", {})
    if bad:
        slurm.exclude(here.job_id, sorted(bad))
    return decision.exit_code


def _may_requeue(here: Here) -> bool:
    """Not somebody's salloc, and not a job that was submitted with --no-requeue."""
    try:
        job = slurm.show_job(here.job_id)
    except slurm.SlurmRefused as error:
        print(error, file=sys.stderr)
        return False
    return job.get("BatchFlag") == "1" and job.get("Requeue") == "1"


def _ask_slurm_why(here: Here, options: argparse.Namespace, now: float) -> None:
    """Ranks may have drained on a signal that never came by here: Slurm sends some to the steps only."""
    outcome = read_json(here.attempt.outcome)
    if outcome is None or outcome["outcome"] != DRAINED:
        return
    try:
        cause = policy.cause_of(slurm.show_job(here.job_id), now, options.notice)
    except slurm.SlurmRefused:
        cause = policy.Cause(policy.SIGNALLED, None)
    _ask_to_leave(here.attempt, cause.cause, "a signal to the steps", cause.deadline)


def _verdict(attempt: Attempt, request: Optional[Dict[str, Any]], options: argparse.Namespace) -> Verdict:
    errors = [read_json(path) for path in sorted(attempt.errors(), key=lambda path: path.stat().st_mtime_ns)]
    outcome = read_json(attempt.outcome)
    if errors or outcome is not None:
        return judge(errors, outcome, {}, None)
    code = None if options.code is None else int(options.code)
    if request is not None and (code is None or code > SIGNAL_BASE):
        return Verdict(DRAINED, None, None, None)  # asked to leave, and gone before anything could be saved
    if code is None:
        return Verdict(CRASHED, None, options.unready or "the steps could not be started", None)
    said = in_words(SIGNAL_BASE - code if code > SIGNAL_BASE else code)
    return Verdict(CRASHED, None, "the training step {} and recorded no outcome".format(said), None)


def _ask_to_leave(attempt: Attempt, cause: str, by: str, deadline: Optional[float]) -> None:
    if not attempt.drain.exists():  # the first cause is the cause
        write_json(attempt.drain, {"cause": cause, "by": by, "at": time.time(), "deadline": deadline})


COMMANDS = {
    "create": create,
    "open": open_attempt,
    "pythonpath": pythonpath,
    "nodes": choose_nodes,
    "watch": watch,
    "drain": drain,
    "close": close,
}


def main(arguments: Optional[List[str]] = None) -> int:
    options = _parse(arguments)
    try:
        return COMMANDS[options.command](Here(dict(os.environ)), options)
    except (Refused, snapshot.SnapshotError, slurm.SlurmRefused) as error:
        print("error: {}".format(error), file=sys.stderr)
        return EXIT_USAGE


def _parse(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m launcher.host.job", description="Around the steps of a job.")
    commands = parser.add_subparsers(dest="command")
    commands.required = True
    one = {name: commands.add_parser(name, help=(run.__doc__ or "").split("\n")[0]) for name, run in COMMANDS.items()}
    for name in ("recipe", "resolved", "plan", "sources", "script"):
        one["create"].add_argument("--" + name, required=True, help="file that holds it")
    one["nodes"].add_argument("step", nargs="?", help="a step of the plan, or `fit`: all nodes not known to be bad")
    one["nodes"].add_argument("--checked", action="store_true", help="nodes without a good health report are bad")
    one["drain"].add_argument("--signal", required=True)
    for name in ("drain", "close"):
        one[name].add_argument("--notice", type=float, required=True, help="seconds of --signal")
    one["close"].add_argument("--code", help="what the training step ended with; left out: it never began")
    one["close"].add_argument("--unready", help="why it never began")
    one["close"].add_argument("--began", required=True, help="when the attempt began, in unix time")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
