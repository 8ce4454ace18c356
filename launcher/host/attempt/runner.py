"""While the processes of an attempt run: signals and requests to leave are passed on, deadlines kept, hangs ended.

One thread, one loop. Signals only set a flag and wake it. Every look has several parts, and none that fails keeps the
others from being tried: a full disk or a silent Slurm is no reason to watch no more.
"""

from __future__ import annotations

import sys
import time
from typing import Callable, NamedTuple

from launcher.host.attempt.interfaces import Steps, Surroundings
from launcher.host.judge.causes import is_complete
from launcher.host.judge.evidence import RankExit
from launcher.host.judge.hang import describe_hang
from launcher.host.judge.verdict import ASKED_FOR_STACKS
from launcher.host.process.signals import Signals
from launcher.host.record.evidence import Observed
from launcher.host.record.heartbeats import HangWatch
from launcher.host.record.presence import Presence
from launcher.host.slurm.call import SlurmRefused
from megatron_rl.contract.attempt_records import Drain, Hang, RankError
from megatron_rl.contract.codes import DRAIN_SIGNAL, LAST_MOMENT_S, SIGNALLED, STACKS_LIMIT_S, STACKS_SIGNAL
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, if_readable, read, write

LEARN = 10  # questions, one a second, about what a request to leave does not say
LEARN_EVERY_S = 1.0
SIGNAL_S = 3.0  # over which Slurm signals the processes of a job that it ends
LEAVE_LIMIT_S = 60.0  # that the other ranks have once the first one left in order


class Deadline(NamedTuple):
    """The ranks must be gone at `at` (unix time)."""

    at: float
    reason: str


