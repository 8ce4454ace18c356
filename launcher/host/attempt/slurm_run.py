"""A run in a Slurm job, from start to end: own it, run one attempt after the other in this allocation.

Where the batch host or its file system fails, the job comes back elsewhere or later; only a refusal is final. The
number of returns to other hosts is limited without any file: by the restarts of the job since its last attempt began.
"""

from __future__ import annotations

import sys
import time
import traceback
from itertools import chain
from typing import Callable, NamedTuple, TypeVar

from launcher.host.attempt.begin import begin_attempt, code_paths, forget_attempt, next_attempt
from launcher.host.attempt.conclude import close
from launcher.host.attempt.harvest import Harvest, HarvestSettings
from launcher.host.attempt.job_context import FAULTS_VARIABLE, JobContext, JobRefused
from launcher.host.attempt.notify import Notifier, NotifySettings
from launcher.host.attempt.own import LEFTOVERS_AGAIN_S, NothingToDo, StillHeld, own
from launcher.host.attempt.prepare import AskedToLeave, Checks, NotReady, Preparation
from launcher.host.attempt.replicas import Replicas
from launcher.host.attempt.runner import AttemptRunner
from launcher.host.attempt.slurm_job import SlurmJob, show_job_or_complain
from launcher.host.attempt.slurm_steps import SlurmReplicas, SlurmSteps
from launcher.host.attempt.start_again import start_again
from launcher.host.judge.causes import has_script, is_ending, is_requeueable
from launcher.host.judge.nodes import NotEnoughNodes
from launcher.host.judge.policy import OVER, ROOM_AGAIN_S, STAYS, Facts, who_starts_it
from launcher.host.process.signals import Signals
from launcher.host.record.identity import make_token
from launcher.host.record.ledger import read_ledger_or_complain, starts_in
from launcher.host.record.log_tails import LONG_TAIL, signed, tail
from launcher.host.record.presence import describe_loss
from launcher.host.slurm import queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent, patiently
from launcher.host.slurm.formats import expand_hosts, is_dead
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, LedgerLine, NodeAssignment
from megatron_rl.contract.codes import (
    BAD_NODES,
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FINISHED,
    EXIT_USAGE,
    HOST_TRIES,
    LOST,
    SILENCE_VARIABLE,
)
from megatron_rl.contract.files import FULL
from megatron_rl.contract.paths import FOLDERS, INFER, TRAIN, Attempt

RETRY_S = 20.0  # seconds of retries on this host before an attempt has begun
PAUSE_S = 1.0  # seconds between them

T = TypeVar("T")


class JobSettings(NamedTuple):
    script: str  # path of the sbatch script that started this process
    notice: float  # seconds of --signal before the time limit
    backoff: float  # seconds before a crashed run starts again
    outlives_nodes: bool  # --no-kill
    checks: Checks
    harvest: HarvestSettings = HarvestSettings()
    notify: NotifySettings | None = None


def run_job(context: JobContext, settings: JobSettings, signals: Signals) -> int:
    notifier = Notifier(context.run, settings.notify)
    try:
        return _run(context, settings, signals, notifier)
    except JobRefused as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except NothingToDo as nothing:
        print(nothing)
        return EXIT_FINISHED
    except (OSError, SlurmRefused, StillHeld) as error:
        return come_back(context, error, settings.script)
    except Exception as error:  # noqa: BLE001 - not even a bug here may end the run
        traceback.print_exc()
        return come_back(context, error, settings.script)
    finally:
        notifier.report_end()
        notifier.close()


def _run(context: JobContext, settings: JobSettings, signals: Signals, notifier: Notifier) -> int:
    lock = _retried(lambda: own(context))
    try:
        _add_missed_signal(context, signals)
        notifier.report_end()  # of an earlier start, which was killed
        end = supervise_attempt(context, settings, signals, lock.descriptor, notifier)
        while end.then == STAYS:
            notifier.report_end()
            context = without_dead_nodes(context)
            end = supervise_attempt(context, settings, signals, lock.descriptor, notifier)
    finally:
        lock.release()
    return int(end.exit_code or EXIT_FINISHED)


