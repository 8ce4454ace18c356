"""Watch the processes of an attempt: pass on signals and requests to leave, keep deadlines, end hangs.

One thread, one loop; a signal only queues its name and wakes the loop. Each poll runs several tasks, and a task that
fails, because the disk is full or Slurm silent, does not keep the others from running.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, NamedTuple

from launcher.host.attempt.interfaces import AttemptJob, Steps
from launcher.host.judge.causes import is_complete
from launcher.host.judge.hang import describe_hang
from launcher.host.judge.verdict import ASKED_FOR_STACKS, RankExit
from launcher.host.process.signals import Signals
from launcher.host.record.evidence import Observed
from launcher.host.record.heartbeats import HangWatch
from launcher.host.record.presence import Presence
from launcher.host.slurm.call import SlurmRefused
from megatron_rl.contract.attempt_records import Drain, Hang, RankError
from megatron_rl.contract.codes import DRAIN_SIGNAL, LAST_MOMENT_S, SIGNALLED, STACKS_LIMIT_S, STACKS_SIGNAL
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import PATIENCE_S, Unreadable, read, write
from megatron_rl.contract.steady import SteadyDeadline

COMPLETIONS = 10  # queries for the cause and deadline that a request to leave lacks
COMPLETE_EVERY_S = 1.0  # seconds between them
SIGNAL_S = 3.0  # seconds over which Slurm signals the processes of a job that it ends
LEAVE_LIMIT_S = 60.0  # seconds that the other ranks have after the first one left cleanly


class Deadline(NamedTuple):
    at: float  # time.monotonic()
    reason: str


class AttemptRunner:
    """Watches the processes of one attempt until they end.

    Args:
        silence_limit: seconds after which a silent rank counts as hung; 0: never.
        grace: seconds that the other ranks have once one has failed, where nothing else ends them.
        wall: clock of the times in records. Everything else is timed by time.monotonic(), which nobody sets.
    """

    def __init__(
        self,
        attempt: Attempt,
        steps: Steps,
        job: AttemptJob,
        signals: Signals,
        silence_limit: float,
        grace: float = 0.0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.attempt, self.steps, self.job, self.signals = attempt, steps, job, signals
        self.request: Drain | None = None
        self.training = False  # whether the ranks have been started, so that heartbeats and signals count
        self.tasks: list[Callable[[float], None]] = []
        self._grace, self._wall = grace, wall
        self.deadlines = SteadyDeadline(wall)
        self._unwritten = False  # whether the request is not in its file yet
        self._unreadable_since: float | None = None  # when the drain file became unreadable; None: it is not
        self._hangs = HangWatch(attempt, silence_limit)
        self._hang: Hang | None = None
        self._exits: list[RankExit] = []
        self._errors = ErrorFiles()
        self.ended: set[int] = set()  # ranks that have ended, where each is a process here
        self._deadline: Deadline | None = None
        self._ending = self._stacks_asked = False
        self._reminded_at = self._completed_at = 0.0
        self._completions = 0
        self._complaints: dict[str, str] = {}
        self._presence = Presence(RunDir(attempt.folder.parent.parent))
        self._lost = False  # whether the run directory is gone

    def wait(self, ended: Callable[[], bool], through_requests: bool = True) -> None:
        """Watch until `ended()` is true, or the attempt is asked to leave unless `through_requests`."""
        while not ended():
            self.poll(time.monotonic())
            if self.request is not None and not through_requests:
                return
            self.signals.wait(self.steps.tick_s)

    def wait_for_reason(self) -> None:
        """Watch for SIGNAL_S more seconds after something ended for no known reason. Slurm signals every process of a
        job that it ends, and the signal to this one may come last."""
        give_up = time.monotonic() + SIGNAL_S
        self.wait(lambda: time.monotonic() >= give_up, through_requests=False)

    def poll(self, now: float) -> None:
        """Run all tasks once. now: time.monotonic()."""
        own = (
            self._check_directory,
            self._read_requests,
            self._check_exits,
            self._check_hang,
            self._signal_drain,
            self._complete_request,
            self._enforce_deadline,
        )
        for task in (*own, *self.tasks):
            try:
                task(now)
            except (SlurmRefused, OSError) as error:
                self._complain(task, str(error))

    @property
    def leaving(self) -> bool:
        """Whether the attempt is over, was asked to leave, or is being ended, so that nothing new may start."""
        return self.request is not None or self._ending or self.attempt.outcome.exists()

    def has_lost_directory(self) -> bool:
        """Whether the run directory is gone, so that the end of the attempt can be neither judged nor recorded. Waits
        until that is certain: ranks may end over it sooner."""
        return self._lost or self._presence.wait_for_certainty()

    def ask_to_leave(self, request: Drain) -> None:
        """Request that the attempt leave. The first cause counts, others follow from it, and the earliest deadline."""
        if self.request is None:
            self.request, self._unwritten = request, True
        elif request.deadline is not None and request.deadline < (self.request.deadline or float("inf")):
            self.request, self._unwritten = self.request._replace(deadline=request.deadline), True

    def observed(self, code: int | None = None, unready: str | None = None) -> Observed:
        """Observations of the end: the exit code of the training step, or why it never began (`unready`)."""
        late = self._deadline.reason if self._ending and self._deadline else None
        return Observed(
            exits=None if self.steps.end_together else self._exits,
            code=code,
            unready=unready,
            late=None if self.job.takes_nodes else late,
            hang=self._hang,
            heartbeats=self._hangs.newest,
        )

    def _check_directory(self, now: float) -> None:
        """End ranks whose run directory is gone: their work is lost, and no drain file can reach them."""
        if not self._lost and self._presence.is_lost():
            self._lost = True
            self._set_deadline(now, "the directory of the run is gone")

    def _read_requests(self, now: float) -> None:
        """Read requests to leave: from signals, the owner, and the drain file, which others may write and change."""
        for name in self.signals.take():
            self.ask_to_leave(self.job.request_for(name, self._wall()))
        owner = self.job.request_of_owner(self._wall()) if self.request is None else None
        if owner is not None:
            self.ask_to_leave(owner)
        found = read(Drain, self.attempt.drain)
        if isinstance(found, Unreadable):
            # A file system that fails for a moment would otherwise send ranks away whom nobody asked.
            if self._unreadable_since is None:
                self._unreadable_since = now
            if now >= self._unreadable_since + PATIENCE_S:
                self.request = self.request or Drain(SIGNALLED, f"somebody ({found})", self._wall())
        else:
            self._unreadable_since = None
        if isinstance(found, Drain) and found != self.request:
            self._adopt(found)
        ends_at = self.deadlines.of(self.request, now)
        if self.request is not None and self.request.deadline is not None and ends_at is not None:
            limit = self.request.deadline - self.request.at
            waited = f"; no save within {limit:.0f} s" if limit > 0 else ""
            self._set_deadline(ends_at - LAST_MOMENT_S, self.request.cause + waited)
        if self._unwritten and self.request is not None:
            write(self.attempt.drain, self.request)
            self._unwritten = False

    def _adopt(self, found: Drain) -> None:
        """Adopt a request that another process wrote, with an earlier deadline of ours that is not written yet."""
        print(f"drain: {found.cause}, asked for by {found.by}")
        ours = self.request.deadline if self._unwritten and self.request is not None else None
        deadlines = [deadline for deadline in (found.deadline, ours) if deadline is not None]
        self.request = found._replace(deadline=min(deadlines) if deadlines else None)
        self._unwritten = self.request != found

    def _check_exits(self, now: float) -> None:
        # Who failed first must stay visible. Exits that our own signals caused are not kept as evidence, nor a SIGSEGV
        # of a rank that was asked for its stack: they say nothing about that rank. On Slurm srun ends the other ranks
        # when one fails; here a failed rank does so after the grace time. A rank that left cleanly does so after
        # LEAVE_LIMIT_S: if rank 0 of 8 has saved and left while rank 3 hangs in a collective, the others would wait for
        # ever. A rank whose collective timed out (`waited`) stays a moment, in which all ranks dump their stacks.
        for ended in self.steps.exits():
            if ended.rank in self.ended:
                continue
            self.ended.add(ended.rank)
            print(f"rank {ended.rank} ended with {ended.code}")
            if not (self._ending or (self._stacks_asked and -ended.code == ASKED_FOR_STACKS)):
                self._exits.append(ended)  # exits that we caused say nothing about a rank
            if self.steps.end_together:
                continue
            if ended.bad:
                self._end_others(now)
            else:
                self._set_deadline(now + LEAVE_LIMIT_S, f"rank {ended.rank} left, the others did not follow")
        errors = self.attempt.errors()
        if errors and not self.steps.end_together:
            self._end_others(now)
        elif not self._stacks_asked and self._errors.any_waited(errors):
            self._ask_for_stacks()  # the failed rank waits a moment, so that all ranks can dump their stacks

    def _check_hang(self, now: float) -> None:
        if not self.training or self._ending:
            return
        if self._hang is None and (self._deadline is None or self.steps.end_together):
            self._hang = self._hangs.poll(now)
            if self._hang is not None:
                print(describe_hang(self._hang))
                self._set_deadline(now + STACKS_LIMIT_S, f"rank {self._hang.rank} was silent")
                write(self.attempt.hang, self._hang)
        if self._hang is not None:
            self._ask_for_stacks()

    def _signal_drain(self, now: float) -> None:
        """Signal ranks that were asked to leave, repeatedly: one that is still importing ignores the first signal."""
        if self.request is None or not self.training or self._ending or now < self._reminded_at + self.steps.remind_s:
            return
        if not (self.attempt.outcome.exists() or self.attempt.errors()):
            self._reminded_at = now
            self.steps.signal(DRAIN_SIGNAL)

    def _complete_request(self, now: float) -> None:
        """Add the cause and deadline that a request lacks. A rank that a signal reached alone cannot query Slurm, and
        Slurm may signal a job before it records the end of its grace time."""
        request = self.request
        if request is None or is_complete(request) or self._completions >= COMPLETIONS:
            return
        if now < self._completed_at + COMPLETE_EVERY_S:
            return
        self._completed_at = now
        completed = self.job.complete(self.attempt, request)
        self._completions += 1
        if completed != request and read(Drain, self.attempt.drain) == request:  # else another process changed it
            self.request = completed
            write(self.attempt.drain, completed)

    def _enforce_deadline(self, now: float) -> None:
        if self._deadline is None or now < self._deadline.at:
            return
        if not self._ending:
            print(f"ending the ranks: {self._deadline.reason}")
        request = self.request
        hurried = request is not None and request.deadline is not None and request.deadline <= request.at
        self.steps.end(now, hurried or self._lost)
        self._ending = True

    def _end_others(self, now: float) -> None:
        self._ask_for_stacks()
        self._set_deadline(now + self._grace, "another rank had failed")

    def _ask_for_stacks(self) -> None:
        """Have each rank dump its stack, once: the stacks show which rank the others wait for."""
        if not self._stacks_asked:
            self.steps.signal(STACKS_SIGNAL)
            self._stacks_asked = True

    def _set_deadline(self, at: float, reason: str) -> None:
        if self._deadline is None or at < self._deadline.at:
            self._deadline = Deadline(at, reason)

    def _complain(self, task: Callable[[float], None], why: str) -> None:
        """Print each new error once: a task is retried every second."""
        name = getattr(task, "__name__", "")
        if self._complaints.get(name) != why:
            self._complaints[name] = why
            print(f"the watch over the steps tries again: {why}", file=sys.stderr)


class ErrorFiles:
    """Error files of ranks, each of which is read once."""

    def __init__(self) -> None:
        self._known: set[Path] = set()

    def any_waited(self, files: Sequence[Path]) -> bool:
        """Whether a rank whose file was not read before reports a collective that timed out."""
        for file in files:
            error = read(RankError, file) if file not in self._known else None
            if isinstance(error, RankError):  # what cannot be read is read again
                self._known.add(file)
                if error.waited:
                    return True
        return False