class AttemptRunner:
    """Runs one attempt: what its processes do, and what they are asked to.

    Args:
        silence_limit: seconds of silence that are held against a rank; 0: none.
        grace: seconds that the others have once a rank has failed, where nothing else ends them.
    """

    def __init__(
        self,
        attempt: Attempt,
        steps: Steps,
        surroundings: Surroundings,
        signals: Signals,
        silence_limit: float,
        grace: float = 0.0,
    ) -> None:
        self.attempt, self.steps, self.surroundings, self.signals = attempt, steps, surroundings, signals
        self.request: Drain | None = None
        self.training = False  # the ranks have been started: their heartbeats count, and they hear
        self.also: list[Callable[[float], None]] = []
        self._grace = grace
        self._unwritten = False  # the request, in its file
        self._hangs = HangWatch(attempt, silence_limit)
        self._hang: Hang | None = None
        self._exits: list[RankExit] = []
        self._ended: set[int] = set()
        self._deadline: Deadline | None = None
        self._ending = self._stacks_asked = False
        self._reminded = self._learned_at = 0.0
        self._learned = 0
        self._complaints: dict[str, str] = {}
        self._presence = Presence(RunDir(attempt.folder.parent.parent))
        self._lost = False  # the run's directory

    def wait(self, ended: Callable[[], bool], through_requests: bool = True) -> None:
        """Watch until `ended` says so.

        Args:
            through_requests: go on when the attempt is asked to leave.
        """
        while not ended():
            self.look(time.time())
            if self.request is not None and not through_requests:
                return
            self.signals.wait(self.steps.tick_s)

    def wait_for_reason(self) -> None:
        """Watch a moment longer where something ended for no reason that is known yet: who ends a job signals all of
        it, and our own signal may come last."""
        give_up = time.monotonic() + SIGNAL_S
        self.wait(lambda: time.monotonic() >= give_up, through_requests=False)

    def look(self, now: float) -> None:
        """Do what is due."""
        parts = [self._see_directory, self._hear, self._see_exits, self._see_hang, self._remind, self._learn]
        parts += [self._keep_deadline]
        for part in parts + self.also:
            try:
                part(now)
            except (SlurmRefused, OSError) as error:
                self._complain(part, str(error))

    @property
    def ended_ranks(self) -> int:
        """How many ranks have ended, where their own processes tell."""
        return len(self._ended)

    @property
    def leaving(self) -> bool:
        """Whether the attempt is over, was asked to leave, or is being ended: nothing is started any more."""
        return self.request is not None or self._ending or self.attempt.outcome.exists()

    def has_lost_directory(self) -> bool:
        """Whether the run's directory is gone: then there is nothing to judge its end by, and nowhere to write it. It
        waits until that is certain, as ranks may end by it before."""
        return self._lost or self._presence.wait_for_certainty()

    def ask_to_leave(self, request: Drain) -> None:
        """Have the attempt leave. The first cause is the cause: what follows, follows from it. The earliest deadline
        counts."""
        if self.request is None:
            self.request, self._unwritten = request, True
        elif request.deadline is not None and request.deadline < (self.request.deadline or float("inf")):
            self.request, self._unwritten = self.request._replace(deadline=request.deadline), True

    def observed(self, code: int | None = None, unready: str | None = None) -> Observed:
        """What was seen of the end.

        Args:
            code: what the training step ended with; None: it never began.
            unready: why it never began.
        """
        late = self._deadline.reason if self._ending and self._deadline else None
        return Observed(
            exits=None if self.steps.end_together else self._exits,
            code=code,
            unready=unready,
            late=None if self.surroundings.takes_nodes else late,
            hang=self._hang,
            heartbeats=self._hangs.newest,
        )

    def _see_directory(self, now: float) -> None:
        """Ranks of a run whose directory is gone compute for nobody, and nobody could ask them to leave."""
        if not self._lost and self._presence.is_lost():
            self._lost = True
            self._set_deadline(now, "the directory of the run is gone")

    def _hear(self, now: float) -> None:
        """Signals, the owner, and the drain file, which anybody may write and change."""
        for name in self.signals.take():
            self.ask_to_leave(self.surroundings.request_for(name, now))
        owner = self.surroundings.request_of_owner(now) if self.request is None else None
        if owner is not None:
            self.ask_to_leave(owner)
        found = read(Drain, self.attempt.drain)
        if isinstance(found, Unreadable):
            self.request = self.request or Drain(SIGNALLED, f"somebody ({found})", now)
        elif found is not ABSENT and found != self.request:
            self._take(found)
        if self.request is not None and self.request.deadline is not None:
            limit = self.request.deadline - self.request.at
            waited = f"; no save within {limit:.0f} s" if limit > 0 else ""
            self._set_deadline(self.request.deadline - LAST_MOMENT_S, self.request.cause + waited)
        if self._unwritten and self.request is not None:
            write(self.attempt.drain, self.request)
            self._unwritten = False

    def _take(self, found: Drain) -> None:
        """Go by what somebody has written, but for an earlier deadline of ours that is not written yet."""
        print(f"drain: {found.cause}, asked for by {found.by}")
        ours = self.request.deadline if self._unwritten and self.request is not None else None
        deadlines = [deadline for deadline in (found.deadline, ours) if deadline is not None]
        self.request = found._replace(deadline=min(deadlines) if deadlines else None)
        self._unwritten = self.request != found

    def _see_exits(self, now: float) -> None:
        for ended in self.steps.exits():
            if ended.rank in self._ended:
                continue
            self._ended.add(ended.rank)
            print(f"rank {ended.rank} ended with {ended.code}")
            if not (self._ending or (self._stacks_asked and -ended.code == ASKED_FOR_STACKS)):
                self._exits.append(ended)  # nothing of ours brought it about: only this tells about a rank
            if self.steps.end_together:
                continue
            if ended.bad:
                self._end_with_the_failed_one(now)
            else:
                self._set_deadline(now + LEAVE_LIMIT_S, f"rank {ended.rank} left, the others did not follow")
        errors = self.attempt.errors()
        if errors and not self.steps.end_together:
            self._end_with_the_failed_one(now)
        elif any(self._waited(if_readable(read(RankError, path))) for path in errors if not self._stacks_asked):
            self._ask_for_stacks()  # it holds on for a moment, so that all can say where they are

    def _see_hang(self, now: float) -> None:
        if not self.training or self._ending:
            return
        if self._hang is None and (self._deadline is None or self.steps.end_together):
            self._hang = self._hangs.look(now)
            if self._hang is not None:
                print(describe_hang(self._hang))
                self._set_deadline(now + STACKS_LIMIT_S, f"rank {self._hang.rank} was silent")
                write(self.attempt.hang, self._hang)
        if self._hang is not None:
            self._ask_for_stacks()

    def _remind(self, now: float) -> None:
        """Ranks that were asked to leave get a signal, again and again: one that is still importing ignores it, a later
        one finds its handler."""
        if self.request is None or not self.training or self._ending or now < self._reminded + self.steps.remind_s:
            return
        if not (self.attempt.outcome.exists() or self.attempt.errors()):
            self._reminded = now
            self.steps.signal(DRAIN_SIGNAL)

    def _learn(self, now: float) -> None:
        """Add to the request what it does not say. A rank that a signal reached alone cannot ask, and Slurm may signal
        a job before it has put the end of its grace time on record."""
        request = self.request
        if request is None or is_complete(request) or self._learned >= LEARN or now < self._learned_at + LEARN_EVERY_S:
            return
        self._learned_at = now
        fuller = self.surroundings.complete(self.attempt, request)
        self._learned += 1
        if fuller != request and read(Drain, self.attempt.drain) == request:  # or somebody has named a cause meanwhile
            self.request = fuller
            write(self.attempt.drain, fuller)

    def _keep_deadline(self, now: float) -> None:
        if self._deadline is None or now < self._deadline.at:
            return
        if not self._ending:
            print(f"ending the ranks: {self._deadline.reason}")
        request = self.request
        hurried = request is not None and request.deadline is not None and request.deadline <= request.at
        self.steps.end(now, hurried or self._lost)
        self._ending = True

    def _end_with_the_failed_one(self, now: float) -> None:
        self._ask_for_stacks()
        self._set_deadline(now + self._grace, "another rank had failed")

    def _ask_for_stacks(self) -> None:
        """Where each rank is, once: it tells who waits for whom."""
        if not self._stacks_asked:
            self.steps.signal(STACKS_SIGNAL)
            self._stacks_asked = True

    def _set_deadline(self, at: float, reason: str) -> None:
        """The earliest counts."""
        if self._deadline is None or at < self._deadline.at:
            self._deadline = Deadline(at, reason)

    @staticmethod
    def _waited(error: RankError | None) -> bool:
        return error is not None and error.waited

    def _complain(self, part: Callable[[float], None], why: str) -> None:
        """Once for each new reason: this is tried again every second."""
        name = getattr(part, "__name__", "")
        if self._complaints.get(name) != why:
            self._complaints[name] = why
            print(f"the watch over the steps tries again: {why}", file=sys.stderr)