def _add_missed_signal(context: JobContext, signals: Signals) -> None:
    """Add a signal that arrived between the script and this process, when nobody listened: Slurm records that it is
    ending the job."""
    try:
        if is_ending(queries.show_job(context.job_id)):
            signals.add("SIGTERM")
    except SlurmRefused as error:  # the end of the job will show it
        print(error, file=sys.stderr)


def supervise_attempt(
    context: JobContext, settings: JobSettings, signals: Signals, lock: int, notifier: Notifier
) -> AttemptEnd:
    """Run the next attempt to its end; `lock` is a descriptor. Raises OSError where it cannot begin."""
    attempt = _begun(context)
    began, code, unready, unready_host = time.monotonic(), None, None, None
    job = SlurmJob(context, settings.notice, settings.backoff, settings.outlives_nodes)
    steps = SlurmSteps(context, settings.script, attempt, lock)
    silence_limit = float(context.environ.get(SILENCE_VARIABLE, "0"))
    runner = AttemptRunner(attempt, steps, job, signals, silence_limit)
    preparation = Preparation(context, settings.checks, runner, steps, job)
    try:
        steps.use_code(code_paths(context))
        assignment = preparation.run()
        kept = SlurmReplicas(context, steps, attempt, assignment)
        files = {kind: kept.files(kind) for kind in FOLDERS}
        if any(files.values()):
            make_token(context.run)
        replicas = Replicas([*chain.from_iterable(files.values())], kept.start, silence_limit)
        runner.tasks.append(lambda now: None if runner.leaving else replicas.poll(now))
        harvest = Harvest(context, steps, attempt, len(files[INFER]), settings.harvest)
        runner.tasks.append(lambda now: None if runner.leaving else harvest.poll(now))
        runner.tasks += notifier.watch(attempt)
        try:
            code = _train(runner, steps, assignment)
        finally:
            harvest.stop()
            runner.tasks.clear()
    except (AskedToLeave, NotEnoughNodes):
        pass
    except NotReady as error:
        unready, unready_host = str(error), error.host
        print(f"error: {unready}", file=sys.stderr)
    except (OSError, SlurmRefused) as error:
        unready = f"{context.batch_host}: {error}"
        print(f"error: {unready}", file=sys.stderr)
        if getattr(error, "errno", None) not in FULL:
            job.unfit = dict(job.unfit, **{context.batch_host: f"as the batch host: {error}"})
            runner.ask_to_leave(Drain(BAD_NODES, "the host side", time.time()))
    except Exception as error:  # noqa: BLE001 - a bug here must be recorded as a crash, or the job returns for ever
        unready = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    steps.stop_all()
    try:
        preparation.forget_containers()
    except (OSError, SlurmRefused) as error:
        print(f"containers of this attempt may have stayed on the nodes: {error}", file=sys.stderr)
    steps.stop_all()  # a removal that took too long
    if runner.has_lost_directory():  # final: another start would create an empty run of that name
        raise JobRefused(describe_loss(context.run))
    signals.take()  # later signals are for the next attempt
    observed = runner.observed(code, unready)._replace(unready_host=unready_host)
    return close(context.run, attempt, job, observed, runner.request, began)


def _begun(context: JobContext) -> Attempt:
    attempt = _retried(lambda: next_attempt(context))
    try:
        _retried(lambda: begin_attempt(context, attempt))
    except OSError:
        forget_attempt(attempt)
        raise
    return attempt


