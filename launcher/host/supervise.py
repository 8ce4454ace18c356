"""Supervise one attempt of a local run: its ranks are processes of this machine, and end with this process.

    python -m launcher.host.supervise --run-dir DIR --attempt N --ranks 2 --device cpu -- COMMAND ...

Requests to stop arrive through the drain file only: others write Attempt.drain with a deadline, and this process does
so itself on SIGTERM, SIGINT, SIGHUP and when its owner dies. Ranks that still run shortly before the deadline are
ended. A later drain file with an earlier deadline counts: `deadline: now` kills."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from launcher.host.attempt.conclude import close, conclude_lost
from launcher.host.attempt.interfaces import AttemptJob
from launcher.host.attempt.local_ranks import LocalRanks, LocalReplicas, RankSettings
from launcher.host.attempt.notify import Notifier, NotifySettings
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.judge.policy import Facts
from launcher.host.process.lock import RunIsOwned, RunLock
from launcher.host.process.output import QuietStream
from launcher.host.process.processes import start_time
from launcher.host.process.signals import Signals
from launcher.host.record.identity import make_token
from launcher.host.record.ledger import newest_known_checkpoint, point_latest, write_line
from launcher.host.record.presence import describe_loss
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain
from megatron_rl.contract.codes import EXIT_CRASHED, EXIT_FINISHED, EXIT_USAGE
from megatron_rl.contract.files import WRITE_PATIENCE_S
from megatron_rl.contract.paths import INFER, Attempt, RunDir

REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    run = RunDir(os.path.abspath(options.run_dir))
    attempt = run.attempt(options.attempt)
    if os.getsid(0) != os.getpid():
        os.setsid()
    try:
        return _supervise_as_owner(run, attempt, options)
    except RunIsOwned as error:
        print(f"{run.root}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:
        print(f"error: {run.root}: {error}; nothing is lost, mrl resume continues", file=sys.stderr)
        return EXIT_CRASHED


def _supervise_as_owner(run: RunDir, attempt: Attempt, options: argparse.Namespace) -> int:
    """Take the run's lock and run the attempt. Returns the exit code. Raises RunIsOwned, and OSError where the attempt
    could not begin."""
    lock = RunLock(run.lock, f"the supervisor of attempt {attempt.number}", patience=5.0)
    notifier = Notifier(run, NotifySettings.parse(options.notify) if options.notify else None)
    try:
        if run.last_attempt() != attempt.number:
            text = f"{run.root}: attempt {attempt.number} was overtaken by attempt {run.last_attempt()}"
            print(text, file=sys.stderr)
            return EXIT_USAGE
        if run.done.exists():
            return EXIT_FINISHED
        attempt.folder.mkdir(parents=True, exist_ok=True)
        attempt.logs.mkdir(parents=True, exist_ok=True)
        _write_to(str(attempt.log(0, role="supervisor")))
        point_latest(attempt, str(os.getpid()))
        if attempt.address("train").exists():
            attempt.address("train").unlink()  # ranks would try to meet at the old address
        end = supervise(run, attempt, options, notifier)
        return EXIT_CRASHED if end is None else int(end.exit_code or EXIT_FINISHED)
    finally:
        lock.release()
        notifier.report_end()
        notifier.close()


def supervise(run: RunDir, attempt: Attempt, options: argparse.Namespace, notifier: Notifier) -> AttemptEnd | None:
    """Run the attempt to its end; this process holds the run's lock. Returns None where the run directory is gone.
    Raises OSError where the attempt could not begin."""
    now, began = time.time(), time.monotonic()
    conclude_lost(run, now, unseen="its supervisor was killed")
    host = socket.gethostname()
    replicas = [LocalReplicas(*json.loads(each)) for each in options.replicas]
    generating = sum(each.own_devices for each in replicas if each.kind == INFER)
    ranks = options.ranks + sum(each.own_devices for each in replicas)
    start = AttemptStart(attempt.number, now, host, pid=os.getpid(), ranks=ranks, generating=generating)
    write_line(run, start, WRITE_PATIENCE_S)
    job = LocalJob(run, options.drain_limit, options.owner)
    settings = RankSettings(
        options.ranks, options.threads, options.device, options.silence_limit, options.grace, options.command, replicas
    )
    processes = LocalRanks(run, attempt, settings)
    runner = AttemptRunner(attempt, processes, job, Signals(REQUESTS), options.silence_limit, options.grace)
    unready = None
    try:
        if replicas:
            make_token(run)
        processes.start()
        runner.training = True
        runner.tasks.append(lambda now: None if runner.leaving else processes.replicas.poll(now))
        runner.tasks += notifier.watch(attempt)
        runner.wait(lambda: len(runner.ended) == options.ranks or processes.are_stuck(time.monotonic()))
    except OSError as error:
        unready = f"the ranks could not be started: {error}"
    finally:
        processes.close()
    if runner.has_lost_directory():
        print(describe_loss(run), file=sys.stderr)
        return None
    code = processes.code if unready is None else None
    return close(run, attempt, job, runner.observed(code, unready), runner.request, began)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="supervise", description="Start and watch the ranks of one attempt.")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="training processes to start on this machine")
    parser.add_argument(
        "--replicas", action="append", default=[], help="replicas of a kind to start beside them: LocalReplicas in JSON"
    )
    parser.add_argument("--threads", type=int, default=1, help="OMP and MKL threads of each rank")
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--owner", help="PID:START-TICKS of the process whose death drains the run")
    parser.add_argument("--drain-limit", type=float, default=660.0, help="seconds that the ranks get to save")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds between failure, SIGTERM and SIGKILL")
    parser.add_argument(
        "--silence-limit", type=float, default=0.0, help="seconds; a rank silent for longer hangs; 0: none"
    )
    parser.add_argument("--notify", help="the recipe's section `notify`, as JSON")
    parser.add_argument("command", nargs="+", help="command of each training rank, after --")
    return parser.parse_args(arguments)


def _write_to(path: str) -> None:
    with Path(path).open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = QuietStream(os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False))
    sys.stderr = QuietStream(sys.stderr)


class LocalJob(AttemptJob):
    """The job of a local run, which nothing starts again.

    Args:
        drain_limit: seconds that ranks get to save and leave.
        owner: PID:START-TICKS of the process whose death drains the run.
    """

    def __init__(self, run: RunDir, drain_limit: float, owner: str | None) -> None:
        self._run, self._drain_limit, self._owner = run, drain_limit, owner

    def request_for(self, signal_name: str, now: float) -> Drain:
        return Drain(signal_name, "supervisor", now, deadline=now + self._drain_limit)

    def request_of_owner(self, now: float) -> Drain | None:
        if self._owner is None:
            return None
        pid, _, started = self._owner.partition(":")
        if start_time(int(pid)) == int(started):
            return None
        return self.request_for("the mrl-submit that owned it is gone", now)

    def complete(self, attempt: Attempt, request: Drain) -> Drain:
        if request.deadline is not None:
            return request
        return request._replace(deadline=request.at + self._drain_limit)  # a rank wrote it, which only got a signal

    def facts(self, attempt: Attempt, request: Drain | None) -> Facts:
        return Facts(checkpoint=newest_known_checkpoint(self._run), can_return=False, requeueable=False)


if __name__ == "__main__":
    sys.exit(main())