def _train(runner: AttemptRunner, steps: SlurmSteps, assignment: NodeAssignment) -> int:
    errors = runner.attempt.srun
    train = steps.start(TRAIN, assignment.steps[TRAIN], errors=str(errors))
    runner.training = True
    runner.wait(lambda: train.exit_code() is not None)
    runner.poll(time.monotonic())
    code = signed(train.exit_code() or 0)
    if code and not (runner.request or runner.attempt.outcome.exists() or runner.attempt.errors()):
        runner.wait_for_reason()
    sys.stderr.write(tail(errors, LONG_TAIL))  # srun names the rank that was killed
    steps.stop_all()
    return code


def without_dead_nodes(context: JobContext) -> JobContext:
    """Return the job with the nodes of its allocation that are alive; with all where Slurm does not answer."""
    given = context.given or len(context.hosts)
    try:
        job = patiently(lambda: queries.show_job(context.job_id))
        still = expand_hosts(job["NodeList"])  # with --no-kill Slurm removes the dead ones
        states = patiently(lambda: queries.states_of_all(still))
    except (SlurmRefused, KeyError, ValueError) as error:
        print(f"Slurm does not say which nodes are left: {error}", file=sys.stderr)
        return context._replace(given=given)
    hosts = [host for host in context.hosts if not is_dead(states.get(host, "unknown"))]
    environ = dict(context.environ, SLURM_JOB_NUM_NODES=str(len(hosts)), SLURM_JOB_NODELIST=",".join(hosts))
    return context._replace(hosts=hosts, given=given, environ=environ)


def _retried(work: Callable[[], T]) -> T:
    """Return the result of `work`. Retries for RETRY_S while the file system or Slurm fails, unless a disk is full."""
    give_up = time.monotonic() + RETRY_S
    while True:
        try:
            return work()
        except (OSError, SlurmSilent) as error:
            if time.monotonic() >= give_up or getattr(error, "errno", None) in FULL:
                raise
            print(f"tries again: {error}", file=sys.stderr)
        time.sleep(PAUSE_S)


def come_back(context: JobContext, error: Exception, script: str) -> int:
    """Start the job again after a failure before any attempt began, since no user may be there to resume the run. Takes
    this job's script: the run directory may be out of reach. Returns the exit code."""
    job = show_job_or_complain(context.job_id)
    facts = Facts(can_return=has_script(job), requeueable=is_requeueable(job))
    then, pause = who_starts_it(facts), _pause_after(error)
    history = read_ledger_or_complain(context.run)
    # A pause needs no limit: another host would not help, and what the job waits for is in no host's power.
    tries = 0 if pause else context.faults + context.restarts - _restarts_at_last_start(context, history)
    where = f"{context.run.root} on {context.batch_host}: {error}"
    if then == OVER or tries >= HOST_TRIES:
        why = "" if then == OVER else f" {tries} starts in a row failed;"
        print(f"error: {where};{why} nothing is lost, mrl resume continues", file=sys.stderr)
        return EXIT_DRAINED if pause else EXIT_CRASHED
    if pause:
        room = "" if isinstance(error, StillHeld) else "make room, "
        what = f"{room}the job comes back in {pause / 60:.0f} min"
    else:
        what = "the job comes back without this host"
    print(f"error: {where}; nothing is lost: {what}", file=sys.stderr)
    back = AttemptEnd(
        attempt=max([line.attempt for line in history] or [0]) + 1,
        at=time.time(),
        outcome=LOST,
        then=then,
        excluded=[] if pause else [context.batch_host],
        not_before=time.time() + pause if pause else None,
    )
    start_again(context, back, script, {FAULTS_VARIABLE: str(tries)})
    return EXIT_DRAINED


def _pause_after(error: Exception) -> float | None:
    """Seconds after which a start may succeed on any host; None where another host may do better now."""
    if isinstance(error, StillHeld):
        return LEFTOVERS_AGAIN_S
    return ROOM_AGAIN_S if getattr(error, "errno", None) in FULL else None


def _restarts_at_last_start(context: JobContext, history: list[LedgerLine]) -> int:
    """Number of requeues of this job when its last attempt began; -1: none has."""
    return max([start.restart for start in starts_in(history) if start.job_id == context.job_id] or [-1])
